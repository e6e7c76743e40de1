"""Segment files hold the records of a journal. Each file has one writer, and the writers of one folder read all files.

A record of a segment file:

    bytes 0-7    magic and format version
    bytes 8-47   fingerprint, position, stamp, number of bytes in the body, xxh3 of the body
    bytes 48-55  xxh3 of bytes 0-47
    then         the body

With the two checksums, a reader can distinguish a record that was cut short by a kill from a record whose bytes have
changed. A record that was cut short is allowed at the end of a file; a record with changed bytes must not be used.
Files are not flushed to the disk. Writes of a killed process are not lost, because the operating system holds them, but
a host that loses power can lose the records of the last seconds.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ...dataplane.owned_folder import try_lock

MAGIC = b"hrjrnl01"
_HEAD = struct.Struct("<8sQqQQQ")
_DIGEST = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _DIGEST.size


class DamagedJournal(RuntimeError):
    """The bytes of a journal record differ from what was written. The message names the file and the byte at which the
    record begins."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Header of a journal record. It precedes the record's body."""

    fingerprint: int
    """Hash of the settings that the record was made with (`JournalConfig.fingerprint`)."""
    position: int
    """Position of the record's prompt in the run's prompt stream."""
    stamp: int
    """Number that increases from record to record. If several records of a position contradict each other, the one with
    the highest stamp is valid."""
    nbytes: int
    """Number of bytes of the body."""
    digest: int
    """xxh3 hash of the body."""


def pack_record(body: bytes, position: int, fingerprint: int, stamp: int) -> bytes:
    """Return a record with this body. position, fingerprint, stamp: see `RecordHead`."""
    head = _HEAD.pack(MAGIC, fingerprint, position, stamp, len(body), xxhash.xxh3_64_intdigest(body))
    return b"".join((head, _DIGEST.pack(xxhash.xxh3_64_intdigest(head)), body))


def read_heads(path: Path, start: int) -> tuple[list[tuple[int, RecordHead]], int]:
    """Return the offset and header of every complete record from byte `start` on, and the end of the last one. All
    offsets are in bytes.

    An incomplete record at the end of the file is left out, because its writer was killed while writing it or is still
    writing it. Bodies are not read. Raises DamagedJournal if a header is damaged, and FileNotFoundError if there is no
    such file.
    """
    found = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        while start + HEAD_BYTES <= size:
            head = _decode_head(os.pread(descriptor, HEAD_BYTES, start), path, start)
            if start + HEAD_BYTES + head.nbytes > size:
                break
            found.append((start, head))
            start += HEAD_BYTES + head.nbytes
    finally:
        os.close(descriptor)
    return found, start


def read_body(path: Path, offset: int) -> tuple[RecordHead, bytes]:
    """Return the header and the body of the record that begins at byte `offset`.

    Raises DamagedJournal if the record is damaged, and FileNotFoundError if there is no such file.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        head = _decode_head(file.read(HEAD_BYTES), path, offset)
        body = file.read(head.nbytes)
    if len(body) != head.nbytes:
        raise _damaged(path, offset, f"the record's body has {len(body)} bytes, but {head.nbytes} were written")
    found = xxhash.xxh3_64_intdigest(body)
    if found != head.digest:
        raise _damaged(path, offset, f"the body's xxh3 is {found:016x}, but {head.digest:016x} was written")
    return head, body


def _damaged(path: Path, offset: int, what: str) -> DamagedJournal:
    return DamagedJournal(
        f"journal: {path}, record at byte {offset}: {what}; remove the file to have its groups generated again"
    )


def _decode_head(data: bytes, path: Path, offset: int) -> RecordHead:
    if len(data) != HEAD_BYTES:
        raise _damaged(path, offset, f"the record's header has {len(data)} bytes, expected {HEAD_BYTES}")
    [written] = _DIGEST.unpack_from(data, _HEAD.size)
    found = xxhash.xxh3_64_intdigest(data[: _HEAD.size])
    if found != written:
        raise _damaged(path, offset, f"the header's xxh3 is {found:016x}, but {written:016x} was written")
    magic, *rest = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _damaged(path, offset, f"the record begins with {magic!r}, expected {MAGIC!r}")
    return RecordHead(*rest)


@dataclass(slots=True)
class _Segment:
    """Reading state of one segment file."""

    end: int = 0
    """Byte offset of the end of the last complete record that this process has read."""
    positions: set[int] = field(default_factory=set)
    """Positions, in the prompt stream, of the prompts whose records are in the file."""


class SegmentFolder:
    """The segment files with one suffix in a folder, for one of their writers. Calls must not overlap."""

    def __init__(self, folder: Path, writer: str, suffix: str, settings: str) -> None:
        """writer: name that becomes part of the names of this writer's files. A later writer with the same name does
        not overwrite them. settings: records that were written with other settings are not read."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writer = re.sub(r"[^A-Za-z0-9]+", "-", writer)
        self._suffix = suffix
        self.fingerprint = xxhash.xxh3_64_intdigest(settings.encode())
        self._segments: dict[Path, _Segment] = {}
        self._stamp = 0
        """Highest stamp (number that orders records) of any record read or written."""
        self._open: tuple[Path, int] | None = None
        """Path and file descriptor of the segment file that is being written; None when there is none."""

    def refresh(self) -> tuple[set[Path], list[tuple[Path, int, RecordHead]]]:
        """Return the files that are gone since the last call, and the path, offset and header of the new records.
        Raises DamagedJournal if a header is damaged."""
        sizes = self._sizes()
        gone = self._segments.keys() - sizes.keys()
        for path in gone:
            del self._segments[path]
        new = []
        for path, size in sizes.items():
            segment = self._segments.setdefault(path, _Segment())
            if size <= segment.end:
                continue
            try:
                heads, segment.end = read_heads(path, segment.end)
            except FileNotFoundError:  # Another writer has removed the file; the next refresh forgets it.
                continue
            for offset, head in heads:
                segment.positions.add(head.position)
                self._stamp = max(self._stamp, head.stamp)
                if head.fingerprint == self.fingerprint:
                    new.append((path, offset, head))
        return gone, new

    def append(self, encode: Callable[[int, int], bytes]) -> None:
        """Write one record. encode: function from fingerprint and stamp to the record.

        Raises OSError, which names the file, if the file cannot be written, usually because the disk is full.
        """
        # Stamps follow the clock, so that records of independent writers are ordered too.
        self._stamp = max(self._stamp + 1, time.time_ns())
        record = encode(self.fingerprint, self._stamp)
        path, descriptor = self._open = self._open or self._begin()
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            # The incomplete record must stay the last one of its file.
            self.end()
            raise OSError(error.errno, f"journal: {path} cannot be written: {error.strerror}") from error

    def trim(self, is_done: Callable[[int], bool]) -> None:
        """Remove the files, of any writer, all of whose positions are done. Call `end` and `refresh` first, and
        `refresh` afterwards. Files that other processes are writing are kept."""
        for path, segment in list(self._segments.items()):
            if all(map(is_done, segment.positions)):
                _remove_unless_written(path, segment.end)

    def end(self) -> None:
        """Close the file that is being written; a later `append` starts a new one. Idempotent."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _begin(self) -> tuple[Path, int]:
        """Create a new segment file, locked as long as this process writes to it, and return its path and descriptor.

        The operating system releases the lock when the process ends for any reason. Readers identify a file by its
        name. The name therefore contains the time, so that the name of a removed file is never reused.
        """
        while True:
            path = self._folder / f"{self._writer}-{time.time_ns()}{self._suffix}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:  # Another writer with the same name has just created this file.
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)  # Another writer removed the empty file before it was locked.

    def _sizes(self) -> dict[Path, int]:
        sizes = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(self._suffix):
                    with suppress(FileNotFoundError):  # Another writer has removed the file in the meantime.
                        sizes[Path(entry.path)] = entry.stat().st_size
        return sizes


def _remove_unless_written(path: Path, end: int) -> None:
    """Remove a segment file of the journal, unless a process is writing to it or it has records after byte `end`.

    Does nothing if the file no longer exists.
    """
    try:
        descriptor = try_lock(path)
    except FileNotFoundError:
        return
    if descriptor is None:
        return
    try:
        new, _ = read_heads(path, end)
        if not new:
            path.unlink()
    except FileNotFoundError:
        return
    finally:
        os.close(descriptor)
