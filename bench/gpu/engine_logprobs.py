"""`headrace bench gpu --work engine-logprobs` times an engine without log-probs, with vLLM's own, and with Headrace's.

One engine answers the same number of requests in each way, in turns and in a changing order, so that what changes on
the machine affects all ways alike. Before that, requests get their log-probs in both ways at once, and all bits are
compared.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ...actors.engines.factory import EngineConfig, build_engine
from ...actors.engines.protocol import SamplingParams
from ...trainers.config.load import load_config
from ...trainers.errors import UserError
from ..conditions import conditions
from ..transfer.results import note
from .figures import Figures
from .model_folder import make_folder
from .works import ENGINE_WORKS, EXAMPLES, GRPO_WORKS

Way = Literal["plain", "vllm", "arrays"]
WAYS: tuple[Way, ...] = ("plain", "vllm", "arrays")
"""Ways that are compared: no log-probs at all, requested of vLLM itself without Headrace's engine; vLLM's own log-probs
through Headrace's engine; and those that the worker keeps."""


LONGEST = 512
"""Largest number of tokens of a sample."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of `headrace bench gpu` for the works `engine-*`."""

    out: Path
    """Folder for the results."""
    work: str
    """Name of the work, a key of `works.ENGINE_WORKS`."""
    pairs: int = 5
    """Number of times that each way is timed."""
    model: Path | None = None
    """Model folder to use, which is made if it is not there, and kept; None means one that is removed at the end."""
    overrides: tuple[str, ...] = ()
    """Keys of the configuration's section `rollout`, as `rollout.key=value`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one round: prompts with a number of samples each, which all have the same number of tokens."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams

    @property
    def tokens(self) -> int:
        """Number of tokens that are generated."""
        return len(self.prompts) * self.params.n * self.params.max_new_tokens


def run_engine_logprobs(options: EngineOptions, tell: Callable[[str], None]) -> Figures:
    """Make the model, time the ways, and write results.jsonl and summary.json into `options.out`. Raises UserError when
    the options do not fit this machine, before anything is started."""
    work, gpu = GRPO_WORKS[ENGINE_WORKS[options.work]], torch.cuda.device_count() > 0
    if not gpu and not options.work.endswith("-tiny"):
        raise UserError(f"--work: got {options.work!r} on a machine without a GPU, expected engine-logprobs-tiny")
    for override in options.overrides:
        if not override.startswith("rollout."):
            raise UserError(f"{override}: no run is made for --work {options.work}, expected keys of rollout.* only")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="headrace-engine-") as folder:
        tell("making the model")
        model = (options.model or Path(folder, "model")).resolve()
        task = work.folder_task("bfloat16" if gpu else "float32")
        shape = replace(task.shape, head_dim=max(32, task.shape.head_dim))  # vLLM on a CPU has no kernel for smaller
        # With one end token, which is as likely as any other, nearly all samples reach their limit.
        task = replace(task, shape=shape, mean_tokens=shape.vocabulary)
        make_folder(model, task, "cuda" if gpu else "cpu")
        config = load_config(EXAMPLES / work.example, [f"model.path={model}", "model.dtype=auto", *options.overrides])
        engine_config = EngineConfig(
            rollout=config.rollout, model=config.model, device="cuda" if gpu else "cpu",
            max_model_len=work.prompt_tokens[1] + work.max_new_tokens, log=str(options.out / "engine.log"),
        )  # fmt: skip
        longest = min(LONGEST, work.max_new_tokens)
        load = made_up_load(work.prompts, work.group_size, work.prompt_tokens, shape.tokens, longest)
        tell("starting the engine")
        seconds, differing, way = asyncio.run(
            _measure(engine_config, load, options.pairs, options.out / "notes.jsonl", tell)
        )
    facts = conditions(
        gpus=[torch.cuda.get_device_name(0)] if gpu else [], work=options.work, pairs=options.pairs,
        samples=len(load.prompts) * load.params.n, tokens=load.tokens, overrides=list(options.overrides), way=way,
    )  # fmt: skip
    report = Figures(options.work, summarise_engine(options.work, load.tokens, seconds, differing), facts)
    if differing:
        report.complaints.append(f"{differing} log-probs differ from vLLM's own in some bit")
    if way.startswith("vllm"):
        report.complaints.append(f"the worker kept no log-probs: {way}")
    records = [{"op": "engine-logprobs", "way": name, "seconds": values} for name, values in seconds.items()]
    report.write(options.out, records)
    return report


def made_up_load(
    num_prompts: int, group_size: int, prompt_tokens: tuple[int, int], num_tokens: int, max_new_tokens: int
) -> Load:
    """Return prompts of random tokens, the same ones at each call."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt_tokens[0], prompt_tokens[1], num_prompts, endpoint=True)
    prompts = tuple(tuple(rng.integers(0, num_tokens - 3, length).tolist()) for length in lengths)
    return Load(prompts, SamplingParams(n=group_size, max_new_tokens=max_new_tokens, seed=1))


async def _measure(
    config: EngineConfig, load: Load, pairs: int, notes: Path, tell: Callable[[str], None]
) -> tuple[dict[Way, list[float]], int, str]:
    """Return the tokens per second of each way and round, the number of log-probs that differ, and the way in which the
    engine brings log-probs when nothing else is asked for. notes: file to which each of these is appended as it is
    known."""
    engine: Any = build_engine(config)  # a VllmEngine
    try:
        tell("comparing log-probs bit by bit")
        differing = await differing_logprobs(engine, load)
        way = engine.logprob_way
        note(notes, differing=differing, way=way)
        rates: dict[Way, list[float]] = {name: [] for name in WAYS}
        rng = random.Random(0)
        for number in range(-1, pairs):  # the first round is not counted
            tell(f"round {number + 1} of {pairs}" if number >= 0 else "warming up")
            for name in rng.sample(WAYS, len(WAYS)):
                rate = await _timed(engine, load, name, number)
                note(notes, round=number, way=name, tokens_per_s=rate)
                if number >= 0:
                    rates[name].append(rate)
        return rates, differing, way
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
    await engine.reset_prefix_cache()
    names = [f"{number}.{index}" for index in range(len(load.prompts))]  # the same seeds in each way
    started = time.perf_counter()
    if way == "plain":
        calls = []
        for name, prompt in zip(names, load.prompts, strict=True):
            sampling = engine._checks.sampling(name, load.params, with_logprobs=False)
            calls += [_final(engine, f"{name}#{index}", list(prompt), each) for index, each in enumerate(sampling)]
        tokens = sum(len(final.token_ids) for final in await asyncio.gather(*calls))
    else:
        calls = [engine.generate(name, prompt, load.params) for name, prompt in zip(names, load.prompts, strict=True)]
        tokens = sum(len(one.token_ids) for found in await asyncio.gather(*calls) for one in found)
    return tokens / (time.perf_counter() - started)


def summarise_engine(work: str, tokens: int, rates: Mapping[Way, Sequence[float]], differing: int) -> dict[str, float]:
    """Return the flat summary `gpu.{work}.{figure}`: `{way}.tokens_per_s`, medians; `{way}_vs_plain`, the median over
    the rounds of the ratio to the same round's rate without log-probs, with the smallest and the largest; and the
    number of log-probs that differ."""
    found = {f"{way}.tokens_per_s": statistics.median(values) for way, values in rates.items()}
    for way in WAYS[1:]:
        ratios = [one / plain for one, plain in zip(rates[way], rates["plain"], strict=True)]
        found |= {f"{way}_vs_plain": statistics.median(ratios)}
        found |= {f"{way}_vs_plain_min": min(ratios), f"{way}_vs_plain_max": max(ratios)}
    found |= {"differing_logprobs": float(differing), "tokens_at_most": float(tokens)}
    return {f"gpu.{work}.{name}": value for name, value in found.items()}
