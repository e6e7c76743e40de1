"""`tools/measure/gpu.py --work engine-logprobs` times an engine without log-probs, with vLLM's own, and with ours.

One engine answers the same requests in each way, in turns. Before that, requests get their log-probs in both ways at
once, and all bits are compared.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.actors.engines.factory import build_engine
from headrace.bench.gpu.work_report import Progress, WorkReport
from headrace.bench.records import note
from headrace.tools.measure.engine_load import (
    EngineBench,
    EngineOptions,
    Load,
    check_options,
    engine_conditions,
    prepare,
    rate_figures,
    ratio_figures,
    request_names,
    round_name,
    time_in_turns,
    timed_round,
)

Way = Literal["plain", "vllm", "arrays"]
WAYS: tuple[Way, ...] = ("plain", "vllm", "arrays")
"""Ways that are compared: no log-probs at all, requested of vLLM itself without Headrace's engine; vLLM's own log-probs
through Headrace's engine; and those that the worker keeps."""


BITS = "comparing log-probs bit by bit"
"""Name of the part in which the log-probs of all ways are compared."""


@dataclass(slots=True)
class Measured:
    """Results of the engine, as far as they came."""

    rates: dict[Way, list[float]] = field(default_factory=dict)
    """Tokens per second of each way and round."""
    differing: int | None = None
    """Number of log-probs that differ; None if they were not compared."""
    way: str | None = None
    """Way in which the engine brings log-probs when nothing else is asked for; None if it has not started."""


def run_engine_logprobs(options: EngineOptions, report: WorkReport) -> None:
    """Make the model, time the ways, and write results.jsonl and summary.json, also if interrupted. Raises UserError
    when the options do not fit this machine, before anything is started."""
    check_options(options, ("rollout",))
    options.out.mkdir(parents=True, exist_ok=True)
    report.conditions = engine_conditions(options)
    report.tell.plan(BITS, *map(round_name, range(options.pairs)))
    found = Measured()
    with (
        report.kept(lambda: _judge(report, options, found)),
        tempfile.TemporaryDirectory(prefix="headrace-engine-") as folder,
    ):
        report.tell("making the model")
        bench = prepare(options, Path(folder))
        report.tell("starting the engine")
        asyncio.run(_measure(bench, found, report.tell))


def _judge(report: WorkReport, options: EngineOptions, found: Measured) -> None:
    """Fill in the figures of the report, and complain of what is wrong."""
    report.summary = summarise_engine(options.work, report.conditions["tokens"], found.rates, found.differing)
    report.conditions["way"] = found.way
    if found.differing:
        report.complaints.append(f"{found.differing} log-probs differ from vLLM's own in some bit")
    if found.way and found.way.startswith("vllm"):
        report.complaints.append(f"the worker kept no log-probs: {found.way}")
    report.records = [
        {"op": "engine-logprobs", "way": name, "tokens_per_s": values} for name, values in found.rates.items()
    ]


async def _measure(bench: EngineBench, found: Measured, tell: Progress) -> None:
    """Start the engine, compare log-probs, time the ways and close it. Each figure is noted in notes.jsonl as it is
    known."""
    engine: Any = build_engine(bench.setup)  # a VllmEngine
    notes = bench.options.out / "notes.jsonl"
    try:
        tell(BITS)
        found.differing = await differing_logprobs(engine, bench.load)
        found.way = engine.logprob_way
        note(notes, differing=found.differing, way=found.way)
        tell.finish(BITS)

        async def run(name: Way, number: int) -> float:
            return await _timed(engine, bench.load, name, number)

        await time_in_turns(WAYS, bench.options.pairs, run, notes, tell, found.rates)
        tell("closing the engine")
    finally:
        await engine.close()


async def differing_logprobs(engine: Any, load: Load) -> int:
    """Return how many log-probs of a round differ in some bit between vLLM's own and those that the worker keeps. -1 if
    the worker keeps none."""
    if not await engine._logprobs.keeps():
        return -1

    async def one(sample: str, prompt: list[int], sampling: Any) -> int:
        final = await _final(engine, sample, prompt, sampling)
        theirs = np.array(final.logprobs.logprobs, np.float32)
        ours = await engine._logprobs.take(sample, len(final.token_ids))
        return int((ours.view(np.int32) != theirs.view(np.int32)).sum())

    calls = []
    for number, prompt in enumerate(load.prompts):
        sampling = engine._checks.sampling(f"bits{number}", load.params, with_logprobs=True)
        calls += [one(f"bits{number}#{sample}", list(prompt), each) for sample, each in enumerate(sampling)]
    return sum(await asyncio.gather(*calls))


async def _final(engine: Any, sample: str, prompt: list[int], sampling: Any) -> Any:
    final = None
    async with aclosing(engine.process.generate(sample, prompt, sampling)) as outputs:
        async for output in outputs:
            final = output.outputs[0]
    return final


async def _timed(engine: Any, load: Load, way: Way, number: int) -> float:
    """Return the tokens per second of one round."""
    await engine.change_logprobs("vllm" if way == "plain" else way)
    if way != "plain":
        rate, _ = await timed_round(engine, load, number)
        return rate
    await engine.reset_prefix_cache()
    started = time.perf_counter()
    calls = []
    for name, prompt in zip(request_names(load, number), load.prompts, strict=True):
        sampling = engine._checks.sampling(name, load.params, with_logprobs=False)
        calls += [_final(engine, f"{name}#{index}", list(prompt), each) for index, each in enumerate(sampling)]
    tokens = sum(len(final.token_ids) for final in await asyncio.gather(*calls))
    return tokens / (time.perf_counter() - started)


def summarise_engine(
    work: str, tokens: int, rates: Mapping[Way, Sequence[float]], differing: int | None
) -> dict[str, float]:
    """Return the flat summary `gpu.{work}.{figure}`. `{way}.tokens_per_s` are medians; `{way}_vs_plain` is the median
    over the rounds of the ratio to the same round's rate without log-probs, with the smallest and the largest. The
    number of log-probs that differ comes with them. Without a round, the rates are left out; differing: None if it is
    not known."""
    found = rate_figures(rates)
    for way in WAYS[1:] if rates else ():
        found |= ratio_figures(f"{way}_vs_plain", rates[way], rates["plain"])
    if differing is not None:
        found["differing_logprobs"] = float(differing)
    found["tokens_at_most"] = float(tokens)
    return {f"gpu.{work}.{name}": value for name, value in found.items()}
