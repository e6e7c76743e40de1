"""Requests of the `hf` engine: `Pending` is one unanswered request, `Batch` a set of requests decoded together."""

from __future__ import annotations

import asyncio

from ..protocol import Completion, EngineStats, SamplingParams
from .decoding import DecodeRequest, Decoding


class Pending:
    """A generate call that waits for its completions."""

    __slots__ = ("request", "params", "future", "aborted")

    def __init__(self, request: DecodeRequest, params: SamplingParams, future: asyncio.Future) -> None:
        self.request = request
        self.params = params
        self.future = future
        self.aborted = False

    @property
    def batch_key(self) -> tuple:
        """Sampling parameters that requests must have in common to be decoded in one batch."""
        p = self.params
        return (p.temperature, p.top_p, p.top_k, p.max_new_tokens, p.stop_token_ids, p.stop)

    def settle(self, completions: list[Completion]) -> None:
        if not self.future.done():
            self.future.set_result(completions)

    def settle_empty(self) -> None:
        """Answer the request with empty completions. Used for a request that was aborted before its first token."""
        self.settle([Completion.empty() for _ in range(self.params.n)])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Batch:
    """Requests that are decoded together. Methods are called from the event loop, and never while the decoding thread
    works on the batch (`stepping`)."""

    def __init__(self, pendings: list[Pending]) -> None:
        self.pendings = pendings
        self.params = pendings[0].params
        """Sampling parameters of the first request. All requests of the batch share them, except for `n` and `seed`."""
        self.decoding: Decoding | None = None
        self.stepping = False
        """True while the decoding thread uses `decoding`."""
        self._open = dict(enumerate(pendings))
        self._counted = False

    @property
    def num_open(self) -> int:
        """Number of requests that are not answered yet."""
        return len(self._open)

    @property
    def done(self) -> bool:
        return not self._open

    def settle_aborted(self, stats: EngineStats) -> None:
        """Answer the aborted requests with the tokens generated so far."""
        assert not self.stepping
        for index in [index for index, pending in self._open.items() if pending.aborted]:
            if self.decoding is None:
                self._open.pop(index).settle_empty()
                continue
            self.decoding.end(index)
            self._settle(index, stats)

    def settle(self, stats: EngineStats) -> None:
        """Answer all requests. Must be called only after all their rows have ended."""
        for index in list(self._open):
            self._settle(index, stats)

    def _settle(self, index: int, stats: EngineStats) -> None:
        assert self.decoding is not None
        pending = self._open.pop(index)
        try:
            completions = self.decoding.completions(index)
        except FloatingPointError as error:
            pending.fail(error)
            return
        stats.batches += not self._counted
        self._counted = True
        stats.rows += len(completions)
        stats.tokens += sum(len(completion.token_ids) for completion in completions)
        pending.settle(completions)

    def fail(self, error: Exception) -> None:
        """Make every unanswered request raise `error` in its caller."""
        for pending in self._open.values():
            pending.fail(error)
        self._open.clear()
