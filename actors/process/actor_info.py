"""`ActorInfo` names a process of a run: what it is called, where it runs and which GPUs it may use.

It imports nothing that takes time, because actors that start early need it before anything else.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from .visible_gpus import shown_gpus


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Identity of a process, for errors, traces and clean-up."""

    name: str
    pid: int
    host: str
    gpus: tuple[str, ...] = ()
    """CUDA's names of the GPUs that the process is limited to; () if there is no limit, or if it may use none."""

    @staticmethod
    def here(name: str) -> ActorInfo:
        """Return the identity of the calling process, with `name` as its name."""
        return ActorInfo(name, os.getpid(), socket.gethostname(), shown_gpus())

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"
