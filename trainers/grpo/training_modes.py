"""Runs the training steps of a run, in one loop for every `algorithm.mode`.

rollouts, up to `window` versions ahead ---- group ---- group ------- group ---> put one by one
                                               |          |             |
                                             claim -> advantages -> plan -> log-probs -> train -> free, by chunk
                                                                                            |
                                                      optimizer -> sync weights in flight -> clear

stage       waits for                                unblocked by
claim       the next chunk of complete groups        its last group being put, or a rollout that failed
train       all train workers                        the gradients of the chunk
finish      the last chunk                           the optimizer update
sync        all engines serve the new version        every bucket being verified, the engines' pause

The numbers of `Overlap` define a mode. With a window of 0, training is strictly on-policy: after the last claim of a
step nothing is in flight. With a larger window no token of a step's rows is more than `window` versions older than the
policy that is trained on it (`staleness/max`). When groups are trained on in the order of their prompts, this holds
because prompts are not issued too early. Other samplers let groups overtake each other: a group that grows too old is
then cleared, and `algorithm.stale_groups` says whether the same prompt or another one is rolled out in its place. With
chunks smaller than a step, training overlaps with the generation of the step's longest responses. For the same rows the
gradient does not depend on the chunks, because losses are sums that are divided once per update. The bytes of a chunk
go back to the data plane once its gradients are computed, while its rows are cleared with the step, so a store that
holds less than a step suffices.

With `resources.switch_roles`, a step that is trained on as a whole with a window of 0 puts the engines to sleep from
the claim to the sync, and the train workers are offloaded at all other times (see gpu_turns.py). In a run that borrows
its GPUs from a pool, the train workers have theirs from the last claim to the sync (see pool/tenant/).

A wait for rollouts or a validation lasts for as long as actors make progress. Other waits are bounded by
resources.stage_timeout_s, sync.timeout_s or dataplane.timeout_s. An actor that fails ends a wait at once, unless it can
be replaced.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import numpy as np

from ...actors.rollout.results import RolloutReport
from ...actors.train.worker import PREV
from ...actors.train.worker_setup import WorkerReport
from ...dataplane.meta import KVBatchMeta
from ..backends.fsdp.bitwise.conditions import expect_equal
from ..cluster.handles import RolloutHandle
from ..cluster.rollout_specs import EvaluationDefaults, evaluation_plans
from ..config.config import AlgorithmConfig
from ..errors import UserError
from ..losses.config import LOSS_KINDS
from .checkpoints import State
from .evaluation import Evaluations, Goal
from .feed import PARTITION, Feed
from .row_tags import with_advantages
from .run_parts import Run
from .step_metrics import step_metrics, trained_metrics
from .supervised.held_out_loss import HeldOutLoss, supervised_metrics
from .train_workers import TrainWorkers

AfterStep = Callable[[State, dict[str, float]], None]
"""Callback after each step. It receives the run's state and the step's metrics, and logs, saves and shows them."""


MOST_SKIPPED = 10
"""Number of consecutive steps that train nothing after which a run ends with an error."""


@dataclass(slots=True)
class StepTally:
    """Receipts (keys and locations) for the rows of one step, and the train workers' reports about it."""

    started: float
    """`time.perf_counter` time at which the step began."""
    rows: list[KVBatchMeta] = field(default_factory=list)
    """Receipts for the step's rows, one for each chunk (a chunk is the groups that are trained on together)."""
    passes: list[WorkerReport] = field(default_factory=list)
    """Reports of the train workers, ordered by pass (such as log-probs or training), then by rank."""


def open_feed(run: Run, state: State, partition: str = PARTITION) -> Feed:
    """Return a new `Feed`, which issues the run's prompts to rollout actors, starting from the position in `state`."""
    return Feed(
        run.config, state, client=run.client, rollouts=run.rollouts, stages=run.stages, partition=partition,
        pictures=run.actors.pictures,
    )  # fmt: skip


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Context manager that holds back the first SIGINT or SIGTERM until the end of its body. The signal is then handled
    as usual. A second signal is handled at once. Does nothing outside the main thread, and for a signal that Python
    does not handle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def hold(number: int, frame: FrameType | None) -> None:
        handler = before[signal.Signals(number)]
        if held and callable(handler):
            held.clear()
            handler(number, frame)
        else:
            held.append(number)

    handled = [number for number, handler in before.items() if callable(handler)]
    try:
        for number in handled:
            signal.signal(number, hold)
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])
        if held:
            signal.raise_signal(held[0])


class Steps:
    """Begins and ends the training steps of a run, from `state` to the last step. Updates `state`."""

    def __init__(self, run: Run, state: State, after_step: AfterStep) -> None:
        """At step 0, evaluate the initial model and pass the metrics to `after_step`. Nothing is done if all
        evaluations are off or an engine serves a later version."""
        self._run = run
        self._state = state
        self._after_step = after_step
        self._skipped = 0
        """Number of consecutive steps that trained nothing, counted back from the last finished step."""
        config = run.config
        self.first: dict[str, float] = {}
        """Metrics of step 0; empty if nothing was evaluated."""
        self._had_signal = state.step > 0
        """Whether a step has had a signal. An earlier part of a resumed run counts as one that had."""
        self._by_rewards = (
            config.trainer.backend != "scripted"
            and config.loss.kind in LOSS_KINDS
            and config.loss.kl_coef == config.loss.entropy_coef == 0.0
            and not config.distillation.teachers
        )
        """Whether the advantages alone can give the policy a gradient."""
        self._evaluations = HeldOutLoss(run) if config.sft.train else _evaluations(run)
        metrics = self._evaluations.before_first_step(state) if state.step == 0 else {}
        if metrics:
            self.first = {**metrics, "policy/version": float(state.version)}
            after_step(state, self.first)
        run.observers.meter.take()  # Earlier messages do not count in the first step's bytes per row.

    @property
    def go_on(self) -> bool:
        """True if another step follows: steps are left, and validation has not reached its target."""
        return self._state.step < self._run.config.algorithm.steps and not self._evaluations.reached

    def begin(self) -> StepTally:
        """Start timing and tracing the next step; returns its empty tally."""
        self._run.stages.begin_step(self._state.step + 1)
        return StepTally(time.perf_counter())

    def end(self, tally: StepTally, feed: Feed) -> dict[str, float]:
        """Finish the current step: take the optimizer step, sync weights, clear the rows, and report. Due evaluations
        are run, and the metrics are passed to `after_step` and returned. Raises UserError after MOST_SKIPPED
        consecutive steps without an optimizer step."""
        run, state = self._run, self._state
        # Until the update, the workers have the weights that are validated.
        validated = self._evaluations.before_update(state)
        meta = tally.rows[0].concat(*tally.rows[1:])
        with interrupts_held():  # A signal must not prevent a checkpoint of this step, nor its figures.
            state.ahead = True
            tally.passes += run.workers.finish()
            state.step, state.version = state.step + 1, state.version + 1
            feed.commit()
            state.ahead = False
            trained = trained_metrics(run, state.version, tally.passes, meta)
            state.figures = supervised_metrics(trained) if run.config.sft.train else trained
        num_rollouts = len(run.actors.rollouts)
        if run.rollouts.scaler is not None:
            run.rollouts.scaler.end_step(lambda actor: self._withdraw(actor, feed))
        sync = run.rollouts.sync_weights(state.version)
        for engine, spans in sync.spans:
            run.stages.tracer.add(engine, spans)
        feed.clear(meta)
        fed = feed.settle()
        note_failed_rows(run, state.step, fed.reports)
        seconds = time.perf_counter() - tally.started
        metrics = {**step_metrics(run, trained, fed, tally.passes, meta, seconds, sync, num_rollouts), **validated}
        metrics["queue/groups_in_flight"] = float(feed.in_flight)
        if run.config.sft.train:
            metrics = supervised_metrics(metrics)
        metrics |= self._evaluations.after_step(state, last=state.step == run.config.algorithm.steps)
        self._after_step(state, metrics)
        self._stop_if_nothing_is_trained(metrics)
        if run.config.run.bitwise:
            expect_equal(state.step, metrics)
        return metrics

    def _withdraw(self, actor: RolloutHandle, feed: Feed) -> None:
        """Have the work of `actor`, which leaves the run, done by others."""
        self._evaluations.withdraw(actor)
        feed.withdraw(actor)

    def _stop_if_nothing_is_trained(self, metrics: dict[str, float]) -> None:
        """Raise UserError if the last MOST_SKIPPED steps, including this one, trained nothing.

        They had no optimizer step, or no step of the run so far had a group with a signal. After a step with a signal,
        equal rewards can mean that the task is solved, so `step_warnings` only warns of them."""
        skipped = bool(metrics.get("train/skipped"))
        flat = self._by_rewards and metrics.get("reward/flat_groups_share") == 1.0
        self._had_signal |= not (skipped or flat)
        self._skipped = self._skipped + 1 if skipped or (flat and not self._had_signal) else 0
        if self._skipped < MOST_SKIPPED:
            return
        if not skipped:
            raise UserError(
                f"reward/flat_groups_share: no group of {MOST_SKIPPED} steps in a row had a signal, up to step "
                f"{self._state.step}, expected rewards that differ within a group: all advantages were 0 (reward/mean "
                f"is {metrics.get('reward/mean', math.nan):.4g}), so the policy learned nothing"
            )
        rows = metrics.get("train/sequences", 0.0)
        why = (
            f"the gradients of its {rows:.0f} rows are not finite "
            f"(is trainer.lr={self._run.config.trainer.lr:g} too high?)"
            if rows
            else "it had no row to train on (rollout/failed_rows counts those that failed)"
        )
        raise UserError(
            f"train/skipped: {MOST_SKIPPED} steps in a row changed no weight, up to step {self._state.step}, expected "
            f"one that does: {why}"
        )


def _evaluations(run: Run) -> Evaluations:
    config = run.config
    goal = Goal.of(config.validation, config.run, config.figures, config.judged_figure)
    training = EvaluationDefaults(config.rollout, config.data, config.reward, config.run.seed)
    plans = evaluation_plans(training, config.validation, config.evaluation)
    return Evaluations(plans, run.rollouts, run.workers, goal, run.observers.evaluated)


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update of a step."""

    rows: KVBatchMeta
    """Receipt for the rows of its mini-batch."""
    written: bool
    """True if the log-prob columns that the update needs were written to its rows before the step's first update. False
    for the first update itself, whose policy is still the one before the step."""


def deal(meta: KVBatchMeta, *, minibatches: int, epochs: int, seed: int, step: int) -> list[KVBatchMeta]:
    """Deal the rows of a step into mini-batches for every epoch. Returns `epochs` x `minibatches` receipts in the order
    of training.

    Each epoch has every row once. Groups stay whole, and the numbers of groups in the mini-batches of an epoch differ
    by at most one. The assignment of groups to mini-batches is drawn for each epoch and depends only on `seed`, `step`,
    the epoch and the order of groups in `meta`. Rows keep their order within a mini-batch.
    """
    if minibatches == 1:
        return [meta] * epochs
    groups = np.fromiter(dict.fromkeys(meta.groups.tolist()), dtype=np.int64)
    parts = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, step, epoch]).permutation(len(groups))
        for share in np.array_split(order, minibatches):
            parts.append(meta.select(np.flatnonzero(np.isin(meta.groups, groups[share]))))
    return parts


def written_columns(algorithm: AlgorithmConfig, frozen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the log-prob columns that train workers write to the rows of a step with several updates. In every update
    these columns then hold log-probs of the policy before the step. frozen: columns of models that do not change."""
    own = (PREV,) if algorithm.prev_logprobs == "recompute" else ()
    return own + frozen


def train_on_step(run: Run, state: State, meta: KVBatchMeta) -> list[WorkerReport]:
    """Train on all rows of the next step, up to the end of its last update, which `Steps.end` finishes. Returns the
    train workers' reports.

    With several updates, the columns that must not change with the policy are written first. With only one epoch, the
    rows of the first update do not need them, because the pass of that update computes the same values.
    """
    step, algorithm, workers = state.step + 1, run.config.algorithm, run.workers
    meta = with_advantages(run.workers.estimate, meta)
    parts = deal(meta, minibatches=algorithm.minibatches, epochs=algorithm.epochs, seed=run.config.run.seed, step=step)
    first_written = algorithm.epochs > 1
    updates = [Update(part, first_written or number > 0) for number, part in enumerate(parts)]
    columns, reports = written_columns(algorithm, workers.frozen), []
    if columns and len(updates) > 1:
        early = meta if first_written else parts[1].concat(*parts[2:])
        workers.ship_plan(early, step)
        reports += workers.write_logprobs(columns)
    for number, update in enumerate(updates, start=1):
        in_first_epoch = number <= algorithm.minibatches
        workers.ship_plan(update.rows, step, columns if update.written else (), write_samples=in_first_epoch)
        if not update.written:
            reports += workers.write_logprobs(workers.frozen)
        reports += workers.accumulate()
        if number < len(updates):
            reports += finish_update(run.workers, state)
    return reports


def finish_update(workers: TrainWorkers, state: State) -> list[WorkerReport]:
    """Take the optimizer update with the gradients accumulated so far, in the middle of a step. Returns the train
    workers' reports."""
    state.ahead = True
    return workers.finish()


def run_steps(run: Run, state: State, feed: Feed, after_step: AfterStep) -> Generator[dict[str, float], None, None]:
    """Train from `state` to step `algorithm.steps`; updates `state`. Yields the metrics of each finished step, and
    those of step 0 if it has any; training ends early when the caller stops asking for more. If a step fails, its
    failed rows are recorded before the error is raised."""
    steps = Steps(run, state, after_step)
    try:
        if steps.first:
            yield steps.first
        yield from _run_steps(run, state, feed, steps)
    except Exception:
        note_failed_rows(run, state.step + 1, feed.reports)
        raise


def note_failed_rows(run: Run, step: int, reports: Sequence[RolloutReport]) -> None:
    """Record the failed rows of rollout calls that ended in `step`."""
    for report in reports:
        run.observers.reward_errors.note(step, sum(report.failures.values()), report.rows, report.errors)


def _run_steps(run: Run, state: State, feed: Feed, steps: Steps) -> Generator[dict[str, float], None, None]:
    overlap = run.config.overlap
    while steps.go_on:
        tally = steps.begin()
        feed.top_up()
        if overlap.by_chunk:
            _train_by_chunk(run, state, feed, tally)
        else:
            rows = feed.claim(overlap.groups)
            _end_rollouts(run, feed)
            if run.roles.lends:
                _borrow_gpus(run, feed)
            run.roles.to_training()
            tally.rows.append(rows)
            tally.passes += train_on_step(run, state, rows)
        if run.config.run.deterministic:
            feed.drain()  # Then no row has tokens of two versions, and results do not depend on timing.
        yield steps.end(tally, feed)


def _train_by_chunk(run: Run, state: State, feed: Feed, tally: StepTally) -> None:
    """Train on the groups of the next step as they become ready, with one update per mini-batch. Each update takes the
    groups that are ready first. Train workers with borrowed GPUs begin when all groups are ready, because they cannot
    give their GPUs back in the middle of a step."""
    last_update = run.config.algorithm.minibatches - 1
    chunks = _chunks(run, feed)
    if run.roles.lends:
        chunks = iter(list(chunks))
        _borrow_gpus(run, feed)
    for update, left, rows in chunks:
        last = not left and update == last_update
        tally.rows.append(rows)
        if last:
            _end_rollouts(run, feed)
        tally.passes += run.workers.train_on(rows, state.step + 1)
        if not last:
            feed.free_bytes(rows)  # The bytes of the last chunk are freed with the step.
        if not left and not last:
            tally.passes += finish_update(run.workers, state)


def _chunks(run: Run, feed: Feed) -> Iterator[tuple[int, int, KVBatchMeta]]:
    """Claim the chunks of a step one after the other. Yields the number of the update, the number of groups that the
    update still lacks after the chunk, and the receipt for the chunk's rows."""
    overlap, minibatches = run.config.overlap, run.config.algorithm.minibatches
    for update in range(minibatches):
        left = overlap.groups // minibatches
        while left:
            least = min(overlap.chunk, left)
            # The number of ready groups depends on timing, so a deterministic run takes the minimum.
            rows = feed.claim(least if run.config.run.deterministic else left, least)
            left -= len(rows) // run.config.rows_per_group
            yield update, left, rows


def _borrow_gpus(run: Run, feed: Feed) -> None:
    """Ask the pool for the train workers' GPUs, after the step's last wait."""
    if run.config.run.deterministic:
        feed.drain()
    run.roles.to_training()


def _end_rollouts(run: Run, feed: Feed) -> None:
    """With a window of 0, end the calls that are still in flight after the last claim of a step. They generate surplus
    groups, or their groups have all arrived."""
    if not run.config.overlap.window:
        feed.give_up_surplus()
        feed.drain()
