"""`HfEngine` runs a Hugging Face causal LM in this process and decodes concurrent requests in batches."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from ....codecs.tokens.routes import RouteSpec
from ....codecs.weights.parameter_digests import ParameterDigests, compare_digests
from ....codecs.weights.quantization import Quantization, Scheme
from ...adapters.spec import PREFIX, AdapterSlots, AdapterSpec
from ...process.memory import ProcessMemory, measure
from ...weight_sync.base_offer import WeightOffer, WeightServer
from ...weight_sync.transports.protocol import ReceiverConfig
from ..config import Attention
from ..in_process import DROPPED, InProcessEngine
from ..protocol import (
    BASE,
    Completion,
    EngineBroken,
    EngineStats,
    KeysAndValues,
    PauseMode,
    RowScores,
    SamplingParams,
    expect_pause_mode,
)
from ..stop_tokens import end_tokens, resolve_stops
from ..token_sampling import StopTexts, check_rows, checked_prompt, row_keys
from ..tokenizer import find_tokenizer
from .adapters import Adapter, AdapterLayers
from .decoding import BaseAlone, Batch, DecodeRequest, Decoding, Pending, Served
from .model import ParameterSet, RouteRecorder, load_model
from .pictures import feature_places, prompt_pictures
from .positions import counts_columns, fix_rotary_length
from .quantized_layers import quantization_of
from .scoring import score_rows

T = TypeVar("T")


class HfEngine(InProcessEngine[list[tuple[str, torch.Tensor]] | Adapter]):
    """Generation engine for a Hugging Face causal LM. It decodes one batch at a time in one thread; a batch consists of
    waiting requests with the same sampling parameters.

    A sample depends only on the weights, the request (prompt, sampling parameters and `request_id`), the index of the
    sample and the seed: `params.seed`, or the engine's own `seed` if that is None. The rest of the batch affects at
    most the last bits of floating-point results. Global random generators are neither read nor advanced.

    Stop tokens are the model's own end tokens (see `end_tokens`) and `params.stop_token_ids`. Weights can
    change between two decoding steps. A request that continues after such a change either keeps the keys and values
    that the older weights computed for its earlier tokens, or recomputes them, as the commit says.

    With `adapters`, an update may be an adapter instead, which is served beside the version before it: a request has
    the version that is in service when its batch begins, and keeps it for all its tokens. A version leaves when a newer
    one is in service and the batch that uses it has ended. New weights of the whole model replace the base model and
    end the service of all adapters; adapters that come later must still belong to the model that was loaded first.
    """

    _offer: WeightServer | None = None
    """Server of the base of the adapters; None while it is not offered."""

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype = torch.float32,
        attention: Attention = "auto",
        device: str = "cpu",
        max_batch: int = 256,
        max_model_len: int | None = None,
        seed: int = 0,
        receiver: ReceiverConfig | None = None,
        version: int = 0,
        routes: RouteSpec | None = None,
        adapters: AdapterSlots | None = None,
        quantization: Scheme | None = None,
        bitwise: bool = False,
    ) -> None:
        """Load the model from `path`, a local folder or a hub id.

        attention: as in `ModelConfig`. max_batch: largest number of rows decoded together. A request is never split, so
        one whose `n` is larger runs alone. max_model_len: largest number of tokens of a prompt and its answer together;
        None: the model's own limit. Only models whose positions depend on it (see `fix_rotary_length`) refuse longer
        ones. receiver: settings of the receiver of new weights; None when weights never change. version: policy version
        of the loaded weights. routes: shape of the routes to record; None records no routes. adapters: room for
        adapters; None accepts none. quantization: kind of the 8-bit weights with whose values the engine computes.
        bitwise: see `run.bitwise`. Raises ValueError if there is no such model, or the engine cannot run it.
        """
        if max_batch < 1:
            raise ValueError(f"max_batch: got {max_batch}, expected at least 1")
        self._model: Any = load_model(path, dtype, attention, fixed_shapes=bitwise).to(torch.device(device))
        self._recorder = None if routes is None else RouteRecorder(self._model, routes)
        self._device = torch.device(device)
        self._parameters = ParameterSet(self._model, quantization and quantization_of(path, quantization))
        self._layers = None if adapters is None else AdapterLayers(self._model, path, adapters)
        self.adapter: Adapter | None = None
        """The adapter in service; None for the model alone."""
        self.base = BaseAlone(version, EngineStats())
        """The model without its adapter, which answers the requests that name it."""
        super().__init__(receiver, self._check, version)
        self._max_batch, self._seed, self._receiver = max_batch, seed, receiver
        text_config = self._model.config.get_text_config()
        model_context: int | None = getattr(text_config, "max_position_embeddings", None)
        limits = (fix_rotary_length(self._model, max_model_len), model_context)
        self._context: int | None = min((limit for limit in limits if limit is not None), default=None)
        self._needs_equal_prompts = counts_columns(text_config, max_model_len or model_context or 0)
        self._vocab_size: int = self._model.get_input_embeddings().num_embeddings
        self._tokenizer: Any = find_tokenizer(path)
        self._stop_ids = np.array(end_tokens(path, self._tokenizer).ids, dtype=np.int64)
        self._in_flight: dict[str, Pending] = {}
        self._held: deque[Pending] = deque()  # These requests arrived while the engine was paused.
        self._queue: deque[Pending] = deque()
        self._batch: Batch | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")
        self._exclusive = asyncio.Lock()  # This lock is held while a batch decodes or weights change.
        self._swapping = asyncio.Lock()  # Only one commit at a time changes weights.
        self._interrupt = threading.Event()  # This event makes the thread return at the next step.
        self._serving: asyncio.Task[None] | None = None
        self._paused = False  # While this is True, new requests wait.
        self._full = False  # While this is True, a commit waits for room for an adapter, and no batch begins.
        self._frozen = False  # While this is True, no batch is decoded.

    @property
    def quantization(self) -> Quantization | None:
        """The weights that come in 8 bits; None if none do."""
        return self._parameters.quantization

    @property
    def progress(self) -> int:
        """Sum of three counts, which changes whenever the engine makes progress. They count tokens returned, decoding
        steps of the current batch, and weight buckets received."""
        decoding = None if self._batch is None else self._batch.decoding
        tokens = self.stats.tokens + self.base.stats.tokens
        return tokens + (0 if decoding is None else decoding.num_steps) + self._incoming.num_received

    # ---------------- These methods serve and pause requests.

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions, in order. Cancelling the call ends the request at the next decoding step.

        The pictures of the prompt are encoded once for all `n`. Raises ValueError if the prompt does not fit (empty,
        too long, unknown token ids, placeholders that are not those of its pictures), a stop text cannot be found, or
        the request id is already in flight, FloatingPointError if the model's logits are not finite, EngineBroken if
        `sleep` has dropped the weights, and RuntimeError if the engine is asleep or closed.
        """
        self._expect_usable(request_id, self._in_flight)
        pending = self._in_flight[request_id] = self.checked(request_id, prompt_ids, params, self)
        if self._paused:
            self._held.append(pending)
        else:
            self.enqueue([pending])
        try:
            return await pending.future
        finally:
            del self._in_flight[request_id]
            if pending.future.cancelled():
                self.end(pending)

    def checked(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, served: Served) -> Pending:
        """Return a request that fits the model. Raises ValueError as `generate` does. served: what answers it."""
        self._expect_free(params)
        params = resolve_stops(params, self._tokenizer)
        prompt = checked_prompt(request_id, prompt_ids, params, context=self._context, vocab_size=self._vocab_size)
        keys = row_keys(self._seed if params.seed is None else params.seed, request_id, params.n)
        shown, own = prompt_pictures(params.pictures), params.own_tokens(len(prompt))
        if shown is not None:
            name = f"request {request_id!r}: prompt"
            feature_places(self._model, prompt[None], ~own[None], shown, name=name)
        request = DecodeRequest(prompt, keys, own, params.routes_from, shown)
        served = self.base if params.adapter == BASE and self._layers is not None else served
        return Pending(request, params, asyncio.get_running_loop().create_future(), served)

    def enqueue(self, requests: Iterable[Pending]) -> None:
        """Let requests be decoded."""
        self._queue.extend(requests)
        self._serve_on()

    async def score(
        self, rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], top_k: int, temperature: float
    ) -> list[RowScores]:
        """Return the scores of the wanted tokens of each row under the model's weights, without an adapter. See
        `Scorer.score`. Raises RuntimeError if the engine is asleep or closed."""
        self._expect_usable("score", ())
        check_rows(rows, context=self._context, vocab_size=self._vocab_size)
        async with self._exclusive:
            return await self._in_thread(score_rows, self._model, rows, wanted, top_k, temperature)

    async def abort(self, request_id: str) -> None:
        pending = self._in_flight.get(request_id)
        if pending is not None:
            self.end(pending)

    def end(self, pending: Pending) -> None:
        """Abort a request. It is answered with the tokens generated so far: immediately if it is not being decoded,
        otherwise after the current decoding step."""
        for queue in (self._held, self._queue):
            if pending in queue:
                queue.remove(pending)
                pending.settle_empty()
                return
        pending.aborted = True
        self._interrupt.set()
        if self._batch is not None and not self._batch.stepping:
            self._batch.settle_aborted()
            if self._batch.done:
                self._batch = None

    def withdraw(self, served: Served, *, running: bool) -> list[Pending]:
        """Take the waiting requests of a run's seat out of the queue, and return them. running: whether those of the
        current batch begin again, too; no thread may be decoding then."""
        taken = [pending for pending in self._queue if pending.served is served]
        self._queue = deque(pending for pending in self._queue if pending.served is not served)
        if running and self._batch is not None and self._batch.served is served:
            taken = [*self._batch.take_back(), *taken]
            self._batch = None
        return taken

    @property
    def layers(self) -> AdapterLayers:
        """Layers that compute with adapters. Raises ValueError if the engine has no room for any."""
        if self._layers is None:
            raise ValueError(
                "weights: got an adapter, expected the model's weights, because the engine has no room for any"
            )
        return self._layers

    async def read_base(self) -> None:
        """Read the files of the model now, so that adapters must belong to these, and not to later ones in their place.
        Raises ValueError if the engine has no room for adapters, or there are no such files."""
        layers = self.layers
        await asyncio.to_thread(lambda: layers.base)

    async def offer_base(self) -> WeightOffer | None:
        await self.end_offer()
        if self._layers is None or self._receiver is None or self.quantization is not None:
            return None  # Rounded weights are not the base that a trainer reads.
        receiver = self._receiver
        self._offer = WeightServer(self._name, receiver.key, self._weight, receiver.sync.timeout_s)
        return self._offer.offer

    def _weight(self, name: str) -> torch.Tensor:
        module, _, own = name.rpartition(".")
        owner = self._model.get_submodule(module)
        return {**owner._parameters, **owner._buffers}[own]  # An attribute can be experts with an adapter added.

    async def end_offer(self) -> None:
        offer, self._offer = self._offer, None
        if offer is not None:
            await asyncio.to_thread(offer.close)

    async def load(self, adapter: Adapter) -> None:
        """Move an adapter to the device of the model."""
        await asyncio.to_thread(adapter.move, self._device)

    async def alone(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the decoding thread between two decoding steps."""
        self._interrupt.set()
        async with self._exclusive:
            return await self._in_thread(function, *args)

    async def pause(self, mode: PauseMode = "wait") -> None:
        expect_pause_mode(mode)
        self._paused = True
        self._frozen = self._frozen or mode == "keep"  # A frozen engine stays frozen until `resume`.
        if mode == "abort":
            for pending in list(self._in_flight.values()):
                self.end(pending)
        if self._frozen:
            self._interrupt.set()
            async with self._exclusive:
                return
        while self._num_running and self._paused and not self._frozen and self._usable:
            self._serve_on()
            if self._serving is not None:
                await asyncio.wait({self._serving})

    async def resume(self) -> None:
        self._paused = self._frozen = False
        held, self._held = self._held, deque()
        self.enqueue(held)

    # ---------------- These methods change and check weights and free memory.

    def _check(
        self, named: Mapping[str, torch.Tensor], spec: AdapterSpec | None
    ) -> list[tuple[str, torch.Tensor]] | Adapter:
        if spec is None:
            return self._parameters.match(named)
        return self.layers.check(spec, named)

    def _replaces(self, ready: list[tuple[str, torch.Tensor]] | Adapter) -> bool:
        return not isinstance(ready, Adapter)

    async def _replace_weights(self, version: int, kv: KeysAndValues) -> int:
        kept = self._num_running
        # The swap finishes even if this call is cancelled; otherwise the new weights could be served as the old
        # version.
        await asyncio.shield(self._swap(version, kv))
        return kept if self.adapter is None else 0

    async def _swap(self, version: int, kv: KeysAndValues) -> None:
        async with self._swapping:
            if self._serves(version):
                return  # An earlier commit has already loaded this version.
            try:
                if not self._replaces(self._incoming.expect(version)):
                    await self._wait_for_room(version)
                async with self._incoming.committing(version) as ready:
                    if isinstance(ready, Adapter):
                        await self._serve_adapter(version, ready)
                    else:
                        await self._serve_weights(version, ready, kv)
            finally:
                self._full = False
                if not self._paused:
                    self._serve_on()

    async def _serve_weights(self, version: int, pairs: list[tuple[str, torch.Tensor]], kv: KeysAndValues) -> None:
        """Replace the model's weights. The current batch continues with the new ones, and without an adapter."""
        async with self._exclusive:
            if self._asleep:
                await self._take_back()
            await self._in_thread(self._parameters.copy, pairs)
            self._put_in_service(version)
            self.adapter, self.base.version = None, version
            if self._batch is not None:
                self._batch.continue_with(version, None, kv)

    async def _serve_adapter(self, version: int, adapter: Adapter) -> None:
        """Serve an adapter to the batches that begin from now on. Only a batch whose own version differs from the
        trainer's continues with the new one."""
        if self._asleep:
            async with self._exclusive:
                await self._take_back()
        await self.load(adapter)
        if self._batch is not None and self._batch_differs:
            self._batch.continue_with(version, adapter, "recompute")
        self.adapter = adapter
        self._put_in_service(version)

    @property
    def _batch_differs(self) -> bool:
        return self._batch is not None and bool(self._differs) and self._batch.version == self._version

    async def _wait_for_room(self, version: int) -> None:
        """Wait until a slot is free for a new adapter, and let no batch begin until then. The adapter in service needs
        none, because the new one takes its place; the one that the current batch uses does.

        Raises RuntimeError if that batch cannot end, because it is frozen.
        """
        room = self.layers.slots.count
        self._full = True
        while room < 2 and self._batch is not None and self._batch.adapter is not None and not self._batch_differs:
            self._serve_on()
            if self._serving is None or self._serving.done():
                raise RuntimeError(
                    f"weights: version {version} finds no room beside version {self._batch.version}, whose requests "
                    f"are frozen, because the engine holds {room} adapter at a time"
                )
            await asyncio.wait({self._serving})

    async def verify_weights(self, digests: ParameterDigests) -> int:
        async with self._swapping, self._exclusive:
            self._expect_served(digests)
            count, self._differs = await self._in_thread(self._verify, digests)
        if self._differs:
            raise EngineBroken(self._differs)
        return count

    def _verify(self, digests: ParameterDigests) -> tuple[int, str]:
        if self.adapter is not None:
            return self.layers.verify(self.adapter, digests, self._name)
        if any(weight.name.startswith(PREFIX) for weight in digests.weights):
            raise ValueError(
                f"weights: version {digests.version} cannot be verified, because it is served without an adapter"
            )
        return compare_digests(digests, self._parameters.served, self._name)

    async def sleep(self, level: int = 1) -> None:
        """Wait for the running batch, unless a pause in mode `keep` has frozen it, and free the memory of the weights.

        Level 1 moves the weights to host memory, which has no effect on the CPU. Level 2 drops them, except in an
        engine with room for adapters: adapters do not bring the base model back, so that level 2 does the same as level
        1. Keys and values of a frozen batch stay where they are.
        """
        self._fall_asleep(level)
        await self._incoming.free_spare()
        async with self._exclusive:
            if not self._asleep:
                return
            if level == 2 and self._layers is None:
                self._broken = DROPPED
                self._parameters.drop()
            await self._in_thread(self._move, torch.device("cpu"))

    async def wake(self) -> None:
        async with self._exclusive:
            if not self._asleep:
                return
            await self._take_back()
            self._unusable = ""
        self._serve_on()

    async def _take_back(self) -> None:
        """Move the weights to the engine's device again, and allocate memory for those that `sleep` has dropped."""
        await self._in_thread(self._move, self._device)
        self._parameters.refresh(self._model)
        self._parameters.allocate()

    async def memory(self) -> ProcessMemory:
        """Return the memory of this process, in which the engine lives. Without NVML, its GPU memory is what torch has
        reserved."""

        def reserved() -> int:
            return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

        return await asyncio.to_thread(measure, [os.getpid()], reserved)

    async def close(self) -> None:
        """Close the engine. Queued requests raise RuntimeError; running requests return the tokens generated so far.

        Idempotent.
        """
        self._unusable = "closed"
        for queue in (self._held, self._queue):
            while queue:
                queue.popleft().fail(RuntimeError("the engine was closed before the request ran"))
        for pending in list(self._in_flight.values()):
            self.end(pending)
        await self.end_offer()
        async with self._exclusive:
            self._thread.shutdown(wait=False)
        self._incoming.close()

    # ---------------- These private methods decode batch after batch.

    @property
    def _usable(self) -> bool:
        return not self._unusable and not self._broken and not self._differs

    @property
    def _is_paused(self) -> bool:
        return self._paused

    @property
    def _num_running(self) -> int:
        """Number of unanswered requests, not counting those that a pause holds back."""
        return len(self._queue) + (0 if self._batch is None else self._batch.num_open)

    @property
    def _has_work(self) -> bool:
        return self._batch is not None or (bool(self._queue) and not self._full)

    def _serve_on(self) -> None:
        """Start a task that decodes the waiting requests, unless one is running already. Does nothing if the engine is
        frozen (paused in mode `keep`), asleep, broken or closed."""
        if not self._has_work or self._frozen or not self._usable:
            return
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        """Decode batch after batch until no request is left. A freeze (a pause in mode `keep`), sleep, a fault or
        `close` ends it earlier."""
        await asyncio.sleep(0)  # Calls that were made in the same turn of the event loop join the first batch.
        while self._has_work and not self._frozen and self._usable:
            async with self._exclusive:
                if not self._frozen and self._usable:
                    await self._decode_on()

    async def _decode_on(self) -> None:
        """Decode the current batch, or start a new one if there is none, until it ends or is interrupted. Then answer
        the requests that have ended."""
        if self._batch is None:
            if not self._has_work:
                return
            self._batch = Batch(self._take())
        batch = self._batch
        self._interrupt.clear()
        started = time.perf_counter()
        batch.stepping = True
        try:
            finished = await self._in_thread(self._run, batch)
        except Exception as error:  # Every caller in the batch gets this error.
            batch.fail(error)
            finished = True
        finally:
            batch.stepping = False
        batch.served.stats.busy_s += time.perf_counter() - started
        batch.settle() if finished else batch.settle_aborted()
        if batch.done:
            self._batch = None

    def _run(self, batch: Batch) -> bool:
        if batch.decoding is None:
            params = batch.params
            stop_ids = np.union1d(self._stop_ids, np.array(params.stop_token_ids, dtype=np.int64))
            requests = [pending.request for pending in batch.pendings]
            texts = StopTexts(self._tokenizer, params.stop) if params.stop else None
            batch.decoding = Decoding(self._model, requests, params, stop_ids, texts, self._recorder)
        with nullcontext() if self._layers is None else self._layers.active(batch.adapter):
            return batch.decoding.run(batch.version, self._interrupt)

    def _take(self) -> list[Pending]:
        """Take the oldest request from the queue, with others that share its sampling parameters, up to max_batch rows.
        Returns the requests in queue order."""
        first = self._batch_key(self._queue[0])
        taken: list[Pending] = []
        left: deque[Pending] = deque()
        num_rows = 0
        for pending in self._queue:
            fits = self._batch_key(pending) == first and (not taken or num_rows + pending.params.n <= self._max_batch)
            (taken if fits else left).append(pending)
            num_rows += pending.params.n if fits else 0
        self._queue = left
        return taken

    def _batch_key(self, pending: Pending) -> tuple:
        """Return what requests must have in common to be decoded in one batch, which pads prompts on the left."""
        return (pending.batch_key, len(pending.request.prompt_ids) if self._needs_equal_prompts else None)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        for adapter in (self.adapter, None if self._batch is None else self._batch.adapter):
            if adapter is not None:
                adapter.move(device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
