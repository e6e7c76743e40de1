"""Weight sync into a real vLLM engine that is generating: how long, how long it stands still, and every byte checked.

    mkdir -p .pyright && ln -sfn .. .pyright/headrace
    PYTHONPATH=.pyright python -m headrace.bench.weights.gpu --gpus 2 [--size 2B] [--out FOLDER]

A trainer process per GPU publishes random weights, other ones at every version; the engine is on GPU 0. An update's
time runs from before its announcement until the engine serves it. Prints one JSON object a line, and writes them to
FOLDER/gpu_weights.jsonl; exits with 1 when a byte, a version or a log-prob is not right. Needs vLLM, no Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...actors.engines.protocol import Completion, SamplingParams
from ...actors.engines.vllm.engine import VllmEngine
from ...actors.weights.config import Staging, SyncConfig
from ...actors.weights.transports.protocol import ReceiverConfig, WeightUpdate
from ...codecs import messages
from .gpu_builtin import measure_builtin
from .gpu_peers import CONTEXT, KV_CACHE_BYTES, MAX_NUM_SEQS, Trainer, TrainerTask, parameter_digests, save_config
from .peers import Peer

TIMEOUT_S = 15.0
WARM_UPS = 3
TOKENS_BETWEEN = 4
"""Every request makes at least so many between updates: then all that it keeps was computed anew."""
PROMPT = list(range(3, 19))
LONGEST = CONTEXT - len(PROMPT) - 1
NOISE = (0.025, 0.5)
"""(mean, largest) difference of log-probs allowed between vLLM's and Transformers' kernels in bfloat16. Seen with all
bytes equal: means of 0.017 to 0.022, largest 0.44 with experts, 0.11 without. Between versions the mean is 1.3."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; all of an engine's cases run in it, one after another."""

    kind: str
    trainer: int
    """Its GPU; the engine is on 0."""
    bucket_mib: int
    in_flight: int = 32
    """Requests that run meanwhile; 0: the engine is idle."""
    updates: int = 20


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine and what is done with it."""

    size: str
    staging: Staging
    cases: tuple[Case, ...]
    tp: int = 1
    colocated: int = 0
    """Cycles of sleep, update, wake."""
    builtin: bool = False
    """vLLM's own transfers instead of ours."""


def setups(size: str, gpus: int, only: Sequence[str]) -> list[Setup]:
    """All, or those named in `only`."""
    far = 1 if gpus > 1 else 0

    def cases(*sizes: int) -> tuple[Case, ...]:
        places = [("ipc", 0)] + [("collective", far), ("ipc", far)] * far
        return tuple(Case(kind, gpu, mib, running) for kind, gpu in places for mib in sizes for running in (32, 0))

    few = (Case("ipc", 0, 256, 32, 5), Case("ipc", 0, 256, 0, 5))
    every = {
        "none": Setup(size, "none", cases(256, 512, 1024), colocated=3),
        "full": Setup(size, "full", cases(256), colocated=3),
        "moe": Setup("moe", "none", (Case("ipc", 0, 1, 8, 20),)),
        "tp2": Setup(size, "full", few, tp=2),
        "tp2-none": Setup(size, "none", few, tp=2),
        "builtin": Setup(size, "none", cases(256), builtin=True),
    }
    names = list(only) or [name for name, one in every.items() if one.tp <= max(gpus, 1)]
    return [every[name] for name in names]


class Bench:
    """Trainers, one engine at a time, and what was found."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._device = arguments.device
        self._dtype = "bfloat16" if self._device == "cuda" else "float32"
        self._updates = arguments.updates
        self._out = Path(arguments.out)
        self._out.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._run_id = f"gpu-weights-{uuid.uuid4().hex[:6]}"
        self._num_trainers = max(arguments.gpus, 1)
        self._trainers: list[Peer] = []
        self._num_bytes = 0
        self._version = 0
        self.failures: list[str] = []

    def tell(self, record: str, /, **found: Any) -> None:
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}
        line = json.dumps({"record": record} | rounded, default=str)
        print(line, flush=True)
        with (self._out / "gpu_weights.jsonl").open("a") as file:
            file.write(line + "\n")

    def expect(self, right: bool, what: str) -> None:
        if not right:
            self.failures.append(what)
            self.tell("wrong", what=what)

    async def run(self, setup: Setup) -> None:
        """One engine, all its cases."""
        with ExitStack() as stack:
            model = self._folder / f"{setup.size}-{uuid.uuid4().hex[:4]}"
            save_config(setup.size, model, self._dtype)
            needed = 1 + max(case.trainer for case in setup.cases)
            self._trainers = []
            for rank in range(needed):
                device = f"cuda:{rank}" if self._device == "cuda" else "cpu"
                task = TrainerTask(str(model), device, self._dtype, f"{self._run_id}-{setup.staging}", rank)
                self._trainers.append(Peer(partial(Trainer, task)))
                stack.callback(self._trainers[-1].close)
            for trainer in range(needed):
                self._num_bytes = await self._call(trainer, "ready")
            await self._call(0, "save")
            if setup.builtin:
                self.failures += await measure_builtin(model, self._num_bytes, needed, self._call, self.tell)
                return
            started = time.perf_counter()
            engine = await asyncio.to_thread(self._engine, model, setup)
            self._version = 0
            await engine.generate("first", PROMPT, SamplingParams(max_new_tokens=64))
            self.tell("engine", size=setup.size, staging=setup.staging, tp=setup.tp, bytes=self._num_bytes)
            self.tell("start", seconds=time.perf_counter() - started)
            try:
                if setup.staging == "none" and setup.size != "moe" and setup.tp == 1:
                    await self._limits()
                for case in setup.cases:
                    await self._case(engine, setup, case)
                for cycle in range(setup.colocated if self._device == "cuda" else 0):
                    await self._colocated(engine, cycle, setup)
            finally:
                await engine.close()

    def _engine(self, model: Path, setup: Setup) -> VllmEngine:
        device = "cuda:0" if self._device == "cuda" else "cpu"
        return VllmEngine(
            str(model),
            dtype=getattr(torch, self._dtype),
            tp=setup.tp,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_bytes=KV_CACHE_BYTES if self._device == "cuda" else 64 << 20,
            max_model_len=CONTEXT,
            receiver=ReceiverConfig("engine", SyncConfig(staging=setup.staging), device),
        )

    # ---------------------------------------------------------------- updates

    async def _case(self, engine: VllmEngine, setup: Setup, case: Case) -> None:
        updates = self._updates or case.updates
        requests: list[asyncio.Task[list[Completion]]] = []
        try:
            await self._call(case.trainer, "publisher", case.kind, case.bucket_mib << 20, TIMEOUT_S)
            first = self._version + 1
            params = SamplingParams(max_new_tokens=LONGEST)
            requests = [
                asyncio.create_task(engine.generate(f"{first}-{number}", [*PROMPT, number + 20], params))
                for number in range(case.in_flight)
            ]
            rows = []
            for number in range(WARM_UPS + updates):
                await self._flowing(engine)
                row = await self._update(engine, case.trainer, setup.tp)
                rows += [row] if number >= WARM_UPS else []
                last = number == WARM_UPS + updates - 1
                if number % 5 == 0 or last:
                    await self._check_bytes(engine, case.trainer, setup.tp, exact=last and case.in_flight > 0)
            await self._report(engine, setup, case, rows)
            if requests:
                await self._flowing(engine)
                for number in range(case.in_flight):
                    await engine.abort(f"{first}-{number}")
                await self._check_tokens(case, first, await asyncio.gather(*requests))
        except Exception as error:  # the other cases go on
            self.expect(False, f"{case}: {type(error).__name__}: {error}")
            traceback.print_exc()
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    async def _update(self, engine: VllmEngine, trainer: int, tp: int) -> dict[str, float]:
        self._version += 1
        await self._call(trainer, "change", self._version)
        start = time.perf_counter()
        opened = await self._call(trainer, "open", self._version, tp)
        announced = time.perf_counter()
        publishing = asyncio.create_task(self._call(trainer, "publish", opened))
        await engine.prepare_weights(messages.decode(opened, WeightUpdate))
        prepared = time.perf_counter()
        report = await engine.commit_weights(self._version, "keep")
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

    async def _report(self, engine: VllmEngine, setup: Setup, case: Case, rows: list[dict[str, float]]) -> None:
        medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        totals = [row["update_s"] for row in rows]
        place = f"gpu{case.trainer}->gpu{'0,1' if setup.tp > 1 else '0'}"
        self.tell(
            "update",
            size=setup.size,
            staging=setup.staging,
            place=place,
            way=engine.load_way,
            **asdict(case) | {"updates": len(rows)},
            gb_per_s=self._num_bytes / medians["update_s"] / 1e9,
            fastest_s=min(totals),
            slowest_s=max(totals),
            **medians,
        )

    async def _flowing(self, engine: VllmEngine) -> None:
        """Until every request has made tokens under the present version."""
        spans = engine._process.versions._spans
        async with asyncio.timeout(TIMEOUT_S):
            while any(not one or one[-1][0] != self._version or one[-1][1] < TOKENS_BETWEEN for one in spans.values()):
                await asyncio.sleep(0.005)

    async def _check_bytes(self, engine: VllmEngine, trainer: int, tp: int, *, exact: bool = True) -> None:
        """Every parameter of every worker."""
        found = await engine._process.call_function(parameter_digests, exact)
        expected = await self._call(trainer, "digests", tp, exact)
        right = wrong = 0
        for here, there in zip(found, expected, strict=True):
            right += sum(here.get(name) == one for name, one in there.items())
            wrong += sum(here.get(name) != one for name, one in there.items()) + len(here.keys() - there.keys())
        if exact or wrong:
            self.tell("bytes", version=self._version, equal=right, wrong=wrong)
        self.expect(wrong == 0 or self._device == "cpu", f"version {self._version}: {wrong} parameters differ")

    async def _check_tokens(self, case: Case, first: int, completions: list[list[Completion]]) -> None:
        """Every token has a version; log-probs are those of its version's weights with all that came before."""
        every = [one for some in completions for one in some]
        for one in every:
            self.expect(len(one.versions) == len(one.token_ids) == len(one.logprobs), "tokens without a version")
            self.expect(bool((np.diff(one.versions) >= 0).all()), "versions fall")
        self.tell(
            "tokens",
            tokens=sum(len(one.token_ids) for one in every),
            versions=sorted({int(version) for one in every for version in one.versions}),
        )
        longest = sorted(range(len(every)), key=lambda number: -len(every[number].token_ids))[:2]
        sample = [every[number] for number in longest]
        prompts = [[*PROMPT, number + 20] for number in longest]
        sequences = [[*prompt, *one.token_ids.tolist()] for prompt, one in zip(prompts, sample, strict=True)]
        apart: list[np.ndarray] = []
        other: list[np.ndarray] = []
        last = self._version
        for version in sorted({last, last - 1, (first + last) // 2, first}):
            found = await self._call(case.trainer, "logprobs", version, sequences)
            for prompt, one, all_logprobs in zip(prompts, sample, found, strict=True):
                logprobs = all_logprobs[len(prompt) - 1 :]
                apart.append(np.abs(logprobs - one.logprobs)[one.versions == version])
                other.append(np.abs(logprobs - one.logprobs)[one.versions != version])
        await self._call(case.trainer, "change", last)
        difference, control = np.concatenate(apart), np.concatenate(other)
        self.tell(
            "logprobs",
            tokens=len(difference),
            mean=float(difference.mean()),
            largest=float(difference.max()),
            other_versions=float(control.mean()),
        )
        self.expect(difference.mean() < NOISE[0] and difference.max() < NOISE[1], f"{case}: log-probs differ")

    async def _colocated(self, engine: VllmEngine, cycle: int, setup: Setup) -> None:
        """The trainer on the engine's GPU, which the engine leaves to it in between."""
        if not cycle:
            await self._call(0, "publisher", "ipc", 256 << 20, TIMEOUT_S)
        start = time.perf_counter()
        await engine.sleep(2)
        asleep = time.perf_counter()
        row = await self._update(engine, 0, 1)
        updated = time.perf_counter()
        await engine.wake()
        awake = time.perf_counter()
        await self._check_bytes(engine, 0, setup.tp)
        completions = await engine.generate(f"awake-{self._version}", PROMPT, SamplingParams(max_new_tokens=256))
        one = completions[0]
        logprobs = await self._call(0, "logprobs", self._version, [[*PROMPT, *one.token_ids.tolist()]])
        difference = np.abs(logprobs[0][len(PROMPT) - 1 :] - one.logprobs)
        self.expect(difference.mean() < NOISE[0] and (one.versions == self._version).all(), "wrong after waking")
        self.tell(
            "colocated",
            staging=setup.staging,
            sleep_s=asleep - start,
            update_s=row["update_s"],
            change_s=updated - asleep - row["update_s"],
            wake_s=awake - updated,
            mean_difference=float(difference.mean()),
        )

    # ---------------------------------------------------------------- limits

    async def _limits(self) -> None:
        """What the hardware does with the same bytes, no engine involved."""
        nbytes, repeats = self._num_bytes, 7
        device = self._device
        found = {"copy in one GPU": await self._call(0, "copies", nbytes, "cuda:0" if device == "cuda" else "cpu", 7)}
        if len(self._trainers) > 1:
            found["copy to the other GPU"] = await self._call(1, "copies", nbytes, device + ":0" * (device != "cpu"), 7)
            path = str(self._folder / "group")
            both = range(2)
            await asyncio.gather(*(self._call(rank, "join", path, 2) for rank in both))
            seconds = []
            for _ in range(repeats + 1):
                seconds.append(max(await asyncio.gather(*(self._call(rank, "broadcast", nbytes) for rank in both))))
            await asyncio.gather(*(self._call(rank, "leave") for rank in both))
            found["broadcast"] = seconds[1:]
        for name, seconds in found.items():
            median = statistics.median(seconds)
            self.tell("limit", name=name, seconds=median, gb_per_s=nbytes / median / 1e9)

    async def _call(self, trainer: int, method: str, *args: Any) -> Any:
        return (await asyncio.to_thread(self._trainers[trainer].call, method, *args))[0]


async def measure(arguments: argparse.Namespace) -> int:
    """All setups; 1 when anything was not right."""
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-weights-", dir=arguments.folder or None) as folder:
        bench = Bench(arguments, Path(folder))
        for setup in setups(arguments.size, arguments.gpus, arguments.setups):
            try:
                await bench.run(setup)
            except Exception as error:  # the other engines go on
                bench.expect(False, f"{setup.size} {setup.staging} tp {setup.tp}: {type(error).__name__}: {error}")
                traceback.print_exc()
        bench.tell("end", failures=bench.failures)
        return 1 if bench.failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--size", default="2B", choices=("2B", "tiny"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--setups", nargs="*", default=(), metavar="NAME", help="see `setups`; default: all")
    parser.add_argument("--updates", type=int, default=0, help="per case, instead of each case's own")
    parser.add_argument("--folder", default="", help="where models are written; default: the system's")
    parser.add_argument("--out", default="runs/gpu-weights")
    # The check of every byte sends a function to vLLM's workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return asyncio.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
