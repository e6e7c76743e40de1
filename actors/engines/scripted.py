"""The `scripted` engine: deterministic completions with a chosen latency, for tests and dry runs. No model."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from .protocol import Completion, EngineStats, SamplingParams

Script = Callable[[str, Sequence[int], int], Sequence[int]]
"""(request_id, prompt_ids, sample index) -> response token ids, stop token included."""


def random_tokens(vocab_size: int, seed: int = 0) -> Script:
    """A script of seeded noise: 1 token or more, lengths roughly log-normal around 8, cut by max_new_tokens."""

    def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> Sequence[int]:
        rng = random.Random(f"{seed}/{request_id}/{sample}")
        return [rng.randrange(vocab_size) for _ in range(max(1, round(rng.lognormvariate(math.log(8), 0.5))))]

    return script


class ScriptedEngine:
    """Every request runs at once and takes its own time; tokens flow evenly over it, so an abort returns a share."""

    def __init__(
        self,
        script: Script,
        *,
        latency_s: float = 0.0,
        latency_sigma: float = 0.0,
        logprob: float = -1.0,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        """latency_s: median seconds of a request, log-normal with `latency_sigma` (0.0: constant), seeded per request.

        logprob: reported for every token.
        """
        self._script = script
        self._latency_s = latency_s
        self._latency_sigma = latency_sigma
        self._logprob = logprob
        self._seed = seed
        self._version = version
        self._aborts: dict[str, asyncio.Event] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._unusable = ""
        self.loaded: dict[str, torch.Tensor] = {}
        """What the last `load_weights` brought."""
        self.stats = EngineStats()

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """`params.n` completions of the script, cut at max_new_tokens.

        Raises ValueError for an id that is in flight, RuntimeError when asleep or closed.
        """
        if self._unusable:
            raise RuntimeError(f"request {request_id!r}: the engine is {self._unusable}")
        if request_id in self._aborts:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        abort = self._aborts[request_id] = asyncio.Event()
        try:
            await self._resumed.wait()
            version = self._version
            started = time.perf_counter()
            share = await self._run(abort, self._latency(request_id))
        finally:
            del self._aborts[request_id]
        completions = [
            self._completion(self._script(request_id, prompt_ids, sample), params.max_new_tokens, share, version)
            for sample in range(params.n)
        ]
        self.stats.batches += 1
        self.stats.rows += len(completions)
        self.stats.tokens += sum(len(completion.token_ids) for completion in completions)
        self.stats.busy_s += time.perf_counter() - started
        return completions

    def _latency(self, request_id: str) -> float:
        if not self._latency_s:
            return 0.0
        return self._latency_s * random.Random(f"{self._seed}/{request_id}").lognormvariate(0.0, self._latency_sigma)

    async def _run(self, abort: asyncio.Event, latency_s: float) -> float:
        """Wait `latency_s` or until aborted. Returns the share of the latency that passed, 1.0 when all of it did."""
        started = time.perf_counter()
        self._num_running += 1
        self._idle.clear()
        try:
            await asyncio.wait_for(abort.wait(), timeout=latency_s)
        except TimeoutError:
            return 1.0
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
        return min(1.0, (time.perf_counter() - started) / latency_s) if latency_s else 0.0

    def _completion(self, tokens: Sequence[int], max_new_tokens: int, share: float, version: int) -> Completion:
        wanted = min(len(tokens), max_new_tokens)
        got = wanted if share == 1.0 else int(wanted * share)
        reason = "abort" if share < 1.0 else ("stop" if len(tokens) <= max_new_tokens else "length")
        return Completion(
            token_ids=np.asarray(tokens[:got], dtype=np.int32),
            logprobs=np.full(got, self._logprob, dtype=np.float32),
            finish_reason=reason,
            version=version,
        )

    async def abort(self, request_id: str) -> None:
        event = self._aborts.get(request_id)
        if event is not None:
            event.set()

    async def pause(self) -> None:
        self._resumed.clear()
        await self._idle.wait()

    async def resume(self) -> None:
        self._resumed.set()

    async def load_weights(self, version: int, named: Mapping[str, torch.Tensor]) -> None:
        """Requests that start from now on carry `version`. Any names are taken. Raises ValueError unless it rises."""
        if version <= self._version:
            raise ValueError(f"weights: got version {version}, expected one above the current {self._version}")
        self.loaded = dict(named)
        self._version = version

    async def sleep(self) -> None:
        self._unusable = self._unusable or "asleep: wake it first"

    async def wake(self) -> None:
        if self._unusable.startswith("asleep"):
            self._unusable = ""

    async def close(self) -> None:
        """Abort what runs. Idempotent."""
        self._unusable = "closed"
        for event in self._aborts.values():
            event.set()
        self._resumed.set()
