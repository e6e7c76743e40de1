"""Keeps a log of what a directory did in two files in memory, so that the next process can do it again.

A frame is written by one call before its requests are answered, and the memory outlives the process that wrote it. So
the log has whatever a client was answered. One file is in use at a time. When it has become long, the other file gets
a new beginning, from which the same state follows, and is used from then on. A process may be killed at any byte: a
frame at the end that is not whole is left out, and a file counts once its beginning is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterator, Sequence

import msgspec
import xxhash

_logger = logging.getLogger(__name__)

Item = tuple[str, bytes]
"""One record: its kind, and its content, whose meaning depends on the kind."""

_HEAD = struct.Struct("<QQ")
"""Beginning of a frame: number of bytes that follow it, and their checksum."""
_ORDER = "order"
"""Kind of the first record of a file, whose content is the file's place in the order of beginnings."""


def memory_files() -> tuple[int, int]:
    """Create two empty files in memory and return their descriptors. The memory is free once all processes that have
    the descriptors have ended."""
    return os.memfd_create("headrace-directory-log"), os.memfd_create("headrace-directory-log")


class EffectLog:
    """Writes and reads the log of one directory. Only one process at a time may use it."""

    def __init__(self, files: Sequence[int]) -> None:
        """files: descriptors of two files, which are empty for a new log."""
        self._files = tuple(files)
        self._order, self._used = 0, 0
        for number, file in enumerate(self._files):
            first = next(_frames(file), [])
            if first and first[0][0] == _ORDER and int.from_bytes(first[0][1], "little") > self._order:
                self._order, self._used = int.from_bytes(first[0][1], "little"), number
        self._frames = list(_frames(self._files[self._used])) if self._order else []
        self.nbytes = sum(len(frame) for frame in map(_framed, self._frames))
        """Number of bytes of the file in use."""
        self.is_whole = True
        """Whether everything was written. If not, no state can be taken from the log."""
        if not self._order:
            self.begin([])

    def take(self) -> Iterator[Item]:
        """Return the records that earlier processes wrote, in their order. They are returned once."""
        frames, self._frames = self._frames, []
        for frame in frames:
            yield from (item for item in frame if item[0] != _ORDER)

    def append(self, items: Sequence[Item]) -> None:
        """Write records as one frame, which is read in full or not at all."""
        self._write(self._files[self._used], self.nbytes, _framed(items))

    def begin(self, items: Sequence[Item]) -> None:
        """Replace all records by these, from which the same state follows."""
        old, other = self._files[self._used], 1 - self._used
        os.ftruncate(self._files[other], 0)
        frame = _framed([(_ORDER, (self._order + 1).to_bytes(8, "little")), *items])
        self._write(self._files[other], 0, frame)
        self._order, self._used = self._order + 1, other
        os.ftruncate(old, 0)

    def _write(self, file: int, at: int, frame: bytes) -> None:
        if not self.is_whole:
            return
        try:
            view = memoryview(frame)
            while view:
                view = view[os.pwrite(file, view, at + len(frame) - len(view)) :]
        except OSError as error:  # The memory of this process is used up.
            self.is_whole = False
            for each in self._files:
                with contextlib.suppress(OSError):
                    os.ftruncate(each, 0)
            _logger.warning("the directory's log cannot grow, so its process cannot be replaced if it dies: %s", error)
        self.nbytes = at + len(frame)


def _framed(items: Sequence[Item]) -> bytes:
    body = msgspec.msgpack.encode(items)
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _frames(file: int) -> Iterator[list[Item]]:
    """Read the whole frames at the beginning of a file."""
    at, size = 0, os.fstat(file).st_size
    while at + _HEAD.size <= size:
        nbytes, checksum = _HEAD.unpack(os.pread(file, _HEAD.size, at))
        if at + _HEAD.size + nbytes > size:
            return
        body = os.pread(file, nbytes, at + _HEAD.size)
        if len(body) < nbytes or xxhash.xxh3_64_intdigest(body) != checksum:
            return
        yield msgspec.msgpack.decode(body, type=list[tuple[str, bytes]])
        at += _HEAD.size + nbytes
