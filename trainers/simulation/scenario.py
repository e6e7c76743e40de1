"""Builds a scenario, all numbers of a simulated run, from the configuration and a measured run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ...actors.engines.config import ScriptedConfig, engine_batch
from ..config.config import Config
from ..config.staleness import Mode
from ..errors import UserError
from ..observe.metrics import read_metrics
from .cluster import GIB, Cluster
from .config import SimulationConfig

MODES: tuple[Mode, ...] = get_args(Mode)
Sampler = Literal["in_order", "windowed", "ready_first", "oldest_version_first"]
DEFAULT_SAMPLERS: Mapping[Mode, Sampler] = {
    "sync": "in_order", "async": "in_order", "streaming": "ready_first", "async_streaming": "in_order",
}  # fmt: skip
MAX_STEPS = 100
TRAFFIC = {"put_bytes": 21.0, "got_bytes": 40.0, "put_groups": 1.0}
DIRECTORY_S = {"directory_put_s": 3.6e-4, "directory_claim_s": 1.6e-3, "directory_row_s": 3.5e-6}
"""CPU seconds of the directory for a put, for a claimed chunk and for a row, by the name of their key."""
ANY_NUMBER = 1 << 40
"""Value of `engine_rows` for an engine without a limit on its number of rows."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The numbers that describe a simulated run: seconds, tokens and counts.

    Numbers about an engine apply to each engine; numbers about the trainer apply to all train workers together.
    Construction raises UserError when a group does not fit into an engine or a pause is longer than its weight sync.
    """

    steps: int
    prompts_per_step: int
    group_size: int
    staleness: Mapping[Mode, int]
    """Largest allowed number of weight versions between the start of a rollout and the step that trains on it: mode ->
    number."""
    sampler: Mapping[Mode, Sampler]
    window: int
    """Number of consecutive prompts of the prompt stream from which the sampler `windowed` can choose, beginning with
    the first prompt that was neither taken nor dropped."""
    in_flight: Literal["keep", "wait", "abort"]
    """Treatment of running requests during a weight sync. `abort` is simulated as `keep`, because aborted requests
    continue after the sync."""
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
    """Median seconds to generate a group, independent of its lengths; 0 when engines decode token by token."""
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
    put_groups: float
    directory_put_s: float
    directory_claim_s: float
    directory_row_s: float
    directory_shards: int
    cluster: Cluster
    seed: int

    def __post_init__(self) -> None:
        if self.group_size > self.engine_rows:
            raise UserError(
                f"simulation.engine_rows: got {self.engine_rows}, expected room for a group of {self.group_size}"
            )
        if self.pause_s > self.sync_s:
            raise UserError(f"simulation.pause_s: got {self.pause_s:g}, expected at most sync_s={self.sync_s:g}")

    def draw_lengths(self, num_prompts: int) -> np.ndarray:
        """Draw the number of tokens of each response, float64 `[num_prompts, group_size]`.

        With the same seed the first prompts always have the same lengths, regardless of `num_prompts`.
        """
        normal = np.random.default_rng(self.seed).standard_normal((num_prompts, self.group_size + 1))
        share = self.prompt_share
        mixed = math.sqrt(share) * normal[:, :1] + math.sqrt(1 - share) * normal[:, 1:]
        location = math.log(self.response_tokens) - self.response_sigma**2 / 2
        return np.clip(np.exp(location + self.response_sigma * mixed), 1.0, self.max_response_tokens)

    def draw_work(self, num_prompts: int, lengths: np.ndarray) -> np.ndarray:
        """Return the number of tokens that an engine must decode for each row, float64 `[num_prompts, group_size]`.

        These are `lengths` unless `latency_s` is set. With `latency_s` they are the row's latency in seconds, because
        the engine then takes one second per token.
        """
        if not self.latency_s:
            return lengths
        return np.repeat(self.draw_latencies(num_prompts)[:, None], self.group_size, axis=1)

    def draw_latencies(self, num_prompts: int) -> np.ndarray:
        """Return the scripted engine's seconds for each of the stream's first prompts, float64 `[num_prompts]`."""
        # The import is here, because it imports torch, which this module does not need otherwise.
        from ...actors.engines.scripted import request_latency
        from ...actors.rollout.prompts import base36

        ids = map(base36, range(num_prompts))
        return np.array([request_latency(uid, self.seed, self.latency_s, self.latency_sigma) for uid in ids])

    def put_s(self, tokens: float) -> float:
        """Return the seconds of a put of `tokens` tokens, without the directory's part."""
        return self.call_s + tokens * self.put_bytes / (self.gib_per_s * GIB)

    def read_s(self, tokens: float) -> float:
        """Return the seconds that the trainer waits for the data of a ready chunk: the time for claim, plan and get. A
        chunk consists of groups that are trained on together; `tokens` is its number of tokens.
        """
        return self.plan_s + 2 * self.call_s + tokens * self.got_bytes / (self.gib_per_s * GIB)

    def compute_s(self, rows: int, tokens: float) -> float:
        """Return the seconds that the trainer takes to compute a chunk of `rows` rows with `tokens` tokens in total."""
        return self.chunk_s + rows * self.train_row_s + tokens * (self.train_token_s + self.logprob_token_s)

    def directory_groups_s(self, groups: int = 1) -> float:
        """Return the CPU seconds that the directory takes for groups that are put together, without their claim."""
        puts = min(1.0, groups / self.put_groups)
        return puts * self.directory_put_s + groups * self.group_size * self.directory_row_s

    def chunks(self, mode: Mode) -> int:
        """Return the number of chunks into which a step of `mode` is divided."""
        return math.ceil(self.prompts_per_step / self.chunk_groups) if mode.endswith("streaming") else 1

    def scaled(self, section: SimulationConfig, gpus: int) -> Scenario:
        """Return the scenario of the same run on `gpus` GPUs instead of `section.gpus`.

        More GPUs mean more engines, a faster trainer and more bandwidth, as far as units and links allow it. A weight
        sync takes as much longer or shorter as the weights take on the links.
        """
        ratio = gpus / section.gpus
        speed = ratio * max(section.scaling_efficiency, 1e-9) ** math.log2(ratio)
        prompts = max(1, round(self.prompts_per_step * ratio)) if section.batch_grows else self.prompts_per_step
        new_rows = (prompts - self.prompts_per_step) * self.group_size
        cluster = replace(self.cluster, gpus=gpus)
        sync_s = max(0.0, self.sync_s + cluster.weights_s() - self.cluster.weights_s())
        return replace(
            self,
            num_engines=max(1, round(self.num_engines * ratio)),
            prompts_per_step=prompts,
            chunk_groups=max(1, round(self.chunk_groups * prompts / self.prompts_per_step)),
            controller_s=max(0.0, self.controller_s + new_rows * section.controller_row_s),
            sync_s=sync_s,
            pause_s=self.pause_s * (sync_s / self.sync_s if self.sync_s else 1.0),
            cluster=cluster,
            train_token_s=self.train_token_s / speed,
            logprob_token_s=self.logprob_token_s / speed,
            train_row_s=self.train_row_s / speed,
            gib_per_s=min(self.gib_per_s * ratio, max(self.gib_per_s, cluster.most_gib_per_s())),
        )


def build_scenario(config: Config, section: SimulationConfig, measured: Mapping[str, float]) -> Scenario:
    """Build the scenario of a run. A value that `section` leaves unset comes from `measured`, else from a default.

    `measured` is the result of `measure_run`, or empty; defaults may depend on `config`. Raises UserError when a group
    does not fit into an engine or a pause is longer than its weight sync.
    """

    def value(name: str, default: float) -> float:
        given = getattr(section, name)
        return float(measured.get(name, default) if given is None else given)

    algorithm, rollout, scripted = config.algorithm, config.rollout, config.scripted
    trains = config.trainer.backend != "scripted"
    latency_s = value("latency_s", scripted.latency_s if rollout.engine == "scripted" else 0.0)
    train_token_s = value("train_token_s", 1e-5 if trains else 0.0)
    separate, pairs = config.resources.layout == "separate", config.sync.transport == "pairs"
    cluster = _cluster(section, value("weights_gb", 0.0), config.rollout.tp, separate=separate, pairs=pairs)
    sync_s, prompts = value("sync_s", cluster.weights_s() or 1.0), algorithm.prompts_per_step
    return Scenario(
        steps=section.steps or min(algorithm.steps, MAX_STEPS),
        prompts_per_step=prompts,
        group_size=algorithm.group_size,
        staleness={
            "sync": 0,
            "streaming": section.streaming_staleness,
            **dict.fromkeys(("async", "async_streaming"), section.async_staleness),
        },
        sampler={mode: section.sampler or _sampler(algorithm.sampler, mode) for mode in MODES},
        window=section.window or algorithm.sampler_options.get("window") or prompts,
        in_flight=config.sync.in_flight,
        response_tokens=value("response_tokens", max(1.0, rollout.max_new_tokens / 4)),
        response_sigma=value("response_sigma", 0.5),
        prompt_share=section.prompt_share,
        max_response_tokens=float(rollout.max_new_tokens),
        prompt_tokens=section.prompt_tokens,
        num_engines=section.num_engines or rollout.num_engines,
        engine_rows=ANY_NUMBER if latency_s else section.engine_rows or engine_batch(rollout, gpu=False),
        decode_s=1.0 if latency_s else value("decode_s", 0.02),
        decode_row_s=0.0 if latency_s else section.decode_row_s,
        latency_s=latency_s,
        latency_sigma=value("latency_sigma", scripted.latency_sigma),
        request_s=value("request_s", 0.0),
        train_token_s=train_token_s,
        logprob_token_s=value("logprob_token_s", train_token_s / 3 if config.loss.kl_coef > 0 else 0.0),
        train_row_s=value("train_row_s", 0.0 if trains else scripted.train_row_s / config.trainer.dp),
        chunk_s=value("chunk_s", 0.0),
        plan_s=value("plan_s", 0.0),
        chunk_groups=section.chunk_groups or algorithm.chunk_groups or max(config.trainer.dp, prompts // 4),
        train_step_s=value("train_step_s", 0.0 if trains else scripted.train_step_s),
        controller_s=value("controller_s", 0.0),
        sync_s=sync_s,
        pause_s=min(value("pause_s", sync_s), sync_s) if section.pause_s is None else section.pause_s,
        call_s=value("call_s", 0.001),
        gib_per_s=section.gib_per_s,
        **{name: value(name, default) for name, default in (TRAFFIC | DIRECTORY_S).items()},
        directory_shards=section.directory_shards,
        cluster=cluster,
        seed=config.run.seed,
    )


def _cluster(section: SimulationConfig, weights_gb: float, tp: int, *, separate: bool, pairs: bool) -> Cluster:
    return Cluster(
        gpus=section.gpus,
        host_gpus=section.host_gpus,
        engine_gpus=section.engine_gpus or tp,
        train_share=section.train_share or (0.5 if separate else 1.0),
        links=section.links,
        link_bytes_s=section.link_gbit_per_s * 1e9 / 8 * max(section.link_share, 1e-9),
        unit_gib_per_s=section.unit_gib_per_s,
        far_share=section.far_share,
        weights_bytes=weights_gb * 1e9,
        weights_bytes_s=section.weights_gb_per_s * 1e9,
        weights_senders=section.weights_senders or ("all" if pairs else "one"),
        weights_copies=section.weights_copies,
    )


def _sampler(name: str, mode: Mode) -> Sampler:
    known: dict[str, Sampler] = {name: name for name in get_args(Sampler)}
    return known.get(name, DEFAULT_SAMPLERS[mode])


def measure_run(run_dir: Path, config: Config, section: SimulationConfig) -> dict[str, float]:
    """Measure speeds and lengths of a run in the mode `sync`, as medians over all steps but the first.

    The values are read from metrics.jsonl in `run_dir`. The first step counts only if there is no other. The
    distribution of response lengths is derived from their mean and from the longest response of a step, as if no
    response had been cut off. The time of a token is derived from the longest response of a step. If engine and backend
    are scripted, their durations are known, and the overheads of the steps are measured, too. Raises UserError when the
    run has no metrics of a step, or its steps generated no tokens.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"--from {run_dir}: the folder has no metrics.jsonl, expected the folder of a run")
    records = [record for record in read_metrics(path)[0] if record.get("time/train_s")]
    records = records[1:] or records
    if not records:
        raise UserError(f"--from {run_dir}: metrics.jsonl has no step, expected at least one")

    def median(name: str) -> float:
        return statistics.median(record.get(name) or 0.0 for record in records)

    rows = config.rows_per_step
    mean, longest = median("rollout/response_length_mean"), median("rollout/response_length_max")
    engines = section.num_engines or config.rollout.num_engines
    waves = math.ceil(rows / (engines * (section.engine_rows or engine_batch(config.rollout, gpu=False))))
    tokens = rows * (mean + section.prompt_tokens)
    if min(mean, longest, median("time/rollout_s")) <= 0:
        raise UserError(f"--from {run_dir}: the run's steps generated nothing, expected lengths and times of rollouts")
    stages = ("rollout", "plan", "logprob", "train", "sync")
    others = [record["time/step_s"] - sum(record.get(f"time/{name}_s") or 0.0 for name in stages) for record in records]
    costs = _data_plane_costs(records, config.algorithm.prompts_per_step, rows, tokens)
    put_s, claim_s, row_s = (costs.get(name, seconds) for name, seconds in DIRECTORY_S.items())
    # The directory's answers to the last put and to the claim are part of the rollout's time, but count separately.
    calls_s = put_s + claim_s + row_s * rows / max(1.0, median("dataplane/put/calls"))
    measured = costs | {
        "response_tokens": mean,
        "response_sigma": sigma_of(mean, longest, rows),
        "decode_s": max(1e-9, (median("time/rollout_s") - calls_s - (section.request_s or 0.0)) / (longest * waves)),
        "train_token_s": max(0.0, median("time/train_s") - median("time/data_wait_s")) / tokens,
        "logprob_token_s": median("time/logprob_s") / tokens,
        "controller_s": max(0.0, statistics.median(others)),
        "sync_s": median("time/sync_s"),
        "pause_s": median("sync/pause_s") or median("time/sync_s"),
        "plan_s": median("time/plan_s"),
    }
    if config.rollout.engine == config.trainer.backend == "scripted":
        scenario = build_scenario(config, SimulationConfig(), {})
        measured |= _scripted_overheads(records, scenario, config.scripted, config.trainer.dp, calls_s)
    return measured


def _data_plane_costs(
    records: Sequence[Mapping[str, float]], prompts: int, rows: int, tokens: float
) -> dict[str, float]:
    """Return what a run in the mode `sync` shows of its data plane, by the names of the keys.

    The result has bytes per token, gigabytes of a weight sync, groups per put, and the directory's CPU seconds: their
    three defaults, times one factor with which they give the CPU time of a step. prompts, rows, tokens: numbers of a
    step.
    """

    def median(name: str) -> float:
        return statistics.median(record.get(name) or 0.0 for record in records)

    costs = {
        "put_bytes": median("dataplane/bytes_put") / tokens,
        "got_bytes": median("dataplane/bytes_got") / tokens,
        "weights_gb": median("sync/bytes") / 1e9,
    }
    costs = {name: value for name, value in costs.items() if value}
    if puts := median("dataplane/put/calls"):
        costs["put_groups"] = max(1.0, prompts / puts)
    spent = [record["dataplane/directory_cpu_s"] for record in records if "dataplane/directory_cpu_s" in record]
    if len(spent) > 1:
        numbers = (puts, 1, rows)
        expected_s = sum(number * seconds for number, seconds in zip(numbers, DIRECTORY_S.values(), strict=True))
        factor = statistics.median(np.diff(spent).tolist()) / expected_s
        costs |= {name: seconds * factor for name, seconds in DIRECTORY_S.items()}
    return costs


def _scripted_overheads(
    records: Sequence[Mapping[str, float]], scenario: Scenario, scripted: ScriptedConfig, dp: int, calls_s: float
) -> dict[str, float]:
    """Return the overheads of a run with scripted engine and backend: the seconds beyond the configured sleeps.
    scenario: result of `build_scenario` for the run without measurements. dp: number of replicas. calls_s: seconds of
    the directory for a put and a claim. The run must be in the mode `sync`. The result maps keys of the section
    `simulation` to seconds; `train_step_s` includes the configured time of a step.
    """
    prompts = scenario.prompts_per_step
    longest = scenario.draw_latencies(prompts * int(records[-1]["step"])).reshape(-1, prompts).max(axis=1)
    train_s = scripted.train_row_s * (prompts * scenario.group_size) / dp + scripted.train_step_s
    call_s = statistics.median(record["time/data_wait_s"] for record in records)
    around = [record["time/rollout_s"] - float(longest[int(record["step"]) - 1]) for record in records]
    trained = statistics.median(record["time/train_s"] - record["time/data_wait_s"] for record in records)
    # The overhead is divided equally between two calls: one per chunk and one per step.
    overhead = max(0.0, trained - train_s) / 2
    return {
        "call_s": call_s,
        # The time includes a put and a claim, which count separately.
        "request_s": max(0.0, statistics.median(around) - 2 * call_s - calls_s),
        "train_token_s": 0.0,
        "chunk_s": overhead,
        "train_step_s": scripted.train_step_s + overhead,
    }


def sigma_of(mean: float, longest: float, rows: int) -> float:
    """Estimate the sigma of a log-normal distribution from its mean and the largest of `rows` draws."""
    quantile = statistics.NormalDist().inv_cdf(1 - 1 / (rows + 1)) if rows > 1 else 0.0
    return quantile - math.sqrt(max(0.0, quantile**2 - 2 * math.log(max(1.0, longest / mean))))
