"""Checks, before a run starts, that the optional packages that it will use are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator

from ....actors.rollout.config import is_generated
from ....dataplane.imports import MissingExtra
from ...config.config import Config
from ...errors import ConfigError
from ...observe.trackers import wanted_trackers


def check_extras(config: Config) -> None:
    """Raise ConfigError if optional packages are missing, with one sentence for each that names its extra."""
    _expect_installed([*_run_packages(config), *_evaluation_packages(config)])


def check_evaluation_extras(config: Config) -> None:
    """Raise ConfigError as `check_extras` does, but only for packages that prompts and rewards need."""
    _expect_installed(_evaluation_packages(config))


def _expect_installed(needs: Iterable[tuple[str, str, str]]) -> None:
    missing = [need for need in needs if importlib.util.find_spec(need[0]) is None]
    if missing:
        raise ConfigError([str(MissingExtra(*need)) for need in missing])


def _run_packages(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield each optional package that the run uses, as (package, what uses it, extra that installs it).

    Packages of engines and backends are not among them: these check for their packages themselves, within the first
    seconds of the run.
    """
    yield "matplotlib", "report.html, which every run ends with,", "report"
    for tracker in wanted_trackers(config.logging):
        if tracker.kind == "tensorboard":
            yield "tensorboard", "logging.tensorboard=true", "report"
        else:
            yield tracker.kind, f"the tracker {tracker.kind}", "trackers"
    if config.rollout.endpoint.enabled:
        for package in ("starlette", "uvicorn", "openai"):
            yield package, "rollout.endpoint.enabled=true", "endpoint"
    if config.model.renderer != "template":
        yield "renderers", f"model.renderer={config.model.renderer}", "endpoint"
    if config.dataplane.store.kind == "simple":
        yield "transfer_queue", "dataplane.store.kind=simple", "transferqueue"


def _evaluation_packages(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield each optional package that the prompts and rewards of the configuration use, as `_run_packages` does."""
    for key, source in config.sources:
        if source and source.startswith("reasoning-gym:"):
            yield "reasoning_gym", f"{key}={source}", "reasoning-gym"
        elif source and not is_generated(source) and not source.endswith(".jsonl"):
            yield "datasets", f"{key}={source}", "datasets"
    rewards = [config.reward, *(one.reward for one in config.evaluation.values() if one.reward)]
    if any(function.kind == "math_verify" for reward in rewards for function in reward.functions):
        yield "math_verify", "the reward math_verify", "math"
