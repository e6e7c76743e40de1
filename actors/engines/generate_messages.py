"""Messages of a generate call between processes: `GenerateCall` carries the prompt, `GenerateReply` the completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .protocol import Completion, EngineStats, SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Message with the arguments of `Generator.generate`."""

    request_id: str
    prompt_ids: np.ndarray
    """Token ids of the prompt, int32 `[L]`."""
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """Message with the completions of one request, as concatenated columns, and the engine's counters."""

    lengths: np.ndarray
    """Number of tokens of each completion, int32 `[n]`."""
    token_ids: np.ndarray
    """Token ids of all completions, int32 `[sum(lengths)]`."""
    logprobs: np.ndarray
    """Log-prob of each token, float32 `[sum(lengths)]`."""
    versions: np.ndarray
    """Policy version of each token, int32 `[sum(lengths)]`."""
    reasons: tuple[str, ...]
    """Finish reason of each completion."""
    num_routes: np.ndarray
    """Number of routes of each completion, int32 `[n]`; -1 for a completion without routes."""
    routes: np.ndarray | None
    """Routes of all completions that have some, `[sum, layers, k]`; None if none has."""
    version: int
    """Version of the weights that the engine serves when it replies."""
    stats: EngineStats

    @staticmethod
    def of(completions: Sequence[Completion], version: int, stats: EngineStats) -> GenerateReply:
        """Build the reply: concatenate the completions into columns, and add the engine's version and counters."""
        routes = [completion.routes for completion in completions if completion.routes is not None]
        return GenerateReply(
            lengths=np.array([len(completion.token_ids) for completion in completions], dtype=np.int32),
            token_ids=np.concatenate([completion.token_ids for completion in completions]),
            logprobs=np.concatenate([completion.logprobs for completion in completions]),
            versions=np.concatenate([completion.versions for completion in completions]),
            reasons=tuple(completion.finish_reason for completion in completions),
            num_routes=np.array([-1 if one.routes is None else len(one.routes) for one in completions], dtype=np.int32),
            routes=np.concatenate(routes) if routes else None,
            version=version,
            stats=stats,
        )

    def completions(self) -> list[Completion]:
        """Split the columns into the individual completions of the request."""
        bounds = np.cumsum(self.lengths)[:-1]
        return [
            Completion(token_ids, logprobs, reason, versions, routes)
            for token_ids, logprobs, versions, reason, routes in zip(
                np.split(self.token_ids, bounds),
                np.split(self.logprobs, bounds),
                np.split(self.versions, bounds),
                self.reasons,
                self._routes(),
                strict=True,
            )
        ]

    def _routes(self) -> list[np.ndarray | None]:
        """Return the routes of each completion; None for one without."""
        if self.routes is None:
            return [None] * len(self.lengths)
        ends = np.cumsum(np.maximum(self.num_routes, 0))
        parts = np.split(self.routes, ends[:-1])
        return [None if count < 0 else part for count, part in zip(self.num_routes, parts, strict=True)]
