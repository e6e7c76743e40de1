"""What a process needs to join a run's data plane."""

from __future__ import annotations

from dataclasses import dataclass

from .block_store import StoreSpec
from .config import DataPlaneConfig
from .rpc.frames import DirectoryAddress


@dataclass(frozen=True, slots=True)
class DataPlaneHandle:
    """Plain and picklable; `factory.connect` makes a client of it in any process of the run."""

    run_id: str
    config: DataPlaneConfig
    store: StoreSpec
    actor_name: str
    """The directory's Ray actor; "" when the directory is in the opener's process."""
    address: DirectoryAddress | None
    """Where that actor listens; None when the directory is in the opener's process."""
    peer: str
    """What errors call the directory: name, pid, host."""
