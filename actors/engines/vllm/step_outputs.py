"""Reads what vLLM puts out in each step: the weight version that generated each token, and the tokens' routes.

vLLM's engine process answers calls and sends tokens over one socket, in order. Once it has answered a call made during
the loading of new weights, every token of the old weights has therefore arrived, though some may still wait in a queue.
A mark that is put after them in the queue divides the tokens exactly, whatever vLLM batches, overlaps or delays in
between.

vLLM's own way to record routes cuts one array per token of each request. Each array is packed, unpacked and joined with
the other arrays of its request. vLLM also lists all blocks of every request in each step, although only the blocks of
finished prompts are read. Here the scheduler takes the routes of all tokens of a step at once, and lists only the
blocks of prompts. Headrace's process adds the routes of each request to its earlier routes before vLLM's output loop
reads the outputs.

    engine process     routes of a step -> `hand_out` -> one array in the scheduler's outputs -> one message
    headrace's process                  one message -> `RoutesOfSamples.split` -> vLLM's output loop
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

SCHEDULER = f"{__name__}.joining_scheduler"
"""Value of vLLM's option `scheduler_cls` for an engine that records routes."""
JOINED = 4
"""Number of axes of an array with the routes of several requests; an array of a single request has one axis less."""
ROOM = 64
"""Smallest number of tokens for which a new `SampleRoutes` allocates room."""
PATIENCE_S = 60.0
"""Longest time in seconds to wait for the processing of outputs that have arrived."""


def joining_scheduler(**settings: Any) -> Any:
    """Return vLLM's own scheduler, extended to join the routes in its outputs and to list only blocks of prompts. It
    runs in the engine process."""
    from . import library  # This imports vLLM, which is not needed for reading outputs.

    base: Any = library.scheduler_class(settings["vllm_config"])

    class JoiningScheduler(base):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            if not hasattr(self, "routed_experts_mgr"):  # This scheduler of vLLM keeps no routes itself.
                self.routed_experts_mgr = _slot_routes(settings)
                self._re_block_ids = {}

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            found = getattr(model_runner_output, "routed_experts", None)
            if found is None:
                return super().update_from_output(scheduler_output, model_runner_output)
            model_runner_output.routed_experts = None  # Without this field, vLLM does not cut the routes by token.
            manager, tokens = self.routed_experts_mgr, scheduler_output.num_scheduled_tokens
            array = found.routing_data.astype(manager.routed_experts_by_slot.dtype, copy=False)
            manager.store_batch(array, found.slot_mapping)
            prompts = self._unanswered_prompts(tokens)
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            starts = _first_rows(model_runner_output, tokens, len(array))
            routes = StepRoutes(array, starts, tokens, scheduler_output.scheduled_spec_decode_tokens)
            for one in outputs.values():
                hand_out(one.outputs, routes, prompts, self._prompt_routes)
            return outputs

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            self.enable_return_routed_experts = False  # With True, vLLM would list the blocks of all requests.
            try:
                super()._update_after_schedule(scheduler_output)
            finally:
                self.enable_return_routed_experts = True
            cached = scheduler_output.scheduled_cached_reqs
            ids = [new.req_id for new in scheduler_output.scheduled_new_reqs]
            # A request without output tokens is still computing its prompt, so its blocks can have grown. Tokens that
            # are being computed also count as output tokens.
            if 0 in cached.num_output_tokens:
                ids += [one for one, tokens in zip(cached.req_ids, cached.num_output_tokens, strict=True) if not tokens]
            for request_id in ids:
                blocks = self.kv_cache_manager.get_blocks(request_id).get_block_ids()
                self._re_block_ids[request_id] = blocks[self.routed_experts_mgr.attn_gid]

        def _unanswered_prompts(self, scheduled: Mapping[str, int]) -> dict[str, Any]:
            """Return the requests of a step that have had no output yet, by id. Forgets the blocks of requests that are
            gone."""
            for request_id in [one for one in self._re_block_ids if one not in self.requests]:
                del self._re_block_ids[request_id]
            return {one: self.requests[one] for one in self._re_block_ids if one in scheduled}

        def _prompt_routes(self, request: Any) -> np.ndarray:
            start = request.sampling_params.routed_experts_prompt_start or 0
            blocks = self._re_block_ids.pop(request.request_id)
            return self.routed_experts_mgr.get(blocks, request.num_prompt_tokens, token_start=start)

    return JoiningScheduler(**settings)


def _first_rows(output: Any, tokens: Mapping[str, int], num_rows: int) -> Mapping[str, int]:
    """Return the first row of each request in a step's array of `num_rows` routes. tokens: number of rows of each
    request."""
    if num_rows <= len(output.req_id_to_index):
        return output.req_id_to_index  # Each request has one token, as in most steps.
    before = itertools.accumulate([tokens[one] for one in output.req_ids], initial=0)
    # The last running sum is the total number of tokens, so `before` is one longer.
    return dict(zip(output.req_ids, before, strict=False))


def _slot_routes(settings: Mapping[str, Any]) -> Any:
    from .cpu_routes import SlotRoutes  # This imports vLLM's worker, which only the engine process on a CPU needs.

    return SlotRoutes(settings["vllm_config"], settings["kv_cache_config"])


@dataclass(frozen=True, slots=True)
class StepRoutes:
    """Routes of the tokens of one step, as the model runner recorded them."""

    array: np.ndarray
    """Routes, `[tokens, layers, k]`. The routes of each request stand together, in order."""
    starts: Mapping[str, int]
    """Id of each request -> its first row."""
    tokens: Mapping[str, int]
    """Id of each request -> number of its rows. A request that was preempted computes its earlier tokens again, in rows
    before those of its new tokens."""
    drafted: Container[str]
    """Ids of the requests for which speculative decoding has drafted tokens. Their accepted tokens come first."""


def hand_out(
    outputs: Sequence[Any], routes: StepRoutes, prompts: Mapping[str, Any], prompt_routes: Callable[[Any], np.ndarray]
) -> None:
    """Put the routes of a step into its outputs. The first output of a request gets the routes of its prompt, `[tokens,
    layers, k]`. Of the other outputs with new tokens, the first gets the routes of all these tokens, `[1, tokens,
    layers, k]`, and the rest have None.

    prompts: the requests that have had no output before, by id. prompt_routes: function that returns the routes of the
    prompt of one of these requests.
    """
    first, rows, starts = None, list[int](), routes.starts
    if len(routes.array) == len(starts) and not prompts:  # Here each request has one token.
        if told := [one for one in outputs if one.new_token_ids]:
            rows = [starts[one.request_id] for one in told]
            told[0].routed_experts = routes.array.take(rows, axis=0)[None]
        return
    for one in outputs:
        if not (tokens := len(one.new_token_ids)):
            continue
        request_id = one.request_id
        if request_id in prompts:
            one.routed_experts = prompt_routes(prompts[request_id])
            continue
        start = starts[request_id]
        if request_id not in routes.drafted:
            start += routes.tokens[request_id] - tokens
        if tokens == 1:
            rows.append(start)
        else:
            rows.extend(range(start, start + tokens))
        if first is None:
            first = one
    if first is not None:
        first.routed_experts = routes.array.take(rows, axis=0)[None]


class SampleRoutes:
    """Routes of the tokens of one sample so far, beginning with its prompt. NumPy can read the object as an array
    `[tokens, layers, k]`.

    vLLM collects an array for each token, and joins the arrays when the sample ends. Samples often end together, and
    the last sample would have to wait until thousands of arrays are joined. So vLLM gets this one object instead of all
    these arrays, and each step adds to it.
    """

    def __init__(self, routes: np.ndarray) -> None:
        """routes: those of the prompt, or of the first tokens, `[tokens, layers, k]`."""
        self._length = 0
        self._buffer = np.empty((max(2 * len(routes), ROOM), *routes.shape[1:]), routes.dtype)
        self.add(routes)

    def add(self, routes: np.ndarray) -> None:
        """Append the routes of further tokens, `[tokens, layers, k]`."""
        start, self._length = self._length, self._length + len(routes)
        if self._length > len(self._buffer):
            grown = np.empty((2 * self._length, *self._buffer.shape[1:]), self._buffer.dtype)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start : self._length] = routes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the routes so far; NumPy calls this method to make an array."""
        found = self._buffer[: self._length]
        return found if dtype is None and not copy else found.astype(found.dtype if dtype is None else dtype)


class RoutesOfSamples:
    """Splits the routes that `hand_out` collected in each step, and gives each sample the routes of its tokens."""

    def __init__(self) -> None:
        self._samples = WeakValueDictionary[str, SampleRoutes]()
        """Routes of each sample that vLLM's output loop still knows, by vLLM's id of its request."""

    def split(self, outputs: Sequence[Any]) -> None:
        """Add the routes of a step to those of its samples. Afterwards only the first output of a sample has routes: a
        SampleRoutes. Raises RuntimeError if the number of routes is not the number of tokens."""
        joined = None
        for one in [one for one in outputs if one.routed_experts is not None]:
            if one.routed_experts.ndim == JOINED:
                joined, one.routed_experts = one.routed_experts[0], None
            else:
                one.routed_experts = self._samples[one.request_id] = SampleRoutes(one.routed_experts)
        if joined is None:
            return
        start = 0
        for one in outputs:
            if one.routed_experts is not None or not one.new_token_ids:
                continue
            end = start + len(one.new_token_ids)
            if (sample := self._samples.get(one.request_id)) is None:
                one.routed_experts = self._samples[one.request_id] = SampleRoutes(joined[start:end])
            else:
                sample.add(joined[start:end])
            start = end
        if start != len(joined):
            raise RuntimeError(f"routes: a step of vLLM has {len(joined)} joined routes for {start} tokens")


@dataclass(frozen=True, slots=True)
class _Mark:
    """Marker in the output queue. Tokens after it were generated by weight version `version`."""

    version: int
    passed: asyncio.Future[None]
    """Future that is done when vLLM's output loop has reached the marker."""


class TokenVersions:
    """Counts the tokens of every running request by the weight version that generated them."""

    def __init__(self, core: Any, version: int) -> None:
        """Start counting the tokens that `core` outputs. core: the AsyncMPClient of an AsyncLLM whose output loop has
        not started yet. version: weight version of the first tokens."""
        self._version = version
        self._queue: asyncio.Queue[Any] = core.outputs_queue
        self.num_tokens = 0
        """Number of tokens that have arrived since the start."""
        self.num_steps = 0
        """Number of steps of all samples in which they arrived; a step brings several with speculative decoding."""
        self._spans: dict[str, list[list[int]]] = {}
        """Weight versions of each request's tokens, in order: request id -> list of [version, number of consecutive
        tokens]."""
        self._own: dict[str, int] = {}
        """Version of all tokens of a request that has an adapter, by request id."""
        self._routes = RoutesOfSamples()
        self._next_output = core.get_output_async
        core.get_output_async = self._counted_output

    @property
    def current(self) -> int:
        """Weight version of the tokens that arrive next."""
        return self._version

    def without_tokens(self) -> set[str]:
        """Return the ids of the running samples that have no token yet."""
        return {request_id for request_id, spans in self._spans.items() if not spans}

    def open(self, request_id: str, version: int | None = None) -> None:
        """Start counting the tokens of `request_id`. version: version of all its tokens; None if each token has the
        version that is current when it arrives."""
        self._spans[request_id] = []
        if version is not None:
            self._own[request_id] = version

    def close(self, request_id: str) -> None:
        """Stop counting the tokens of `request_id` and forget it. Idempotent."""
        self._spans.pop(request_id, None)
        self._own.pop(request_id, None)

    def of(self, request_id: str, num_tokens: int) -> np.ndarray:
        """Return the weight versions of the request's first `num_tokens` tokens, int32 `[num_tokens]`."""
        spans = self._spans[request_id]
        versions = np.repeat([version for version, _ in spans], [count for _, count in spans]).astype(np.int32)
        # More tokens may have arrived than the request keeps, for example tokens after a stop text or an abort.
        assert len(versions) >= num_tokens, (request_id, spans, num_tokens)
        return versions[:num_tokens]

    def count(self, request_ids: Iterable[str]) -> int:
        """Return the number of tokens that running requests have so far. Ids of others are ignored."""
        return sum(count for one in request_ids for _, count in self._spans.get(one, ()))

    def newest(self) -> list[tuple[int, int]]:
        """Return each running sample's last weight version, and how many of its last tokens that version generated. A
        sample without tokens has (-1, 0)."""
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
        """Return vLLM's next outputs, after counting their tokens. Replaces `get_output_async`; vLLM calls it only
        after it has processed all earlier outputs."""
        while isinstance(outputs := await self._next_output(), _Mark):
            self._version = outputs.version
            if not outputs.passed.done():
                outputs.passed.set_result(None)
        self._routes.split(outputs.outputs)
        for output in outputs.outputs:
            self.num_tokens += len(output.new_token_ids)
            self.num_steps += bool(output.new_token_ids)
            # vLLM appends `-` and eight characters to the id that a request was submitted with.
            request_id = output.request_id.rpartition("-")[0]
            spans = self._spans.get(request_id)
            if spans is None or not output.new_token_ids:
                continue
            version = self._own.get(request_id, self._version)
            if not spans or spans[-1][0] != version:
                spans.append([version, 0])
            spans[-1][1] += len(output.new_token_ids)
        return outputs
