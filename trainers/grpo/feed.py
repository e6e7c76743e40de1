"""Issues prompts to rollout actors, claims finished groups for the trainer, and reissues lost prompts.

    position --issue--> rollout actor --put--> ready --claim--> trained on
                 ^          |  died              |  too old, or no signal (dynamic sampling)
                 +----------+--------------------+  the same prompt again, or another one

stage       waits for                              unblocked by
claim       groups, in the sampler's order         the last group being put, or a rollout that failed
drain       all rollouts in flight                 their last group being put

The two waits last for as long as rollout actors make progress. An actor without progress for resources.stage_timeout_s
is killed and replaced.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...actors.protocols import TRAIN_FIELDS, Span, row_schema
from ...actors.rollout.prompts import base36, row_key
from ...actors.rollout.results import RolloutReport
from ...actors.rollout.rows import RouteCounts
from ...codecs.schema import Field
from ...codecs.tokens.masks import MASKS
from ...codecs.tokens.routes import ROUTES
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.directory.samplers import TaskConfig
from ...dataplane.errors import ClaimTimeout, KeysNotFound, LeaseLost, StoreLost
from ...dataplane.meta import POSITION, KVBatchMeta
from ..base_model.prepare import route_spec
from ..cluster.calls import ActorFailed, Call
from ..cluster.handles import RolloutHandle
from ..cluster.rollout_specs import sampling
from ..config.config import Config
from ..observe.data_plane_watch import Busy
from .checkpoints import State
from .pool_demand import Demand
from .rollouts import FeedObserver, FeedTally, Rollouts
from .row_tags import useful_rows
from .stages import Stages

PARTITION = "train"
"""Name of the partition (a named set of rows in the data plane) that rollouts write to and training reads from."""
TASK = "train"
"""Name of the data plane's task (a named consumer of rows) through which the driver claims rows for training."""
LOOK_AFTER_S = 1.0
"""Seconds between two checks on the rollout calls during a wait for groups."""
NAMED = 5
"""Largest number of unfinished prompts of a stuck actor that a message names."""


def train_task(sampler: str, options: dict[str, Any], next_prompt: int, outstanding: Sequence[int]) -> TaskConfig:
    """Return the settings of the train task, the data plane's consumer through which the driver claims rows.

    next_prompt: position in the prompt stream of the first prompt that was never issued. outstanding: earlier positions
    whose groups were not trained on yet.
    """
    first = min(outstanding, default=next_prompt)
    settled = tuple(sorted(set(range(first, next_prompt)) - set(outstanding)))
    return TaskConfig(TASK, sampler, options, first, settled)


class TooManyFailedRows(RuntimeError):
    """The reward function or the episode failed for more rows of a step than `reward.max_error_share` allows."""


class TooManyMissingRoutes(RuntimeError):
    """More tokens of a step lack the experts that the engine chose than `router_replay` allows."""


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
    """True to generate the groups even if the journal holds them from an earlier rollout."""
    killed_s: float = math.inf
    """Time (`time.monotonic`) at which the actor was killed because it made no progress; infinite if it was not
    killed."""

    def busy_until(self, end_s: float) -> Busy:
        """Return the period in which the actor was busy with the call: from the start of the call to `end_s`."""
        return Busy(self.actor.info.name, self.call.started, end_s)


class Feed:
    """The driver's side of a run's rollouts: issues prompts, claims groups, and replaces dead or stuck actors. Updates
    `state.position` and `state.outstanding`."""

    observers: ClassVar[list[FeedObserver]] = []

    def __init__(
        self,
        config: Config,
        state: State,
        *,
        client: DataPlaneClient,
        rollouts: Rollouts,
        stages: Stages,
        partition: str = PARTITION,
        pictures: Field | None = None,
    ) -> None:
        """Register `partition`, which no other feed may have used, in the data plane. The prompts in
        `state.outstanding`, which were in flight at the checkpoint, are issued first. pictures: see `RunActors`."""
        self._config = config
        self._state = state
        self._client = client
        self._rollouts = rollouts
        self._stages = stages
        self._sampling = sampling(config.rollout, n=config.algorithm.group_size, seed=config.run.seed)
        self._partition = partition
        sampler = config.resolved_sampler
        task = train_task(sampler, config.algorithm.sampler_options, state.position, state.outstanding)
        routes = route_spec(config.router_replay, config.model)
        client.register(
            partition,
            row_schema(
                routes,
                config.data.columns,
                config.distillation.top_k,
                several_rows=config.environment.max_rows > 1,
                masks=config.rollout.masked,
                images=pictures,
            ),
            [task],
            group_size=config.rows_per_group,
        )
        own = [column.name for column in (*([] if pictures is None else [pictures]), *config.data.columns)]
        masks = [MASKS] if config.rollout.masked else []
        self._fields = (*TRAIN_FIELDS, *([] if routes is None else [ROUTES]), *masks, *own)
        """Fields of the rows that are claimed."""
        self._next = state.position
        self._again = deque((position, False) for position in state.outstanding)
        """Prompts to issue before new ones, as (position in the prompt stream, fresh). If `fresh` is true, the group is
        generated even if the journal holds it."""
        self._in_flight: dict[int, _Issue] = {}
        """Prompts that were issued and whose groups are neither claimed nor given up: position in the prompt stream ->
        rollout call."""
        self._claimed: set[int] = set()
        """Positions in the prompt stream of the groups that the current step has claimed."""
        self._issues: list[_Issue] = []
        self._overlap = config.overlap
        self._overtaking = self._overlap.window > 0 and sampler != "in_order"
        """Whether a group can grow too old because later groups are trained on first. False with the sampler
        `in_order`, where it is enough that prompts are not issued too early."""
        self._components = config.reward.signal_terms
        self._timeout_s = config.resources.stage_timeout_s
        self._tally = FeedTally()
        for observer in self.observers:
            observer.opened(client.plane_id, partition, state.step)

    # ---------------- These methods issue prompts and follow their rollouts.

    def top_up(self) -> None:
        """Issue all prompts that may be in flight now. They are those of the current step and those of the later steps
        in the window, times the oversampling factor. A group is then at most `window` versions older than the policy
        that trains on it. A sampler that reorders groups can exceed that; such groups are cleared."""
        self._look_after(0.0)  # An actor without a call has nothing to do.
        self._fill(math.ceil(self._admitted * self._config.algorithm.dynamic_sampling.oversample))

    @property
    def in_flight(self) -> int:
        """Number of groups whose prompts were issued and that are neither claimed nor dropped."""
        return len(self._in_flight)

    @property
    def reports(self) -> Sequence[RolloutReport]:
        """Reports of the rollout calls that have ended in the current step."""
        return tuple(self._tally.reports)

    def drain(self) -> None:
        """Wait until all rollout calls in flight have ended. The wait has no time limit while their actors make
        progress; an actor that makes none for resources.stage_timeout_s is killed and replaced.

        Raises ActorFailed if an actor failed or could not be replaced, NoEngineLeft if no engine can get requests any
        more, and TooManyFailedRows if too many rows have no reward.
        """
        with self._stages.timed("rollout"):
            self._rollouts.begin_watch()
            while self._issues:
                self._look_after(LOOK_AFTER_S)
                self._look_for_progress()

    def commit(self) -> None:
        """Record in `state` that the current step has been trained on. A resumed run then does not issue its prompts
        again."""
        for observer in self.observers if self._claimed else ():
            observer.committed(self._client.plane_id, self._partition, self._state.step, sorted(self._claimed))
        self._claimed.clear()
        self._state.position = self._next
        self._state.outstanding = sorted([*self._in_flight, *(position for position, _ in self._again)])

    def settle(self) -> FeedTally:
        """Close the current step after training on it, and return the tally of what happened to its groups."""
        self._look_after(0.0)
        self.commit()
        tally, self._tally = self._tally, FeedTally()
        self._tally.since_s = max([tally.since_s, *(busy.end_s for busy in tally.generated)])
        tally.generated += [issue.busy_until(math.inf) for issue in self._issues]
        return tally

    def make_lost_again(self) -> None:
        """Issue the prompts again whose rows were lost with a process of the store. Raises StoreLost if the step
        has claimed some of them."""
        lost = self._forget_lost()
        self._tally.reissued += len(lost)
        self._issue(lost, False)

    def give_up(self) -> None:
        """End the feed without another step. Wait until the rollouts in flight have ended, so that the journal has
        their groups, and clear all rows of the partition. Raises as `drain` does."""
        self._client.clear(self._partition)  # Puts can be waiting for room.
        self.drain()
        self._client.clear(self._partition)

    def withdraw(self, actor: RolloutHandle) -> None:
        """End the rollout calls of `actor`, which leaves the run, and queue the prompts whose groups it has not stored.
        An actor that does not end them in resources.stage_timeout_s, or dies meanwhile, is not replaced."""
        mine = [issue for issue in self._issues if issue.actor is actor]
        if not mine:
            return
        self._rollouts.end_rollouts([actor])
        deadline = time.monotonic() + self._timeout_s
        left = {issue.call: issue for issue in mine}
        while left:
            if time.monotonic() >= deadline:
                self._rollouts.end_stuck(actor, "without ending its rollouts")
                deadline = math.inf
            for call, outcome in self._rollouts.ended(list(left), LOOK_AFTER_S):
                issue = left.pop(call)
                self._issues.remove(issue)
                self._lost(issue) if isinstance(outcome, ActorFailed) else self._report(issue, outcome)
        for issue in mine:
            missing = self._not_put([one for one in issue.positions if self._in_flight.get(one) is issue])
            for position in missing:
                del self._in_flight[position]
            self._again.extend((position, issue.fresh) for position in missing)
            self._tally.reissued += len(missing)

    def free_bytes(self, meta: KVBatchMeta) -> None:
        """Free the bytes of the rows of `meta` in the data plane. No train worker reads these rows again. Rollouts
        that wait for room then continue. The rows themselves stay, leased, until `clear`."""
        with self._stages.timed("clear"):
            self._client.free(meta.partition, meta.keys)

    def clear(self, meta: KVBatchMeta) -> None:
        """Clear the rows of `meta`, which have been trained on, from the data plane. This also ends their leases."""
        with self._stages.timed("clear"):
            self._client.clear(meta.partition, meta.keys)

    def demand(self, client: DataPlaneClient) -> Demand:
        """Return how many groups the run wants now, and how many of these are finished. The wanted groups are those of
        the current step and of the later steps in the window. Another thread than the feed's may call this method.
        client: client of that thread."""
        status = client.task_status(self._partition, TASK, self._fields)
        return Demand(self._admitted, len(self._claimed) + status.ready // self._group_size)

    # ---------------- These methods claim finished groups.

    def claim(self, count: int, at_least: int | None = None) -> KVBatchMeta:
        """Claim up to `count` complete groups for the current step, which leases their rows to the driver. Returns a
        receipt for the rows (their keys and locations, without their content), in the order of their prompts, so that a
        step does not depend on which actor finished first.

        at_least: number of groups for which the claim waits; None waits for `count`.

        With dynamic sampling, groups without a training signal are cleared and other prompts issued in their place, as
        far as `max_factor` allows. Waits for as long as rollout actors make progress, or up to
        resources.stage_timeout_s if no rollout is in flight; then raises ClaimTimeout. Raises ActorFailed, NoEngineLeft
        and TooManyFailedRows as `drain` does, and LeaseLost if it receives rows that the current step has claimed
        before.
        """
        parts, wanted, needed = [], count, count if at_least is None else at_least
        while needed > 0:
            meta = self._claim(wanted, needed)
            self._refuse_held(meta)
            useful = self._useful(meta)
            if not useful.all():
                self._drop(meta.select(np.flatnonzero(~useful)))
                meta = meta.select(np.flatnonzero(useful))
            if len(meta):
                parts.append(meta)
                wanted -= len(meta) // self._group_size
                needed -= len(meta) // self._group_size
                self._take(meta)
            self._fill(self._admitted)
        meta = parts[0].concat(*parts[1:])
        return meta.select(np.argsort(meta.tags[POSITION], kind="stable"))  # Groups are put and claimed by sample.

    def give_up_surplus(self) -> None:
        """End the rollouts in flight and clear their groups, because the current step has all groups that it needs.
        Raises as `drain` does."""
        if not self._in_flight:
            return
        self._tally.surplus += len(self._in_flight)
        self._in_flight.clear()
        self._rollouts.end_rollouts(dict.fromkeys(issue.actor for issue in self._issues))
        self.drain()  # This wait also notices actors that died.
        with self._stages.timed("surplus"):
            self._client.clear_stale(
                self._partition, TASK, TRAIN_FIELDS, self._state.version + 1, whole_groups=self._whole_groups
            )

    # ---------------- These private methods issue prompts.

    @property
    def _oldest(self) -> int:
        """Oldest policy version whose rows may be trained on now."""
        return self._overlap.oldest(self._state.version)

    @property
    def _admitted(self) -> int:
        """Largest number of groups that may be claimed or in flight now."""
        return self._overlap.admitted(self._config.algorithm.steps - self._state.step, len(self._claimed))

    @property
    def _whole_groups(self) -> bool:
        """True if claims name groups; in a partition whose groups are single rows, rows are claimed."""
        return self._group_size > 1

    @property
    def _group_size(self) -> int:
        return self._config.rows_per_group

    def _fill(self, groups: int) -> None:
        """Issue prompts until `groups` groups are claimed or in flight. Those in flight must be young enough to be
        trained on. Prompts that have to be issued again come first, then new ones."""
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

    # ---------------- These private methods watch rollout calls and actors.

    def _look_after(self, timeout_s: float) -> None:
        """Handle the rollout calls that have ended, and replace actors that died. Their reports go to the step's tally
        and to the trace. Waits up to `timeout_s` for the first call to end."""
        outcomes = self._rollouts.ended([issue.call for issue in self._issues], timeout_s)
        for call, outcome in outcomes:
            issue = next(issue for issue in self._issues if issue.call is call)
            self._issues.remove(issue)
            if isinstance(outcome, ActorFailed):
                self._replace(issue, outcome)
            else:
                self._report(issue, outcome)
        if outcomes:
            self._stages.report_progress()

    def _look_for_progress(self) -> bool:
        """Kill the actors that have made no progress for resources.stage_timeout_s. Their calls then fail like those of
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
                if issue.actor.info.pid == issue.call.pid:  # Another process can have replaced the actor's.
                    left = self._not_put([one for one in issue.positions if self._in_flight.get(one) is issue])
                    prompts = f"{', '.join(map(str, left[:NAMED]))}{', ...' if len(left) > NAMED else ''}"
                    self._rollouts.end_stuck(
                        issue.actor, f"without a token, a group or an answer (unfinished: the prompts at {prompts})"
                    )
        if got_on:
            self._stages.report_progress()
        return got_on

    def _report(self, issue: _Issue, report: RolloutReport) -> None:
        self._stages.tracer.add(issue.actor.info.name, report.spans.to_spans())
        for left in report.left_out:
            self._rollouts.exclude(left.name, left.reason, issue.call.started)
        self._tally.reports.append(report)
        self._tally.generated.append(issue.busy_until(issue.call.started + report.generate_s))
        self._expect_few_errors()
        self._expect_routes()

    def _expect_few_errors(self) -> None:
        """Raise TooManyFailedRows if the share of failed rows in the current step exceeds reward.max_error_share. The
        share refers to the rows reported so far or to the rows of a full step, whichever number is larger. Rows that
        failed and have the reward 0 count too, except those that exceeded a limit, which a policy can do in each."""
        reports, share = self._tally.reports, self._config.reward.max_error_share
        treatments = self._config.environment.on_failure.treatments
        zeroed = [kind for kind, treatment in treatments.items() if treatment == "zero" and kind != "limit"]
        failed = sum(report.failed + sum(report.failures.get(kind, 0) for kind in zeroed) for report in reports)
        rows = max(self._config.rows_per_step, sum(report.rows for report in reports))
        if failed > share * rows:
            first = next(report.first_error for report in reports if report.first_error)
            raise TooManyFailedRows(
                f"the reward function or the episode failed for {failed} of {rows} rows of a step, more than "
                f"reward.max_error_share={share:g} allows; the first error was: {first}"
            )

    def _expect_routes(self) -> None:
        """Raise TooManyMissingRoutes if more tokens of the current step lack a route than `router_replay` allows. The
        share refers to the tokens reported so far, scaled up if they are of fewer rows than a full step has."""
        routes = sum((report.routes for report in self._tally.reports), RouteCounts())
        config = self._config.router_replay
        allowed = 0.0 if config.missing == "error" else config.max_missing_share
        rows = sum(report.rows for report in self._tally.reports)
        step = max(1.0, self._config.rows_per_step / max(rows, 1))
        if routes.missing > allowed * step * routes.possible:
            key = "missing='error'" if config.missing == "error" else f"max_missing_share={allowed:g}"
            raise TooManyMissingRoutes(
                f"the engines reported no experts for {routes.missing} of {routes.possible} tokens of a step, more "
                f"than router_replay.{key} allows"
            )

    def _lost(self, issue: _Issue) -> None:
        """Add a rollout call that will never report, because its actor died, to the step's tally and to the trace. The
        actor counts as busy with the call until now."""
        taken_s = time.monotonic() - issue.call.started
        self._tally.generated.append(issue.busy_until(issue.call.started + taken_s))
        span = Span(f"generate {issue.positions[0]}-{issue.positions[-1]} lost", time.time() - taken_s, taken_s)
        self._stages.tracer.add(issue.actor.info.name, (span,))

    def _replace(self, issue: _Issue, failure: ActorFailed) -> None:
        """Replace an actor that died, and reissue the prompts of its call whose groups it had not stored yet.
        Raises `failure` if the actor did not die or no more actors may be replaced. An actor that only waited in vain
        for an engine stays, if an engine was replaced since."""
        if not failure.died and not self._rollouts.may_repeat(failure, issue.call.started, self._state.version):
            raise failure
        self._lost(issue)
        lost = self._forget_lost()  # A storage unit can have ended with the actor's host.
        missing = self._not_put([position for position in issue.positions if self._in_flight.get(position) is issue])
        if failure.died:
            self._rollouts.replace(issue.actor, issue.call.pid, failure, self._state.version)
        self._tally.reissued += len(missing) + len(lost)
        self._issue(missing, issue.fresh)
        self._issue(lost, False)

    def _forget_lost(self) -> list[int]:
        """Remove the rows that were lost with a process of the store from the data plane. Returns the positions of
        their prompts, which must be issued again. Raises StoreLost if the current step has claimed some of them,
        because its train workers would read them."""
        keys = set(self._client.forget_unit(*self._rollouts.lost_nodes()).get(self._partition, ()))
        lost = {position for position in (*self._in_flight, *self._claimed) if row_key(base36(position), 0) in keys}
        if held := lost & self._claimed:
            what = f"the rows of {len(held)} group(s) of the current step were lost with a process of the store"
            raise StoreLost(what, op="claim", partition=self._partition, keys=sorted(keys))
        for position in lost:
            del self._in_flight[position]
        return sorted(lost)

    def _not_put(self, positions: Iterable[int]) -> list[int]:
        """Return those of `positions` (in the prompt stream) whose groups are not in the data plane. Looks up only one
        row of each group, because all rows of a group are stored together."""
        keys = {row_key(base36(position), 0): position for position in positions}
        missing: list[int] = []
        while keys:
            try:
                self._client.lookup(self._partition, list(keys), TRAIN_FIELDS[:1])
                break
            except KeysNotFound as error:  # The error names only some of the missing rows.
                missing += [keys.pop(key) for key in error.keys]
        return sorted(missing)

    # ---------------- These private methods claim groups.

    def _claim(self, count: int, at_least: int) -> KVBatchMeta:
        """Claim between `at_least` and `count` groups, waiting as `claim` says."""
        deadline = time.monotonic() + self._timeout_s
        with self._stages.timed("claim"):
            self._rollouts.begin_watch()
            while True:
                if self._overtaking:
                    self._clear_stale()
                    self._fill(self._admitted)
                left_s = max(0.0, deadline - time.monotonic())
                # While calls are in flight, the deadline does not count: each call makes progress, ends, or belongs to
                # a stuck actor, which `_look_after` kills.
                wait_s = LOOK_AFTER_S if self._issues else min(left_s, LOOK_AFTER_S)
                try:
                    return self._client.claim(
                        self._partition, TASK, self._fields, count * self._group_size,
                        at_least=at_least * self._group_size, whole_groups=self._whole_groups,
                        min_version=self._oldest if self._overtaking else None, timeout_s=wait_s,
                    )  # fmt: skip
                except ClaimTimeout:
                    reissued = self._tally.reissued
                    if self._client.status(self._partition).lost_rows:
                        self.make_lost_again()
                    self._look_after(0.0)
                    if self._look_for_progress() or self._tally.reissued > reissued:
                        deadline = time.monotonic() + self._timeout_s
                    elif left_s <= LOOK_AFTER_S and not self._issues:
                        raise

    def _clear_stale(self) -> None:
        """Clear groups that are too old from the data plane. If `algorithm.stale_groups` is `requeue`, their prompts
        are queued to be issued again; otherwise other prompts take their place."""
        keys = set(
            self._client.clear_stale(self._partition, TASK, TRAIN_FIELDS, self._oldest, whole_groups=self._whole_groups)
        )
        if not keys:
            return
        positions = sorted(position for position in self._in_flight if row_key(base36(position), 0) in keys)
        for position in positions:
            del self._in_flight[position]
        self._tally.stale += len(positions)
        if self._overlap.stale == "requeue":
            self._again.extend((position, True) for position in positions)

    def _useful(self, meta: KVBatchMeta) -> np.ndarray:
        """Return which rows to train on, bool `[N]`. With dynamic sampling, rows of groups without a training signal
        are left out, until the step has dropped as many groups as `max_factor` allows."""
        dynamic = self._config.algorithm.dynamic_sampling
        if not dynamic.enabled:
            return np.ones(len(meta), dtype=bool)
        left = int((dynamic.max_factor - 1.0) * self._config.algorithm.prompts_per_step) - self._tally.dropped
        return useful_rows(meta, self._components, left)

    def _drop(self, meta: KVBatchMeta) -> None:
        """Clear claimed groups that have no training signal from the data plane, and count them as dropped."""
        positions = set(meta.tags[POSITION].tolist())
        self.clear(meta)
        for position in positions:
            del self._in_flight[position]
        self._tally.dropped += len(positions)

    def _refuse_held(self, meta: KVBatchMeta) -> None:
        """Raise LeaseLost if the current step has claimed some of these rows before. The step must not train on them
        twice."""
        held = np.isin(meta.tags[POSITION], list(self._claimed))
        if held.any():
            keys = meta.select(np.flatnonzero(held)).keys
            raise LeaseLost(
                f"{len(keys)} of {len(meta)} rows already belong to the open step: their lease has run out, as "
                f"this process could not renew it for dataplane.lease_s={self._config.dataplane.lease_s:g} s",
                op="claim",
                partition=meta.partition,
                keys=keys,
            )

    def _take(self, meta: KVBatchMeta) -> None:
        for position in meta.tags[POSITION].tolist():
            self._in_flight.pop(position, None)
            self._claimed.add(position)
