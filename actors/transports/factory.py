"""Weight transports: which there are, and how the two ends are built."""

from __future__ import annotations

from .ipc import KIND, IpcReceiver, IpcSender
from .protocol import WeightReceiver, WeightSender

TRANSPORT_KINDS = (KIND,)


def build_sender(kind: str, run_id: str, bucket_bytes: int) -> WeightSender:
    """The publishing end, in train rank 0. Raises ValueError for an unknown kind."""
    if kind == KIND:
        return IpcSender(run_id, bucket_bytes=bucket_bytes)
    raise _unknown(kind)


def build_receiver(kind: str) -> WeightReceiver:
    """The fetching end, in every rollout actor. Raises ValueError for an unknown kind."""
    if kind == KIND:
        return IpcReceiver()
    raise _unknown(kind)


def _unknown(kind: str) -> ValueError:
    return ValueError(f"sync.transport: got {kind!r}, expected one of {', '.join(TRANSPORT_KINDS)}")
