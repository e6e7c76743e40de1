"""Issues prompts to rollout actors and claims finished groups for the trainer; prompts that got lost are issued again.

    position --issue--> rollout actor --put--> ready --claim--> trained on
                 ^          |  died              |  too old, or no signal (dynamic sampling)
                 +----------+--------------------+  the same prompt again, or another one

stage       waits for                              unblocked by
claim       groups, by the task's sampler          the commit of the last one, or a rollout that failed
drain       all rollouts in flight                 their last group being put

Both waits last for as long as rollout actors make progress. An actor that makes none for resources.stage_timeout_s is
killed and replaced.
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
"""Smallest spread (largest minus smallest reward) at which a group has a training signal."""


def flat_groups(meta: KVBatchMeta, components: Sequence[tuple[str, float]]) -> list[int]:
    """Return the numbers of the groups without a training signal, in the receipt's order: groups whose valid rows all
    have the same raw reward, or that have fewer than two valid rows. components: (name, weight) of each reward that the
    raw reward sums up."""
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
"""Name of the data plane's partition that rollouts write to and training reads from."""
LOOK_AFTER_S = 1.0
"""Seconds between two checks on the rollout calls during a wait for groups."""


class TooManyFailedRows(RuntimeError):
    """The reward function or the episode failed for more rows of a step than `reward.max_error_share` allows."""


class Rollouts(Protocol):
    """The operations on a run's rollout actors and engines that the feed needs; `RolloutPool` implements them."""

    @property
    def active(self) -> Sequence[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        ...

    def ended(
        self, calls: Sequence[Call[RolloutReport]], timeout_s: float
    ) -> list[tuple[Call[RolloutReport], RolloutReport | ActorFailed]]:
        """Return the rollout calls that have ended, with their outcomes. Waits up to `timeout_s` for the first one."""
        ...

    def end_rollouts(self, actors: Iterable[RolloutHandle]) -> None:
        """Ask `actors` to end their rollout calls in flight; each call then returns with the groups that it has
        finished."""
        ...

    def begin_watch(self) -> None:
        """Begin a new wait for rollouts: how long an actor has made no progress is measured from now on."""
        ...

    def look(self, version: int) -> bool:
        """Ask the actors how far they are, without waiting for their answers. Replaces engines that died by others that
        serve the weights of `version`. Returns whether any actor has made progress or all dead engines were replaced.
        Raises NoEngineLeft."""
        ...

    def still_s(self, actor: RolloutHandle) -> float:
        """Return the seconds of the current wait for which `actor` has made no progress."""
        ...

    def leave_out(self, engine: str, reason: str, called_s: float) -> None:
        """Send no more requests to the engine of this name, unless its process was replaced after `called_s`.

        reason: why, for the log and for error messages. called_s: time (`time.monotonic()`) at which the rollout call
        began that found the engine dead or failing.
        """
        ...

    def replace(self, actor: RolloutHandle, pid: int, failure: ActorFailed, version: int) -> None:
        """Replace an actor whose process `pid` died by one that serves `version`; a no-op when that process was
        replaced before. Raises `failure` when no more actors may be replaced."""
        ...


@dataclass(slots=True)
class FeedTally:
    """Counts what happened to the groups of one step."""

    reports: list[RolloutReport] = field(default_factory=list)
    """Reports of the rollout calls that ended in the step."""
    dropped: int = 0
    """Number of groups that were cleared because they had no training signal (dynamic sampling)."""
    stale: int = 0
    """Number of groups that were cleared because they were too old."""
    reissued: int = 0
    """Number of groups that were issued again because their rollout actor died before it put them."""
    surplus: int = 0
    """Number of groups in flight that were given up, because more were issued (oversampling) than the step needed."""
    generated: list[Busy] = field(default_factory=list)
    """Periods in which rollout actors generated: those of calls that ended in the step, and of calls still in
    flight."""
    since_s: float = 0.0
    """`time.monotonic` time at which the last of the calls that earlier steps counted ended."""


@dataclass(slots=True, eq=False)
class _Issue:
    """A rollout call in flight, with the prompts that it rolls out."""

    actor: RolloutHandle
    call: Call[RolloutReport]
    positions: list[int]
    """Positions of the call's prompts in the prompt stream."""
    version: int
    """Policy version that the engines served when the prompts were issued."""
    fresh: bool
    """Whether to generate the groups even if the journal holds them from an earlier rollout."""
    killed_s: float = math.inf
    """`time.monotonic` time at which the actor was killed because it made no progress; infinite when it was not
    killed."""

    def busy_until(self, end_s: float) -> Busy:
        """Return the period in which the actor was busy with the call, up to `end_s`."""
        return Busy(self.actor.info.name, self.call.started, end_s)


class Feed:
    """The driver's side of a run's rollouts: issues prompts, claims finished groups, and replaces actors that died or
    hang. Updates `state.position` and `state.outstanding`."""

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
        """Registers `partition` in the data plane; no other feed may have used it. The prompts in `state.outstanding`,
        which were in flight at the checkpoint, are issued first."""
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
        """Prompts to issue before new ones, as (position, fresh); fresh: generate the group even if the journal holds
        it."""
        self._in_flight: dict[int, _Issue] = {}
        """Position of a prompt -> the call that rolls it out, without the prompts that were claimed or given up."""
        self._claimed: set[int] = set()
        """Positions of the prompts whose groups the open step has claimed."""
        self._issues: list[_Issue] = []
        self._staleness = algorithm.max_staleness if algorithm.mode == "async" else 0
        self._overtaking = algorithm.mode == "async" and actor_specs.sampler(config) != "in_order"
        """Whether a group can grow too old because others overtake it. With the sampler `in_order` none does, because
        prompts are not issued too early."""
        self._components = actor_specs.signal_terms(config)
        self._timeout_s = config.resources.stage_timeout_s
        self._tally = FeedTally()

    # ---------------------------------------------------------------- out

    def top_up(self) -> None:
        """Issue all prompts that may be in flight now: those of the open step and, in `async` mode, those of up to
        `max_staleness` later steps. A group is then at most `max_staleness` versions older than the policy that trains
        on it; one that others have overtaken for too long is cleared."""
        self._look_after(0.0)  # an actor whose call has ended has nothing to do
        self._fill(math.ceil(self._admitted * self._config.algorithm.dynamic_sampling.oversample))

    @property
    def in_flight(self) -> int:
        """Number of groups whose prompts were issued and that are neither claimed nor given up."""
        return len(self._in_flight)

    def drain(self) -> None:
        """Wait until all rollout calls in flight have ended, for as long as their actors make progress; an actor that
        makes none is killed and replaced.

        Raises ActorFailed, NoEngineLeft, TooManyFailedRows.
        """
        with self._stages.timed("rollout"):
            self._rollouts.begin_watch()
            while self._issues:
                self._look_after(LOOK_AFTER_S)
                self._look_for_progress()

    def commit(self) -> None:
        """Record in `state` that the open step was trained on, so that a resume issues its prompts no more."""
        self._claimed.clear()
        self._state.position = self._next
        self._state.outstanding = sorted([*self._in_flight, *(position for position, _ in self._again)])

    def settle(self) -> FeedTally:
        """Close the open step once it was trained on; returns the tally of what happened to its groups."""
        self._look_after(0.0)
        self.commit()
        tally, self._tally = self._tally, FeedTally()
        self._tally.since_s = max([tally.since_s, *(busy.end_s for busy in tally.generated)])
        tally.generated += [issue.busy_until(math.inf) for issue in self._issues]
        return tally

    def give_up(self) -> None:
        """End the feed without another step: wait until the rollouts in flight have ended, so that the journal has
        their groups, and clear all rows of the partition. Raises ActorFailed, NoEngineLeft, TooManyFailedRows."""
        self._client.clear(self._partition)  # puts may be waiting for room
        self.drain()
        self._client.clear(self._partition)

    # ---------------------------------------------------------------- in

    def claim(self, count: int) -> KVBatchMeta:
        """Claim `count` whole groups for the open step and return the receipt of their rows, which are then leased. The
        rows are in the order of their prompts, so that a step does not depend on which actor put first.

        With dynamic sampling, groups without a training signal are cleared and other prompts issued in their place, as
        far as `max_factor` allows. Waits for as long as rollout actors make progress, or up to
        resources.stage_timeout_s when no rollout is in flight. Raises ActorFailed, ClaimTimeout, NoEngineLeft or
        TooManyFailedRows, and LeaseLost when it receives rows that the open step has claimed before.
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
        """End the rollouts that are still in flight and clear their groups, because the step has all the groups that it
        needs.

        Raises ActorFailed, NoEngineLeft, TooManyFailedRows.
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
        """Oldest policy version whose rows may be trained on now."""
        return self._state.version - self._staleness

    @property
    def _admitted(self) -> int:
        """Largest number of groups that may be claimed or in flight now: those of the open step and of the later steps
        that `max_staleness` allows."""
        algorithm = self._config.algorithm
        return min(1 + self._staleness, algorithm.steps - self._state.step) * algorithm.prompts_per_step

    @property
    def _group_size(self) -> int:
        return self._config.algorithm.group_size

    def _fill(self, groups: int) -> None:
        """Issue prompts until `groups` groups are claimed by the open step, or are in flight and still young enough to
        train on. Prompts that have to be issued again come first, then new ones."""
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
        """Send prompts to rollout actors, each to the actor with the fewest prompts in flight. fresh: generate the
        groups even if the journal holds them."""
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
        """Return the number of prompts that `actor` has in flight."""
        mine = [issue for issue in self._issues if issue.actor is actor]
        return sum(self._in_flight.get(position) is issue for issue in mine for position in issue.positions)

    # ---------------------------------------------------------------- look after

    def _look_after(self, timeout_s: float) -> None:
        """Handle the rollout calls that have ended: count and trace their reports, and replace actors that died. Waits
        up to `timeout_s` for the first one."""
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
        """Kill the actors that have made no progress for resources.stage_timeout_s; their calls then fail like those of
        actors that died. Returns whether any actor has made progress or was killed.

        Raises ActorFailed when Ray has still not noticed a kill after another resources.stage_timeout_s.
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
            self._rollouts.leave_out(left.name, left.reason, issue.call.started)
        self._tally.reports.append(report)
        self._tally.generated.append(issue.busy_until(issue.call.started + report.generate_s))
        self._expect_few_errors()

    def _expect_few_errors(self) -> None:
        """Raise TooManyFailedRows when failed rows exceed the share reward.max_error_share of the step's rows: of those
        reported so far, or of a whole step's rows, whichever number is larger."""
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
        """Count and trace a call whose actor died, so that it will never report. The actor counts as busy with it until
        now."""
        taken_s = time.monotonic() - issue.call.started
        self._tally.generated.append(issue.busy_until(issue.call.started + taken_s))
        span = Span(f"generate {issue.positions[0]}-{issue.positions[-1]} lost", time.time() - taken_s, taken_s)
        self._stages.tracer.add(issue.actor.info.name, (span,))

    def _replace(self, issue: _Issue, failure: ActorFailed) -> None:
        """Replace an actor that died, and issue the prompts again whose groups it had not put. Raises `failure` when
        the actor did not die or no more actors may be replaced."""
        if not failure.died:
            raise failure
        self._lost(issue)
        missing = self._not_put([position for position in issue.positions if self._in_flight.get(position) is issue])
        self._rollouts.replace(issue.actor, issue.call.pid, failure, self._state.version)
        self._tally.reissued += len(missing)
        self._issue(missing, issue.fresh)

    def _not_put(self, positions: Iterable[int]) -> list[int]:
        """Return those of `positions` whose groups are not in the data plane. Looks up one row of each, because a group
        is put as a whole."""
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
        """Clear groups that are too old. With `algorithm.stale_groups` at `requeue` their prompts are queued to be
        issued again; else other prompts take their place."""
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
        """Return which rows to train on, bool `[N]`. With dynamic sampling these are the rows of groups with a training
        signal, and all others too once the step may drop no more groups."""
        keep = np.ones(len(meta), dtype=bool)
        dynamic = self._config.algorithm.dynamic_sampling
        if not dynamic.enabled:
            return keep
        left = int((dynamic.max_factor - 1.0) * self._config.algorithm.prompts_per_step) - self._tally.dropped
        for group in flat_groups(meta, self._components)[: max(0, left)]:
            keep &= meta.groups != group
        return keep

    def _drop(self, meta: KVBatchMeta) -> None:
        """Clear groups that were claimed but have no training signal."""
        positions = set(meta.tags[POSITION].tolist())
        with self._stages.timed("clear"):
            self._client.clear(meta.partition, meta.keys)
        for position in positions:
            del self._in_flight[position]
        self._tally.dropped += len(positions)

    def _refuse_held(self, meta: KVBatchMeta) -> None:
        """Raise LeaseLost when the open step has claimed some of these rows before, because it must not train on them
        twice."""
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
