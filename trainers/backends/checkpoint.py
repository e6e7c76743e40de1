"""Reads and writes sharded checkpoints: every rank writes its shards, and any number of ranks can read them."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

STEPS = "steps"
"""Name of the number of optimizer steps taken (int64 scalar), which is the whole state of the schedule."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, steps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every tensor that training changes by name: the live tensors, sharded where the model is.

    Hyperparameters are left out on purpose, because the config decides them on resume.
    """
    state = {STEPS: steps}
    state |= {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[param].items()}
    return state


def prepare(
    path: str,
    state: dict[str, torch.Tensor],
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
    *,
    copy: bool,
) -> dict[str, torch.Tensor]:
    """Start the draft of the folder `path` and return what `write` writes: `state` and the rank's RNG. Collective.

    `copy` returns copies in host memory, so that the live tensors may change before they are written. An older
    checkpoint at `path`, which a resumed run may reach again, is replaced once the new one is whole. Raises ValueError
    on every rank when `path` exists and is not a checkpoint.
    """
    on_first_rank(lambda: _restart_draft(path), rank, world, group)
    staged = {**state, **_rng_state(rank)}
    return {name: value.detach().to("cpu", copy=True) for name, value in staged.items()} if copy else staged


def write(path: str, staged: dict[str, torch.Tensor], rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Write what `prepare` returned and publish it. Collective over `group`.

    The folder is written as `path.tmp` and renamed at the end. A kill in between leaves no `path`, and the next save
    removes the draft.
    """
    with _one_process(world):
        save(staged, checkpoint_id=draft_of(path), process_group=group)
    on_first_rank(lambda: publish(path), rank, world, group)


def load_checkpoint(
    path: str, state: dict[str, torch.Tensor], rank: int, world: int, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the tensors of `state` in place from the folder `path`, and set this rank's RNG. Collective over `group`.

    Any number of ranks in any mesh may load. A rank without an RNG state in the checkpoint takes that of rank % saved
    ranks. Raises ValueError, before anything is changed, when there is no whole checkpoint or it is of another model.
    """
    on_first_rank(lambda: _recover(path), rank, world, group)
    if not _is_whole(path):
        raise ValueError(f"checkpoint {path}: missing or incomplete, expected a folder that save has written")
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, value in state.items():
        entry = stored.get(name)
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if size != tuple(value.shape):
            found = "no such tensor" if size is None else f"shape {size}"
            raise ValueError(f"checkpoint {path}: has {found} for {name!r}, the model needs shape {tuple(value.shape)}")
    saved_ranks = sum(name.startswith("rng.") for name in stored)
    rng = {name: torch.empty_like(value) for name, value in _rng_state(rank % saved_ranks).items() if name in stored}
    with _one_process(world):
        load({**state, **rng}, checkpoint_id=path, process_group=group)
    for name, value in rng.items():
        torch.cuda.set_rng_state(value) if name.startswith("cuda_rng.") else torch.set_rng_state(value)


def draft_of(path: str) -> str:
    """Return the folder that is written first and renamed to `path` when it is whole."""
    return f"{path}.tmp"


def start_draft(path: str, *, replaces: bool = False) -> None:
    """Make an empty draft folder. Raises ValueError when `path` itself exists, unless the draft `replaces` it."""
    if os.path.exists(path) and not replaces:
        raise ValueError(f"{path}: exists already, expected the name of a new folder")
    shutil.rmtree(draft_of(path), ignore_errors=True)
    os.makedirs(draft_of(path))


def publish(path: str) -> None:
    """Rename the draft to `path` and remove what was there. `_recover` repairs a kill between the two renames."""
    if os.path.exists(path):
        shutil.rmtree(_old_of(path), ignore_errors=True)
        os.rename(path, _old_of(path))
    os.rename(draft_of(path), path)
    shutil.rmtree(_old_of(path), ignore_errors=True)


def _old_of(path: str) -> str:
    return f"{path}.old"


def _recover(path: str) -> None:
    """Restore the old checkpoint when a kill interrupted its replacement."""
    if not os.path.exists(path) and _is_whole(_old_of(path)):
        os.rename(_old_of(path), path)


def _restart_draft(path: str) -> None:
    _recover(path)
    start_draft(path, replaces=_is_whole(path))


def on_first_rank(action: Callable[[], None], rank: int, world: int, group: dist.ProcessGroup | None = None) -> None:
    """Run `action` on rank 0 while the other ranks wait; if it raises there, every rank raises and none keeps waiting.

    Collective over `group`, or over the default group when it is None. The other ranks raise OSError or ValueError if
    the error on rank 0 is one of these, else RuntimeError; their message starts with "rank 0".
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
    """Return whether `path` is a whole checkpoint, which has the file that torch writes last."""
    return os.path.exists(os.path.join(path, ".metadata"))


def _rng_state(rank: int) -> dict[str, torch.Tensor]:
    state = {f"rng.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"cuda_rng.{rank}"] = torch.cuda.get_rng_state()
    return state


@contextmanager
def _one_process(world: int) -> Iterator[None]:
    """Silence torch's warning that it assumes one process, which is right for one rank without a process group."""
    with warnings.catch_warnings():
        if world == 1:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
