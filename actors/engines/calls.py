"""A generate call between two processes: prompt out, completions back, columns of numbers as one message each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .protocol import Completion, EngineStats, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The arguments of `GenerationEngine.generate`."""

    request_id: str
    prompt_ids: np.ndarray
    """int32 `[L]`."""
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """Completions of a request, one after another, and what the engine has done so far."""

    lengths: np.ndarray
    """int32 `[n]`: tokens of each."""
    token_ids: np.ndarray
    """int32 `[sum(lengths)]`."""
    logprobs: np.ndarray
    """float32 `[sum(lengths)]`."""
    versions: np.ndarray
    """int32 `[sum(lengths)]`."""
    reasons: tuple[str, ...]
    version: int
    """That the engine serves now."""
    stats: EngineStats

    @staticmethod
    def of(completions: Sequence[Completion], version: int, stats: EngineStats) -> GenerateReply:
        return GenerateReply(
            lengths=np.array([len(completion.token_ids) for completion in completions], dtype=np.int32),
            token_ids=np.concatenate([completion.token_ids for completion in completions]),
            logprobs=np.concatenate([completion.logprobs for completion in completions]),
            versions=np.concatenate([completion.versions for completion in completions]),
            reasons=tuple(completion.finish_reason for completion in completions),
            version=version,
            stats=stats,
        )

    def completions(self) -> list[Completion]:
        """Inverse of `of`."""
        bounds = np.cumsum(self.lengths)[:-1]
        return [
            Completion(token_ids, logprobs, reason, versions)
            for token_ids, logprobs, versions, reason in zip(
                np.split(self.token_ids, bounds),
                np.split(self.logprobs, bounds),
                np.split(self.versions, bounds),
                self.reasons,
                strict=True,
            )
        ]
