"""A scenario: all numbers of one simulated run, from the configuration, a measured run, and the number of GPUs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ..config.config import Config
from ..errors import UserError
from ..observe.metrics import read_metrics
from .config import SimulationConfig

Mode = Literal["sync", "async", "streaming"]
MODES: tuple[Mode, ...] = ("sync", "async", "streaming")
Sampler = Literal["in_order", "windowed", "ready_first", "oldest_version_first"]
DEFAULT_SAMPLERS: Mapping[Mode, Sampler] = {"sync": "in_order", "async": "in_order", "streaming": "ready_first"}
MAX_STEPS = 100
GIB = float(1 << 30)
ANY_NUMBER = 1 << 40
"""Rows of an engine that is never full."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Seconds, tokens and counts; what is of an engine or of the trainer is of the whole one."""

    steps: int
    prompts_per_step: int
    group_size: int
    staleness: Mapping[Mode, int]
    """Versions by which rollouts may be ahead."""
    sampler: Mapping[Mode, Sampler]
    window: int
    """Of `windowed`, in prompts."""
    in_flight: Literal["keep", "wait", "abort"]
    """What a sync does to running requests. `abort` counts as `keep`: they go on where they were."""
    response_tokens: float
    response_sigma: float
    prompt_share: float
    max_response_tokens: float
    prompt_tokens: float
    num_engines: int
    engine_rows: int
    decode_s: float
    decode_row_s: float
    latency_s: float
    """Median seconds of a group's generation, whatever its lengths; 0: engines decode its tokens."""
    latency_sigma: float
    request_s: float
    train_token_s: float
    logprob_token_s: float
    train_row_s: float
    chunk_s: float
    plan_s: float
    chunk_groups: int
    train_step_s: float
    controller_s: float
    sync_s: float
    pause_s: float
    call_s: float
    gib_per_s: float
    put_bytes: float
    got_bytes: float
    seed: int

    def __post_init__(self) -> None:
        if self.group_size > self.engine_rows:
            raise UserError(
                f"simulation.engine_rows: got {self.engine_rows}, expected room for a group of {self.group_size}"
            )
        if self.pause_s > self.sync_s:
            raise UserError(f"simulation.pause_s: got {self.pause_s:g}, expected at most sync_s={self.sync_s:g}")

    def draw_lengths(self, num_prompts: int) -> np.ndarray:
        """float64 `[num_prompts, group_size]`: tokens of each response; the same seed draws the same ones first."""
        normal = np.random.default_rng(self.seed).standard_normal((num_prompts, self.group_size + 1))
        share = self.prompt_share
        mixed = math.sqrt(share) * normal[:, :1] + math.sqrt(1 - share) * normal[:, 1:]
        location = math.log(self.response_tokens) - self.response_sigma**2 / 2
        return np.clip(np.exp(location + self.response_sigma * mixed), 1.0, self.max_response_tokens)

    def draw_work(self, num_prompts: int, lengths: np.ndarray) -> np.ndarray:
        """float64 `[num_prompts, group_size]`: what an engine has to decode of rows of these `lengths`, in its tokens.

        Where generation takes a latency, that many seconds, at a second a token.
        """
        if not self.latency_s:
            return lengths
        return np.repeat(self.draw_latencies(num_prompts)[:, None], self.group_size, axis=1)

    def draw_latencies(self, num_prompts: int) -> np.ndarray:
        """float64 `[num_prompts]`: seconds, the same that the scripted engine takes over the stream's first prompts."""
        from ...actors.engines.scripted import request_latency  # torch, which nothing else here needs
        from ...actors.rollout.prompts import base36

        ids = map(base36, range(num_prompts))
        return np.array([request_latency(uid, self.seed, self.latency_s, self.latency_sigma) for uid in ids])

    def put_s(self, tokens: float) -> float:
        """From a group's last token to its being ready: environment, reward, put."""
        return self.request_s + self.call_s + tokens * self.put_bytes / (self.gib_per_s * GIB)

    def read_s(self, tokens: float) -> float:
        """What the trainer waits for before it computes a chunk that is ready: a claim, the plan, and a get."""
        return self.plan_s + 2 * self.call_s + tokens * self.got_bytes / (self.gib_per_s * GIB)

    def compute_s(self, rows: int, tokens: float) -> float:
        """What the trainer computes for a chunk."""
        return self.chunk_s + rows * self.train_row_s + tokens * (self.train_token_s + self.logprob_token_s)

    def scaled(self, section: SimulationConfig, gpus: int) -> Scenario:
        """The same run on `gpus` GPUs in place of `section.gpus`: more engines, a faster trainer."""
        ratio = gpus / section.gpus
        speed = ratio * max(section.scaling_efficiency, 1e-9) ** math.log2(ratio)
        prompts = max(1, round(self.prompts_per_step * ratio)) if section.batch_grows else self.prompts_per_step
        return replace(
            self,
            num_engines=max(1, round(self.num_engines * ratio)),
            prompts_per_step=prompts,
            train_token_s=self.train_token_s / speed,
            logprob_token_s=self.logprob_token_s / speed,
            train_row_s=self.train_row_s / speed,
            gib_per_s=self.gib_per_s * ratio,
        )


def build_scenario(config: Config, section: SimulationConfig, measured: Mapping[str, float]) -> Scenario:
    """`section` over `measured` (from `measure_run`) over defaults. Raises UserError for what cannot be simulated."""

    def figure(name: str, default: float) -> float:
        given = getattr(section, name)
        return float(measured.get(name, default) if given is None else given)

    algorithm, rollout, scripted = config.algorithm, config.rollout, config.scripted
    timed, trains = rollout.engine == "scripted", config.trainer.backend != "scripted"
    latency_s = figure("latency_s", scripted.latency_s if timed else 0.0)
    train_token_s = figure("train_token_s", 1e-5 if trains else 0.0)
    passes = algorithm.prev_logprobs == "recompute" or config.loss.kl_coef > 0
    sync_s, prompts = figure("sync_s", 1.0), algorithm.prompts_per_step
    return Scenario(
        steps=section.steps or min(algorithm.steps, MAX_STEPS),
        prompts_per_step=prompts,
        group_size=algorithm.group_size,
        staleness={"sync": 0, "async": section.async_staleness, "streaming": section.streaming_staleness},
        sampler={mode: _sampler(config, section, mode) for mode in MODES},
        window=section.window or algorithm.sampler_options.get("window") or prompts,
        in_flight=config.sync.in_flight,
        response_tokens=figure("response_tokens", max(1.0, rollout.max_new_tokens / 4)),
        response_sigma=figure("response_sigma", 0.5),
        prompt_share=section.prompt_share,
        max_response_tokens=float(rollout.max_new_tokens),
        prompt_tokens=section.prompt_tokens,
        num_engines=section.num_engines or rollout.num_engines,
        engine_rows=ANY_NUMBER if latency_s else section.engine_rows or rollout.max_batch,
        decode_s=1.0 if latency_s else figure("decode_s", 0.02),
        decode_row_s=0.0 if latency_s else section.decode_row_s,
        latency_s=latency_s,
        latency_sigma=figure("latency_sigma", scripted.latency_sigma),
        request_s=figure("request_s", 0.0),
        train_token_s=train_token_s,
        logprob_token_s=figure("logprob_token_s", train_token_s / 3 if passes else 0.0),
        train_row_s=figure("train_row_s", 0.0 if trains else scripted.train_row_s / config.trainer.dp),
        chunk_s=figure("chunk_s", 0.0),
        plan_s=figure("plan_s", 0.0),
        chunk_groups=section.chunk_groups or algorithm.chunk_groups or max(config.trainer.dp, prompts // 4),
        train_step_s=figure("train_step_s", 0.0 if trains else scripted.train_step_s),
        controller_s=figure("controller_s", 0.0),
        sync_s=sync_s,
        pause_s=min(figure("pause_s", sync_s), sync_s) if section.pause_s is None else section.pause_s,
        call_s=figure("call_s", 0.001),
        gib_per_s=section.gib_per_s,
        put_bytes=section.put_bytes,
        got_bytes=section.got_bytes,
        seed=config.run.seed,
    )


def _sampler(config: Config, section: SimulationConfig, mode: Mode) -> Sampler:
    known: dict[str, Sampler] = {name: name for name in get_args(Sampler)}
    return section.sampler or known.get(config.algorithm.sampler, DEFAULT_SAMPLERS[mode])


def measure_run(run_dir: Path, config: Config, section: SimulationConfig) -> dict[str, float]:
    """Speeds and lengths of a sync run, from its metrics.jsonl: medians over its steps but the first.

    The shape of lengths follows from their mean and the longest of a step, as if none had been cut off; the time of a
    token from that of a step's longest row. Of a run on the scripted engine and backend, whose seconds are known, what
    its steps took besides. Raises UserError when there are no such figures.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"--from {run_dir}: no metrics.jsonl, expected the folder of a run")
    records = [record for record in read_metrics(path)[0] if record.get("time/train_s")]
    records = records[1:] or records
    if not records:
        raise UserError(f"--from {run_dir}: metrics.jsonl has no step, expected at least one")

    def median(name: str) -> float:
        return statistics.median(record.get(name) or 0.0 for record in records)

    rows = config.rows_per_step
    mean, longest = median("rollout/response_length_mean"), median("rollout/response_length_max")
    engines = section.num_engines or config.rollout.num_engines
    waves = math.ceil(rows / (engines * (section.engine_rows or config.rollout.max_batch)))
    tokens = rows * (mean + section.prompt_tokens)
    if min(mean, longest, median("time/rollout_s")) <= 0:
        raise UserError(f"--from {run_dir}: its steps generated nothing, expected lengths and times of rollouts")
    stages = ("rollout", "plan", "logprob", "train", "sync")
    others = [record["time/step_s"] - sum(record.get(f"time/{name}_s") or 0.0 for name in stages) for record in records]
    figures = {
        "response_tokens": mean,
        "response_sigma": sigma_of(mean, longest, rows),
        "decode_s": max(1e-9, (median("time/rollout_s") - (section.request_s or 0.0)) / (longest * waves)),
        "train_token_s": max(0.0, median("time/train_s") - median("time/data_wait_s")) / tokens,
        "logprob_token_s": median("time/logprob_s") / tokens,
        "controller_s": max(0.0, statistics.median(others)),
        "sync_s": median("time/sync_s"),
        "pause_s": median("sync/pause_s") or median("time/sync_s"),
        "plan_s": median("time/plan_s"),
    }
    if config.rollout.engine == config.trainer.backend == "scripted":
        figures |= _scripted_overheads(records, config)
    return figures


def _scripted_overheads(records: Sequence[Mapping[str, float]], config: Config) -> dict[str, float]:
    """What the steps of a sync run took besides the seconds that engine and backend were told to take."""
    scripted, prompts = config.scripted, config.algorithm.prompts_per_step
    told = build_scenario(config, SimulationConfig(), {})
    longest = told.draw_latencies(prompts * int(records[-1]["step"])).reshape(-1, prompts).max(axis=1)
    train_s = scripted.train_row_s * config.rows_per_step / config.trainer.dp + scripted.train_step_s
    call_s = statistics.median(record["time/data_wait_s"] for record in records)
    around = [record["time/rollout_s"] - float(longest[int(record["step"]) - 1]) for record in records]
    trained = statistics.median(record["time/train_s"] - record["time/data_wait_s"] for record in records)
    beside = max(0.0, trained - train_s) / 2  # of two calls: one a chunk, one a step
    return {
        "call_s": call_s,
        "request_s": max(0.0, statistics.median(around) - 2 * call_s),  # a put and a claim are of that time, too
        "train_token_s": 0.0,
        "chunk_s": beside,
        "train_step_s": scripted.train_step_s + beside,
    }


def sigma_of(mean: float, longest: float, rows: int) -> float:
    """Sigma of the log-normal of this mean of which `rows` draws have a longest of about that."""
    quantile = statistics.NormalDist().inv_cdf(1 - 1 / (rows + 1)) if rows > 1 else 0.0
    return quantile - math.sqrt(max(0.0, quantile**2 - 2 * math.log(max(1.0, longest / mean))))
