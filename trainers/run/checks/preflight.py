"""Checks a run before its actors are built, from its configuration, its files and this machine."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from ....actors.engines.config import ModelConfig
from ....actors.engines.vllm.options import check_cache, problems_in_child, token_bytes
from ....actors.process.memory import assumed_machine, total_memory
from ....actors.rollout.config import RolloutConfig
from ....dataplane.config import DataPlaneConfig
from ....dataplane.imports import MissingExtra
from ....dataplane.owned_folder import try_lock
from ....dataplane.store_choice import check_store, check_trust
from ...backends.config import TrainerConfig
from ...base_model.prepare import check_model, model_config
from ...cluster.gpu_memory import (
    cached_bytes,
    engine_bytes,
    has_gpus,
    parameters,
    teacher_bytes,
    trained_bytes,
)
from ...cluster.places.placement_plan import PlacementRequest
from ...cluster.rollout_specs import EvaluationDefaults, evaluation_plans
from ...config.checks import contradictions
from ...config.config import Config, RunConfig, with_run_dir
from ...config.load import missing_paths
from ...errors import ConfigError
from ...observe.run_folder import has_figures
from .dry_run import check_host_memory, plan_here
from .extras import check_evaluation_extras, check_extras
from .other_models import check_other_models
from .prompts import PromptsRead, plan_epochs, read_examples, read_prompts
from .ray_to_join import check_interface, check_ray_address, check_sockets
from .user_functions import Check, check_sampler, checks_of_functions


def check_start(
    config: Config, *, resume: bool = False, part: Literal["all", "quick", "prompts", "code"] = "all"
) -> PromptsRead:
    """Check whether the run that `config` describes can work, without starting anything or leaving files. Raises
    ConfigError with one sentence for each reason why it cannot.

    Returns what is known about the prompts; `left` has a line for each check that only the run itself can make, for
    example because the model is not on this machine yet. config: must have `run.dir` set, see `with_run_dir`. part:
    `quick` leaves out the tokenizer and the prompts, which take seconds to read, if everything else is right. If
    another check fails, it reads them too, so that the ConfigError lists all mistakes. `prompts` checks only the
    tokenizer and the prompts, `code` these and the user's functions.
    """
    absent = missing_paths(config.model.path, config.sources)
    read = PromptsRead()

    def prompts() -> list[str]:
        if config.sft.train:
            read_examples(read, config.model, config.sft, config.algorithm, absent, config.data.images)
            if read.problems:
                raise ConfigError(read.problems)
            return read.left
        training = EvaluationDefaults(config.rollout, config.data, config.reward, config.run.seed)
        plans = evaluation_plans(training, config.validation, config.evaluation)
        read_prompts(
            read, config.model, config.rollout, config.data, plans, absent,
            environment=config.environment.kind, seed=config.run.seed,
        )  # fmt: skip
        plan_epochs(read, config.data, config.algorithm)
        if read.problems:
            raise ConfigError(read.problems)
        return read.left

    if part in ("all", "quick"):
        checks = _quick_checks(config, resume)
    elif part == "code":
        checks = checks_of_functions(config.rubrics, config.environment, config.loss, config.data, config.rollout)
    else:
        checks = []
    store, rubrics = config.dataplane.store.kind, config.rubrics.values()
    extras = partial(check_extras, renderer=config.model.renderer, store=store)
    others = partial(check_other_models, config.model, config.other_models, config.longest_row[1])
    first: list[Check] = [
        lambda: _refuse(absent.values()),
        lambda: extras(config.logging, config.rollout, config.sources, rubrics),
    ]
    read.left = _check([*first, *checks], prompts) if part == "quick" else _check([*first, *checks, others, prompts])
    return read


def with_later_problems(error: ConfigError, *, resume: bool) -> ConfigError:
    """Return an error with the mistakes of `error`, which the loader found, and those of a start. If values do not fit
    each other, only the user's functions and prompts are checked, because the other checks rely on values that do."""
    if error.config is None:
        return error
    try:
        check_start(with_run_dir(error.config), resume=resume, part="code" if contradictions(error.config) else "all")
    except ConfigError as more:
        return ConfigError(tuple(dict.fromkeys((*error.problems, *more.problems))))
    return error


def _refuse(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise ConfigError(problems)


def check_evaluation(config: Config) -> None:
    """Check the requirements of evaluating a model without training. They are the model, the rewards and the optional
    packages. Raises ConfigError with one sentence for each mistake."""
    _check(
        [
            lambda: check_evaluation_extras(config.sources, config.rubrics.values()),
            lambda: check_model(config),
            *checks_of_functions(config.rubrics, config.environment, config.loss, config.data, config.rollout),
        ]
    )


def _quick_checks(config: Config, resume: bool) -> list[Check]:
    resources, rollout = config.resources, config.rollout
    return [
        lambda: _check_run_dir(config.run, resume=resume),
        lambda: _check_pool(config.pool.engines, config.pool.address),
        lambda: check_model(config),
        lambda: _check_kv_cache(rollout, config.model, config.engine_length),
        lambda: _check_engine_arguments(rollout),
        *checks_of_functions(config.rubrics, config.environment, config.loss, config.data, config.rollout),
        lambda: check_sampler(config.resolved_sampler, config.algorithm, config.dataplane),
        lambda: check_ray_address(resources.ray_address, trusted_network=config.dataplane.trusted_network),
        lambda: check_interface(resources),
        lambda: check_sockets(resources.ray_address, rollout.engine),
        lambda: _check_store(config.dataplane, joins_ray=resources.ray_address is not None),
        lambda: plan_here(PlacementRequest.of(config), resources, config.sync) and None,
        partial(
            _check_memory,
            config.trainer,
            rollout,
            config.model,
            joins=resources.ray_address is not None,
            with_reference=config.with_reference,
            teachers=teacher_bytes(config.trainer, config.distillation),
        ),
    ]


def _check(checks: Sequence[Check], otherwise: Check | None = None) -> list[str]:
    """Run all checks, and also `otherwise` if one of them fails. Returns the lines of the checks."""
    problems: list[str] = []
    left: list[str] = []

    def run(check: Check) -> None:
        try:
            left.extend(check() or [])
        except ConfigError as error:
            problems.extend(error.problems)
        except MissingExtra as error:
            if not any(f"needs {error.parts[0]}, " in problem for problem in problems):
                problems.append(str(error))
        except ValueError as error:
            problems.append(str(error))

    for check in checks:
        run(check)
    if problems and otherwise is not None:
        run(otherwise)
    if problems:
        raise ConfigError(problems)
    return left


def _check_pool(engines: str, address: str | None) -> None:
    """A file for `headrace pool start --engines` need not name the pool, but a run must."""
    if engines == "shared" and address is None:
        raise ValueError(
            "pool.engines: got 'shared' with pool.address=None, expected pool.address set, because the engines are "
            "those of a pool"
        )


def _check_run_dir(run: RunConfig, *, resume: bool) -> None:
    assert run.dir is not None, "with_run_dir sets it"
    path = Path(run.dir)
    if resume:
        if not has_figures(path):
            raise ValueError(f"run.dir: {path} holds no run to resume, expected the folder of an earlier run")
    elif has_figures(path):
        raise ValueError(f"run.dir: {path} already holds a run, expected a new folder (or --resume to continue it)")
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".headrace-"):
            lock = path / "run.lock"
            descriptor = try_lock(lock) if lock.exists() else -1
    except OSError as error:
        raise ValueError(
            f"run.dir: {path} cannot be created ({error.strerror}), expected a folder to write in"
        ) from error
    if descriptor is None:
        holder = lock.read_text().strip() or "unknown"
        raise ValueError(f"run.dir: a run is under way in {path} (pid {holder}), expected a separate folder")
    if descriptor >= 0:
        os.close(descriptor)


# ---------------- These functions check the settings of engines.


def _check_kv_cache(rollout: RolloutConfig, model: ModelConfig, longest: int) -> None:
    """Raise ValueError if `rollout.kv_cache` is too small for one sequence of `longest` tokens. If the model's config
    is not on this machine, only the engine checks it."""
    if rollout.engine != "vllm" or rollout.kv_cache == "auto" or "kv_cache_dtype" in rollout.vllm:
        return
    per_token = token_bytes(model_config(model), value_bytes=cached_bytes(rollout, model), tp=rollout.tp)
    check_cache(rollout.kv_cache << 20, per_token, longest)


def _check_engine_arguments(rollout: RolloutConfig) -> None:
    """Check `rollout.vllm` against the arguments of the vLLM that is installed here, in a separate process."""
    if rollout.engine != "vllm" or not rollout.vllm:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            ["rollout.vllm: vLLM is not installed here, expected it: `make vllm` on a CPU, the extra `vllm` for GPUs"]
        )
    if problems := problems_in_child(rollout.vllm):
        raise ConfigError(problems)


# ---------------- These functions check the machine.


def _check_store(plane: DataPlaneConfig, *, joins_ray: bool) -> None:
    if not joins_ray:
        check_store(plane)
    else:  # The number of hosts of the joined cluster is not known yet.
        check_trust(plane, plane.store.kind, one_host=True)


def _check_memory(
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    model: ModelConfig,
    *,
    joins: bool,
    with_reference: bool,
    teachers: int,
) -> None:
    """Check that the model fits into this machine's memory. A no-op for an assumed machine, for a Ray cluster to join
    and for a model of unknown size. Without GPUs, raises ValueError if the weights, gradients and optimizer state of
    all train workers and engines exceed the memory. With GPUs, raises UserError if the train workers' share of host
    memory exceeds it. joins: whether the run joins a Ray cluster. teachers: bytes of the teachers in a train worker."""
    params = parameters(model)
    if assumed_machine() is not None or params is None or joins:
        return
    if has_gpus():
        check_host_memory(trainer, params, total_memory(), model=model.path, with_reference=with_reference)
        return
    world, engines = trainer.topology.world, rollout.num_engines
    worker = trained_bytes(trainer, params, with_reference=with_reference) if trainer.backend != "scripted" else 0
    worker += teachers
    engine = engine_bytes(rollout, model, params) * rollout.tp if rollout.engine != "scripted" else 0
    needed, total = worker * world + engine * engines, total_memory()
    if needed > total:
        raise ValueError(
            f"model.path: got {model.path!r} with {params:,} parameters, but this machine has "
            f"{total / 2**30:.1f} GiB of memory and no GPU; expected at least {needed / 2**30:.1f} GiB, for {world} "
            f"train worker(s) of {worker / 2**30:.1f} GiB and {engines} engine(s) of {engine / 2**30:.1f} GiB"
        )
