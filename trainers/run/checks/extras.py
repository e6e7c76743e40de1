"""Checks before a run starts that the optional packages for it are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Sequence

from ....actors.rewards.config import RewardConfig
from ....actors.rollout.config import RolloutConfig
from ....actors.rollout.data_config import is_generated
from ....dataplane.imports import MissingExtra
from ...config.config import LoggingConfig
from ...errors import ConfigError
from ...observe.trackers import wanted_trackers

Sources = Sequence[tuple[str, str | None]]
"""Key and value of each setting that names a source of prompts."""
Need = tuple[str, str, str]
"""An optional package, what uses it, and the extra that installs it."""


def check_extras(
    logging: LoggingConfig,
    rollout: RolloutConfig,
    sources: Sources,
    rubrics: Iterable[RewardConfig],
    *,
    renderer: str,
    store: str,
) -> None:
    """Raise ConfigError if optional packages are missing. Its sentences name the extra of each package. sources: see
    `Config.sources`. renderer, store: kinds of the model's renderer and of the data plane's store."""
    needs = packages_of_actors(rollout, sources, rubrics, renderer=renderer, store=store)
    _expect_installed([*_tracker_packages(logging), *needs])


def packages_of_actors(
    rollout: RolloutConfig, sources: Sources, rubrics: Iterable[RewardConfig], *, renderer: str, store: str
) -> list[Need]:
    """Return each optional package that the actors of a run use. sources: see `Config.sources`. renderer, store: kinds
    of the model's renderer and of the data plane's store.

    Packages of engines and backends are not included, because engines and backends check them in the first seconds of
    the run.
    """
    needs = _rollout_packages(rollout, renderer=renderer, store=store)
    return [*needs, *_prompt_packages(sources), *_reward_packages(rubrics)]


def check_evaluation_extras(sources: Sources, rubrics: Iterable[RewardConfig]) -> None:
    """Raise ConfigError as `check_extras` does, but only for packages that prompts and rewards need. sources: see
    `Config.sources`."""
    _expect_installed([*_prompt_packages(sources), *_reward_packages(rubrics)])


def _expect_installed(needs: Iterable[Need]) -> None:
    missing = [need for need in needs if importlib.util.find_spec(need[0]) is None]
    if missing:
        raise ConfigError([str(MissingExtra(*need)) for need in missing])


def _tracker_packages(logging: LoggingConfig) -> Iterator[Need]:
    for tracker in wanted_trackers(logging):
        if tracker.kind == "tensorboard":
            yield "tensorboard", "logging.tensorboard=true", "report"
        else:
            yield tracker.kind, f"the tracker {tracker.kind}", "trackers"


def _rollout_packages(rollout: RolloutConfig, *, renderer: str, store: str) -> Iterator[Need]:
    if rollout.endpoint.enabled:
        for package in ("starlette", "uvicorn", "openai"):
            yield package, "rollout.endpoint.enabled=true", "endpoint"
    if renderer != "template":
        yield "renderers", f"model.renderer={renderer}", "endpoint"
    if store == "simple":
        yield "transfer_queue", "dataplane.store.kind=simple", "transferqueue"


def _prompt_packages(sources: Sources) -> Iterator[Need]:
    for key, source in sources:
        if source and source.startswith("reasoning-gym:"):
            yield "reasoning_gym", f"{key}={source}", "reasoning-gym"
        elif source and not is_generated(source) and not source.endswith(".jsonl"):
            yield "datasets", f"{key}={source}", "datasets"


def _reward_packages(rubrics: Iterable[RewardConfig]) -> Iterator[Need]:
    if any(function.kind == "math_verify" for rubric in rubrics for function in rubric.functions):
        yield "math_verify", "the reward math_verify", "math"
