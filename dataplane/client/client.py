"""Gives programs the data plane's operations as blocking calls."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ...codecs.batch import Batch
from ...codecs.blobs import BlobRows
from ...codecs.schema import Field, Schema
from ..directory.calls import Outcome
from ..directory.samplers import TaskConfig
from ..meta import KVBatchMeta, Tags
from ..rpc.cancellation import CallCancelled, Cancellation
from ..status import DataPlaneStatus, LeaseStatus, PartitionRows, TaskReset, TaskStatus
from .arguments import Fields, Keys
from .counted_client import CountedClient
from .saving import load, save
from .shielded_calls import Shielded, can_be_interrupted
from .steps import Ask, Moved, Shield, Steps, Work

T = TypeVar("T")


class DataPlaneClient(CountedClient):
    """Connection of one process to the run's data plane. Get one from `factory.connect`.

    Threads can share it. Every call returns or raises within its `timeout_s` and a few seconds of grace. None means the
    configured `timeout_s`, and more than 10^9 seconds mean 10^9. Any call can raise DirectoryLost or StoreLost, which
    name the process that did not answer, and InvalidArgument, a ValueError, for a wrong argument or an unknown
    partition. All errors are DataPlaneErrors, except OSError for the files of `save` and `load`. Calls of one thread
    take effect in order; calls of several threads take effect in any order, each in full or not at all.
    """

    def register(
        self,
        partition: str,
        schema: Schema | Iterable[Field],
        tasks: Sequence[str | TaskConfig] = (),
        *,
        group_size: int = 1,
        redefine: bool = False,
    ) -> None:
        """Declare a partition (a named set of rows): its fields, its tasks (consumers), and the size of a whole group.
        The size is the number of rows of one prompt.

        tasks: a TaskConfig says in what order the task's claims take rows; a name alone means lowest version first.
        Calling this again with equal arguments does nothing, from any process, even after fields were added. With other
        arguments it raises ValueError naming what differs; with `redefine` it removes the partition with its rows,
        leases and tasks instead, and registers it again, so that a notebook's cell can be repeated. It also raises
        ValueError for a sampler that the directory's process cannot build, or that `dataplane.samplers` does not list
        for import.
        """
        self._run(self._operations.register(partition, schema, tasks, group_size, redefine))

    def add_tasks(self, partition: str, tasks: Sequence[str | TaskConfig], *, timeout_s: float | None = None) -> None:
        """Add tasks (consumers) to a partition that is registered. They can claim all rows of the partition.

        tasks: as for `register`. A task that the partition already has with equal settings remains as it is. A task
        with other settings raises ValueError, and no task is added. Idempotent; any process can call it. Calls of
        `register` with the earlier tasks remain valid. Raises ValueError for a sampler that cannot be built.
        """
        self._run(self._operations.add_tasks(partition, tasks, timeout_s))

    def unregister(self, partition: str, *, timeout_s: float | None = None) -> int:
        """Remove a partition with its rows, leases, tasks and schema, and return how many rows it had.

        Claims that wait for rows of the partition raise ValueError, and so does every later call that names it. The
        name can be registered again, even with another schema.
        """
        return self._run(self._operations.unregister(partition, timeout_s))

    def add_fields(self, partition: str, fields: Schema | Iterable[Field], *, timeout_s: float | None = None) -> None:
        """Add fields to a partition's schema; no row has a value of them yet. Fields that the partition already has are
        ignored.

        Processes that know the schema without these fields keep working; a client learns of them when a put names one.
        Idempotent. Raises ValueError for a field that is already declared differently; no field is added then.
        """
        self._run(self._operations.add_fields(partition, fields, timeout_s))

    def put(
        self,
        partition: str,
        keys: Keys,
        fields: Fields,
        *,
        versions: int | np.ndarray | None = None,
        groups: Keys | None = None,
        tags: Tags | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write some fields of N rows, and return a receipt that gives access to just these fields. The receipt has the
        rows' keys and locations.

        keys: ids of the N rows; new keys create rows, known keys get further fields. Rows that this client has claimed
        are written as by `write`, which is the call for results of a consumer, as long as it has their receipt or
        renews the lease of a receipt that went elsewhere. fields: anything that `codecs.jagged.pack` takes, and for a
        field with blobs, such as pictures, a list of them for each row. versions: policy version of each new row, or
        one for all of them (None means -1). groups: name of each row's group; None takes each key up to its last ".".
        tags: name -> a number or a string for each row, `[N]`; a later put of a tag overwrites it with values of the
        same type. The integer tag `position` is a row's position in the prompt stream.

        The length of a row is the length of its PER_TOKEN fields, which must agree. It is 0 until one of them is
        written. A written field of a row is overwritten only with replace=True. This can also change the row's version,
        and its length if all its PER_TOKEN fields are replaced. A put without rows does nothing.

        When the call returns, all fields of all rows have become readable together; when it raises, none has. It blocks
        while the store is full. It is not idempotent: repeating a put raises AlreadyWritten.

        Raises DuplicateKeys, and SchemaMismatch for wrong fields, dtypes and shapes, before any byte is written. Raises
        AlreadyWritten, and SchemaMismatch for conflicts that only the directory (the metadata service) can detect, such
        as different lengths or groups; nothing has become readable then, and the bytes are dropped. Raises
        CapacityExceeded when no room becomes free in time, and DataPlaneTimeout when writing took longer than
        `reserve_s`.
        """
        return self._move(self._operations.put(partition, keys, fields, versions, groups, tags, replace, timeout_s))

    def write(
        self,
        meta: KVBatchMeta,
        fields: Fields,
        *,
        tags: Tags | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write further fields of the rows of a receipt, and return a receipt that gives access to just these fields.
        This is how results of a consumer are written back.

        Works like `put`, but only on rows that still exist: raises RowsCleared naming the keys of rows that were
        cleared since the receipt was issued, even if others with these keys were put. If the receipt has a lease, this
        must still hold the rows: raises LeaseLost naming the others. Nothing is written then. So a consumer that comes
        late creates no rows and overwrites nothing, also with replace=True. Raises ForeignReceipt for a receipt of
        another data plane.
        """
        return self._move(self._operations.write(meta, fields, tags, replace, timeout_s))

    def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None) -> Batch:
        """Read fields of the rows of a receipt (`meta`), in the receipt's order, into new memory. fields: None reads
        all fields of the receipt.

        Asks only the store, never the directory (the metadata service). Idempotent; every process with the receipt can
        call it. Raises RowsCleared naming keys whose block is gone. A block is gone when its last row is cleared or
        replaced; until then the receipt reads the bytes for which it was issued. Raises ForeignReceipt for a receipt of
        another data plane (even an earlier one with the same run_id), FieldsNotReady for fields that the receipt lacks,
        SchemaMismatch for undeclared or repeated fields, and IntegrityError for bytes that have changed.
        """
        return self._move(self._operations.get(meta, fields, timeout_s))

    def get_blobs(
        self, meta: KVBatchMeta, field: str, parts: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> BlobRows:
        """Read the blobs, such as pictures, to which the rows of a receipt refer in `field`. Each is read once, however
        many of the rows refer to it.

        parts: parts of the blobs to read, such as `["pixels"]`; None reads all. Reads the rows' digests, asks the
        directory where the blobs are, and reads them. Idempotent. Raises the errors of `get`, KeysNotFound naming the
        digests of blobs that were freed because their last rows were cleared, and ValueError for a field without blobs.
        """
        return self._move(self._operations.get_blobs(meta, field, parts, timeout_s))

    def lookup(
        self,
        partition: str,
        keys: Keys,
        fields: Sequence[str] | None = None,
        *,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Return a receipt (keys and locations) for the rows with these keys, in that order; a key can repeat.

        fields: fields that the receipt gives access to; None means all fields that have been written for every key.
        Raises KeysNotFound or FieldsNotReady naming what is missing. With `wait` it blocks instead until all keys exist
        and all fields are written for them (with None, until at least one is), woken by the put that completes them;
        after `timeout_s` it raises DataPlaneTimeout naming the keys that were never put and the fields that were never
        written. Idempotent.
        """
        return self._run(self._operations.lookup(partition, keys, fields, wait, timeout_s))

    def rows(self, partition: str, keys: Keys | None = None, *, timeout_s: float | None = None) -> PartitionRows:
        """Return a list of the partition's rows, in order of arrival, without their content. The list has keys,
        versions, groups, lengths, tags, and which fields are written.

        keys: None lists all rows; otherwise the rows with these keys are listed, in that order. Idempotent. Raises
        KeysNotFound naming the keys that do not exist.
        """
        return self._run(self._operations.rows(partition, keys, timeout_s))

    def get_keys(self, partition: str, keys: Keys, fields: Sequence[str], *, timeout_s: float | None = None) -> Batch:
        """Read `fields` of the rows with these keys, in the order of the keys. The call is a `lookup` followed by a
        `get`, with the errors of both."""
        return self._move(self._operations.get_keys(partition, keys, fields, timeout_s))

    def tag(self, partition: str, keys: Keys, tags: Tags, *, timeout_s: float | None = None) -> None:
        """Set tags of existing rows without writing a field. tags: name -> a number or a string for each key, `[N]`.

        Receipts that were issued before keep their tags. Waiting claims are tried again, because samplers can choose
        rows by their tags. Idempotent. Raises KeysNotFound naming the keys that do not exist, DuplicateKeys, and
        SchemaMismatch for values of another type than the tag's earlier values; no tag is changed then.
        """
        self._run(self._operations.tag(partition, keys, tags, timeout_s))

    def claim(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        n: int,
        *,
        at_least: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        max_version: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Wait for n rows that have all of `fields`, and lease them to this caller: no other claim of `task` gets them.

        Returns a receipt for them (their keys and locations). Rows come in the order of the task's sampler (by default
        the lowest version first, then in order of arrival). at_least: number of rows, from 1 to n, for which the claim
        waits; it then takes as many as are ready, at most n. None waits for n, and 1 takes up to n. With whole_groups
        rows come group by group, and n and at_least must be multiples of group_size. min_version, max_version: rows of
        a lower or higher version, and groups with such a row, are passed over. Rows passed over are not leased and
        delay no other rows. They stay, and a claim with other bounds can take them; `clear_stale` removes rows that are
        too old. arguments: values for the task's sampler, such as `{"rank": 0}`, made of None, bool, int, float, str,
        bytes, lists and dicts.

        Blocks until enough rows are ready; claims of a task with equal arguments are served first come, first served,
        so a claim of many rows delays those behind it until it has its n rows; `at_least` avoids that. The lease lasts
        until the rows are released or cleared, at most the `max_hold_s` of the task. It is renewed in the background
        for as long as this client's process runs. When the process dies or is stopped, or when the client is closed,
        the rows can be claimed again `lease_s` after the last renewal; when the receipt and those made of it are
        garbage-collected in this process, at once. The receipt is a context manager (`KVBatchMeta`) that releases the
        rows. Raises ClaimTimeout (it says what the claim waited for), SamplerError when the sampler fails (no row is
        leased then), InvalidArgument for an unknown task or argument, and SchemaMismatch for an unknown field.
        """
        return self._move(
            self._operations.claim(
                partition, task, fields, n, at_least, whole_groups, min_version, max_version, arguments, timeout_s
            ),
        )

    def renew(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """Extend the lease on the rows of a receipt by `lease_s` from now, and keep renewing it in the background. A
        lease is a consumer's exclusive hold. Renewal ends when this client has released the rows.

        Meant for a receipt that another process claimed and sent to this process. From then on the lease lasts as long
        as either process runs. Idempotent. Raises LeaseLost naming rows whose lease has ended (by time, clear or
        release); nothing is extended then. Raises ForeignReceipt for a receipt of another data plane, and ValueError
        for a receipt without a lease.
        """
        self._run(self._operations.renew(meta, timeout_s))

    def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, *, timeout_s: float | None = None) -> None:
        """End the lease (a consumer's exclusive hold) on the rows of a receipt. With outcome `done`, `task` has
        finished the rows and does not get them again; with `retry`, they can be claimed again.

        meta: a receipt from `claim`, or a part of one (select, split). Raises LeaseLost naming rows whose lease had
        ended (by time, clear or an earlier release) after releasing the others, ForeignReceipt for a receipt of another
        data plane, and ValueError for a receipt without a lease.
        """
        self._run(self._operations.release(meta, task, outcome, timeout_s))

    def leases(self, partition: str, *, timeout_s: float | None = None) -> tuple[LeaseStatus, ...]:
        """Return the leases on rows of a partition, oldest first. Each names the client, the task, the rows and how
        long they have been held. Idempotent."""
        return self._run(self._operations.leases(partition, timeout_s))

    def revoke(self, partition: str, task: str, *, older_than_s: float, timeout_s: float | None = None) -> int:
        """End the leases that claims of `task` took at least `older_than_s` seconds ago. Their rows can then be claimed
        again. Returns the number of these rows.

        Meant for rows whose holder lives but is stuck. The holder's next `write` or `release` with them raises
        LeaseLost. 0 ends all leases of the task. Idempotent. Raises ValueError for an unknown task and for a negative
        time.
        """
        return self._run(self._operations.revoke(partition, task, older_than_s, timeout_s))

    def skip(
        self,
        partition: str,
        task: str,
        positions: Sequence[int] | np.ndarray,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Settle positions of the prompt stream whose prompts were never put and never will be. The samplers `in_order`
        and `windowed` of `task` then continue without them.

        positions: int `[N]`, values of the rows' tag `position`. Wakes claims that waited for them. If rows are put at
        such a position nevertheless, they can be claimed as usual. Idempotent. Raises ValueError for a negative
        position, and for a task whose sampler does not follow the prompts; nothing is settled then.
        """
        self._run(self._operations.skip(partition, task, positions, timeout_s))

    def reset(
        self, partition: str, task: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TaskReset:
        """Make rows that `task` has finished claimable again, for one more pass over them, and return how many.

        keys: None means all rows of the partition. Leased rows remain leased; the result has their number. Wakes
        waiting claims. Positions in the prompt stream stay settled: `in_order` and `windowed` give the rows again in
        the stream's order and wait for none of them. Raises KeysNotFound for unknown keys, and then resets nothing.
        """
        return self._run(self._operations.reset(partition, task, keys, timeout_s))

    def free(self, partition: str, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Give back the bytes of rows that will not be read again, and return how many rows they are. The rows stay
        until `clear`, with their keys, versions, tags and leases; a task's claim does not get them again.

        Meant for a consumer that processes a large batch of rows in parts. The bytes of a block become free once all of
        its rows were freed or cleared, and waiting writers continue. Afterwards the fields of the rows count as not
        written, for every task, and reading with an older receipt raises RowsCleared. Raises KeysNotFound for unknown
        keys, and then frees nothing.
        """
        return self._run(self._operations.free(partition, keys, timeout_s))

    def clear(self, partition: str, keys: Keys | None = None, *, timeout_s: float | None = None) -> int:
        """Remove rows and their leases from a partition, and return how many rows were removed. keys: None means all of
        the partition.

        Meant for the process that controls the flow of the rows, such as the driver. The bytes of a block are free
        again once all of its rows are cleared. Raises KeysNotFound for unknown keys, and then clears nothing.
        """
        return self._run(self._operations.clear(partition, keys, timeout_s))

    def clear_stale(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        min_version: int,
        *,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[str, ...]:
        """Remove the rows that a claim with these arguments passes over as too old, and return their keys.

        Meant for the process that controls the flow of the rows, so that it can count them or start their generation
        again. A claim itself never clears rows, because another task may want them, and because a claim that times out
        could not name them. Rows that are leased or lack a field stay; with whole_groups, a group is removed as a whole
        or not at all. Does not wait. Idempotent: keys of rows that were removed earlier are not returned.
        """
        return self._run(
            self._operations.clear_stale(partition, task, fields, min_version, whole_groups, timeout_s),
        )

    def forget_unit(self, *units: str, timeout_s: float | None = None) -> dict[str, tuple[str, ...]]:
        """Remove the rows that were lost with a process of the store, and return their keys by partition.

        A row that has lost a field is removed with all rows of its group, so that the group can be put again. Their
        leases end; a receipt of them raises StoreLost, which names the process and its host, or RowsCleared. units:
        names of processes, as StoreLost gives it in `peer`, or Ray's ids of nodes that have been lost. They count as
        dead from now on, even if they run; puts that are under way to them fail with StoreLost. Without names, only
        processes whose address refuses connections are dead. Takes up to a second for each process that does not
        answer. Idempotent: rows that were removed earlier are not returned.
        """
        return self._run(self._operations.forget_unit(units, timeout_s))

    def hosts_of(self, meta: KVBatchMeta) -> np.ndarray:
        """Return the host on which each row of a receipt is stored, dtype object (str) `[N]`.

        A host is given as the space of its process ids, "" by a store that does not know it. Makes no call to the
        directory."""
        return self._carry_out(self._operations.hosts_of(meta))

    def save(self, partition: str, path: str | os.PathLike[str], *, timeout_s: float | None = None) -> int:
        """Write a partition into one file, and return how many rows it has.

        The file holds the rows with all fields, tags, versions and groups, the schema, the group size, and the tasks
        with their progress, as they were at one moment; other calls continue meanwhile. Rows that are leased at that
        moment are saved as not finished by their task. The file gets its name only once it is completely on the disk,
        and replaces a file of that name. Memory holds one chunk of rows at a time. timeout_s limits each call to the
        data plane, not their sum. Raises RowsCleared when rows are cleared or replaced before they have been read, and
        OSError when the file cannot be written; no file is left then.
        """
        return self._move(save(self._operations, partition, path, timeout_s))

    def load(
        self, path: str | os.PathLike[str], partition: str | None = None, *, timeout_s: float | None = None
    ) -> str:
        """Register a partition that `save` wrote into a file, and return its name. Its rows and its tasks' progress are
        put back. partition: another name to give it; None takes the name under which it was saved.

        Versions, groups, tags, order of arrival and what each task has finished are as they were. The groups are
        renumbered, and no row is leased. Rows become readable chunk by chunk. timeout_s limits each call to the data
        plane, not their sum. Raises ValueError for a file that is damaged, truncated or not a saved partition, and for
        a name that is registered; CapacityExceeded when there is no room for the rows. After an error nothing is left
        of the partition.
        """
        return self._move(load(self._operations, path, partition, timeout_s))

    def status(self, partition: str | None = None, *, timeout_s: float | None = None) -> DataPlaneStatus:
        """Return the current numbers of rows and leases, of all partitions or one, and of bytes in the store."""
        return self._run(self._operations.status(partition, timeout_s))

    def task_status(
        self, partition: str, task: str, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TaskStatus:
        """Return how many rows `task` has finished, holds and can claim, and its position in the prompt stream. fields:
        a row is ready once these fields are written; None means all fields of the partition."""
        return self._run(self._operations.task_status(partition, task, fields, timeout_s))

    def close(self) -> None:
        """Disconnect from the directory (the metadata service) and the store, which keep running. Idempotent. Leases
        that this client holds run out within `lease_s`."""
        self._carry_out(self._operations.close())
        for link in self._links:
            link.detach()

    def __enter__(self) -> DataPlaneClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        return self._carry_out(self._counted(steps))

    def _move(self, steps: Steps[Moved[T]]) -> T:
        return self._carry_out(self._counted(steps)).result

    def _carry_out(self, steps: Steps[T], cancellation: Cancellation | None = None) -> T:
        """Run the steps of an operation one after another, and return its result. In the main thread, the steps from
        `Shield` on run in another thread, so that an interrupt leaves nothing. cancellation: given in that thread."""
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                step = steps.send(answer) if failure is None else steps.throw(failure)
                answer, failure = None, None
                if isinstance(step, Shield):
                    if cancellation is None and can_be_interrupted():
                        break
                    continue
                try:
                    if cancellation is not None and cancellation.requested and not step.undoes:
                        raise CallCancelled(step.op)
                    if isinstance(step, Work):
                        answer = step.run()
                    elif cancellation is None and can_be_interrupted():  # It has no effect, but uses a connection.
                        answer = Shielded(partial(self._ask, step), lambda reply: None).result()
                    else:
                        answer = self._ask(step, cancellation)
                except BaseException as error:  # The operation undoes its work, also after Ctrl-C.
                    failure = error
        except StopIteration as end:
            return end.value
        finally:
            failure = None  # A cycle through the traceback would keep the operation's receipts alive.
        return Shielded(partial(self._carry_out, steps), self._undo).result()

    def _ask(self, step: Ask, cancellation: Cancellation | None) -> bytes:
        started = time.monotonic()
        reply = step.link.call(step.op, step.payload, step.timeout_s, step.undo, None if step.undoes else cancellation)
        return self._body(step, reply, time.monotonic() - started)

    def _undo(self, result: Any) -> None:
        if isinstance(result, Moved) and result.undo is not None:
            self._carry_out(result.undo())
