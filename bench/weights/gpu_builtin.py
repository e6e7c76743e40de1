"""Measures vLLM 0.26's own weight transfers (0.30 has others) with the same model, settings and checks as Headrace's.

A transfer is timed from `start_weight_update` to the end of `finish_weight_update`; for ipc, the time to make the
handles counts, too. The engine is not paused, because no request runs, and its prefix cache is not reset. Headrace's
transfers are timed with that reset.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...actors.engines.vllm import library
from ...actors.engines.vllm.process import ProcessSettings, engine_args
from ...actors.engines.vllm.start import engine_environment
from .gpu_peers import CONTEXT, KV_CACHE_BYTES, MAX_NUM_SEQS, parameter_digests

WARM_UPS = 2
UPDATES = 10

Call = Callable[..., Awaitable[Any]]
"""Function `call(trainer, method, *args)` that calls a method of a trainer process."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One of vLLM's transfer backends and its settings."""

    backend: str
    """Name of the backend, `nccl` or `ipc`."""
    trainer: int
    """Number of the GPU that the trainer uses; the engine is on GPU 0."""
    packed_mib: int = 0
    """Size of the backend's buffers in MiB; 0 sends each tensor separately."""


TRANSFERS = (Transfer("nccl", 1, 256), Transfer("nccl", 1, 1024), Transfer("nccl", 1), Transfer("ipc", 0))


async def measure_builtin(model: Path, num_bytes: int, gpus: int, call: Call, tell: Callable[..., None]) -> list[str]:
    """Measure all TRANSFERS that are possible with `gpus` GPUs. Returns one message for each error that was found.
    tell: function that is called with each result."""
    wrong = []
    for backend in ("nccl", "ipc"):
        transfers = [one for one in TRANSFERS if one.backend == backend and one.trainer < gpus]
        if transfers:
            wrong += await _measure_backend(backend, transfers, model, num_bytes, call, tell)
    return wrong


async def _measure_backend(
    backend: str, transfers: list[Transfer], model: Path, num_bytes: int, call: Call, tell: Callable[..., None]
) -> list[str]:
    settings = ProcessSettings(
        model=str(model),
        dtype=torch.bfloat16,
        tp=1,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_bytes=KV_CACHE_BYTES,
        gpu_memory_utilization=0.9,
        seed=0,
        max_model_len=CONTEXT,
    )
    arguments: Any = engine_args(settings, cpu=False)
    arguments.weight_transfer_config = library.WeightTransferConfig(backend=backend)
    with engine_environment(cpu=False, tp=1):
        config = arguments.create_engine_config()
        llm = await asyncio.to_thread(library.AsyncLLM.from_vllm_config, config, disable_log_stats=True)
    wrong = []
    try:
        await _join(backend, transfers[0], llm, call)
        for transfer in transfers:
            specs = await call(transfer.trainer, "builtin", "specs")
            rows = []
            for number in range(WARM_UPS + UPDATES):
                await call(transfer.trainer, "change", 1000 + number)
                rows.append(await _update(transfer, specs, llm, call))
            found = await llm.collective_rpc(parameter_digests, args=(False,))  # pyright: ignore[reportArgumentType]
            (expected,) = await call(transfer.trainer, "digests", 1, False)
            differ = sum(found[0].get(name) != digest for name, digest in expected.items())
            seconds = statistics.median(rows[WARM_UPS:])
            tell(
                "builtin",
                backend=backend,
                place=f"gpu{transfer.trainer}->gpu0",
                packed_mib=transfer.packed_mib,
                update_s=seconds,
                gb_per_s=num_bytes / seconds / 1e9,
                differ=differ,
            )
            wrong += [f"vLLM's {backend}: {differ} parameters differ"] * bool(differ)
    finally:
        await asyncio.to_thread(llm.shutdown)
    return wrong


async def _join(backend: str, transfer: Transfer, llm: library.AsyncLLM, call: Call) -> None:
    info: dict[str, Any] = {}
    joining: asyncio.Future[Any] | None = None
    if backend == "nccl":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        joining = asyncio.ensure_future(call(transfer.trainer, "builtin", "join", port))
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    await llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": info})
    if joining is not None:
        await joining


async def _update(
    transfer: Transfer, specs: list[tuple[str, str, list[int]]], llm: library.AsyncLLM, call: Call
) -> float:
    names, dtypes, shapes = (list(column) for column in zip(*specs, strict=True))
    info: dict[str, Any] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    start = time.perf_counter()
    sending: asyncio.Future[Any] | None = None
    if transfer.backend == "ipc":
        info["ipc_handles_pickled"] = await call(transfer.trainer, "builtin", "handles")
    else:
        nbytes = transfer.packed_mib << 20
        info |= {"packed": True, "packed_buffer_size_bytes": nbytes} if nbytes else {}
        sending = asyncio.ensure_future(call(transfer.trainer, "builtin", "send", nbytes))
    await llm.collective_rpc("start_weight_update")
    await llm.collective_rpc("update_weights", kwargs={"update_info": info})
    await llm.collective_rpc("finish_weight_update")
    seconds = time.perf_counter() - start
    if sending is not None:
        await sending
    return seconds
