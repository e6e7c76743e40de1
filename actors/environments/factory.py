"""Builds the environment that a configuration names, and checks before a run that it can be built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from ...dataplane.imports import MissingExtra, import_object
from ..process.user_errors import made
from .config import ENVIRONMENT_KINDS, EndpointConfig, EnvironmentConfig
from .episode import Episode, generate_together
from .games import TextArena
from .host import EpisodeEndpoint, EpisodeHost
from .openenv import OpenEnv
from .tool_use import ToolUse
from .verifiers_process import VerifiersEnvironment


class SingleTurn:
    """Plays episodes of one turn: a sample is the prompt followed by one completion."""

    async def play_group(self, episodes: Sequence[Episode]) -> None:
        """Let the policy answer the prompt once in each of the episodes."""
        await generate_together(episodes)


def build_environment(config: EnvironmentConfig) -> Any:
    """Build the environment: an object with a coroutine `play` or `play_group`, or a coroutine function like `play`.

    Raises ValueError with a one-sentence message for a path that cannot be imported, options that do not fit, and
    objects that are not environments.
    """
    kind, options = config.kind, dict(config.options)
    target = _target(kind)
    plays = inspect.iscoroutinefunction(target)
    _check_options(kind, target, options, plays)
    if plays:
        return functools.partial(target, **options)
    environment = made(target, options, f"environment.kind: {kind!r}")
    if not any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in ("play", "play_group")):
        raise ValueError(
            f"environment.kind: {kind!r} made a {type(environment).__name__}, expected an object with a coroutine "
            "`async def play(self, episode)`"
        )
    return environment


def build_endpoint(config: EndpointConfig, *, adapters: bool = False) -> EpisodeEndpoint | None:
    """Build the endpoint through which agents call the policy; None if the run has no endpoint. adapters: whether the
    policy is an adapter. Raises MissingExtra if a package that it needs is not installed."""
    if not config.enabled:
        return None
    try:
        from .endpoint.server import EndpointServer
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "uvicorn", "rollout.endpoint.enabled=true", "endpoint") from None
    return EndpointServer(config, adapters=adapters)


def build_host(
    environment: Any, config: EnvironmentConfig, endpoint: EndpointConfig, *, adapters: bool = False, **services: Any
) -> EpisodeHost:
    """Build the host of an environment, with its endpoint. services: further arguments of `EpisodeHost`."""
    return EpisodeHost(environment, config, endpoint=build_endpoint(endpoint, adapters=adapters), **services)


def check_environment(config: EnvironmentConfig, endpoint: EndpointConfig) -> None:
    """Check the configured environment. A user's environment is not created, because it could start processes or load
    data.

    Raises ValueError with a one-sentence message for a path that cannot be imported or options that do not fit.
    """
    kind = config.kind
    if kind == "verifiers" and not endpoint.enabled:
        raise ValueError("rollout.endpoint.enabled: got false, expected true, because the environment is verifiers")
    if endpoint.enabled:
        build_endpoint(endpoint)
    if ":" not in kind:
        build_environment(config)
        return
    target = _target(kind)
    _check_options(kind, target, dict(config.options), inspect.iscoroutinefunction(target))
    recovery_mode(config)
    if inspect.isclass(target):
        _check_players(kind, target)


def recovery_mode(config: EnvironmentConfig, environment: Any = None) -> str:
    """Return `environment.recover`, or `restart` if the environment cannot be played again. environment: the built
    environment; None if it is not built yet. Raises ValueError if the configuration asks for pieces of turns of an
    environment that cannot be played again."""
    target = _target(config.kind)
    can = getattr(environment, "recover", getattr(target, "recover", None))
    if can is None:
        return config.recover
    if can != "restart":
        raise ValueError(
            f"environment.kind: {config.kind!r} has the attribute recover={can!r}, expected 'restart' or no such "
            "attribute"
        )
    if config.recover == "prefix":
        raise ValueError(
            f"environment.recover: got 'prefix', expected 'restart', because {config.kind!r} says that its episodes "
            "cannot be played again"
        )
    return "restart"


def _check_players(kind: str, target: type) -> None:
    """Raise ValueError unless a class has a coroutine `play` or `play_group` that takes one argument."""
    players = [getattr(target, name, None) for name in ("play", "play_group")]
    try:
        found = [inspect.signature(one).bind(None, None) for one in players if inspect.iscoroutinefunction(one)]
    except TypeError as error:
        raise ValueError(f"environment.kind: {kind!r}: {error}; expected `async def play(self, episode)`") from error
    if not found:
        raise ValueError(
            f"environment.kind: {kind!r} makes a {target.__name__}, expected an object with a coroutine "
            "`async def play(self, episode)`"
        )


_BUILT_IN = {
    "single_turn": SingleTurn,
    "tool_use": ToolUse,
    "verifiers": VerifiersEnvironment,
    "textarena": TextArena,
    "openenv": OpenEnv,
}
assert tuple(_BUILT_IN) == ENVIRONMENT_KINDS


def _target(kind: str) -> Any:
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    if ":" not in kind:
        raise ValueError(
            f"environment.kind: got {kind!r}, expected {', '.join(ENVIRONMENT_KINDS)} or package.module:factory"
        )
    target = import_object(kind, "environment.kind")
    if not callable(target):
        raise ValueError(f"environment.kind: {kind!r} is a {type(target).__name__}, expected a function or class")
    return target


def _check_options(kind: str, target: Any, options: dict[str, Any], plays: bool) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind(*((None,) if plays else ()), **options)
    except TypeError as error:
        named = list(signature.parameters.values())[1 if plays else 0 :]
        takes = [one.name for one in named if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        unknown = [] if any(one.kind == one.VAR_KEYWORD for one in named) else sorted({*options} - {*takes})
        raise ValueError(
            f"environment.options: got {sorted(options)}, expected the arguments of {kind!r}"
            f"{', an `async def play(episode, **options)`' if plays else ''} ({', '.join(takes) or 'it has none'}): "
            f"{f'unknown {unknown}' if unknown else error}"
        ) from error
