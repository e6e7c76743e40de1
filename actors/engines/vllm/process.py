"""vLLM's engine process and its workers, as seen from here: started, called, paused, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch

from ....codecs import messages
from ..protocol import EngineDied
from . import library
from .environment import engine_environment
from .versions import TokenVersions
from .wire import BACKEND, WORKER

T = TypeVar("T")

CALL_PATIENCE_S = 300.0
"""Bound of every call of the engine process that is not a request."""
CLOSE_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How vLLM runs a model."""

    model: str
    dtype: torch.dtype
    tp: int
    max_num_seqs: int
    kv_cache_bytes: int | None
    """None: vLLM's own choice."""
    gpu_memory_utilization: float
    seed: int
    enforce_eager: bool
    max_model_len: int | None
    """None: the model's own."""


class VllmProcess:
    """An `AsyncLLM`, with what the engine needs beside requests."""

    def __init__(self, settings: ProcessSettings, version: int) -> None:
        """Starts the processes; takes 5 to 20 s.

        Raises ValueError in one sentence when vLLM does not take the model or the settings.
        """
        cpu = library.on_cpu()
        with engine_environment(cpu=cpu, tp=settings.tp):
            try:
                config = engine_args(settings, cpu).create_engine_config()
                library.check_attention(config)
                library.keep_prefills_whole(config)
                self.llm = library.AsyncLLM.from_vllm_config(config, disable_log_stats=True)
            except ValueError as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"model: vLLM does not run {settings.model!r}: {reason}") from error
        self.versions = TokenVersions(self.llm.engine_core, version)
        self.can_sleep = not cpu
        self._asleep: set[str] = set()
        """What memory was given back: `weights`, `kv_cache`."""
        manager: Any = self.llm.engine_core.resources.engine_manager
        engines = [psutil.Process(process.pid) for process in manager.processes]
        self._processes = [*engines, *(child for engine in engines for child in engine.children(recursive=True))]

    @property
    def pids(self) -> list[int]:
        """Of all processes that were started."""
        return [process.pid for process in self._processes]

    @property
    def context(self) -> int:
        """Tokens of a prompt and its completion."""
        return self.llm.vllm_config.model_config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.llm.vllm_config.model_config.get_vocab_size()

    def generate(self, request_id: str, prompt: list[int], params: library.SamplingParams) -> AsyncGenerator[Any, None]:
        """vLLM's outputs of one request. Raises library.EngineDeadError."""
        tokens: Any = {"type": "token", "prompt_token_ids": prompt}  # as vLLM's renderer would make it
        return self.llm.generate(tokens, params, request_id)

    async def call(self, method: str, *args: Any, returns: type[T] | None = None, **kwargs: Any) -> list[T]:
        """Call a method of all workers; the engine process does nothing else meanwhile.

        returns: type of the results, which come as msgpack. Raises EngineDied when there is no
        answer, RuntimeError with what a worker raised.
        """
        results = await self._bounded(method, self.llm.collective_rpc(method, args=args, kwargs=kwargs))
        return [] if returns is None else [messages.decode(result, returns) for result in results]

    async def call_function(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(worker, *args)` in all workers: `VllmEngine.call_workers`."""
        method: Any = function
        return await self._bounded(function.__name__, self.llm.collective_rpc(method, args=args))

    async def pause(self) -> None:
        """Freeze requests where they are. On return no step runs, and all tokens made so far have been processed.

        Not `AsyncLLM.pause_generation`: that sleeps 20 ms for outputs to come through, which `drain` knows exactly.
        """
        await self._bounded("pause", self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        self.llm._run_output_handler()  # it runs from the first request on, which may be on its way
        await self.versions.drain()

    async def resume(self) -> None:
        """Go on."""
        await self._bounded("resume", self.llm.resume_generation())

    async def mark(self, version: int) -> None:
        """Tokens that have not come in yet are of `version`."""
        self.llm._run_output_handler()  # it runs from the first request on, and there may have been none
        await self.versions.mark(version)

    async def forget_keys_and_values(self) -> None:
        """Nothing that was computed so far is used again: cached prefixes go, and requests that were frozen (only
        call this while paused, or when none run) compute the keys and values of all their tokens anew."""
        done = await self._bounded("reset_prefix_cache", self.llm.reset_prefix_cache(reset_running_requests=True))
        if not done:
            raise RuntimeError("vLLM did not reset its prefix cache")

    async def sleep(self, level: int) -> None:
        """Give device memory back; nothing may run."""
        await self._bounded("sleep", self.llm.sleep(level))
        self._asleep = {"weights", "kv_cache"}

    async def wake(self, *tags: str) -> None:
        """Take it again: `weights`, `kv_cache`, or what is left to take. vLLM would map memory that is awake anew."""
        if wanted := self._asleep & (set(tags) or self._asleep):
            await self._bounded("wake_up", self.llm.wake_up(sorted(wanted)))
            self._asleep -= wanted

    def expect_alive(self) -> None:
        """Raises EngineDied when the engine process is known to have died."""
        if self.llm.errored:
            raise EngineDied("vLLM's engine process died")

    async def end(self) -> None:
        """End all processes; those that do not go in time are killed."""
        if not self.llm.errored:
            try:
                await asyncio.wait_for(self.llm.collective_rpc("headrace_close"), CLOSE_PATIENCE_S)
            except (TimeoutError, library.EngineDeadError):
                pass  # a worker that hangs or is dead has its receivers taken down with it
        if (handler := self.llm.output_handler) is not None:
            handler.cancel()  # else it logs the end of its engine as a failure
            await asyncio.gather(handler, return_exceptions=True)
        await asyncio.to_thread(self.llm.shutdown)
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, CLOSE_PATIENCE_S)
        for process in alive:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, CLOSE_PATIENCE_S)
        await asyncio.sleep(
            0
        )  # vLLM closes its sockets in this loop, but leaves their context to the garbage collector
        context = self.llm.engine_core.ctx
        getattr(context, "_shadow_obj", context).destroy(linger=0)
        del self.llm  # its finalizer does not survive the interpreter's end

    async def _bounded(self, name: str, awaitable: Any) -> Any:
        try:
            return await asyncio.wait_for(awaitable, CALL_PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(
                f"vLLM's engine process did not answer {name!r} within {CALL_PATIENCE_S:.0f} s"
            ) from None
        except library.EngineDeadError as error:
            raise EngineDied(f"vLLM's engine process died, found at {name!r}: {error}") from error
        except Exception as error:
            if type(error) is Exception:  # how vLLM passes on what was raised in its process
                raise RuntimeError(f"vLLM: {error}") from error
            raise


async def all_of(*calls: Coroutine[Any, Any, None]) -> None:
    """Begun at once, in this order, and awaited to the end. Raises what the first of those that failed did."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def engine_args(settings: ProcessSettings, cpu: bool) -> library.AsyncEngineArgs:
    """vLLM's own settings; log-probs are of the distribution sampled from."""
    options: dict[str, Any] = {"dtype": str(settings.dtype).removeprefix("torch.")}
    if settings.max_model_len is not None:
        options["max_model_len"] = settings.max_model_len
    if cpu and settings.tp == 1:
        options["distributed_executor_backend"] = "uni"
    elif settings.tp > 1:
        options["distributed_executor_backend"] = "mp"
    if not cpu:
        options["gpu_memory_utilization"] = settings.gpu_memory_utilization
        options["enable_sleep_mode"] = True
    return library.AsyncEngineArgs(
        model=settings.model,
        seed=settings.seed,
        tensor_parallel_size=settings.tp,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enforce_eager=settings.enforce_eager,
        enable_prefix_caching=True,
        generation_config="vllm",  # the model's own defaults would change what is sampled from
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
        worker_extension_cls=WORKER,
        weight_transfer_config=library.WeightTransferConfig(backend=BACKEND),
        **options,
    )
