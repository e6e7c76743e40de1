"""Begins and ends a training step the same way for every controller: optimizer, weight sync, metrics, validation."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from ...actors.train.worker import WorkerReport
from ...dataplane.meta import KVBatchMeta
from ..errors import UserError
from . import steps as grpo
from .evaluations import Evaluations
from .feed import PARTITION, Feed
from .step_metrics import step_metrics
from .steps import Run, State

AfterStep = Callable[[State, dict[str, float]], None]
"""Callback that receives the run's state and the step's metrics after each step, to log, save and show them."""


MOST_SKIPPED = 10
"""Number of consecutive steps without an optimizer step after which a run ends with an error."""


@dataclass(slots=True)
class StepTally:
    """Receipts (keys and locations) for the rows of one step, and the train workers' reports about it."""

    started: float
    """`time.perf_counter` time at which the step began."""
    rows: list[KVBatchMeta] = field(default_factory=list)
    """Receipts for the step's rows, one for each chunk (a chunk is the groups that are trained on together)."""
    passes: list[WorkerReport] = field(default_factory=list)
    """Reports of the train workers, one pass (such as log-probs or training) after the other; within a pass in rank
    order."""


def open_feed(run: Run, state: State, partition: str = PARTITION) -> Feed:
    """Return a new `Feed`, which issues the run's prompts to rollout actors, starting from the position in `state`."""
    return Feed(
        run.config,
        state,
        client=run.client,
        rollouts=run.rollouts,
        stages=run.stages,
        sampling=run.sampling,
        partition=partition,
    )


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Context manager that holds back the first SIGINT or SIGTERM until the end of its body, where it is handled as it
    would have been. A second one is handled at once. A no-op outside the main thread, and for a signal that Python does
    not handle."""
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
    """Begins and ends the training steps of a run, from `state` to the last; updates `state`."""

    def __init__(self, run: Run, state: State, after_step: AfterStep) -> None:
        """At step 0, evaluate the initial model and pass the metrics to `after_step`, unless all evaluations are off or
        an engine serves a later version."""
        self._run = run
        self._state = state
        self._after_step = after_step
        self._skipped = 0
        """Number of consecutive steps without an optimizer step, counted back from the last finished step."""
        self._evaluations = Evaluations(run)
        metrics = self._evaluations.before_first_step(state) if state.step == 0 else {}
        if metrics:
            after_step(state, {**metrics, "policy/version": float(state.version)})
        run.meter.take()  # what was said before the first step is not part of its bytes a row

    @property
    def go_on(self) -> bool:
        """Whether another step follows: steps are left, and validation has not reached its target."""
        return self._state.step < self._run.config.algorithm.steps and not self._evaluations.reached

    def begin(self) -> StepTally:
        """Start timing and tracing the next step; returns its empty tally."""
        self._run.stages.begin_step(self._state.step + 1)
        return StepTally(time.perf_counter())

    def end(self, tally: StepTally, feed: Feed) -> None:
        """Finish the current step: take the optimizer step, sync weights, clear the rows, evaluate if that is due, and
        pass the metrics to `after_step`. Raises UserError after MOST_SKIPPED consecutive steps without an optimizer
        step."""
        run, state = self._run, self._state
        validated = self._evaluations.before_update(
            state
        )  # while the workers still have the weights that are validated
        with interrupts_held():  # a checkpoint of this step can then be saved
            state.ahead = True
            tally.passes += grpo.finish(run)
            state.step, state.version = state.step + 1, state.version + 1
            feed.commit()
            state.ahead = False
        meta = tally.rows[0].concat(*tally.rows[1:])
        sync = grpo.sync_weights(run, state)
        for engine, spans in sync.spans:
            run.stages.tracer.add(engine, spans)
        grpo.retire(run, meta)
        fed = feed.settle()
        for report in fed.reports:
            run.reward_errors.note(state.step, report.failed, report.rows, report.errors)
        seconds = time.perf_counter() - tally.started
        metrics = {**step_metrics(run, state, fed, tally.passes, meta, seconds, sync), **validated}
        metrics["queue/groups_in_flight"] = float(feed.in_flight)
        metrics |= self._evaluations.after_step(state, last=state.step == run.config.algorithm.steps)
        self._after_step(state, metrics)
        self._stop_if_nothing_is_trained(metrics)

    def _stop_if_nothing_is_trained(self, metrics: dict[str, float]) -> None:
        """Raise UserError if the last MOST_SKIPPED steps, including this one, had no optimizer step."""
        self._skipped = self._skipped + 1 if metrics.get("train/skipped") else 0
        if self._skipped < MOST_SKIPPED:
            return
        rows = metrics.get("train/sequences", 0.0)
        why = (
            f"the gradients of its {rows:.0f} rows are not finite "
            f"(is trainer.lr={self._run.config.trainer.lr:g} too high?)"
            if rows
            else "it had no row to train on (rollout/failed_rows counts those whose reward raised)"
        )
        raise UserError(
            f"train/skipped: {MOST_SKIPPED} steps in a row changed no weight, up to step {self._state.step}, expected "
            f"one that does: {why}"
        )
