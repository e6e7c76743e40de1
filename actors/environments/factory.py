"""Environment kinds: which there are, and how one is built from its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from ..protocols import Environment
from .single_turn import SingleTurn
from .tool_use import ToolUse
from .tools import build_tools

ENVIRONMENT_KINDS = ("single_turn", "tool_use")


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """One environment."""

    kind: str = "single_turn"
    """One of ENVIRONMENT_KINDS."""
    tools: tuple[str, ...] = ("calculator",)
    """tool_use: names of tools, or import paths."""
    max_turns: int = 4
    """tool_use: times that the policy speaks in an episode."""


def build_environment(config: EnvironmentConfig) -> Environment:
    """Raises ValueError in one sentence for an unknown kind or tool."""
    if config.kind == "single_turn":
        return SingleTurn()
    if config.kind == "tool_use":
        return ToolUse(build_tools(config.tools), config.max_turns)
    raise ValueError(f"environment: got {config.kind!r}, expected one of {', '.join(ENVIRONMENT_KINDS)}")
