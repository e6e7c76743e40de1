"""Saves and loads one rank's part of checkpoints. Saving can run in the background while training continues."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from .checkpoint import load_checkpoint, on_first_rank, prepare, write

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

        Without `wait` the call returns once the state is copied to host memory and may change again; the checkpoint is
        then written in the background. The folder `path` appears only when it is complete. If the write fails, the next
        `save`, `load`, `wait` or `close` raises its error.

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

    def load(self, path: str, state: dict[str, torch.Tensor]) -> None:
        """Wait for a write in progress to end, then fill `state` from the checkpoint `path` (see `load_checkpoint`)."""
        self.wait()
        with _torch_errors(path):
            load_checkpoint(path, state, self._rank, self._world, self._group)

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
            self._error = error  # `wait` raises it


@contextmanager
def _torch_errors(path: str) -> Iterator[None]:
    """Context that converts torch's CheckpointException to an OSError. CheckpointException is a BaseException and not
    an Exception, so it would end the actor."""
    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise OSError(f"checkpoint {path}: {'; '.join(causes)}") from None
