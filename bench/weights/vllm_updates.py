"""`headrace bench weights --gpus N` measures weight updates of a running vLLM engine, and checks every byte.

One trainer process per GPU publishes random weights that differ at every version. The engine generates on GPU 0. An
update is timed from just before its announcement until the engine serves it. Each result is printed as one line of JSON
and appended to `gpu_weights.jsonl` in the output folder. A wrong byte, version or log-prob is a failure. The benchmark
needs vLLM, but not Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
import traceback
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...actors.engines.protocol import Completion, SamplingParams
from ...actors.engines.vllm.engine import VllmEngine
from ...actors.process.json_lines import append
from ...actors.weight_sync.config import Staging, SyncConfig
from ...actors.weight_sync.transports.protocol import ReceiverConfig, SenderConfig, WeightUpdate
from ...codecs import messages
from ...dataplane.security.handshake import new_key
from ..models import SHAPES, Shape, save_config
from .peers import ModelTrainer, Peer, PeerTask, parameter_digests

CONTEXT = 2048
MAX_NUM_SEQS = 64
KV_CACHE_BYTES = 4 << 30
TIMEOUT_S = 15.0
WARM_UPS = 3
LIMIT_REPEATS = 7
_TINY = Shape(64, 128, 2, 4, 2, 32, vocabulary=512, tokens=512, positions=CONTEXT, tied=False)
MODELS = {
    "2B": SHAPES["2g"],
    "8B": Shape(4096, 12288, 36, 32, 8, 128, vocabulary=151936, tokens=151646, positions=CONTEXT, tied=False),
    "tiny": _TINY,
    "moe": replace(_TINY, hidden=256, experts=8, experts_per_token=2, expert_intermediate=128),
}
"""Name of a size -> shape of the model. `2B` has 2.03 G parameters; `8B` is Qwen3-8B with 8.19 G."""
SIZES = ("2B", "8B", "tiny")
"""Sizes that the command offers."""
TOKENS_BETWEEN = 4
"""Number of tokens that every request generates between two updates. By then, all its keys and values have been
recomputed."""
PROMPT = list(range(3, 19))
LONGEST = CONTEXT - len(PROMPT) - 1
NOISE = (0.025, 0.5)
"""Largest mean and largest single difference of log-probs that are accepted between vLLM's and Transformers' kernels in
bfloat16. With equal weights, measured means are 0.017 to 0.022, and the largest difference is 0.44 with experts and
0.11 without. Between two versions of the weights the mean is 1.3."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of `headrace bench weights --gpus N`."""

    out: Path
    gpus: int = 1
    """Number of GPUs to use; 0 tries the command on a CPU."""
    size: str = "2B"
    """Size of the model, one of SIZES."""
    setups: tuple[str, ...] = ()
    """Names of the setups to measure; () means all that are possible."""
    updates: int = 0
    """Number of updates of each case; 0 means the number of the case."""
    folder: str = ""
    """Folder for the models; "" means the system's temporary folder."""

    @property
    def device(self) -> str:
        """Kind of device: `cuda` or `cpu`."""
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of weight updates. The cases of an engine are measured one after another."""

    kind: str
    """Kind of the weight transport."""
    trainer: int
    """Number of the GPU that the trainer uses; the engine is on GPU 0."""
    bucket_mib: int
    """Size of a bucket in MiB."""
    in_flight: int = 32
    """Number of requests that the engine serves during the updates; with 0 the engine is idle."""
    updates: int = 20
    """Number of updates that are measured."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of one engine, and the measurements made with it."""

    size: str
    """Size of the model, a key of MODELS."""
    staging: Staging
    """Staging mode of the engine's receivers."""
    cases: tuple[Case, ...]
    tp: int = 1
    """Number of tensor-parallel workers."""
    colocated: int = 0
    """Number of cycles in which the engine sleeps, is updated and wakes, while the trainer uses the same GPU."""
    from_host: bool = False
    """True if each version is sent from the trainer's host memory. A waking engine of a pool is updated in this way."""


class Log:
    """Prints results as JSON lines, appends them to a file, and collects failures."""

    def __init__(self, out: Path) -> None:
        """out: folder of the results, which is created if necessary."""
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / "gpu_weights.jsonl"
        self.failures: list[str] = []

    def tell(self, record: str, /, **found: Any) -> None:
        """Print and append one record."""
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
        line = json.dumps({"record": record} | rounded, default=str) + "\n"
        print(line, end="", flush=True)
        append(self._path, line.encode())

    def expect(self, right: bool, what: str) -> None:
        """Record `what` as a failure unless `right` is true."""
        if not right:
            self.failures.append(what)
            self.tell("wrong", what=what)


@dataclass(slots=True)
class Session:
    """The trainers of one engine, and the latest version of the weights."""

    setup: Setup
    trainers: list[Peer]
    device: str
    """Kind of device that trainers and engine run on: `cuda` or `cpu`."""
    log: Log
    key: bytes = field(repr=False)
    """Secret key by which the trainers and the engine authenticate each other."""
    num_bytes: int = 0
    """Number of bytes of all weights."""
    version: int = 0
    """Version of the weights that was published last."""

    def place(self, rank: int) -> str:
        """Return the device of trainer `rank`."""
        return f"cuda:{rank}" if self.device == "cuda" else "cpu"

    async def call(self, trainer: int, method: str, *args: Any) -> Any:
        """Call a method of a trainer process and return its result."""
        return (await asyncio.to_thread(self.trainers[trainer].call, method, *args))[0]


def setups(size: str, gpus: int) -> dict[str, Setup]:
    """Return all setups by name. A setup has the settings of an engine and its measurements. It has the cases that are
    possible with `gpus` GPUs."""
    other_gpu = 1 if gpus > 1 else 0

    def cases(*sizes: int) -> tuple[Case, ...]:
        places = [("ipc", 0)] + [("collective", other_gpu), ("ipc", other_gpu)] * other_gpu
        return tuple(Case(kind, gpu, mib, running) for kind, gpu in places for mib in sizes for running in (32, 0))

    few = (Case("ipc", 0, 256, 32, 5), Case("ipc", 0, 256, 0, 5))
    return {
        "none": Setup(size, "none", cases(256, 512, 1024), colocated=3),
        "full": Setup(size, "full", cases(256), colocated=3),
        "asleep": Setup(size, "none", (), colocated=5, from_host=True),
        "moe": Setup("moe", "none", (Case("ipc", 0, 1, 8, 20),)),
        "tp2": Setup(size, "full", few, tp=2),
        "tp2-none": Setup(size, "none", few, tp=2),
    }


# ---------------- These functions measure one engine.


async def measure_setup(setup: Setup, device: str, updates: int, folder: Path, log: Log) -> None:
    """Start the trainers and one engine, and measure all cases of the setup.

    updates: number of weight updates in each case; 0 means the number of the case.
    """
    dtype = "bfloat16" if device == "cuda" else "float32"
    with ExitStack() as stack:
        model = folder / f"{setup.size}-{uuid.uuid4().hex[:4]}"
        save_config(MODELS[setup.size], model, dtype)
        session = Session(setup, [], device, log, new_key())
        for rank in range(1 + max((case.trainer for case in setup.cases), default=0)):
            task = PeerTask(rank, session.place(rank), dtype)
            session.trainers.append(Peer(partial(ModelTrainer, task, str(model), setup.from_host)))
            stack.callback(session.trainers[-1].close)
        for trainer in range(len(session.trainers)):
            session.num_bytes = await session.call(trainer, "ready")
        await session.call(0, "save")
        started = time.perf_counter()
        engine = await asyncio.to_thread(_start_engine, model, dtype, session)
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


def _start_engine(model: Path, dtype: str, session: Session) -> VllmEngine:
    setup = session.setup
    return VllmEngine(
        str(model),
        dtype=getattr(torch, dtype),
        tp=setup.tp,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_bytes=KV_CACHE_BYTES if session.device == "cuda" else 64 << 20,
        max_model_len=CONTEXT,
        receiver=ReceiverConfig("engine", SyncConfig(staging=setup.staging), session.place(0), key=session.key),
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
    """Measure how fast the hardware moves the same bytes without an engine. This is the limit for weight updates."""
    nbytes, place = session.num_bytes, session.place(0)
    found = {"copy in one GPU": await session.call(0, "copies", nbytes, place, LIMIT_REPEATS)}
    if len(session.trainers) > 1:
        found["copy to the other GPU"] = await session.call(1, "copies", nbytes, place, LIMIT_REPEATS)
        path = str(folder / "group")
        both = range(2)
        await asyncio.gather(*(session.call(rank, "join", path, 2) for rank in both))
        seconds = []
        for _ in range(LIMIT_REPEATS + 1):
            seconds.append(max(await asyncio.gather(*(session.call(rank, "broadcast", nbytes) for rank in both))))
        await asyncio.gather(*(session.call(rank, "leave") for rank in both))
        found["broadcast"] = seconds[1:]
    for name, seconds in found.items():
        median = statistics.median(seconds)
        session.log.tell("limit", name=name, seconds=median, gb_per_s=nbytes / median / 1e9)


# ---------------- These functions measure weight updates.


async def start_publisher(session: Session, case: Case) -> None:
    """Let the case's trainer publish through the case's transport from now on."""
    sender = SenderConfig(
        run_id=f"gpu-weights-{uuid.uuid4().hex[:6]}-{session.setup.staging}-{case.trainer}",
        sync=SyncConfig(timeout_s=TIMEOUT_S),
        device=session.place(case.trainer),
        key=session.key,
    )
    await session.call(case.trainer, "publisher", case.kind, sender, case.bucket_mib << 20)


async def measure_case(session: Session, engine: VllmEngine, case: Case, updates: int) -> None:
    """Measure the updates of one case while its requests run. An error is recorded as a failure and does not stop other
    cases."""
    requests: list[asyncio.Task[list[Completion]]] = []
    try:
        await start_publisher(session, case)
        first = session.version + 1
        params = SamplingParams(max_new_tokens=LONGEST)
        requests = [
            asyncio.create_task(engine.generate(f"{first}-{number}", [*PROMPT, number + 20], params))
            for number in range(case.in_flight)
        ]
        rows = []
        for number in range(WARM_UPS + updates):
            await _wait_for_tokens(session, engine)
            row = await update(session, engine, case.trainer, session.setup.tp)
            rows += [row] if number >= WARM_UPS else []
            last = number == WARM_UPS + updates - 1
            if number % 5 == 0 or last:
                await check_bytes(session, engine, case.trainer, exact=last and case.in_flight > 0)
        _report(session, engine, case, rows)
        if requests:
            await _wait_for_tokens(session, engine)
            for number in range(case.in_flight):
                await engine.abort(f"{first}-{number}")
            await _check_tokens(session, case, first, await asyncio.gather(*requests))
    except Exception as error:  # The other cases are still measured.
        session.log.expect(False, f"{case}: {type(error).__name__}: {error}")
        traceback.print_exc()
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def update(session: Session, engine: VllmEngine, trainer: int, tp: int) -> dict[str, float]:
    """Publish a new version of the weights and wait until the engine serves it. Returns the seconds of each phase. tp:
    number of the engine's workers. They receive the weights."""
    session.version += 1
    version = session.version
    await session.call(trainer, "change", version)
    start = time.perf_counter()
    opened = await session.call(trainer, "open", version, {"engine": tp})
    announced = time.perf_counter()
    publishing = asyncio.create_task(session.call(trainer, "publish", opened))
    await engine.prepare_weights(messages.decode(opened, WeightUpdate))
    prepared = time.perf_counter()
    report = await engine.commit_weights(version, "keep")
    committed = time.perf_counter()
    parts = await publishing
    return {
        "update_s": committed - start,
        "announced_s": committed - announced,
        "open_s": announced - start,
        "prepare_s": prepared - announced,
        "commit_s": committed - prepared,
        "pause_s": report.pause_s,
        "load_s": report.load_s,
        "still_s": report.pause_s + report.load_s,
        "kept": report.kept,
        **parts,
    }


def _report(session: Session, engine: VllmEngine, case: Case, rows: list[dict[str, float]]) -> None:
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    totals = [row["update_s"] for row in rows]
    session.log.tell(
        "update",
        size=session.setup.size,
        staging=session.setup.staging,
        place=f"gpu{case.trainer}->gpu{'0,1' if session.setup.tp > 1 else '0'}",
        way=engine.load_way,
        **asdict(case) | {"updates": len(rows)},
        gb_per_s=session.num_bytes / medians["update_s"] / 1e9,
        fastest_s=min(totals),
        slowest_s=max(totals),
        **medians,
    )


async def _wait_for_tokens(session: Session, engine: VllmEngine) -> None:
    """Wait until every request has generated TOKENS_BETWEEN tokens with the current version of the weights."""
    async with asyncio.timeout(TIMEOUT_S):
        while any(
            version != session.version or tokens < TOKENS_BETWEEN for version, tokens in engine.tokens_of_newest()
        ):
            await asyncio.sleep(0.005)


# ---------------- These functions check the weights and tokens of an engine.


async def check_bytes(session: Session, engine: VllmEngine, trainer: int, *, exact: bool = True) -> None:
    """Compare every parameter of every worker with the trainer's weights. exact: whether to use xxh3 digests rather
    than the faster digests on the GPU."""
    found = await engine.call_workers(parameter_digests, exact)
    expected = await session.call(trainer, "digests", session.setup.tp, exact)
    right = wrong = 0
    for here, there in zip(found, expected, strict=True):
        right += sum(here.get(name) == one for name, one in there.items())
        wrong += sum(here.get(name) != one for name, one in there.items()) + len(here.keys() - there.keys())
    if exact or wrong:
        session.log.tell("bytes", version=session.version, equal=right, wrong=wrong)
    session.log.expect(wrong == 0 or session.device == "cpu", f"version {session.version}: {wrong} parameters differ")


async def _check_tokens(session: Session, case: Case, first: int, completions: list[list[Completion]]) -> None:
    """Check that every token has a weight version, and that its log-prob comes from the weights of this version.

    first: version of the case's first update.
    """
    every = [one for some in completions for one in some]
    for one in every:
        session.log.expect(len(one.versions) == len(one.token_ids) == len(one.logprobs), "tokens without a version")
        session.log.expect(bool((np.diff(one.versions) >= 0).all()), "versions fall")
    session.log.tell(
        "tokens",
        tokens=sum(len(one.token_ids) for one in every),
        versions=sorted({int(version) for one in every for version in one.versions}),
    )
    longest = sorted(range(len(every)), key=lambda number: -len(every[number].token_ids))[:2]
    sample = [every[number] for number in longest]
    prompts = [[*PROMPT, number + 20] for number in longest]
    sequences = [[*prompt, *one.token_ids.tolist()] for prompt, one in zip(prompts, sample, strict=True)]
    same: list[np.ndarray] = []
    other: list[np.ndarray] = []
    last = session.version
    for version in sorted({last, last - 1, (first + last) // 2, first}):
        found = await session.call(case.trainer, "logprobs", version, sequences)
        for prompt, one, all_logprobs in zip(prompts, sample, found, strict=True):
            difference = np.abs(all_logprobs[len(prompt) - 1 :] - one.logprobs)
            same.append(difference[one.versions == version])
            other.append(difference[one.versions != version])
    await session.call(case.trainer, "change", last)
    difference, control = np.concatenate(same), np.concatenate(other)
    session.log.tell(
        "logprobs",
        tokens=len(difference),
        mean=float(difference.mean()),
        largest=float(difference.max()),
        other_versions=float(control.mean()),
    )
    session.log.expect(bool(difference.mean() < NOISE[0] and difference.max() < NOISE[1]), f"{case}: log-probs differ")


# ---------------- These functions run the whole benchmark.


def allow_functions() -> None:
    """Let vLLM's workers accept the functions that check every byte. This must be called before an engine starts."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def run_vllm_updates(options: VllmOptions) -> list[str]:
    """Measure all chosen setups, and return what was wrong."""
    allow_functions()
    return asyncio.run(_measure(options))


async def _measure(options: VllmOptions) -> list[str]:
    log = Log(options.out)
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-weights-", dir=options.folder or None) as folder:
        every = setups(options.size, options.gpus)
        names = options.setups or [name for name, one in every.items() if one.tp <= max(options.gpus, 1)]
        for setup in (every[name] for name in names):
            try:
                await measure_setup(setup, options.device, options.updates, Path(folder), log)
            except Exception as error:  # The other engines are still measured.
                log.expect(False, f"{setup.size} {setup.staging} tp {setup.tp}: {type(error).__name__}: {error}")
                traceback.print_exc()
    log.tell("end", failures=log.failures)
    return log.failures
