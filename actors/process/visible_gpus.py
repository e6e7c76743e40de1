"""Limits an actor's process, and the processes that it starts, to the GPUs that the run has planned for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

_NAME = "CUDA_VISIBLE_DEVICES"


def show_gpus(devices: Sequence[str] | None) -> None:
    """Let this process see only these GPUs. Must be called before anything in the process uses CUDA, which reads the
    variable once. A no-op for None.

    Ray sets the variable, too, but an actor with GPUs of several of its bundles would get only those of one. devices:
    CUDA's names of the GPUs; the first becomes `cuda:0`.
    """
    if devices is not None:
        os.environ[_NAME] = ",".join(devices)


def shown_gpus() -> tuple[str, ...]:
    """Return CUDA's names of the GPUs that this process is limited to; () if it is limited to none or to nothing."""
    return tuple(name for name in os.environ.get(_NAME, "").split(",") if name)
