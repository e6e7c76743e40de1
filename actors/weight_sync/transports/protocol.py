"""Defines what weight transports share: the sender's protocol, announcements, frames, settings and deadlines.

    driver     open update ---> announcement ------+------------------------------> commit (or drop)
    trainer    begin(version, plan) -> buffer, send, buffer, send, ... -> finish
    engine                                         +-> open -> bucket, bucket, ... -> staged, verified

A version is published bucket by bucket (`codecs.weights.buckets`), with at most two buckets in flight. A wait of the
sender or of a receiver fails after the update's `timeout_s` without progress (`Deadline`). Every error names version,
bucket, peer and the time since the update began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from ....codecs.weights.buckets import BucketPlan
from ....dataplane.handle import DataPlaneHandle
from ...adapters.spec import AdapterSpec
from ..config import SyncConfig

Encoding = Literal["whole", "same", "sparse"]
"""How a bucket is sent: `whole` sends all its bytes, `same` sends nothing, because the bucket equals that of the base
version, and `sparse` sends only the elements that differ from the base version's bucket."""
TICK_S = 0.0005
"""Seconds between two checks of another process's progress."""


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """An engine that takes part in a weight update."""

    engine: str
    """Name of the engine, unique in the run."""
    num_workers: int
    """Number of the engine's processes that receive weights."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Announcement of a weight version that is about to be sent. This small object goes through the driver; the weights
    themselves do not."""

    version: int
    base: int | None
    """Version that `same` and `sparse` buckets are deltas of, and that receivers must still hold; None if every bucket
    is sent in full."""
    kind: str
    """Kind of the transport, such as `ipc`."""
    location: str
    """Address at which receivers find the version, in a format that depends on the transport."""
    num_bytes: int
    """Number of bytes of all weights, as if every bucket were sent in full."""
    receivers: tuple[ReceiverGroup, ...]
    """Engines that take part. Their worker processes are numbered in this order, one engine after another."""
    timeout_s: float
    """Longest time in seconds that a wait for another process may last without progress."""
    adapter: AdapterSpec | None = None
    """The adapter whose tensors are sent; None if the update has the weights of the whole model."""
    plan: bytes = b""
    """Encoded arguments of the transfer plan, as in `plan.arguments`; empty if one rank sends everything."""


@dataclass(frozen=True, slots=True)
class BucketFrame:
    """Header of a bucket, which describes its payload."""

    bucket: int
    """Index of the bucket in the bucket plan."""
    encoding: Encoding
    nbytes: int
    """Number of bytes of the payload; 0 for `same`."""
    checksum: int
    """Checksum of the payload (`codecs.weights.buckets.checksum`); 0 when `send` was given a digest function
    instead."""
    result: int = 0
    """xxh3 hash of the bucket that results from applying a `same` or `sparse` payload to the base version's bucket, so
    that a damaged base is detected; 0 for `whole`."""


class WeightTransferError(RuntimeError):
    """A version of the weights did not arrive completely. The message names version, bucket, peer and elapsed time."""

    engines: tuple[str, ...] = ()
    """Names of the engines known to be at fault, set when a sender raises the error; () when unknown."""


class WeightSender(Protocol):
    """Publishes weight versions from train rank 0. Only one thread at a time may use it.

    The order of calls is begin -> (buffer -> send)* -> finish; `abort` may come at any point.
    """

    def begin(
        self, version: int, plan: BucketPlan, receivers: Sequence[ReceiverGroup], base: int | None = None
    ) -> WeightUpdate:
        """Announce `version`, after aborting an update that is still open. Returns at once, before any receiver has
        joined.

        base: version that the receivers hold and that deltas refer to; None if all buckets will be sent in full. Raises
        ValueError if `version` is below the newest version (the newest itself may be begun again), and OSError, naming
        the bytes wanted, if there is no room for it.
        """
        ...

    def buffer(self, bucket: int, nbytes: int) -> torch.Tensor:
        """Return memory for the bucket's payload, uint8 `[nbytes]` on the sender's device.

        Waits while two buckets are in flight. Raises WeightTransferError when a receiver is gone or late.
        """
        ...

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        """Send the receivers the payload that was written into the buffer of `frame.bucket`. Returns at once.

        digest: for a payload on a GPU, a function that queues the computation of its `device_digest` on the current
        CUDA stream, after the writes to the payload. The digest then replaces `frame.checksum`; it need not be ready
        before the end of the update.
        """
        ...

    def finish(self) -> None:
        """Wait until the version is complete. With a `lasting` sender this means that every receiver can read it,
        otherwise that all receivers have received it.

        Raises WeightTransferError naming the receivers that did not get it.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the open update and remove what was published of it.

        Receivers raise WeightTransferError with `reason`, at the latest after the timeout. Idempotent; another thread
        may call it.
        """
        ...

    @property
    def lasting(self) -> bool:
        """True if the last two finished versions stay readable. Receivers can then join late, or read a version
        again."""
        ...

    def close(self) -> None:
        """Remove everything that was published. Idempotent."""
        ...


# ---------------- The two ends of a transport have these settings.


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """Settings from which the sender of a weight transport is built."""

    run_id: str
    """Id of the run, which is part of the names of everything published; letters, digits, `-`, `_`, `.`."""
    sync: SyncConfig = SyncConfig()
    """Settings of the config section `sync`. Its `timeout_s` limits each wait for receivers."""
    host: str = "127.0.0.1"
    """Address at which receivers can reach this host; used by `collective`."""
    folder: str = ""
    """Folder that versions are written to, created when missing; used by `disk`."""
    data_plane: DataPlaneHandle | None = None
    """Data plane that holds the versions; used by `store`."""
    device: str = "cpu"
    """Device of the weights, `cpu` or `cuda:0`. `collective` and `ipc` also have their buffers on it."""
    key: bytes = field(default=b"", repr=False)
    """The run's key (`StoreSpec.key`), which receivers must know; needed by `collective`."""


@dataclass(frozen=True, slots=True)
class ReceiverConfig:
    """Settings from which an engine's receivers are built, the same for all its worker processes."""

    engine: str
    """Name of the engine, as in the announcement."""
    sync: SyncConfig
    """Settings of the config section `sync`. With `delta`, the receiver keeps the served version as the base of deltas;
    without it, every update must be sent in full."""
    device: str = "cpu"
    """Device of the engine's weights: `cpu`, or `cuda:0`."""
    data_plane: DataPlaneHandle | None = None
    """Data plane that holds the versions; used by `store`."""
    key: bytes = field(default=b"", repr=False)
    """The run's key (`StoreSpec.key`), which the sender must know; needed by `collective`."""


class Deadline:
    """Limits how long the sender or a receiver of one update may wait without progress. The update as a whole may take
    any time, as long as buckets keep coming."""

    def __init__(self, end: str, version: int, timeout_s: float) -> None:
        """Create a deadline whose timeout starts now. end: name of the process that waits, for errors. timeout_s:
        longest time without progress, in seconds."""
        self.end = end
        self.version = version
        self.timeout_s = timeout_s
        self._started = self._moved = time.monotonic()
        self._stopped = False
        self.num_moves = 0
        """Number of times that progress was made."""

    def moved(self) -> None:
        """Restart the timeout. Call it after progress, and after time that was spent working rather than waiting."""
        self._moved = time.monotonic()
        self.num_moves += 1

    def stop(self) -> None:
        """Make all waits fail at once. Meant to be called from a thread other than the waiting one."""
        self._stopped = True

    @property
    def elapsed_s(self) -> float:
        """Seconds since the deadline was created."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Seconds left before a wait without progress fails; 0.0 when the time is over or `stop` was called."""
        return 0.0 if self._stopped else max(0.0, self.timeout_s - (time.monotonic() - self._moved))

    def error(self, what: str, engines: Sequence[str] = ()) -> WeightTransferError:
        """Return an error that says what failed, in which version, and after how many seconds. engines: names of the
        engines known to be at fault."""
        what += " (given up here)" if self._stopped else ""
        error = WeightTransferError(f"weights: version {self.version}: {self.end}: {what} after {self.elapsed_s:.1f} s")
        error.engines = tuple(dict.fromkeys(engines))
        return error

    def wait(
        self,
        ready: Callable[[], bool],
        late: Callable[[], tuple[str, Sequence[str]]],
        tick_s: float = TICK_S,
    ) -> None:
        """Wait until `ready()` is true, checking every `tick_s` seconds. At the deadline, raise WeightTransferError.
        late: function that returns what is missing and the names of the engines at fault, for that error."""
        while not ready():
            if not self.left_s:
                what, engines = late()
                raise self.error(what, engines)
            time.sleep(tick_s)


def worker_name(engine: str, worker: int) -> str:
    """Return the name of one worker process of an engine, for errors."""
    return f"{engine} worker {worker}"


def worker_names(receivers: Sequence[ReceiverGroup]) -> list[str]:
    """Return the names of all worker processes of these engines, in the order of their numbers."""
    return [worker_name(group.engine, worker) for group in receivers for worker in range(group.num_workers)]
