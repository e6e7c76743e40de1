"""Builds the sender and the receivers of the weight transport that a configuration names."""

from __future__ import annotations

import torch

from .collective import CollectiveSender
from .collective_receiver import CollectiveReceiver
from .cuda_ipc import CudaIpcSender
from .disk import DiskReceiver, DiskSender
from .ends import Receiver, Sender
from .ipc import IpcReceiver, IpcSender
from .protocol import ReceiverConfig, SenderConfig
from .store import StoreReceiver, StoreSender

TRANSPORT_KINDS = ("collective", "ipc", "store", "disk")


def build_sender(kind: str, config: SenderConfig) -> Sender:
    """Build the sender of a transport, in train rank 0.

    Raises ValueError for an unknown kind, or for one that needs something that the configuration or this host lacks;
    OSError when the sender cannot listen on its address; DataPlaneError when it cannot connect to the data plane.
    """
    device = torch.device(config.device)
    if kind == "collective":
        if not config.key:
            raise ValueError("sync.transport='collective' needs the run's key, but the sender got none")
        return CollectiveSender(config.host, config.key, config.sync.timeout_s, device)
    if kind == "ipc":
        if device.type == "cuda":
            return CudaIpcSender(config.run_id, config.sync.timeout_s, device)
        return IpcSender(config.run_id, config.sync.timeout_s)
    if kind == "store":
        if config.data_plane is None:
            raise ValueError("sync.transport='store' needs a data plane, but the sender got none")
        return StoreSender(config.data_plane, config.sync.timeout_s)
    if kind == "disk":
        if not config.folder:
            raise ValueError("sync.transport='disk' needs a folder, but the sender got none")
        return DiskSender(config.folder, config.run_id, config.sync.timeout_s)
    raise ValueError(f"sync.transport: got {kind!r}, expected one of {', '.join(TRANSPORT_KINDS)}")


def build_receiver(kind: str, config: ReceiverConfig, worker: int) -> Receiver:
    """Build the receiver of a transport, in each process of an engine. worker: number of the process in its engine,
    from 0.

    Raises ValueError for an unknown kind, for `store` without a data plane, and for `collective` without a key.
    """
    device = torch.device(config.device)
    if kind == "collective":
        if not config.key:
            raise ValueError(f"sync.transport='collective' needs the run's key, but engine {config.engine!r} got none")
        return CollectiveReceiver(config.engine, worker, config.key, device)
    if kind == "ipc":
        return IpcReceiver(config.engine, worker, device)
    if kind == "store":
        if config.data_plane is None:
            raise ValueError(f"sync.transport='store' needs a data plane, but engine {config.engine!r} got none")
        return StoreReceiver(config.engine, worker, config.data_plane)
    if kind == "disk":
        return DiskReceiver(config.engine, worker)
    raise ValueError(f"sync.transport: got {kind!r}, expected one of {', '.join(TRANSPORT_KINDS)}")
