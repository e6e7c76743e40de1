"""The journal keeps finished groups on disk until a checkpoint covers them, so that a resumed run does not repeat them.

    finished group -> append -> put -> trained on -> checkpoint -> trim
                        |  after kill -9 anywhere from here to the checkpoint,
                        +--> the resumed run finds the group and puts it unchanged

A group is all rows of one prompt. Every rollout actor appends to its own segment files in one folder and reads those of
all actors, because another actor may take over a prompt. Files are not flushed to the disk. Writes of a killed process
are not lost, because the operating system holds them, but a host that loses power can lose the groups of the last
seconds.

A group is one record of a segment file:

    bytes 0-7    magic and format version
    bytes 8-47   fingerprint, position, stamp, number of bytes in the body, xxh3 of the body
    bytes 48-55  xxh3 of bytes 0-47
    then         body: length of the contents (8 bytes), contents (`codecs/messages.py`), and the encoded columns of
                 the rows (`codecs/blocks.py`)

With the two checksums, a reader can distinguish a record that was cut short by a kill from a record whose bytes have
changed. A record that was cut short is allowed at the end of a file; a record with changed bytes must not be used.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from ...codecs import messages
from ...codecs.batch import Batch
from ...codecs.blocks import BlockLayout, encode_block, read_header
from ...codecs.gather import RowSource, assemble
from ...codecs.integers import exclusive_cumsum
from ...dataplane.meta import POSITION
from ...dataplane.owned_folder import try_lock
from .results import GroupFigures
from .rows import RolloutRows

MAGIC = b"hrjrnl01"
_HEAD = struct.Struct("<8sQqQQQ")
_DIGEST = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _DIGEST.size
_SUFFIX = ".journal"
Purpose = Literal["resume", "record", "replay"]


class DamagedJournal(RuntimeError):
    """The bytes of a journal record differ from what was written. The message names the file and the byte at which the
    record begins."""


@dataclass(frozen=True, slots=True)
class JournaledGroup:
    """One finished group (all rows of a prompt), as the journal keeps it."""

    position: int
    """Position of the group's prompt in the run's prompt stream."""
    rows: RolloutRows
    figures: GroupFigures
    """Counts and sums of the group, which are added to the report of the rollout actor that writes the group to the
    data plane."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Header of a journal record. It precedes the record's body."""

    fingerprint: int
    """Hash of the settings that the group was made with (`JournalConfig.fingerprint`)."""
    position: int
    """Position of the group's prompt in the run's prompt stream."""
    stamp: int
    """Number that increases from record to record. If several records have the same position, the one with the highest
    stamp is valid."""
    nbytes: int
    """Number of bytes of the body."""
    digest: int
    """xxh3 hash of the body."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """Part of a record's body that precedes the encoded columns of the rows. It has the rows' metadata, the group's
    counts and sums, and the layout of the columns."""

    keys: list[str]
    versions: np.ndarray
    tags: dict[str, np.ndarray]
    figures: GroupFigures
    layout: BlockLayout


def encode_record(group: JournaledGroup, fingerprint: int, stamp: int) -> bytes:
    """Return the group encoded as one record of the journal."""
    rows = group.rows
    one_group = np.zeros(rows.batch.num_rows, np.int64)
    block = encode_block(rows.batch, 0, rows.batch.num_rows, checksum=False, groups=one_group)
    contents = messages.encode(_Contents(rows.keys, rows.versions, dict(rows.tags), group.figures, block.layout))
    body = b"".join((_DIGEST.pack(len(contents)), contents, *(piece.data for part in block.pieces for piece in part)))
    head = _HEAD.pack(MAGIC, fingerprint, group.position, stamp, len(body), xxhash.xxh3_64_intdigest(body))
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


def read_group(path: Path, offset: int) -> JournaledGroup:
    """Read the record that begins at byte `offset` and return its group, which does not share memory with the file.

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
    end = _DIGEST.size + _DIGEST.unpack_from(body)[0]
    contents = messages.decode(memoryview(body)[_DIGEST.size : end], _Contents)
    batch = _decode_rows(np.frombuffer(body, dtype=np.uint8, offset=end), contents.layout)
    # Records of earlier versions have no tag for the position, but every header has the position.
    tags = {**contents.tags, POSITION: np.full(len(contents.keys), head.position)}
    rows = RolloutRows(contents.keys, contents.versions, tags, batch)
    return JournaledGroup(head.position, rows, contents.figures)


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


def _decode_rows(data: np.ndarray, layout: BlockLayout) -> Batch:
    """Decode all rows of an encoded batch. data: the encoded parts of the batch, one after another, uint8 1-D. layout:
    layout of these parts."""
    ends = np.cumsum(layout.part_bytes)
    parts = dict(enumerate(np.split(data, ends[:-1])))
    schema, num_rows, lengths = read_header(parts[0])
    tokens = np.zeros(num_rows, dtype=np.int64) if lengths is None else lengths.astype(np.int64)
    source = RowSource(
        tuple(schema), np.zeros(num_rows, dtype=np.int32), np.arange(num_rows, dtype=np.int32), exclusive_cumsum(tokens)
    )
    return assemble(schema, tokens, [source], [layout], [parts])


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """Settings of a run's journal, as plain data."""

    folder: str
    """Folder that all rollout actors can read and write. It is created when missing."""
    fingerprint: str
    """Text that represents all settings, other than the policy's weights, that influence the content of a group (all
    rows of one prompt). Groups that were written with another fingerprint are ignored."""
    purpose: Purpose = "resume"
    """Purpose of the journal. `resume` keeps groups (all rows of one prompt) without failed rows until a checkpoint
    covers them. `record` keeps all groups permanently. `replay` only reads, and a missing group is an error."""


@dataclass(slots=True)
class _Segment:
    """Reading state of one segment file. A single writer appends to each such file of the journal."""

    end: int = 0
    """Byte offset of the end of the last complete record that this process has read."""
    positions: set[int] = field(default_factory=set)
    """Positions, in the prompt stream, of the prompts whose groups are in the file."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Location of the latest journal record for one position in the prompt stream."""

    stamp: int
    path: Path
    offset: int


class GroupJournal:
    """Access to the journal for one writer, such as a rollout actor. Thread-safe. All methods access the disk, so they
    must not be called directly in an event loop."""

    def __init__(self, config: JournalConfig, writer: str) -> None:
        """writer: name that becomes part of the names of this writer's files. A later writer with the same name does
        not overwrite them.

        Raises ValueError if the purpose is `replay` and the folder does not exist.
        """
        self._folder = Path(config.folder)
        self.purpose: Purpose = config.purpose
        if self.purpose == "replay" and not self._folder.is_dir():
            raise ValueError(
                f"run.replay: {self._folder} is not a folder, expected the journal of a run with run.record=true"
            )
        self._fingerprint = xxhash.xxh3_64_intdigest(config.fingerprint.encode())
        self._writer = re.sub(r"[^A-Za-z0-9]+", "-", writer)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._segments: dict[Path, _Segment] = {}
        self._latest: dict[int, _Entry] = {}
        self._stamp = 0
        """Highest stamp (number that orders records) of any record read or written."""
        self._open: tuple[Path, int] | None = None
        """Path and file descriptor of the segment file that is being written; None when there is none."""
        self._lock = threading.Lock()

    def append(self, groups: Iterable[JournaledGroup]) -> None:
        """Write one record for each group. A record replaces earlier records for the same position in the prompt
        stream.

        If this process is killed after the call, no group is lost; if it is killed during the call, only groups not yet
        written are lost. Raises OSError, which names the file, if the file cannot be written, usually because the disk
        is full.
        """
        with self._lock:
            for group in groups:
                # Stamps follow the clock, so that records of independent writers are ordered too.
                self._stamp = max(self._stamp + 1, time.time_ns())
                self._write(encode_record(group, self._fingerprint, self._stamp))

    def refresh(self) -> None:
        """Read the headers of all records that any writer has added since the last call. Raises DamagedJournal if a
        header is damaged."""
        with self._lock:
            self._refresh()

    @property
    def positions(self) -> list[int]:
        """Positions, in the prompt stream, of all prompts that had a group at the last `refresh`, ascending."""
        return sorted(self._latest)

    def find_all(self, positions: Iterable[int]) -> list[JournaledGroup]:
        """Call `refresh`, and return the groups that the journal has for the prompts at `positions`.

        Raises DamagedJournal if a record is damaged. In a replay, a prompt without a group raises ValueError, which
        names the prompt's position.
        """
        self.refresh()
        found = {position: self.find(position) for position in positions}
        missing = [position for position, group in found.items() if group is None]
        if missing and self.purpose == "replay":
            raise ValueError(
                f"run.replay: {self._folder} holds no group of the prompt at position {missing[0]} (and of "
                f"{len(missing) - 1} others), expected those of a run of as many steps with the same model, data, "
                "sampling, rewards and seed"
            )
        return [group for group in found.values() if group is not None]

    def find(self, position: int) -> JournaledGroup | None:
        """Return the latest group of the prompt at `position`, as of the last `refresh`; None if there is none.

        Raises DamagedJournal if the group's record is damaged.
        """
        entry = self._latest.get(position)
        if entry is None:
            return None
        try:
            return read_group(entry.path, entry.offset)
        except FileNotFoundError:  # Another writer has removed the file in the meantime.
            return None

    def trim(self, first: int, outstanding: Collection[int]) -> None:
        """Remove segment files, of any writer, that are no longer needed. Their positions in the prompt stream are all
        below `first` and not in `outstanding`.

        The segment file that this process is writing is closed first, so that it can be removed too, now or later.
        Files that other processes are writing are kept. Idempotent; does nothing unless the purpose is `resume`. Raises
        DamagedJournal if a record is damaged.
        """
        if self.purpose != "resume":
            return
        kept = set(outstanding)
        with self._lock:
            self._end_segment()
            self._refresh()
            for path, segment in list(self._segments.items()):
                if all(p < first and p not in kept for p in segment.positions):
                    _remove_unless_written(path, segment.end)
            self._refresh()

    def close(self) -> None:
        """Close the segment file that is being written; a later `append` starts a new one. Idempotent."""
        with self._lock:
            self._end_segment()

    # ---------------- These methods are private.

    def _refresh(self) -> None:
        sizes = _sizes(self._folder)
        gone = self._segments.keys() - sizes.keys()
        if gone:
            self._segments = {path: segment for path, segment in self._segments.items() if path not in gone}
            self._latest = {p: entry for p, entry in self._latest.items() if entry.path not in gone}
        for path, size in sizes.items():
            segment = self._segments.setdefault(path, _Segment())
            if size > segment.end:
                self._read_on(path, segment)

    def _read_on(self, path: Path, segment: _Segment) -> None:
        try:
            heads, segment.end = read_heads(path, segment.end)
        except FileNotFoundError:  # Another writer has removed the file in the meantime; the next refresh forgets it.
            return
        for offset, head in heads:
            segment.positions.add(head.position)
            self._stamp = max(self._stamp, head.stamp)
            if head.fingerprint != self._fingerprint:
                continue
            known = self._latest.get(head.position)
            if known is None or head.stamp > known.stamp:
                self._latest[head.position] = _Entry(head.stamp, path, offset)

    def _write(self, record: bytes) -> None:
        path, descriptor = self._open = self._open or self._begin_segment()
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            # The incomplete record must stay the last one of its file.
            self._end_segment()
            raise OSError(error.errno, f"journal: {path} cannot be written: {error.strerror}") from error

    def _begin_segment(self) -> tuple[Path, int]:
        """Create a new segment file, locked as long as this process writes to it, and return its path and descriptor.

        The operating system releases the lock when the process ends for any reason. Readers identify a file by its
        name. The name therefore contains the time, so that the name of a removed file is never reused.
        """
        while True:
            path = self._folder / f"{self._writer}-{time.time_ns()}{_SUFFIX}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:  # Another writer with the same name has just created this file.
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)  # Another writer removed the empty file before it was locked.

    def _end_segment(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def _sizes(folder: Path) -> dict[Path, int]:
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX):
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
