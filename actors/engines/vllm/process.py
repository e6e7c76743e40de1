"""`VllmProcess` starts vLLM's engine process and its workers, calls and pauses them, and finds out why one ended.

The messages that the engine and its workers exchange about weights are defined here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import psutil
import torch

from ....codecs import messages
from ....codecs.weights.quantization import Scheme
from ...adapters.spec import AdapterSlots
from ..protocol import EngineDied
from . import library
from .bitwise.kernels import invariant_environment
from .options import arguments
from .quantized.start_format import EXACT_SCALES, quantization_arguments
from .start import CANCELLED, CoreLog, engine_environment, exit_code, exit_words, lives, take_standby
from .step_outputs import SCHEDULER, TokenVersions
from .vision import prepared_pictures
from .vision.prepared_pictures import PictureTaker, ShownPictures

BACKEND = "headrace"
"""Name under which Headrace's weight-transfer engine is registered in vLLM."""
WORKER = "headrace.actors.engines.vllm.worker.WeightWorker"
"""Import path of the class that vLLM mixes into its workers."""
T = TypeVar("T")
CALL_PATIENCE_S = 300.0
"""Longest time in seconds to wait for the engine process's answer to any call that is not a generation request."""
LOOK_S = 0.2
"""Seconds between two checks that the engine process is alive, while waiting for an answer from it."""
PICTURES_GIB = 1
"""GiB of pictures that the engine process keeps, so that those of the n samples of a request are sent to it once."""
CLOSE_PATIENCE_S = 10.0
"""Seconds that vLLM's processes get to end by themselves before they are killed."""


@dataclass(frozen=True, slots=True)
class PrepareState:
    """A worker's progress in preparing the weight version that was announced to it."""

    version: int
    phase: Literal["none", "receiving", "ready", "failed"]
    staged: bool = False
    """True if the complete version has been received and verified; False if the worker has only joined its transfer."""
    kind: Literal["", "transfer", "value"] = ""
    """Kind of the failure: `transfer` if the version did not arrive completely, `value` if it does not fit the
    model."""
    error: str = ""
    """Description of the failure; "" when there was none."""

    def describe(self) -> str:
        """Describe the state for an error message."""
        return f"version {self.version} is {self.phase}" if self.phase != "none" else "nothing was announced yet"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of comparing a worker's weights with the trainer's digests."""

    num_compared: int
    """Number of weights that the worker compared."""
    error: str = ""
    """Error text: it names a weight that differs, or says why the comparison failed; "" when no weight differs."""
    changes: bool = False
    """True for an adapter whose matrices are so large that the model must say something else with it."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of loading a version in one worker."""

    seconds: float
    """Seconds that the load took."""
    way: str
    """Way in which the weights were loaded. `in place`: recorded copies into the live parameters were repeated. `in
    place by the loaders: ` and `layerwise: ` are followed by the reason. `adapter` is a slot beside others."""
    error: str = ""
    """Error that ended the load and left a mix of two versions in the model; "" when the load succeeded."""
    in_transfer: bool = False
    """True if the load failed because the version did not arrive completely."""


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """A version of an adapter that has a slot in vLLM."""

    version: int
    number: int
    """Id of this version in vLLM. It is never used again, not even for the same version."""
    request: Any
    """vLLM's reference to the adapter (LoRARequest)."""
    num_requests: int = 0
    """Number of requests that began with this version and have not ended."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings with which vLLM runs a model."""

    model: str
    dtype: torch.dtype
    tp: int
    max_num_seqs: int
    kv_cache_bytes: int | None
    """Size in bytes of the KV cache in each worker; None leaves the choice to vLLM."""
    gpu_memory_utilization: float
    """Largest share of each GPU's memory that a worker takes; it takes less if less is free."""
    seed: int
    max_model_len: int | None
    """Largest number of tokens of a prompt and its completion together; None takes the model's own limit."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, by name; they take precedence over the engine's own defaults."""
    routes: bool = False
    """Whether vLLM records the experts that the model's routers choose, and returns them with each sample."""
    adapters: AdapterSlots | None = None
    """Room for adapters; None for none."""
    adapted: tuple[str, ...] = ()
    """Last parts of the names of the modules that can have an adapter."""
    log: str = ""
    """Path of the file that receives the output of vLLM's processes; "" for a temporary file without a name."""
    schemas: bool = False
    """True if requests can have JSON schemas, for which vLLM's processes need the tokenizer."""
    most_cache_bytes: int | None = None
    """Largest size in bytes of the KV cache that vLLM chooses in each worker on a GPU; None for no limit."""
    quantization: Scheme | None = None
    """Kind of the 8-bit weights; None for weights in `dtype`."""
    exact: tuple[str, ...] = ()
    """Names in the model's files of modules that are not in 8 bits, with `quantization`."""
    kv_cache_dtype: str = "auto"
    """Number format of the KV cache, as in `rollout.kv_cache_dtype`."""
    bitwise: bool = False
    """True if the log-probs of a token must not depend on the other requests of a batch, see `run.bitwise`."""


class VllmProcess:
    """Wraps vLLM's `AsyncLLM`: requests, calls to its workers, pausing, sleeping and shutdown."""

    def __init__(self, settings: ProcessSettings, version: int) -> None:
        """Start vLLM's processes, which takes 5 to 20 s.

        Raises ValueError with a message of one sentence when vLLM does not accept the model or the settings, and
        RuntimeError with the words of vLLM's processes when one of them fails.
        """
        cpu = library.on_cpu()
        self._log = CoreLog(settings.log)
        try:
            most = {} if settings.most_cache_bytes is None else {library.MOST_CACHE: str(settings.most_cache_bytes)}
            further = {**most, **EXACT_SCALES, **(invariant_environment() if settings.bitwise else {})}
            with engine_environment(cpu=cpu, tp=settings.tp, further=further):
                self.llm = self._start(settings, cpu)
        except BaseException:
            self._log.close()
            raise
        self.versions = TokenVersions(self.llm.engine_core, version)
        self.pictures = PictureTaker(self.llm.model_config, self.llm.renderer.mm_processor)
        """Turns the pictures of requests into vLLM's form."""
        self.can_sleep = not cpu
        self._asleep: set[str] = set()
        """Kinds of device memory that vLLM has released in `sleep` and not taken back yet: `weights`, `kv_cache`."""
        self._tokenizer_lock = asyncio.Lock()
        self._num_probes = 0
        self._death = ""
        manager: Any = self.llm.engine_core.resources.engine_manager
        self._started = list(manager.processes)
        """The engine process as a multiprocessing.Process, which knows how the process ended."""
        self._engines = [psutil.Process(process.pid) for process in self._started]
        children = [child for engine in self._engines for child in engine.children(recursive=True)]
        self._processes = [*self._engines, *children]

    def _start(self, settings: ProcessSettings, cpu: bool) -> library.AsyncLLM:
        given = engine_args(settings, cpu)
        try:
            with prepared_pictures.own_processors(settings.model):
                config = library.create_config(given)
                library.check_attention(config)
                library.keep_prefills_whole(config)
                if not settings.schemas:
                    library.leave_out_tokenizer(config)
                if config.model_config.is_multimodal_model and not settings.routes:
                    config.scheduler_config.scheduler_cls = prepared_pictures.SCHEDULER
                with self._log.capture(), library.engine_process(take_standby()):
                    return library.AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except ValueError as error:
            reason = " ".join(str(error).split())
            if "max_model_len" in reason:
                key, reason = "rollout.max_model_len", reason.partition("Value error, ")[2].partition(". ")[0] or reason
            else:
                key = "model"
            raise ValueError(f"{key}: vLLM does not run {settings.model!r}: {reason}") from error
        except RuntimeError as error:  # vLLM's error says only that its process failed; the log says why.
            cause = self._log.exception() or self._log.last_line() or str(error)
            raise RuntimeError(f"vLLM's engine process did not start: {cause}{self._log.hint}") from error

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine process and its workers."""
        return [process.pid for process in self._processes]

    @property
    def context(self) -> int:
        """Largest number of tokens of a prompt and its completion together."""
        return self.llm.vllm_config.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.llm.vllm_config.model_config.get_vocab_size()

    @property
    def cache_tokens(self) -> int:
        """Number of tokens whose keys and values later requests can find in the KV cache; 0 without prefix caching."""
        cache = self.llm.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size if cache.enable_prefix_caching else 0

    async def load_tokenizer(self, request_id: str) -> None:
        """Make vLLM ready for a request with stop texts. The first call loads the model's tokenizer, and later ones do
        nothing. Raises ValueError, which names the request, if it cannot be loaded."""
        async with self._tokenizer_lock:
            if self.llm.output_processor.tokenizer is None:
                try:
                    await asyncio.to_thread(library.load_tokenizer, self.llm)
                except (OSError, ValueError) as error:
                    what = f"request {request_id!r}: stop texts need the model's tokenizer"
                    raise ValueError(f"{what}, which cannot be loaded: {' '.join(str(error).split())}") from error

    def generate(
        self,
        request_id: str,
        prompt: list[int],
        params: library.SamplingParams,
        adapter: HeldAdapter | None = None,
        pictures: ShownPictures | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Submit one request and yield vLLM's outputs. The request uses only cached prefixes, and features of pictures,
        of requests that were submitted under the same weights. adapter: None for the base alone. pictures: those of the
        prompt; None for none. Raises library.EngineDeadError when vLLM's engine process has died."""
        salt = f"weights {self.versions.current if adapter is None else adapter.version}"
        lora = adapter and adapter.request
        if pictures is not None:
            return self._generate_seeing(pictures, prompt, salt, params, request_id, lora)
        # vLLM's renderer makes prompts of this form.
        tokens: Any = {"type": "token", "prompt_token_ids": prompt, "cache_salt": salt}
        return self.llm.generate(tokens, params, request_id, lora_request=lora)

    async def _generate_seeing(
        self,
        pictures: ShownPictures,
        prompt: list[int],
        salt: str,
        params: library.SamplingParams,
        request_id: str,
        lora: Any,
    ) -> AsyncGenerator[Any, None]:
        """Submit a request whose prompt has pictures, and yield vLLM's outputs."""
        await self.llm.get_supported_tasks()  # vLLM waits for them once, and then submits a request without waiting.
        sent = self.llm.renderer.mm_processor_cache
        tokens: Any = pictures.prompt(prompt, salt, sent)
        try:
            async for output in self.llm.generate(tokens, params, request_id, lora_request=lora):
                yield output
        except BaseException:
            if sent is not None:
                sent.clear_cache()  # The request may not have reached the engine process, so pictures are sent again.
            raise

    async def add_adapter(self, adapter: HeldAdapter) -> bool:
        """Make vLLM load an adapter into a slot, between two steps. Returns whether it did."""
        return await self._bounded("add_lora", self.llm.add_lora(adapter.request))

    async def probe(self, prompt: list[int], adapter: HeldAdapter | None) -> tuple[int, float]:
        """Return the most probable token after `prompt`, and its log-prob. It uses no cached prefix. adapter: None for
        the base alone. vLLM must not be paused."""
        self._num_probes += 1
        name = f"probe {self._num_probes}"
        params = library.SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, ignore_eos=True, detokenize=False)
        tokens: Any = {"type": "token", "prompt_token_ids": prompt, "cache_salt": name}

        async def answer() -> tuple[int, float]:
            request = adapter and adapter.request
            [output] = [one async for one in self.llm.generate(tokens, params, name, lora_request=request)]
            (token,) = output.outputs[0].token_ids
            return token, output.outputs[0].logprobs[0][token].logprob

        return await self._bounded("probe", answer())

    async def call(self, method: str, *args: Any, returns: type[T] | None = None, **kwargs: Any) -> list[T]:
        """Call a method on all workers and return their results. The engine process does nothing else during the call.

        returns: type to which each result, sent as msgpack, is decoded; with None, [] is returned. Raises EngineDied if
        the engine process has died, and RuntimeError if it does not answer in time or a worker raised an error.
        """
        results = await self._bounded(method, self.llm.collective_rpc(method, args=args, kwargs=kwargs))
        return [] if returns is None else [messages.decode(result, returns) for result in results]

    async def call_function(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(worker, *args)` in all workers and return the results: see `VllmEngine.call_workers`."""
        method: Any = function
        return await self._bounded(function.__name__, self.llm.collective_rpc(method, args=args))

    async def pause(self) -> None:
        """Freeze all requests in their current state. On return, no model step is running, and all tokens generated so
        far have been processed.

        `AsyncLLM.pause_generation` is not used, because it sleeps 20 ms to be sure that all outputs have come through;
        `TokenVersions.drain` waits only as long as needed.
        """
        await self._bounded("pause", self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        # vLLM starts its output loop with the first request, which may not have arrived yet.
        self.llm._run_output_handler()
        await self._bounded("drain", self.versions.drain())

    async def resume(self) -> None:
        """Continue generating after `pause`."""
        await self._bounded("resume", self.llm.resume_generation())

    async def mark(self, version: int) -> None:
        """Attribute all tokens that have not arrived yet to weight version `version`. Returns when all earlier tokens
        have been processed. Raises EngineDied if the engine process has died."""
        # vLLM starts its output loop with the first request, and there may have been no request.
        self.llm._run_output_handler()
        await self._bounded("mark", self.versions.mark(version))

    async def forget_keys_and_values(self) -> None:
        """Drop the contents of the KV cache. Cached prefixes, and features of pictures, are forgotten, and frozen
        requests recompute their keys and values.

        Call it only while generation is paused, or when no request is running. Raises RuntimeError if vLLM refuses.
        """
        done = await self._bounded("reset_prefix_cache", self.llm.reset_prefix_cache(reset_running_requests=True))
        if not done:
            raise RuntimeError("vLLM did not reset its prefix cache")
        if self.llm.model_config.is_multimodal_model:
            await self._bounded("reset_encoder_cache", self.llm.reset_encoder_cache())

    async def sleep(self, level: int) -> None:
        """Make vLLM release device memory. level: vLLM's sleep level, 1 or 2 (see `VllmEngine.sleep`). No request may
        be running."""
        await self._bounded("sleep", self.llm.sleep(level))
        self._asleep = {"weights", "kv_cache"}

    @property
    def partly_awake(self) -> bool:
        """True if vLLM has taken back only a part of the device memory that it released in `sleep`."""
        return len(self._asleep) == 1

    async def wake(self, *tags: str) -> None:
        """Take back device memory that `sleep` released. tags: kinds of memory, `weights` or `kv_cache`; without tags,
        all memory that was released.

        Only memory that vLLM has released is requested. For memory that it still holds, vLLM would create a second
        mapping.
        """
        if wanted := self._asleep & (set(tags) or self._asleep):
            await self._bounded("wake_up", self.llm.wake_up(sorted(wanted)))
            self._asleep -= wanted

    @property
    def died(self) -> str:
        """Error text about the death of the engine process; "" while it is alive. It says how the process ended and its
        last words. Each access checks the processes."""
        if self._death:
            return self._death
        gone = [process.pid for process in self._engines if not lives(process)]
        if gone or self.llm.errored:
            pid = f" (pid {gone[0]})" if gone else ""
            self._death = f"vLLM's engine process died{pid}: {self._cause()}"
        return self._death

    def _cause(self) -> str:
        """Return why the engine process died, from its exit code and the output of vLLM's processes."""
        codes = [exit_code(*pair) for pair in zip(self._started, self._engines, strict=True)]
        code = next((code for code in codes if code is not None), None)
        raised = self._log.exception()
        if code is not None and code < 0:
            words = f"{exit_words(code)}; {raised}" if raised else exit_words(code)
        else:
            words = raised or f"{exit_words(code)}, its last line is {self._log.last_line()!r}"
        return words + self._log.hint

    def trim_log(self) -> None:
        """Keep the file with the output of vLLM's processes small."""
        self._log.trim()

    async def end(self) -> None:
        """Shut down all of vLLM's processes. Processes that do not end in time are killed."""
        if not self.died:
            try:
                await asyncio.wait_for(self.llm.collective_rpc("headrace_close"), CLOSE_PATIENCE_S)
            except (TimeoutError, library.EngineDeadError):
                pass  # Receivers of a hung or dead worker end with its process.
        if (handler := self.llm.output_handler) is not None:
            handler.cancel()  # A running output loop would log the end of its engine as a failure.
            await asyncio.gather(handler, return_exceptions=True)
        await asyncio.to_thread(self.llm.shutdown)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, CLOSE_PATIENCE_S)
        for process in alive:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, CLOSE_PATIENCE_S)
        self._log.close()
        # vLLM closes its sockets in this loop, but leaves their context to the garbage collector.
        await asyncio.sleep(0)
        context = self.llm.engine_core.ctx
        getattr(context, "_shadow_obj", context).destroy(linger=0)
        del self.llm  # Its finalizer would fail at the interpreter's end.

    async def _bounded(self, name: str, awaitable: Any) -> Any:
        """Wait for a call to the engine process and return its answer. Raises EngineDied as soon as the process is
        gone, because vLLM would keep waiting, and RuntimeError if the answer takes longer than CALL_PATIENCE_S or is an
        error in vLLM."""
        task = asyncio.ensure_future(awaitable)
        deadline = asyncio.get_running_loop().time() + CALL_PATIENCE_S
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if task.done():
                    break
                if died := self.died:
                    raise EngineDied(f"{died}, noticed in the call {name!r}")
                if asyncio.get_running_loop().time() >= deadline:
                    raise RuntimeError(f"vLLM's engine process did not answer {name!r} within {CALL_PATIENCE_S:.0f} s")
            return task.result()
        except library.EngineDeadError as error:
            raise EngineDied(f"{self.died or 'vLLM ended its engine process'}, noticed in the call {name!r}") from error
        except Exception as error:
            if type(error) is Exception:  # vLLM wraps an error of its process in a plain Exception.
                if str(error).endswith(CANCELLED) and (died := await self._death_soon()):
                    raise EngineDied(f"{died}, noticed in the call {name!r}") from error
                raise RuntimeError(f"vLLM: {error}") from error
            raise
        finally:
            task.cancel()

    async def _death_soon(self) -> str:
        """Wait for at most CLOSE_PATIENCE_S until the engine process has died. Returns how it died; "" if it is
        alive."""
        deadline = asyncio.get_running_loop().time() + CLOSE_PATIENCE_S
        while not self.died and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_S)
        return self.died


async def all_of(*calls: Coroutine[Any, Any, None]) -> None:
    """Start all calls at once, in this order, and wait for all of them. If calls fail, the error of the first failed
    call in this order is raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def engine_args(settings: ProcessSettings, cpu: bool) -> library.AsyncEngineArgs:
    """Translate the settings into vLLM's own. vLLM is set to report log-probs of the distribution that it samples from.
    Raises ValueError if one of `settings.options` is wrong."""
    given: dict[str, Any] = {
        "model": settings.model,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "seed": settings.seed,
        "tensor_parallel_size": settings.tp,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        # On GPUs vLLM captures CUDA graphs. Compiled layers would round differently from a trainer's.
        "enforce_eager": cpu or settings.bitwise,
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # The model's own defaults would change the sampled distribution.
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
        "skip_mm_profiling": True,  # The room for pictures beside the KV cache is the share that is not used.
        "mm_processor_cache_gb": PICTURES_GIB,
        "worker_extension_cls": WORKER,
        "weight_transfer_config": library.WeightTransferConfig(backend=BACKEND),
    }
    if "mm_device_do_normalize" in library.AsyncEngineArgs.__dataclass_fields__:  # That of vLLM 0.32 is true.
        given["mm_device_do_normalize"] = False  # Pictures come normalised, and vLLM would do it again.
    if settings.kv_cache_dtype != "auto":
        given["kv_cache_dtype"] = settings.kv_cache_dtype
    if settings.routes:
        given |= {**library.route_arguments(), "scheduler_cls": SCHEDULER}
    if settings.adapters is not None:
        count = settings.adapters.count + library.spare_slots()
        given |= {
            "enable_lora": True,
            "max_loras": count,
            "max_cpu_loras": count,
            "max_lora_rank": library.lora_rank(settings.adapters.rank),
            "lora_target_modules": list(settings.adapted),
        }
    if settings.max_model_len is not None:
        given["max_model_len"] = settings.max_model_len
    if cpu and settings.tp == 1:
        given["distributed_executor_backend"] = "uni"
    elif settings.tp > 1:
        given["distributed_executor_backend"] = "mp"
    if not cpu:
        given["gpu_memory_utilization"] = settings.gpu_memory_utilization
        given["enable_sleep_mode"] = True
    options = arguments(settings.options)
    if settings.quantization is not None:
        options |= quantization_arguments(settings.quantization, settings.exact, options)
    return library.AsyncEngineArgs(**given | options)
