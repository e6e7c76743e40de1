"""Which version made which token: counted where vLLM's outputs pass, in the order in which they were made.

vLLM's engine process answers calls and sends tokens over one socket, in order. So when the call that loads weights
has been answered, every token of the old ones has come in, though few may have been processed: they wait in a queue.
A mark put behind them there divides the tokens exactly, whatever vLLM batches, overlaps or delays in between.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

PATIENCE_S = 60.0
"""Bound of the wait for outputs that are here already to be processed."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """From here on tokens are of `version`."""

    version: int
    passed: asyncio.Future[None]


class TokenVersions:
    """Versions of the tokens of every request that runs."""

    def __init__(self, core: Any, version: int) -> None:
        """core: the AsyncMPClient of an AsyncLLM whose output loop has not run yet."""
        self._version = version
        self._queue: asyncio.Queue[Any] = core.outputs_queue
        self._spans: dict[str, list[list[int]]] = {}
        """By request id: [version, tokens] of each stretch."""
        self._next_output = core.get_output_async
        core.get_output_async = self._counted_output

    def open(self, request_id: str) -> None:
        """Count the tokens of `request_id` from now on."""
        self._spans[request_id] = []

    def close(self, request_id: str) -> None:
        """Forget it. Idempotent."""
        self._spans.pop(request_id, None)

    def of(self, request_id: str, num_tokens: int) -> np.ndarray:
        """int32 `[num_tokens]`: versions of its first tokens."""
        spans = self._spans[request_id]
        versions = np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(np.int32)
        # More may have come than were taken: those after a stop text, or after an abort.
        assert len(versions) >= num_tokens, (request_id, spans, num_tokens)
        return versions[:num_tokens]

    def newest(self) -> list[tuple[int, int]]:
        """List version and number of the newest tokens of each running sample; (-1, 0) for one without tokens."""
        return [(spans[-1][0], spans[-1][1]) if spans else (-1, 0) for spans in self._spans.values()]

    async def mark(self, version: int) -> None:
        """Tokens that have not come in yet are of `version`. Returns when all that came before are processed."""
        mark = _Mark(version, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(mark)
        try:
            await asyncio.wait_for(mark.passed, PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(f"vLLM's output loop has processed nothing for {PATIENCE_S} s; did it end?") from None

    async def drain(self) -> None:
        """Return when all tokens that have come in are processed."""
        await self.mark(self._version)

    async def _counted_output(self) -> Any:
        """vLLM's `get_output_async`: called when everything it returned before has been processed."""
        while isinstance(outputs := await self._next_output(), _Mark):
            self._version = outputs.version
            if not outputs.passed.done():
                outputs.passed.set_result(None)
        for output in outputs.outputs:
            # vLLM appends `-` and eight characters to the id that a request was submitted with.
            spans = self._spans.get(output.request_id.rpartition("-")[0])
            if spans is None or not output.new_token_ids:
                continue
            if not spans or spans[-1][0] != self._version:
                spans.append([self._version, 0])
            spans[-1][1] += len(output.new_token_ids)
        return outputs
