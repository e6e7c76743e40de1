"""The `store` transport puts buckets into the data plane, where engines that come late read them without the trainer.

Rows of the partition `weights`, for the update at location L:
  `L.plan`    the bucket plan, put first
  `L.{b}`     frame and payload of bucket b
  `L.whole`   put when all buckets are there
  `L.ended`   put instead when the update was aborted, with the reason

The last two versions are kept.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from ....codecs.batch import Ragged
from ....codecs.schema import Field, Kind, Schema
from ....codecs.weights.buckets import BucketPlan, read_plan
from ....dataplane.client.client import DataPlaneClient
from ....dataplane.errors import DataPlaneError, DataPlaneTimeout, KeysNotFound, RowsCleared
from ....dataplane.factory import connect
from ....dataplane.handle import DataPlaneHandle
from ....dataplane.meta import KVBatchMeta
from .ends import BackgroundSender, Receiver, SenderUpdate, Stream
from .protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate

KIND = "store"
PARTITION = "weights"
SCHEMA = Schema([Field("payload", Kind.RAGGED, torch.uint8, ndim=1), Field("frame", Kind.OBJECT)])
_KEPT = 2
_LOOK_S = 0.1
"""Longest time in seconds of one wait for a row at the data plane's directory. Between two waits, the receiver checks
that neither the update has ended nor the receiver was closed."""
_CLOSE_S = 5.0
_SAY_S = 0.5
"""Longest time in seconds that the reason of an abort waits for room; then the rows of the update are removed."""


@dataclass(slots=True)
class _Rows:
    version: int
    nbytes: int
    keys: list[str] = field(default_factory=list)
    ended: bool = False


class StoreSender(BackgroundSender):
    """WeightSender that publishes weights to all processes that can connect to the data plane."""

    kind = KIND

    def __init__(self, handle: DataPlaneHandle, timeout_s: float) -> None:
        """Connect to the data plane. Raises DirectoryLost or StoreLost when its directory or its store cannot be
        reached."""
        super().__init__(timeout_s)
        self._client = connect(handle, name="weights sender")
        self._client.register(PARTITION, SCHEMA)
        self._name = uuid.uuid4().hex[:8]
        self._kept: list[_Rows] = []

    def _open(self, update: SenderUpdate) -> str:
        update.location = f"{self._name}-{update.number}"
        rows = _Rows(update.version, sum(update.plan.sizes))
        try:
            for old in list(self._kept):
                if old.ended or old.version == update.version:
                    self._clear(old)
            for old in self._kept[: 1 - _KEPT]:
                self._clear(old)
            self._expect_room(update, rows.nbytes)
            self._kept.append(rows)
            self._put(update, "plan", {"plan": update.plan.message})
        except DataPlaneError as error:
            raise self._failed(update, "the store", error) from error
        return update.location

    def _write(self, update: SenderUpdate, frame: BucketFrame, payload: torch.Tensor) -> None:
        try:
            self._put(update, str(frame.bucket), asdict(frame), payload)
        except DataPlaneError as error:
            raise self._failed(update, f"bucket {frame.bucket} cannot be stored", error) from error

    def _complete(self, update: SenderUpdate) -> None:
        try:
            self._put(update, "whole", {"version": update.version})
        except DataPlaneError as error:
            raise self._failed(update, "cannot be completed", error) from error

    def _withdraw(self, update: SenderUpdate, reason: str) -> None:
        rows = self._kept[-1]
        keys, rows.keys, rows.ended = rows.keys, [], True
        said = False
        # If there is no room (CapacityExceeded), the reason is put again once the rows are gone.
        with contextlib.suppress(DataPlaneError):
            # The reason is put before the rows are removed, so that a reader always finds one of the two.
            self._put(update, "ended", {"reason": reason}, timeout_s=_SAY_S)
            said = True
        with contextlib.suppress(DataPlaneError):  # If this fails, readers still notice that rows are missing.
            if keys:
                self._client.clear(PARTITION, keys[::-1], timeout_s=_CLOSE_S)
            if not said:
                self._put(update, "ended", {"reason": reason}, timeout_s=_CLOSE_S)

    def _remove_all(self) -> None:
        with contextlib.suppress(DataPlaneError):  # A data plane that was closed before has removed the rows.
            for rows in list(self._kept):
                self._clear(rows)
        self._client.close()

    def _put(
        self,
        update: SenderUpdate,
        name: str,
        told: dict[str, Any],
        payload: torch.Tensor | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Put one row of the update. timeout_s: None takes what is left of the update's time limit."""
        values = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        fields = {"payload": Ragged(values, np.array([[len(values)]], np.int64)), "frame": [told]}
        key = f"{update.location}.{name}"
        left_s = self._deadline(update).left_s if timeout_s is None else timeout_s
        self._client.put(PARTITION, [key], fields, versions=update.version, timeout_s=left_s)
        self._kept[-1].keys.append(key)

    def _clear(self, rows: _Rows) -> None:
        self._kept.remove(rows)
        if rows.keys:
            # The row `whole` was put last and is removed first, so that a reader's last check finds it gone.
            self._client.clear(PARTITION, rows.keys[::-1], timeout_s=_CLOSE_S)

    def _expect_room(self, update: SenderUpdate, nbytes: int) -> None:
        capacity = self._client.status().bytes_capacity
        kept = sum(rows.nbytes for rows in self._kept)
        if nbytes + kept > capacity:
            raise OSError(
                errno.ENOSPC,
                f"weights: version {update.version} has {nbytes} bytes, the previous version {kept}, but "
                f"the store holds only {capacity}; raise dataplane.store.capacity_mib",
            )


class StoreReceiver(Receiver):
    """Receiver that reads weights from the data plane."""

    def __init__(self, engine: str, worker: int, handle: DataPlaneHandle) -> None:
        super().__init__(engine, worker)
        self._handle = handle
        self._client: DataPlaneClient | None = None

    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> Stream:
        try:
            if self._client is None:
                self._client = connect(self._handle, name=deadline.end)
        except DataPlaneError as error:
            raise deadline.error(f"the data plane cannot be joined: {error}") from error
        rows = _Reader(self._client, update.location, deadline)
        return StoreStream(update, rows.plan(), deadline, rows)

    def close(self) -> None:
        """Close the connection to the data plane. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None


class _Reader:
    def __init__(self, client: DataPlaneClient, location: str, deadline: Deadline) -> None:
        self._client = client
        self._location = location
        self._deadline = deadline

    def row(self, name: str, wait_s: float | None = None) -> tuple[dict[str, Any], torch.Tensor] | None:
        """Return the metadata and the payload of the row `name`; None when there is no such row. Raises
        WeightTransferError when reading fails. wait_s: number of seconds to wait for the row to be put; None does not
        wait."""
        left_s = max(self._deadline.left_s, 1e-3)
        try:
            meta = self._find(f"{self._location}.{name}", left_s, wait_s)
            if meta is None:
                return None
            batch = self._client.get(meta, timeout_s=left_s)
        except RowsCleared:
            return None
        except DataPlaneError as error:
            raise self._deadline.error(f"bucket {name}: {error}") from error
        return batch.objects("frame")[0], batch.ragged("payload").values

    def _find(self, key: str, left_s: float, wait_s: float | None) -> KVBatchMeta | None:
        """Return the receipt of a row (its key and location); None when there is no such row."""
        try:
            if wait_s is None:
                return self._client.lookup(PARTITION, [key], tuple(SCHEMA), timeout_s=left_s)
            return self._client.lookup(PARTITION, [key], tuple(SCHEMA), wait=True, timeout_s=wait_s)
        except (KeysNotFound, DataPlaneTimeout):
            return None

    def plan(self) -> BucketPlan:
        found = self.row("plan")
        if found is None:
            raise self._gone("at the start")
        return read_plan(bytes(found[0]["plan"]))

    def expect_there(self, when: str) -> None:
        """Raise WeightTransferError when the sender has aborted or removed the update."""
        if self.row("plan") is None:
            raise self._gone(when)

    def _gone(self, when: str) -> WeightTransferError:
        ended = self.row("ended")
        if ended is not None:
            return self._deadline.error(f"{when}: the sender has ended the update: {ended[0]['reason']}")
        return self._deadline.error(
            f"{when}: {self._location} is not in the store (any more): two versions were published since, or it closed"
        )


class StoreStream(Stream):
    """Receiver's stream of the weight buckets that a sender has put into the store. Each bucket has separate memory,
    so that all of them stay valid until `close`."""

    lasting = True

    def __init__(self, update: WeightUpdate, plan: BucketPlan, deadline: Deadline, rows: _Reader) -> None:
        super().__init__(update, plan, deadline)
        self._rows = rows

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        for bucket in range(len(self.plan.sizes)):
            told, payload = self._wait(str(bucket), f"bucket {bucket} of {len(self.plan.sizes)}")
            yield BucketFrame(**told), payload
        self._wait("whole", "the end")
        self._rows.expect_there("at the end")

    def _wait(self, name: str, what: str) -> tuple[dict[str, Any], torch.Tensor]:
        while (found := self._rows.row(name, wait_s=min(_LOOK_S, self.deadline.left_s))) is None:
            self.check_open()
            if not self.deadline.left_s:
                raise self.deadline.error(f"{what} did not come from the sender")
            self._rows.expect_there(f"waiting for {what}")
            if self._rows.row("whole") is not None and self._rows.row(name) is None:
                raise self.deadline.error(f"{what} never came, though the sender finished")
        self.check_open()
        return found

    def _close(self) -> None:
        """No-op: the stream holds nothing that has to be released."""
