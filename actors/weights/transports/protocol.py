"""What brings weights from the trainer to the engines: a sender beside the one, receivers in all others.

    driver     open update ---> announcement ------+------------------------------> commit (or drop)
    trainer    begin(version, plan) -> buffer, send, buffer, send, ... -> finish
    engine                                         +-> open -> bucket, bucket, ... -> staged, verified

A version is published bucket by bucket (`codecs.buckets`), at most two of them in flight between the two ends. Every
wait on either side is bounded by the update's `timeout_s`; every error names version, bucket, peer and elapsed time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ....codecs.buckets import BucketPlan
from ....dataplane.handle import DataPlaneHandle
from ..config import SyncConfig

Encoding = Literal["whole", "same", "sparse"]
"""How a bucket travels: all its bytes; none, as it equals the base version's; the elements that differ from it."""


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """An engine that takes part in an update."""

    engine: str
    """Its name, unique in the run."""
    num_workers: int
    """Its processes that receive."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The announcement of a version. Small and of constant size: it goes through the driver, weights do not."""

    version: int
    base: int | None
    """The version that `same` and `sparse` buckets refer to: receivers must have it staged; None: all are whole."""
    kind: str
    """The transport's."""
    location: str
    """Where receivers find it: the transport's own."""
    num_bytes: int
    """Of all weights, were every bucket whole."""
    receivers: tuple[ReceiverGroup, ...]
    """Who takes part, in order of their ranks."""
    timeout_s: float
    """Bound of every wait for a peer."""


@dataclass(frozen=True, slots=True)
class BucketFrame:
    """What precedes a bucket's bytes."""

    bucket: int
    encoding: Encoding
    nbytes: int
    """Of the payload; 0 for `same`."""
    checksum: int
    """`codecs.buckets.checksum` of the payload; 0 where a digest was given to `send` instead."""


class WeightTransferError(RuntimeError):
    """A version of the weights did not arrive whole; names version, bucket, peer and elapsed time."""

    engines: tuple[str, ...] = ()
    """Those known to be at fault, where a sender raises it; () when that is not known."""


class WeightSender(Protocol):
    """The publishing end, in train rank 0. Used by one thread at a time.

    begin -> (buffer -> send)* -> finish, or abort from anywhere in between.
    """

    def begin(
        self, version: int, plan: BucketPlan, receivers: Sequence[ReceiverGroup], base: int | None = None
    ) -> WeightUpdate:
        """Announce `version`. Returns at once; nobody need listen yet. An update that is open is aborted.

        Raises ValueError unless versions rise (a version may be begun again while it is the newest), OSError when
        there is no room for it, naming the bytes wanted.
        """
        ...

    def buffer(self, bucket: int, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]`, where the bucket's payload is to be written, on the sender's device.

        Waits while two buckets are in flight. Raises WeightTransferError when a receiver is gone or late.
        """
        ...

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        """Let receivers have what was written into the buffer of `frame.bucket`. Returns at once.

        digest: of a payload on a GPU; queues its `gpu_digest.device_digest` on the current stream, as the payload was:
        that then stands for `frame.checksum`, and nobody need wait for it before the update's end.
        """
        ...

    def finish(self) -> None:
        """Return when the version is whole: readable by anyone who is announced it (`lasting`), or with all receivers.

        Raises WeightTransferError naming the receivers that did not get it.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the open update: receivers raise WeightTransferError with `reason`, at the latest after the timeout.
        What was published of it is gone. Idempotent; legal from another thread."""
        ...

    @property
    def lasting(self) -> bool:
        """Whether the last two finished versions stay readable: receivers may come late, and again."""
        ...

    def close(self) -> None:
        """Remove what was published. Idempotent."""
        ...


class WeightStream(Protocol):
    """One update on its way to one receiver. Iterate once; close always."""

    @property
    def plan(self) -> BucketPlan: ...

    @property
    def lasting(self) -> bool:
        """Whether payloads stay as they are until `close`; else each only until the next is asked for."""
        ...

    def __iter__(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """(frame, payload uint8 `[nbytes]`) of every bucket in order; checksums verified: on the CPU before the payload
        is given out, on a GPU all of them when the iteration ends, as nothing is to wait for the GPU in between. There
        payloads are ready, and valid, in the order of the current stream. Nothing counts before the iteration ended.

        Raises WeightTransferError naming what is missing, damaged or late. With a lasting sender the last check after
        the last bucket is that the version was not withdrawn meanwhile.
        """
        ...

    def close(self) -> None:
        """Let go of buffers and mappings. Idempotent; legal from another thread, which ends the iteration."""
        ...


class WeightReceiver(Protocol):
    """The fetching end, in every process that holds an engine's weights."""

    def open(self, update: WeightUpdate) -> WeightStream:
        """Join `update`. Waits for the sender, bounded. Raises WeightTransferError."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


# ---------------- What the two ends of a transport are built from: plain data that travels to the processes that
# build them.


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """The publishing end's surroundings."""

    run_id: str
    """Names what is published; letters, digits, `-`, `_`, `.`."""
    sync: SyncConfig = SyncConfig()
    """`timeout_s` is the bound of every wait for receivers, from an update's first bucket on."""
    host: str = "127.0.0.1"
    """collective: the address of this host that receivers reach."""
    folder: str = ""
    """disk: where versions are written; made when missing."""
    data_plane: DataPlaneHandle | None = None
    """store: whose."""
    device: str = "cpu"
    """Where weights come from: `cpu`, or `cuda:0`, whose buffers `collective` and `ipc` then hand out."""


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """The fetching end's surroundings, the same for all workers of an engine."""

    engine: str
    """Its name, as in the announcement."""
    sync: SyncConfig
    """With `delta` the served version is kept staged, which a delta refers to; without, every update must be whole."""
    device: str = "cpu"
    """Where the engine's weights are: `cpu`, or `cuda:0`."""
    data_plane: DataPlaneHandle | None = None
    """store: whose."""
