"""Finds which keyword arguments a reward function asks for, besides prompt, response and finish reason."""

from __future__ import annotations

import inspect
from typing import Any

TOKENS, EPISODE = "response_tokens", "episode"
"""Names of the keyword arguments that a reward function may ask for; see TokenReward and EpisodeReward."""


def wanted_by(reward: Any) -> tuple[str, ...]:
    """Return the names of the keyword arguments that a reward function asks for, of TOKENS and EPISODE."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # some built-in callables have no signature
        return ()
    return tuple(name for name in (TOKENS, EPISODE) if name in parameters)
