"""Defines the handle with which a process joins a run's data plane."""

from __future__ import annotations

from dataclasses import dataclass

from .block_store import StoreSpec
from .config import DataPlaneConfig
from .rpc.frames import DirectoryAddress


@dataclass(frozen=True, slots=True)
class DataPlaneHandle:
    """Description of a run's data plane. Plain and picklable; `factory.connect` makes a client from it in any process
    of the run."""

    run_id: str
    config: DataPlaneConfig
    store: StoreSpec
    actor_name: str
    """Name of the Ray actor that runs the directory (the metadata service); "" when the directory is in the process
    that opened it."""
    address: DirectoryAddress | None
    """Address at which the Ray actor of the directory (the metadata service) listens; None when the directory runs in
    the process that opened it."""
    peer: str
    """Name, pid and host of the directory (the metadata service), for error messages."""
