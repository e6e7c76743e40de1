"""Checks a run before its actors are built, as far as its configuration, its files and this machine allow."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ....actors.engines.key_value_memory import check_cache, token_bytes
from ....actors.engines.vllm.options import problems_in_child
from ....actors.environments.factory import check_environment, kind_of
from ....actors.process.host_memory import total_memory
from ....actors.process.memory import assumed_machine
from ....actors.protocols import PromptRow, PromptSource
from ....actors.rewards.factory import check_rewards
from ....actors.rollout.config import is_generated
from ....dataplane.directory.rank_samplers import RankShares
from ....dataplane.directory.sampler_factory import FOR_RANKS, build_sampler
from ....dataplane.factory import check_store
from ....dataplane.owned_folder import try_lock
from ....dataplane.security.trusted_network import check_trust
from ...base_model.prepare import check_model, model_config
from ...cluster import actor_specs
from ...cluster.evaluation_plans import evaluation_plans
from ...cluster.gpu_memory import engine_bytes, has_gpus, parameters, trained_bytes, value_bytes
from ...config.config import Config
from ...errors import ConfigError
from ...observe.run_folder import has_figures
from .dry_run import check_host_memory
from .extras import check_evaluation_extras, check_extras
from .gpu_table import plan_here

READ_PROMPTS = 10_000
"""Largest number of prompts in a source that is read to check their lengths. Reading that many takes about 4 seconds
for prompts of 200 tokens."""
Check = Callable[[Config], list[str] | None]
"""Function that raises ValueError or ConfigError if a run cannot work, and returns what only the run itself can
check."""
CONNECT_TIMEOUT_S = 5.0
"""Seconds within which the cluster at `resources.ray_address` must accept a connection."""


def check_quickly(config: Config, *, resume: bool = False) -> None:
    """Check what `check_start` checks, but for the prompts, which take seconds to read. If something is wrong, the
    prompts are checked, too, so that the ConfigError has all mistakes. The caller must then call `check_prompts`."""
    _check(config, _quick_checks(resume), otherwise=(_check_prompts,))


def check_prompts(config: Config) -> None:
    """Check the tokenizer and the prompts of a run that `check_quickly` has found in order. Raises ConfigError as
    `check_start` does."""
    _check(config, [_check_prompts])


def check_start(config: Config, *, resume: bool = False) -> list[str]:
    """Check whether the run that `config` describes can work, without starting anything or leaving files. Raises
    ConfigError with one sentence for each reason why it cannot.

    Returns one line for each check that only the run itself can make, for example because the model is not on this
    machine yet. config: must have `run.dir` set, see `with_run_dir`.
    """
    return _check(config, [*_quick_checks(resume), _check_prompts])


def check_evaluation(config: Config) -> None:
    """Check what the evaluation of a model without a training run needs: the model, the rewards, and the packages for
    these and for the prompts. Raises ConfigError with one sentence for each mistake."""
    _check(config, [check_model, _check_rewards, _check_environment], extras=check_evaluation_extras)


def _quick_checks(resume: bool) -> list[Check]:
    return [
        lambda config: _check_run_dir(config, resume=resume),
        check_model,
        _check_kv_cache,
        _check_engine_arguments,
        _check_rewards,
        _check_environment,
        _check_loss,
        _check_sampler,
        _check_ray_address,
        _check_store,
        _check_gpus,
        _check_memory,
    ]


def _check(
    config: Config,
    checks: Sequence[Check],
    otherwise: Sequence[Check] = (),
    extras: Callable[[Config], None] = check_extras,
) -> list[str]:
    """Run all checks, and `otherwise` as well if one of them fails. Returns the lines that the checks return. extras:
    check of the optional packages, which comes first."""
    extras(config)
    problems: list[str] = []
    left: list[str] = []
    for check in (*checks, *otherwise):
        if check in otherwise and not problems:
            break
        try:
            left += check(config) or []
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return left


# ---------------------------------------------------------------- the run folder


def _check_run_dir(config: Config, *, resume: bool) -> None:
    assert config.run.dir is not None, "with_run_dir sets it"
    path = Path(config.run.dir)
    if resume:
        if not has_figures(path):
            raise ValueError(f"run.dir: {path} holds no run to resume, expected the folder of an earlier run")
    elif has_figures(path):
        raise ValueError(f"run.dir: {path} already holds a run, expected a new folder (or --resume to go on with it)")
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".headrace-"):
            lock = path / "run.lock"
            descriptor = try_lock(lock) if lock.exists() else -1
    except OSError as error:
        raise ValueError(f"run.dir: {path} cannot be made ({error.strerror}), expected a folder to write in") from error
    if descriptor is None:
        holder = lock.read_text().strip() or "unknown"
        raise ValueError(f"run.dir: a run is under way in {path} (pid {holder}), expected a folder of its own")
    if descriptor >= 0:
        os.close(descriptor)


# ---------------------------------------------------------------- the user's code


def _check_rewards(config: Config) -> None:
    check_rewards(config.reward.functions)
    for name, one in config.evaluation.items():
        try:
            check_rewards(one.reward.functions if one.reward else ())
        except ValueError as error:
            raise ValueError(f"evaluation.{name}: {error}") from error


def _check_kv_cache(config: Config) -> None:
    """Raise ValueError if `rollout.kv_cache` is too small for one sequence. If the model's config is not on this
    machine, only the engine checks it."""
    rollout = config.rollout
    if rollout.engine != "vllm" or rollout.kv_cache == "auto" or "kv_cache_dtype" in rollout.vllm:
        return
    per_token = token_bytes(model_config(config), value_bytes=value_bytes(config), tp=rollout.tp)
    check_cache(rollout.kv_cache << 20, per_token, config.engine_length)


def _check_engine_arguments(config: Config) -> None:
    """Check `rollout.vllm` against the arguments of the vLLM that is installed here, in a process of its own."""
    if config.rollout.engine != "vllm" or not config.rollout.vllm:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            ["rollout.vllm: vLLM is not installed here, expected it: `make vllm` on a CPU, the extra `vllm` for GPUs"]
        )
    if problems := problems_in_child(config.rollout.vllm):
        raise ConfigError(problems)


def _check_loss(config: Config) -> None:
    """Try a loss of the user's own on made-up rows, and check the names of the columns that it reads."""
    if ":" in config.loss.kind:
        from ....actors.protocols import row_schema  # imports torch; mistakes in a configuration are told without it
        from ...cluster.actor_specs import backend_config
        from ...losses.factory import build_loss

        row_schema(None, config.data.columns)
        build_loss(backend_config(config, config.model.path).loss, config.data.columns)


def _check_environment(config: Config) -> None:
    check_environment(config.environment, config.rollout)


def _check_sampler(config: Config) -> None:
    task = actor_specs.task(config, 0, ())
    try:
        if task.sampler in FOR_RANKS:
            needed = RankShares.arguments
        else:
            needed = build_sampler(task, actor_specs.data_plane(config).samplers).arguments
    except ValueError as error:
        raise ValueError(f"algorithm.sampler: {error}") from error
    if needed:
        raise ValueError(
            f"algorithm.sampler: got {task.sampler!r}, whose claims need the arguments {list(needed)}; expected a "
            "sampler without arguments, because the driver claims for all ranks together"
        )


# ---------------------------------------------------------------- the machine


def _check_ray_address(config: Config) -> None:
    """Raise ValueError when no connection to the cluster at `resources.ray_address` can be opened."""
    given = config.resources.ray_address
    if given is None or given == "local" or assumed_machine() is not None:
        return
    try:
        address = _cluster_address(given)
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError("it is not written HOST:PORT")
        with closing(socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"resources.ray_address: got {given!r}, expected the address of a Ray that can be reached ({why})"
        ) from error


def _cluster_address(given: str) -> str:
    """Return HOST:PORT of the Ray cluster at the address `given`. Raises OSError if `given` is `auto` and no cluster is
    found."""
    if given != "auto":
        return given.removeprefix("ray://")
    from ray._private.services import get_ray_address_from_environment  # imports Ray, and only this needs it

    return get_ray_address_from_environment(given, None)


def _check_store(config: Config) -> None:
    if config.resources.ray_address is None:
        check_store(config.dataplane)
    else:  # a cluster whose number of hosts is not known yet
        check_trust(config.dataplane, config.dataplane.store.kind, one_host=True)


def _check_gpus(config: Config) -> None:
    """Raise UserError if engines and train workers cannot be placed on this machine's GPUs. A no-op for a run that
    joins a Ray cluster."""
    plan_here(config)


def _check_memory(config: Config) -> None:
    """Check that the model fits into this machine's memory; a no-op for an assumed machine. Without GPUs, raises
    ValueError if the weights, gradients and optimizer state of all train workers and engines need more. With GPUs,
    raises UserError if the part that the train workers keep in host memory needs more."""
    params = parameters(config)
    if assumed_machine() is not None:
        return
    if params is not None:
        check_host_memory(config, params, total_memory())
    if params is None or config.resources.ray_address is not None or has_gpus():
        return
    world, engines = config.trainer.topology.world, config.rollout.num_engines
    worker = trained_bytes(config, params) if config.trainer.backend != "scripted" else 0
    engine = engine_bytes(config, params) * config.rollout.tp if config.rollout.engine != "scripted" else 0
    needed, total = worker * world + engine * engines, total_memory()
    if needed > total:
        raise ValueError(
            f"model.path: got {config.model.path!r} with {params:,} parameters, but this machine has "
            f"{total / 2**30:.1f} GiB of memory and no GPU; expected at least {needed / 2**30:.1f} GiB, for {world} "
            f"train worker(s) of {worker / 2**30:.1f} GiB and {engines} engine(s) of {engine / 2**30:.1f} GiB"
        )


# ---------------------------------------------------------------- tokenizer and prompts


def _check_prompts(config: Config) -> list[str]:
    """Read the prompts as the rollout actors will, to check tokenizer, columns, templates and lengths.

    Returns one line for each source that is not on this machine yet or is too large to be read in full now.
    """
    if not config.model.builtin and not _is_local(config.model.path) and not _model_is_cached(config.model.path):
        return [f"model.path: {config.model.path} is not on this machine, so neither are its tokenizer nor the prompts"]
    from ....actors.engines.tokenizer import load_tokenizer
    from ....actors.rollout.own_columns import check_columns
    from ....actors.rollout.prompts import check_prompt_lengths, open_source, without_overlong

    left = []
    with _one_tokenizer_thread():
        tokenizer = _builtin_tokenizer() if config.model.builtin else load_tokenizer(config.model.path)
        sets = [(plan.setup.data, True) for plan in evaluation_plans(config)]
        read = [(config.data, False), *sets]
        for data, validation in [(part, held) for whole, held in read for part in whole.parts(validation=held)]:
            name = data.source(validation=validation)
            if not _source_is_here(name):
                left.append(f"data: {name} is not on this machine, so its prompts are read when the run starts")
                continue
            source = open_source(data, tokenizer, seed=config.run.seed, validation=validation)
            if source.size is not None and source.size > READ_PROMPTS:
                left.append(f"data.max_prompt_tokens: only the first {READ_PROMPTS} of {source.size} prompts of {name}")
                source = _FirstPrompts(source, READ_PROMPTS)
            if not validation and kind_of(config.environment, config.rollout) in ("single_turn", "tool_use"):
                check_columns(source, data.columns)  # other environments may set them
            if data.overlong_prompts == "error" or source.size is None:
                check_prompt_lengths(source, tokenizer, data.max_prompt_tokens)
            elif not isinstance(source, _FirstPrompts):
                without_overlong(source, tokenizer, data.max_prompt_tokens)
    return left


class _FirstPrompts:
    """Prompt source that consists of the first `size` prompts of another source."""

    def __init__(self, source: PromptSource, size: int) -> None:
        self.name = source.name
        self.size: int | None = size
        self._source = source

    def row(self, index: int) -> PromptRow:
        return self._source.row(index)

    def texts(self, start: int, stop: int) -> list[str]:
        return [self.row(index).text for index in range(start, stop)]


def _builtin_tokenizer() -> Any:
    from ...base_model.warmup import make_tokenizer

    return make_tokenizer()


@contextmanager
def _one_tokenizer_thread() -> Iterator[None]:
    """Context manager that keeps tokenizers from starting threads. With threads, tokenizers would print a warning
    whenever this process later starts another one."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _is_local(path: str) -> bool:
    return Path(path).expanduser().is_dir() or path.startswith(("/", ".", "~")) or path.count("/") > 1


def _model_is_cached(repository: str) -> bool:
    """Return whether the Hugging Face cache on this machine has the config and the tokenizer of a model."""
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer_config.json")
    return all(isinstance(try_to_load_from_cache(repository, name), str) for name in files)


def _source_is_here(source: str) -> bool:
    """Return whether the prompts of `source` can be read without a download. They can if it is a generated task, a
    local file or folder, or a dataset in the Hugging Face cache."""
    if (
        is_generated(source)
        or source.startswith(("/", ".", "~"))
        or Path(source).expanduser().exists()
        or source.count("/") != 1
    ):
        return True
    if importlib.util.find_spec("datasets") is None:
        return False
    from datasets import config as datasets_config

    return (Path(datasets_config.HF_DATASETS_CACHE) / source.replace("/", "___")).is_dir()
