"""The journal of turns keeps the engine's answers of unfinished groups on disk, until the group is in the journal.

    engine's answer -> queue -> one thread writes all that wait -> the environment sees the answer
                                 |  after a kill, when the prompt is rolled out again
                                 +--> the answers of the group, in the order of their writing

Files have the form of the journal's (`journal_segments.py`), and stand beside them. A record's body is one `TurnRecord`
(`codecs/messages.py`).
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...codecs import messages
from ..engines.protocol import Generator
from ..environments.recovery import RecoveringEngine, TurnRecord
from .journal import GroupJournal, JournalConfig
from .journal_segments import SegmentFolder, pack_record, read_body

_SUFFIX = ".turns"
SEGMENT_BYTES = 64 << 20
"""Size at which a writer begins another file, so that files of finished groups can be removed between checkpoints."""
_Place = tuple[int, Path, int]
"""Place of a record: its stamp, its file, and its offset in bytes."""


class TurnJournal:
    """Access to the journal of turns for one writer, such as a rollout actor. Its coroutines run in one event loop."""

    def __init__(self, config: JournalConfig, writer: str, groups: GroupJournal, piece_tokens: int = 0) -> None:
        """writer: see `GroupJournal`. groups: the journal of finished groups. piece_tokens: see `RecoveringEngine`."""
        self._segments = SegmentFolder(Path(config.folder), writer, _SUFFIX, config.fingerprint)
        self._groups = groups
        self._piece_tokens = piece_tokens
        self._places: defaultdict[int, list[_Place]] = defaultdict(list)
        self._written = 0
        """Bytes of the segment file that is being written."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Find the records that any writer has added since the last call. Raises DamagedJournal if a header is
        damaged."""
        await asyncio.to_thread(self._locked_refresh)

    async def engine(self, position: int, engine: Generator, *, fresh: bool = False) -> RecoveringEngine:
        """Return an engine for the group at `position`, with the answers that were recorded at the last `refresh`.

        fresh: True if nothing is read and nothing recorded. Raises DamagedJournal if a record is damaged.
        """
        if fresh:
            return RecoveringEngine(engine, None, (), self._piece_tokens)
        records = await asyncio.to_thread(self._read, position) if position in self._places else ()
        return RecoveringEngine(engine, _GroupLog(self, position), records, self._piece_tokens)

    async def write(self, position: int, record: TurnRecord) -> None:
        """Record an answer of the group at `position`. Returns once it is written. Raises OSError, which names the
        file, if it cannot be written."""
        body = messages.encode(record)  # An error here concerns this record alone, not those written together with it.
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((position, body, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        await done

    async def trim(self, first: int, outstanding: Collection[int]) -> None:
        """Remove files, of any writer, of groups that are in the journal or that a checkpoint covers.

        The file that is being written is closed first. first, outstanding: see `GroupJournal.trim`."""
        await asyncio.to_thread(self._trim, first, outstanding)

    async def close(self) -> None:
        """Wait for the answers that are being written, and close the file. Idempotent."""
        if self._writer is not None:
            await asyncio.wait({self._writer})
        with self._lock:
            self._segments.end()

    # ---------------- These private methods run in threads, except for the first.

    async def _write_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await asyncio.to_thread(self._append, [(position, body) for position, body, _ in batch])
                error = None
            except Exception as failed:
                error = failed
            for _, _, done in batch:
                if not done.done():  # The episode that waits for it may have been cancelled.
                    done.set_result(None) if error is None else done.set_exception(error)

    def _append(self, records: Sequence[tuple[int, bytes]]) -> None:
        with self._lock:
            for position, body in records:
                self._segments.append(functools.partial(pack_record, body, position))
                self._written += len(body)
            if self._written > SEGMENT_BYTES:
                self._groups.refresh()
                self._remove(set(self._groups.positions).__contains__)

    def _trim(self, first: int, outstanding: Collection[int]) -> None:
        with self._lock:
            kept, finished = set(outstanding), set(self._groups.positions)
            self._remove(lambda position: position in finished or (position < first and position not in kept))

    def _remove(self, is_done: Callable[[int], bool]) -> None:
        self._segments.end()
        self._written = 0
        self._refresh()
        self._segments.trim(is_done)
        self._refresh()

    def _locked_refresh(self) -> None:
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        gone, new = self._segments.refresh()
        if gone:
            for position in list(self._places):
                left = [place for place in self._places[position] if place[1] not in gone]
                if left:
                    self._places[position] = left
                else:
                    del self._places[position]
        for path, offset, head in new:
            self._places[head.position].append((head.stamp, path, offset))

    def _read(self, position: int) -> list[TurnRecord]:
        """Return the recorded answers of the group at `position`, in the order of their writing."""
        with self._lock:
            places = sorted(self._places.get(position, ()))
        records = []
        for _, path, offset in places:
            with suppress(FileNotFoundError):  # Another writer has removed the file, so the group is finished.
                records.append(messages.decode(read_body(path, offset)[1], TurnRecord))
        return records


@dataclass(frozen=True, slots=True)
class _GroupLog:
    """Records the answers of one group (a `TurnLog`)."""

    journal: TurnJournal
    position: int

    async def write(self, record: TurnRecord) -> None:
        await self.journal.write(self.position, record)
