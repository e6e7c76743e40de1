"""Base classes of the `ipc` transport, on CPUs and GPUs: sender and receivers share one status file per update.

A sender has one folder, `/dev/shm/headrace-{run_id}-weights/`:
  `owner`           lock file, locked while the sender's process lives; a folder whose lock is free is stale
  `update-{n}`      status file of the sender's n-th update; removed once the update is withdrawn
  `lease-update-*`  a receiver's lease on that update's bytes
  `slot-*`          bytes of a version (CPU only)

A status file is a `SharedStatus`:
  words 0-7          state, version, number of buckets, number of receivers, bytes of the reason, bytes of the
                     contents; 2 unused
  512 bytes          reason why the update was aborted
  5 words a bucket   state, encoding, bytes, checksum, result
  1 word a receiver  progress of the receiver (`SharedStatus.counts`)
  the rest           the transport's description of the update, an encoded message

A word is 8 bytes. Each is written in one piece, in the order in which readers must see them. On a machine that reorders
stores, a reader may see a word too early; the checksum then does not match, and the reader raises an error instead of
using wrong weights.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import shutil
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....codecs import messages
from ....codecs.weights.buckets import BucketPlan, read_plan
from ....dataplane.owned_folder import (
    PREFIX,
    SHARED_MEMORY,
    create_owned_folder,
    owner_lives,
    remove_stale_folders,
    try_lock,
)
from .ends import Sender, SenderUpdate, Stream
from .protocol import TICK_S, BucketFrame, Deadline, Encoding, WeightUpdate

OPEN, WHOLE, WITHDRAWN = 1, 2, 3
_ENCODINGS: tuple[Encoding, ...] = ("whole", "same", "sparse")
_STATE, _VERSION, _NUM_BUCKETS, _NUM_RECEIVERS, _REASON_BYTES, _CONTENTS_BYTES = range(6)
_WORD = 8
_REASON_AT = 8 * _WORD
_REASON_ROOM = 512
_BUCKETS_AT = _REASON_AT + _REASON_ROOM
_BUCKET_WORDS = 5
_NUMBER = itertools.count()
KIND = "ipc"
_LOOK_S = 0.05
"""Seconds between two checks that the sender is alive."""


class SharedStatus:
    """One process's mapping of the status file. The sender writes all of it except `counts`, which the receivers
    write."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._bytes = np.frombuffer(memory, np.uint8)
        self._words = self._bytes[: len(memory) // _WORD * _WORD].view(np.uint64)
        buckets = _BUCKETS_AT // _WORD
        self.num_buckets = int(self._words[_NUM_BUCKETS])
        counts = buckets + self.num_buckets * _BUCKET_WORDS
        end = counts + int(self._words[_NUM_RECEIVERS])
        self._buckets = self._words[buckets:counts].reshape(self.num_buckets, _BUCKET_WORDS)
        self.counts = self._words[counts:end]
        """Progress of each receiver, uint64 `[receivers]`. With a sender on a GPU it is the number of buckets that the
        receiver has finished plus 1, and 0 before it has joined; otherwise it stays 0."""
        self._contents_at = end * _WORD

    @staticmethod
    def create(path: Path, version: int, num_buckets: int, num_receivers: int, contents: bytes) -> SharedStatus:
        """Create the file, which appears under its name only once it is complete. Raises OSError when there is no room
        for it."""
        words = _BUCKETS_AT // _WORD + num_buckets * _BUCKET_WORDS + num_receivers
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, words * _WORD + len(contents))
            memory = mmap.mmap(descriptor, words * _WORD + len(contents))
        finally:
            os.close(descriptor)
        head = np.frombuffer(memory, np.uint64, count=8)
        head[:6] = (OPEN, version, num_buckets, num_receivers, 0, len(contents))
        memory[words * _WORD :] = contents
        os.rename(draft, path)
        return SharedStatus(path, memory)

    @staticmethod
    def open(path: Path) -> SharedStatus:
        """Map an existing file. Raises FileNotFoundError when there is none, and ValueError when it is not a status
        file."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if size < _BUCKETS_AT:
                raise ValueError(f"{path}: these {size} bytes are not an update's status file")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        head = [int(word) for word in np.frombuffer(memory, np.uint64, count=8)]
        planned = head[_NUM_BUCKETS] * _BUCKET_WORDS * _WORD + head[_NUM_RECEIVERS] * _WORD + head[_CONTENTS_BYTES]
        if size != _BUCKETS_AT + planned or head[_STATE] not in (OPEN, WHOLE, WITHDRAWN):
            raise ValueError(f"{path}: these {size} bytes are not an update's status file")
        return SharedStatus(path, memory)

    @property
    def state(self) -> int:
        """State of the update: OPEN while buckets are published, WHOLE once all are, or WITHDRAWN."""
        return int(self._words[_STATE])

    @property
    def version(self) -> int:
        return int(self._words[_VERSION])

    @property
    def contents(self) -> bytes:
        """The transport's description of the update, encoded."""
        return self._bytes[self._contents_at :].tobytes()

    @property
    def reason(self) -> str:
        """Reason why the update was withdrawn; "" before that."""
        told = self._bytes[_REASON_AT : _REASON_AT + int(self._words[_REASON_BYTES])].tobytes()
        return told.decode(errors="replace")

    def mark_whole(self) -> None:
        if self.state == OPEN:
            self._words[_STATE] = WHOLE

    def withdraw(self, reason: str) -> None:
        """Mark the update as withdrawn, for all receivers that have joined or will join. Idempotent."""
        if self.state != WITHDRAWN:
            told = np.frombuffer(reason.encode()[:_REASON_ROOM], np.uint8)
            self._bytes[_REASON_AT : _REASON_AT + len(told)] = told
            self._words[_REASON_BYTES] = len(told)
            self._words[_STATE] = WITHDRAWN

    def remove(self, reason: str) -> None:
        """Mark the update as withdrawn and delete the file. Idempotent."""
        self.withdraw(reason)
        self.path.unlink(missing_ok=True)

    def publish(self, frame: BucketFrame) -> None:
        """Announce a bucket to the receivers. Its bytes must already be in place."""
        row = self._buckets[frame.bucket]
        row[1:] = (_ENCODINGS.index(frame.encoding), frame.nbytes, frame.checksum, frame.result)
        row[0] = 1

    def frame(self, bucket: int) -> BucketFrame | None:
        """Return the header of a bucket; None before the bucket is published."""
        sent, encoding, nbytes, checksum, result = (int(word) for word in self._buckets[bucket])
        return BucketFrame(bucket, _ENCODINGS[encoding], nbytes, checksum, result) if sent else None


class Lease:
    """A receiver's claim on an update's bytes: a file beside the status file, locked while it needs them."""

    def __init__(self, status_file: Path, name: str) -> None:
        """Take the lease. The caller must check afterwards that the update had not already been withdrawn.

        name: name of the receiver, for the sender's errors.
        """
        self._path = status_file.with_name(
            f"lease-{status_file.name}.{os.getpid()}.{next(_NUMBER)}.{urllib.parse.quote(name, safe='')}"
        )
        self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lease and delete its file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(descriptor)


def lease_holders(status_file: Path) -> list[str]:
    """Return the receivers with a lease on the update of `status_file`, each as `{name} (pid {pid})`. Leases of dead
    processes are deleted."""
    names = []
    for path in sorted(status_file.parent.glob(f"lease-{status_file.name}.*")):
        try:
            descriptor = try_lock(path)
        except FileNotFoundError:
            continue
        if descriptor is None:
            pid, _, name = path.name.removeprefix(f"lease-{status_file.name}.").split(".", 2)
            names.append(f"{urllib.parse.unquote(name)} (pid {pid})")
        else:
            path.unlink(missing_ok=True)
            os.close(descriptor)
    return names


@dataclass(frozen=True, slots=True)
class Contents:
    """Description of an update, which the sender stores in the update's status file."""

    layout: bytes
    """Encoded bucket plan."""
    slot: str = ""
    """Name of the file with the weights' bytes, in which bucket b starts at `bucket_offsets(plan)[b]`; CPU only."""
    ring: tuple[bytes, ...] = ()
    """IPC handles of the sender's two buffers (payload n is in buffer n modulo 2) and of the array with the buckets'
    digests; GPU only."""
    gpu_uuid: str = ""
    """UUID of the GPU that holds the buffers; GPU only."""

    @property
    def plan(self) -> BucketPlan:
        """Decoded bucket plan. Raises ValueError when `layout` is not a plan."""
        return read_plan(self.layout)


class IpcSenderBase(Sender):
    """Base class of `ipc` senders: owns the sender's folder, and creates the status file of each update in it."""

    kind = KIND

    def __init__(self, run_id: str, timeout_s: float) -> None:
        """Create the sender's folder in shared memory. Raises ValueError if a running sender of the same run owns the
        folder, or if the host has no shared memory."""
        if not SHARED_MEMORY.is_dir():
            raise ValueError(f"sync.transport='ipc' needs {SHARED_MEMORY}, which this host does not have")
        super().__init__(timeout_s)
        remove_stale_folders(SHARED_MEMORY)
        self.folder = SHARED_MEMORY / f"{PREFIX}{run_id}-weights"
        self._owner = create_owned_folder(self.folder, run_id)

    def _announce(self, update: SenderUpdate, contents: Contents) -> SharedStatus:
        receivers = sum(group.num_workers for group in update.receivers)
        path = self.folder / f"update-{update.number}"
        try:
            return SharedStatus.create(
                path, update.version, len(update.plan.sizes), receivers, messages.encode(contents)
            )
        except OSError as error:
            raise OSError(
                error.errno, f"weights: the status file {path} cannot be created: {error.strerror}"
            ) from error

    def _close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)


class IpcStreamBase(Stream):
    """Base class of `ipc` streams: receives one update, and holds a lease on its bytes until it is closed."""

    tick_s = TICK_S

    def __init__(
        self, update: WeightUpdate, status: SharedStatus, lease: Lease, contents: Contents, deadline: Deadline
    ) -> None:
        super().__init__(update, contents.plan, deadline)
        self._status = status
        self._lease = lease
        self._looked = 0.0

    def _confirm(self) -> None:
        self.deadline.wait(self._is_whole, lambda: ("all buckets came, the sender did not finish", ()), self.tick_s)

    def _wait(self, bucket: int) -> None:
        of = f"bucket {bucket} of {len(self.plan.sizes)}"

        def has_come() -> bool:
            self._check_status(f"waiting for {of}")
            if self._status.frame(bucket) is not None:
                return True
            if self._status.state == WHOLE:
                if self._status.frame(bucket) is not None:  # The bucket came between the two checks.
                    return True
                raise self.deadline.error(f"{of} never came, though the sender finished")
            return False

        self.deadline.wait(
            has_come, lambda: (f"{of} did not come from the sender, {self._status.path}", ()), self.tick_s
        )

    def _is_whole(self) -> bool:
        self._check_status("at the end")
        return self._status.state == WHOLE

    def _check_status(self, when: str) -> None:
        """Raise WeightTransferError when the stream was closed, the update was withdrawn or the sender has died."""
        self.check_open()
        state = self._status.state
        if state == WITHDRAWN:
            raise self.deadline.error(f"{when}: the sender has withdrawn the update: {self._status.reason}")
        now = time.monotonic()
        if state == OPEN and now >= self._looked + _LOOK_S:
            self._looked = now
            if not owner_lives(self._status.path.parent) and self._status.state == OPEN:
                raise self.deadline.error(f"{when}: the sender of {self._status.path} has ended")

    def _close(self) -> None:
        self._lease.release()


def join(update: WeightUpdate, deadline: Deadline) -> tuple[SharedStatus, Lease, Contents]:
    """Join an update on this host: map its status file and take a lease on its bytes. Raises WeightTransferError if the
    update does not exist (any more) or its description is damaged."""
    path = Path(update.location)
    gone = f"is not at {path} (any more): the sender has ended or has published two versions since"
    lease = None
    try:
        status = SharedStatus.open(path)
        lease = Lease(path, deadline.end)
        contents = messages.decode(status.contents, Contents)
        read_plan(contents.layout)  # This raises ValueError now if the layout is damaged.
    except (FileNotFoundError, ValueError) as error:
        if lease is not None:
            lease.release()
        raise deadline.error(gone if isinstance(error, FileNotFoundError) else str(error)) from error
    if status.version != update.version or status.state == WITHDRAWN:
        lease.release()
        other = f"{path} holds version {status.version}"
        raise deadline.error(other if status.version != update.version else f"{gone}: {status.reason}")
    return status, lease, contents
