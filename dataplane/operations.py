"""The client's operations without I/O: each is a generator of steps, which the sync and the async client carry out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from tensordict import TensorDictBase

from ..codecs import messages
from ..codecs.batch import Batch
from ..codecs.blocks import EncodedBlock, RowSource
from ..codecs.jagged import pack
from ..codecs.schema import Schema
from . import requests
from .block_io import check_readable, column_bytes, encode_blocks, read_rows, write_blocks
from .block_store import BlockStore
from .client_stats import ClientStats
from .compact import check_keys, pack_keys
from .directory import ClaimRows, Outcome
from .errors import DataPlaneError, SchemaMismatch
from .handle import DataPlaneHandle
from .meta import KVBatchMeta, check_tags
from .partition import PutRows
from .rows import default_group
from .status import DataPlaneStatus

_logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0

Fields = Batch | Mapping[str, Any] | TensorDictBase
"""What put takes: anything that `codecs.jagged.pack` does."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Step: call the directory; its answer is the reply."""

    op: str
    payload: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """Step: run this, which may move bytes and block; its answer is the result. Not to be left before it has ended."""

    run: Callable[[], Any]


T = TypeVar("T")
Steps = Generator[Ask | Work, Any, T]
"""An operation: yields steps, is sent their answers (or thrown their errors), returns its result."""


class Operations:
    """One client's operations, over its store. Thread-safe: holds nothing that changes but caches and counters."""

    def __init__(self, handle: DataPlaneHandle, store: BlockStore, name: str) -> None:
        self.handle = handle
        self.store = store
        self.stats = ClientStats()
        self.label = f"{name or 'client'} pid={os.getpid()}"
        self._schemas: dict[str, Schema] = {}

    def timeout(self, timeout_s: float | None) -> float:
        """The call's bound in seconds. Raises ValueError when negative."""
        if timeout_s is None:
            return self.handle.config.timeout_s
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s: got {timeout_s}, expected a number of seconds >= 0")
        return float(timeout_s)

    def register(self, partition: str, schema: Schema, tasks: Sequence[str], group_size: int) -> Steps[None]:
        if isinstance(tasks, str):
            raise ValueError(f"tasks: got the string {tasks!r}, expected a sequence of names")
        request = requests.Register(partition, schema, tuple(tasks), group_size)
        yield Ask("register", requests.encode(request), self.timeout(None))
        self._schemas[partition] = schema

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Fields,
        versions: int | np.ndarray | None,
        groups: Sequence[str] | None,
        tags: Mapping[str, np.ndarray] | None,
        replace: bool,
        timeout_s: float | None,
    ) -> Steps[KVBatchMeta]:
        bound = self.timeout(timeout_s)
        deadline = time.monotonic() + bound
        schema = yield from self._schema(partition, bound)
        names = check_keys(keys)
        group_names = None if groups is None else check_keys(groups)
        if group_names is not None and len(group_names) != len(names):
            raise ValueError(f"groups: got {len(group_names)} names, expected one for each of {len(names)} keys")

        def prepare() -> tuple[PutRows, list[EncodedBlock]]:
            batch = _packed(partition, schema, fields, names)
            cut_by = group_names if group_names is not None else [default_group(key) for key in names]
            config = self.handle.config
            blocks = encode_blocks(batch, cut_by, config.block_rows, checksum=config.integrity == "verify")
            put = PutRows(
                partition,
                names,
                tuple(batch),
                batch.lengths,
                _versions(versions, len(names)),
                group_names,
                check_tags(tags or {}, len(names)),
                tuple(block.layout for block in blocks),
                replace,
                self.label,
            )
            return put, blocks

        put, blocks = yield Work(prepare)
        if not names:
            return _empty_receipt(partition, schema, put.fields)
        reply = yield Ask("reserve", requests.encode(requests.Reserve.of(put, bound)), bound)
        reserved = messages.decode(reply, requests.Reserved)
        try:
            locations = yield Work(
                lambda: write_blocks(self.store, blocks, reserved.first_block_id, reserved.locations, deadline)
            )
            commit = requests.Commit(reserved.reservation_id, locations)
            receipt = KVBatchMeta.from_bytes((yield Ask("commit", requests.encode(commit), bound)))
        except BaseException:
            yield from self._abort(reserved.reservation_id)
            raise
        self.stats.count_bytes(put=sum(sum(layout.part_bytes) for layout in put.layouts))
        return receipt

    def get(self, meta: KVBatchMeta, fields: Sequence[str] | None, timeout_s: float | None) -> Steps[Batch]:
        bound = self.timeout(timeout_s)
        names = meta.fields if fields is None else tuple(fields)
        check_readable(meta, names)
        check = self.handle.config.integrity == "verify"
        batch = yield Work(lambda: read_rows(self.store, meta, names, check=check, timeout_s=bound))
        self.stats.count_bytes(got=column_bytes(batch))
        return batch

    def lookup(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None, timeout_s: float | None
    ) -> Steps[KVBatchMeta]:
        names = None if fields is None else tuple(fields)
        request = requests.Lookup(partition, pack_keys(check_keys(keys)), names)
        reply = yield Ask("lookup", requests.encode(request), self.timeout(timeout_s))
        return KVBatchMeta.from_bytes(reply)

    def get_keys(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], timeout_s: float | None
    ) -> Steps[Batch]:
        meta = yield from self.lookup(partition, keys, fields, timeout_s)
        return (yield from self.get(meta, None, timeout_s))

    def claim(
        self, partition: str, task: str, fields: Sequence[str], n: int, whole_groups: bool, timeout_s: float | None
    ) -> Steps[KVBatchMeta]:
        bound = self.timeout(timeout_s)
        request = requests.Claim(ClaimRows(partition, task, tuple(fields), n, whole_groups), bound)
        return KVBatchMeta.from_bytes((yield Ask("claim", requests.encode(request), bound)))

    def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, timeout_s: float | None) -> Steps[None]:
        if len(meta):
            request = requests.Release(meta.partition, task, meta.lease_id, pack_keys(meta.keys), outcome)
            yield Ask("release", requests.encode(request), self.timeout(timeout_s))

    def clear(self, partition: str, keys: Sequence[str] | None, timeout_s: float | None) -> Steps[int]:
        request = requests.Clear(partition, None if keys is None else pack_keys(check_keys(keys)))
        reply = yield Ask("clear", requests.encode(request), self.timeout(timeout_s))
        return messages.decode(reply, int)

    def status(self, partition: str | None, timeout_s: float | None) -> Steps[DataPlaneStatus]:
        reply = yield Ask("status", requests.encode(requests.Status(partition)), self.timeout(timeout_s))
        return messages.decode(reply, DataPlaneStatus)

    def _schema(self, partition: str, bound: float) -> Steps[Schema]:
        if partition not in self._schemas:
            reply = yield Ask("describe", requests.encode(requests.Describe(partition)), bound)
            self._schemas[partition] = messages.decode(reply, Schema)
        return self._schemas[partition]

    def _abort(self, reservation_id: int) -> Steps[None]:
        """Best effort: what it cannot reach ends with the reservation itself, after `reserve_s`."""
        try:
            yield Ask("abort", requests.encode(requests.Abort(reservation_id)), ABORT_TIMEOUT_S)
        except DataPlaneError as error:
            _logger.warning("could not take back a failed put, its reservation will expire: %s", error)


def _packed(partition: str, schema: Schema, fields: Fields, keys: Sequence[str]) -> Batch:
    try:
        batch = pack(schema, fields, len(keys))
    except ValueError as error:
        raise SchemaMismatch(str(error), op="put", partition=partition, keys=keys) from None
    if not len(batch):
        raise SchemaMismatch("no fields to put", op="put", partition=partition, keys=keys)
    return batch


def _versions(versions: int | np.ndarray | None, num_rows: int) -> np.ndarray | None:
    """int64 `[N]`. Raises ValueError for another shape or non-integers."""
    if versions is None:
        return None
    array = np.asarray(versions)
    if array.dtype.kind not in "iu" or array.shape not in ((), (num_rows,)):
        raise ValueError(
            f"versions: got {array.dtype} {list(array.shape)}, expected one integer or one for each of {num_rows} rows"
        )
    return np.broadcast_to(array, (num_rows,)).astype(np.int64)


def _empty_receipt(partition: str, schema: Schema, fields: tuple[str, ...]) -> KVBatchMeta:
    none, places = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    sources = (RowSource(fields, places, places, none),)
    return KVBatchMeta(partition, (), fields, none, none, none, {}, (), sources, schema=schema)
