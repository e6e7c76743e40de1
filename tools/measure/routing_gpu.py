"""`python tools/measure/routing_gpu.py` compares the policies of `rollout.routing` on real vLLM engines.

The engines are Ray actors behind one router, as in a run. Their model has random weights; prompts and answers are those
of the simulated trace, so that every run computes the same turns. The policies take turns, several times each. The
speed of one engine is measured first, and printed as the numbers that the simulation needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from headrace.actors.engine_actor import CONCURRENCY, EngineActor, EngineSetup, RemoteEngine
from headrace.actors.engines.config import EngineKeys, ModelConfig
from headrace.actors.engines.factory import EngineConfig
from headrace.actors.engines.protocol import EngineStats, SamplingParams
from headrace.actors.engines.router import Router
from headrace.actors.process.remote_methods import decode_result, encode_arguments, submit
from headrace.bench.models import SHAPES, save_config
from headrace.cli.arguments import expect_gpus
from headrace.cli.command import ended
from headrace.tools.measure.routing import EngineFigures, Episode, Trace, shown_trace, simulate
from headrace.trainers.cluster.ray_cluster import lean_start

SHAPES_HERE = {**SHAPES, "tiny": replace(SHAPES["tiny"], head_dim=32)}
"""vLLM has kernels for CPUs only for larger heads than those of `tiny`."""
POLICIES = ("least_loaded", "prefix")
DECODE_BATCHES = (1, 16, 64, 128)
"""Numbers of samples at which the speed of decoding is measured."""
DECODE_TOKENS = 128
PREFILL_PROMPTS = 16


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of all turns of the trace with one policy."""

    policy: str
    seconds: float
    tokens_per_s: float
    """Generated tokens per second, from the first request to the last answer."""
    hit_share: float
    """Share of the prompt tokens that were cached, as vLLM counts them."""
    computed: int
    """Number of prompt tokens that the engines computed."""
    idle_share: float
    """Mean share of the time in which an engine had no request."""
    idle_shares: tuple[float, ...]
    router_ms: float
    """Milliseconds of this process's CPU time per request, the calls of engines included."""


class Engines:
    """Engine actors, and clients of them for the event loop that is running."""

    def __init__(self, arguments: argparse.Namespace, folder: str) -> None:
        per_gpu = arguments.engines / arguments.gpus if arguments.gpus else 1
        shape, device = SHAPES_HERE[arguments.shape], "cuda" if arguments.gpus else "cpu"
        value_bytes = 2 if arguments.gpus else 4
        token_bytes = shape.layers * 2 * shape.key_value_heads * shape.head_dim * value_bytes
        config = EngineConfig(
            EngineKeys(
                engine="vllm",
                kv_cache=math.ceil(arguments.cache_tokens * token_bytes / (1 << 20)),
                gpu_memory_utilization=0.85 / max(1.0, per_gpu),
                vllm={"load_format": "dummy"},
            ),
            ModelConfig(path=folder),
            device=device,
            max_model_len=arguments.max_model_len,
        )
        options = {"num_cpus": 0, "num_gpus": 1 / per_gpu if arguments.gpus else 0, "max_concurrency": CONCURRENCY}
        self.vocabulary = shape.tokens
        self.names = [f"engine {index}" for index in range(arguments.engines)]
        self.handles = [
            ray.remote(EngineActor).options(**options).remote(EngineSetup(name, 1, config)) for name in self.names
        ]

    async def start(self) -> None:
        await asyncio.gather(*(self._call(handle, EngineActor.build) for handle in self.handles))

    async def _call(self, handle: Any, method: Any) -> Any:
        return decode_result(method, await submit(handle, method, encode_arguments([])))

    async def clients(self) -> list[RemoteEngine]:
        made = [RemoteEngine(name, handle) for name, handle in zip(self.names, self.handles, strict=True)]
        return [await one.connect() for one in made]

    async def stats(self) -> list[EngineStats]:
        return [await self._call(handle, EngineActor.stats) for handle in self.handles]


def drawn(rng: np.random.Generator, vocabulary: int, count: int) -> list[int]:
    return rng.integers(10, vocabulary - 10, count).tolist()


async def measure_engine(engine: RemoteEngine, arguments: argparse.Namespace, vocabulary: int) -> EngineFigures:
    """Measure how fast one engine computes prompts, and how long a step of each batch takes."""
    rng = np.random.default_rng(1)
    length = min(4096, arguments.max_model_len - DECODE_TOKENS - 1)

    async def batch(name: str, count: int, prompt: int, tokens: int) -> float:
        params = SamplingParams(max_new_tokens=tokens, seed=0)
        prompts = [drawn(rng, vocabulary, prompt) for _ in range(count)]
        begun = time.perf_counter()
        await asyncio.gather(*(engine.generate(f"{name}-{index}", ids, params) for index, ids in enumerate(prompts)))
        return time.perf_counter() - begun

    await batch("warm", 64, 32, 16)
    await batch("warm prefill", 2, length, 1)
    rate = PREFILL_PROMPTS * length / await batch("prefill", PREFILL_PROMPTS, length, 1)
    seconds = {
        count: await batch(f"decode {count}", count, 32, DECODE_TOKENS) / DECODE_TOKENS for count in DECODE_BATCHES
    }
    print(f"prefill {rate:,.0f} tokens/s with {PREFILL_PROMPTS} prompts of {length}", flush=True)
    for count, step_s in seconds.items():
        print(f"decode batch {count:3}: {count / step_s:,.0f} tokens/s, {1e3 * step_s:.2f} ms a step", flush=True)
    row_s, step_s = np.polyfit(list(seconds), list(seconds.values()), 1)
    return EngineFigures(
        prefill_tokens_per_s=rate, step_s=float(step_s), row_s=float(row_s), cache_tokens=arguments.cache_tokens
    )


async def run_trace(engines: Engines, trace: Trace, policy: str, number: int, *, short: bool = False) -> RunFigures:
    """Run all episodes of the trace with one policy. number: number of the run, from which its tokens are drawn, so
    that nothing of earlier runs is found in a cache."""
    router = Router(timeout_s=60.0, prefixes=policy == "prefix")
    for client in await engines.clients():
        router.add(client.name, client)
    before, open_now = await engines.stats(), asyncio.Semaphore(trace.in_flight)
    prompts: dict[int, list[int]] = {}
    for episode in trace.episodes:
        rng = np.random.default_rng([number, episode.group])
        prompts.setdefault(episode.group, drawn(rng, engines.vocabulary, episode.prompt))

    async def play(index: int, episode: Episode) -> int:
        rng, count = np.random.default_rng([number, episode.group, index]), 0
        async with open_now:
            ids = list(prompts[episode.group])
            for turn, one in enumerate(episode.turns):
                await asyncio.sleep(one.wait_s)
                ids += drawn(rng, engines.vocabulary, one.given)
                params = SamplingParams(max_new_tokens=one.answer, seed=number)
                [answer] = await router.generate(f"{number}-{index}/{turn}", ids, params)
                ids += answer.token_ids.tolist()
                count += len(answer.token_ids)
        return count

    begun, cpu = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*(play(index, episode) for index, episode in enumerate(trace.episodes)))
    seconds, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    after = await engines.stats()
    await router.close()
    prompt = sum(b.prompt_tokens - a.prompt_tokens for a, b in zip(before, after, strict=True))
    cached = sum(b.cached_tokens - a.cached_tokens for a, b in zip(before, after, strict=True))
    idle = tuple(max(0.0, 1 - (b.busy_s - a.busy_s) / seconds) for a, b in zip(before, after, strict=True))
    turns = sum(len(episode.turns) for episode in trace.episodes)
    return RunFigures(
        policy, seconds, sum(counts) / seconds, cached / prompt, prompt - cached, statistics.mean(idle), idle,
        1e3 * cpu_s / turns,
    )  # fmt: skip


def trace_of(arguments: argparse.Namespace) -> Trace:
    """Return the shown trace, cut to the number of episodes, the turns and the context of the arguments."""
    whole = shown_trace(arguments.engines, prompt=arguments.prompt, episodes=arguments.episodes)
    episodes = tuple(replace(one, turns=one.turns[: arguments.turns]) for one in whole.episodes)
    longest = max(one.prompt + sum(turn.given + turn.answer for turn in one.turns) for one in episodes)
    arguments.max_model_len = longest + 1
    return replace(whole, episodes=episodes)


def medians(runs: Sequence[RunFigures], policy: str) -> dict[str, float]:
    names = ("seconds", "tokens_per_s", "hit_share", "computed", "idle_share", "router_ms")
    return {name: statistics.median(getattr(one, name) for one in runs if one.policy == policy) for name in names}


async def measure(arguments: argparse.Namespace, trace: Trace, engines: Engines) -> dict[str, Any]:
    """Run everything, and return the figures."""
    begun = time.perf_counter()
    await engines.start()
    print(f"{len(engines.handles)} engines started in {time.perf_counter() - begun:.0f} s", flush=True)
    clients = await engines.clients()
    figures = await measure_engine(clients[0], arguments, engines.vocabulary)
    print(f"simulation: {figures}", flush=True)
    runs: list[RunFigures] = []
    small = replace(trace, episodes=tuple(replace(e, turns=e.turns[:1]) for e in trace.episodes[: 8 * len(clients)]))
    await run_trace(engines, small, "least_loaded", 1000)  # The first requests of an engine compile kernels.
    for repeat in range(arguments.repeats):
        for policy in POLICIES if repeat % 2 == 0 else POLICIES[::-1]:
            runs.append(await run_trace(engines, trace, policy, len(runs)))
            print(json.dumps(asdict(runs[-1])), flush=True)
    found = {policy: medians(runs, policy) for policy in POLICIES}
    for policy, values in found.items():
        print(policy, json.dumps({name: round(value, 4) for name, value in values.items()}), flush=True)
        expected = simulate(replace(trace, figures=figures), policy)
        print(f"{policy} in the simulation: {expected}", flush=True)
    speedup = found["prefix"]["tokens_per_s"] / found["least_loaded"]["tokens_per_s"]
    share = found["prefix"]["computed"] / found["least_loaded"]["computed"]
    print(f"prefix over least_loaded: {speedup:.3f} x tokens/s, {share:.3f} x prompt tokens computed", flush=True)
    return {
        "arguments": vars(arguments), "cache_tokens": clients[0].stats.cache_tokens, "engine": asdict(figures),
        "runs": [asdict(one) for one in runs], "medians": found, "speedup": speedup, "computed_share": share,
    }  # fmt: skip


def main() -> int:
    """Measure, and return the exit code. Raises UserError if there are too few GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs; 0 for engines on the CPU")
    parser.add_argument("--engines", type=int, default=0, help="default: one a GPU, or two on a single one")
    parser.add_argument("--shape", default="0.6b", choices=sorted(SHAPES_HERE))
    parser.add_argument("--cache-tokens", type=int, default=160_000, help="room of each engine's key-value cache")
    parser.add_argument("--prompt", type=int, default=6144, help="tokens of the prompt that a group shares")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="file for all figures, as JSON")
    arguments = parser.parse_args()
    expect_gpus(arguments.gpus, f"--gpus: got {arguments.gpus}")
    arguments.engines = arguments.engines or max(2, arguments.gpus)
    trace = trace_of(arguments)
    with tempfile.TemporaryDirectory() as folder:
        positions = max(SHAPES_HERE[arguments.shape].positions, arguments.max_model_len)
        save_config(replace(SHAPES_HERE[arguments.shape], positions=positions), Path(folder), "bfloat16")
        with lean_start():
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=None)
        try:
            found = asyncio.run(measure(arguments, trace, Engines(arguments, folder)))
        finally:
            ray.shutdown()
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, default=str, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
