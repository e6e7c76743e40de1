"""Computes how much room a run's rows need in the data plane's store."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...codecs.integers import ceil_div
from .config import Config
from .staleness import Overlap

ROLLOUT_TOKEN_BYTES = 9
"""Bytes that a rollout writes per token: input_ids int32, response_mask uint8, rollout_logprobs float32."""
ROLLOUT_ROW_BYTES = 64
"""Assumed bytes of a row's version_spans: a few pairs (first token, version) of int32."""
LOGPROB_BYTES = 4
"""Bytes per token of each float32 log-prob column that the train workers write. One column is for the reference model,
another for the policy before a step with several updates, others for teachers."""
MASK_BYTES = 32
"""Number of bytes of a token's sampling mask, which is about twice what sets of eight tokens take."""


@dataclass(frozen=True, slots=True)
class StoreDemand:
    """The size of a run's rows in the data plane's store if every row has the maximum length."""

    rows: int
    """Number of rows of a step."""
    longest: int
    """Largest number of tokens of a row."""
    step_bytes: int
    """Number of bytes of a step's rows, and of the pictures of its prompts."""
    steps: float
    """Number of steps for which the store must hold all rows at the same time. It is above 1 if rollouts run ahead or
    oversample, and can be a fraction."""
    pictures: str = ""
    """Part of a sentence about the pictures; "" without any."""

    @classmethod
    def of(cls, config: Config, route_bytes: int = 0, pixel_bytes: int = 0) -> StoreDemand:
        """Return the demand of the run that `config` describes. route_bytes, pixel_bytes: bytes of the routes of one
        token, and of the pixels of one token of a picture, from the model's config; 0 without router replay, and
        without pictures. All tokens of a prompt can be those of pictures."""
        (_, longest), algorithm = config.longest_row, config.algorithm
        columns = config.with_reference + (algorithm.prev_logprobs == "recompute" and algorithm.updates_per_step > 1)
        columns += bool(config.distillation.teachers) + 2 * config.distillation.top_k  # A top token has its id, too.
        token = ROLLOUT_TOKEN_BYTES + LOGPROB_BYTES * columns + route_bytes + MASK_BYTES * config.rollout.masked
        row = longest * token + ROLLOUT_ROW_BYTES
        rows = config.rows_per_step * config.environment.max_rows
        ordered = algorithm.sampler != "ready_first" and (algorithm.sampler != "auto" or config.run.deterministic)
        frozen = config.with_reference or bool(config.distillation.teachers)
        chunks = config.overlap.by_chunk and not ordered and not frozen
        steps = _steps_in_store(config.overlap, algorithm.dynamic_sampling.oversample, chunks_suffice=chunks)
        most = config.sft.max_tokens if config.sft.train else config.data.max_prompt_tokens
        shown = algorithm.prompts_per_step * most * pixel_bytes
        pictures = f", and pictures of up to {most} tokens for each prompt" if shown else ""
        return cls(rows, longest, rows * row + shown, steps, pictures)

    def problems(self, capacity_mib: int) -> list[str]:
        """Return one sentence in a list if a store of `capacity_mib` MiB can fill up, and [] otherwise. That would stop
        the run."""
        needed = math.ceil(self.step_bytes * self.steps)
        if needed <= capacity_mib << 20:
            return []
        return [
            f"dataplane.store.capacity_mib: got {capacity_mib}, expected at least {ceil_div(needed, 1 << 20)}, the "
            f"size of {math.ceil(self.rows * self.steps)} rows of up to {self.longest} tokens{self.pictures}"
        ]


def _steps_in_store(overlap: Overlap, oversample: float, *, chunks_suffice: bool) -> float:
    """Return the number of steps for which the store must hold all rows at the same time. If a step is trained on by
    chunk and a chunk can consist of any groups, room for two chunks suffices: the one in training and the next one.
    Further groups then wait until a chunk is cleared. This does not work if groups have an order, because a group that
    is needed next could be waiting. It does not work with a reference model or teachers either, because their log-probs
    need room, too.
    """
    if overlap.window:
        return 1 + overlap.window
    if chunks_suffice:
        return min(1.0, 2 * overlap.chunk / overlap.groups) + oversample - 1
    return oversample
