"""Keeps the folder of a pool: the journal of its commands, and the file that says where the pool runs.

A command is in the journal before it is answered, so that a restarted pool continues where it stopped. The journal
begins with a snapshot of the pool and continues with one record per command. A record consists of its length, the xxh3
checksum of its bytes, and the bytes. A record that is incomplete because the process ended is dropped with all later
records: such a command was never answered. Opening the journal writes a new file with the state as its snapshot.
Nothing here imports Ray.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from ....codecs import messages
from ....dataplane.owned_folder import try_lock
from ...errors import UserError
from ...supervision.cleanup import is_running
from ..state.commands import BY_NAME, Command
from ..state.pool import Pool

_HEAD = struct.Struct("<IQ")
_MAGIC = b"hrpool01"
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
        self._file = -1
        try:
            self.pool = replay(path) if path.exists() else pool
            if self.pool.num_gpus != pool.num_gpus:
                raise UserError(
                    f"pool: {path} belongs to a pool of {self.pool.num_gpus} GPUs, expected {pool.num_gpus}; remove "
                    "it to start over"
                )
            self.pool.bounds = pool.bounds
            self._compact()
        except BaseException:
            self.close()
            raise

    def apply(self, now_s: float, command: Command) -> None:
        """Carry out a command and write it to the journal before returning. Raises UserError for a refused command.
        Refused commands, and a `Tick` that changes nothing, are not written.
        """
        if not self.pool.apply(now_s, command):
            return
        body = messages.encode((now_s, type(command).__name__, messages.encode(command)))
        os.write(self._file, _record(body))
        if os.fstat(self._file).st_size > COMPACT_BYTES:
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
        os.write(file, _MAGIC + _record(messages.encode(self.pool)))
        os.fsync(file)
        os.replace(draft, self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file = file


def replay(path: Path) -> Pool:
    """Return the pool in the state that its journal describes. Raises UserError if the file is not a journal or has no
    complete snapshot."""
    records = _records(path)
    first = next(records, None)
    if first is None:
        raise UserError(f"pool: {path} is not the journal of a pool; remove it to start over")
    pool = messages.decode(first, Pool)
    for body in records:
        now_s, name, command = messages.decode(body, tuple[float, str, bytes])
        pool.apply(now_s, messages.decode(command, BY_NAME[name]))
    return pool


def _record(body: bytes) -> bytes:
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records before the first incomplete or damaged one."""
    data = path.read_bytes()
    if data[: len(_MAGIC)] != _MAGIC:
        return
    at = len(_MAGIC)
    while at + _HEAD.size <= len(data):
        length, digest = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
            return
        yield body
        at += _HEAD.size + length


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


def write_pool(folder: Path, served: ServedPool) -> None:
    """Write the address and process of the pool of `folder` to its file SERVER."""
    draft = folder / f"{SERVER}.new"
    draft.write_text(json.dumps(asdict(served)))
    draft.rename(folder / SERVER)


def find_pool(folder: Path) -> ServedPool:
    """Return the address and process of the pool of `folder`. Raises UserError if the pool is not running."""
    try:
        served = ServedPool(**json.loads((folder / SERVER).read_text()))
    except OSError:
        why = f"pool: {folder} has no running pool; `headrace pool start --dir {folder}` starts one"
        raise UserError(why) from None
    if not is_running(served.pid):
        raise UserError(f"pool: the pool of {folder} was killed; `headrace pool start --dir {folder}` starts it again")
    return served
