"""`VllmEngine` runs vLLM with continuous batching and tensor parallelism, and replaces weights while requests run.

generate   submits one vLLM request per sample, and counts tokens by version as they come in (`versions`)
prepare    makes the workers receive and verify new weights, each in a separate thread
commit     freezes, ends or awaits requests -> loads -> drops or keeps the KV cache -> marks the version -> resumes
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig

from ....codecs.tokens.routes import RouteSpec
from ....codecs.weights.parameter_digests import ParameterDigests
from ....codecs.weights.quantization import Scheme
from ...adapters.spec import AdapterSlots
from ...process.memory import ProcessMemory, available_memory, measure
from ...weight_sync.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from ..config import LogprobWay
from ..hf.quantized_layers import quantization_of
from ..protocol import (
    BASE,
    BadSchema,
    CommitReport,
    Completion,
    EngineBroken,
    EngineDied,
    EngineStats,
    KeysAndValues,
    PauseMode,
    Prepared,
    RowScores,
    SamplingParams,
    expect_pause_mode,
)
from ..token_sampling import check_rows
from ..tokenizer import find_tokenizer
from . import library
from .adapter_slots import HeldAdapters, check_slots
from .logprobs import SET_WIDTH, LogprobTaker, RowScorer
from .options import check_cache, default_on_cpu, most_on_gpu, token_bytes
from .process import LOOK_S, HeldAdapter, ProcessSettings, VllmProcess
from .requests import BusyClock, RequestChecks, RunningRequest, completion, reported_routes
from .weight_names import WeightNames
from .worker_orders import WeightUpdates

T = TypeVar("T")
_SEVERAL = "speculative decoding samples several tokens at once"
END_S = 5.0
"""Seconds that the requests of an engine have to end when it is closed."""


class VllmEngine:
    """A vLLM engine with `tp` workers.

    As far as vLLM allows, a sample depends only on the weights, the prompt, `params.seed`, `request_id` and its own
    index, and not on which other requests run. Without `params.seed`, the engine's own `seed` is used.

    Stop tokens are the model's own end tokens (see `end_tokens`) and `params.stop_token_ids`. `stop` texts need the
    model's tokenizer. All calls must come from the event loop that made the first call.
    """

    _prefix = ""
    """Beginning of the ids of this object's samples in vLLM."""
    _base_version: int | None = None
    """Policy version of tokens that the base alone generates; None: the version of the weights in vLLM."""

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype = torch.float32,
        tp: int = 1,
        max_num_seqs: int = 256,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        seed: int = 0,
        receiver: ReceiverConfig | None = None,
        version: int = 0,
        logprobs: LogprobWay = "auto",
        routes: RouteSpec | None = None,
        options: Mapping[str, Any] = types.MappingProxyType({}),
        log: str = "",
        adapters: AdapterSlots | None = None,
        schemas: bool = False,
        quantization: Scheme | None = None,
        kv_cache_dtype: str = "auto",
        bitwise: bool = False,
    ) -> None:
        """Start vLLM on `model`, a local folder or a hub id, which takes 5 to 20 s.

        kv_cache_bytes: size of the KV cache in each worker. With None it is what `max_num_seqs` sequences can use on a
        GPU, at most what `gpu_memory_utilization` leaves there, and on a CPU 256 MiB, or more if a few sequences need
        more. gpu_memory_utilization: largest share of each GPU's memory that a worker takes; it takes less if less is
        free. max_model_len: largest number of tokens of a prompt and its completion together; None takes the model's
        own limit. receiver: settings with which new weights are received; None if the weights never change. version:
        policy version of the weights that are loaded at the start. logprobs: way in which log-probs come from the
        workers, see `rollout.logprobs`. routes: shape of the model's routes, which vLLM then records; None to record
        none. options: further arguments of AsyncEngineArgs, by name. log: file for the output of vLLM's processes; ""
        for none. adapters: room for adapters; None for none. schemas: whether requests can have JSON schemas.
        quantization: kind of the 8-bit weights; None for weights in `dtype`. kv_cache_dtype, bitwise: see their keys.

        Raises ValueError if there is no such model, vLLM cannot run it, an option is wrong or the KV cache is too small
        for one sequence, and RuntimeError with vLLM's own words if its processes do not start.
        """
        tokenizer = find_tokenizer(model)  # A tokenizer that cannot be loaded is an error before processes start.
        settings = ProcessSettings(
            model=model, dtype=dtype, tp=tp, max_num_seqs=max_num_seqs, kv_cache_bytes=kv_cache_bytes,
            gpu_memory_utilization=gpu_memory_utilization, seed=seed, max_model_len=max_model_len, options=options,
            routes=routes is not None, adapters=adapters, schemas=schemas and tokenizer is not None, log=log,
            quantization=quantization, kv_cache_dtype=kv_cache_dtype, bitwise=bitwise,
        )  # fmt: skip
        self._routes, settings = routes, _checked(settings, cpu=library.on_cpu())
        self._process = process = VllmProcess(settings, version)
        self._checks = RequestChecks(
            model, tokenizer, process.context, process.vocab_size, seed, routes=settings.routes
        )
        self._speculates = "speculative_config" in options
        self._logprobs = LogprobTaker(self._process, logprobs, _SEVERAL if self._speculates else "")
        self._updates = WeightUpdates(
            self._process, model, receiver, tp, adapters=adapters is not None, quantization=quantization
        )
        self._adapters = HeldAdapters(process, adapters, model) if adapters is not None else None
        self._tp, self._model, self._version = tp, model, version
        self.quantization = None if quantization is None else quantization_of(model, quantization)
        self._begin()

    def _begin(self) -> None:
        self._scorer = RowScorer(self._process)
        self._in_flight: dict[str, RunningRequest] = {}
        self._anew: set[str] = set()
        """Ids of samples that are withdrawn from vLLM and then submitted a second time."""
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._control = asyncio.Lock()  # Pause, resume, commit, sleep and wake run one at a time.
        self._frozen = False  # True means that vLLM runs no step.
        self._held = False  # True means that a caller has paused the engine.
        self._asleep = 0
        self._closed = False
        self._dropped = ""  # If the engine holds no weights, this is the reason, and requests are refused.
        # If the weights mix two versions, this is the reason, and requests wait for the next complete version.
        self._partial = ""
        # If the base itself mixes two versions, this is the reason, and adapters are refused.
        self._mixed = ""
        self._unproven: HeldAdapter | None = None
        """Adapter that is to be probed when the engine wakes; None for none."""
        self._death: asyncio.Task[None] | None = None
        self.stats = EngineStats(cache_tokens=self._process.cache_tokens)
        self._busy = BusyClock(self.stats)

    @property
    def version(self) -> int:
        return self._version

    @property
    def num_workers(self) -> int:
        return self._tp

    @property
    def progress(self) -> int:
        """Counter that grows with each token generated and each bucket of weights received. Tokens of requests that
        still run count too. Raises EngineDied if a process of vLLM has died."""
        self._expect_alive("progress")
        return self._process.versions.num_tokens + self._updates.num_received

    @property
    def died(self) -> str:
        """Description of the engine process or worker that has died; "" while all are alive."""
        return "" if self._closed else self._process.died or self._updates.lost

    @property
    def load_way(self) -> str:
        """How the last commit loaded the weights: `in place`, or another way and its reason. `in place` writes straight
        into the live parameters; see `LoadReport.way`."""
        return self._updates.way

    @property
    def logprob_way(self) -> str:
        """Way in which log-probs come from the workers: `arrays`, or `vllm` and the reason, see `rollout.logprobs`."""
        return self._logprobs.way

    async def change_logprobs(self, way: LogprobWay) -> None:
        """Switch to another way of taking log-probs. For benchmarks; no request may be running."""
        await self._logprobs.change(way)

    @property
    def process(self) -> VllmProcess:
        """vLLM's processes, for benchmarks that submit requests to vLLM directly."""
        return self._process

    @property
    def pids(self) -> list[int]:
        """Process ids of vLLM's engine process and its workers."""
        return self._process.pids

    def tokens_of_newest(self) -> list[tuple[int, int]]:
        """Return each running sample's last weight version, and how many of its last tokens that version generated. A
        sample without tokens has (-1, 0). For tests and benchmarks."""
        return self._process.versions.newest()

    async def call_workers(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(worker, *args)` in all workers and return the results. For tests and benchmarks that inspect
        workers.

        The workers must be able to import the function, and the engine must have been started with
        VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        return await self._process.call_function(function, *args)

    # ---------------- These methods serve requests.

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.n` completions of a prompt, in order. Cancelling the call ends the request.

        Raises ValueError if the prompt does not fit (empty, too long, unknown ids), the id is already in flight, or
        there are stop texts and the model's tokenizer cannot be loaded, EngineBroken after `sleep(2)`, EngineDied if a
        process of vLLM has died, FloatingPointError if the weights give non-finite log-probs, and RuntimeError if the
        engine is asleep or closed. After a load that failed halfway, the call waits until a complete version of the
        weights has been loaded.
        """
        self._expect_usable(f"request {request_id!r}")
        self._watch_process()
        if request_id in self._in_flight:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        prompt, params = self._checks.checked(request_id, prompt_ids, params)
        given = np.where(params.own_tokens(len(prompt)), -1, prompt)  # A sampled placeholder stands for itself.
        pictures = self._process.pictures.shown(request_id, given, params.pictures) if params.pictures else None
        request = self._in_flight[request_id] = RunningRequest(request_id, params.n, self._prefix, pictures)
        try:
            completions = None
            while completions is None:
                await request.admitted(self._flowing)
                self._expect_usable(f"request {request_id!r}")
                completions = await self._run(request, prompt, params)
        finally:
            del self._in_flight[request_id]
            request.done.set()
        self.stats.batches += 1
        self.stats.rows += params.n
        self.stats.tokens += sum(len(one.token_ids) for one in completions)
        if self._speculates:
            seen = self._process.versions
            self.stats.drafts, self.stats.accepted_tokens = seen.num_steps, seen.num_tokens - seen.num_steps
        return completions

    async def score(
        self, rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], top_k: int, temperature: float
    ) -> list[RowScores]:
        """Return the scores of the wanted tokens of each row; see `Scorer.score`. A row must leave room for one more
        token in the context. Raises ValueError for another temperature than 1, at which vLLM computes log-probs of
        prompts, and EngineDied if a process of vLLM has died."""
        self._expect_usable("score")
        self._watch_process()
        if temperature != 1.0:
            raise ValueError(f"score: got the temperature {temperature}, expected 1, the only one that vLLM offers")
        check_rows(rows, context=self._process.context - 1, vocab_size=self._process.vocab_size)
        try:
            return await self._scorer.score(rows, wanted, top_k)
        except (library.EngineDeadError, EngineDied) as error:
            raise EngineDied(f"score: {self.died or 'vLLM ended its engine process'}") from error

    async def _run(self, request: RunningRequest, prompt: list[int], params: SamplingParams) -> list[Completion] | None:
        """Return the completions of an admitted request; None if it was withdrawn and must begin again."""
        if not request.submitted:
            return [Completion.empty() for _ in range(params.n)]
        if self._adapters is None or params.adapter == BASE:
            return await self._samples(request, prompt, params)
        held = request.adapter = self._adapters.begin()
        try:
            completions = await self._samples(request, prompt, params)
        finally:
            self._adapters.end(held)
            request.adapter = None
        if request.withdrawn and not request.aborted.is_set():
            request.submitted = request.withdrawn = False
            return None
        return completions

    async def _samples(self, request: RunningRequest, prompt: list[int], params: SamplingParams) -> list[Completion]:
        tasks: list[asyncio.Task[Completion]] = []
        self._busy.change(running=1)
        try:
            if params.stop:
                await self._process.load_tokenizer(request.id)
            kept = await self._logprobs.keeps()
            if params.masked and not kept:
                raise ValueError(
                    f"rollout.mask_limit: got {params.mask_limit}, expected 0, because log-probs come in vLLM's own "
                    f"way ({self._logprobs.way}), which has no sampling masks"
                )
            sampling = self._checks.sampling(request.id, params, with_logprobs=not kept)
            tasks += [
                asyncio.ensure_future(self._sample(request, sample_id, prompt, one, params.routes_from))
                for sample_id, one in zip(request.sample_ids, sampling, strict=True)
            ]
            return await asyncio.gather(*tasks)
        except (library.EngineDeadError, EngineDied) as error:
            raise EngineDied(f"request {request.id!r}: {self.died or 'vLLM ended its engine process'}") from error
        except (RuntimeError, ValueError, library.Refused) as error:
            if not params.schema:
                raise
            raise BadSchema(f"vLLM does not take the JSON schema: {' '.join(str(error).split())}") from error
        finally:
            self._busy.change(running=-1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(
        self,
        request: RunningRequest,
        sample_id: str,
        prompt: list[int],
        params: library.SamplingParams,
        routes_from: int,
    ) -> Completion:
        versions, adapter = self._process.versions, request.adapter
        versions.open(sample_id, self._base_version if adapter is None else adapter.version)
        final, taken = None, params.logprobs is not None  # If log-probs were requested from vLLM, its output has them.
        try:
            # An abort may have come before this task started, when vLLM did not know the id yet.
            while final is None and not request.aborted.is_set() and not request.withdrawn:
                async for output in self._process.generate(sample_id, prompt, params, adapter, request.pictures):
                    final = output.outputs[0]
                    self.stats.prompt_tokens += len(prompt)
                    self.stats.cached_tokens += output.num_cached_tokens or 0
                if sample_id in self._anew:
                    self._anew.discard(sample_id)
                    final = None
            if final is None:
                return Completion.empty()
            kept, routes = None, None
            if not taken:
                taken, kept = True, await self._logprobs.take(sample_id, len(final.token_ids))
            if self._routes is not None:
                routes = reported_routes(final, len(prompt) - routes_from, self._routes, request.id)
            masked, own = SET_WIDTH in (params.extra_args or {}), versions.of(sample_id, len(final.token_ids))
            return completion(final, kept, own, request.id, routes, masked=masked)
        finally:
            versions.close(sample_id)
            if not taken:
                self._logprobs.forget(sample_id)
            self._anew.discard(sample_id)

    async def _submit_anew(self) -> None:
        """Withdraw the samples without tokens from vLLM, which is frozen, and submit them again. They then use no keys
        and values of older weights.

        Their prompts may have been computed with those weights, for themselves or for another sample of the same
        prompt. The versions of their tokens would not show it.
        """
        self._anew = self._process.versions.without_tokens()
        while waiting := list(self._anew):
            # The abort is repeated, because vLLM ignores an abort of a request that has not reached it yet.
            await self._process.llm.abort(waiting)
            await asyncio.sleep(0.02 if self._anew else 0)
            self._expect_alive("samples without tokens")

    async def _withdraw(self, requests: Sequence[RunningRequest]) -> None:
        """Take requests back from vLLM. They begin again, from their prompts, when the engine accepts requests."""
        for request in requests:
            request.withdrawn = True
        while running := [one for one in requests if one.withdrawn and not one.done.is_set()]:
            await self._process.llm.abort([sample for one in running for sample in one.sample_ids])
            await asyncio.sleep(0.02)
            self._expect_alive("requests of a wrong adapter")

    async def abort(self, request_id: str) -> None:
        if (request := self._in_flight.get(request_id)) is not None:
            await self._end([request])

    async def _end(self, requests: Sequence[RunningRequest]) -> None:
        for request in requests:
            request.aborted.set()
        while running := [request for request in requests if not request.done.is_set()]:
            # The abort is repeated, because vLLM ignores an abort of a request that has not reached it yet.
            await self._process.llm.abort([sample for request in running for sample in request.sample_ids])
            try:
                async with asyncio.timeout(0.02):
                    for request in running:
                        await request.done.wait()
            except TimeoutError:
                continue

    # ---------------- These methods pause and resume generation.

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop generating until `resume`. Requests that arrive in between wait. mode: treatment of running requests,
        see PauseMode."""
        expect_pause_mode(mode)

        async def pause() -> None:
            self._held = True
            await self._freeze(mode)

        await self._alone(pause())

    async def resume(self) -> None:
        async def resume() -> None:
            self._held = False
            await self._thaw()

        await self._alone(resume())

    async def _alone(self, change: Coroutine[Any, Any, T]) -> T:
        """Run `change`, which changes the engine's state, once no other change is in progress. The change is completed
        even if the caller is cancelled, because a change that stops halfway could leave the engine serving new weights
        as the old version.
        """
        self._watch_process()

        async def locked() -> T:
            async with self._control:
                return await change

        return await asyncio.shield(asyncio.ensure_future(locked()))

    async def _freeze(self, mode: PauseMode) -> tuple[int, int]:
        """Stop generating. Returns the number of running requests that were kept and the number that were ended.

        If vLLM is frozen already, `wait` acts like `keep`, because frozen requests would never end. vLLM itself is
        paused only when it has requests; new requests wait in this process.
        """
        self._expect_alive("pause")
        self._flowing.clear()
        running = [request for request in self._in_flight.values() if request.submitted]
        if not self._frozen:
            if mode == "wait":
                for request in running:
                    await request.done.wait()
            if not all(request.done.is_set() for request in running):
                await self._set_frozen(True)
        running = [request for request in running if not request.done.is_set()]
        if mode == "abort":
            await self._end(running)
            return 0, len(running)
        return len(running), 0

    async def _thaw(self) -> None:
        """Continue generating, unless the engine is paused, asleep, or without a complete version of the weights."""
        if self._flowing.is_set() or self._held or self._asleep or self._partial or self._dropped:
            return
        if self._frozen:
            await self._set_frozen(False)
        self._flowing.set()

    async def reset_prefix_cache(self) -> None:
        """Drop the KV cache of earlier prompts. Running requests recompute their keys and values."""

        async def reset() -> None:
            await self._freeze("keep")
            await self._process.forget_keys_and_values()
            await self._thaw()

        await self._alone(reset())

    # ---------------- These methods change and check weights.

    async def read_base(self) -> None:
        """Read the files of the model now, so that adapters must belong to these, and not to later ones in their place.
        Raises ValueError if the engine has no room for adapters, or there are no such files."""
        if self._adapters is None:
            raise ValueError("adapter: the engine was started without room for adapters")
        await self._adapters.digest()

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        """Make the workers receive and verify `update`, while the engine keeps serving the old version.

        An adapter (`update.adapter`) is always staged, and refused if it does not fit the engine's base or slots.
        Cancelling the call stops the transfer.
        """
        self._expect_alive(f"weights of version {update.version}")
        if update.adapter is not None:
            if self._adapters is None or self._mixed:
                why = self._mixed or "the engine was started without room for adapters"
                raise ValueError(f"adapter: version {update.version} cannot be taken, because {why}")
            await self._adapters.check(update, update.adapter)
        return await self._updates.prepare(update, lambda: -1 if self._partial or self._dropped else self._version)

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        """Load the prepared `version` and serve it from now on.

        in_flight: treatment of running requests, see PauseMode. kv: treatment of the keys and values of kept requests.
        With `recompute` every later log-prob is that of the new model. With `keep` a request reads only keys and values
        that were computed since its first token; when the KV cache is full, vLLM recomputes the keys and values of
        requests that have to wait.

        A paused engine keeps its requests in flight, or ends them for `abort`, and stays paused. A sleeping engine
        allocates only the memory of its weights; `wake` allocates the rest. If the load fails (WeightTransferError
        without staging, else EngineBroken), requests in flight and new ones wait until a later version is loaded
        completely, so that no token is generated with a mix of two versions.

        An adapter gets a slot beside the older versions. Requests in flight finish with the version with which they
        began, and no request is stopped, unless `in_flight` is `abort`. If all slots are taken, the call waits until
        the requests of an old version have ended; those of a paused engine run on meanwhile. When whole weights replace
        the base, requests with an adapter begin again.
        """
        self._expect_alive(f"weights of version {version}")
        expect_pause_mode(in_flight)
        if version != self._updates.loading and not self._serves(version):
            self._updates.expect(version)
        return await self._alone(self._commit(version, in_flight, kv))

    async def _commit(self, version: int, in_flight: PauseMode, kv: KeysAndValues) -> CommitReport:
        async with self._updates.turn:
            if self._serves(version):
                return CommitReport(version, 0.0, 0.0, 0, 0)
            started = time.perf_counter()
            self._updates.expect(version)
            if self._updates.is_adapter:
                return await self._commit_adapter(version, in_flight)
            kept, aborted = await self._freeze(in_flight)
            await self._withdraw([one for one in self._in_flight.values() if one.adapter is not None])
            stopped = time.perf_counter()
            if self._updates.prepared != version:  # The version was dropped while the engine froze.
                await self._thaw()
                self._updates.expect(version)
            try:
                if self._asleep and self._process.can_sleep:
                    await self._process.wake("weights")
                # vLLM drops keys and values while the workers load. A single worker runs in the engine process's own
                # interpreter, so dropping them first would delay the start of its load.
                keeps = kv == "keep" and kept > 0
                await self._updates.load(version, None if keeps else self._process.forget_keys_and_values)
                await self._process.mark(version)
                if keeps:
                    await self._submit_anew()
            except Exception as error:
                raise await self._break(version, error) from error
            loaded = time.perf_counter()
            if self._adapters is not None:
                self._adapters.current = None
            self._version, self._partial, self._dropped, self._mixed = version, "", "", ""
            await self._thaw()
            return CommitReport(version, stopped - started, loaded - stopped, kept, aborted)

    async def _commit_adapter(self, version: int, in_flight: PauseMode) -> CommitReport:
        """Put the prepared adapter into service beside the older ones."""
        adapters, self._unproven = self._adapters, None
        assert adapters is not None
        running = [request for request in self._in_flight.values() if request.submitted]
        aborted = len(running) if in_flight == "abort" else 0
        if aborted:
            await self._end(running)
        await adapters.remove_old()
        if adapters.full:
            async with self._vllm_running():
                while adapters.full:
                    self._expect_alive(f"weights of version {version}")
                    await asyncio.sleep(0.01)
                    await adapters.remove_old()
        self._updates.expect(version)
        started = time.perf_counter()
        held = adapters.new(version)
        try:
            if self._asleep and self._process.can_sleep:
                await self._process.wake("weights")
            await self._updates.load(version, adapter=held.number)
            await adapters.serve(held)
        except Exception as error:
            await self._freeze("keep")
            raise await self._break(version, error, held) from error
        self._version, self._partial, self._dropped = version, "", ""
        await adapters.remove_old()
        await self._thaw()
        kept = sum(not request.done.is_set() for request in running)
        return CommitReport(version, 0.0, time.perf_counter() - started, kept, aborted)

    @asynccontextmanager
    async def _vllm_running(self) -> AsyncIterator[None]:
        """Context manager in which vLLM runs the requests that it has, even if the engine is paused. New requests of a
        paused engine still wait."""
        frozen = self._frozen
        if frozen:
            await self._set_frozen(False)
        try:
            yield
        finally:
            if frozen and not self._closed and not self.died:
                await self._set_frozen(True)

    async def _set_frozen(self, frozen: bool) -> None:
        await (self._process.pause() if frozen else self._process.resume())
        self._frozen = frozen
        self._busy.change(paused=frozen)

    async def verify_weights(self, digests: ParameterDigests) -> int:
        """Make each worker compare its weights with the trainer's. Returns the smallest number of weights that a worker
        has compared: `ModelLoader.served` says which weights can be compared.

        An adapter's tensors are compared as sent and as vLLM keeps them in the slot. Then a fixed prompt must have
        another log-prob than with the base alone, unless all matrices B are zero; a sleeping engine checks this later.
        """
        self._expect_alive(f"weights of version {digests.version}")
        return await self._alone(self._verify(digests))

    async def _verify(self, digests: ParameterDigests) -> int:
        async with self._updates.turn:
            if not self._serves(digests.version):
                raise ValueError(
                    f"weights: version {digests.version} cannot be verified, because the engine does not serve it; the "
                    f"last version in service is {self._version}"
                )
            held = None if self._adapters is None else self._adapters.current
            try:
                count, changes = await self._updates.verify(digests, 0 if held is None else held.number)
            except Exception as error:
                await self._freeze("keep")
                raise await self._break(digests.version, error, held) from error
            if held is not None and changes:
                await self._probe(held)
            return count

    async def _probe(self, held: HeldAdapter) -> None:
        """Check that the adapter changes what the model says, now or when the engine wakes."""
        assert self._adapters is not None
        self._unproven = held if self._asleep and self._process.can_sleep else None
        if self._unproven is not None:
            return
        try:
            async with self._vllm_running():
                await self._adapters.probe(held)
        except Exception as error:
            await self._freeze("keep")
            raise await self._break(held.version, error, held) from error

    async def _break(self, version: int, error: Exception, adapter: HeldAdapter | None = None) -> Exception:
        """Keep the engine stopped because its weights are wrong. A failed load leaves a mix of two versions; a
        comparison finds weights that differ from the trainer's. Returns the error to raise.

        vLLM stays frozen with the requests in flight, which continue once a complete version has been loaded. If the
        version is an adapter, it leaves its slot, and its requests will begin again from their prompts.
        """
        self._partial = f"version {version} was not loaded whole: {error}"
        if died := self.died:
            return EngineDied(f"weights of version {version}: {died}")
        await self._updates.drop(version)
        if adapter is None or self._adapters is None:
            self._mixed = self._partial
        else:
            await self._withdraw([one for one in self._in_flight.values() if one.adapter is adapter])
            await self._adapters.remove(adapter)
        if isinstance(error, WeightTransferError):
            return error
        return EngineBroken(f"weights: {self._partial}; requests wait until a whole version is committed")

    def _serves(self, version: int) -> bool:
        return version == self._version and not self._partial and not self._dropped

    async def drop_weights(self, version: int) -> None:
        """Forget a prepared version, or stop receiving it. Idempotent; the current version stays in service."""
        self._expect_alive(f"weights of version {version}")
        await self._updates.drop(version)

    # ---------------- These methods free memory and close the engine.

    async def sleep(self, level: int = 1) -> None:
        """Wait until requests in flight have ended, then release device memory. A paused engine aborts its requests.

        level: 1 keeps a copy of the weights in host memory, 2 drops them, so that requests are refused until a version
        is committed. An engine with room for adapters does 1 for 2, because adapters do not bring back the base. On a
        CPU no memory is released. Idempotent. Raises ValueError for another level.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level: got {level}, expected 1 or 2")
        level = 1 if self._adapters is not None else level

        async def sleep() -> None:
            if self._asleep and not self._process.partly_awake:
                return
            if self._process.partly_awake:  # A commit has woken only the weights, and vLLM can only release everything.
                await self._process.wake()
            await self._freeze("abort" if self._frozen else "wait")
            self._asleep = level
            if self._process.can_sleep:
                await self._process.sleep(level)
            if level == 2:
                self._dropped = "sleep(2) dropped the weights"

        await self._alone(sleep())

    async def wake(self) -> None:
        """Take back the memory that `sleep` released, and keep generating, unless a caller has paused the engine.
        Idempotent."""

        async def wake() -> None:
            if not self._asleep:
                return
            if self._process.can_sleep:
                await self._process.wake()  # This call also resumes vLLM's scheduler.
                self._frozen = False
                self._busy.change(paused=False)
            self._asleep = 0
            if self._unproven is not None:
                await self._probe(self._unproven)
            await self._thaw()

        await self._alone(wake())

    async def memory(self) -> ProcessMemory:
        """Return the memory of vLLM's processes. Where NVML cannot tell them apart, the GPU memory is what all
        processes hold on the GPUs of this engine's workers."""
        self._expect_alive("memory")
        held = await asyncio.to_thread(measure, self.pids)
        if held.device_bytes or not self._process.can_sleep:
            return held
        used = await self._process.call("headrace_used_bytes", returns=int)
        return ProcessMemory(sum(used), held.host_bytes, whole_device=True)

    async def close(self) -> None:
        """Shut down vLLM's processes. Requests in flight return the tokens generated so far. Idempotent."""
        if self._closed:
            return
        await self._end_all()
        await self._logprobs.close()
        await self._process.end()
        await self._updates.close()

    async def _end_all(self) -> bool:
        """Take no more calls, and end the requests in flight, within END_S seconds. Returns whether vLLM is alive.
        Requests that have not ended by then raise an error when vLLM's process ends."""
        alive, self._closed = not self.died, True
        if self._death is not None:
            self._death.cancel()
        if alive:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end(list(self._in_flight.values())), END_S)
        self._flowing.set()
        return alive

    # ---------------- These private methods notice the death of vLLM's process and refuse calls that cannot succeed.

    def _watch_process(self) -> None:
        if self._death is None:
            self._death = asyncio.create_task(self._tell_death())

    async def _tell_death(self) -> None:
        while not self.died:
            self._process.trim_log()
            await asyncio.sleep(LOOK_S)
        self._flowing.set()  # Waiting requests then find that the engine has died.

    def _expect_alive(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the engine is closed")
        if died := self.died:
            raise EngineDied(f"{what}: {died}")

    def _expect_usable(self, what: str) -> None:
        self._expect_alive(what)
        if self._asleep:
            raise RuntimeError(f"{what}: the engine is asleep: wake it first")
        if self._dropped:
            raise EngineBroken(f"{what}: {self._dropped}; commit a version first")


def _checked(settings: ProcessSettings, *, cpu: bool) -> ProcessSettings:
    """Return `settings`. If no size of the KV cache is set, they get one on a CPU, and the largest useful one on a GPU.
    Raises ValueError if the model cannot be loaded, or if a given size is too small for one sequence."""
    if settings.tp < 1 or settings.max_num_seqs < 1:
        raise ValueError(f"rollout: got tp={settings.tp} and max_num_seqs={settings.max_num_seqs}, expected at least 1")
    try:
        names = WeightNames(settings.model, settings.quantization)
        model = AutoConfig.from_pretrained(settings.model).to_dict()
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model: {settings.model!r} could not be loaded as a causal LM: {reason}") from error
    settings = replace(settings, exact=names.exact)
    if settings.adapters is not None:
        check_slots(settings.adapters)
        settings = replace(settings, adapted=tuple(sorted({name.rpartition(".")[2] for name in names.linear})))
    length = settings.max_model_len or model.get("max_position_embeddings") or 0
    value_bytes = 1 if settings.kv_cache_dtype == "fp8" else settings.dtype.itemsize
    per_token = token_bytes(model, value_bytes=value_bytes, tp=settings.tp) if length else None
    if settings.kv_cache_bytes is not None:
        if "kv_cache_dtype" not in settings.options:
            check_cache(settings.kv_cache_bytes, per_token, length)
        return settings
    if not cpu:  # vLLM takes the memory that gpu_memory_utilization leaves, but no more than it can use.
        most = most_on_gpu(per_token, length, settings.max_num_seqs, settings.options)
        return replace(settings, most_cache_bytes=most)
    size = default_on_cpu(per_token, length, settings.max_num_seqs, available_memory())
    return replace(settings, kv_cache_bytes=size)
