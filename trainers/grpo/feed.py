"""Prompts on their way to the trainer: issued to rollout actors, rolled out, claimed; replaced where lost or of no use.

    position --issue--> rollout actor --put--> ready --claim--> trained on
                 ^          |  died              |  too old, or no signal (dynamic sampling)
                 +----------+--------------------+  again, or another prompt instead

stage       waits for                              unblocked by
claim       groups, by the task's sampler          the commit of the last one, or a rollout that failed
drain       all rollouts that are under way        their last group being put
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS, Span
from ...actors.rewards.rubric import reward_tag
from ...actors.rollout.prompts import base36, row_key
from ...actors.rollout.report import RolloutReport
from ...dataplane.errors import ClaimTimeout, KeysNotFound
from ...dataplane.meta import POSITION, KVBatchMeta
from ..cluster import actor_specs
from ..cluster.actor_specs import TASK
from ..cluster.handles import Call, Peer, PeerFailed, ended, gather_each
from ..observe.data_plane_watch import Busy
from . import steps as grpo
from .steps import Run, State

# ---------------- Groups as the feed sees them, by key and tag: their place in the prompt stream, and whether they
# have a signal.

ALIKE = 1e-6
"""Rewards of a group that differ by less give no signal."""


def flat_groups(meta: KVBatchMeta, components: Sequence[tuple[str, float]]) -> list[int]:
    """Numbers of the groups whose valid rows all have the same raw reward (the sum of `components`, (name, weight)
    each), or of which fewer than two are valid; in the receipt's order."""
    raw = np.zeros(len(meta))
    for name, weight in components:
        raw += weight * meta.tags[reward_tag(name)]
    valid = meta.tags["valid"] > 0
    flat = []
    for group in dict.fromkeys(meta.groups.tolist()):
        rewards = raw[(meta.groups == group) & valid]
        if len(rewards) < 2 or np.ptp(rewards) < ALIKE:
            flat.append(group)
    return flat


_log = logging.getLogger(__name__)
PARTITION = "train"
"""Of the data plane, in which rollouts and training meet."""
LOOK_AFTER_S = 1.0
"""While groups are waited for, how often the rollouts that bring them are looked after."""


class TooManyFailedRows(RuntimeError):
    """More rewards raised in one rollout call than `reward.max_error_share` allows."""


@dataclass(slots=True)
class FeedTally:
    """What happened to groups in one step."""

    reports: list[RolloutReport] = field(default_factory=list)
    """Of the rollout calls that ended in it."""
    dropped: int = 0
    """Groups without a signal, cleared."""
    stale: int = 0
    """Groups too old, cleared."""
    reissued: int = 0
    """Groups that a dead rollout actor had not put."""
    surplus: int = 0
    """Groups of oversampling that were not needed."""
    generated: list[Busy] = field(default_factory=list)
    """When rollout actors generated: calls that ended in the step, and those that are under way."""
    since_s: float = 0.0
    """`time.monotonic` up to which earlier steps' calls generated."""


@dataclass(slots=True)
class _Issue:
    """A rollout call under way."""

    call: Call
    positions: list[int]
    version: int
    """That was served when it was issued."""
    fresh: bool
    """Whether its groups are generated even if they were finished before."""
    ended: bool = False
    """Whether its actor was killed, as it did not answer in time."""


class Feed:
    """The driver's side of all rollouts of a run. Keeps `state.position` and `state.outstanding`."""

    def __init__(self, run: Run, state: State, partition: str = PARTITION) -> None:
        """Registers `partition`, which no other feed has had. Prompts that a checkpoint says were on their way are the
        first to be issued."""
        algorithm = run.config.algorithm
        self._run = run
        self._state = state
        self._partition = partition
        task = actor_specs.task(run.config, state.position, state.outstanding)
        run.client.register(partition, ROLLOUT_SCHEMA, [task], group_size=algorithm.group_size)
        self._next = state.position
        self._again = deque((position, False) for position in state.outstanding)
        """(position, fresh): to be issued before new ones; fresh: generate it even if it was finished before."""
        self._on_way: dict[int, _Issue] = {}
        """The call that rolls a prompt out; of those neither claimed nor given up."""
        self._claimed: set[int] = set()
        """In the step that is open."""
        self._issues: list[_Issue] = []
        self._staleness = algorithm.max_staleness if algorithm.mode == "async" else 0
        self._overtaking = algorithm.mode == "async" and actor_specs.sampler(run.config) != "in_order"
        """Whether a group can grow too old: in the prompts' order none does, as rollouts are admitted in time."""
        self._components = actor_specs.signal_terms(run.config)
        self._tally = FeedTally()

    # ---------------------------------------------------------------- out

    def top_up(self) -> None:
        """Issue all prompts that may be under way now: those of the open step, and in `async` of as many later ones as
        `max_staleness` allows. A step's prompts are then at most so many versions older than what it trains, as they
        come in order, or are too old and cleared."""
        self._look_after(0.0)  # an actor whose call has ended has its hands free
        self._fill(math.ceil(self._admitted * self._run.config.algorithm.dynamic_sampling.oversample))

    @property
    def in_flight(self) -> int:
        """Groups issued, and neither claimed nor given up."""
        return len(self._on_way)

    def drain(self) -> None:
        """Wait until all that was issued is put; who does not answer in time is replaced. Raises PeerFailed,
        TooManyFailedRows."""
        bound_s = self._run.config.resources.stage_timeout_s
        with self._run.stage("rollout"):
            while self._issues:
                if not self._look_after(bound_s) and not self._end_stuck(bound_s):
                    late = ", ".join(str(issue.call.peer.info) for issue in self._issues)
                    raise PeerFailed(f"rollout: no answer within {bound_s:g} s from {late}")

    def settle(self) -> FeedTally:
        """The open step is trained on: its groups are through. Returns what happened to groups in it."""
        self._look_after(0.0)
        self._claimed.clear()
        self._state.position = self._next
        self._state.outstanding = sorted([*self._on_way, *(position for position, _ in self._again)])
        tally, self._tally = self._tally, FeedTally()
        self._tally.since_s = max([tally.since_s, *(busy.end_s for busy in tally.generated)])
        tally.generated += [self._busy(issue, math.inf) for issue in self._issues]
        return tally

    def give_up(self) -> None:
        """No step will be finished any more: wait for what is under way, so that the journal has it, and clear all
        rows. Raises PeerFailed, TooManyFailedRows."""
        self._run.client.clear(self._partition)  # puts may be waiting for room
        self.drain()
        self._run.client.clear(self._partition)

    # ---------------------------------------------------------------- in

    def claim(self, count: int) -> KVBatchMeta:
        """Lease `count` whole groups for the open step, their rows in the order of their prompts (so that a step does
        not depend on which actor put first).

        With dynamic sampling those without a signal are cleared, and other prompts issued instead, up to
        `max_factor`. Waits up to resources.stage_timeout_s for each claim. Raises PeerFailed, ClaimTimeout,
        TooManyFailedRows.
        """
        parts, wanted = [], count
        while wanted:
            meta = self._claim(wanted)
            useful = self._useful(meta)
            if not useful.all():
                self._drop(meta.select(np.flatnonzero(~useful)))
                meta = meta.select(np.flatnonzero(useful))
            if len(meta):
                parts.append(meta)
                wanted -= len(meta) // self._group_size
                self._take(meta)
            self._fill(self._admitted)
        meta = parts[0].concat(*parts[1:])
        return meta.select(np.argsort(meta.tags[POSITION], kind="stable"))  # groups are put and claimed by sample

    def give_up_surplus(self) -> None:
        """End the rollouts that are still under way and clear what they put: the step has its groups.

        Raises PeerFailed, TooManyFailedRows.
        """
        if not self._on_way:
            return
        self._tally.surplus += len(self._on_way)
        self._on_way.clear()
        peers = dict.fromkeys(issue.call.peer for issue in self._issues)
        gather_each(
            [peer.call("end_rollouts") for peer in peers], "surplus", self._run.config.resources.stage_timeout_s
        )
        self.drain()  # says who died
        with self._run.stage("surplus"):
            self._run.client.clear_stale(
                self._partition, TASK, TRAIN_FIELDS, self._state.version + 1, whole_groups=True
            )

    # ---------------------------------------------------------------- issue

    @property
    def _oldest(self) -> int:
        """Version of the oldest rows that may be trained on now."""
        return self._state.version - self._staleness

    @property
    def _admitted(self) -> int:
        """Groups of the open step, and of those that may be ahead of it."""
        algorithm = self._run.config.algorithm
        return min(1 + self._staleness, algorithm.steps - self._state.step) * algorithm.prompts_per_step

    @property
    def _group_size(self) -> int:
        return self._run.config.algorithm.group_size

    def _fill(self, groups: int) -> None:
        """Issue prompts until so many groups are claimed by the open step, or on their way and can still be trained on:
        first those that are to be issued again, then new ones."""
        oldest = self._oldest
        there = len(self._claimed) + sum(issue.version >= oldest for issue in self._on_way.values())
        chosen: dict[bool, list[int]] = {False: [], True: []}
        for _ in range(groups - there):
            if self._again:
                position, fresh = self._again.popleft()
            else:
                position, fresh = self._next, False
                self._next += 1
            chosen[fresh].append(position)
        for fresh, positions in chosen.items():
            self._issue(positions, fresh)

    def _issue(self, positions: Sequence[int], fresh: bool) -> None:
        """Have prompts rolled out, each by the actor that has the fewest on its hands."""
        run = self._run
        peers = run.active_rollouts if positions else []
        hands: list[list[int]] = [[] for _ in peers]
        loads = [(self._load(peer), number) for number, peer in enumerate(peers)]
        heapq.heapify(loads)
        for position in positions:
            load, number = loads[0]
            heapq.heapreplace(loads, (load + 1, number))
            hands[number].append(position)
        for peer, hand in zip(peers, hands, strict=True):
            if hand:
                call = peer.call("rollout", hand, self._partition, run.sampling, fresh, run.tracer.awaited)
                issue = _Issue(call, hand, self._state.version, fresh)
                self._issues.append(issue)
                self._on_way.update(dict.fromkeys(hand, issue))

    def _load(self, peer: Peer) -> int:
        mine = [issue for issue in self._issues if issue.call.peer is peer]
        return sum(self._on_way.get(position) is issue for issue in mine for position in issue.positions)

    # ---------------------------------------------------------------- look after

    def _look_after(self, timeout_s: float) -> bool:
        """Take the answers of calls that have ended, waiting for the first; whether there was one."""
        outcomes = ended([issue.call for issue in self._issues], "rollout", timeout_s)
        for call, outcome in outcomes:
            issue = next(issue for issue in self._issues if issue.call is call)
            self._issues.remove(issue)
            if isinstance(outcome, PeerFailed):
                self._replace(issue, outcome)
            else:
                self._report(issue, outcome)
        return bool(outcomes)

    def _end_stuck(self, bound_s: float) -> bool:
        """Kill actors that have not answered a call for `bound_s`: it ends then as that of one that died. Whether there
        were any."""
        stuck = [issue for issue in self._issues if issue.call.started < time.monotonic() - bound_s and not issue.ended]
        for issue in stuck:
            issue.ended = True
            _log.warning("stuck: no answer within %g s from %s: it is ended", bound_s, issue.call.peer.info)
            if issue.call.peer.info.pid == issue.call.pid:  # else another has taken its place
                self._run.actors.end(issue.call.peer)
        return bool(stuck)

    def _report(self, issue: _Issue, report: RolloutReport) -> None:
        run = self._run
        run.tracer.add(issue.call.peer.info.name, report.spans.to_spans())
        for left in report.left_out:
            run.engines.leave_out(run.engines.named(left.name), left.reason)
        if report.failed > run.config.reward.max_error_share * report.rows:
            raise TooManyFailedRows(
                f"rewards failed for {report.failed} of {report.rows} rows of {len(issue.positions)} groups, more than "
                f"reward.max_error_share={run.config.reward.max_error_share:g} allows; the first error was: "
                f"{report.first_error}"
            )
        self._tally.reports.append(report)
        self._tally.generated.append(self._busy(issue, issue.call.started + report.generate_s))

    def _lost(self, issue: _Issue) -> None:
        """A call that tells nothing of itself: that it was under way until now counts all the same, and is traced."""
        taken_s = time.monotonic() - issue.call.started
        self._tally.generated.append(self._busy(issue, issue.call.started + taken_s))
        span = Span(f"generate {issue.positions[0]}-{issue.positions[-1]} lost", time.time() - taken_s, taken_s)
        self._run.tracer.add(issue.call.peer.info.name, (span,))

    def _busy(self, issue: _Issue, end_s: float) -> Busy:
        return Busy(issue.call.peer.info.name, issue.call.started, end_s)

    def _replace(self, issue: _Issue, failure: PeerFailed) -> None:
        """An actor died: another takes its place, and what it had not put is issued again. Raises `failure` when that
        is not what happened, or too often."""
        if not failure.died:
            raise failure
        self._lost(issue)
        missing = self._not_put([position for position in issue.positions if self._on_way.get(position) is issue])
        grpo.replace_actor(self._run, issue.call.peer, issue.call.pid, failure, self._state.version)
        self._tally.reissued += len(missing)
        self._issue(missing, issue.fresh)

    def _not_put(self, positions: Iterable[int]) -> list[int]:
        """Those of `positions` whose groups are not in the data plane (a group is put as a whole)."""
        keys = {row_key(base36(position), 0): position for position in positions}
        missing: list[int] = []
        while keys:
            try:
                self._run.client.lookup(self._partition, list(keys), TRAIN_FIELDS[:1])
                break
            except KeysNotFound as error:  # names some of them
                missing += [keys.pop(key) for key in error.keys]
        return sorted(missing)

    # ---------------------------------------------------------------- claim

    def _claim(self, count: int) -> KVBatchMeta:
        run = self._run
        bound_s = run.config.resources.stage_timeout_s
        deadline = time.monotonic() + bound_s
        with run.stage("claim"):
            while True:
                if self._overtaking:
                    self._clear_stale()
                    self._fill(self._admitted)
                left = max(0.0, deadline - time.monotonic())
                try:
                    return run.client.claim(
                        self._partition, TASK, TRAIN_FIELDS, count * self._group_size, whole_groups=True,
                        min_version=self._oldest if self._overtaking else None, timeout_s=min(left, LOOK_AFTER_S),
                    )  # fmt: skip
                except ClaimTimeout:
                    replaced = self._tally.reissued
                    self._look_after(0.0)
                    if self._tally.reissued > replaced:
                        deadline = time.monotonic() + bound_s
                    elif left <= LOOK_AFTER_S:
                        if not self._end_stuck(bound_s):
                            raise
                        deadline = time.monotonic() + bound_s

    def _clear_stale(self) -> None:
        """Clear groups that are too old; roll them out again, or other prompts instead."""
        run = self._run
        keys = set(run.client.clear_stale(self._partition, TASK, TRAIN_FIELDS, self._oldest, whole_groups=True))
        if not keys:
            return
        positions = sorted(position for position in self._on_way if row_key(base36(position), 0) in keys)
        for position in positions:
            del self._on_way[position]
        self._tally.stale += len(positions)
        if run.config.algorithm.stale_groups == "requeue":
            self._again.extend((position, True) for position in positions)

    def _useful(self, meta: KVBatchMeta) -> np.ndarray:
        """bool `[N]`: rows to train on; without dynamic sampling all are. Of groups without a signal, all rows are not,
        as long as the step may drop groups."""
        keep = np.ones(len(meta), dtype=bool)
        dynamic = self._run.config.algorithm.dynamic_sampling
        if not dynamic.enabled:
            return keep
        left = int((dynamic.max_factor - 1.0) * self._run.config.algorithm.prompts_per_step) - self._tally.dropped
        for group in flat_groups(meta, self._components)[: max(0, left)]:
            keep &= meta.groups != group
        return keep

    def _drop(self, meta: KVBatchMeta) -> None:
        positions = set(meta.tags[POSITION].tolist())
        grpo.retire(self._run, meta)
        for position in positions:
            del self._on_way[position]
        self._tally.dropped += len(positions)

    def _take(self, meta: KVBatchMeta) -> None:
        for position in meta.tags[POSITION].tolist():
            self._on_way.pop(position, None)
            self._claimed.add(position)
