"""The configuration: every key of a run's YAML file, with its unit, meaning and bounds."""

from __future__ import annotations

import datetime
import difflib
import os
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from ...dataplane.config import DataPlaneConfig
from ...dataplane.topology import Topology
from ..simulation.config import SimulationConfig
from .checks import capacity_problems, meaning_problems, mesh_problems, size_problems
from .section import Count, CountOrZero, NonNegative, Positive, Section, Share

# ---------------- The section `algorithm`: how large steps are, where their groups come from, and what rollouts may
# be ahead by.


class DynamicSamplingConfig(Section):
    """Groups without a learning signal are replaced (DAPO, arXiv:2503.14476 section 3.2)."""

    enabled: bool = False
    """Clear groups whose rewards (raw: before shaping, as the rubric gives them) are all alike and train on others."""
    max_factor: float = Field(default=4.0, ge=1.0)
    """Prompts rolled out for a step, at most, as a multiple of `prompts_per_step`. Beyond it groups without a signal
    are trained on after all, so that a step always has its size."""
    oversample: float = Field(default=1.0, ge=1.0)
    """`sync`, `streaming`: prompts rolled out for a step from the start, as a multiple of `prompts_per_step`. The step
    takes those that are ready first; the rest are ended and cleared."""


class AlgorithmConfig(Section):
    """The size and number of steps."""

    mode: Literal["sync", "async", "streaming"] = "sync"
    """`sync`: rollout, train and weight sync in lock-step; `async`: rollouts run ahead of the training, up to
    `max_staleness` versions; `streaming`: lock-step, but groups are trained on as they become ready."""
    max_staleness: CountOrZero = 1
    """`async`: versions that a row's oldest token may be behind the policy that is trained on it."""
    stale_groups: Literal["requeue", "drop"] = "requeue"
    """`async`: groups too old for `max_staleness` are rolled out again, or dropped for other prompts. None is with
    `in_order`, which never lets one grow too old."""
    sampler: str = "auto"
    """Which ready groups are trained on first: `in_order`, `ready_first`, `oldest_version_first`, `windowed`, or your
    own as `package.module:factory`. `auto`: ready_first when streaming, in_order when async, else the oldest."""
    sampler_options: dict[str, Any] = {}
    """Of the sampler: `{window: groups}` of `windowed`, keyword arguments of your own."""
    chunk_groups: Count | None = None
    """`streaming`: groups that are trained on together. None: a quarter of `prompts_per_step`."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    steps: Count = 100
    """Optimizer steps of the run."""
    prompts_per_step: Count = 32
    """Groups a step."""
    group_size: int = 8
    """Samples a prompt."""
    prev_logprobs: Literal["rollout", "recompute"] = "rollout"
    """The old policy's log-probs in the ratio: the engine's own, or recomputed by the trainer before each step."""

    @field_validator("group_size")
    @classmethod
    def _has_baseline(cls, size: int) -> int:
        if size < 2:
            raise ValueError(f"got {size}, expected a whole number >= 2, as a group of one has no baseline")
        return size


# ---------------- The configuration's sections on what is maximised: how rewards become advantages, and the loss.


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"] = "grpo"
    """`grpo`: minus the group's mean, over its deviation (arXiv:2402.03300); `dr_grpo`: not divided (arXiv:2503.20783);
    `rloo`: minus the mean of the group's others (arXiv:2402.14740); `reinforce_pp`: normalised over the whole step
    (arXiv:2501.03262); `gdpo`: each reward function normalised in its group, then added (arXiv:2601.05242)."""
    normalize_std: bool = True
    """`grpo`: divide by the group's standard deviation."""
    baseline: Literal["step", "group"] = "step"
    """`reinforce_pp`: whose mean reward is taken off."""


class LossConfig(Section):
    """What the policy minimises."""

    kind: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """`ppo_clip`: a clipped ratio per token (arXiv:1707.06347); `gspo`: per answer (arXiv:2507.18071; its bounds are
    around 4e-4); `cispo`: the ratio as a clipped weight (arXiv:2506.13585); `reinforce`: no ratio."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; 1: not clipped below (CISPO as published)."""
    clip_high: Positive = 0.28
    """The ratio is clipped above 1 + clip_high (DAPO, arXiv:2503.14476)."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """`ppo_clip`: ratios above this are clipped where the advantage is negative, too (arXiv:1912.09729: 3)."""
    aggregation: Literal["token", "sequence", "sequence_sum", "prompt"] = "token"
    """Mean over the step's tokens, over its sequences' token means, over its sequences' sums by length_norm (Dr. GRPO),
    or over its prompts' token means."""
    length_norm: Count | None = None
    """`sequence_sum`: tokens that a sequence's sum is divided by. None: rollout.max_new_tokens."""
    correction: Literal["none", "tis", "icepop", "sequence", "sequence_mask"] = "none"
    """Importance weights of trainer over engine: per token, truncated (`tis`) or masked (`icepop`, arXiv:2510.18855);
    per sequence, truncated or masked. Needs algorithm.prev_logprobs=recompute."""
    correction_low: NonNegative | None = None
    """Smaller weights are masked. None: 0.5 with `icepop`, 0 with `sequence_mask`."""
    correction_high: Positive | None = None
    """Larger weights are truncated to it, or masked. None: 5 with `icepop`, else 2."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference (the initial weights); 0: no reference is kept."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator (joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off each token's advantage."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus; costs a softmax over the vocabulary, with gradient."""


BUILTIN_MODELS = ("builtin:tiny-qwen3",)
REWARD_KINDS = ("exact_match", "per_position", "format", "overlong")


class RunConfig(Section):
    """Where a run leaves its files, and its seed."""

    dir: str | None = None
    """Run folder. None: `runs/{name}-{YYYYmmdd-HHMMSS}` under the current folder."""
    name: str = Field(default="headrace", min_length=1, pattern=r"^[^/]+$")
    """Short name, shown in the report; part of the default run folder."""
    seed: CountOrZero = 0
    """Seeds prompts, sampling and the built-in model's weights."""
    checkpoint_every: CountOrZero = 0
    """Steps between checkpoints; 0: none."""
    journal: bool = True
    """With checkpoints: finished groups are kept on disk until a checkpoint covers them, and a resumed run generates
    none of them again."""
    record: bool = False
    """Keep all finished groups on disk, checkpoints or not, so that `run.replay` can train on them again."""
    replay: str | None = None
    """Folder of a run with `run.record`: its groups are trained on instead of generated ones. What decides how groups
    come out (model, data, sampling, rewards, seed) must be as it was there; loss, trainer and mesh may be others."""
    keep_best: bool = False
    """Export the model of the best validation to `best/`."""
    max_restarts: CountOrZero = 3
    """Times that the run goes on by itself after one of its processes died: a rollout actor or engine is replaced;
    train workers go back to the last checkpoint, under the rollouts where a journal is kept; anything else sends the
    whole run back to it. 0: the run ends."""
    deterministic: bool = False
    """Groups are trained on in the order of their prompts, weights change between rollouts only, and engines generate
    each group by itself, so that a run with the same seed repeats figure by figure, kills and resumes included."""
    trace_step: CountOrZero = 5
    """The first step whose timeline is written to trace.json (the last one of a shorter run); 0: none."""
    trace_num_steps: Count = 1
    """Steps of the timeline."""


class ModelConfig(Section):
    """The policy that is trained."""

    path: str = BUILTIN_MODELS[0]
    """Hugging Face model folder, hub id, or `builtin:tiny-qwen3`: a 2-layer character model made on the spot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engines' weights; the trainer keeps float32 (`trainer.mixed_precision` computes in bfloat16)."""

    @property
    def builtin(self) -> bool:
        return self.path.startswith("builtin:")

    @field_validator("path")
    @classmethod
    def _known_builtin(cls, path: str) -> str:
        if path.startswith("builtin:") and path not in BUILTIN_MODELS:
            raise ValueError(f"got {path!r}, expected {' or '.join(map(repr, BUILTIN_MODELS))}, a folder or a hub id")
        return path


class WarmupConfig(Section):
    """Supervised warm-up of the built-in model: its own phase before step 1, in no RL figure."""

    corpus: Literal["none", "digit_skills"] = "none"
    """`digit_skills`: generated texts on digits (not the task that RL trains)."""
    steps: Count = 1000
    """At most; it ends when the corpus is learned."""
    target_loss: Positive = 0.12
    """Nats a token at which the corpus counts as learned."""
    batch_size: Count = 128
    """Texts a step."""
    lr: Positive = 5e-3
    """Peak learning rate."""


class DataConfig(Section):
    """Prompts and answers."""

    train: str = "task:reverse"
    """`task:reverse` or `task:arithmetic` (generated), a .jsonl file, a Hugging Face dataset folder, or a hub id."""
    validation: str | None = None
    """Like `train`. None: the task's held-out part; there is none for files and datasets."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or chat messages."""
    answer_field: str = "answer"
    """Column with the expected answer."""
    template: str = "{prompt}"
    """Python format string over the row's columns that makes the model's input."""
    options: dict[str, Any] = {}
    """Options of a generated task, e.g. `min_digits`, `max_digits`."""
    max_prompt_tokens: Count = 512
    """Longer prompts are an error at the start."""

    @property
    def generated(self) -> bool:
        return self.train.startswith("task:")


class ScriptedConfig(Section):
    """Engine and train backend `scripted`: no model, seconds of your choice. For `headrace bench step` and tests."""

    latency_s: NonNegative = 0.0
    """Median seconds of a request (a group)."""
    latency_sigma: NonNegative = 0.0
    """Sigma of the log-normal that latencies are drawn from, seeded by request; 0: all alike."""
    train_row_s: NonNegative = 0.0
    """Seconds a row of forward and backward, by a replica."""
    train_step_s: NonNegative = 0.0
    """Seconds of an optimizer step."""


class RolloutConfig(Section):
    """Generation."""

    engine: Literal["hf", "vllm", "scripted"] = "hf"
    """`hf`: transformers generate; `vllm`: vLLM (`make vllm`, or the extra `vllm` on GPUs); `scripted`: fixed answers
    without a model, for dry runs of the machinery."""
    num_engines: Count = 1
    """Each holds a whole model."""
    tp: Count = 1
    """`vllm`: processes that split each engine's layers."""
    num_actors: Count | None = None
    """Rollout actors (environments and rewards), which share all engines through a router; an engine that dies is then
    left out and its requests go to others. None: as many as engines, each with its engine embedded."""
    kv_cache_mib: Count = 256
    """`vllm`: memory of an engine's key-value cache."""
    environment: Literal["single_turn", "tool_use"] = "single_turn"
    """`single_turn`: a prompt, an answer; `tool_use`: the policy may call tools (`<tool>name: arguments</tool>`) and
    goes on with their results, whose tokens are not trained on."""
    tools: tuple[str, ...] = ("calculator",)
    """`tool_use`: `calculator`, or functions from text to text of your own as `package.module:function`."""
    max_turns: Count = 4
    """`tool_use`: times that the policy speaks in an episode."""
    max_new_tokens: Count = 256
    """Of a sample; `tool_use`: of an episode behind its prompt, tools' results included."""
    temperature: Positive = 1.0
    """Of training rollouts; validation is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: CountOrZero = 0
    """0: off."""
    max_batch: Count = 256
    """Rows that an engine generates at a time."""


class RewardFunctionConfig(Section):
    """One term of the rubric."""

    kind: str
    """`exact_match`, `per_position`, `format`, `overlong`, or your own as `package.module:function`."""
    weight: float = 1.0
    """Factor in the total; 0: only logged."""
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""
    name: str | None = Field(default=None, min_length=1, pattern=r"^[^/\s]+$")
    """Of its metric `reward/<name>`. None: the kind, or the function's name."""

    @property
    def label(self) -> str:
        return self.name or self.kind.rpartition(":")[2]

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        module, colon, function = kind.partition(":")
        if kind not in REWARD_KINDS and not (colon and module and function.isidentifier()):
            near = difflib.get_close_matches(kind, REWARD_KINDS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"got {kind!r}, expected {', '.join(REWARD_KINDS)} or package.module:function{hint}")
        return kind


class RewardConfig(Section):
    """The rubric: total = sum of weight x value."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(kind="exact_match"),)
    max_error_share: Share = 0.5
    """Share of a step's rows whose reward function raised (masked and counted) above which the run stops."""

    @field_validator("functions")
    @classmethod
    def _at_least_one(cls, functions: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        # Not min_length: pydantic would report it beside every mistake inside a function.
        if not functions:
            raise ValueError("got [], expected at least one function")
        return functions


class TrainerConfig(Section):
    """The train workers and their optimizer (AdamW)."""

    backend: Literal["fsdp", "megatron", "scripted"] = "fsdp"
    """`fsdp`: FSDP2 and tensor parallelism on Hugging Face models; `megatron`: megatron-core, all of the mesh below;
    `scripted`: reads its rows and computes nothing, for as long as `scripted` says."""
    dp: Count = 1
    """Data-parallel replicas; each trains on a share of the step's rows. There are dp x tp x cp x pp train workers."""
    tp: Count = 1
    """Tensor parallel: ranks that split each layer."""
    pp: Count = 1
    """Pipeline parallel: stages of layers."""
    cp: Count = 1
    """Context parallel: ranks that split each row's tokens."""
    ep: Count = 1
    """Expert parallel, from within dp x tp x cp."""
    sequence_parallel: bool = False
    """`megatron`: split the norms by tokens over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """`megatron`: split the optimizer's state over the data-parallel ranks; `fsdp` always does."""
    recompute: Literal["none", "full"] = "none"
    """`full`: keep only each layer's input for backward and compute the rest again."""
    offload: bool = False
    """Weights, gradients and optimizer state stay in host memory between uses."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: NonNegative = 0.0
    grad_clip: Positive = 1.0
    """Bound of the gradient's global norm."""
    warmup_steps: CountOrZero = 0
    """Steps of linear rise to `lr`."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Of the learning rate after the rise; cosine and linear end at 0."""
    packing: Literal["none", "packed", "dynamic"] = "none"
    """`none`: rows padded to the microbatch's longest; `dynamic`: the same, rows of like lengths together; `packed`:
    rows one behind the other, without padding."""
    tokens_per_microbatch: Count = 16384
    """Tokens, padding included, of one forward and backward on one replica; rows count rounded up to a multiple of
    tp x 2 cp (tp without context parallelism)."""
    fetch: Literal["auto", "leader", "independent"] = "auto"
    """Who reads a replica's rows from the store: its first rank, which broadcasts them, or each rank for itself.
    `auto`: the leader where a replica has more than one rank."""
    mixed_precision: bool = False
    """Compute in bfloat16, keep weights and gradients' sums in float32."""

    @property
    def topology(self) -> Topology:
        """The train mesh."""
        return Topology(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)


class SyncConfig(Section):
    """Weights from trainer to engines."""

    transport: Literal["auto", "collective", "ipc", "store", "disk"] = "auto"
    """`collective`: broadcast (NCCL on GPUs, gloo on CPUs); `ipc`: shared memory of one host; `store`: through the data
    plane's store; `disk`: safetensors files. `auto`: ipc on one host, else collective."""
    bucket_mib: Count | None = None
    """What travels, and is verified, as one; two are in flight. Unset: 512 between GPUs (`ipc`, `collective`), else
    64."""
    in_flight: Literal["keep", "wait", "abort"] = "wait"
    """Requests that run when new weights come: go on under them, end first, or are cut off and asked for again from
    where they were. Each token has the version that made it."""
    staging: Literal["auto", "full", "none"] = "auto"
    """`full`: engines receive and verify the whole version beside the one they serve; `none`: straight into their
    parameters, standing still, and unfit to serve if it fails; `auto`: full where memory allows."""
    delta: bool = False
    """Send only what changed since the last version; the trainer keeps it in host memory to compare."""
    cache: bool = False
    """Keep the last two versions in the trainer's host memory, for engines that join late. Transports other than
    collective keep them anyway."""
    dir: str | None = None
    """`disk`: the folder, seen by all hosts. None: `weights` in the run's folder."""
    timeout_s: Positive = 60.0
    """Bound of each wait of a sync."""


class ValidationConfig(Section):
    """Greedy evaluation on prompts that are never trained on."""

    every: CountOrZero = 10
    """Steps between validations, which also open and close the run; 0: none."""
    num_prompts: Count = 128
    max_new_tokens: Count | None = None
    """None: as in training."""
    background: bool = False
    """Validate while the next step rolls out and trains, up to its optimizer step; its figures are then logged with
    that step, and `val/version` says which policy they are of."""
    stop_at: Share | None = None
    """End the run when exact match reaches this (in the background: after the step under way). None: after
    `algorithm.steps`."""


class ResourcesConfig(Section):
    """Where the run's processes live."""

    ray_address: str | None = None
    """Ray cluster to join. None: the run starts its own Ray and ends it."""
    num_cpus: Count | None = None
    """CPUs of the run's own Ray. None: this machine's cores."""
    threads: Count | None = None
    """Compute threads of each worker. None: the cores shared out."""
    stage_timeout_s: Positive = 300.0
    """Bound of any one stage of a step (rollout, train, sync, validation)."""
    watchdog: bool = True
    """A process of its own ends the run, with a report, when no stage has ended for `stage_timeout_s` and a margin."""


class LoggingConfig(Section):
    """What is shown and written besides metrics.jsonl."""

    tensorboard: bool = True
    progress: bool = True
    """Live display on a terminal, short lines elsewhere."""
    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of an HTTP endpoint for Prometheus, open while the run is; 0: one that is free, its address is printed and
    stands in the run folder's prometheus.txt. None: no endpoint."""
    prometheus_host: str = Field(default="127.0.0.1", min_length=1)
    """Address that it listens on. Whoever reaches it can read the run's figures."""


class Config(Section):
    """One run."""

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
    simulation: SimulationConfig = SimulationConfig()

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

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Config:
        problems = size_problems(self) + mesh_problems(self) + capacity_problems(self) + meaning_problems(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self


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
