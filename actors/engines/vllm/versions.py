"""Finds out which version of the weights made each token, by counting vLLM's outputs in the order they were made.

vLLM's engine process answers calls and sends tokens over one socket, in order. Once it has answered a call made during
the loading of new weights, every token of the old weights has therefore arrived, though some may still wait in a queue.
A mark that is put behind them in the queue divides the tokens exactly, whatever vLLM batches, overlaps or delays in
between.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

PATIENCE_S = 60.0
"""Longest time in seconds to wait until outputs that have arrived are processed."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Marker in the output queue. Tokens behind it were made by weight version `version`."""

    version: int
    passed: asyncio.Future[None]
    """Future that is done when vLLM's output loop has reached the marker."""


class TokenVersions:
    """Counts the tokens of every running request by the weight version that made them."""

    def __init__(self, core: Any, version: int) -> None:
        """Start counting the tokens that `core` outputs. core: the AsyncMPClient of an AsyncLLM whose output loop has
        not started yet. version: weight version of the first tokens."""
        self._version = version
        self._queue: asyncio.Queue[Any] = core.outputs_queue
        self.num_tokens = 0
        """Number of tokens that have arrived since the start."""
        self._spans: dict[str, list[list[int]]] = {}
        """Weight versions of each request's tokens, in order: request id -> list of [version, number of tokens in a
        row]."""
        self._next_output = core.get_output_async
        core.get_output_async = self._counted_output

    def open(self, request_id: str) -> None:
        """Start counting the tokens of `request_id`."""
        self._spans[request_id] = []

    def close(self, request_id: str) -> None:
        """Stop counting the tokens of `request_id` and forget it. Idempotent."""
        self._spans.pop(request_id, None)

    def of(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Return the weight versions of the request's first `num_tokens` tokens, int32 `[num_tokens]`."""
        spans = self._spans[request_id]
        versions = np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(np.int32)
        # More tokens may have come than the request keeps: those after a stop text, or after an abort.
        assert len(versions) >= num_tokens, (request_id, spans, num_tokens)
        return versions[:num_tokens]

    def newest(self) -> list[tuple[int, int]]:
        """For each running sample, return the weight version of its last token and the number of consecutive tokens by
        that version at its end; (-1, 0) for a sample without tokens."""
        return [(spans[-1][0], spans[-1][1]) if spans else (-1, 0) for spans in self._spans.values()]

    async def mark(self, version: int) -> None:
        """Attribute all tokens that have not arrived yet to weight version `version`. Returns when all earlier tokens
        have been processed. Raises RuntimeError after PATIENCE_S seconds."""
        mark = _Mark(version, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(mark)
        try:
            await asyncio.wait_for(mark.passed, PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(f"vLLM's output loop has processed nothing for {PATIENCE_S} s; did it end?") from None

    async def drain(self) -> None:
        """Wait until all tokens that have arrived are processed."""
        await self.mark(self._version)

    async def _counted_output(self) -> Any:
        """Return vLLM's next outputs, after counting their tokens. Replaces `get_output_async`, which vLLM calls only
        when it has processed everything returned before."""
        while isinstance(outputs := await self._next_output(), _Mark):
            self._version = outputs.version
            if not outputs.passed.done():
                outputs.passed.set_result(None)
        for output in outputs.outputs:
            self.num_tokens += len(output.new_token_ids)
            # vLLM appends `-` and eight characters to the id that a request was submitted with.
            spans = self._spans.get(output.request_id.rpartition("-")[0])
            if spans is None or not output.new_token_ids:
                continue
            if not spans or spans[-1][0] != self._version:
                spans.append([self._version, 0])
            spans[-1][1] += len(output.new_token_ids)
        return outputs
