"""The `ipc` transport: weights through shared memory, for trainers and engines on one host.

A sender has one folder, `/dev/shm/headrace-{run_id}-weights/`:
  `owner`               locked for as long as the sender's process lives; a folder whose lock is free is stale
  `buckets-0`, `-1`     the bytes of the last two versions, written in turn; memory is reserved once and used again
  `manifest-{version}`  what lies where and its checksums; appears when all bytes are there, goes before they do

A receiver copies, verifies every checksum, and then looks whether the manifest is still there: if so, the bytes were
not being overwritten meanwhile.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...codecs import messages
from ...codecs.buckets import ALIGN, BucketPlan, fill_bucket, plan_buckets, read_bucket
from ...dataplane.stores.shm_folder import PREFIX, ROOT, remove_stale_folders
from .protocol import WeightManifest, WeightTransferError

KIND = "ipc"
_SLOTS = 2


@dataclass(frozen=True, slots=True)
class _Contents:
    """A manifest file."""

    version: int
    plan: BucketPlan
    buffer: str
    """File name of the bytes."""
    offsets: tuple[int, ...]
    """First byte of each bucket in the buffer."""
    checksums: tuple[int, ...]
    """xxh3 of each bucket."""


class IpcSender:
    """Publishes to this host's receivers. Used by one thread at a time."""

    def __init__(self, run_id: str, *, bucket_bytes: int = 64 << 20, root: Path = ROOT) -> None:
        """bucket_bytes: bytes under one checksum, a multiple of 64.

        Raises ValueError when a living sender of the same run has the folder, or the host has no shared memory.
        """
        if not root.is_dir():
            raise ValueError(f"sync.transport='ipc' needs {root}, which this host does not have")
        remove_stale_folders(root)
        self._bucket_bytes = bucket_bytes
        self._folder = root / f"{PREFIX}{run_id}-weights"
        self._owner: int | None = _create_owned_folder(self._folder, run_id)
        self._slots: list[_Slot | None] = [None] * _SLOTS
        self._published: list[int | None] = [None] * _SLOTS
        self._num_sent = 0
        self._version: int | None = None

    def send(self, version: int, named: Mapping[str, torch.Tensor]) -> WeightManifest:
        """See the protocol. Raises OSError when /dev/shm has no room for another version, naming the bytes wanted."""
        if self._owner is None:
            raise RuntimeError("weights: the sender is closed")
        if self._version is not None and version <= self._version:
            raise ValueError(f"weights: got version {version}, expected one above the last, {self._version}")
        plan = plan_buckets({name: (t.dtype, tuple(t.shape)) for name, t in named.items()}, self._bucket_bytes)
        offsets = np.cumsum([0, *(-(-size // ALIGN) * ALIGN for size in plan.sizes)]).tolist()
        number = self._num_sent % _SLOTS
        self._retract(number)
        slot = self._slot(number, max(offsets[-1], ALIGN))
        checksums = tuple(
            fill_bucket(plan, bucket, named, slot.memory[offset:]) for bucket, offset in enumerate(offsets[:-1])
        )
        contents = _Contents(version, plan, slot.path.name, tuple(offsets[:-1]), checksums)
        path = self._manifest_path(version)
        draft = path.with_suffix(".draft")
        draft.write_bytes(messages.encode(contents))
        os.rename(draft, path)
        self._published[number], self._version = version, version
        self._num_sent += 1
        return WeightManifest(version, KIND, str(path), sum(plan.sizes))

    def close(self) -> None:
        if self._owner is None:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._owner)
        self._owner = None
        self._slots = [None] * _SLOTS

    def _manifest_path(self, version: int) -> Path:
        return self._folder / f"manifest-{version}"

    def _retract(self, number: int) -> None:
        """Withdraw the version in slot `number` before its bytes change."""
        old = self._published[number]
        if old is not None:
            self._manifest_path(old).unlink()
            self._published[number] = None

    def _slot(self, number: int, nbytes: int) -> _Slot:
        slot = self._slots[number]
        if slot is None or len(slot.memory) < nbytes:
            slot = self._slots[number] = _Slot.reserve(self._folder / f"buckets-{number}", nbytes)
        return slot


@dataclass(frozen=True, slots=True)
class _Slot:
    """The memory of one version."""

    path: Path
    memory: np.ndarray
    """uint8, writable; keeps its mapping alive."""

    @staticmethod
    def reserve(path: Path, nbytes: int) -> _Slot:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # lack of room is an error here, not a SIGBUS at a later write
            mapping = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            raise OSError(error.errno, f"weights: no room for {nbytes} bytes at {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return _Slot(path, np.frombuffer(mapping, np.uint8))


def _create_owned_folder(folder: Path, run_id: str) -> int:
    """Make the folder with its lock held from the moment it has its name. Returns the lock's descriptor."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir(mode=0o700)
    owner = os.open(draft / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    try:
        os.rename(draft, folder)
    except OSError:
        shutil.rmtree(draft)
        os.close(owner)
        raise ValueError(f"run_id {run_id!r}: a living run has the folder {folder}; choose another") from None
    return owner


class IpcReceiver:
    """Reads what this host's sender published. Stateless: every receive maps the bytes anew."""

    def receive(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """See the protocol."""
        path = Path(manifest.location)
        contents = _read_manifest(manifest.version, path)
        buffer = _map_buffer(manifest.version, path.parent / contents.buffer)
        named: dict[str, torch.Tensor] = {}
        for bucket, (offset, checksum) in enumerate(zip(contents.offsets, contents.checksums, strict=True)):
            try:
                read_bucket(contents.plan, bucket, buffer[offset:], named, checksum=checksum)
            except ValueError as error:
                raise WeightTransferError(
                    f"weights: version {manifest.version} in {path.parent / contents.buffer}: {error}"
                ) from error
        if not path.exists():
            raise _not_there(manifest.version, path)
        return named

    def close(self) -> None:
        """Nothing is kept open."""


def _read_manifest(version: int, path: Path) -> _Contents:
    try:
        contents = messages.decode(path.read_bytes(), _Contents)
    except FileNotFoundError:
        raise _not_there(version, path) from None
    except ValueError as error:
        raise WeightTransferError(f"weights: version {version}: {path} is no manifest: {error}") from error
    if contents.version != version:
        raise WeightTransferError(f"weights: {path} holds version {contents.version}, expected {version}")
    return contents


def _map_buffer(version: int, path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise WeightTransferError(f"weights: version {version}: {path} cannot be mapped: {error}") from error


def _not_there(version: int, path: Path) -> WeightTransferError:
    return WeightTransferError(
        f"weights: version {version} is not at {path} (any more): the sender has ended or is two versions ahead"
    )
