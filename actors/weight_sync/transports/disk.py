"""The `disk` transport writes a version as safetensors files, for hosts that share nothing but a file system.

`{folder}/headrace-{run_id}-weights/`
  `owner`                       lock file, locked while the sender lives
  `v{version}-{n}/plan`         encoded bucket plan, written first
  `v{version}-{n}/bucket-*.safetensors`   one tensor `payload` each, uint8, with the frame in the file's metadata
  `v{version}-{n}/manifest`     written when all buckets are on the disk
  `v{version}-{n}/ended`        written instead when the update was aborted, with the reason

A file is written under a temporary name and renamed once it is complete. The last two versions are kept.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ....codecs import messages
from ....codecs.integers import ALIGN
from ....codecs.weights.buckets import BucketPlan, read_plan
from ....dataplane.owned_folder import PREFIX, create_owned_folder
from .ends import BackgroundSender, Receiver, SenderUpdate, Stream
from .protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate

KIND = "disk"
_KEPT = 2
_TICK_S = 0.001
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of the file `manifest`, which marks a version as complete."""

    version: int
    frames: tuple[BucketFrame, ...]


class DiskSender(BackgroundSender):
    """WeightSender that publishes weights as files, to all processes that can read the folder."""

    kind = KIND

    def __init__(self, folder: str, run_id: str, timeout_s: float) -> None:
        """Create the sender's folder. Raises ValueError if a running sender of the same run publishes in `folder`."""
        super().__init__(timeout_s)
        self.folder = Path(folder).absolute() / f"{PREFIX}{run_id}-weights"
        self._owner = create_owned_folder(self.folder, run_id)
        self._kept: list[tuple[int, Path]] = []
        self._frames: list[BucketFrame] = []

    def _open(self, update: SenderUpdate) -> str:
        again = [kept for kept in self._kept if kept[0] == update.version or (kept[1] / "ended").exists()]
        others = [kept for kept in self._kept if kept not in again]
        for old in again + others[: 1 - _KEPT]:
            self._kept.remove(old)
            _remove(old[1])
        nbytes, free = sum(update.plan.sizes), shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise OSError(errno.ENOSPC, f"weights: no room for {nbytes} bytes in {self.folder}: {free} are free")
        path = self.folder / f"v{update.version}-{update.number}"
        path.mkdir()
        _write_file(path / "plan", update.plan.message)
        self._kept.append((update.version, path))
        self._frames = []
        return str(path)

    def _write(self, update: SenderUpdate, frame: BucketFrame, payload: torch.Tensor) -> None:
        try:
            _write_file(bucket_path(Path(update.location), frame.bucket), _header(frame), payload.numpy().data)
        except OSError as error:
            raise self._failed(update, f"bucket {frame.bucket} cannot be written", error) from error
        self._frames.append(frame)

    def _complete(self, update: SenderUpdate) -> None:
        path = Path(update.location)
        try:
            _write_file(path / "manifest", messages.encode(Manifest(update.version, tuple(self._frames))))
            for folder in (path, self.folder):
                _sync_folder(folder)
        except OSError as error:
            raise self._failed(update, "cannot be completed", error) from error

    def _withdraw(self, update: SenderUpdate, reason: str) -> None:
        path = Path(update.location)
        with contextlib.suppress(OSError):  # Without room even for this file, readers wait until their deadline.
            _write_file(path / "ended", reason.encode())
        for file in [path / "manifest", *path.glob("bucket-*")]:
            file.unlink(missing_ok=True)

    def _remove_all(self) -> None:
        for _, path in self._kept:
            _remove(path)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)


class DiskReceiver(Receiver):
    """Receiver that maps the sender's files into memory."""

    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> Stream:
        path = Path(update.location)
        try:
            plan = read_plan((path / "plan").read_bytes())
        except FileNotFoundError:
            raise _gone(path, deadline, "at the start") from None
        except ValueError as error:
            raise deadline.error(f"{path / 'plan'}: {error}") from error
        return DiskStream(update, plan, deadline, path)


class DiskStream(Stream):
    """Stream whose payloads are the memory-mapped files themselves, without a copy."""

    lasting = True

    def __init__(self, update: WeightUpdate, plan: BucketPlan, deadline: Deadline, path: Path) -> None:
        super().__init__(update, plan, deadline)
        self._path = path

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        for bucket in range(len(self.plan.sizes)):
            of = f"bucket {bucket} of {len(self.plan.sizes)}"
            path = bucket_path(self._path, bucket)
            self._wait(path, of)
            try:
                frame, payload = _read_bucket_file(path)
            except FileNotFoundError:
                raise _gone(self._path, self.deadline, f"at {of}") from None
            except (OSError, ValueError) as error:
                raise self.deadline.error(f"{of}: {path} cannot be read: {error}") from error
            yield frame, payload
        self._wait(self._path / "manifest", "the end")
        try:
            manifest = messages.decode((self._path / "manifest").read_bytes(), Manifest)
        except FileNotFoundError:
            raise _gone(self._path, self.deadline, "at the end") from None
        if manifest.version != self.update.version or len(manifest.frames) != len(self.plan.sizes):
            raise self.deadline.error(
                f"{self._path} holds version {manifest.version} in {len(manifest.frames)} buckets, expected version "
                f"{self.update.version} in {len(self.plan.sizes)}"
            )

    def _wait(self, path: Path, what: str) -> None:
        def has_come() -> bool:
            self.check_open()
            if path.exists():
                return True
            if (self._path / "manifest").exists() and not path.exists():
                raise self.deadline.error(f"{what} never came, though the sender finished")
            if (self._path / "ended").exists() or not self._path.exists():
                raise _gone(self._path, self.deadline, f"waiting for {what}")
            return False

        self.deadline.wait(has_come, lambda: (f"{what} did not come from the sender: no {path}", ()), _TICK_S)

    def _close(self) -> None:
        """No-op: each file's mapping is released together with the last tensor that uses it."""


def bucket_path(folder: Path, bucket: int) -> Path:
    """Return the path of the file that holds a bucket."""
    return folder / f"bucket-{bucket:06d}.safetensors"


def _gone(path: Path, deadline: Deadline, when: str) -> WeightTransferError:
    with contextlib.suppress(FileNotFoundError):
        reason = (path / "ended").read_text(errors="replace")
        return deadline.error(f"{when}: the sender has ended the update: {reason}")
    return deadline.error(f"{when}: {path} is not there (any more): the sender has closed or is two versions ahead")


def _header(frame: BucketFrame) -> bytes:
    """Return the header of a safetensors file that holds one tensor, `payload`, and the frame as metadata. It is padded
    so that the tensor's bytes are aligned."""
    told = {name: str(value) for name, value in asdict(frame).items()}
    entry = {"dtype": "U8", "shape": [frame.nbytes], "data_offsets": [0, frame.nbytes]}
    text = json.dumps({"__metadata__": told, "payload": entry}).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % ALIGN)
    return _LENGTH.pack(len(text)) + text


def _read_bucket_file(path: Path) -> tuple[BucketFrame, torch.Tensor]:
    """Map a bucket's file into memory, and return its frame and payload. Raises OSError when it cannot be read, and
    ValueError when it is not a bucket's file."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        (length,) = _LENGTH.unpack_from(mapping)
        told = json.loads(mapping[_LENGTH.size : _LENGTH.size + length])["__metadata__"]
        numbers = {name: int(told[name]) for name in ("bucket", "nbytes", "checksum", "result")}
        frame = BucketFrame(encoding=told["encoding"], **numbers)
    except (KeyError, TypeError, struct.error) as error:
        raise ValueError(f"the file does not hold a bucket: {error!r}") from error
    if not frame.nbytes:
        return frame, torch.empty(0, dtype=torch.uint8)
    return frame, torch.frombuffer(mapping, dtype=torch.uint8, offset=_LENGTH.size + length)


def _write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it to `path`."""
    draft = path.with_name(f".{path.name}")
    with open(draft, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    # The manifest is removed first, so that a reader's last check finds it gone.
    (path / "manifest").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
