"""Controller by mode: one line each."""

from __future__ import annotations

from collections.abc import Callable

from ..config import Config
from ..feed import Feed
from ..grpo import Run, State
from .ahead import run_ahead
from .steps import AfterStep
from .streaming import run_streaming
from .sync import run_sync


def controller(config: Config) -> Callable[[Run, State, Feed, AfterStep], None]:
    """The loop of `algorithm.mode`. Raises ValueError for an unknown one."""
    if config.algorithm.mode == "sync":
        return run_sync
    if config.algorithm.mode == "async":
        return run_ahead
    if config.algorithm.mode == "streaming":
        return run_streaming
    raise ValueError(f"algorithm.mode: got {config.algorithm.mode!r}, expected 'sync', 'async' or 'streaming'")
