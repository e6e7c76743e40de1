"""Checks, before a run starts, that the optional packages that it will use are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from ...actors.rollout.config import is_generated
from ...codecs.imports import MissingExtra
from ..config.config import Config
from ..errors import ConfigError


def check_extras(config: Config) -> None:
    """Raise ConfigError if optional packages are missing, with one sentence for each that names the extra that installs
    it."""
    missing = [need for need in _needs(config) if importlib.util.find_spec(need[0]) is None]
    if missing:
        raise ConfigError([str(MissingExtra(*need)) for need in missing])


def _needs(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield each optional package that the run uses, as (package, what uses it, extra that installs it).

    Packages of engines and backends are not among them: these check for their packages themselves, within the first
    seconds of the run.
    """
    yield "matplotlib", "report.html, which every run ends with,", "report"
    if config.logging.tensorboard:
        yield "tensorboard", "logging.tensorboard=true", "report"
    for key, source in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if source and source.startswith("reasoning-gym:"):
            yield "reasoning_gym", f"{key}={source}", "reasoning-gym"
        elif source and not is_generated(source) and not source.endswith(".jsonl"):
            yield "datasets", f"{key}={source}", "datasets"
    if config.rollout.endpoint.enabled:
        for package in ("starlette", "uvicorn", "openai"):
            yield package, "rollout.endpoint.enabled=true", "endpoint"
    if config.model.renderer != "template":
        yield "renderers", f"model.renderer={config.model.renderer}", "endpoint"
    if config.dataplane.store.kind == "simple":
        yield "transfer_queue", "dataplane.store.kind=simple", "transferqueue"
