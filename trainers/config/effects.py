"""Lists the conditions under which each config key has an effect, and finds keys that are set without effect.

A key that is not in `EFFECTS` has an effect in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...actors.rollout.data_config import JSONL_SUFFIXES, MIXTURE, DataConfig, is_generated
from ...dataplane.config import Section
from ..backends.config import TrainerConfig
from ..losses.config import LossConfig
from .config import AlgorithmConfig, Config
from .evaluation_sets import EvaluationConfig


@dataclass(frozen=True, slots=True)
class Need:
    """One condition that must hold for a config key to have an effect."""

    key: str
    """Dotted name of the key that the condition tests."""
    words: str
    """The condition in words, such as `algorithm.mode=async`."""
    holds: Callable[[Config], bool]
    switch: bool = False
    """Whether `key` turns a part of the run on or off, rather than choosing between variants of it."""


def value_of(section: Section, key: str) -> Any:
    """Return the value of the dotted key `key` in `section`. `section` can be the whole configuration."""
    here: Any = section
    for name in key.split("."):
        here = getattr(here, name)
    return here


def shown(value: Any) -> str:
    """Format a value for error messages and tables."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if type(value) is float else repr(value)


def _is(key: str, *values: Any) -> Need:
    listed = " or ".join(value if isinstance(value, str) else shown(value) for value in values)
    return Need(key, f"{key}={listed}", lambda config: value_of(config, key) in values)


def _unlike(key: str, *values: str) -> Need:
    words = f"a {key} other than {' and '.join(values)}"
    return Need(key, words, lambda config: value_of(config, key) not in values)


def _above_zero(key: str) -> Need:
    return Need(key, f"{key} above 0", lambda config: value_of(config, key) > 0, switch=True)


def _set(key: str) -> Need:
    return Need(key, f"{key} set", lambda config: value_of(config, key) is not None, switch=True)


def _unset(key: str) -> Need:
    return Need(key, f"{key} unset", lambda config: value_of(config, key) is None)


def _sources(data: DataConfig, evaluation: Mapping[str, EvaluationConfig]) -> tuple[str, ...]:
    sets = (one.data.source for one in evaluation.values())
    return tuple(source for source in (*data.trained, data.validation, *sets) if source)


AHEAD = _is("algorithm.mode", "async", "async_streaming")
BY_CHUNK = _is("algorithm.mode", "streaming", "async_streaming")
VLLM = _is("rollout.engine", "vllm")
MODEL_ENGINES = _is("rollout.engine", "hf", "vllm")
CUTS = Need(
    "rollout.top_p",
    "rollout.top_p below 1, rollout.top_k or rollout.min_p above 0, or rollout.endpoint.sampling=request",
    lambda config: config.rollout.cuts or config.rollout.endpoint.own_sampling,
)
MEGATRON = _is("trainer.backend", "megatron")
MODEL_BACKENDS = _is("trainer.backend", "fsdp", "megatron")
HF_MODELS = Need(
    "rollout.engine",
    "rollout.engine=hf or trainer.backend=fsdp",
    lambda config: config.rollout.engine == "hf" or config.trainer.backend == "fsdp",
)
CLIPPED = _is("loss.kind", "ppo_clip", "gspo", "cispo")
OWN_LOSS = Need("loss.kind", "a loss of your own", lambda config: ":" in config.loss.kind)
MOVING_RATIO = Need(
    "algorithm.prev_logprobs",
    "algorithm.prev_logprobs=rollout or several updates per step (algorithm.minibatches, algorithm.epochs)",
    lambda config: config.algorithm.prev_logprobs == "rollout" or config.algorithm.updates_per_step > 1,
)
TEACHERS = Need(
    "distillation.teachers",
    "teachers in distillation.teachers",
    lambda config: bool(config.distillation.teachers),
    switch=True,
)
WITH_KL = _above_zero("loss.kl_coef")
VALIDATES = _above_zero("validation.every")
SUPERVISED = Need("sft.train", "sft.train set", lambda config: bool(config.sft.train), switch=True)
LEARNS_FILE = Need(
    "sft.train",
    "sft.train set, or a file as warmup.corpus",
    lambda config: bool(config.sft.train) or config.warmup.on_file,
    switch=True,
)
WARMED_UP = replace(_unlike("warmup.corpus", "none"), switch=True)
TASK_PROMPTS = Need(
    "data.train",
    "prompts of a generated task (task:NAME or reasoning-gym:NAME)",
    lambda config: any(s.startswith(("task:", "reasoning-gym:")) for s in _sources(config.data, config.evaluation)),
)
TABLE_PROMPTS = Need(
    "data.train",
    "prompts from a file or dataset",
    lambda config: not all(is_generated(s) for s in _sources(config.data, config.evaluation)),
)
DATASET_PROMPTS = Need(
    "data.train",
    "prompts from a Hugging Face dataset",
    lambda config: any(
        not is_generated(s) and not s.endswith(JSONL_SUFFIXES) for s in _sources(config.data, config.evaluation)
    ),
)
SLEEPS = Need(
    "resources.switch_roles",
    "resources.switch_roles=auto or always, or pool.address set",
    lambda config: config.resources.switch_roles != "never" or config.pool.address is not None,
)
OVERTAKING = Need(
    "algorithm.sampler",
    "a sampler that may change the order of groups, unlike auto and in_order",
    lambda config: (
        config.algorithm.sampler != "in_order" and not (config.algorithm.sampler == "auto" or config.run.deterministic)
    ),
)
OWN_OPTIONS = Need(
    "algorithm.sampler",
    "algorithm.sampler=windowed or your own sampler",
    lambda config: config.algorithm.sampler == "windowed" or ":" in config.algorithm.sampler,
)
SAVES = Need(
    "run.checkpoint_minutes",
    "run.checkpoint_minutes or run.checkpoint_every above 0",
    lambda config: config.run.saves_checkpoints,
    switch=True,
)
JOURNALED = Need("run.journal", "run.journal=true and checkpoints", lambda config: config.run.keeps_journal)
MAY_WARM_UP = Need(
    "model.path", "the built-in model, or a file", lambda config: config.model.builtin or config.warmup.on_file
)

EPISODES = Need(
    "environment.kind",
    "an environment other than single_turn",
    lambda config: config.environment.kind != "single_turn",
)

EFFECTS: Mapping[str, tuple[Need, ...]] = {
    "run.keep_checkpoints": (SAVES,),
    "run.journal": (SAVES, _is("run.record", False), _unset("run.replay")),
    "run.keep_best": (VALIDATES,),
    "environment.recover": (JOURNALED, _unset("run.replay")),
    "environment.recover_tokens": (JOURNALED, _unset("run.replay"), _is("environment.recover", "prefix")),
    "run.trace_num_steps": (_above_zero("run.trace_step"),),
    "model.dtype": (MODEL_ENGINES,),
    "warmup.corpus": (MAY_WARM_UP,),
    **{f"warmup.{name}": (WARMED_UP,) for name in ("steps", "batch_size", "lr")},
    "warmup.target_loss": (_is("warmup.corpus", "digit_skills"),),
    **{f"sft.{name}": (SUPERVISED,) for name in ("validation", "epochs")},
    **{
        f"sft.{name}": (LEARNS_FILE,)
        for name in ("messages_field", "turns", "chat_template_kwargs", "max_tokens", "overlong")
    },
    "data.validation": (VALIDATES,),
    **{f"data.{name}": (DATASET_PROMPTS,) for name in ("subset", "split")},
    **{f"data.validation_{name}": (VALIDATES, DATASET_PROMPTS) for name in ("subset", "split")},
    **{
        f"data.{name}": (TABLE_PROMPTS,)
        for name in (
            "prompt_field", "answer_field", "answer_pattern", "template", "chat_template", "chat_template_kwargs",
            "system_prompt", "overlong_prompts", "success_field",
        )
    },
    **{f"data.{name}": (_set("data.success_field"),) for name in ("success_range", "curriculum")},
    "data.mixture": (_is("data.train", MIXTURE),),
    "data.columns": (MODEL_BACKENDS, OWN_LOSS),
    "data.options": (TASK_PROMPTS,),
    **{
        f"rollout.{name}": (VLLM,)
        for name in ("tp", "max_model_len", "kv_cache", "kv_cache_dtype", "gpu_memory_utilization", "logprobs", "vllm")
    },
    **{f"rollout.{name}": (MODEL_ENGINES,) for name in ("stop", "stop_token_ids", "quantization")},
    "rollout.mask_limit": (MODEL_ENGINES, CUTS),
    **{
        f"rollout.endpoint.{name}": (_is("rollout.endpoint.enabled", True),)
        for name in (
            "host", "rows", "model", "sampling", "max_body_mib", "max_calls", "max_episode_calls", "body_timeout_s",
        )
    },
    "rollout.endpoint.enabled": (EPISODES,),
    **{
        f"router_replay.{name}": (_is("router_replay.enabled", True),)
        for name in ("missing", "max_missing_share", "verify", "native_agreement_every")
    },
    "router_replay.verify_steps": (_is("router_replay.verify", "forward"),),
    "environment.options": (EPISODES,),
    "model.renderer": (EPISODES,),
    "model.renderer_options": (EPISODES, _unlike("model.renderer", "template")),
    **{
        f"environment.{name}": (EPISODES,)
        for name in (
            "max_rows", "turn_timeout_s", "episode_timeout_s", "max_episodes", "on_failure.environment",
            "on_failure.sandbox",
        )
    },
    "algorithm.max_staleness": (AHEAD,),
    "algorithm.stale_groups": (AHEAD, OVERTAKING),
    "algorithm.sampler_options": (OWN_OPTIONS,),
    "algorithm.chunk_groups": (BY_CHUNK,),
    "algorithm.dynamic_sampling.max_factor": (_is("algorithm.dynamic_sampling.enabled", True),),
    "algorithm.dynamic_sampling.oversample": (_is("algorithm.mode", "sync", "streaming"),),
    "advantage.baseline": (_is("advantage.kind", "reinforce_pp"),),
    "loss.kind": (MODEL_BACKENDS,),
    "loss.options": (MODEL_BACKENDS, OWN_LOSS),
    "loss.clip_low": (MODEL_BACKENDS, CLIPPED, MOVING_RATIO),
    "loss.clip_high": (MODEL_BACKENDS, CLIPPED, MOVING_RATIO),
    "loss.clip_dual": (MODEL_BACKENDS, _is("loss.kind", "ppo_clip"), MOVING_RATIO),
    "loss.aggregation": (MODEL_BACKENDS,),
    "loss.length_norm": (MODEL_BACKENDS, _is("loss.aggregation", "sequence_sum")),
    "loss.correction": (MODEL_BACKENDS,),
    "loss.correction_low": (MODEL_BACKENDS, _is("loss.correction", "icepop", "sequence_mask")),
    "loss.correction_high": (MODEL_BACKENDS, _unlike("loss.correction", "none")),
    "loss.reference_every": (MODEL_BACKENDS, WITH_KL),
    "loss.reference_mix": (MODEL_BACKENDS, _above_zero("loss.reference_every")),
    "loss.reference_model": (MODEL_BACKENDS, WITH_KL),
    "loss.kl_kind": (MODEL_BACKENDS, WITH_KL),
    "loss.kl_max_log_ratio": (MODEL_BACKENDS, WITH_KL),
    "loss.kl_in": (MODEL_BACKENDS, WITH_KL),
    "loss.entropy_coef": (MODEL_BACKENDS,),
    "distillation.teachers": (MODEL_BACKENDS,),
    **{f"distillation.{name}": (TEACHERS,) for name in ("kind", "coef", "kl_in")},
    "distillation.k": (TEACHERS, _is("distillation.kind", "topk")),
    "distillation.max_log_ratio": (TEACHERS, _is("distillation.kind", "reverse_kl")),
    "model.attention": (HF_MODELS,),
    **{f"trainer.{name}": (MEGATRON,) for name in ("pp", "sequence_parallel", "distributed_optimizer")},
    **{f"trainer.{name}": (MODEL_BACKENDS,) for name in ("cp", "ep")},
    **{
        f"trainer.{name}": (_is("trainer.backend", "fsdp"),)
        for name in (
            "offload", "head", "reshard_after_forward", "optimizer", "offload_optimizer", "fp8",
        )
    },
    **{f"trainer.{name}": (MODEL_BACKENDS,) for name in ("freeze", "groups")},
    "trainer.patches_per_microbatch": (MODEL_BACKENDS, _is("data.images.enabled", True)),
    **{
        f"trainer.{name}": (MODEL_BACKENDS,)
        for name in (
            "recompute", "compile", "lr", "betas", "eps", "weight_decay", "grad_clip", "warmup_steps", "warmup_ratio",
            "schedule",
            "mixed_precision", "entropy_metric", "export_dtype", "moe.aux_loss_coef", "moe.bias_update_rate",
            "moe.load_metrics",
        )
    },
    "trainer.lora.rank": (MODEL_BACKENDS,),
    **{
        f"trainer.lora.{name}": (_above_zero("trainer.lora.rank"),)
        for name in ("alpha", "targets", "dropout", "experts", "init", "base", "lr_factor")
    },
    "sync.adapter": (_above_zero("trainer.lora.rank"),),
    "sync.recover": (
        _above_zero("trainer.lora.rank"), _is("sync.adapter", "only"), _is("trainer.backend", "fsdp"),
        _is("rollout.engine", "hf"),
    ),
    "rollout.max_adapters": (_above_zero("trainer.lora.rank"), _is("sync.adapter", "only")),
    "rollout.routing": (_set("rollout.num_actors"),),
    "trainer.recompute_layers": (MODEL_BACKENDS, _is("trainer.recompute", "full")),
    "trainer.min_lr": (MODEL_BACKENDS, _unlike("trainer.schedule", "constant", "inverse_sqrt")),
    "trainer.power": (MODEL_BACKENDS, _is("trainer.schedule", "polynomial")),
    "trainer.decay_ratio": (MODEL_BACKENDS, _is("trainer.schedule", "warmup_stable_decay")),
    "sync.kv": (_is("sync.in_flight", "keep"), MODEL_ENGINES),
    "sync.cache": (_is("sync.transport", "auto", "collective", "ipc"),),
    "sync.dir": (_is("sync.transport", "disk"),),
    "dataplane.store.num_units": (_is("dataplane.store.kind", "auto", "tcp", "simple"),),
    "dataplane.store.protocol": (_is("dataplane.store.kind", "mooncake"),),
    "dataplane.store.device": (_is("dataplane.store.kind", "mooncake"), _is("dataplane.store.protocol", "rdma")),
    **{
        f"validation.{name}": (VALIDATES,)
        for name in ("num_prompts", "temperature", "metric", "max_new_tokens", "background", "stop_at")
    },
    "validation.n": (VALIDATES, _above_zero("validation.temperature")),
    "resources.layout": (_unset("resources.trainer_gpus"),),
    "resources.num_cpus": (_unset("resources.ray_address"),),
    "resources.residual_mib": (SLEEPS,),
    "resources.ship": (_set("resources.ray_address"),),
    **{
        f"pool.{name}": (_set("pool.address"),)
        for name in ("name", "weight", "sleep_level", "other_runs", "order_timeout_s")
    },
    "logging.prometheus_host": (_set("logging.prometheus_port"),),
    "logging.samples.every": (_unset("run.replay"),),
    **{
        f"logging.samples.{name}": (_above_zero("logging.samples.every"), _unset("run.replay"))
        for name in ("groups", "max_tokens", "max_mib")
    },
    "scripted.response_tokens": (_is("rollout.engine", "scripted"),),
    "scripted.latency_s": (_is("rollout.engine", "scripted"),),
    "scripted.latency_sigma": (_is("rollout.engine", "scripted"), _above_zero("scripted.latency_s")),
    "scripted.train_row_s": (_is("trainer.backend", "scripted"),),
    "scripted.train_step_s": (_is("trainer.backend", "scripted"),),
}  # fmt: skip
"""Conditions of the keys that have an effect only in some runs: config key -> conditions. All conditions of a key must
hold."""

OFF: Mapping[str, Any] = {
    "run.journal": False,
    "environment.recover": "restart",
    "logging.samples.every": 0,
    "resources.ship": "never",
}
"""Values that turn a part of the run off: config key -> value. They are no mistake in a run without that part."""

_DEFAULTS = Config()


def idle_key_problems(config: Config, overridden: Collection[str] = ()) -> list[str]:
    """Return one sentence for each key that is set where it has no effect.

    A key with its default value is never reported, because a resolved configuration sets all keys and must load.
    overridden: dotted keys given on the command line. A key of the file is not reported if one of these overrides is
    the reason for its lack of effect. A key is also not reported if an override turns off the part of the run that the
    key belongs to. For example, `validation.every=0` requires no other change. A value of OFF is never reported.
    """
    problems = []
    problems += _doubtful(config.algorithm, config.loss, config.trainer, config.overlap.window, overridden)
    for key, needs in EFFECTS.items():
        value, default = value_of(config, key), value_of(_DEFAULTS, key)
        if value == default or (key in OFF and value == OFF[key]):
            continue
        for need in needs:
            excused = _among(need.key, overridden) and (need.switch or not _among(key, overridden))
            if not need.holds(config) and not excused:
                expected = "it unset" if default is None else shown(default)
                problems.append(
                    f"{key}: got {shown(value)} with {need.key}={shown(value_of(config, need.key))}, expected "
                    f"{expected}, because it has an effect only with {need.words}"
                )
                break
    return problems


def _doubtful(
    algorithm: AlgorithmConfig, loss: LossConfig, trainer: TrainerConfig, window: int, overridden: Collection[str]
) -> list[str]:
    """Return one sentence for each setting with an effect other than its name suggests."""
    problems = []
    # An override that shortens the run requires no other change.
    excused = _among("algorithm.steps", overridden) and not _among("trainer.warmup_steps", overridden)
    if trainer.warmup_steps > algorithm.steps and not excused:
        problems.append(
            f"trainer.warmup_steps: got {trainer.warmup_steps}, expected at most algorithm.steps={algorithm.steps}, "
            "because the learning rate would never reach trainer.lr"
        )
    if loss.kl_coef > 0 and loss.kl_kind == "k1" and loss.kl_in == "loss":
        problems.append(
            "loss.kl_kind: got 'k1' with loss.kl_in='loss', expected 'k2' or 'k3' (or loss.kl_in='reward'), because "
            "the gradient of k1 is 0 on average"
        )
    stale = window > 0 and trainer.backend != "scripted"
    if stale and algorithm.prev_logprobs == "recompute" and loss.correction == "none":
        problems.append(
            f"loss.correction: got 'none' with algorithm.mode={algorithm.mode!r} and "
            "algorithm.prev_logprobs='recompute', expected 'tis' or another correction, because rows of older policies "
            "would be trained on as if the newest had sampled them"
        )
    return problems


def _among(key: str, overridden: Collection[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:depth]) in overridden for depth in range(1, len(parts) + 1))
