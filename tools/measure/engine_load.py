"""Makes the model, the settings and the requests of the works `engine-*`, and times engines in turns.

All ways of a work answer the same requests in each round, in an order that changes, so that what changes on the machine
affects them alike.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from headrace.actors.engines.factory import EngineConfig
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.bench.gpu.work_report import Progress
from headrace.bench.gpu.works import EXAMPLES
from headrace.bench.models import SHAPES, FolderTask, make_folder
from headrace.bench.records import conditions, note
from headrace.tools.measure.works import ENGINE_WORKS
from headrace.trainers.cluster.rollout_specs import sampling
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import load_config
from headrace.trainers.errors import UserError

if TYPE_CHECKING:
    from headrace.actors.engines.vllm.engine import VllmEngine

Way = TypeVar("Way", bound=str)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of `tools/measure/gpu.py` for the works `engine-*`."""

    out: Path
    """Folder for the results."""
    work: str
    """Name of the work, a key of `works.ENGINE_WORKS`."""
    pairs: int = 5
    """Number of times that each way is timed."""
    layers: int | None = None
    """Number of layers of the model; None means the work's own."""
    model: Path | None = None
    """Model folder to use, which is made if it is not there, and kept; None means one that is removed at the end."""
    overrides: tuple[str, ...] = ()
    """Keys of those sections of the configuration that the work reads, as `rollout.key=value`."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one round: prompts with a number of samples each, which all have the same number of tokens."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams

    @property
    def tokens(self) -> int:
        """Number of tokens that are generated."""
        return len(self.prompts) * self.params.n * self.params.max_new_tokens


@dataclass(frozen=True, slots=True)
class EngineBench:
    """Input of a work `engine-*`: a model on disk, settings of an engine for it, and the requests of a round."""

    config: Config
    """Configuration of the example that the work names, with the model and the overrides."""
    setup: EngineConfig
    load: Load
    options: EngineOptions


def check_options(options: EngineOptions, sections: Sequence[str]) -> None:
    """Raise UserError for options that do not fit this machine, or an override of another section. The work reads only
    the `sections` of the configuration."""
    if not torch.cuda.device_count() and not options.work.endswith("-tiny"):
        raise UserError(f"--work: got {options.work!r} on a machine without a GPU, expected {options.work}-tiny")
    for override in options.overrides:
        if override.partition(".")[0] not in sections:
            expected = " and ".join(f"{section}.*" for section in sections)
            raise UserError(f"{override}: no run is made for --work {options.work}, expected keys of {expected} only")


def engine_conditions(options: EngineOptions) -> dict[str, Any]:
    """Return the conditions of the measurement of a work."""
    work = ENGINE_WORKS[options.work]
    samples = work.prompts * work.group_size
    return conditions(
        gpus=[torch.cuda.get_device_name(0)] if torch.cuda.device_count() else [],
        work=options.work, pairs=options.pairs, layers=options.layers, samples=samples,
        tokens=samples * work.max_new_tokens, overrides=list(options.overrides),
    )  # fmt: skip


def prepare(options: EngineOptions, folder: Path, given: Sequence[str] = ()) -> EngineBench:
    """Make the model of a work and return what is measured. folder: where the model is made unless `options` names
    another. given: the work's own overrides of the configuration, before those of `options`."""
    work, device = ENGINE_WORKS[options.work], "cuda" if torch.cuda.device_count() else "cpu"
    model = (options.model or folder / "model").resolve()
    shape = SHAPES[work.size]
    # vLLM on a CPU has no kernel for smaller heads.
    shape = replace(shape, layers=options.layers or work.layers or shape.layers, head_dim=max(32, shape.head_dim))
    # With one end token, which is as likely as any other, nearly all samples reach their limit.
    dtype = "float32" if device == "cpu" else "bfloat16"
    make_folder(model, FolderTask(shape, dtype, shape.vocabulary, work.prompt_tokens, num_prompts=1), device)
    own = [f"model.path={model}", "model.dtype=auto", *given]
    config = load_config(EXAMPLES / work.example, [*own, *options.overrides])
    setup = EngineConfig(
        rollout=config.rollout, model=config.model, device=device,
        max_model_len=work.prompt_tokens[1] + work.max_new_tokens, log=str(options.out / "engine.log"),
    )  # fmt: skip
    params = replace(sampling(config.rollout, n=work.group_size, seed=1), max_new_tokens=work.max_new_tokens)
    return EngineBench(config, setup, made_up_load(work.prompts, work.prompt_tokens, shape.tokens, params), options)


def made_up_load(num_prompts: int, prompt_tokens: tuple[int, int], num_tokens: int, params: SamplingParams) -> Load:
    """Return prompts of random tokens, the same ones at each call."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt_tokens[0], prompt_tokens[1], num_prompts, endpoint=True)
    return Load(tuple(tuple(rng.integers(0, num_tokens - 3, length).tolist()) for length in lengths), params)


def request_names(load: Load, number: int) -> list[str]:
    """Return an id for the request of each prompt in round `number`. Seeds come from it, so all ways get the same
    ones."""
    return [f"{number}.{index}" for index in range(len(load.prompts))]


async def timed_round(engine: VllmEngine, load: Load, number: int) -> tuple[float, list[list[Completion]]]:
    """Return the tokens per second of one round, and the completions of each prompt."""
    await engine.reset_prefix_cache()
    names = request_names(load, number)
    started = time.perf_counter()
    calls = [engine.generate(name, prompt, load.params) for name, prompt in zip(names, load.prompts, strict=True)]
    answers = await asyncio.gather(*calls)
    seconds = time.perf_counter() - started
    return sum(len(one.token_ids) for found in answers for one in found) / seconds, answers


def round_name(number: int) -> str:
    """Return the name of a counted round, of which the first has the number 0."""
    return f"round {number + 1}"


async def time_in_turns(
    ways: Sequence[Way],
    pairs: int,
    run: Callable[[Way, int], Awaitable[float]],
    notes: Path,
    tell: Progress,
    rates: dict[Way, list[float]],
) -> None:
    """Time each way in each of `pairs` rounds, after a round that is not counted.

    run: function that makes round `number` of a way and returns its tokens per second. notes: file to which each of
    them is appended as it is known. rates: gets the tokens per second of all ways of each round that is over.
    """
    rng = random.Random(0)
    for number in range(-1, pairs):
        tell(f"{round_name(number)} of {pairs}" if number >= 0 else "warming up")
        found: dict[Way, float] = {}
        for way in rng.sample(ways, len(ways)):
            found[way] = await run(way, number)
            note(notes, round=number, way=way, tokens_per_s=found[way])
        if number >= 0:
            for way in ways:
                rates.setdefault(way, []).append(found[way])
            tell.finish(round_name(number))


def ratio_figures(name: str, rates: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return `name`, the median over rounds of a way's rate over the `base` rate in the same round. The smallest and
    the largest ratio come with it."""
    ratios = [one / other for one, other in zip(rates, base, strict=True)]
    return {name: statistics.median(ratios), f"{name}_min": min(ratios), f"{name}_max": max(ratios)}


def rate_figures(rates: Mapping[Way, Sequence[float]]) -> dict[str, float]:
    """Return `{way}.tokens_per_s`, the median over the rounds."""
    return {f"{way}.tokens_per_s": statistics.median(values) for way, values in rates.items()}
