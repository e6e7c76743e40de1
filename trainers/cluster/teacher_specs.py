"""Derives the settings of a run's teachers: those that train workers need, and those of the teachers' engines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from ...actors.engines.factory import EngineConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.train.teachers import TeacherSetup
from ..backends.config import BackendConfig
from ..backends.factory import build_backend
from ..losses.distillation_config import DistillationConfig


def teacher_setups(config: DistillationConfig, backend: BackendConfig, *, offload: bool) -> tuple[TeacherSetup, ...]:
    """Return the settings of all teachers for a train worker. backend: settings of the policy's backend. offload: see
    `BackendConfig.frozen`."""
    builders = [
        None if one.where == "engine" else partial(build_backend, backend.frozen(one.model, offload=offload))
        for one in config.teachers
    ]
    sources = [None if one.data_source is None else config.sources.index(one.data_source) for one in config.teachers]
    return tuple(
        TeacherSetup(name, one.weight, source, cast(Any, builder))
        for name, one, source, builder in zip(config.names, config.teachers, sources, builders, strict=True)
    )


def teacher_engine(policy: EngineConfig, model: str, rollout: RolloutConfig, top_k: int) -> EngineConfig:
    """Return the settings of a teacher's engine, whose weights never change. policy: settings of an engine of the
    policy in the same actor. model: the teacher's folder or hub id. rollout: section with the kind of the engine, which
    differs from that of `policy` in a replay."""
    longest = policy.max_model_len
    if rollout.engine == "vllm":  # It limits the log-probs of a request, and generates a token after the prompt.
        rollout = rollout.model_copy(update={"vllm": {"max_logprobs": max(top_k, 20), **rollout.vllm}})
        longest = None if longest is None else longest + 1
    return replace(
        policy,
        rollout=rollout,
        model=policy.model.model_copy(update={"path": model, "adapter": None}),
        max_model_len=longest,
        version=0,
        receiver=None,
        adapters=None,
        routes=None,
    )
