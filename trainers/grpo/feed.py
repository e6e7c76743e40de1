"""The feed issues prompts to rollout actors and claims finished groups for the trainer; what is lost is issued again.

    position --issue--> rollout actor --put--> ready --claim--> trained on
                 ^          |  died              |  too old, or no signal (dynamic sampling)
                 +----------+--------------------+  the same prompt again, or another one

stage       waits for                              unblocked by
claim       groups, by the task's sampler          the commit of the last one, or a rollout that failed
drain       all rollouts in flight                 their last group being put

Both wait for as long as rollout actors make progress. An actor that makes none for resources.stage_timeout_s is killed
and replaced.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...actors.engines.protocol import SamplingParams
from ...actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS, Span
from ...actors.rewards.rubric import reward_tag
from ...actors.rollout.prompts import base36, row_key
from ...actors.rollout.report import RolloutReport
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.errors import ClaimTimeout, KeysNotFound, LeaseLost
from ...dataplane.meta import POSITION, KVBatchMeta
from ..cluster import actor_specs
from ..cluster.actor_specs import TASK
from ..cluster.calls import ActorFailed, Call
from ..cluster.handles import RolloutHandle
from ..config.config import Config
from ..observe.data_plane_watch import Busy
from .stages import Stages
from .steps import State

# ---------------- What the feed reads from a group's tags: whether it has a signal.

ALIKE = 1e-6
"""Smallest difference between the rewards of a group that gives a signal."""


def flat_groups(meta: KVBatchMeta, components: Sequence[tuple[str, float]]) -> list[int]:
    """Numbers of the groups without a signal, in the receipt's order: their valid rows all have the same raw reward, or
    fewer than two rows are valid. components: (name, weight) of each reward that the raw reward sums up."""
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
"""Partition of the data plane in which rollouts and training meet."""
LOOK_AFTER_S = 1.0
"""Seconds between two looks at the rollout calls while groups are waited for."""


class TooManyFailedRows(RuntimeError):
    """More rewards raised in one step than `reward.max_error_share` allows."""


class Rollouts(Protocol):
    """The calls that the feed makes of the run's rollout actors; `RolloutPool` provides them."""

    @property
    def active(self) -> Sequence[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        ...

    def ended(
        self, calls: Sequence[Call[RolloutReport]], timeout_s: float
    ) -> list[tuple[Call[RolloutReport], RolloutReport | ActorFailed]]:
        """The rollout calls that have ended, with their outcomes; waits up to `timeout_s` for the first one."""
        ...

    def end_rollouts(self, actors: Iterable[RolloutHandle]) -> None:
        """Have the rollout calls in flight return with the groups that are finished by now."""
        ...

    def begin_watch(self) -> None:
        """Begin a wait for rollouts: from now on progress counts."""
        ...

    def look(self, version: int) -> bool:
        """Ask the actors how far they are; returns whether any has got on. Engines that died are replaced by others
        that serve `version`. Waits for no answer. Raises NoEngineLeft."""
        ...

    def still_s(self, actor: RolloutHandle) -> float:
        """Seconds of the present wait in which `actor` has made no progress."""
        ...

    def leave_out(self, engine: str, reason: str) -> None:
        """Give the engine of this name no more requests."""
        ...

    def replace(self, actor: RolloutHandle, pid: int, failure: ActorFailed, version: int) -> None:
        """Replace an actor whose process `pid` died; nothing when it was replaced before. Raises `failure`."""
        ...


@dataclass(slots=True)
class FeedTally:
    """Counts what happened to groups in one step."""

    reports: list[RolloutReport] = field(default_factory=list)
    """Reports of the rollout calls that ended in the step."""
    dropped: int = 0
    """Number of groups that were cleared as they had no signal."""
    stale: int = 0
    """Number of groups that were cleared as they were too old."""
    reissued: int = 0
    """Number of groups that a dead rollout actor had not put."""
    surplus: int = 0
    """Number of groups of oversampling that were not needed."""
    generated: list[Busy] = field(default_factory=list)
    """Times in which rollout actors generated: calls that ended in the step, and calls in flight."""
    since_s: float = 0.0
    """`time.monotonic` up to which earlier steps' calls generated."""


@dataclass(slots=True, eq=False)
class _Issue:
    """A rollout call in flight."""

    actor: RolloutHandle
    call: Call[RolloutReport]
    positions: list[int]
    """Positions of the call's prompts in the prompt stream."""
    version: int
    """Version that was served when the prompts were issued."""
    fresh: bool
    """Whether the groups are generated even if they were finished before."""
    killed_s: float = math.inf
    """`time.monotonic` at which the actor was killed, as it made no progress; infinite when it was not."""

    def busy_until(self, end_s: float) -> Busy:
        """The time in which the actor was busy with the call, up to `end_s`."""
        return Busy(self.actor.info.name, self.call.started, end_s)


class Feed:
    """The driver's side of all rollouts of a run. Keeps `state.position` and `state.outstanding`."""

    def __init__(
        self,
        config: Config,
        state: State,
        *,
        client: DataPlaneClient,
        rollouts: Rollouts,
        stages: Stages,
        sampling: SamplingParams,
        partition: str = PARTITION,
    ) -> None:
        """Registers `partition`, which no other feed has had. Prompts that a checkpoint says were outstanding are the
        first to be issued."""
        algorithm = config.algorithm
        self._config = config
        self._state = state
        self._client = client
        self._rollouts = rollouts
        self._stages = stages
        self._sampling = sampling
        self._partition = partition
        task = actor_specs.task(config, state.position, state.outstanding)
        client.register(partition, ROLLOUT_SCHEMA, [task], group_size=algorithm.group_size)
        self._next = state.position
        self._again = deque((position, False) for position in state.outstanding)
        """Prompts to issue before new ones, (position, fresh) each; fresh: generate it even if the journal has it."""
        self._in_flight: dict[int, _Issue] = {}
        """The call that rolls a prompt out, by position; only prompts that are neither claimed nor given up."""
        self._claimed: set[int] = set()
        """Positions of the prompts that the open step has claimed."""
        self._issues: list[_Issue] = []
        self._staleness = algorithm.max_staleness if algorithm.mode == "async" else 0
        self._overtaking = algorithm.mode == "async" and actor_specs.sampler(config) != "in_order"
        """Whether a group can grow too old: in the prompts' order none does, as rollouts are admitted in time."""
        self._components = actor_specs.signal_terms(config)
        self._timeout_s = config.resources.stage_timeout_s
        self._tally = FeedTally()

    # ---------------------------------------------------------------- out

    def top_up(self) -> None:
        """Issue all prompts that may be in flight now: those of the open step, and in `async` those of as many later
        steps as `max_staleness` allows. A step's groups are then at most so many versions older than what it trains, as
        they come in order, or are too old and cleared."""
        self._look_after(0.0)  # an actor whose call has ended has nothing to do
        self._fill(math.ceil(self._admitted * self._config.algorithm.dynamic_sampling.oversample))

    @property
    def in_flight(self) -> int:
        """Number of groups that were issued and are neither claimed nor given up."""
        return len(self._in_flight)

    def drain(self) -> None:
        """Wait until all that was issued is put, as long as actors make progress; one that makes none is replaced.

        Raises ActorFailed, NoEngineLeft, TooManyFailedRows.
        """
        with self._stages.timed("rollout"):
            self._rollouts.begin_watch()
            while self._issues:
                self._look_after(LOOK_AFTER_S)
                self._look_for_progress()

    def commit(self) -> None:
        """Note in the state that the open step was trained on, and its prompts are done with."""
        self._claimed.clear()
        self._state.position = self._next
        self._state.outstanding = sorted([*self._in_flight, *(position for position, _ in self._again)])

    def settle(self) -> FeedTally:
        """Close the open step, which was trained on; returns what happened to groups in it."""
        self._look_after(0.0)
        self.commit()
        tally, self._tally = self._tally, FeedTally()
        self._tally.since_s = max([tally.since_s, *(busy.end_s for busy in tally.generated)])
        tally.generated += [issue.busy_until(math.inf) for issue in self._issues]
        return tally

    def give_up(self) -> None:
        """End the feed without another step: wait for the rollouts in flight, so that the journal has their groups, and
        clear all rows. Raises ActorFailed, TooManyFailedRows."""
        self._client.clear(self._partition)  # puts may be waiting for room
        self.drain()
        self._client.clear(self._partition)

    # ---------------------------------------------------------------- in

    def claim(self, count: int) -> KVBatchMeta:
        """Lease `count` whole groups for the open step, their rows in the order of their prompts (so that a step does
        not depend on which actor put first).

        With dynamic sampling, groups without a signal are cleared and other prompts issued instead, up to `max_factor`.
        Waits as long as rollout actors make progress, or up to resources.stage_timeout_s for each claim. Raises
        ActorFailed, ClaimTimeout, NoEngineLeft, TooManyFailedRows, and LeaseLost when rows come that the open step has
        claimed before.
        """
        parts, wanted = [], count
        while wanted:
            meta = self._claim(wanted)
            self._refuse_held(meta)
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
        """End the rollouts that are still in flight and clear what they put: the step has its groups.

        Raises ActorFailed, TooManyFailedRows.
        """
        if not self._in_flight:
            return
        self._tally.surplus += len(self._in_flight)
        self._in_flight.clear()
        self._rollouts.end_rollouts(dict.fromkeys(issue.actor for issue in self._issues))
        self.drain()  # notices actors that died
        with self._stages.timed("surplus"):
            self._client.clear_stale(self._partition, TASK, TRAIN_FIELDS, self._state.version + 1, whole_groups=True)

    # ---------------------------------------------------------------- issue

    @property
    def _oldest(self) -> int:
        """Lowest version of the rows that may be trained on now."""
        return self._state.version - self._staleness

    @property
    def _admitted(self) -> int:
        """Number of groups of the open step and of the later steps that may be rolled out now."""
        algorithm = self._config.algorithm
        return min(1 + self._staleness, algorithm.steps - self._state.step) * algorithm.prompts_per_step

    @property
    def _group_size(self) -> int:
        return self._config.algorithm.group_size

    def _fill(self, groups: int) -> None:
        """Issue prompts until so many groups are claimed by the open step, or in flight and can still be trained on:
        first the prompts that are to be issued again, then new ones."""
        oldest = self._oldest
        present = len(self._claimed) + sum(issue.version >= oldest for issue in self._in_flight.values())
        chosen: dict[bool, list[int]] = {False: [], True: []}
        for _ in range(groups - present):
            if self._again:
                position, fresh = self._again.popleft()
            else:
                position, fresh = self._next, False
                self._next += 1
            chosen[fresh].append(position)
        for fresh, positions in chosen.items():
            self._issue(positions, fresh)

    def _issue(self, positions: Sequence[int], fresh: bool) -> None:
        """Have prompts rolled out, each by the actor that has the fewest."""
        actors = self._rollouts.active if positions else []
        shares: list[list[int]] = [[] for _ in actors]
        loads = [(self._load(actor), number) for number, actor in enumerate(actors)]
        heapq.heapify(loads)
        for position in positions:
            load, number = loads[0]
            heapq.heapreplace(loads, (load + 1, number))
            shares[number].append(position)
        traced = self._stages.tracer.awaited
        for actor, share in zip(actors, shares, strict=True):
            if share:
                call = actor.rollout(share, self._partition, self._sampling, fresh, traced)
                issue = _Issue(actor, call, share, self._state.version, fresh)
                self._issues.append(issue)
                self._in_flight.update(dict.fromkeys(share, issue))

    def _load(self, actor: RolloutHandle) -> int:
        """Number of prompts that `actor` has in flight."""
        mine = [issue for issue in self._issues if issue.actor is actor]
        return sum(self._in_flight.get(position) is issue for issue in mine for position in issue.positions)

    # ---------------------------------------------------------------- look after

    def _look_after(self, timeout_s: float) -> None:
        """Take the outcomes of calls that have ended, waiting for the first."""
        outcomes = self._rollouts.ended([issue.call for issue in self._issues], timeout_s)
        for call, outcome in outcomes:
            issue = next(issue for issue in self._issues if issue.call is call)
            self._issues.remove(issue)
            if isinstance(outcome, ActorFailed):
                self._replace(issue, outcome)
            else:
                self._report(issue, outcome)
        if outcomes:
            self._stages.gets_on()

    def _look_for_progress(self) -> bool:
        """Kill the actors that have made no progress for resources.stage_timeout_s, so that their calls end as those of
        actors that died; returns whether any other has made progress, or one was killed.

        Raises ActorFailed when nobody notices that an actor was killed.
        """
        got_on = self._rollouts.look(self._state.version)
        now = time.monotonic()
        for issue in self._issues:
            if now - issue.killed_s >= self._timeout_s:
                raise ActorFailed(
                    f"rollout: {issue.actor.info} made no progress and was killed {now - issue.killed_s:.0f} s ago, "
                    "but Ray has not noticed"
                )
            if issue.killed_s == math.inf and self._rollouts.still_s(issue.actor) >= self._timeout_s:
                issue.killed_s, got_on = now, True
                _log.warning(
                    "stuck: no token, no group and no answer within %g s from %s: it is killed",
                    self._timeout_s, issue.actor.info,
                )  # fmt: skip
                if issue.actor.info.pid == issue.call.pid:  # else another process has taken its place
                    issue.actor.kill()
        if got_on:
            self._stages.gets_on()
        return got_on

    def _report(self, issue: _Issue, report: RolloutReport) -> None:
        self._stages.tracer.add(issue.actor.info.name, report.spans.to_spans())
        for left in report.left_out:
            self._rollouts.leave_out(left.name, left.reason)
        self._tally.reports.append(report)
        self._tally.generated.append(issue.busy_until(issue.call.started + report.generate_s))
        self._expect_few_errors()

    def _expect_few_errors(self) -> None:
        """Raise TooManyFailedRows when more of the step's rows have failed than reward.max_error_share allows: of those
        that its calls reported so far, or of those that a step has, if these are more."""
        reports, share = self._tally.reports, self._config.reward.max_error_share
        failed = sum(report.failed for report in reports)
        rows = max(self._config.rows_per_step, sum(report.rows for report in reports))
        if failed > share * rows:
            first = next(report.first_error for report in reports if report.first_error)
            raise TooManyFailedRows(
                f"the reward function or the episode failed for {failed} of {rows} rows of a step, more than "
                f"reward.max_error_share={share:g} allows; the first error was: {first}"
            )

    def _lost(self, issue: _Issue) -> None:
        """Count and trace a call that will never report: its actor was busy with it until now."""
        taken_s = time.monotonic() - issue.call.started
        self._tally.generated.append(issue.busy_until(issue.call.started + taken_s))
        span = Span(f"generate {issue.positions[0]}-{issue.positions[-1]} lost", time.time() - taken_s, taken_s)
        self._stages.tracer.add(issue.actor.info.name, (span,))

    def _replace(self, issue: _Issue, failure: ActorFailed) -> None:
        """Replace an actor that died and issue again what it had not put. Raises `failure` when it did not die, or when
        no more actors may be replaced."""
        if not failure.died:
            raise failure
        self._lost(issue)
        missing = self._not_put([position for position in issue.positions if self._in_flight.get(position) is issue])
        self._rollouts.replace(issue.actor, issue.call.pid, failure, self._state.version)
        self._tally.reissued += len(missing)
        self._issue(missing, issue.fresh)

    def _not_put(self, positions: Iterable[int]) -> list[int]:
        """The positions whose groups are not in the data plane; a group is put as a whole."""
        keys = {row_key(base36(position), 0): position for position in positions}
        missing: list[int] = []
        while keys:
            try:
                self._client.lookup(self._partition, list(keys), TRAIN_FIELDS[:1])
                break
            except KeysNotFound as error:  # names some of them
                missing += [keys.pop(key) for key in error.keys]
        return sorted(missing)

    # ---------------------------------------------------------------- claim

    def _claim(self, count: int) -> KVBatchMeta:
        deadline = time.monotonic() + self._timeout_s
        with self._stages.timed("claim"):
            self._rollouts.begin_watch()
            while True:
                if self._overtaking:
                    self._clear_stale()
                    self._fill(self._admitted)
                left_s = max(0.0, deadline - time.monotonic())
                # While calls are in flight, they end the wait: each gets on, ends, or is that of a stuck actor.
                wait_s = LOOK_AFTER_S if self._issues else min(left_s, LOOK_AFTER_S)
                try:
                    return self._client.claim(
                        self._partition, TASK, TRAIN_FIELDS, count * self._group_size, whole_groups=True,
                        min_version=self._oldest if self._overtaking else None, timeout_s=wait_s,
                    )  # fmt: skip
                except ClaimTimeout:
                    reissued = self._tally.reissued
                    self._look_after(0.0)
                    if self._look_for_progress() or self._tally.reissued > reissued:
                        deadline = time.monotonic() + self._timeout_s
                    elif left_s <= LOOK_AFTER_S and not self._issues:
                        raise

    def _clear_stale(self) -> None:
        """Clear groups that are too old; their prompts, or others instead, are to be rolled out."""
        keys = set(self._client.clear_stale(self._partition, TASK, TRAIN_FIELDS, self._oldest, whole_groups=True))
        if not keys:
            return
        positions = sorted(position for position in self._in_flight if row_key(base36(position), 0) in keys)
        for position in positions:
            del self._in_flight[position]
        self._tally.stale += len(positions)
        if self._config.algorithm.stale_groups == "requeue":
            self._again.extend((position, True) for position in positions)

    def _useful(self, meta: KVBatchMeta) -> np.ndarray:
        """Which rows to train on, bool `[N]`: with dynamic sampling, those of groups with a signal, and all others too
        once the step may drop no more groups."""
        keep = np.ones(len(meta), dtype=bool)
        dynamic = self._config.algorithm.dynamic_sampling
        if not dynamic.enabled:
            return keep
        left = int((dynamic.max_factor - 1.0) * self._config.algorithm.prompts_per_step) - self._tally.dropped
        for group in flat_groups(meta, self._components)[: max(0, left)]:
            keep &= meta.groups != group
        return keep

    def _drop(self, meta: KVBatchMeta) -> None:
        """Clear claimed groups without a signal."""
        positions = set(meta.tags[POSITION].tolist())
        with self._stages.timed("clear"):
            self._client.clear(meta.partition, meta.keys)
        for position in positions:
            del self._in_flight[position]
        self._tally.dropped += len(positions)

    def _refuse_held(self, meta: KVBatchMeta) -> None:
        """Raise LeaseLost when the open step holds some of these rows already, as it must not train on them twice."""
        held = np.isin(meta.tags[POSITION], list(self._claimed))
        if held.any():
            keys = meta.select(np.flatnonzero(held)).keys
            raise LeaseLost(
                f"{len(keys)} of {len(meta)} rows were claimed by the open step before: their lease has run out, as "
                f"this process could not renew it for dataplane.lease_s={self._config.dataplane.lease_s:g} s",
                op="claim",
                partition=meta.partition,
                keys=keys,
            )

    def _take(self, meta: KVBatchMeta) -> None:
        for position in meta.tags[POSITION].tolist():
            self._in_flight.pop(position, None)
            self._claimed.add(position)
