"""Protocols of a weight transport: a sender beside the trainer, and a receiver in every process of the engines.

    driver     open update ---> announcement ------+------------------------------> commit (or drop)
    trainer    begin(version, plan) -> buffer, send, buffer, send, ... -> finish
    engine                                         +-> open -> bucket, bucket, ... -> staged, verified

A version is published bucket by bucket (`codecs.weights.buckets`), with at most two buckets in flight between the two
ends. Every wait on either side ends after the update's `timeout_s` without progress; every error names version, bucket,
peer and the time since the update began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ....codecs.weights.buckets import BucketPlan
from ....dataplane.handle import DataPlaneHandle
from ..config import SyncConfig

Encoding = Literal["whole", "same", "sparse"]
"""Form in which a bucket travels: `whole` is all its bytes, `same` is none because it equals the base version's bucket,
and `sparse` is the elements that differ from that."""


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """An engine that takes part in an update."""

    engine: str
    """Name of the engine, unique in the run."""
    num_workers: int
    """Number of its processes that receive weights."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Announcement of a version. It is small and goes through the driver; the weights themselves do not."""

    version: int
    base: int | None
    """Version that `same` and `sparse` buckets refer to, which receivers must have kept; None when all are whole."""
    kind: str
    """Kind of the transport."""
    location: str
    """Place where receivers find the version, in the transport's own notation."""
    num_bytes: int
    """Number of bytes of all weights, if every bucket travelled whole."""
    receivers: tuple[ReceiverGroup, ...]
    """Engines that take part, in order of their ranks."""
    timeout_s: float
    """Seconds without progress after which a wait for a peer ends in an error."""


@dataclass(frozen=True, slots=True)
class BucketFrame:
    """Header that describes a bucket's payload."""

    bucket: int
    """Number of the bucket in the plan."""
    encoding: Encoding
    nbytes: int
    """Number of bytes of the payload; 0 for `same`."""
    checksum: int
    """Checksum of the payload (`codecs.weights.buckets.checksum`); 0 where `send` was given a digest instead."""
    result: int = 0
    """xxh3 of the whole bucket that `same` or `sparse` makes of the base version's, so that a damaged base is found; 0
    for `whole`."""


class WeightTransferError(RuntimeError):
    """A version of the weights did not arrive whole. The message names version, bucket, peer and elapsed time."""

    engines: tuple[str, ...] = ()
    """Names of the engines known to be at fault, where a sender raises the error; () when unknown."""


class WeightSender(Protocol):
    """Publishes versions, in train rank 0. One thread uses it at a time.

    The order of calls is begin -> (buffer -> send)* -> finish, with abort possible at any point.
    """

    def begin(
        self, version: int, plan: BucketPlan, receivers: Sequence[ReceiverGroup], base: int | None = None
    ) -> WeightUpdate:
        """Announce `version`, and abort an update that is open. Returns at once, before any receiver has joined.

        Raises ValueError unless versions rise (the newest version may be begun again), OSError naming the bytes wanted
        when there is no room for it.
        """
        ...

    def buffer(self, bucket: int, nbytes: int) -> torch.Tensor:
        """Return memory for the bucket's payload, uint8 `[nbytes]` on the sender's device.

        Waits while two buckets are in flight. Raises WeightTransferError when a receiver is gone or late.
        """
        ...

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        """Give receivers the payload written into the buffer of `frame.bucket`. Returns at once.

        digest: for a payload on a GPU, a function that queues its `device_digest` on the current stream, as the payload
        was queued. The digest then replaces `frame.checksum`, and is not needed before the update's end.
        """
        ...

    def finish(self) -> None:
        """Wait until the version is whole: readable for every receiver (`lasting`), or received by all of them.

        Raises WeightTransferError naming the receivers that did not get it.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the open update and remove what was published of it.

        Receivers raise WeightTransferError with `reason`, at the latest after the timeout. Idempotent; legal from
        another thread.
        """
        ...

    @property
    def lasting(self) -> bool:
        """Whether the last two finished versions stay readable, so that receivers may come late, and again."""
        ...

    def close(self) -> None:
        """Remove all that was published. Idempotent."""
        ...


class WeightStream(Protocol):
    """One update on its way to one receiver. It is iterated once and always closed."""

    @property
    def plan(self) -> BucketPlan:
        """Layout of the weights in buckets."""
        ...

    @property
    def lasting(self) -> bool:
        """Whether payloads stay valid until `close`; otherwise each is valid until the next one is asked for."""
        ...

    def __iter__(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """Yield frame and payload, uint8 `[nbytes]`, of every bucket in order, and verify their checksums.

        On the CPU a payload is verified before it is yielded. On a GPU all payloads are verified when the iteration
        ends, so that nothing waits for the GPU in between; there payloads are ready, and valid, in the order of the
        current stream. No payload may be relied on before the iteration has ended.

        Raises WeightTransferError naming what is missing, damaged or late. With a lasting sender, the last check is
        that the version was not withdrawn meanwhile.
        """
        ...

    def close(self) -> None:
        """Release buffers and mappings. Idempotent; legal from another thread, and then ends the iteration."""
        ...


class WeightReceiver(Protocol):
    """Receives versions, in every process that holds an engine's weights."""

    def open(self, update: WeightUpdate) -> WeightStream:
        """Join `update`, waiting for the sender until the update's timeout. Raises WeightTransferError."""
        ...

    def close(self) -> None:
        """Release memory and connections that were kept between updates. Idempotent."""
        ...


# ---------------- Settings of the two ends of a transport, as plain data that travels to the processes that build them.


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """Settings of a sender."""

    run_id: str
    """Id of the run, part of the names of what is published; letters, digits, `-`, `_`, `.`."""
    sync: SyncConfig = SyncConfig()
    """Settings of the section `sync`. Each wait for receivers may take `timeout_s`."""
    host: str = "127.0.0.1"
    """Address of this host that receivers can reach; used by `collective`."""
    folder: str = ""
    """Folder into which versions are written, made when missing; used by `disk`."""
    data_plane: DataPlaneHandle | None = None
    """Data plane that holds the versions; used by `store`."""
    device: str = "cpu"
    """Device that the weights come from, `cpu` or `cuda:0`; the buffers of `collective` and `ipc` are on it, too."""


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """Settings of a receiver, the same for all workers of an engine."""

    engine: str
    """Name of the engine, as in the announcement."""
    sync: SyncConfig
    """Settings of the section `sync`. With `delta`, the served version stays staged as the base of deltas; without it,
    every update must be whole."""
    device: str = "cpu"
    """Device of the engine's weights: `cpu`, or `cuda:0`."""
    data_plane: DataPlaneHandle | None = None
    """Data plane that holds the versions; used by `store`."""
