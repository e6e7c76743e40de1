"""Makes rewards of functions that were written for other libraries, as `headrace.rewards`."""

from __future__ import annotations

from .actors.rewards.from_trl import from_trl

__all__ = ["from_trl"]
