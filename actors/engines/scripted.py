"""The `scripted` engine returns deterministic completions after a configurable latency, for tests and dry runs."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...codecs.tokens.routes import RouteSpec
from ...codecs.weights.parameter_digests import ParameterDigests, compare_digests
from ..process.memory import ProcessMemory, measure
from ..weight_sync.transports.protocol import ReceiverConfig
from .in_process import DROPPED, InProcessEngine
from .protocol import Completion, EngineBroken, KeysAndValues, PauseMode, SamplingParams, expect_pause_mode
from .stop_tokens import resolve_stops
from .token_sampling import StopTexts

Script = Callable[[str, Sequence[int], int], Sequence[int]]
"""Type of a function that makes up a response: it takes the request id, the prompt's token ids and the index of the
sample, and returns the response's token ids, including the stop token."""


def random_tokens(vocab_size: int, seed: int = 0, median: int = 8) -> Script:
    """Return a script whose responses are random tokens drawn with `seed`. The lengths of the responses are at least 1
    and roughly log-normal with the given median."""

    def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> Sequence[int]:
        rng = random.Random(f"{seed}/{request_id}/{sample}")
        return [rng.randrange(vocab_size) for _ in range(max(1, round(rng.lognormvariate(math.log(median), 0.5))))]

    return script


def scripted_routes(token_ids: np.ndarray, spec: RouteSpec) -> np.ndarray:
    """Return made-up routes of a sequence, `[tokens, layers, k]`, which depend on token, position and layer alone.

    Each route has k successive, and therefore different, expert ids. token_ids: int64 `[tokens]`.
    """
    layers, top_k = spec.trailing
    position = np.arange(len(token_ids))[:, None, None]
    first = 31 * token_ids[:, None, None] + 7 * position + 13 * np.arange(layers)[:, None]
    return ((first + np.arange(top_k)) % spec.num_experts).astype(spec.numpy_dtype)


def request_latency(request_id: str, seed: int, latency_s: float, sigma: float) -> float:
    """Return the simulated latency of a request in seconds. It is drawn from a log-normal distribution with median
    `latency_s`, with a seed that depends on `seed` and `request_id`.

    A median of 0.0 makes every request take 0 seconds.
    """
    return latency_s and latency_s * random.Random(f"{seed}/{request_id}").lognormvariate(0.0, sigma)


class ScriptedEngine(InProcessEngine[dict[str, torch.Tensor]]):
    """Engine without a model. All requests run in parallel; each takes its own simulated latency, and its tokens appear
    at an even pace during that time.

    An abort therefore returns only the tokens that have appeared by then, and a request that continues from these gets
    the rest of its script, at least one token, for the rest of its latency. After a commit in mode `keep`, the tokens
    that appeared before the commit carry the old version.
    """

    def __init__(
        self,
        script: Script,
        *,
        latency_s: float = 0.0,
        latency_sigma: float = 0.0,
        logprob: float = -1.0,
        tokenizer: Any = None,
        seed: int = 0,
        receiver: ReceiverConfig | None = None,
        version: int = 0,
        routes: RouteSpec | None = None,
    ) -> None:
        """Create an engine that serves `version`.

        latency_s: median latency of a request in seconds. latency_sigma: sigma of the log-normal distribution of
        latencies; 0.0 makes all latencies equal. logprob: log-prob reported for every token. tokenizer: needed only for
        requests with stop texts. receiver: settings of the receiver of new weights; None when weights never change.
        routes: shape of the routes that the engine makes up (see `scripted_routes`); None to report none.
        """
        super().__init__(receiver, lambda named, _: _copied(named), version)
        self._script = script
        self._latency_s = latency_s
        self._latency_sigma = latency_sigma
        self._logprob = logprob
        self._tokenizer = tokenizer
        self._seed = seed
        self._routes = routes
        self._clock = _FlowClock()
        self._requests: dict[str, _Request] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._num_flowing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.loaded: Mapping[str, torch.Tensor] = {}
        """Copies of the weights that are served, by name; empty before the first commit."""

    @property
    def progress(self) -> int:
        """Sum of three counts, which changes whenever the engine makes progress. They count tokens returned, weight
        buckets received and, while requests run, the milliseconds since the engine's start without the times in which
        it was frozen (paused in mode `keep`)."""
        flowed_ms = int(1000 * self._clock.now()) if self._num_flowing else 0
        return self.stats.tokens + flowed_ms + self._incoming.num_received

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions of the script, cut at max_new_tokens and after a stop token or text.

        Raises ValueError if the request id is already in flight, the prompt has no tokens, or stop texts are given to
        an engine without a tokenizer. Raises EngineBroken if `sleep` has dropped the weights, and RuntimeError if the
        engine is asleep or closed.
        """
        self._expect_usable(request_id, self._requests)
        if not len(prompt_ids):
            raise ValueError(f"request {request_id!r}: the prompt has no tokens, expected at least one")
        self._expect_free(params)
        params = resolve_stops(params, self._tokenizer)
        responses, latency_s = self._responses(request_id, prompt_ids, params)
        request = self._requests[request_id] = _Request(latency_s)
        started = time.perf_counter()
        try:
            await self._admit(request)
            completions = [self._completion(request, prompt_ids, response, params) for response in responses]
        finally:
            del self._requests[request_id]
        self.stats.batches += 1
        self.stats.rows += len(completions)
        self.stats.tokens += sum(len(completion.token_ids) for completion in completions)
        self.stats.busy_s += time.perf_counter() - started
        return completions

    def _responses(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
    ) -> tuple[list[Sequence[int]], float]:
        """Return the responses to a request and its latency in seconds. A request that continues a sample gets the rest
        of that sample's response and latency, at least one token."""
        begun = params.continues
        if begun is None:
            responses = [self._script(request_id, prompt_ids, sample) for sample in range(params.n)]
            return responses, self._latency(request_id)
        whole = self._script(begun.request_id, prompt_ids[: len(prompt_ids) - begun.tokens], begun.sample)
        rest = whole[min(begun.tokens, len(whole) - 1) :]
        left = min(len(rest), params.max_new_tokens)
        return [rest], left / (begun.tokens + left) * self._latency(begun.request_id)

    def _latency(self, request_id: str) -> float:
        return request_latency(request_id, self._seed, self._latency_s, self._latency_sigma)

    # ---------------- These private methods produce the tokens of requests over time.

    async def _admit(self, request: _Request) -> None:
        """Wait until the engine is not paused, and then until all tokens of the request have appeared. An abort ends
        the wait."""
        while (self._differs or not self._resumed.is_set()) and not request.aborted:
            request.changed.clear()
            await request.changed.wait()
        if request.aborted:
            return
        request.begin(self._clock.now(), self._version)
        self._num_flowing += 1
        self._idle.clear()
        try:
            await self._flow(request)
        finally:
            request.flowed_s = min(self._clock.now() - request.started_s, request.latency_s)
            self._num_flowing -= 1
            if not self._num_flowing:
                self._idle.set()

    async def _flow(self, request: _Request) -> None:
        if not request.latency_s:
            await asyncio.sleep(0)
        while not request.aborted:
            left_s = request.latency_s - (self._clock.now() - request.started_s)
            if left_s <= 0.0:
                return
            request.changed.clear()
            frozen = self._clock.frozen  # While the engine is frozen, only a change ends the wait.
            try:
                # `asyncio.wait_for` is not used, because in Python 3.11 it swallows a cancellation that coincides with
                # the change.
                async with asyncio.timeout(None if frozen else left_s):
                    await request.changed.wait()
            except TimeoutError:
                continue

    def _completion(
        self, request: _Request, prompt_ids: Sequence[int], tokens: Sequence[int], params: SamplingParams
    ) -> Completion:
        tokens, stopped = self._stopped(tokens, params)
        wanted = min(len(tokens), params.max_new_tokens)
        got = request.num_flowed(wanted, request.flowed_s)
        if got < wanted or (request.aborted and not request.versions):
            reason = "abort"
        else:
            reason = "stop" if stopped or len(tokens) <= params.max_new_tokens else "length"
        versions = np.full(got, request.versions[0][1] if got else 0, dtype=np.int32)
        for flowed_s, version in request.versions[1:]:
            versions[request.num_flowed(wanted, flowed_s) :] = version
        routes = None
        if self._routes is not None and got:
            ids = np.array([*prompt_ids, *tokens[: got - 1]], dtype=np.int64)
            routes = scripted_routes(ids, self._routes)[params.routes_from :]
        return Completion(
            token_ids=np.asarray(tokens[:got], dtype=np.int32),
            logprobs=np.full(got, self._logprob, dtype=np.float32),
            finish_reason=reason,
            versions=versions,
            routes=routes,
        )

    def _stopped(self, tokens: Sequence[int], params: SamplingParams) -> tuple[Sequence[int], bool]:
        """Return the tokens up to and including the first stop token or stop text, and True. When there is none within
        max_new_tokens, return all tokens and False."""
        tokens = list(tokens)
        ends = [index + 1 for index, token in enumerate(tokens) if token in params.stop_token_ids][:1]
        if params.stop:
            end = StopTexts(self._tokenizer, params.stop).first_end(tokens[: params.max_new_tokens])
            ends += [] if end is None else [end]
        if not ends or min(ends) > params.max_new_tokens:
            return tokens, False
        return tokens[: min(ends)], True

    # ---------------- These methods control the engine.

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.abort()

    async def pause(self, mode: PauseMode = "wait") -> None:
        expect_pause_mode(mode)
        self._resumed.clear()
        if mode == "abort":
            for request in self._requests.values():
                request.abort()
        if mode == "keep":
            self._clock.freeze()
            self._tell_all()
        elif mode == "abort" or not self._clock.frozen:  # Frozen requests stay frozen until `resume`.
            await self._idle.wait()

    async def resume(self) -> None:
        if not self._differs:
            self._clock.thaw()
        self._resumed.set()
        self._idle.set()  # This ends a `pause` that still waits.
        if self._num_flowing:
            self._idle.clear()
        self._tell_all()

    def _tell_all(self) -> None:
        for request in self._requests.values():
            request.changed.set()

    @property
    def _is_paused(self) -> bool:
        return not self._resumed.is_set()

    @property
    def _num_running(self) -> int:
        return self._num_flowing

    async def _replace_weights(self, version: int, kv: KeysAndValues) -> int:
        """Serve the prepared version. `kv` has no effect, because there are no keys and values."""
        kept = [request for request in self._requests.values() if request.versions]
        if not self._serves(version):  # Otherwise an earlier commit has already loaded the version.
            async with self._incoming.committing(version) as weights:
                self.loaded = weights
                self._put_in_service(version)
                kept = [request for request in self._requests.values() if request.versions]
                for request in kept:
                    request.versions.append((self._clock.now() - request.started_s, version))
        return len(kept)

    async def verify_weights(self, digests: ParameterDigests) -> int:
        self._expect_served(digests)
        count, self._differs = await asyncio.to_thread(
            compare_digests, digests, lambda weight: [self.loaded[weight.name]], self._name
        )
        if self._differs:
            self._clock.freeze()
            self._tell_all()
            raise EngineBroken(self._differs)
        return count

    async def sleep(self, level: int = 1) -> None:
        """Wait until running requests have ended, and refuse others until `wake`. Level 2 drops `loaded`, the copies of
        the weights, and requests are then also refused until a version is committed."""
        self._fall_asleep(level)
        if not self._clock.frozen:  # Frozen requests do not end, so they are not awaited.
            await self._idle.wait()
        if level == 2:
            self.loaded, self._broken = {}, DROPPED

    async def wake(self) -> None:
        if self._asleep:
            self._unusable = ""

    async def memory(self) -> ProcessMemory:
        """Return the host memory of this process, in which the engine lives."""
        return measure([os.getpid()])

    async def close(self) -> None:
        """Abort all requests and refuse new ones. Idempotent."""
        self._unusable = "closed"
        for request in self._requests.values():
            request.abort()
        self._incoming.close()


class _FlowClock:
    """Clock that counts the seconds during which tokens can be generated. It stops while the engine is frozen (paused
    in mode `keep`)."""

    def __init__(self) -> None:
        self._past_s = 0.0
        self._since: float | None = time.perf_counter()

    @property
    def frozen(self) -> bool:
        return self._since is None

    def now(self) -> float:
        return self._past_s + (0.0 if self._since is None else time.perf_counter() - self._since)

    def freeze(self) -> None:
        self._past_s, self._since = self.now(), None

    def thaw(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()


class _Request:
    __slots__ = ("latency_s", "started_s", "flowed_s", "versions", "aborted", "changed")

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.started_s = 0.0
        """Time on the engine's flow clock (`_FlowClock`) at which the request began."""
        self.flowed_s = 0.0
        """Running time of the request in seconds when it ended, at most `latency_s`. Time in which the engine was
        frozen does not count."""
        self.versions: list[tuple[float, int]] = []
        """Pairs (seconds since the request began, policy version). Tokens that appear from that time on carry that
        version. Empty until the request begins."""
        self.aborted = False
        self.changed = asyncio.Event()

    def begin(self, now_s: float, version: int) -> None:
        self.started_s = now_s
        self.versions.append((0.0, version))

    def abort(self) -> None:
        self.aborted = True
        self.changed.set()

    def num_flowed(self, wanted: int, flowed_s: float) -> int:
        """Return how many of `wanted` tokens have appeared `flowed_s` seconds after the request began."""
        if not self.versions:
            return 0
        if flowed_s >= self.latency_s:
            return wanted if self.latency_s or not self.aborted else 0
        return int(wanted * flowed_s / self.latency_s)


def _copied(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Staged tensors may lie in memory that the sender writes to again.
    return {name: tensor.detach().clone() for name, tensor in named.items()}
