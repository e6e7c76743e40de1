"""Measures weight updates of a running vLLM engine, and checks parameters, versions and log-probs after them."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...actors.engines.protocol import Completion, SamplingParams
from ...actors.engines.vllm.engine import VllmEngine
from ...actors.weight_sync.config import Staging
from ...actors.weight_sync.transports.protocol import WeightUpdate
from ...codecs import messages
from .gpu_peers import CONTEXT, parameter_digests
from .peers import Peer

TIMEOUT_S = 15.0
WARM_UPS = 3
TOKENS_BETWEEN = 4
"""Number of tokens that every request generates between two updates, so that all its keys and values are recomputed."""
PROMPT = list(range(3, 19))
LONGEST = CONTEXT - len(PROMPT) - 1
NOISE = (0.025, 0.5)
"""Mean and largest difference of log-probs allowed between vLLM's and Transformers' kernels in bfloat16. With all bytes
equal, means of 0.017 to 0.022 were seen, and a largest of 0.44 with experts and 0.11 without. Between two versions of
the weights the mean is 1.3."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of the weight updates. All cases of an engine are measured one after another."""

    kind: str
    """Kind of the weight transport."""
    trainer: int
    """Number of the GPU that the trainer uses; the engine is on GPU 0."""
    bucket_mib: int
    """Size of a bucket in MiB."""
    in_flight: int = 32
    """Number of requests that the engine works on during the updates; with 0 it is idle."""
    updates: int = 20
    """Number of updates that are measured."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of one engine, and the measurements that are made with it."""

    size: str
    """Size of the model, a key of `gpu_peers.MODELS`."""
    staging: Staging
    """Staging mode of the engine's receivers."""
    cases: tuple[Case, ...]
    tp: int = 1
    """Number of tensor-parallel workers."""
    colocated: int = 0
    """Number of cycles in which the engine sleeps, is updated and wakes, while the trainer uses the same GPU."""
    from_host: bool = False
    """True if the engine is sent each version from the trainer's host memory, as one of a pool is when it wakes."""
    builtin: bool = False
    """True to measure vLLM's own weight transfers instead of Headrace's."""


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
        line = json.dumps({"record": record} | rounded, default=str)
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

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
    num_bytes: int = 0
    """Number of bytes of all weights."""
    version: int = 0
    """Version of the weights that was published last."""

    async def call(self, trainer: int, method: str, *args: Any) -> Any:
        """Call a method of a trainer process and return its result."""
        return (await asyncio.to_thread(self.trainers[trainer].call, method, *args))[0]


async def start_publisher(session: Session, case: Case) -> None:
    """Make the case's trainer publish through the case's transport from now on."""
    await session.call(case.trainer, "publisher", case.kind, case.bucket_mib << 20, TIMEOUT_S)


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
    except Exception as error:  # the other cases are still measured
        session.log.expect(False, f"{case}: {type(error).__name__}: {error}")
        traceback.print_exc()
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


async def update(session: Session, engine: VllmEngine, trainer: int, tp: int) -> dict[str, float]:
    """Publish a new version of the weights and wait until the engine serves it. Returns the seconds of each phase. tp:
    number of the engine's workers, which receive the weights."""
    session.version += 1
    version = session.version
    await session.call(trainer, "change", version)
    start = time.perf_counter()
    opened = await session.call(trainer, "open", version, tp)
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


# ---------------------------------------------------------------- checks


async def check_bytes(session: Session, engine: VllmEngine, trainer: int, *, exact: bool = True) -> None:
    """Compare every parameter of every worker with the trainer's weights. exact: whether to use xxh3 digests rather
    than the faster digests of the GPU."""
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
    """Check that every token has a weight version, and that its log-prob is that of this version's weights.

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
