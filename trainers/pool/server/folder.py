"""Keeps the folder of a pool: the journal of its commands, and the file that says where the pool runs.

A command is in the journal before it changes the pool in memory and is answered, so that a restarted pool continues
where it stopped. The journal begins with a snapshot of the pool and continues with one record per command. A record
consists of its length, the xxh3 checksum of its bytes, and the bytes. A record is written whole or cut off again, as on
a full disk. One that is incomplete because the process ended is dropped: such a command was never answered. Opening the
journal writes a new file with the state as its snapshot. Nothing here imports Ray.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from ....actors.process.json_lines import replace_file
from ....codecs import messages
from ....dataplane.owned_folder import pid_space, process_start, try_lock
from ...errors import UserError
from ..state.commands import BY_NAME, Command
from ..state.pool import Pool

_HEAD = struct.Struct("<IQ")
_MAGIC = b"hrpool02"
_log = logging.getLogger(__name__)
COMPACT_BYTES = 16 << 20
"""Size of the journal in bytes from which it is replaced by a snapshot."""


class PoolJournal:
    """A pool that survives the end of its process. One process at a time may have it open."""

    def __init__(self, path: Path, pool: Pool) -> None:
        """Open the journal, or begin one with the state `pool`.

        Raises UserError if another process has it open, if it belongs to a pool of another size, or if it is not a
        journal.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.with_suffix(".lock").touch()
        self._lock = try_lock(path.with_suffix(".lock"))
        if self._lock is None:
            raise UserError(f"pool: {path} is open in another process, expected one process per pool")
        self._file, self._end = -1, 0
        try:
            self.pool, end = _replayed(path) if path.exists() else (pool, 0)
            if self.pool.num_gpus != pool.num_gpus:
                raise UserError(
                    f"pool: {path} belongs to a pool of {self.pool.num_gpus} GPUs, expected {pool.num_gpus}; remove "
                    "it to start over"
                )
            self.pool.bounds = pool.bounds
            try:
                self._compact()
            except OSError as error:
                if not end:
                    raise
                _log.warning("%s is continued as it is: %s", path, error)  # For example, the disk is full.
                self._file, self._end = os.open(path, os.O_WRONLY | os.O_APPEND), end
        except BaseException:
            self.close()
            raise

    def apply(self, now_s: float, command: Command) -> None:
        """Carry out a command, which is written to the journal before it changes `pool`. Refused commands, and a `Tick`
        that changes nothing, are not written. Raises UserError for a refused command, and OSError if the journal cannot
        be written; nothing has changed then.
        """
        trial = messages.decode(messages.encode(self.pool), Pool)
        if not trial.apply(now_s, command):
            return
        body = messages.encode((now_s, type(command).__name__, messages.encode(command)))
        try:
            self._end = append_whole(self._file, _record(body), self._end)
        except OSError as error:
            raise OSError(error.errno, f"pool: {self._path} cannot be written: {error.strerror}") from error
        self.pool = trial
        if self._end > COMPACT_BYTES:
            with suppress(OSError):  # The journal then stays long, and the next command tries again.
                self._compact()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _compact(self) -> None:
        """Replace the file by one that begins with the present state of the pool. The old file stays until the new one
        is complete."""
        draft = self._path.with_suffix(".new")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            end = append_whole(file, _MAGIC + _record(messages.encode(self.pool)), 0)
            os.fsync(file)
            os.replace(draft, self._path)
        except BaseException:
            os.close(file)
            draft.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._end = file, end


def append_whole(descriptor: int, data: bytes, end: int) -> int:
    """Append `data` to a file, opened with O_APPEND, whose whole records end at byte `end`; returns the new end. Bytes
    behind `end`, which an earlier failure can have left, are cut off first. Raises OSError; the file is then as before,
    or the next call makes it so."""
    if os.fstat(descriptor).st_size > end:
        os.ftruncate(descriptor, end)
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except BaseException:
        with suppress(OSError):
            os.ftruncate(descriptor, end)
        raise
    return end + len(data)


def replay(path: Path) -> Pool:
    """Return the pool in the state that its journal describes. Raises UserError if the file is not a journal or has no
    complete snapshot."""
    return _replayed(path)[0]


def _replayed(path: Path) -> tuple[Pool, int]:
    """Return the pool that a journal describes, and the end of its last whole record in bytes; see `replay`."""
    records = _records(path)
    first, end = next(records, (b"", 0))
    if not end:
        raise UserError(f"pool: {path} is not the journal of a pool of this version; remove it to start over")
    pool = messages.decode(first, Pool)
    for body, after in records:
        now_s, name, command = messages.decode(body, tuple[float, str, bytes])
        pool.apply(now_s, messages.decode(command, BY_NAME[name]))
        end = after
    return pool, end


def _record(body: bytes) -> bytes:
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _records(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the records before the first incomplete or damaged one, each with its end in bytes."""
    data = path.read_bytes()
    if data[: len(_MAGIC)] != _MAGIC:
        return
    at = len(_MAGIC)
    while at + _HEAD.size <= len(data):
        length, digest = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            return
        at += _HEAD.size + length
        yield body, at


SERVER = "server.json"
"""File in a pool's folder that exists for as long as the pool."""
AUTH_MODE = "RAY_AUTH_MODE"
"""Environment variable that says whether Ray's processes prove that they know the cluster's token. Ray reads it when it
is imported."""


@dataclass(frozen=True, slots=True)
class ServedPool:
    """Name, address and process of a pool that is running."""

    name: str
    address: str
    """Address of the pool's Ray cluster, for `pool.address`."""
    auth_mode: str
    """Value of AUTH_MODE with which processes join that cluster."""
    pid: int
    """Process id of `headrace pool start`."""
    num_gpus: int
    space: str
    """Space of the process id, as `pid_space` returns it."""
    start: int | None
    """Start time of the process in clock ticks, which tells it from a later process with the same id."""


def write_pool(folder: Path, served: ServedPool) -> None:
    """Write the address and process of the pool of `folder` to its file SERVER."""
    replace_file(folder / SERVER, json.dumps(asdict(served)).encode())


def find_pool(folder: Path) -> ServedPool:
    """Return the address and process of the pool of `folder`. Raises UserError if the pool is not running. A pool of
    another host counts as running, because its process cannot be observed."""
    try:
        served = ServedPool(**json.loads((folder / SERVER).read_text()))
    except (OSError, TypeError, ValueError):
        why = f"pool: {folder} has no running pool of this version; `headrace pool start --dir {folder}` starts one"
        raise UserError(why) from None
    if served.space == pid_space() and (served.start is None or process_start(served.pid) != served.start):
        raise UserError(f"pool: the pool of {folder} was killed; `headrace pool start --dir {folder}` starts it again")
    return served
