"""The journal: finished groups on disk, until a checkpoint covers them, so that a resumed run generates none again.

    finished group -> append -> put -> trained on -> checkpoint -> trim
                        |  kill -9 anywhere from here to the checkpoint
                        +--> the resumed run finds the group and puts it as it is

Every rollout actor appends to segment files of its own in one folder, and reads all actors': who takes over a prompt
need not be who had it. Nothing is flushed to the disk itself: a killed process loses nothing that it has written, as
the operating system holds it; a host that loses power may lose the last seconds' groups.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import xxhash

from ...codecs.owned_folder import try_lock
from .journal_records import JournaledGroup, encode_record, read_group, read_heads

_SUFFIX = ".journal"
Purpose = Literal["resume", "record", "replay"]


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """Where a run's journal is. Plain data."""

    folder: str
    """Seen by all rollout actors; made when it is not there."""
    fingerprint: str
    """Of all that decides how a prompt's group comes out besides the policy's weights. Groups of another are not
    found."""
    purpose: Purpose = "resume"
    """`resume`: groups without failed rows are kept until a checkpoint covers them; `record`: all are kept for good;
    `replay`: nothing is written, and a group that is not there is an error."""


@dataclass(slots=True)
class _Segment:
    """What is known of one file."""

    end: int = 0
    """Byte behind the last whole record that was seen."""
    positions: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a position's latest record is."""

    stamp: int
    path: Path
    offset: int


class GroupJournal:
    """One writer's access to the journal. May be shared by threads. All calls touch the disk: not for an event loop."""

    def __init__(self, config: JournalConfig, writer: str) -> None:
        """writer: part of its files' names; what is in them stays when another of the same name comes.

        Raises ValueError when there is nothing to replay.
        """
        self._folder = Path(config.folder)
        self.purpose: Purpose = config.purpose
        if self.purpose == "replay" and not self._folder.is_dir():
            raise ValueError(
                f"run.replay: {self._folder} is no folder, expected the journal of a run with run.record=true"
            )
        self._fingerprint = xxhash.xxh3_64_intdigest(config.fingerprint.encode())
        self._writer = re.sub(r"[^A-Za-z0-9]+", "-", writer)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._segments: dict[Path, _Segment] = {}
        self._latest: dict[int, _Entry] = {}
        self._stamp = 0
        """The highest seen in any file."""
        self._open: tuple[Path, int] | None = None
        """The segment that is written to, and its descriptor."""
        self._lock = threading.Lock()

    def append(self, groups: Iterable[JournaledGroup]) -> None:
        """Write one record for each. When it returns, no kill of this process loses them; a kill in between leaves all
        before the one being written.

        A position's record takes the place of earlier ones. Raises OSError naming the file (no room, mostly).
        """
        with self._lock:
            for group in groups:
                # By the clock, so that records of writers that never read one another are ordered too.
                self._stamp = max(self._stamp + 1, time.time_ns())
                self._write(encode_record(group, self._fingerprint, self._stamp))

    def refresh(self) -> None:
        """Learn of all records that all writers have written by now; only heads that are new are read.

        Raises DamagedJournal.
        """
        with self._lock:
            self._refresh()

    @property
    def positions(self) -> list[int]:
        """Of all prompts that have a group, as the last `refresh` saw them, ascending."""
        return sorted(self._latest)

    def find_all(self, positions: Iterable[int]) -> list[JournaledGroup]:
        """`refresh`, and then `find` those of the prompts at `positions` that have a group.

        Raises DamagedJournal; ValueError naming a prompt that has none in a replay.
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
        """The latest group of the prompt at `position`, as the last `refresh` saw it; None when there is none.

        Raises DamagedJournal.
        """
        entry = self._latest.get(position)
        if entry is None:
            return None
        try:
            return read_group(entry.path, entry.offset)
        except FileNotFoundError:  # trimmed by another writer meanwhile
            return None

    def trim(self, first: int, outstanding: Collection[int]) -> None:
        """Remove segments, anybody's, that hold settled positions only: below `first` and not in `outstanding`.

        Ends the segment being written, so that a later call may remove it. Those that others are writing stay.
        Idempotent; nothing but for `resume`. Raises DamagedJournal.
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
        """End the segment being written. Idempotent; a later append begins another."""
        with self._lock:
            self._end_segment()

    # ------------------------------------------------------------ inside

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
        except FileNotFoundError:  # trimmed by another writer meanwhile; the next refresh forgets it
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
            # What was written of the record must stay the end of its file.
            self._end_segment()
            raise OSError(error.errno, f"journal: {path} cannot be written: {error.strerror}") from error

    def _begin_segment(self) -> tuple[Path, int]:
        """A new file, locked for as long as this process writes to it: a lock ends with its process, however it
        ends.

        Named by the clock: readers know a file by its name, and one that was trimmed must not come back as another.
        """
        while True:
            path = self._folder / f"{self._writer}-{time.time_ns()}{_SUFFIX}"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:  # of another of the same name, begun at the same time
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)  # trimmed, empty, before it was locked

    def _end_segment(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def _sizes(folder: Path) -> dict[Path, int]:
    """Bytes of each segment."""
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX):
                with suppress(FileNotFoundError):  # trimmed by another writer meanwhile
                    sizes[Path(entry.path)] = entry.stat().st_size
    return sizes


def _remove_unless_written(path: Path, end: int) -> None:
    """Remove a segment, unless a process writes to it, or has since `end` was its last record's. One that is gone
    already is no error."""
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
