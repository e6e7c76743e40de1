"""Builds the environment that a configuration names: `single_turn` or `tool_use`."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocols import Environment
from .single_turn import SingleTurn
from .tool_use import ToolUse
from .tools import build_tools

ENVIRONMENT_KINDS = ("single_turn", "tool_use")


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Settings of an environment."""

    kind: str = "single_turn"
    """Kind of the environment, one of ENVIRONMENT_KINDS."""
    tools: tuple[str, ...] = ("calculator",)
    """Names of tools, or import paths; used by tool_use."""
    max_turns: int = 4
    """Largest number of turns of the policy in an episode; used by tool_use."""


def build_environment(config: EnvironmentConfig) -> Environment:
    """Build the environment. Raises ValueError in one sentence for an unknown kind or tool."""
    if config.kind == "single_turn":
        return SingleTurn()
    if config.kind == "tool_use":
        return ToolUse(build_tools(config.tools), config.max_turns)
    raise ValueError(f"environment: got {config.kind!r}, expected one of {', '.join(ENVIRONMENT_KINDS)}")
