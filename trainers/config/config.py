"""`Config` composes the sections of a run's YAML file, and declares those that the run as a whole reads."""

from __future__ import annotations

import datetime
import os
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from ...actors.engines.config import ModelConfig, RolloutConfig, ScriptedConfig
from ...actors.rewards.config import RewardConfig
from ...actors.rollout.config import DataConfig
from ...actors.weights.config import SyncConfig
from ...dataplane.config import DataPlaneConfig
from ...dataplane.section import Count, CountOrZero, Positive, Section, Share
from ..advantages.config import AdvantageConfig
from ..backends.config import TrainerConfig
from ..losses.config import LossConfig


class DynamicSamplingConfig(Section):
    """Replacement of groups without a learning signal (DAPO, arXiv:2503.14476 section 3.2)."""

    enabled: bool = False
    """Clear groups whose rewards (raw: before shaping, as the rubric gives them) are all alike and train on others."""
    max_factor: float = Field(default=4.0, ge=1.0)
    """Number of prompts rolled out for a step, at most, as a multiple of `prompts_per_step`. Beyond it groups without a
    signal are trained on after all, so that a step always has its size."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Number of prompts rolled out for a step from the start, as a multiple of `prompts_per_step`. The step takes those
    that are ready first; the rest are ended and cleared."""


class AlgorithmConfig(Section):
    """The size and number of steps, where their groups come from, and how far rollouts may be ahead."""

    mode: Literal["sync", "async", "streaming"] = "sync"
    """`sync`: rollout, train and weight sync in lock-step; `async`: rollouts run ahead of the training, up to
    `max_staleness` versions; `streaming`: lock-step, but groups are trained on as they become ready."""
    max_staleness: CountOrZero = 1
    """Number of versions that a row's oldest token may be behind the policy that is trained on it."""
    stale_groups: Literal["requeue", "drop"] = "requeue"
    """Groups too old for `max_staleness` are rolled out again, or dropped for other prompts. With `in_order` no group
    ever grows too old."""
    sampler: str = "auto"
    """Order in which ready groups are trained on: `in_order`, `ready_first`, `oldest_version_first`, `windowed`, or
    your own as `package.module:factory`. `auto`: ready_first when streaming, in_order when async or deterministic,
    else the oldest."""
    sampler_options: dict[str, Any] = {}
    """Options of the sampler: `{window: groups}` of `windowed`, keyword arguments of your own."""
    chunk_groups: Count | None = None
    """Number of groups that are trained on together. Unset: a quarter of `prompts_per_step`."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups without a learning signal."""
    steps: Count = 100
    """Number of optimizer steps of the run."""
    prompts_per_step: Count = 32
    """Number of groups that a step trains on."""
    group_size: int = 8
    """Number of samples of each prompt."""
    prev_logprobs: Literal["rollout", "recompute"] = "rollout"
    """The old policy's log-probs in the ratio: the engine's own, or recomputed by the trainer before each step."""

    @field_validator("group_size")
    @classmethod
    def _has_baseline(cls, size: int) -> int:
        if size < 2:
            raise ValueError(f"got {size}, expected a whole number >= 2, as a group of one has no baseline")
        return size


class RunConfig(Section):
    """Where a run leaves its files, its seed, and how it goes on after a failure."""

    dir: str | None = None
    """Run folder. Unset: `runs/{name}-{YYYYmmdd-HHMMSS}` under the current folder."""
    name: str = Field(default="headrace", min_length=1, pattern=r"^[^/]+$")
    """Short name, shown in the report; part of the default run folder."""
    seed: CountOrZero = 0
    """Seed of prompts, sampling and the built-in model's weights."""
    checkpoint_every: CountOrZero = 0
    """Number of steps between checkpoints; 0: none."""
    journal: bool = True
    """Keep finished groups on disk until a checkpoint covers them, so that a resumed run generates none of them
    again."""
    record: bool = False
    """Keep all finished groups on disk, checkpoints or not, so that `run.replay` can train on them again."""
    replay: str | None = None
    """Folder of a run with `run.record`: its groups are trained on instead of generated ones. What decides how groups
    come out (model, data, sampling, rewards, seed) must be as it was there; loss, trainer and mesh may be others."""
    keep_best: bool = False
    """Export the model of the best validation to `best/`."""
    max_restarts: CountOrZero = 3
    """Number of times that the run goes on by itself after one of its processes died: a rollout actor or engine is
    replaced; train workers go back to the last checkpoint, under the rollouts where a journal is kept; anything else
    sends the whole run back to it. 0: the run ends."""
    deterministic: bool = False
    """Groups are trained on in the order of their prompts, weights change between rollouts only, and engines generate
    each group by itself, so that a run with the same seed repeats figure by figure, kills and resumes included."""
    trace_step: CountOrZero = 5
    """First step whose timeline is written to trace.json (the last one of a shorter run); 0: none."""
    trace_num_steps: Count = 1
    """Number of steps of the timeline."""


class WarmupConfig(Section):
    """Supervised warm-up of the built-in model: its own phase before step 1, in no RL figure."""

    corpus: Literal["none", "digit_skills"] = "none"
    """Texts that the model learns. `digit_skills`: generated texts on digits (not the task that RL trains)."""
    steps: Count = 1000
    """Number of steps at most; the warm-up ends when the corpus is learned."""
    target_loss: Positive = 0.12
    """Loss in nats a token at which the corpus counts as learned."""
    batch_size: Count = 128
    """Number of texts of a step."""
    lr: Positive = 5e-3
    """Peak learning rate."""


class ValidationConfig(Section):
    """Greedy evaluation on prompts that are never trained on."""

    every: CountOrZero = 10
    """Number of steps between validations, which also open and close the run; 0: none."""
    num_prompts: Count = 128
    """Number of prompts of a validation."""
    max_new_tokens: Count | None = None
    """Number of tokens that an answer has at most. Unset: as in training."""
    background: bool = False
    """Validate while the next step rolls out and trains, up to its optimizer step; its metrics are then logged with
    that step, and `val/version` says which policy they are of."""
    stop_at: Share | None = None
    """Exact match at which the run ends (in the background: after the step under way). Unset: it ends after
    `algorithm.steps`."""


class ResourcesConfig(Section):
    """Where the run's processes live."""

    ray_address: str | None = None
    """Address of a Ray cluster to join. Unset: the run starts its own Ray and ends it."""
    num_cpus: Count | None = None
    """Number of CPUs of the run's own Ray. Unset: this machine's cores."""
    threads: Count | None = None
    """Number of compute threads of each worker. Unset: the cores shared out."""
    stage_timeout_s: Positive = 300.0
    """Seconds that any one stage of a step (rollout, train, sync, validation) may take."""
    watchdog: bool = True
    """A process of its own ends the run, with a report, when no stage has ended for `stage_timeout_s` and a margin."""


class LoggingConfig(Section):
    """What is shown and written besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files."""
    progress: bool = True
    """Show a live display on a terminal, short lines elsewhere."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of an HTTP endpoint for Prometheus, open while the run is; 0: one that is free, its address is printed and
    stands in the run folder's prometheus.txt. Unset: no endpoint."""
    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that the endpoint listens on. Whoever reaches it can read the run's metrics."""


class Config(Section):
    """One run. Every section stands with the code that reads it; those above are read by the run as a whole."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    dataplane: DataPlaneConfig = DataPlaneConfig()
    validation: ValidationConfig = ValidationConfig()
    resources: ResourcesConfig = ResourcesConfig()
    logging: LoggingConfig = LoggingConfig()
    scripted: ScriptedConfig = ScriptedConfig()
    simulation: dict[str, Any] = {}
    """Keys of `headrace simulate`, which checks them (`simulation.config`); a run reads none of them."""

    @property
    def rows_per_step(self) -> int:
        return self.algorithm.prompts_per_step * self.algorithm.group_size

    @property
    def with_reference(self) -> bool:
        """Whether train workers keep a frozen copy of the initial weights."""
        return self.loss.kl_coef > 0

    @property
    def traced_step(self) -> int:
        """The step whose timeline is written; 0: none."""
        return min(self.run.trace_step, self.algorithm.steps)


def with_run_dir(config: Config, now: datetime.datetime | None = None) -> Config:
    """`config` with `run.dir` filled in, it and `run.replay` absolute; `now` defaults to the local time."""
    folder = config.run.dir
    if folder is None:
        stamp = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
        folder = os.path.join("runs", f"{config.run.name}-{stamp}")
    folder = os.path.abspath(os.path.expanduser(folder))
    replay = config.run.replay and os.path.abspath(os.path.expanduser(config.run.replay))
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder, "replay": replay})})


def resolved_yaml(config: Config) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
