"""Saves and loads sharded checkpoints: every rank writes its shards, and any number of ranks can read them.

Saving can run in the background while training continues. Each checkpoint has the digests of its files:

    write_digests     each rank reads back and digests the files that it has written; rank 0 writes digests.json
    expect_undamaged  the ranks share the files; each digests its part, and all raise if one finds damage
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..errors import CheckpointDamaged, UserError

STEPS = "steps"
"""Name of the checkpoint entry that holds the number of optimizer steps taken (int64 scalar). This number is the whole
state of the learning-rate schedule."""


def prepare(
    path: str,
    state: dict[str, torch.Tensor],
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
    *,
    copy: bool,
) -> dict[str, torch.Tensor]:
    """Create the draft folder of the checkpoint `path` and return the tensors to pass to `write`. They are `state` and
    this rank's RNG state.

    With `copy` the result holds copies in host memory, so that the live tensors may change before they are written.
    An older checkpoint at `path` is replaced once the new one is complete; a resumed run can save a step again.
    Collective over `group`. Raises ValueError on every rank when `path` exists and is not a checkpoint.
    """

    def restart() -> None:
        _recover(path)
        start_draft(path, replaces=_is_whole(path))

    on_first_rank(restart, rank, world, group)
    staged = {**state, **_rng_state(rank)}
    return {name: value.detach().to("cpu", copy=True) for name, value in staged.items()} if copy else staged


def write(path: str, staged: dict[str, torch.Tensor], rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Write the tensors that `prepare` returned as the checkpoint `path`. Collective over `group`.

    The folder is written as `path.tmp` and renamed at the end. If the process is killed in between, an older checkpoint
    at `path` is kept, and the next save removes the draft.
    """
    with _one_process(world):
        save(staged, checkpoint_id=draft_of(path), process_group=group)
    complete(path, rank, world, group)


def complete(path: str, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Write the digests of the draft of `path`, and rename it if rank 0 sees the files of all ranks. Collective over
    `group`. Raises OSError on every rank if it does not see them, because the ranks' hosts share no folder."""
    write_digests(draft_of(path), rank, world, group)

    def rename() -> None:
        _expect_all_here(draft_of(path))
        publish(path)

    on_first_rank(rename, rank, world, group)


def load_checkpoint(
    path: str,
    state: dict[str, torch.Tensor],
    rank: int,
    world: int,
    group: dist.ProcessGroup | None = None,
    optional: dict[str, torch.Tensor] | None = None,
) -> None:
    """Fill the tensors of `state` in place from the checkpoint `path`, and set this rank's RNG state. Collective over
    `group`. optional: further tensors, of which those that the checkpoint lacks are removed.

    Any number of ranks in any mesh may load. If n ranks have saved their RNG state, rank r takes that of rank r % n.
    Raises ValueError, before any tensor is changed, when there is no complete checkpoint, when it belongs to another
    model, and, as CheckpointDamaged, when a file of it is not as it was written.
    """
    on_first_rank(lambda: _recover(path), rank, world, group)
    if not _is_whole(path):
        raise ValueError(f"checkpoint {path}: missing or incomplete, expected a folder that save has written")
    expect_undamaged(path, rank, world, group)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    optional = {} if optional is None else optional
    for name in optional.keys() - stored.keys():
        del optional[name]
    for name, value in {**state, **optional}.items():
        entry = stored.get(name)
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if size != tuple(value.shape):
            found = "no such tensor" if size is None else f"shape {size}"
            raise UserError(f"checkpoint {path} has {found} for {name!r}, the model needs shape {tuple(value.shape)}")
    saved_ranks = sum(name.startswith("rng.") for name in stored)
    rng = {name: torch.empty_like(value) for name, value in _rng_state(rank % saved_ranks).items() if name in stored}
    with _one_process(world):
        load({**state, **optional, **rng}, checkpoint_id=path, process_group=group)
    for name, value in rng.items():
        torch.cuda.set_rng_state(value) if name.startswith("cuda_rng.") else torch.set_rng_state(value)


def draft_of(path: str) -> str:
    """Return the name of the draft folder of a checkpoint. It is written first and renamed to `path` when it is
    complete."""
    return f"{path}.tmp"


def start_draft(path: str, *, replaces: bool = False) -> None:
    """Create an empty draft folder for `path`, and remove an older draft. Raises ValueError when `path` exists, unless
    `replaces` is true."""
    if os.path.exists(path) and not replaces:
        raise ValueError(f"{path}: exists already, expected the name of a new folder")
    shutil.rmtree(draft_of(path), ignore_errors=True)
    os.makedirs(draft_of(path))


def publish(path: str) -> None:
    """Rename the draft folder to `path` and remove the folder that was there before.

    If the process is killed between the two renames, `_recover` restores the older folder.
    """
    if os.path.exists(path):
        shutil.rmtree(_old_of(path), ignore_errors=True)
        os.rename(path, _old_of(path))
    os.rename(draft_of(path), path)
    shutil.rmtree(_old_of(path), ignore_errors=True)


def _old_of(path: str) -> str:
    return f"{path}.old"


def _recover(path: str) -> None:
    """Rename the older checkpoint back to `path` if the process was killed while replacing it."""
    if not os.path.exists(path) and _is_whole(_old_of(path)):
        os.rename(_old_of(path), path)


def on_first_rank(action: Callable[[], None], rank: int, world: int, group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on rank 0 while the other ranks wait. Collective over `group`, or over the default group when it is
    None. An error of `action` is raised on every rank. The other ranks raise OSError or ValueError if the error on rank
    0 is one of these, else RuntimeError; their message starts with "rank 0".
    """
    error: Exception | None = None
    if rank == 0:
        try:
            action()
        except Exception as raised:
            error = raised
    if world > 1:
        outcome: list[Any] = [None if error is None else _as_other_ranks_raise(error)]
        dist.broadcast_object_list(outcome, src=0, group=group)
        if rank != 0 and outcome[0] is not None:
            raise outcome[0]
    if error is not None:
        raise error


def _as_other_ranks_raise(error: Exception) -> Exception:
    if isinstance(error, OSError):
        return OSError(f"rank 0: {error}")
    if isinstance(error, ValueError):
        return ValueError(f"rank 0: {error}")
    return RuntimeError(f"rank 0: {type(error).__name__}: {error}")


def _is_whole(path: str) -> bool:
    """Return whether `path` is a complete checkpoint. Such a folder contains the file that torch writes last."""
    return os.path.exists(os.path.join(path, ".metadata"))


def _rng_state(rank: int) -> dict[str, torch.Tensor]:
    state = {f"rng.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"cuda_rng.{rank}"] = torch.cuda.get_rng_state()
    return state


@contextmanager
def _one_process(world: int) -> Iterator[None]:
    """Context that silences torch's warning about assuming a single process. The assumption is right for one rank
    without a process group."""
    with warnings.catch_warnings():
        if world == 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


DIGESTS = "digests.json"
"""File of a checkpoint's folder with the size in bytes and the xxh3_64 of every other file, by name."""
_CHUNK_BYTES = 16 << 20

_log = logging.getLogger(__name__)
Digests = dict[str, tuple[int, str]]
"""Name of a file -> its size in bytes and the hexadecimal xxh3_64 of its content."""


def file_digest(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Return the size in bytes and the hexadecimal xxh3_64 of a file. Raises OSError if it cannot be read."""
    digest, size, chunk = xxhash.xxh3_64(), 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while read := file.readinto(chunk):
            digest.update(chunk[:read])
            size += read
    return size, digest.hexdigest()


def write_digests(folder: str, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Write digests.json into a checkpoint's folder that all ranks have written. Collective over `group`. Raises
    OSError on every rank if one rank cannot read its files."""

    def own() -> Digests:
        names = (name for name in os.listdir(folder) if name.startswith(f"__{rank}_") or (name[0] == "." and not rank))
        return {name: file_digest(os.path.join(folder, name)) for name in names}

    found = _together(own, world, group)
    if not rank:
        Path(folder, DIGESTS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def _expect_all_here(folder: str) -> None:
    """Raise OSError unless this rank sees the files of all ranks in a folder that they have written."""
    known = json.loads(Path(folder, DIGESTS).read_text())
    absent = sorted(name for name, (size, _) in known.items() if _size(Path(folder, name)) != size)
    if absent:
        raise OSError(
            f"{folder}: rank 0 on {platform.node()} does not see {absent[0]} as its rank has written it, and "
            f"{len(absent) - 1} more; expected one folder (run.dir) that the hosts of all ranks share"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def expect_undamaged(path: str, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Compare the files of the checkpoint `path` with their digests. Collective over `group`.

    Raises CheckpointDamaged on every rank if a file is missing or has other bytes than were written. A checkpoint of a
    version that wrote no digests is not checked, with a warning.
    """
    outcome: list[Digests | str | None] = [None if rank else _read(path)]
    if world > 1:  # All ranks go by what one has read, as they must go on alike.
        dist.broadcast_object_list(outcome, src=0, group=group)
    [known] = outcome
    if isinstance(known, str):
        raise CheckpointDamaged(known)
    if known is None:
        return

    def part() -> Digests:
        names = sorted(known)[rank::world]
        files = {name: os.path.join(path, name) for name in names}
        return {name: file_digest(file) for name, file in files.items() if os.path.exists(file)}

    found = _together(part, world, group)
    damage = [
        f"{name} {_difference(known[name], found.get(name))}"
        for name in sorted(known)
        if found.get(name) != known[name]
    ]
    if damage:
        more = f", and {len(damage) - 1} more file(s)" if len(damage) > 1 else ""
        raise CheckpointDamaged(f"checkpoint {path} is damaged: {damage[0]}{more}")


def _read(path: str) -> Digests | str | None:
    """Return the digests of a checkpoint, or a sentence if they cannot be read; None if it has none."""
    try:
        read = json.loads(Path(path, DIGESTS).read_bytes())
        return {name: (int(size), str(digest)) for name, (size, digest) in read.items()}
    except FileNotFoundError:
        _log.warning("checkpoint %s: it has no %s, so its bytes are not checked", path, DIGESTS)
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"checkpoint {path} is damaged: {DIGESTS} cannot be read ({error})"


def _difference(known: tuple[int, str], found: tuple[int, str] | None) -> str:
    if found is None:
        return "is missing"
    if found[0] != known[0]:
        return f"has {found[0]} bytes, and {known[0]} were written"
    return f"has other bytes than were written (xxh3 {found[1]}, expected {known[1]})"


def _together(own: Callable[[], Digests], world: int, group: dist.ProcessGroup | None) -> Digests:
    """Return the digests that all ranks have computed, on every rank. An OSError of one rank is raised on all."""
    outcome: Digests | str
    try:
        outcome = own()
    except OSError as error:
        outcome = str(error)
    outcomes: list[Digests | str] = [outcome]
    if world > 1:
        outcomes = [outcome] * world
        dist.all_gather_object(outcomes, outcome, group=group)
    found: Digests = {}
    for number, one in enumerate(outcomes):
        if isinstance(one, str):
            raise OSError(f"rank {number}: {one}")
        found |= one
    return found


WRITE_TIMEOUT_S = 86_400.0
"""Seconds after which a checkpoint write that has not finished counts as failed. The limit is a last resort: the driver
watches the progress of a write and ends it when it hangs, and the death of a rank closes its connections to the other
ranks at once."""


class Checkpointer:
    """Writes one checkpoint at a time and reads checkpoints back. All calls are collective.

    The ranks communicate over a gloo group that is used for checkpoints only, so that a write in the background never
    mixes with the collectives of the training.
    """

    def __init__(self, rank: int, world: int, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._rank, self._world, self._timeout_s = rank, world, timeout_s
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout) if world > 1 else None
        assert not isinstance(group, int), "new_group returns a number to ranks outside of it; this group has all ranks"
        self._group = group
        self._thread: threading.Thread | None = None
        self._path = ""
        self._error: BaseException | None = None

    def save(self, path: str, state: dict[str, torch.Tensor], *, wait: bool = True) -> None:
        """Write `state` as the checkpoint `path`, after waiting for an earlier write to end.

        Without `wait` the call returns once the state is copied to host memory. Training may then change the state
        while the checkpoint is written in the background. The folder `path` appears only when it is complete. If the
        write fails, the next `save`, `load`, `wait` or `close` raises its error.

        Raises ValueError on every rank when `path` exists and is not a checkpoint.
        """
        self.wait()
        staged = prepare(path, state, self._rank, self._world, self._group, copy=not wait)
        if wait:
            with _torch_errors(path):
                write(path, staged, self._rank, self._world, self._group)
            return
        self._path = path
        self._thread = threading.Thread(target=self._write, args=(path, staged), name=f"save {path}", daemon=True)
        self._thread.start()

    def on_first_rank(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the other ranks wait for it, up to the time limit of a write.

        An OSError or ValueError from `action` is raised on every rank.
        """
        on_first_rank(action, self._rank, self._world, self._group)

    def load(self, path: str, state: dict[str, torch.Tensor], optional: dict[str, torch.Tensor] | None = None) -> None:
        """Wait for a write in progress to end, then fill `state` from the checkpoint `path` (see `load_checkpoint`)."""
        self.wait()
        with _torch_errors(path):
            load_checkpoint(path, state, self._rank, self._world, self._group, optional)

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises the error of the last write, once, or TimeoutError when the
        write takes longer than the time limit."""
        if self._thread is None:
            return
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"checkpoint {self._path}: still not written after {self._timeout_s:.0f} s")
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until no checkpoint is being written. Raises the error of the last write. Idempotent."""
        self.wait()

    def _write(self, path: str, staged: dict[str, torch.Tensor]) -> None:
        try:
            with _torch_errors(path):
                write(path, staged, self._rank, self._world, self._group)
        except BaseException as error:
            self._error = error  # `wait` raises this error.


@contextmanager
def _torch_errors(path: str) -> Iterator[None]:
    """Context that converts torch's CheckpointException to an OSError. CheckpointException derives from BaseException
    rather than Exception, so it would end the actor."""
    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise OSError(f"checkpoint {path}: {'; '.join(causes)}") from None
