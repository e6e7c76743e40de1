"""Defines `Config`, all sections of a run's YAML file, and declares the sections about the run as a whole."""

from __future__ import annotations

import datetime
import os
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from ...actors.engines.config import ModelConfig, RouterReplayConfig, ScriptedConfig
from ...actors.environments.config import EnvironmentConfig
from ...actors.rewards.config import RewardConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.rollout.data_config import JSONL_SUFFIXES, MIXTURE, DataConfig
from ...actors.rollout.evaluation_metrics import figure_names, find_figure
from ...actors.rollout.supervised.config import SftConfig
from ...actors.sample_file import SamplesConfig
from ...actors.weight_sync.config import SyncConfig
from ...dataplane.config import (
    Count,
    CountOrZero,
    DataPlaneConfig,
    NonNegative,
    PathText,
    PortText,
    Positive,
    Section,
    Text,
)
from ...dataplane.imports import OBJECT
from ...dataplane.listen_address import Listening, PortRange
from ..advantages.config import AdvantageConfig
from ..backends.config import TrainerConfig
from ..losses.config import LossConfig
from ..losses.distillation_config import DistillationConfig
from .evaluation_sets import EvaluationConfig, ValidationConfig, evaluation_data
from .staleness import Mode, Overlap, StaleGroups, overlap_of
from .tracker_options import TrackerConfig


class PoolConfig(Section):
    """The pool of GPUs from which a run borrows its own. Engines sleep while others use their GPUs."""

    address: Text | None = None
    """Address of the Ray cluster that has the pool, as `headrace pool start` prints it. The run joins that cluster as a
    tenant named `run.name`. Unset: the GPUs are the run's own."""
    name: str = Field(default="pool", min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the pool in that cluster."""
    engines: Literal["own", "shared"] = "own"
    """`shared`: the run generates with the engines of the pool (`headrace pool start --engines CONFIG`), beside other
    runs with the same base model, each with its own adapter. `own`: with its own engines, on GPUs that the pool
    lends."""
    weight: Positive = 1.0
    """Weight of this run when the pool divides GPUs for rollouts. Compared with another run with equal remaining work,
    a run with twice the weight gets about twice as many GPUs."""
    sleep_level: Literal[1, 2] = 2
    """Level at which engines sleep. At level 1 they keep their weights in host memory. At level 2 they drop the
    weights, and get the newest version when they wake."""
    other_runs: CountOrZero = 3
    """Largest number of other runs whose processes sleep on a GPU while an engine of this run is awake there. Engines
    leave `resources.residual_mib` for each of these processes, unless `rollout.gpu_memory_utilization` or
    `rollout.kv_cache` sets the engines' memory."""
    order_timeout_s: Positive = 180.0
    """Seconds within which the run must carry out an order of the pool to put engines to sleep or to wake them. If the
    run takes longer, the pool ends its processes. The pool counts a larger value than 600 as 600."""


POOL_RESIDUAL_MIB, RESIDUAL_MIB = 1536, 4096
"""GPU memory in MiB that a sleeping process can keep by default: first on the GPUs of a pool, then on a run's own. A
vLLM engine of four layers of Qwen3-30B-A3B kept 2210 MiB, those of dense models of 0.6 and 2 G parameters less than
1536."""
HELD_OUT_LOSS = "validation/loss"
"""Metric of supervised runs: the loss of the conversations in `sft.validation`."""
SET_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_-]*$"
"""Regular expression for the names of evaluation sets, which are parts of metric keys."""


class DynamicSamplingConfig(Section):
    """Replacement of groups with equal rewards, which teach the policy nothing (DAPO, arXiv:2503.14476)."""

    enabled: bool = False
    """Whether groups with equal rewards are cleared and replaced by groups of other prompts. The comparison leaves out
    the reward `overlong`, which only shapes the others."""
    max_factor: float = Field(default=4.0, ge=1.0)
    """Largest number of prompts that are generated for a step, as a multiple of `algorithm.prompts_per_step`. When it
    is reached, groups with equal rewards are trained on too, so that each step has its full size."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Number of prompts that are generated for a step from the start, as a multiple of `algorithm.prompts_per_step`.
    The step takes the groups that are ready first; the others are cancelled and cleared."""


class AlgorithmConfig(Section):
    """The size, number and order of steps, and the lead of rollouts. Groups are trained on in that order."""

    mode: Mode = "sync"
    """Overlap of rollouts and training. In `sync` mode rollout, training and weight sync take turns. In `async` mode
    rollouts run ahead of training by up to `algorithm.max_staleness` versions. `streaming` is like `sync`, but trains
    on groups as they become ready. `async_streaming` combines both: rollouts run ahead as in `async`, and groups are
    trained on as they become ready."""
    max_staleness: CountOrZero = 1
    """Largest number of versions between the policy that generated a row's first token and the policy that is trained
    on the row."""
    stale_groups: StaleGroups = "requeue"
    """Treatment of groups that have become too old for `algorithm.max_staleness`. `requeue` generates them again;
    `drop` generates groups of other prompts instead. With the sampler `in_order` groups never become too old."""
    sampler: str = "auto"
    """Order in which ready groups are trained on. `in_order` keeps the order of their prompts. `windowed` takes any
    ready group from the next few prompts. `ready_first` takes groups in the order in which they became ready.
    `oldest_version_first` takes those of the oldest policy first. Your own sampler is given as
    `package.module:factory`. `auto` is `in_order` in modes whose rollouts run ahead and in deterministic runs, else
    `ready_first` in `streaming` mode and `oldest_version_first` in `sync` mode."""
    sampler_options: dict[str, Any] = {}
    """Options of the sampler. `windowed` takes `{window: number of groups}`; your own sampler takes keyword
    arguments."""
    chunk_groups: Count | None = None
    """Least number of ready groups that the modes `streaming` and `async_streaming` train on together, as a chunk.
    Unset: a quarter of `algorithm.prompts_per_step`, but at least `trainer.dp`."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replacement of groups whose rewards are all equal."""
    steps: Count = 100
    """Number of steps of the run. A step trains on one batch of groups, and ends with one weight sync."""
    prompts_per_step: Count = 32
    """Number of groups that a step trains on."""
    minibatches: Count = 1
    """Number of mini-batches into which a step's groups are divided. Each mini-batch is one update of the optimizer.
    With more than one, the probability ratio moves away from 1 within a step, so the bounds of `loss.kind` begin to
    clip."""
    epochs: Count = 1
    """Number of times that a step trains on its rows. Each epoch divides the groups into mini-batches in a new way.
    More than one epoch needs a mode that trains on a step as a whole."""
    group_size: Count = 8
    """Number of samples of each prompt, which form a group. At least 2, unless the advantage compares rows with the
    whole step: `advantage.kind: reinforce_pp` with `advantage.baseline: step`."""
    mask_truncated: bool = False
    """If true, samples that were cut off at `rollout.max_new_tokens` are not trained on (overlong filtering, DAPO,
    arXiv:2503.14476). Their rewards still count in the baselines of their groups. They still count in the means over
    rows or prompts of `loss.aggregation`, so that the others do not weigh more for it (N is constant in Dr. GRPO,
    arXiv:2503.20783, and in TRL). The mean over tokens leaves their tokens out."""
    prev_logprobs: Literal["rollout", "recompute"] = "rollout"
    """Source of the old policy's log-probs in the probability ratio. `rollout` uses the engine's log-probs, so the
    ratio also reflects how the policy has changed since the rollout. `recompute` uses the trainer's own log-probs from
    before the step's first update. In that update the ratio is then 1 at every token, and nothing is clipped. Rows from
    an older policy then need a `loss.correction`."""

    @property
    def updates_per_step(self) -> int:
        """Number of updates of the optimizer in each step."""
        return self.minibatches * self.epochs


class RunConfig(Section):
    """Folder, seed, checkpoints and restarts of a run."""

    dir: PathText | None = None
    """Path of the run folder. Unset: `runs/{name}-{YYYYmmdd-HHMMSS}` in the current folder."""
    name: Text = Field(default="headrace", max_length=100, pattern=r"^[^/]+$")
    """Short name that the report shows and that is part of the default run folder."""
    seed: CountOrZero = 0
    """Seed of the prompts, the sampling and the weights of the built-in model."""
    checkpoint_every: CountOrZero = 0
    """Number of steps between checkpoints, in addition to the checkpoints of `run.checkpoint_minutes`. 0 disables
    step-based checkpoints."""
    checkpoint_minutes: float = Field(default=15.0, ge=0.0)
    """Minutes between checkpoints; 0 disables time-based checkpoints. Unless both this and `run.checkpoint_every` are
    0, a checkpoint is also written at the end of the run and when the run is interrupted (Ctrl-C, SIGTERM)."""
    keep_checkpoints: CountOrZero = 3
    """Number of checkpoints to keep; older ones are removed once a newer one is complete. 0 keeps all."""
    journal: bool = True
    """Whether finished groups are kept on disk until a checkpoint covers them, so that a resumed run does not generate
    them again."""
    record: bool = False
    """Whether all finished groups are kept on disk, even after a checkpoint covers them, so that `run.replay` can train
    on them again."""
    replay: PathText | None = None
    """Folder of a recorded run (`run.record`). This run trains on the recorded groups instead of generating any. Model,
    data, sampling, rewards and seed must be those of the recorded run; loss, trainer and mesh can differ."""
    keep_best: bool = False
    """Whether the model with the best validation, judged by `validation.metric`, is exported to `best/` in the run
    folder. Later validations must beat the validation before the first step; the initial model is never exported."""
    max_restarts: CountOrZero = 3
    """Number of times that a run recovers from the death of one of its processes. A rollout actor or engine that died
    is replaced. Train workers return to the last checkpoint, while rollouts continue if a journal is kept. After any
    other death the whole run returns to the last checkpoint. With 0 the first death ends the run."""
    deterministic: bool = False
    """Whether runs with the same seed give exactly the same results, even after a kill and resume. Groups are then
    trained on in the order of their prompts, weights change only between rollouts, and engines generate each group by
    itself."""
    bitwise: bool = False
    """True makes log-probs of the train workers equal those of the engines bit for bit. Both sides compute each token
    by the same functions, which takes longer. A step in which one log-prob differs ends the run. It needs a dense
    Qwen3, rows of the present policy, and the engine `hf` on CPUs or vLLM 0.26 on GPUs."""
    trace_step: CountOrZero = 5
    """First step in the timeline that is written to trace.json. A run with fewer steps records its last one; 0 disables
    the timeline."""
    trace_num_steps: Count = 1
    """Number of steps in the timeline."""

    @property
    def saves_checkpoints(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.checkpoint_every > 0 or self.checkpoint_minutes > 0

    @property
    def keeps_journal(self) -> bool:
        """Whether rollout actors write finished groups to files, or read them from there."""
        return self.record or bool(self.replay) or (self.journal and self.saves_checkpoints)


class WarmupConfig(Section):
    """Supervised warm-up of the model before step 1. Training metrics do not include this phase."""

    corpus: PathText = "none"
    """Texts that the model learns. `digit_skills` generates texts about digits, for a built-in model, that differ from
    the RL task. A file of conversations (.jsonl), as `sft.train` takes it, is learned by a supervised run of
    `warmup.steps` steps in the folder `warmup` of the run folder; the keys of section `sft` about turns and lengths
    apply to it, those of section `loss` do not. `none` disables the warm-up."""
    steps: Count = 1000
    """Largest number of steps. The warm-up on `digit_skills` ends sooner when the model has learned the corpus."""
    target_loss: Positive = 0.12
    """Loss at which the warm-up on `digit_skills` ends early, in nats per token."""
    batch_size: Count = 128
    """Number of texts in a step."""
    lr: Positive = 5e-3
    """Peak learning rate."""

    @field_validator("corpus")
    @classmethod
    def _known_corpus(cls, corpus: str) -> str:
        if corpus not in ("none", "digit_skills") and not corpus.endswith(JSONL_SUFFIXES):
            raise ValueError(f"got {corpus!r}, expected none, digit_skills or a file that ends in .jsonl")
        return corpus

    @property
    def on_file(self) -> bool:
        """True if the model learns a user's file."""
        return self.corpus.endswith(JSONL_SUFFIXES)


class ResourcesConfig(Section):
    """GPUs, CPUs, Ray cluster and time limits of the run's processes."""

    layout: Literal["auto", "colocated", "separate"] = "auto"
    """Distribution of the GPUs over engines and train workers. `separate` gives each process a GPU of its own.
    `colocated` puts engines and train workers on the same GPUs. `auto` is `separate` when there are enough GPUs for it,
    else `colocated`. On a machine without GPUs, and when engine and backend are `scripted`, everything runs on CPUs."""
    trainer_gpus: tuple[CountOrZero, ...] | None = None
    """GPU of each train worker, in the order of ranks. GPUs are counted over all hosts, those of the driver's host
    first. Must be set together with `resources.rollout_gpus`. Unset: `resources.layout` decides."""
    rollout_gpus: tuple[CountOrZero, ...] | None = None
    """GPUs of the engines: the first `rollout.tp` for engine 0, the next for engine 1, and so on. Unset:
    `resources.layout` decides."""

    ray_address: Text | None = None
    """Address of a Ray cluster to join. Unset: the run starts its own Ray and stops it at the end."""
    interface: Text | None = None
    """Network interface at which the processes of a run on several hosts listen: its name, such as `eth1`, or a
    network, such as `10.1.0.0/16` or `fd00:77::/64`, which also fits hosts whose interfaces have other names. NCCL and
    gloo use it, too. Unset: the interface of the address that Ray has for the host."""
    ports: PortText | None = None
    """Range of TCP ports, such as `20000-20999`, at which the run's own services listen. NCCL, gloo and Ray choose
    their own ports. Two runs can have the same range. Unset: any free ports."""
    elastic: bool = False
    """Whether the run uses nodes that join the Ray cluster of `resources.ray_address` later. Engines that are missing
    up to `rollout.num_engines`, or up to the number that `headrace scale` has ordered, are then started there."""
    ship: Literal["auto", "never"] | tuple[PathText, ...] = "auto"
    """Python files and packages of yours that are sent to the run's processes on a joined Ray cluster. `auto` sends a
    module that a host cannot import, with the others in its folder, and says so."""
    num_cpus: Count | None = None
    """Number of CPUs of the run's own Ray. Unset: the number of this machine's cores."""
    threads: Count | None = None
    """Number of compute threads of each worker. Unset: the cores divided by the number of engine processes or of train
    workers, whichever is larger; at most 4 for workers on GPUs, whose operations on the host are small."""
    stage_timeout_s: Positive = 300.0
    """Seconds after which a stage of a step (train, log-probs, sync) fails. Rollouts, validation and checkpoints can
    take longer: in these stages, an actor fails after this many seconds without progress (a token, a group or an
    answer)."""
    start_timeout_s: Positive = 300.0
    """Seconds that each part of the start can take: Ray, the data plane, and the actors with their models. It also
    bounds the start of an actor that replaces another."""
    collective_timeout_s: Positive = 300.0
    """Seconds after which a collective operation between train workers (NCCL, gloo), or their rendezvous at the start,
    fails. This bounds how long one train worker can wait for another."""
    switch_roles: Literal["auto", "always", "never"] = "auto"
    """Whether engines and train workers that share GPUs take turns in their memory, in `sync` mode. With `always` the
    engines sleep while the train workers compute, and the train workers keep their state in host memory while the
    engines generate. With `never` both keep their memory. `auto` becomes `always` if the GPUs cannot hold both, else
    `never`, and the run prints the choice at the start. On a machine without GPUs, `auto` is `never`."""
    residual_mib: Count | None = None
    """Largest GPU memory in MiB that a sleeping engine or an offloaded train worker can keep, for example for its CUDA
    context and CUDA graphs. An engine that keeps more is replaced; a train worker that keeps more fails. Unset: 1536 on
    the GPUs of a pool, where many processes sleep, else 4096."""
    watchdog: bool = True
    """Whether a separate process ends the run, with a report, when a stage exceeds `resources.stage_timeout_s` by more
    than a margin."""


class LoggingConfig(Section):
    """Output of a run in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Whether TensorBoard files are written."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Further trackers, which receive the metrics of every step and the episodes of samples.jsonl. The entries of the
    list are `wandb`, `trackio`, `mlflow`, `tensorboard`, or sections with the keys below. The extra `trackers` installs
    them. A failing tracker is reported and never ends the run."""
    progress: bool = True
    """Whether progress is shown: a live display on a terminal, short lines elsewhere."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of an HTTP endpoint for Prometheus, open during the run. With 0 the system picks a free port, and the run
    prints the address and writes it to prometheus.txt in the run folder. Unset: there is no endpoint."""
    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which the Prometheus endpoint listens. Every client that can connect can read the run's metrics."""
    report_minutes: NonNegative = 5.0
    """Minutes between two builds of report.html during the run, in a separate process. With 0 the report is built only
    at the end."""
    samples: SamplesConfig = SamplesConfig()
    """Episodes that are written to samples.jsonl."""

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
        kinds = [tracker.kind for tracker in trackers]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"got {kind!r} twice, expected each tracker once")
        return trackers


class Config(Section):
    """All sections of one run's configuration. Each section is declared beside the code that reads it; this file
    declares the sections about the run as a whole."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    sft: SftConfig = SftConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    dataplane: DataPlaneConfig = DataPlaneConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: dict[Annotated[str, Field(pattern=SET_NAME)], EvaluationConfig] = {}
    resources: ResourcesConfig = ResourcesConfig()
    pool: PoolConfig = PoolConfig()
    logging: LoggingConfig = LoggingConfig()
    scripted: ScriptedConfig = ScriptedConfig()
    simulation: dict[str, Any] = {}
    """Settings of `headrace simulate`, which checks them against `SimulationConfig`. A training run reads none of
    them."""

    @property
    def overlap(self) -> Overlap:
        """How far rollouts and training overlap, as numbers that follow from `algorithm.mode`."""
        groups = self.algorithm.prompts_per_step
        return overlap_of(
            self.algorithm.mode,
            max_staleness=self.algorithm.max_staleness,
            groups=groups,
            chunk=self.algorithm.chunk_groups or max(self.trainer.dp, groups // 4),
            stale=self.algorithm.stale_groups,
        )

    @property
    def resolved_sampler(self) -> str:
        """Name of the run's sampler: `algorithm.sampler`, with `auto` resolved. The sampler decides the order in which
        ready groups are trained on."""
        if self.algorithm.sampler != "auto":
            return self.algorithm.sampler
        if self.run.deterministic or self.overlap.window:
            return "in_order"
        return "ready_first" if self.overlap.by_chunk else "oldest_version_first"

    @property
    def processes_per_side(self) -> int:
        """Number of engine processes or of train workers, whichever is larger."""
        return max(self.rollout.num_engines * self.rollout.tp, self.trainer.topology.world)

    @property
    def residual_mib(self) -> int:
        """Largest GPU memory in MiB that a sleeping process can keep: `resources.residual_mib`, or its default."""
        if self.resources.residual_mib is not None:
            return self.resources.residual_mib
        return POOL_RESIDUAL_MIB if self.pool.address is not None else RESIDUAL_MIB

    @property
    def shares_engines(self) -> bool:
        """True if the run uses the engines of its pool."""
        return self.pool.address is not None and self.pool.engines == "shared"

    @property
    def engine_gpus(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each engine as `resources.rollout_gpus` lists them; () if it is unset."""
        gpus, tp = self.resources.rollout_gpus or (), self.rollout.tp
        return tuple(tuple(gpus[first : first + tp]) for first in range(0, len(gpus), tp))

    @property
    def rows_per_group(self) -> int:
        """Number of rows of each group in the data plane, including unused ones of an episode."""
        return self.algorithm.group_size * self.environment.max_rows

    @property
    def rows_per_step(self) -> int:
        """Number of samples of each step, which is its number of rows if every episode has one row."""
        return self.algorithm.prompts_per_step * self.algorithm.group_size

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """Largest number of tokens of a prompt and its answer together, by the keys that decide it. There is one for
        training, one for validation, and one for each evaluation set with `every` above 0."""
        if self.sft.train:
            return {"sft.max_tokens": self.sft.max_tokens}
        prompt, answer = self.data.max_prompt_tokens, self.rollout.max_new_tokens
        lengths = {"data.max_prompt_tokens + rollout.max_new_tokens": prompt + answer}
        if self.validation.every:
            length = prompt + (self.validation.max_new_tokens or answer)
            lengths["data.max_prompt_tokens + validation.max_new_tokens"] = length
        for name, one in self.evaluation.items():
            if one.every:
                length = evaluation_data(self.data, one.data).max_prompt_tokens + (one.max_new_tokens or answer)
                lengths[f"evaluation.{name}: data.max_prompt_tokens + max_new_tokens"] = length
        return lengths

    @property
    def longest_row(self) -> tuple[str, int]:
        """Largest number of tokens of a row that is trained on, behind the keys that decide it."""
        return next(iter(self.sequence_lengths.items()))

    @property
    def longest_sequence(self) -> int:
        """Largest number of tokens of a prompt and its answer together, in training, validation and evaluations."""
        return max(self.sequence_lengths.values())

    @property
    def engine_length(self) -> int:
        """Largest number of tokens of a prompt and its answer together that the engines must support."""
        return self.rollout.max_model_len or self.longest_sequence

    @property
    def other_models(self) -> list[tuple[str, str]]:
        """Keys and values of all settings that name a model beside the policy: the reference model and the teachers."""
        teachers = enumerate(self.distillation.teachers)
        named = [(f"distillation.teachers.{index}.model", one.model) for index, one in teachers]
        reference = self.loss.reference_model
        return named if reference is None else [("loss.reference_model", reference), *named]

    @property
    def sources(self) -> list[tuple[str, str | None]]:
        """Keys and values of all settings that name a source of prompts."""
        if self.sft.train:
            return [*(("sft.train", file) for file in self.sft.train), ("sft.validation", self.sft.validation)]
        sets = [(f"evaluation.{name}.data.source", one.data.source) for name, one in self.evaluation.items()]
        mixed = [(f"data.mixture.{index}.source", part.source) for index, part in enumerate(self.data.mixture)]
        trained = mixed if self.data.train == MIXTURE else [("data.train", self.data.train)]
        warmup = [("warmup.corpus", self.warmup.corpus)] if self.warmup.on_file else []
        return [*trained, ("data.validation", self.data.validation), *sets, *warmup]

    @property
    def rubrics(self) -> dict[str, RewardConfig]:
        """Rubrics by name: that of training under the name "", and those of evaluation sets that set one."""
        return {"": self.reward} | {name: one.reward for name, one in self.evaluation.items() if one.reward}

    @property
    def sends_adapter(self) -> bool:
        """True if weight syncs send the matrices of an adapter, which engines keep beside the base model."""
        return self.trainer.lora.rank > 0 and self.sync.adapter == "only"

    @property
    def first_version(self) -> int:
        """Version that engines serve when they start, with the weights of `model.path`. The policy's first version is
        0, which is another one if it starts with an adapter."""
        return 0 if self.model.adapter is None else -1

    @property
    def with_reference(self) -> bool:
        """True when train workers keep a frozen copy of the initial weights."""
        return self.loss.kl_coef > 0

    @property
    def figures(self) -> list[str]:
        """Keys of validation metrics that are valid for `validation.metric`."""
        return figure_names([function.label for function in self.reward.functions], self.validation.n)

    @property
    def judged_figure(self) -> str:
        """Full key of the metric that `validation.metric` names, or the name itself if there is no such metric. In a
        supervised run it is the loss."""
        if self.sft.train:
            return HELD_OUT_LOSS
        return find_figure(self.validation.metric, self.figures) or self.validation.metric

    @property
    def objects(self) -> list[str]:
        """Paths of the shipped objects, those of a script or notebook, that any key names."""
        return [text for text in self.texts if text.startswith(OBJECT)]

    @property
    def texts(self) -> list[str]:
        """Every text that is the value of a key, or part of it."""
        found: set[str] = set()
        left: list[Any] = [self.model_dump()]
        while left:
            value = left.pop()
            if isinstance(value, dict | list | tuple):
                left += value.values() if isinstance(value, dict) else value
            elif isinstance(value, str):
                found.add(value)
        return sorted(found)

    def listening(self, *, one_host: bool) -> Listening:
        """Return the addresses and ports at which the run's processes listen. one_host: whether all of them are on one
        host."""
        ports = None if self.resources.ports is None else PortRange.parse(self.resources.ports)
        return Listening(one_host, self.resources.interface, ports, self.num_ports)

    @property
    def num_ports(self) -> int:
        """Largest number of ports of `resources.ports` that the run takes on one host. It takes so many if directory,
        rank 0 and all rollout actors are there."""
        store, num_rollouts = self.dataplane.store, self.rollout.num_actors or self.rollout.num_engines
        directory, rank_0 = 1, 1 + 2 * (self.sync.transport in ("auto", "collective"))
        if self.sync.transport == "pairs":
            rank_0 += 2 * self.trainer.topology.world  # All ranks can be on this host.
        in_store = store.num_units or 1
        if store.kind == "mooncake":  # Directory, driver and the process that lends the memory are clients, too.
            in_store = 2 + 2 * (3 + num_rollouts + self.trainer.topology.world)
        return directory + rank_0 + in_store + (num_rollouts if self.rollout.endpoint.enabled else 0)

    @property
    def traced_step(self) -> int:
        """Number of the first step in the timeline; 0 if the run records no timeline."""
        return min(self.run.trace_step, self.algorithm.steps)


def with_run_dir(config: Config, now: datetime.datetime | None = None) -> Config:
    """Return `config` with `run.dir` set, and with the Ray cluster of its pool if it uses one. The paths `run.dir` and
    `run.replay` become absolute. now: time in the default folder's name; None: the current local time."""
    folder = config.run.dir
    if folder is None:
        stamp = (now or datetime.datetime.now()).strftime("%Y%m%d-%H%M%S")
        folder = os.path.join("runs", f"{config.run.name}-{stamp}")
    folder = os.path.abspath(folder)
    replay = config.run.replay and os.path.abspath(config.run.replay)
    address = config.resources.ray_address or config.pool.address
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder, "replay": replay}),
            "resources": config.resources.model_copy(update={"ray_address": address}),
        }
    )


def resolved_yaml(config: Config) -> str:
    """Return the whole configuration with its defaults as YAML, which `load_config` reads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
