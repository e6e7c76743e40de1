"""Builds the environment that a configuration names: `single_turn` or `tool_use`."""

from __future__ import annotations

from ..engines.config import RolloutConfig
from ..protocols import Environment
from .single_turn import SingleTurn
from .tool_use import ToolUse
from .tools import build_tools


def build_environment(config: RolloutConfig) -> Environment:
    """Build the environment that `config.environment` names. Raises ValueError with a one-sentence message for an
    unknown kind or tool."""
    if config.environment == "single_turn":
        return SingleTurn()
    if config.environment == "tool_use":
        return ToolUse(build_tools(config.tools), config.max_turns)
    raise ValueError(f"rollout.environment: got {config.environment!r}, which no environment here has")
