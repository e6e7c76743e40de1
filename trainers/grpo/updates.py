"""Trains on the rows of a whole step, in one optimizer update or in several: mini-batches, and epochs over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...actors.train.worker import PREV, WorkerReport
from ...dataplane.meta import KVBatchMeta
from ..config.config import Config
from . import steps as grpo
from .steps import Run, State


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update of a step."""

    rows: KVBatchMeta
    """Receipt for the rows of its mini-batch."""
    written: bool
    """True if the log-prob columns that the update needs have been written to its rows before the step's first update.
    False for the first update itself, where the policy is still the one before the step."""


def deal(meta: KVBatchMeta, *, minibatches: int, epochs: int, seed: int, step: int) -> list[KVBatchMeta]:
    """Deal the rows of a step into mini-batches for every epoch; returns `epochs` x `minibatches` receipts in the order
    of training.

    Each epoch has every row once. Groups stay whole, and the mini-batches of an epoch have the same number of groups,
    or numbers that differ by one. Which groups meet in a mini-batch is drawn anew for each epoch and depends only on
    `seed`, `step`, the epoch and the order of groups in `meta`. Rows keep their order within a mini-batch.
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


def written_columns(config: Config) -> tuple[str, ...]:
    """Return the log-prob columns that train workers write to the rows of a step with several updates, so that they are
    those of the policy before the step in every update."""
    own = (PREV,) if config.algorithm.prev_logprobs == "recompute" else ()
    return own + grpo.reference_columns(config)


def train_on_step(run: Run, state: State, meta: KVBatchMeta) -> list[WorkerReport]:
    """Train on all rows of the next step, up to the end of its last update, which `Steps.end` finishes. Returns the
    train workers' reports.

    With several updates, the columns that must not change with the policy are written first. Rows of the first update
    do without them if there is only one epoch, because the pass of that update itself gives the same values.
    """
    step, algorithm = state.step + 1, run.config.algorithm
    meta = grpo.with_advantages(run.estimate, meta)
    parts = deal(meta, minibatches=algorithm.minibatches, epochs=algorithm.epochs, seed=run.config.run.seed, step=step)
    first_written = algorithm.epochs > 1
    updates = [Update(part, first_written or number > 0) for number, part in enumerate(parts)]
    columns, reports = written_columns(run.config), []
    if columns and len(updates) > 1:
        early = meta if first_written else parts[1].concat(*parts[2:])
        grpo.ship_plan(run, early, step)
        reports += grpo.write_logprobs(run, columns)
    for number, update in enumerate(updates, start=1):
        in_first_epoch = number <= algorithm.minibatches
        grpo.ship_plan(run, update.rows, step, columns if update.written else (), write_samples=in_first_epoch)
        if not update.written:
            reports += grpo.write_logprobs(run, grpo.reference_columns(run.config))
        reports += grpo.accumulate(run)
        if number < len(updates):
            reports += finish_update(run, state)
    return reports


def finish_update(run: Run, state: State) -> list[WorkerReport]:
    """Take the optimizer update with the gradients accumulated so far, in the middle of a step. Returns the train
    workers' reports."""
    state.ahead = True
    return grpo.finish(run)
