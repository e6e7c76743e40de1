"""The journal keeps finished groups on disk until a checkpoint covers them, so that a resumed run does not repeat them.

    finished group -> append -> put -> trained on -> checkpoint -> trim
                        |  after kill -9 anywhere from here to the checkpoint,
                        +--> the resumed run finds the group and puts it unchanged

A group is all rows of one prompt. Every rollout actor appends to its own segment files in one folder and reads those of
all actors, because another actor may take over a prompt.

A group is one record of a segment file (`journal_segments.py`). Its body has the length of the contents (8 bytes),
the contents (`codecs/messages.py`), and the encoded columns of the rows (`codecs/blocks.py`).
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from ...codecs import messages
from ...codecs.batch import Batch
from ...codecs.blocks import BlockLayout, encode_block, read_header
from ...codecs.gather import RowSource, assemble
from ...codecs.integers import cut_up, exclusive_cumsum
from ...dataplane.meta import POSITION
from .journal_segments import SegmentFolder, pack_record, read_body
from .results import GroupFigures
from .rows import RolloutRows

_LENGTH = struct.Struct("<Q")
_SUFFIX = ".journal"
Purpose = Literal["resume", "record", "replay"]


@dataclass(frozen=True, slots=True)
class JournaledGroup:
    """One finished group (all rows of a prompt), as the journal keeps it."""

    position: int
    """Position of the group's prompt in the run's prompt stream."""
    rows: RolloutRows
    figures: GroupFigures
    """Counts and sums of the group, which are added to the report of the rollout actor that writes the group to the
    data plane."""


class KnownGroups(Protocol):
    """Groups (all rows of one prompt) that need not be generated: a `GroupJournal`, or the rows of a supervised run."""

    @property
    def purpose(self) -> Purpose: ...

    def find_all(self, positions: Iterable[int]) -> list[JournaledGroup]: ...

    def append(self, groups: Iterable[JournaledGroup]) -> None: ...

    def trim(self, first: int, outstanding: Collection[int]) -> None: ...

    def close(self) -> None: ...


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
    length = _LENGTH.pack(len(contents))
    body = b"".join((length, contents, *(piece.data for part in block.pieces for piece in part)))
    return pack_record(body, group.position, fingerprint, stamp)


def read_group(path: Path, offset: int) -> JournaledGroup:
    """Read the record that begins at byte `offset` and return its group, which does not share memory with the file.

    Raises DamagedJournal if the record is damaged, and FileNotFoundError if there is no such file.
    """
    head, body = read_body(path, offset)
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    contents = messages.decode(memoryview(body)[_LENGTH.size : end], _Contents)
    batch = _decode_rows(np.frombuffer(body, dtype=np.uint8, offset=end), contents.layout)
    # Records of earlier versions have no tag for the position, but every header has the position.
    tags = {**contents.tags, POSITION: np.full(len(contents.keys), head.position)}
    rows = RolloutRows(contents.keys, contents.versions, tags, batch)
    return JournaledGroup(head.position, rows, contents.figures)


def _decode_rows(data: np.ndarray, layout: BlockLayout) -> Batch:
    """Decode all rows of an encoded batch. data: the encoded parts of the batch, one after another, uint8 1-D. layout:
    layout of these parts."""
    if layout.shared is not None:
        layout = replace(layout, shared=layout.shared.with_parents())
    parts = dict(enumerate(cut_up(data, layout.part_bytes)))
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
        self._segments = SegmentFolder(self._folder, writer, _SUFFIX, config.fingerprint)
        self._latest: dict[int, _Entry] = {}
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
                self._segments.append(functools.partial(encode_record, group))

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
            self._segments.end()
            self._refresh()
            self._segments.trim(lambda position: position < first and position not in kept)
            self._refresh()

    def close(self) -> None:
        """Close the segment file that is being written; a later `append` starts a new one. Idempotent."""
        with self._lock:
            self._segments.end()

    def _refresh(self) -> None:
        gone, new = self._segments.refresh()
        if gone:
            self._latest = {p: entry for p, entry in self._latest.items() if entry.path not in gone}
        for path, offset, head in new:
            known = self._latest.get(head.position)
            if known is None or head.stamp > known.stamp:
                self._latest[head.position] = _Entry(head.stamp, path, offset)
