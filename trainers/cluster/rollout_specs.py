"""Derives the settings of rollout actors: what they generate, and which files they write."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ...actors.engines.protocol import SamplingParams
from ...actors.environments.config import EnvironmentConfig, OnFailure
from ...actors.rewards.config import RewardConfig
from ...actors.rollout.actor import EvaluationSetup, RolloutSetup
from ...actors.rollout.config import RolloutConfig
from ...actors.rollout.data_config import DataConfig
from ...actors.rollout.evaluation_metrics import VALIDATION as VALIDATION_PREFIX
from ...actors.rollout.journal import JournalConfig
from ...actors.rollout.rows import MaskRules, RouteRules, TeacherSources
from ...actors.sample_file import SampleFile, SamplesConfig
from ...dataplane.config import Section
from ...dataplane.handle import DataPlaneHandle
from ..base_model.prepare import route_spec
from ..config.config import Config, RunConfig
from ..config.evaluation_sets import EvaluationConfig, ValidationConfig, evaluation_data
from ..losses.distillation_config import DistillationConfig
from .engine_specs import engine_config, threads


def rollout_setup(
    config: Config, index: int, model: str, handle: DataPlaneHandle, device: str | None, *, shared_gpu: bool = False
) -> RolloutSetup:
    """Return the settings of rollout actor `index`. device: device of its embedded engine; None if engines run in
    separate actors. shared_gpu: see `engine_config`.
    """
    name, spec = f"rollout {index}", route_spec(config.router_replay, config.model)
    training = EvaluationDefaults(config.rollout, config.data, config.reward, config.run.seed)
    plans = () if config.sft.train else evaluation_plans(training, config.validation, config.evaluation)
    return RolloutSetup(
        name=name,
        threads=threads(config.resources.threads, config.processes_per_side, device),
        seed=config.run.seed,
        engine=None if device is None else engine_config(config, name, model, handle, device, shared_gpu=shared_gpu),
        endpoint=config.rollout.endpoint,
        environment=config.environment,
        model=config.model,
        tokenizer=model,
        reward=config.reward,
        data=config.data,
        evaluations=tuple(plan.setup for plan in plans),
        check_prompts=index == 0,
        data_plane=handle,
        mask_truncated=config.algorithm.mask_truncated,
        adapters=config.sends_adapter,
        keeps_old_kv=config.sync.keeps_old_kv,
        engine_timeout_s=config.resources.stage_timeout_s,
        prefix_routing=config.rollout.routing == "prefix",
        samples=sample_file(config.logging.samples, config.run, config.algorithm.prompts_per_step),
        journal=journal(config.run, fingerprint(config)),
        routes=None if spec is None else RouteRules(spec, config.router_replay),
        masks=mask_rules(config.rollout),
        sft=config.sft if config.sft.train else None,
        teachers=teacher_sources(config.distillation),
    )


def mask_rules(rollout: RolloutConfig) -> MaskRules | None:
    """Return the rules for the sampling masks of rows; None for a run without masks."""
    required = not rollout.endpoint.own_sampling
    return MaskRules(rollout.mask_limit, required, rollout.top_k) if rollout.masked else None


def teacher_sources(distillation: DistillationConfig) -> TeacherSources | None:
    """Return the data sources with teachers of their own; None if no source has."""
    sources = distillation.sources
    return TeacherSources(sources, distillation.covers_all) if sources else None


def sampling(rollout: RolloutConfig, *, n: int, seed: int) -> SamplingParams:
    """Return the sampling parameters of training rollouts. n: number of samples of each prompt."""
    return SamplingParams(
        n=n,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        mask_limit=rollout.mask_limit if rollout.masked else 0,
        seed=seed,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )


def sample_file(samples: SamplesConfig, run: RunConfig, prompts_per_step: int) -> SampleFile | None:
    """Return the settings of samples.jsonl, the run's file of readable episodes. None for a run without the file: it
    has no folder, its `samples.every` is 0, or it trains on recorded groups, which lack texts."""
    if not samples.every or run.dir is None or run.replay:
        return None
    return SampleFile(os.path.join(run.dir, "samples.jsonl"), samples, prompts_per_step)


# ---------------- These functions set up the journal.


def journal(run: RunConfig, settings: str) -> JournalConfig | None:
    """Return the settings of the journal, the files of finished groups that rollout actors write or read. None for a
    run without a journal. settings: the run's `fingerprint`."""
    if not run.keeps_journal:
        return None
    folder = os.path.join(run.replay or run.dir or ".", "journal")
    purpose = "replay" if run.replay else "record" if run.record else "resume"
    return JournalConfig(folder, settings, purpose=purpose)


_FIRST_DATA = ("split", "prompt_field", "answer_field", "template", "options")
_LATER_DATA = (
    "subset", "answer_pattern", "chat_template", "chat_template_kwargs", "system_prompt", "overlong_prompts", "mixture",
    "columns", "success_field", "success_range", "curriculum",
)  # fmt: skip
_LATER_MODEL = ("adapter", "attention", "renderer", "renderer_options")
_LATER_REWARD = ("per", "runs", "timeout_s", "retries")
"""Keys of section `reward` that are newer than the first journals. The fingerprint contains them only if they differ
from their defaults."""

_RECOVERY = {"recover", "recover_tokens"}
"""Keys of section `environment` that do not change what a group is."""


def fingerprint(config: Config) -> str:
    """Return a JSON text with all settings that determine what the rollouts generate.

    The text is stored in the journals of earlier runs, so it must never change for a given configuration.
    """
    rollout, data, reward, seed = config.rollout, config.data, config.reward, config.run.seed
    read = _without_defaults(data, _LATER_DATA)
    read = {key: read[key] for key in (*_FIRST_DATA, *_LATER_DATA) if key in read}
    if data.overlong_prompts == "drop":
        read["max_prompt_tokens"] = data.max_prompt_tokens
    model = _without_defaults(config.model, _LATER_MODEL)
    if config.model.dtype == "auto":
        model["dtype"] = "float32"  # This was the default when the first journals were written.
    sampled = asdict(sampling(rollout, n=config.algorithm.group_size, seed=seed))
    for varies_by_request in ("routes_from", "continues", "adapter", "schema", "pictures", "own_places"):
        del sampled[varies_by_request]
    for later in ("min_p", "mask_limit"):
        if not sampled[later]:
            del sampled[later]
    decisive = {
        "seed": seed,
        "model": model,
        "warmup": config.warmup.model_dump(),
        "data": {**read, "source": data.train, "seed": seed, "held_out": False},
        "sampling": sampled,
        **_environment(config.environment),
        "rewards": [
            # Rows without the values of single rewards, of earlier versions, have no place beside those with them.
            {**_without_defaults(term, _LATER_REWARD), "name": term.label, "tagged": True}
            for term in reward.functions
        ],
    }
    if data.images.enabled:
        decisive["images"] = data.images.model_dump(exclude={"enabled", "allow_urls", "workers", "cache_mib"})
    if reward.scale != 1.0 or reward.clip is not None:
        decisive["reward"] = [reward.scale, reward.clip]
    if config.router_replay.enabled:
        decisive["routes"] = config.router_replay.model_dump(include={"missing", "max_missing_share"})
    if config.algorithm.mask_truncated:
        decisive["mask_truncated"] = True
    if config.distillation.sources:
        decisive["teacher_sources"] = config.distillation.sources
    if config.sync.keeps_old_kv:
        decisive["keeps_old_kv"] = True
    if config.run.bitwise:  # Groups of other runs have other log-probs, which would end this one.
        decisive["bitwise"] = True
    return json.dumps(decisive, sort_keys=True, default=str)


def _environment(environment: EnvironmentConfig) -> dict[str, Any]:
    """Return the settings of the environment in the form of the first journals. At that time, the kind of the
    environment, its tools and its turns were keys of section `rollout`.
    """
    played: list[Any] = ["single_turn", ["calculator"], 4]
    own = _as_in_first_journals(environment)
    defaults = {**_as_in_first_journals(EnvironmentConfig()), "kind": None}
    if environment.kind == "tool_use" and list(environment.options) == ["tools", "max_turns"]:
        played, own["options"], own["kind"] = [environment.kind, *environment.options.values()], {}, None
    elif environment.kind == "single_turn":
        own["kind"] = None
    return {"environment": played} | ({} if own == defaults else {"own_environment": own})


def _as_in_first_journals(environment: EnvironmentConfig) -> dict[str, Any]:
    """Return the section `environment` with the former key `on_timeout`, and without newer keys at their defaults."""
    later = ("on_failure", "retries")
    own = {key: value for key, value in _without_defaults(environment, later).items() if key not in _RECOVERY}
    partial = environment.on_failure.limit == "partial"
    if environment.on_failure == OnFailure(limit="partial"):
        del own["on_failure"]
    return {**own, "on_timeout": "partial" if partial else "fail"}


def _without_defaults(section: Section, later: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of a section, without the keys in `later` that have their default values."""
    keys, fields = section.model_dump(), type(section).model_fields
    return {
        key: value for key, value in keys.items() if key not in later or getattr(section, key) != fields[key].default
    }


# ---------------- The evaluations of a run are planned here.

VALIDATION = "validation"
"""Name of the evaluation that the section `validation` describes."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """One evaluation of a run: its prompts, its sampling and its schedule."""

    setup: EvaluationSetup
    """Settings from which rollout actors prepare the evaluation."""
    sampling: SamplingParams
    every: int
    """Number of steps between two evaluations; 0 turns the evaluation off."""
    awaited: Literal["at_once", "before_update", "never"]
    """Moment at which the run waits for the end of the evaluation. `at_once` is directly after its start,
    `before_update` is before the next update of the weights, and `never` is only at the end of the run."""
    in_flight: int
    """Largest number of prompts that each rollout actor works on at a time; 0 means no limit."""

    @property
    def name(self) -> str:
        return self.setup.name


@dataclass(frozen=True, slots=True)
class EvaluationDefaults:
    """Settings of training that an evaluation uses where it sets none itself."""

    rollout: RolloutConfig
    data: DataConfig
    reward: RewardConfig
    seed: int


def evaluation_plans(
    training: EvaluationDefaults,
    validation: ValidationConfig | None,
    evaluation: Mapping[str, EvaluationConfig],
    *,
    idle: bool = False,
) -> tuple[EvaluationPlan, ...]:
    """Return the evaluations that a run makes. Validation comes first, and then the named sets.

    validation: None leaves validation out. idle: whether to include evaluations that are turned off (`every` is 0).
    """
    plans = [] if validation is None else [_validation(validation, training)]
    plans += [_named(name, one, training) for name, one in evaluation.items()]
    return tuple(plan for plan in plans if plan.every or idle)


def _validation(validation: ValidationConfig, training: EvaluationDefaults) -> EvaluationPlan:
    greedy = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} if validation.temperature == 0 else {}
    setup = EvaluationSetup(
        name=VALIDATION,
        prefix=VALIDATION_PREFIX,
        data=training.data,
        num_prompts=validation.num_prompts,
        reward=training.reward,
        correct=None,
    )
    awaited = "before_update" if validation.background else "at_once"
    return EvaluationPlan(setup, _sampling(validation, training, **greedy), validation.every, awaited, 0)


def _sampling(one: ValidationConfig | EvaluationConfig, training: EvaluationDefaults, **own: Any) -> SamplingParams:
    usual = sampling(training.rollout, n=one.n, seed=training.seed)
    longest = one.max_new_tokens or usual.max_new_tokens
    return replace(usual, max_new_tokens=longest, temperature=one.temperature, mask_limit=0, **own)


def _named(name: str, one: EvaluationConfig, training: EvaluationDefaults) -> EvaluationPlan:
    reward = one.reward or training.reward
    setup = EvaluationSetup(
        name=f"evaluation.{name}",
        prefix=f"eval/{name}",
        data=evaluation_data(training.data, one.data),
        num_prompts=one.num_prompts,
        reward=reward,
        correct=one.correct or reward.functions[0].label,
    )
    awaited, in_flight = ("never", one.in_flight) if one.background else ("at_once", 0)
    sampled = _sampling(one, training, top_p=one.top_p, top_k=one.top_k, min_p=0.0)
    return EvaluationPlan(setup, sampled, one.every, awaited, in_flight)
