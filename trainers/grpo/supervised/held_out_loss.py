"""Measures the loss of conversations that a supervised run never trains on, when a validation is due.

    positions -> rollout actors put rows -> claim -> plan -> train workers sum the log-probs -> clear

Rows are measured in parts of a step's size, so that a validation needs no more room in the store than a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import numpy as np

from ....actors.protocols import TRAIN_FIELDS, row_schema
from ....actors.rollout.supervised.examples import Examples
from ....actors.rollout.supervised.supervised_rows import HELD_OUT
from ....dataplane.meta import KVBatchMeta
from ...cluster.handles import RolloutHandle
from ...cluster.rollout_specs import sampling
from ...config.config import HELD_OUT_LOSS
from ..checkpoints import State
from ..run_parts import Run

PARTITION, TASK = "validation", "measure"


class HeldOutLoss:
    """The validations of a supervised run. It stands in the place of `Evaluations`."""

    reached = False
    """Whether a validation has reached a target that ends the run: never."""

    def __init__(self, run: Run) -> None:
        """Register the partition of the rows, and count them. Does nothing for a run without validation."""
        self._run = run
        config = run.config
        self._every = config.validation.every
        images, pictures = config.data.images, run.actors.pictures
        self._rows = Examples(config.sft, validation=True, images=images).size if self._every else 0
        self._fields = (*TRAIN_FIELDS, *([] if pictures is None else [pictures.name]))
        if self._every:
            run.client.register(PARTITION, row_schema(None, images=pictures), [TASK])
            run.client.clear(PARTITION)  # A validation that a train worker's death ended can have left rows.

    def before_first_step(self, state: State) -> dict[str, float]:
        """Return the loss of the initial policy."""
        return self._measure(state) if self._every else {}

    def before_update(self, state: State) -> dict[str, float]:
        """Return nothing, because no validation runs in the background of a step."""
        return {}

    def after_step(self, state: State, *, last: bool) -> dict[str, float]:
        """Return the loss of the policy of `state` if a validation is due. In the last step one is due."""
        due = self._every and (last or state.step % self._every == 0)
        return self._measure(state) if due else {}

    def withdraw(self, actor: RolloutHandle) -> None:
        """Do nothing, because rollout actors take no part in it."""

    def _measure(self, state: State) -> dict[str, float]:
        started, total, tokens = time.perf_counter(), 0.0, 0.0
        workers = self._run.workers
        with self._run.stages.timed("validate"):
            for meta in self._parts():
                workers.ship_plan(meta.with_tags(advantage=np.zeros(len(meta), np.float32)), state.step)
                calls = [worker.sum_logprobs() for worker in workers.handles]
                total += sum(workers.gather(calls, "validate"))
                tokens += float(meta.tags["response_length"].sum())
                self._run.client.clear(PARTITION, meta.keys)
        return {
            HELD_OUT_LOSS: -total / tokens,
            "validation/tokens": tokens,
            "time/validate_s": time.perf_counter() - started,
        }

    def _parts(self) -> Iterator[KVBatchMeta]:
        """Have rollout actors put the rows, part by part, and yield the receipt of each part."""
        run, config = self._run, self._run.config
        size, params = config.algorithm.prompts_per_step, sampling(config.rollout, n=1, seed=config.run.seed)
        for first in range(0, self._rows, size):
            positions = np.arange(first, min(first + size, self._rows)) + HELD_OUT
            actors = run.rollouts.active
            shares = np.array_split(positions, len(actors))
            calls = [
                actor.rollout(share.tolist(), PARTITION, params, False, False)
                for actor, share in zip(actors, shares, strict=True)
                if len(share)
            ]
            run.workers.gather(calls, "validate")
            yield run.client.claim(PARTITION, TASK, self._fields, len(positions), at_least=len(positions))
            run.stages.report_progress()


_OF_ROLLOUTS = (
    "reward/", "advantage/", "staleness/", "rollout/", "sync/", "logprob/", "reward_by_source/", "idle/", "policy/",
    "queue/", "train/sampled_entropy",
)  # fmt: skip


def supervised_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a supervised step. They are `sft/loss`, the mean of -log p over the trained tokens of the
    step, `sft/tokens`, their number, and those of `metrics` that do not describe rollouts."""
    kept = {key: value for key, value in metrics.items() if not key.startswith(_OF_ROLLOUTS)}
    return {"sft/loss": metrics["train/sampled_entropy"], "sft/tokens": metrics["train/tokens"], **kept}
