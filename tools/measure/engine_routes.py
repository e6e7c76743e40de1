"""`tools/measure/gpu.py --work engine-routes` times an engine that records routes beside one that does not.

Two engines with the same weights stay up on one GPU and answer the same requests in turns. Routes of every round are
checked. Once both engines are closed, a train backend computes the log-probs of some of their tokens, with the engine's
experts and with its own.

    model -> engine with routes and engine without -> rounds in turns -> engines close
          -> trainer: log-probs of the same tokens with replay and without
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.actors.engines.factory import EngineConfig, build_engine
from headrace.actors.engines.protocol import Completion
from headrace.bench.gpu.work_report import Progress, WorkReport
from headrace.bench.records import note
from headrace.codecs.tokens.routes import RoutesDamaged, RouteSpec, check_routes, missing_tokens
from headrace.tools.measure.engine_load import (
    EngineBench,
    EngineOptions,
    check_options,
    engine_conditions,
    prepare,
    rate_figures,
    ratio_figures,
    round_name,
    time_in_turns,
    timed_round,
)
from headrace.trainers.errors import UserError
from headrace.trainers.run.checks.trust_probe import Rows, TrustReport, compare_rows, route_spec

Way = Literal["with", "without"]
WAYS: tuple[Way, ...] = ("with", "without")
"""Engines that are compared: one that records and returns routes, and one that does not."""
GIVEN = ("rollout.logprobs=arrays", "router_replay.enabled=true")
"""Settings of the configuration for both engines and the trainer. Log-probs as arrays cost least, so what routes cost
is not hidden beside them."""
TRUST = "computing the log-probs of the engine's tokens with the trainer"
"""Name of the part in which engine and trainer are compared."""
TRUST_ROWS = 8
"""Largest number of samples whose log-probs the trainer computes, each of another prompt."""


@dataclass(slots=True)
class RouteTally:
    """Counts and checks the routes that an engine returns."""

    spec: RouteSpec
    wanted: int = 0
    """Number of tokens that have a route by rule: those of prompts and samples without each sample's last."""
    missing: int = 0
    """Number of these whose route the engine did not return."""
    nbytes: int = 0
    """Size of the routes in bytes."""
    damaged: list[str] = field(default_factory=list)
    """Sentences about routes that no router can have chosen."""
    used: np.ndarray = field(init=False)
    """True for each expert that a token was sent to, bool `[layers, experts]`."""

    def __post_init__(self) -> None:
        self.used = np.zeros((len(self.spec.layers), self.spec.num_experts), bool)

    def add(self, key: str, prompt_tokens: int, answer: Completion) -> None:
        """Count and check the routes of one completion. key: name of the completion in sentences."""
        wanted, routes = prompt_tokens + len(answer.token_ids) - 1, answer.routes
        self.wanted += wanted
        if routes is None:
            self.missing += wanted
            return
        self.nbytes += routes.nbytes
        found = routes[~missing_tokens(routes, self.spec)]
        self.missing += wanted - len(found)
        try:
            check_routes(routes, self.spec, key)
        except RoutesDamaged as error:
            self.damaged.append(str(error))
        else:
            self.used[np.arange(len(self.used))[None, :, None], found] = True

    def figures(self) -> dict[str, float]:
        """Return the share of missing routes, the bytes of a token's route, and the fewest experts a layer used."""
        return {
            "missing_share": self.missing / max(self.wanted, 1),
            "bytes_per_token": self.nbytes / max(self.wanted, 1),
            "experts_used_min": float(self.used.sum(1).min()),
        }

    def complaints(self) -> list[str]:
        """Return a sentence for each thing that is wrong with the routes."""
        found = self.damaged[:3]
        if self.missing:
            found.append(f"{self.missing} of {self.wanted} routes are missing")
        for layer, used in zip(self.spec.layers, self.used.sum(1).tolist(), strict=True):
            if used <= self.spec.top_k < self.spec.num_experts:
                found.append(f"layer {layer} sent all tokens to the same {used} experts, as if it had recorded nothing")
        return found


@dataclass(slots=True)
class Measured:
    """Results of the two engines and of the trainer, as far as they came."""

    rates: dict[Way, list[float]] = field(default_factory=dict)
    """Tokens per second of each engine and round."""
    routes: RouteTally | None = None
    """Routes of all rounds, the one that warms up included; None before the first."""
    rows: Rows = field(default_factory=list)
    """Samples of the last round, of the engine with routes."""
    engines: dict[Way, dict[str, Any]] = field(default_factory=dict)
    """Settings that vLLM chose itself for each engine, by name."""
    trust: TrustReport | None = None
    """Differences between the log-probs of engine and trainer; None if they were not compared."""


def run_engine_routes(options: EngineOptions, report: WorkReport) -> None:
    """Make the model, time both engines, compare with the trainer, and write the results, also if interrupted. They go
    to results.jsonl and summary.json. Raises UserError when the options do not fit this machine, before anything is
    started."""
    check_options(options, ("rollout", "trainer"))
    options.out.mkdir(parents=True, exist_ok=True)
    report.conditions = engine_conditions(options)
    report.tell.plan(*map(round_name, range(options.pairs)), TRUST)
    found = Measured()
    with (
        report.kept(lambda: _judge(report, options, found)),
        tempfile.TemporaryDirectory(prefix="headrace-engine-") as folder,
    ):
        report.tell("making the model")
        bench = prepare(options, Path(folder), GIVEN)
        spec = route_spec(bench.config.model.path)
        if spec is None:
            raise UserError(f"--model: {bench.config.model.path} has no experts, expected a model that has")
        asyncio.run(_measure(bench, spec, found, report.tell))
        report.tell(TRUST)
        config = bench.config
        found.trust = compare_rows(config.model, config.rollout, config.trainer, spec, found.rows)
        note(options.out / "notes.jsonl", **trust_figures(found.trust))
        report.tell.finish(TRUST)


def _judge(report: WorkReport, options: EngineOptions, found: Measured) -> None:
    """Fill in the figures of the report, and complain of what is wrong."""
    figures = {"tokens_at_most": float(report.conditions["tokens"])}
    if found.rates:
        figures = summarise_routes(found.rates, report.conditions["tokens"])
    if found.routes is not None:
        figures |= found.routes.figures()
        report.complaints = found.routes.complaints()
    report.conditions["engines"] = found.engines
    if found.trust is not None:
        figures |= trust_figures(found.trust)
        report.conditions |= {"trainer": found.trust.backend, "compared_tokens": found.trust.tokens}
        told = report.notes if found.trust.sound else report.complaints
        told.append(f"engine and trainer: {found.trust.verdict}")
    report.summary = {f"gpu.{options.work}.{name}": value for name, value in figures.items()}
    report.records = [
        {"op": "engine-routes", "way": way, "tokens_per_s": values} for way, values in found.rates.items()
    ]


async def _measure(bench: EngineBench, spec: RouteSpec, found: Measured, tell: Progress) -> None:
    """Start both engines, time them in turns and close them. Each figure is noted in notes.jsonl as it is known."""
    engines: dict[Way, Any] = {}  # VllmEngines
    notes = bench.options.out / "notes.jsonl"

    async def run(way: Way, number: int) -> float:
        rate, answers = await timed_round(engines[way], bench.load, number)
        if way == "with":
            found.routes = tally = found.routes or RouteTally(spec)
            for index, (prompt, completions) in enumerate(zip(bench.load.prompts, answers, strict=True)):
                for sample, answer in enumerate(completions):
                    tally.add(f"round {number}, prompt {index}, sample {sample}", len(prompt), answer)
            found.rows = first_samples(bench.load.prompts, answers)
            note(notes, round=number, **tally.figures())
        return rate

    async with AsyncExitStack() as stack:
        # One after the other, because a start changes the environment of this process, and so that the second one finds
        # what vLLM compiled for the first.
        for way in WAYS:
            tell(f"starting the engine {way} routes")
            engine: Any = build_engine(engine_setup(bench, way, spec))
            stack.push_async_callback(engine.close)
            engines[way] = engine
            found.engines[way] = chosen_by_vllm(engine)
        await time_in_turns(WAYS, bench.options.pairs, run, notes, tell, found.rates)
        tell("closing the engines")


def engine_setup(bench: EngineBench, way: Way, spec: RouteSpec) -> EngineConfig:
    """Return the settings of an engine. Each takes a share of the GPU that leaves room for the other."""
    routes, log = spec if way == "with" else None, str(bench.options.out / f"engine-{way}.log")
    return replace(bench.setup, routes=routes, shared_gpu=True, log=log)


def chosen_by_vllm(engine: Any) -> dict[str, Any]:
    """Return settings of an engine that vLLM chose itself, and that recording routes may change."""
    config = engine.process.llm.vllm_config
    return {
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "second_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "kv_cache_blocks": config.cache_config.num_gpu_blocks,
    }


def first_samples(prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[Completion]]) -> Rows:
    """Return the first sample of each of the first TRUST_ROWS prompts."""
    rows = [(np.array(prompt, np.int64), found[0]) for prompt, found in zip(prompts, answers, strict=True)]
    return rows[:TRUST_ROWS]


def summarise_routes(rates: Mapping[Way, Sequence[float]], tokens: int) -> dict[str, float]:
    """Return `{way}.tokens_per_s`, `vs_without` and `vs_without_pairs`. They are medians over the rounds, the ratio of
    these medians, and the median of the ratios within the rounds, with the smallest and the largest."""
    medians = {way: statistics.median(values) for way, values in rates.items()}
    return {
        **rate_figures(rates),
        "vs_without": medians["with"] / medians["without"],
        **ratio_figures("vs_without_pairs", rates["with"], rates["without"]),
        "tokens_at_most": float(tokens),
    }


def trust_figures(trust: TrustReport) -> dict[str, float]:
    """Return the log-prob mismatch of engine and trainer with replay and without, and how far routers agree. The rows
    are the same; agreement is the share of choices in which the two routers agree."""
    found = {"native_agreement": statistics.fmean(trust.agreement.values())}
    for name in ("mismatch_kl", "mismatch_mean", "mismatch_max"):
        found |= {f"{name}_with_replay": trust.replayed[name], f"{name}_without_replay": trust.native[name]}
    return found
