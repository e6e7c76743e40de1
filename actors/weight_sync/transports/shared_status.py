"""`SharedStatus` is a file in shared memory through which a sender and its receivers on one host follow an update.

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
import urllib.parse
from pathlib import Path

import numpy as np

from ....dataplane.owned_folder import try_lock
from .protocol import BucketFrame, Encoding

OPEN, WHOLE, WITHDRAWN = 1, 2, 3
_ENCODINGS: tuple[Encoding, ...] = ("whole", "same", "sparse")
_STATE, _VERSION, _NUM_BUCKETS, _NUM_RECEIVERS, _REASON_BYTES, _CONTENTS_BYTES = range(6)
_WORD = 8
_REASON_AT = 8 * _WORD
_REASON_ROOM = 512
_BUCKETS_AT = _REASON_AT + _REASON_ROOM
_BUCKET_WORDS = 5
_NUMBER = itertools.count()


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
                raise ValueError(f"{path}: its {size} bytes are not an update's status file")
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        head = [int(word) for word in np.frombuffer(memory, np.uint64, count=8)]
        planned = head[_NUM_BUCKETS] * _BUCKET_WORDS * _WORD + head[_NUM_RECEIVERS] * _WORD + head[_CONTENTS_BYTES]
        if size != _BUCKETS_AT + planned or head[_STATE] not in (OPEN, WHOLE, WITHDRAWN):
            raise ValueError(f"{path}: its {size} bytes are not an update's status file")
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
