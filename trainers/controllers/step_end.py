"""The end of a step, the same for every controller: optimizer, weight sync, rows retired, metrics, validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...actors.rollout_report import RolloutReport
from ...actors.train_worker import WorkerReport
from ...dataplane.meta import KVBatchMeta
from .. import grpo
from ..figures import step_metrics
from ..grpo import Rollouts, Run, State

AfterStep = Callable[[State, dict[str, float]], None]
"""Called with the state and the step's metrics when a step is done: log, checkpoint, show."""


@dataclass(slots=True)
class StepTally:
    """What a step has done so far."""

    started: float
    """`time.perf_counter`."""
    rows: list[KVBatchMeta] = field(default_factory=list)
    """Receipts of its rows, a chunk each."""
    passes: list[WorkerReport] = field(default_factory=list)
    reports: list[RolloutReport] = field(default_factory=list)
    """Of the rollouts that ended in it."""


def first_validation(run: Run, state: State, after_step: AfterStep) -> None:
    """Of the model that the run starts from."""
    if run.config.validation.every and state.step == 0:
        after_step(state, {**grpo.validate(run), "policy/version": float(state.version)})


def begin_step(run: Run, state: State) -> StepTally:
    """Start timing and tracing the step after `state`'s."""
    run.begin_step(state.step + 1)
    return StepTally(time.perf_counter())


def end_step(run: Run, state: State, tally: StepTally, under_way: Sequence[Rollouts], after_step: AfterStep) -> None:
    """Optimizer step, weight sync and clear; then the step counts, and its metrics are told. Moves `state`.

    under_way: rollouts of later steps, for the figures.
    """
    tally.passes += grpo.finish(run)
    meta = tally.rows[0].concat(*tally.rows[1:])
    state.step, state.version = state.step + 1, state.version + 1
    state.position += run.config.algorithm.prompts_per_step
    sync = grpo.sync_weights(run, state)
    for rows in tally.rows:
        grpo.retire(run, rows)
    seconds = time.perf_counter() - tally.started
    metrics = step_metrics(run, state, tally.reports, tally.passes, meta, seconds, sync)
    metrics["queue/groups_in_flight"] = float(sum(rollouts.count for rollouts in under_way))
    every = run.config.validation.every
    if every and (state.step % every == 0 or state.step == run.config.algorithm.steps):
        metrics |= grpo.validate(run)
    after_step(state, metrics)
