"""Derives the settings of a run's teachers: those that train workers need, and those of the teachers' engines."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from ...actors.engine_actor import EngineSetup
from ...actors.engines.factory import EngineConfig
from ...actors.train.teachers import TeacherSetup
from ..backends.config import BackendConfig
from ..backends.factory import build_backend
from ..config.config import Config
from ..losses.distillation_config import DistillationConfig
from .engine_specs import engine_log, threads


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


def teacher_engine(config: Config, teacher: str, name: str, device: str, *, shared_gpu: bool) -> EngineSetup:
    """Return the settings of the actor `name` with the engine of `teacher`. Its weights never change. shared_gpu:
    whether train workers use the engine's GPUs at the same time."""
    own = config.distillation
    [model] = [one.model for label, one in zip(own.names, own.teachers, strict=True) if label == teacher]
    rollout, longest = config.rollout, config.engine_length
    if rollout.engine == "vllm":  # It limits the log-probs of a request, and generates a token after the prompt.
        options = {"max_logprobs": max(own.top_k, 20), **rollout.vllm}
        rollout, longest = rollout.model_copy(update={"vllm": options}), longest + 1
    engine = EngineConfig(
        rollout,
        config.model.model_copy(update={"path": model, "adapter": None}),
        config.scripted,
        device=device,
        shared_gpu=shared_gpu,
        max_model_len=longest,
        log=engine_log(config.run.dir, name),
        seed=config.run.seed,
    )
    return EngineSetup(name, threads(config.resources.threads, config.processes_per_side, device), engine)
