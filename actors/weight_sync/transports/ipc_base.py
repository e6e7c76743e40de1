"""Base classes of the `ipc` transport, on CPUs and GPUs: sender and receivers share one status file per update.

A sender has one folder, `/dev/shm/headrace-{run_id}-weights/`:
  `owner`           lock file, locked while the sender's process lives; a folder whose lock is free is stale
  `update-{n}`      status file of the sender's n-th update; removed once the update is withdrawn
  `lease-update-*`  a receiver's lease on that update's bytes
  `slot-*`          bytes of a version (CPU only)
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ....codecs import messages
from ....codecs.weights.buckets import BucketPlan, read_plan
from ....dataplane.owned_folder import PREFIX, SHARED_MEMORY, create_owned_folder, owner_lives, remove_stale_folders
from .deadline import TICK_S, Deadline
from .protocol import WeightUpdate
from .receiver import Stream
from .sender import Sender, SenderUpdate
from .shared_status import OPEN, WHOLE, WITHDRAWN, Lease, SharedStatus

KIND = "ipc"
_LOOK_S = 0.05
"""Seconds between two checks that the sender is alive."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Description of an update, which the sender stores in the update's status file."""

    layout: bytes
    """Encoded bucket plan."""
    slot: str = ""
    """Name of the file with the weights' bytes, in which bucket b starts at `bucket_offsets(plan)[b]`; CPU only."""
    ring: tuple[bytes, ...] = ()
    """IPC handles of the sender's two buffers (payload n is in buffer n modulo 2) and of the array with the buckets'
    digests; GPU only."""
    gpu_uuid: str = ""
    """UUID of the GPU that holds the buffers; GPU only."""

    @property
    def plan(self) -> BucketPlan:
        """Decoded bucket plan. Raises ValueError when `layout` is not a plan."""
        return read_plan(self.layout)


class IpcSenderBase(Sender):
    """Base class of `ipc` senders: owns the sender's folder, and creates the status file of each update in it."""

    kind = KIND

    def __init__(self, run_id: str, timeout_s: float, root: Path = SHARED_MEMORY) -> None:
        """Create the sender's folder in shared memory. Raises ValueError if a running sender of the same run owns the
        folder, or if the host has no shared memory."""
        if not root.is_dir():
            raise ValueError(f"sync.transport='ipc' needs {root}, which this host does not have")
        super().__init__(timeout_s)
        remove_stale_folders(root)
        self.folder = root / f"{PREFIX}{run_id}-weights"
        self._owner = create_owned_folder(self.folder, run_id)

    def _announce(self, update: SenderUpdate, contents: Contents) -> SharedStatus:
        receivers = sum(group.num_workers for group in update.receivers)
        path = self.folder / f"update-{update.number}"
        try:
            return SharedStatus.create(
                path, update.version, len(update.plan.sizes), receivers, messages.encode(contents)
            )
        except OSError as error:
            raise OSError(error.errno, f"weights: no room for the status file {path}: {error.strerror}") from error

    def _close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)


class IpcStreamBase(Stream):
    """Base class of `ipc` streams: receives one update, and holds a lease on its bytes until it is closed."""

    tick_s = TICK_S

    def __init__(
        self, update: WeightUpdate, status: SharedStatus, lease: Lease, contents: Contents, deadline: Deadline
    ) -> None:
        super().__init__(update, contents.plan, deadline)
        self._status = status
        self._lease = lease
        self._looked = 0.0

    def _confirm(self) -> None:
        self.deadline.wait(self._is_whole, lambda: ("all buckets came, the sender did not finish", ()), self.tick_s)

    def _wait(self, bucket: int) -> None:
        of = f"bucket {bucket} of {len(self.plan.sizes)}"

        def has_come() -> bool:
            self._check_status(f"waiting for {of}")
            if self._status.frame(bucket) is not None:
                return True
            if self._status.state == WHOLE:
                if self._status.frame(bucket) is not None:  # it came between the two checks
                    return True
                raise self.deadline.error(f"{of} never came, though the sender finished")
            return False

        self.deadline.wait(
            has_come, lambda: (f"{of} did not come from the sender, {self._status.path}", ()), self.tick_s
        )

    def _is_whole(self) -> bool:
        self._check_status("at the end")
        return self._status.state == WHOLE

    def _check_status(self, when: str) -> None:
        """Raise WeightTransferError when the stream was closed, the update was withdrawn or the sender has died."""
        self.check_open()
        state = self._status.state
        if state == WITHDRAWN:
            raise self.deadline.error(f"{when}: the sender has withdrawn it: {self._status.reason}")
        now = time.monotonic()
        if state == OPEN and now >= self._looked + _LOOK_S:
            self._looked = now
            if not owner_lives(self._status.path.parent) and self._status.state == OPEN:
                raise self.deadline.error(f"{when}: the sender of {self._status.path} has ended")

    def _close(self) -> None:
        self._lease.release()


def join(update: WeightUpdate, deadline: Deadline) -> tuple[SharedStatus, Lease, Contents]:
    """Join an update on this host: map its status file and take a lease on its bytes. Raises WeightTransferError if the
    update does not exist (any more) or its description is damaged."""
    path = Path(update.location)
    gone = f"is not at {path} (any more): the sender has ended or has published two versions since"
    lease = None
    try:
        status = SharedStatus.open(path)
        lease = Lease(path, deadline.end)
        contents = messages.decode(status.contents, Contents)
        read_plan(contents.layout)  # raises ValueError now if it is damaged
    except (FileNotFoundError, ValueError) as error:
        if lease is not None:
            lease.release()
        raise deadline.error(gone if isinstance(error, FileNotFoundError) else str(error)) from error
    if status.version != update.version or status.state == WITHDRAWN:
        lease.release()
        other = f"{path} holds version {status.version}"
        raise deadline.error(other if status.version != update.version else f"{gone}: {status.reason}")
    return status, lease, contents
