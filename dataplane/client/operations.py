"""Implements the operations of data-plane clients without I/O, as generators of steps.

A step is a request to the directory or a piece of work. The blocking client and the asyncio client carry out the steps.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...codecs import messages
from ...codecs.batch import Batch
from ...codecs.blobs import BlobRows, References
from ...codecs.blocks import EncodedBlock
from ...codecs.schema import Schema
from ..blobs.row_references import holder_of_blobs
from ..block_store import ANY_HOLDER, BlockStore, ChoosesHolders
from ..compact import pack_keys, unpack_keys
from ..directory import requests
from ..directory.calls import ClaimRows, Committed, Fence, Outcome, PutRows, check_distinct
from ..directory.samplers import TaskConfig
from ..errors import (
    BlobsMissing,
    DataPlaneError,
    DataPlaneTimeout,
    DirectoryLost,
    ForeignReceipt,
    RowsCleared,
    SchemaMismatch,
    StoreLost,
)
from ..handle import DataPlaneHandle
from ..meta import KVBatchMeta, Tags, check_tags, unpack_schema
from ..rpc.forks import renew_in_forks
from ..rpc.links import in_all
from ..status import DataPlaneStatus, LeaseStatus, PartitionRows, TaskReset, TaskStatus
from ..traffic import ClientStats
from .arguments import Fields, checked, empty_receipt
from .block_io import check_readable, column_bytes, hosts_of, naming_lost, read_rows, write_blocks
from .lease_renewal import LeaseRenewal
from .prepared_put import BlobsOfField, carrying, prepared
from .put_credit import Credit
from .steps import SHIELD, Ask, Moved, Steps, Work

_logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0


class Operations:
    """Operations of one data-plane client, used by the blocking client and by the asyncio client. Thread-safe: the
    state is only a cache of schemas, counters, space granted in advance (credit) and the leases to renew."""

    def __init__(self, handle: DataPlaneHandle, store: BlockStore, leases: LeaseRenewal, name: str) -> None:
        self.handle = handle
        self.store = store
        self._leases = leases
        self.link = leases.link
        weakref.finalize(self, leases.end)  # This ends the renewal even if the client is never closed.
        self.stats = ClientStats()
        renew_in_forks(self.stats, ClientStats.renew_lock)
        self.label = f"{name or 'client'} pid={os.getpid()}"
        self.client: weakref.ref[Any] = weakref.ref(self)
        """The client whose operations these are."""
        self._plane_id = handle.store.plane_id
        self._schemas: dict[str, Schema] = {}
        # The client uses granted space for only half of `reserve_s`, so that a put has the other half to finish.
        self._credit = Credit(handle.config.reserve_s / 2)

    def of(self, partition: str) -> Operations:
        """Return these operations, which serve all partitions; see `ShardedOperations`."""
        return self

    def timeout(self, timeout_s: float | None) -> float:
        """Return a call's time limit in seconds: `timeout_s`, or the configured one for None."""
        return self.handle.config.timeout_s if timeout_s is None else timeout_s

    def _ask(self, op: str, request: object, timeout_s: float | None) -> Steps[bytes]:
        yield SHIELD
        return (yield Ask(self.link, op, requests.encode(request), self.timeout(timeout_s)))

    @checked
    def register(
        self, partition: str, schema: Schema, tasks: Sequence[TaskConfig], group_size: int, redefine: bool
    ) -> Steps[None]:
        request = requests.Register(partition, schema, tuple(tasks), group_size, redefine)
        reply = yield from self._ask("register", request, None)
        if messages.decode(reply, bool):
            self.forget(partition)
        self._schemas[partition] = schema

    @checked
    def add_tasks(self, partition: str, tasks: Sequence[TaskConfig], timeout_s: float | None) -> Steps[None]:
        yield from self._ask("add_tasks", requests.AddTasks(partition, tuple(tasks)), timeout_s)

    @checked
    def unregister(self, partition: str, timeout_s: float | None) -> Steps[int]:
        reply = yield from self._ask("unregister", requests.OnePartition(partition), timeout_s)
        self.forget(partition)
        return messages.decode(reply, int)

    def forget(self, partition: str) -> None:
        """Forget what this client knows of a partition that is unregistered or was defined again."""
        self._schemas.pop(partition, None)
        self._leases.cleared(partition, None)

    @checked
    def add_fields(self, partition: str, fields: Schema, timeout_s: float | None) -> Steps[None]:
        reply = yield from self._ask("add_fields", requests.AddFields(partition, fields), timeout_s)
        self._schemas[partition] = messages.decode(reply, Schema)

    @checked
    def put(
        self,
        partition: str,
        keys: list[str],
        fields: Fields,
        versions: int | np.ndarray | None,
        groups: list[str] | None,
        tags: Tags | None,
        replace: bool,
        timeout_s: float | None,
    ) -> Steps[Moved[KVBatchMeta]]:
        fences = self._leases.fences(partition, keys)
        return (yield from self.fenced_put(partition, keys, fields, versions, groups, tags, replace, timeout_s, fences))

    @checked
    def write(
        self, meta: KVBatchMeta, fields: Fields, tags: Tags | None, replace: bool, timeout_s: float | None
    ) -> Steps[Moved[KVBatchMeta]]:
        self._check_origin(meta, "write")
        leases = (meta.lease_id,) if meta.lease_id else tuple(hold.lease_id for hold in meta.holds)
        fences = (Fence(meta.generations, leases),)
        keys = list(meta.keys)
        return (yield from self.fenced_put(meta.partition, keys, fields, None, None, tags, replace, timeout_s, fences))

    def fenced_put(
        self,
        partition: str,
        keys: list[str],
        fields: Fields,
        versions: int | np.ndarray | None,
        groups: list[str] | None,
        tags: Tags | None,
        replace: bool,
        timeout_s: float | None,
        fences: tuple[Fence, ...],
    ) -> Steps[Moved[KVBatchMeta]]:
        """Put rows that fulfil conditions. fences: the conditions; () for rows that the put may create."""
        bound = self.timeout(timeout_s)
        deadline = time.monotonic() + bound
        cached = self._schemas.get(partition)
        schema = cached or (yield from self._schema(partition, bound))
        check_distinct(keys, partition)

        def prepare(schema: Schema) -> tuple[PutRows, list[EncodedBlock], dict[str, BlobsOfField]]:
            put, blocks, blobs = prepared(
                self.handle, self.label, schema, partition, keys, fields, versions, groups, tags or {}, replace, fences
            )
            if isinstance(self.store, ChoosesHolders):
                put = msgspec.structs.replace(put, near=self.store.near(deadline - time.monotonic()))
            return put, blocks, blobs

        try:
            try:
                put, blocks, blobs = yield Work("put", lambda: prepare(schema), deadline)
            except SchemaMismatch:
                if cached is None:
                    raise
                self._schemas.pop(partition, None)
                schema = yield from self._schema(partition, max(0.0, deadline - time.monotonic()))
                if schema == cached:
                    raise
                # Fields were added meanwhile, or the partition was registered again.
                put, blocks, blobs = yield Work("put", lambda: prepare(schema), deadline)
            if not keys:
                return Moved(empty_receipt(partition, schema, put.fields, self._plane_id), 0)
            yield SHIELD
            put, written = yield from self._place_with_blobs(put, blocks, blobs, deadline)
        except SchemaMismatch:
            self._schemas.pop(partition, None)  # The partition may have been registered again.
            raise
        receipt = written.receipt(put, schema, self._plane_id)
        undo = None if replace else partial(self._withdraw, put, written.first_block_id, 0)
        return Moved(receipt, put.value_bytes, undo)

    def _place_with_blobs(
        self, put: PutRows, blocks: list[EncodedBlock], blobs: Mapping[str, BlobsOfField], deadline: float
    ) -> Steps[tuple[PutRows, Committed]]:
        """Carry out a put, with those blobs of its rows that are not stored. Blobs can be freed until the put is
        committed; it is then done again. Returns the put as it was done."""
        while put.blobs:
            absent: dict[str, set[str]] = {name: set() for name in blobs}
            for name in (name for name, one in blobs.items() if one.references.names):
                request = requests.SomeRows(
                    holder_of_blobs(put.partition, name), pack_keys(blobs[name].references.names)
                )
                left_s = max(0.0, deadline - time.monotonic())
                absent[name] = set(unpack_keys((yield Ask(self.link, "absent", requests.encode(request), left_s))))
            carried = yield Work("put", partial(carrying, self.handle, put, blobs, absent), deadline)
            try:
                return carried[0], (yield from self._place(carried[0], [*blocks, *carried[1]], deadline))
            except BlobsMissing:
                if time.monotonic() >= deadline:
                    raise
        return put, (yield from self._place(put, blocks, deadline))

    def _place(self, put: PutRows, blocks: list[EncodedBlock], deadline: float) -> Steps[Committed]:
        """Carry out a put: write its blocks and commit its rows. If that fails because of a process of the store that
        this client did not know to be dead, it is done once more, without this process."""
        try:
            return (yield from self._place_once(put, blocks, deadline))
        except StoreLost:
            dead = yield from self._find_lost()
            if not isinstance(self.store, ChoosesHolders) or not self.store.avoid(dead):
                raise
        return (yield from self._place_once(put, blocks, deadline))

    def _place_once(self, put: PutRows, blocks: list[EncodedBlock], deadline: float) -> Steps[Committed]:
        """Write the blocks of a put and commit its rows. If no space granted in advance fits, it reserves space
        first."""
        space, given_back = self._credit.take(put.nbytes, len(blocks))
        if space is not None:
            written = yield from self._write(put, blocks, space, deadline, credit=True)
            if written is not None:
                return written
            _logger.debug("%s: the directory took the credit of a put back; it is written again", self.label)
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            request = requests.encode(requests.Reserve(put, remaining, given_back))
            try:
                reply = yield Ask(self.link, "reserve", request, remaining, _abort_reserved)
            except BaseException as error:  # The request may never have been sent.
                if given_back:
                    yield from self._give_back(given_back, undo_s(error))
                raise
            space, given_back = messages.decode(reply, requests.Space), ()
            written = yield from self._write(put, blocks, space, deadline, credit=False)
            if written is not None:
                return written
            _logger.debug("%s: the directory's process was replaced during a put; it is written again", self.label)

    def _write(
        self,
        put: PutRows,
        blocks: list[EncodedBlock],
        space: requests.Space,
        deadline: float,
        *,
        credit: bool,
    ) -> Steps[Committed | None]:
        """Write the blocks into `space`, then commit the rows in the directory. Returns None if the directory has taken
        the space back, because it had been granted in advance or by a process that has died."""
        asked, began = False, time.monotonic()
        try:
            try:
                locations = yield Work(
                    "put",
                    lambda: write_blocks(
                        self.store, blocks, space.first_block_id, space.location, deadline, space.holder
                    ),
                    deadline,
                )
            except RowsCleared as error:
                # The space was revoked during the write, or the directory's process was replaced, or it took too long.
                if credit or time.monotonic() - began < self.handle.config.reserve_s:
                    return None
                raise DataPlaneTimeout(
                    f"the put took longer than reserve_s={self.handle.config.reserve_s:g}s: its bytes were reclaimed",
                    op="put",
                    partition=put.partition,
                    keys=put.keys,
                ) from error
            commit = requests.Commit(space.space_id, credit, put, locations, *self._credit.next_request())
            asked = True
            reply = yield Ask(self.link, "commit", requests.encode(commit), max(0.0, deadline - time.monotonic()))
            written = None if reply == requests.REVOKED else messages.decode(reply, requests.Written)
        except BaseException as error:
            failed = time.monotonic()
            taken_back = yield from self._take_back(put, space, undo_s(error))
            if asked and not taken_back and isinstance(error, DirectoryLost):
                context = error.fields() | {"op": "put", "partition": put.partition, "keys": put.keys}
                context["num_keys"] = len(put.keys)
                context["elapsed_s"] = (error.elapsed_s or 0.0) + time.monotonic() - failed
                raise DirectoryLost(
                    f"{error.message}; it is not known whether the put took effect", **context
                ) from error
            raise
        if written is None:
            return None
        self._credit.add(written.next_space)
        return written.committed

    def close(self) -> Steps[None]:
        """Stop renewing leases, give back the space that was granted in advance, and close the store."""
        yield SHIELD
        self._leases.end()
        space_ids = self._credit.drop_all()
        if space_ids:
            yield from self._give_back(space_ids)
        yield Work("close", self.store.close)

    @checked
    def get(self, meta: KVBatchMeta, fields: tuple[str, ...] | None, timeout_s: float | None) -> Steps[Moved[Batch]]:
        deadline = time.monotonic() + self.timeout(timeout_s)
        names = meta.fields if fields is None else fields
        self._check_origin(meta, "get")
        check_readable(meta, names)
        check = self.handle.verifies_blocks

        def read() -> Batch:
            left_s = max(0.0, deadline - time.monotonic())
            return read_rows(self.store, meta, names, check=check, timeout_s=left_s)

        yield SHIELD
        try:
            batch = yield Work("get", read, deadline)
        except StoreLost as error:
            dead = yield from self._find_lost()
            raise naming_lost(error, meta, names, dead) from error.__cause__
        return Moved(batch, sum(map(column_bytes, batch.values())))

    @checked
    def get_blobs(
        self, meta: KVBatchMeta, field: str, parts: tuple[str, ...] | None, timeout_s: float | None
    ) -> Steps[Moved[BlobRows]]:
        if field not in meta.schema or not meta.schema[field].parts:
            raise ValueError(f"field: got {field!r}, expected a field with blobs of {list(meta.schema)}")
        rows = yield from self.get(meta, (field,), timeout_s)
        references = References.read(rows.result.ragged(field))
        names = tuple(part.name for part in meta.schema[field].parts) if parts is None else parts
        holder = holder_of_blobs(meta.partition, field)
        found = yield from self.get_keys(holder, references.names, names, timeout_s)
        return Moved(BlobRows(found.result, references), rows.nbytes + found.nbytes)

    @checked
    def lookup(
        self, partition: str, keys: list[str], fields: tuple[str, ...] | None, wait: bool, timeout_s: float | None
    ) -> Steps[KVBatchMeta]:
        bound = self.timeout(timeout_s)
        request = requests.Lookup(partition, pack_keys(keys), fields, bound if wait else None)
        yield SHIELD
        reply = yield Ask(self.link, "lookup", requests.encode(request), bound)
        return KVBatchMeta.from_bytes(reply)

    @checked
    def rows(self, partition: str, keys: list[str] | None, timeout_s: float | None) -> Steps[PartitionRows]:
        reply = yield from self._ask("rows", requests.SomeRows(partition, _packed(keys)), timeout_s)
        return PartitionRows.from_bytes(reply)

    @checked
    def tag(self, partition: str, keys: list[str], tags: Tags, timeout_s: float | None) -> Steps[None]:
        yield from self._ask("tag", requests.Tag(partition, pack_keys(keys), check_tags(tags, len(keys))), timeout_s)

    @checked
    def get_keys(
        self, partition: str, keys: list[str], fields: tuple[str, ...], timeout_s: float | None
    ) -> Steps[Moved[Batch]]:
        meta = yield from self.lookup(partition, keys, fields, False, timeout_s)
        return (yield from self.get(meta, None, timeout_s))

    @checked
    def claim(
        self,
        partition: str,
        task: str,
        fields: tuple[str, ...],
        n: int,
        at_least: int | None,
        whole_groups: bool,
        min_version: int | None,
        max_version: int | None,
        arguments: dict[str, Any] | None,
        timeout_s: float | None,
    ) -> Steps[Moved[KVBatchMeta]]:
        bound = self.timeout(timeout_s)
        rows = ClaimRows(
            partition,
            task,
            fields,
            n,
            whole_groups,
            min_version,
            max_version,
            at_least,
            arguments or {},
        )
        request = requests.Claim(rows, bound, self.label)
        yield SHIELD
        reply = yield Ask(self.link, "claim", requests.encode(request), bound, partial(_retry, task))
        try:
            meta = KVBatchMeta.from_bytes(reply)
            self._leases.add(meta.lease_id, meta.partition, meta.keys, meta.generations)
            meta = dataclasses.replace(meta, holds=(self._leases.hold(meta, task, self.client),))
        except BaseException:
            yield from self._give_rows_back(task, reply)
            raise
        return Moved(meta, 0, partial(self._give_rows_back, task, reply))

    @checked
    def renew(self, meta: KVBatchMeta, timeout_s: float | None) -> Steps[None]:
        self._check_origin(meta, "renew")
        if len(meta):
            request = requests.RenewRows(meta.partition, meta.lease_id, pack_keys(meta.keys))
            yield from self._ask("renew_rows", request, timeout_s)
            self._leases.add(meta.lease_id, meta.partition, meta.keys, meta.generations)

    @checked
    def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, timeout_s: float | None) -> Steps[None]:
        self._check_origin(meta, "release")
        if len(meta):
            request = requests.Release(meta.partition, task, meta.lease_id, pack_keys(meta.keys), outcome)
            yield from self._ask("release", request, timeout_s)
            self._leases.drop(meta.lease_id, meta.keys)

    @checked
    def skip(self, partition: str, task: str, positions: np.ndarray, timeout_s: float | None) -> Steps[None]:
        yield from self._ask("skip", requests.Skip(partition, task, positions), timeout_s)

    @checked
    def leases(self, partition: str, timeout_s: float | None) -> Steps[tuple[LeaseStatus, ...]]:
        reply = yield from self._ask("leases", requests.OnePartition(partition), timeout_s)
        return messages.decode(reply, tuple[LeaseStatus, ...])

    @checked
    def revoke(self, partition: str, task: str, older_than_s: float, timeout_s: float | None) -> Steps[int]:
        reply = yield from self._ask("revoke", requests.Revoke(partition, task, older_than_s), timeout_s)
        return messages.decode(reply, int)

    @checked
    def reset(self, partition: str, task: str, keys: list[str] | None, timeout_s: float | None) -> Steps[TaskReset]:
        reply = yield from self._ask("reset", requests.Reset(partition, task, _packed(keys)), timeout_s)
        return messages.decode(reply, TaskReset)

    @checked
    def task_status(
        self, partition: str, task: str, fields: tuple[str, ...] | None, timeout_s: float | None
    ) -> Steps[TaskStatus]:
        request = requests.StatusOfTask(partition, task, fields)
        reply = yield from self._ask("task_status", request, timeout_s)
        return messages.decode(reply, TaskStatus)

    @checked
    def free(self, partition: str, keys: list[str], timeout_s: float | None) -> Steps[int]:
        reply = yield from self._ask("free", requests.FreeRows(partition, pack_keys(keys)), timeout_s)
        return messages.decode(reply, int)

    @checked
    def clear(self, partition: str, keys: list[str] | None, timeout_s: float | None) -> Steps[int]:
        reply = yield from self._ask("clear", requests.SomeRows(partition, _packed(keys)), timeout_s)
        self._leases.cleared(partition, keys)
        return messages.decode(reply, int)

    @checked
    def clear_stale(
        self,
        partition: str,
        task: str,
        fields: tuple[str, ...],
        min_version: int,
        whole_groups: bool,
        timeout_s: float | None,
    ) -> Steps[tuple[str, ...]]:
        rows = ClaimRows(partition, task, fields, 0, whole_groups, min_version)
        reply = yield from self._ask("clear_stale", requests.ClearStale(rows), timeout_s)
        return tuple(unpack_keys(reply))

    @checked
    def hosts_of(self, meta: KVBatchMeta) -> Steps[np.ndarray]:
        self._check_origin(meta, "hosts_of")
        return (yield Work("hosts_of", lambda: hosts_of(self.store, meta)))

    @checked
    def forget_unit(self, units: tuple[str, ...], timeout_s: float | None) -> Steps[dict[str, tuple[str, ...]]]:
        reply = yield from self._ask("forget_unit", requests.ForgetUnits(units), timeout_s)
        found = messages.decode(reply, dict[str, bytes])
        keys = {partition: tuple(unpack_keys(packed)) for partition, packed in found.items()}
        for partition, gone in keys.items():
            self._leases.cleared(partition, list(gone))
        return keys

    @checked
    def status(self, partition: str | None, timeout_s: float | None) -> Steps[DataPlaneStatus]:
        reply = yield from self._ask("status", requests.Status(partition), timeout_s)
        return DataPlaneStatus.from_bytes(reply)

    def _schema(self, partition: str, bound: float) -> Steps[Schema]:
        if partition not in self._schemas:
            deadline, near = time.monotonic() + bound, ANY_HOLDER
            if isinstance(self.store, ChoosesHolders):
                near = yield Work("put", partial(self.store.near, bound), deadline)
            request = requests.encode(requests.Describe(partition, self.label, near))
            reply = yield Ask(self.link, "describe", request, max(0.0, deadline - time.monotonic()), _abort_granted)
            described = messages.decode(reply, requests.Described)
            self._schemas[partition] = unpack_schema(described.schema)
            self._credit.add(described.next_space)
        return self._schemas[partition]

    def _find_lost(self) -> Steps[dict[int, str]]:
        """Make the directory look for dead processes of the store, because this client has failed to reach one. Returns
        the names of the dead ones, by number; none if the directory does not answer."""
        try:
            reply = yield Ask(self.link, "find_lost", b"", ABORT_TIMEOUT_S)
        except DataPlaneError as error:
            _logger.info("a failure of the store could not be reported: %s", error)
            return {}
        return messages.decode(reply, dict[int, str])

    def _check_origin(self, meta: KVBatchMeta, op: str) -> None:
        """Raise ForeignReceipt unless this data plane issued the receipt `meta`. Block ids and lease ids of another
        data plane identify other rows here."""
        if meta.plane_id != self._plane_id:
            message = (
                f"the receipt is of data plane {meta.plane_id:016x}, expected one of run {self.handle.run_id!r} "
                f"({self._plane_id:016x}); its rows ended with its data plane"
            )
            raise ForeignReceipt(message, op=op, partition=meta.partition, keys=meta.keys)

    def _take_back(self, put: PutRows, space: requests.Space, timeout_s: float) -> Steps[bool]:
        """Undo a put that failed or was interrupted. Its space is given back, and rows that the directory may have
        committed are withdrawn.

        Returns whether both were done. A put with replace=True is not withdrawn, because the previous values are gone.
        """
        if put.replace:
            yield from self._give_back((space.space_id,), timeout_s)
            return False
        return (yield from self._withdraw(put, space.first_block_id, space.space_id, timeout_s))

    def _withdraw(
        self, put: PutRows, first_block_id: int, space_id: int, timeout_s: float = ABORT_TIMEOUT_S
    ) -> Steps[bool]:
        """Withdraw the rows that a put has committed, or give its space back. Returns whether that was done. space_id:
        0 for a put that is known to be committed."""
        request = requests.Withdraw(put.partition, pack_keys(put.keys), first_block_id, len(put.layouts), space_id)
        try:
            yield Ask(self.link, "withdraw", requests.encode(request), timeout_s, undoes=True)
        except (DataPlaneError, ValueError) as error:
            _logger.info("a put could not be taken back: %s", error)
            return False
        return True

    def _give_rows_back(self, task: str, receipt: bytes) -> Steps[None]:
        """Release the rows of a claim whose caller was interrupted before it got their receipt."""
        op, request = _retry(task, receipt)
        try:
            yield Ask(self.link, op, request, ABORT_TIMEOUT_S, undoes=True)
        except (DataPlaneError, ValueError) as error:
            _logger.info("claimed rows could not be given back, their lease will expire: %s", error)
        else:
            meta = KVBatchMeta.from_bytes(receipt)
            self._leases.drop(meta.lease_id, meta.keys)

    def _give_back(self, space_ids: tuple[int, ...], timeout_s: float = ABORT_TIMEOUT_S) -> Steps[None]:
        """Give space back to the directory if possible. If not, the space expires by itself after `reserve_s`."""
        try:
            yield Ask(self.link, "abort", requests.encode(requests.Abort(space_ids)), timeout_s, undoes=True)
        except DataPlaneError as error:
            _logger.info("reserved space could not be given back, it will expire: %s", error)


def undo_s(error: BaseException) -> float:
    """Return the time limit of the request that undoes a call after `error`. A directory that did not answer the call
    gets no second grace."""
    return in_all(ABORT_TIMEOUT_S) if isinstance(error, DirectoryLost) else ABORT_TIMEOUT_S


def _packed(keys: Sequence[str] | None) -> bytes | None:
    return None if keys is None else pack_keys(keys)


# ---------------- These requests undo what the directory did for an interrupted caller.


def _abort_reserved(body: bytes) -> tuple[str, bytes]:
    space = messages.decode(body, requests.Space)
    return "abort", requests.encode(requests.Abort((space.space_id,)))


def _abort_granted(body: bytes) -> tuple[str, bytes] | None:
    space = messages.decode(body, requests.Described).next_space
    return None if space is None else ("abort", requests.encode(requests.Abort((space.space_id,))))


def _retry(task: str, body: bytes) -> tuple[str, bytes]:
    meta = KVBatchMeta.from_bytes(body)
    request = requests.Release(meta.partition, task, meta.lease_id, pack_keys(meta.keys), "retry")
    return "release", requests.encode(request)
