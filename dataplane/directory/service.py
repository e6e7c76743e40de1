"""Serves requests to the directory. A call that has to wait is woken by the event that it waits for.

request          waits for                       unblocked by
claim            its turn in its task's queue    the claim before it (first come, first served)
                 enough ready rows, and its      commit, release(retry), a lease that expires, revoke,
                 sampler's choice of them        reset, skip, clear
lookup (wait)    keys that are put, fields       commit
                 that are written
reserve (put)    its turn among waiting puts     the put before it
                 space                           revoking the credit of idle writers; blocks freed by
                                                 clear, replace, abort or expiry

All other requests are answered at once. The only timer is set to the directory's next deadline. Only one wait polls: a
put that waits for memory whose release no call announces. This happens when a process that may be stopped or dying
still holds freed blocks, or when other programs' files fill /dev/shm. The store then has less room than the directory
counts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

import msgspec

from ...codecs import messages
from ..block_store import HasRooms, Serving, StoreHost
from ..compact import pack_keys, unpack_keys
from ..config import DataPlaneConfig
from ..errors import (
    ClaimTimeout,
    DataPlaneError,
    DataPlaneTimeout,
    DirectoryLost,
    FieldsNotReady,
    KeysNotFound,
    shown,
)
from ..meta import pack_schema
from ..status import PartitionRows
from . import requests
from .block_table import FreedBlock, Reservation
from .calls import PutRows
from .directory import Directory
from .host_calls import HostCalls
from .put_space import Place, Pulse, PutSpace, Queue

_logger = logging.getLogger(__name__)

_REQUEST: ContextVar[bytes] = ContextVar("request", default=b"")
"""Identity of the request that is being answered; b"" for a caller in this process."""
Answer: TypeAlias = "bytes | Coroutine[Any, Any, bytes] | asyncio.Future[bytes]"
"""An encoded reply, or what returns it later. A coroutine must be awaited or closed."""
LATE_S = 0.1
"""Seconds by which the timer must be late for this process to count as having been suspended or busy."""
HEAR_FIRST_S = 1.0
"""Seconds for which a directory that was suspended or busy first answers the requests that have accumulated. Only then
does it let leases or reservations expire."""


class DirectoryService:
    """Answers requests to one run's directory, and makes the calls to its store. All methods must be called from one
    event loop."""

    def __init__(self, config: DataPlaneConfig, host: StoreHost, build: Callable[..., Directory] = Directory) -> None:
        """build: function that builds the directory from the arguments of `Directory`."""
        self._directory = build(
            capacity_bytes=config.store.capacity_mib << 20,
            lease_s=config.lease_s,
            reserve_s=config.reserve_s,
            plane_id=host.spec.plane_id,
            samplers=config.samplers,
            rooms=host if isinstance(host, HasRooms) else None,
        )
        self._config = config
        self._host = host
        self._freed = Pulse()
        self._store = HostCalls(host, self._space_freed)
        self._space = PutSpace(self._directory, self._store, self._freed)
        self._claim_queues: dict[tuple[str, str, bytes], Queue] = defaultdict(Queue)
        """Queues of the claims that wait, by partition, task and arguments of the claim. Ranks have separate queues, so
        that a rank with a ready share does not wait behind another rank."""
        self._ready: dict[str, Pulse] = {}
        """Event for each partition, by name. It is fired when waiting claims should try again."""
        self._timer: asyncio.TimerHandle | None = None
        self._listen_until = 0.0
        """Time in seconds, by the clock of the event loop, before which no lease or reservation expires."""
        self._closed = False
        self._handlers: dict[str, tuple[Any, Callable[[Any], Answer]]] = {
            "register": (requests.Register, self._register),
            "add_tasks": (requests.AddTasks, self._add_tasks),
            "unregister": (requests.OnePartition, self._unregister),
            "describe": (requests.Describe, self._describe),
            "add_fields": (requests.AddFields, self._add_fields),
            "export": (requests.OnePartition, self._export),
            "restore": (requests.Restore, self._restore),
            "reserve": (requests.Reserve, self._reserve),
            "commit": (requests.Commit, self._commit),
            "abort": (requests.Abort, self._abort),
            "withdraw": (requests.Withdraw, self._withdraw),
            "tag": (requests.Tag, self._tag),
            "rows": (requests.SomeRows, self._rows),
            "lookup": (requests.Lookup, self._lookup),
            "absent": (requests.SomeRows, self._absent),
            "claim": (requests.Claim, self._claim),
            "renew": (requests.Renew, self._renew),
            "renew_rows": (requests.RenewRows, self._renew_rows),
            "release": (requests.Release, self._release),
            "leases": (requests.OnePartition, self._leases),
            "revoke": (requests.Revoke, self._revoke),
            "skip": (requests.Skip, self._skip),
            "reset": (requests.Reset, self._reset),
            "free": (requests.FreeRows, self._free_rows),
            "clear": (requests.SomeRows, self._clear),
            "clear_stale": (requests.ClearStale, self._clear_stale),
            "status": (requests.Status, self._status),
            "plane": (bytes, self._plane),
            "task_status": (requests.StatusOfTask, self._task_status),
            "store": (bytes, self._serve),
            "find_lost": (bytes, self._find_lost),
            "forget_unit": (requests.ForgetUnits, self._forget_unit),
            "lacks_unit": (bytes, self._lacks_unit),
        }
        """Type of each request and the method that answers it, by its name. A request of type bytes is not decoded."""

    def answer(self, op: str, payload: bytes, request: bytes = b"", waited_s: float = 0.0) -> Answer:
        """Return the encoded reply to one request, or what returns it later. request: identity of the request; b"" for
        one that is not repeated. waited_s: seconds that a repeated request has waited before.

        DataPlaneErrors and ValueErrors are sent in the reply. Any other error is a bug and is raised.
        """
        try:
            if self._closed:
                raise DirectoryLost("the data plane is closed", op=op)
            _REQUEST.set(request)
            if op not in self._handlers:
                raise ValueError(f"request {op!r}: expected one of {sorted(self._handlers)}")
            kind, handler = self._handlers[op]
            decoded = payload if kind is bytes else messages.decode(payload, kind)
            self._directory.request = op, payload
            body = handler(requests.after(decoded, waited_s) if waited_s else decoded)
        except (DataPlaneError, ValueError) as error:
            self._arm()
            return self._reply(requests.reply_error(error))
        finally:
            self._directory.request = "", b""
        if isinstance(body, asyncio.Future):
            return body
        if not isinstance(body, bytes):
            return self._answer_later(body)
        self._arm()
        return self._reply(requests.reply(body))

    async def _answer_later(self, waiting: Coroutine[Any, Any, bytes]) -> bytes:
        try:
            return self._reply(requests.reply(await waiting))
        except (DataPlaneError, ValueError) as error:
            return self._reply(requests.reply_error(error))
        finally:
            self._arm()

    def _reply(self, reply: bytes) -> bytes:
        """Make the effects of the current request outlive this process, with the reply to it, and return the reply."""
        self._directory.answered(_REQUEST.get(), reply)
        return reply

    def repeat(self, op: str, payload: bytes, request: bytes, waited_s: float) -> Answer:
        """Answer a request that may have been carried out before, as `answer` does. If it had effects then, its first
        reply is returned, or UNKNOWN if this directory does not keep replies."""
        earlier = self._directory.earlier_reply(request)
        if earlier is not None:
            return earlier
        if not self._directory.repeats and (op in requests.TAKE_EFFECT or op in ("reserve", "commit")):
            return requests.UNKNOWN
        return self.answer(op, payload, request, waited_s)

    async def call(self, op: str, payload: bytes) -> bytes:
        """Answer one request and return the encoded reply, waiting for it if necessary."""
        reply = self.answer(op, payload)
        return reply if isinstance(reply, bytes) else await reply

    async def close(self) -> None:
        """Make the waiting calls fail with DirectoryLost, and close the store host. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._space.close()
        for pulse in self._ready.values():
            pulse.fire()
        await self._store.close()

    # ---------------- These methods answer the requests of puts.

    def _reserve(self, request: requests.Reserve) -> Answer:
        put = request.put
        given_back = [self._directory.abort(space_id) for space_id in request.given_back]
        self._store.take_back([item for item in given_back if item is not None])
        reservation = self._space.reserve_at_once(put)
        if reservation is not None:
            return messages.encode(self._as_space(reservation))
        return self._reserve_later(put, request.timeout_s)

    async def _reserve_later(self, put: PutRows, timeout_s: float) -> bytes:
        return messages.encode(self._as_space(await self._space.reserve(put, timeout_s)))

    def _as_space(self, reservation: Reservation) -> requests.Space:
        ids, location = reservation.block_ids, reservation.location or b""
        holder = self._directory.blocks.rooms.holder_in(reservation.room)
        return requests.Space(reservation.reservation_id, ids.start, len(ids), reservation.nbytes, location, holder)

    def _commit(self, request: requests.Commit) -> Answer:
        reservation, sizes = self._directory.blocks.reservations.get(request.space_id), request.put.sizes
        if reservation is not None and not self._store.count_at_once(reservation, sizes):
            return self._commit_later(request, reservation)
        body, freed = self._commit_now(request)
        return self._once(self._store.free(freed), body)

    async def _commit_later(self, request: requests.Commit, reservation: Reservation) -> bytes:
        await self._store.count(reservation, request.put.sizes)
        body, freed = self._commit_now(request)
        await self._free(freed)
        return body

    def _commit_now(self, request: requests.Commit) -> tuple[bytes, list[FreedBlock]]:
        is_revocable = request.credit or request.space_id < self._directory.first_space
        if is_revocable and self._directory.blocks.reservations.get(request.space_id) is None:
            return requests.REVOKED, []
        put = request.put
        committed, freed = self._directory.commit(request.space_id, put, self._store.locate(request.locations))
        self._ready_pulse(put.partition).fire()
        self._space.usual[put.partition] = request.next_bytes, request.next_blocks
        credit = self._space.grant(put.writer, put.near, request.next_bytes, request.next_blocks)
        body = messages.encode(requests.Written(committed, credit and self._as_space(credit)))
        self._reply(requests.reply(body))  # The effects must be recorded before the store frees blocks.
        return body, freed

    def _abort(self, request: requests.Abort) -> bytes:
        found = [self._directory.abort(space_id) for space_id in request.space_ids]
        # The writer does not wait for the store, because one of its processes may have stopped.
        self._store.take_back([item for item in found if item is not None])
        return b""

    async def _withdraw(self, request: requests.Withdraw) -> bytes:
        reservation = self._directory.abort(request.space_id)
        if reservation is not None:  # The reservation was not committed, so nothing is readable.
            self._store.take_back([reservation])
            return b""
        keys = unpack_keys(request.keys)
        freed = self._directory.withdraw(request.partition, keys, request.first_block_id, request.num_blocks)
        self._ready_pulse(request.partition).fire()
        self._reply(requests.reply(b""))
        await self._free(freed)
        return b""

    def _tag(self, request: requests.Tag) -> bytes:
        self._directory.tag(request.partition, unpack_keys(request.keys), request.tags)
        self._ready_pulse(request.partition).fire()  # Waiting claims try again, because samplers may look at tags.
        return b""

    # ---------------- These methods answer the requests of readers and consumers.

    def _lookup(self, request: requests.Lookup) -> Answer:
        keys = unpack_keys(request.keys)
        try:
            return self._directory.lookup(request.partition, keys, request.fields).to_bytes()
        except (KeysNotFound, FieldsNotReady) as error:
            if request.wait_s is None:
                raise
            return self._lookup_later(request, keys, error)

    def _absent(self, request: requests.SomeRows) -> bytes:
        return pack_keys(self._directory.absent(request.partition, unpack_keys(request.keys or b""), None)[0])

    async def _lookup_later(
        self, request: requests.Lookup, keys: list[str], lacking: KeysNotFound | FieldsNotReady
    ) -> bytes:
        """Wait until the rows and fields of a lookup exist. lacking: error of the first attempt."""
        assert request.wait_s is not None
        partition, fields = request.partition, request.fields
        try:
            async with asyncio.timeout(request.wait_s):
                while True:
                    pulse = self._ready_pulse(partition)
                    await self._wait(pulse, pulse.count)
                    try:
                        # One missing row is looked up first. All rows are looked up only once it exists.
                        self._directory.lookup(partition, lacking.keys[:1], fields)
                        return self._directory.lookup(partition, keys, fields).to_bytes()
                    except (KeysNotFound, FieldsNotReady) as error:
                        lacking = error
        except TimeoutError:
            raise self._lookup_timeout(request, keys) from None

    def _lookup_timeout(self, request: requests.Lookup, keys: list[str]) -> DataPlaneTimeout:
        unknown, unwritten = self._directory.absent(request.partition, keys, request.fields)
        reasons = [f"{len(unknown)} were never put"] if unknown else []
        reasons += [f"{len(names)} lack field {name!r} ({shown(names)})" for name, names in unwritten.items()]
        message = f"waited for {len(keys)} keys; {', '.join(reasons) or 'no field is written for all of them'}"
        missing = unknown or next(iter(unwritten.values()), keys)
        return DataPlaneTimeout(
            message, op="lookup", partition=request.partition, keys=missing, elapsed_s=request.wait_s
        )

    def _rows(self, request: requests.SomeRows) -> bytes:
        keys = None if request.keys is None else unpack_keys(request.keys)
        return self._directory.rows(request.partition, keys).to_bytes()

    def _claim(self, request: requests.Claim) -> Answer:
        claim = request.rows
        name = (claim.partition, claim.task, msgspec.msgpack.encode(claim.arguments, order="deterministic"))
        if name in self._claim_queues:
            self._directory.check_claim(claim)
        elif (receipt := self._directory.claim(claim, self._now(), request.holder)) is not None:
            return receipt.to_bytes()
        return self._claim_later(request, name)

    async def _claim_later(self, request: requests.Claim, name: tuple[str, str, bytes]) -> bytes:
        claim, timeout_s = request.rows, request.timeout_s
        with self._in_queue(name, claim.wanted) as (queue, place):
            try:
                async with asyncio.timeout(timeout_s), place.turn:
                    # Nothing is awaited between a lease and its reply, so that a claim that is cut off holds no rows.
                    while (receipt := self._directory.claim(claim, self._now(), request.holder)) is None:
                        pulse = self._ready_pulse(claim.partition)
                        await self._wait(pulse, pulse.count)
            except TimeoutError:
                raise ClaimTimeout(
                    self._directory.shortage(claim) + queue.before(place, "claim"),
                    op="claim",
                    partition=claim.partition,
                    elapsed_s=timeout_s,
                ) from None
        return receipt.to_bytes()

    def _renew(self, request: requests.Renew) -> bytes:
        return messages.encode(self._directory.renew(request.lease_ids, self._now()))

    def _renew_rows(self, request: requests.RenewRows) -> bytes:
        self._directory.renew_rows(request.partition, request.lease_id, unpack_keys(request.keys), self._now())
        return b""

    def _release(self, request: requests.Release) -> bytes:
        keys = unpack_keys(request.keys)
        try:
            self._directory.release(request.partition, request.task, request.lease_id, keys, request.outcome)
        finally:
            if (pulse := self._ready.get(request.partition)) is not None:
                pulse.fire()
        return b""

    def _leases(self, request: requests.OnePartition) -> bytes:
        return messages.encode(self._directory.leases(request.partition, self._now()))

    def _revoke(self, request: requests.Revoke) -> bytes:
        count = self._directory.revoke_leases(request.partition, request.task, request.older_than_s, self._now())
        self._ready_pulse(request.partition).fire()
        return messages.encode(count)

    def _skip(self, request: requests.Skip) -> bytes:
        self._directory.skip(request.partition, request.task, request.positions)
        self._ready_pulse(request.partition).fire()
        return b""

    def _reset(self, request: requests.Reset) -> bytes:
        keys = None if request.keys is None else unpack_keys(request.keys)
        found = self._directory.reset(request.partition, request.task, keys)
        self._ready_pulse(request.partition).fire()
        return messages.encode(found)

    def _free_rows(self, request: requests.FreeRows) -> Answer:
        count, freed = self._directory.free(request.partition, unpack_keys(request.keys))
        return self._cleared(request.partition, messages.encode(count), freed)

    def _clear(self, request: requests.SomeRows) -> Answer:
        keys = None if request.keys is None else unpack_keys(request.keys)
        count, freed = self._directory.clear(request.partition, keys)
        return self._cleared(request.partition, messages.encode(count), freed)

    def _clear_stale(self, request: requests.ClearStale) -> Answer:
        claim = request.rows
        keys, freed = self._directory.clear_stale(claim)
        return self._cleared(claim.partition, pack_keys(keys), freed)

    def _cleared(self, partition: str, body: bytes, freed: Sequence[FreedBlock]) -> Answer:
        """Free the blocks of cleared or freed rows, and return `body` once they are gone from the store. Also wakes
        waiting claims, because a sampler may have been waiting for one of the cleared rows."""
        self._ready_pulse(partition).fire()
        self._reply(requests.reply(body))  # The effects must be recorded before the store frees blocks.
        return self._once(self._store.free(freed), body)

    # ---------------- These methods answer requests about partitions and about the whole data plane.

    def _register(self, request: requests.Register) -> Answer:
        is_new = not self._directory.has(request.partition)
        freed = self._directory.register(
            request.partition, request.schema, request.tasks, request.group_size, redefine=request.redefine
        )
        if freed is None:
            return messages.encode(is_new)
        return self._dropped(request.partition, messages.encode(True), freed)

    def _add_tasks(self, request: requests.AddTasks) -> bytes:
        self._directory.add_tasks(request.partition, request.tasks)
        return b""

    def _unregister(self, request: requests.OnePartition) -> Answer:
        partition = request.partition
        count, freed = self._directory.unregister(partition)
        return self._dropped(partition, messages.encode(count), freed)

    def _dropped(self, partition: str, body: bytes, freed: Sequence[FreedBlock]) -> Answer:
        """Free the blocks of a partition that was unregistered or replaced, and return `body` once they are gone."""
        # This wakes waiting claims, which then notice that the partition is gone.
        reply = self._cleared(partition, body, freed)
        self._ready.pop(partition)
        self._space.usual.pop(partition, None)
        return reply

    def _describe(self, request: requests.Describe) -> bytes:
        schema = pack_schema(self._directory.schema(request.partition))
        usual = self._space.usual.get(request.partition, (0, 0))
        credit = self._space.grant(request.writer, request.near, *usual)
        return messages.encode(requests.Described(schema, credit and self._as_space(credit)))

    def _add_fields(self, request: requests.AddFields) -> bytes:
        return messages.encode(self._directory.add_fields(request.partition, list(request.fields.values())))

    def _export(self, request: requests.OnePartition) -> bytes:
        state, rows, receipts = self._directory.export(request.partition)
        encoded = tuple(receipt.to_bytes() for receipt in receipts)
        return messages.encode(requests.Exported(state, rows.to_bytes(), encoded))

    def _restore(self, request: requests.Restore) -> bytes:
        self._directory.restore(request.partition, request.state, PartitionRows.from_bytes(request.rows))
        return b""

    async def _status(self, request: requests.Status) -> bytes:
        if request.partition is not None:
            self._directory.schema(request.partition)  # An unknown partition is refused before the wait.
        store_bytes, unfreed_bytes = await self._store.usage()
        status = self._directory.status(request.partition, self._now())
        return replace(
            status,
            waiting_claims=sum(queue.waiting for queue in self._claim_queues.values()),
            waiting_puts=self._space.num_waiting,
            store_kind=self._store.spec.kind,
            store_bytes=store_bytes - self._directory.blocks.allocated_credit_bytes,
            bytes_unfreed=unfreed_bytes,
            directory_cpu_s=time.process_time(),
        ).to_bytes()

    def _plane(self, payload: bytes) -> bytes:
        spec = self._store.spec
        return messages.encode(
            requests.Plane(self._config.model_dump_json(), spec.kind, spec.run_id, spec.address, spec.plane_id)
        )

    def _task_status(self, request: requests.StatusOfTask) -> bytes:
        return messages.encode(self._directory.task_status(request.partition, request.task, request.fields))

    def _serve(self, payload: bytes) -> bytes:
        if not isinstance(self._host, Serving):
            raise ValueError(f"store {self._store.spec.kind!r} does not serve bytes through the directory")
        body = self._host.serve(payload)
        self._directory.served(payload)
        return body

    async def _find_lost(self, payload: bytes) -> bytes:
        """Look for processes of the store that have died, because a client has failed to reach one. Their blocks are
        lost. Returns the names of all dead processes, by number."""
        await self._store.look()
        self._drop_lost()
        return messages.encode(self._store.dead)

    async def _forget_unit(self, request: requests.ForgetUnits) -> bytes:
        await self._store.look(request.units)
        self._drop_lost()
        found, freed = self._directory.clear_lost()
        for partition in found:
            self._ready_pulse(partition).fire()
        body = messages.encode({partition: pack_keys(keys) for partition, keys in found.items()})
        self._reply(requests.reply(body))
        await self._free(freed)
        return body

    async def _lacks_unit(self, node: bytes) -> bytes:
        await self._store.look()  # The unit that was there may have died unnoticed.
        self._drop_lost()
        return messages.encode(self._store.lacks_unit(node.decode()))

    # ---------------- These private methods wait, free blocks and keep the timer.

    def _space_freed(self) -> None:
        self._freed.fire()
        self._drop_lost()  # The call to the store may have found a process dead.

    def _drop_lost(self) -> None:
        """Let go of the blocks of the store's processes that were found dead since the last call."""
        dead = self._store.newly_dead()
        if not dead:
            return
        num_rows, blocks = self._directory.lose(dead)
        _logger.warning("%s died: %d rows of %d blocks are lost", " and ".join(dead.values()), num_rows, len(blocks))
        self._directory.flush()
        self._store.free(blocks)  # The store forgets them, too, and puts that wait for room are woken.
        for pulse in self._ready.values():
            pulse.fire()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _ready_pulse(self, partition: str) -> Pulse:
        return self._ready.setdefault(partition, Pulse())

    async def _wait(self, pulse: Pulse, seen: int) -> None:
        if not self._closed:  # A closed service sends no more pulses.
            await pulse.wait(seen)
        if self._closed:
            raise DirectoryLost("the data plane was closed while this call waited")

    @contextmanager
    def _in_queue(self, name: tuple[str, str, bytes], wants: str) -> Iterator[tuple[Queue, Place]]:
        """Take a place in a queue of claims for as long as the context lasts. The queue is removed with its last
        caller, because there can be any number of different arguments and so of queues."""
        queue = self._claim_queues[name]
        try:
            with queue.place(wants) as place:
                yield queue, place
        finally:
            if not queue.waiting:
                del self._claim_queues[name]

    def _once(self, freed: asyncio.Future[None] | None, body: bytes) -> Answer:
        """Return `body`, or the future of a reply with it if blocks are still to be freed first."""
        if freed is None:
            return body
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def done(freed: asyncio.Future[None]) -> None:
            if answer.done() or freed.cancelled():
                answer.cancel()  # This does nothing if its client has gone.
                return
            error = freed.exception()
            if isinstance(error, DataPlaneError | ValueError):
                answer.set_result(self._reply(requests.reply_error(error)))
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(self._reply(requests.reply(body)))
            self._arm()

        freed.add_done_callback(done)
        return answer

    async def _free(self, blocks: Sequence[FreedBlock]) -> None:
        """Free blocks, and wait until they are gone from the store, so that later reads of their rows fail."""
        task = self._store.free(blocks)
        if task is not None:
            await asyncio.shield(task)

    def _arm(self) -> None:
        if self._closed:
            return
        deadline = self._directory.next_deadline()
        if deadline is not None:
            deadline = max(deadline, self._listen_until)
        if deadline is None or self._timer is not None and self._timer.when() <= deadline:
            return  # A timer that is early finds nothing to do and is set again, which is cheaper than a new one each.
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._expire, deadline)

    def _expire(self, deadline: float) -> None:
        self._timer = None
        now = self._now()
        if now > deadline + LATE_S:  # Renewals and commits that arrived in the meantime have not been read yet.
            self._listen_until = now + HEAR_FIRST_S
            self._directory.forgive(now - deadline)
            self._arm()
            return
        expired = self._directory.expire(now)
        self._directory.flush()
        if expired.num_rows:
            _logger.warning("leases ran out: %d rows can be claimed again", expired.num_rows)
            for pulse in self._ready.values():
                pulse.fire()
        if expired.writers:
            _logger.warning("writers %s did not commit in time: their bytes are reclaimed", expired.writers)
        self._store.take_back(expired.reservations)
        self._arm()
