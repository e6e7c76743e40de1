"""Controller by mode: one line each."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Config
from ..grpo import Run, State
from .sync import AfterStep, run_sync


def controller(config: Config) -> Callable[[Run, State, AfterStep], None]:
    """The loop of `algorithm.mode`. Raises ValueError for an unknown one."""
    if config.algorithm.mode == "sync":
        return run_sync
    raise ValueError(f"algorithm.mode: got {config.algorithm.mode!r}, expected 'sync'")
