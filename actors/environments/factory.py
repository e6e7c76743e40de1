"""Environment kinds: which there are, and how one is built."""

from __future__ import annotations

from ..protocols import Environment
from .single_turn import SingleTurn

ENVIRONMENT_KINDS = ("single_turn",)


def build_environment(kind: str) -> Environment:
    """Raises ValueError for an unknown kind."""
    if kind == "single_turn":
        return SingleTurn()
    raise ValueError(f"environment: got {kind!r}, expected one of {', '.join(ENVIRONMENT_KINDS)}")
