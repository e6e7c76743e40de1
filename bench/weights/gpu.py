"""`headrace bench gpu-weights` measures weight updates of a real vLLM engine while it generates, and checks every byte.

One trainer process per GPU publishes random weights that differ at every version; the engine runs on GPU 0. An update
is timed from before its announcement until the engine serves it. Each result is printed as one JSON object a line and
appended to `gpu_weights.jsonl` in the output folder. The exit code is 1 when a byte, a version or a log-prob is wrong.
It needs vLLM, and no Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ...actors.engines.protocol import SamplingParams
from ...actors.engines.vllm.engine import VllmEngine
from ...actors.weight_sync.config import SyncConfig
from ...actors.weight_sync.transports.protocol import ReceiverConfig
from ...dataplane.security.handshake import new_key
from .gpu_builtin import measure_builtin
from .gpu_peers import CONTEXT, KV_CACHE_BYTES, MAX_NUM_SEQS, Trainer, TrainerTask, save_config
from .gpu_updates import NOISE, PROMPT, Case, Log, Session, Setup, check_bytes, measure_case, start_publisher, update
from .peers import Peer

_LIMIT_REPEATS = 7


def setups(size: str, gpus: int, only: Sequence[str]) -> list[Setup]:
    """Return all setups that are possible with `gpus` GPUs, or only those named in `only`. A setup is an engine's
    settings and its measurements."""
    other_gpu = 1 if gpus > 1 else 0

    def cases(*sizes: int) -> tuple[Case, ...]:
        places = [("ipc", 0)] + [("collective", other_gpu), ("ipc", other_gpu)] * other_gpu
        return tuple(Case(kind, gpu, mib, running) for kind, gpu in places for mib in sizes for running in (32, 0))

    few = (Case("ipc", 0, 256, 32, 5), Case("ipc", 0, 256, 0, 5))
    every = {
        "none": Setup(size, "none", cases(256, 512, 1024), colocated=3),
        "full": Setup(size, "full", cases(256), colocated=3),
        "asleep": Setup(size, "none", (), colocated=5, from_host=True),
        "moe": Setup("moe", "none", (Case("ipc", 0, 1, 8, 20),)),
        "tp2": Setup(size, "full", few, tp=2),
        "tp2-none": Setup(size, "none", few, tp=2),
        "builtin": Setup(size, "none", cases(256), builtin=True),
    }
    names = list(only) or [name for name, one in every.items() if one.tp <= max(gpus, 1)]
    return [every[name] for name in names]


# ---------------------------------------------------------------- one engine


async def measure_setup(setup: Setup, device: str, updates: int, folder: Path, log: Log) -> None:
    """Start the trainers and one engine, and measure all cases of the setup.

    updates: number of weight updates in each case; 0 stands for the case's own number.
    """
    dtype = "bfloat16" if device == "cuda" else "float32"
    with ExitStack() as stack:
        model = folder / f"{setup.size}-{uuid.uuid4().hex[:4]}"
        save_config(setup.size, model, dtype)
        trainers: list[Peer] = []
        key = new_key()
        for rank in range(1 + max((case.trainer for case in setup.cases), default=0)):
            place = f"cuda:{rank}" if device == "cuda" else "cpu"
            task = TrainerTask(
                str(model), place, dtype, f"gpu-weights-{uuid.uuid4().hex[:6]}-{setup.staging}", rank, key,
                setup.from_host,
            )  # fmt: skip
            trainers.append(Peer(partial(Trainer, task)))
            stack.callback(trainers[-1].close)
        session = Session(setup, trainers, device, log)
        for trainer in range(len(trainers)):
            session.num_bytes = await session.call(trainer, "ready")
        await session.call(0, "save")
        if setup.builtin:
            log.failures += await measure_builtin(model, session.num_bytes, len(trainers), session.call, log.tell)
            return
        started = time.perf_counter()
        engine = await asyncio.to_thread(_start_engine, model, dtype, device, setup, key)
        try:
            await engine.generate("first", PROMPT, SamplingParams(max_new_tokens=64))
            log.tell("engine", size=setup.size, staging=setup.staging, tp=setup.tp, bytes=session.num_bytes)
            log.tell("start", seconds=time.perf_counter() - started)
            if setup.staging == "none" and setup.size != "moe" and setup.tp == 1 and setup.cases:
                await _measure_limits(session, folder)
            for case in setup.cases:
                await measure_case(session, engine, case, updates or case.updates)
            for cycle in range(setup.colocated if device == "cuda" else 0):
                await _measure_colocated(session, engine, cycle)
        finally:
            await engine.close()


def _start_engine(model: Path, dtype: str, device: str, setup: Setup, key: bytes) -> VllmEngine:
    place = "cuda:0" if device == "cuda" else "cpu"
    return VllmEngine(
        str(model),
        dtype=getattr(torch, dtype),
        tp=setup.tp,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_bytes=KV_CACHE_BYTES if device == "cuda" else 64 << 20,
        max_model_len=CONTEXT,
        receiver=ReceiverConfig("engine", SyncConfig(staging=setup.staging), place, key=key),
    )


async def _measure_colocated(session: Session, engine: VllmEngine, cycle: int) -> None:
    """Measure one cycle in which the engine sleeps, is updated and wakes, while the trainer uses the same GPU.

    Its record has `serve_s`, the seconds from the start of the update to the first token of the new weights.
    """
    if not cycle:
        await start_publisher(session, Case("ipc", 0, 64 if session.setup.from_host else 256))
    start = time.perf_counter()
    await engine.sleep(2)
    asleep = time.perf_counter()
    row = await update(session, engine, 0, tp=1)
    updated = time.perf_counter()
    await engine.wake()
    awake = time.perf_counter()
    await engine.generate(f"first-{session.version}", PROMPT, SamplingParams(max_new_tokens=1))
    served = time.perf_counter()
    await check_bytes(session, engine, 0, exact=not session.setup.from_host)
    [one] = await engine.generate(f"awake-{session.version}", PROMPT, SamplingParams(max_new_tokens=256))
    logprobs = await session.call(0, "logprobs", session.version, [[*PROMPT, *one.token_ids.tolist()]])
    difference = np.abs(logprobs[0][len(PROMPT) - 1 :] - one.logprobs)
    right = difference.mean() < NOISE[0] and (one.versions == session.version).all()
    session.log.expect(bool(right), "wrong after waking")
    session.log.tell(
        "colocated",
        staging=session.setup.staging,
        sleep_s=asleep - start,
        update_s=row["update_s"],
        change_s=updated - asleep - row["update_s"],
        wake_s=awake - updated,
        serve_s=row["update_s"] + served - updated,
        mean_difference=float(difference.mean()),
    )


async def _measure_limits(session: Session, folder: Path) -> None:
    """Measure how fast the hardware moves the same bytes without an engine, as the limit for weight updates."""
    nbytes, device = session.num_bytes, session.device
    place = "cuda:0" if device == "cuda" else "cpu"
    found = {"copy in one GPU": await session.call(0, "copies", nbytes, place, _LIMIT_REPEATS)}
    if len(session.trainers) > 1:
        found["copy to the other GPU"] = await session.call(1, "copies", nbytes, place, _LIMIT_REPEATS)
        path = str(folder / "group")
        both = range(2)
        await asyncio.gather(*(session.call(rank, "join", path, 2) for rank in both))
        seconds = []
        for _ in range(_LIMIT_REPEATS + 1):
            seconds.append(max(await asyncio.gather(*(session.call(rank, "broadcast", nbytes) for rank in both))))
        await asyncio.gather(*(session.call(rank, "leave") for rank in both))
        found["broadcast"] = seconds[1:]
    for name, seconds in found.items():
        median = statistics.median(seconds)
        session.log.tell("limit", name=name, seconds=median, gb_per_s=nbytes / median / 1e9)


# ---------------------------------------------------------------- the command


async def _measure(arguments: argparse.Namespace) -> int:
    log = Log(Path(arguments.out))
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-weights-", dir=arguments.folder or None) as folder:
        for setup in setups(arguments.size, arguments.gpus, arguments.setups):
            try:
                await measure_setup(setup, arguments.device, arguments.updates, Path(folder), log)
            except Exception as error:  # the other engines are still measured
                log.expect(False, f"{setup.size} {setup.staging} tp {setup.tp}: {type(error).__name__}: {error}")
                traceback.print_exc()
    log.tell("end", failures=log.failures)
    return 1 if log.failures else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    add: Callable[..., object] = parser.add_argument
    add("--gpus", type=int, default=1, help="number of GPUs to use; default: 1")
    add("--size", default="2B", choices=("2B", "8B", "tiny"), help="size of the model; default: 2B")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the command without GPUs")
    add(
        "--setups", nargs="*", default=(), metavar="NAME", help="none full asleep moe tp2 tp2-none builtin; default all"
    )
    add("--updates", type=int, default=0, help="number of updates of each case; default: each case's own")
    add("--folder", default="", help="folder in which models are written; default: the system's temporary folder")
    add("--out", default="runs/gpu-weights", help="folder of the results; default: runs/gpu-weights")


def run(arguments: argparse.Namespace) -> int:
    """Measure all chosen setups; returns 1 when anything was wrong, else 0."""
    # vLLM only accepts functions for its workers, by which every byte is checked, with this setting.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return asyncio.run(_measure(arguments))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure with the options in `argv`; returns 1 when anything was wrong, else 0."""
    parser = argparse.ArgumentParser("headrace bench gpu-weights", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(argv))
