"""The directory as a service: requests in, replies out, waiting claims and puts woken by what unblocks them.

                 waits for                       unblocked by
claim            its turn in its task's queue    the claim before it (first come, first served)
                 enough ready rows               commit, release(retry), a lease that expires
reserve (put)    its turn among waiting puts     the put before it
                 room                            blocks freed by clear, replace, abort or expiry
Everything else answers at once. Nothing polls: the only timer stands at the directory's next deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..codecs import messages
from . import requests
from .block_store import FreesMany, Serving, StoreHost
from .block_table import FreedBlock, Reservation
from .config import DataPlaneConfig
from .directory import Directory
from .errors import CapacityExceeded, ClaimTimeout, DataPlaneError, DirectoryLost
from .partition import PutRows

_logger = logging.getLogger(__name__)


class Pulse:
    """Something that happens again and again; none is missed between looking and waiting."""

    def __init__(self) -> None:
        self.count = 0
        """How often it has happened."""
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self, seen: int) -> None:
        """Until `count` is more than `seen`."""
        if self.count == seen:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future

    def fire(self) -> None:
        self.count += 1
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)


class DirectoryService:
    """One run's directory and store host. All methods belong to one event loop."""

    def __init__(self, config: DataPlaneConfig, host: StoreHost) -> None:
        self._directory = Directory(
            capacity_bytes=config.store.capacity_mib << 20, lease_s=config.lease_s, reserve_s=config.reserve_s
        )
        self._host = host
        # One thread for all calls of the host: a store that answers slowly must not stop claims and leases.
        self._host_thread = ThreadPoolExecutor(1, thread_name_prefix="store-host")
        self._put_turn = asyncio.Lock()
        self._claim_turns: dict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._room = Pulse()
        self._ready: dict[str, Pulse] = {}
        """By partition."""
        self._waiting_claims = 0
        self._waiting_puts = 0
        self._timer: asyncio.TimerHandle | None = None
        self._freeing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._handlers: dict[str, Callable[[bytes], bytes | Coroutine[Any, Any, bytes]]] = {
            "register": self._register,
            "describe": self._describe,
            "reserve": self._reserve,
            "commit": self._commit,
            "abort": self._abort,
            "lookup": self._lookup,
            "claim": self._claim,
            "release": self._release,
            "clear": self._clear,
            "status": self._status,
            "store": self._store,
        }

    def answer(self, op: str, payload: bytes) -> bytes | Coroutine[Any, Any, bytes]:
        """The reply to one request, or what to await for it. Must be awaited then, or closed.

        DataPlaneErrors and ValueErrors travel in the reply; all else is a bug and raises.
        """
        try:
            if self._closed:
                raise DirectoryLost("the data plane is closed", op=op)
            body = self._handlers[op](payload)
        except (DataPlaneError, ValueError) as error:
            self._arm()
            return requests.reply_error(error)
        if not isinstance(body, bytes):
            return self._answer_later(body)
        self._arm()
        return requests.reply(body)

    async def _answer_later(self, waiting: Coroutine[Any, Any, bytes]) -> bytes:
        try:
            return requests.reply(await waiting)
        except (DataPlaneError, ValueError) as error:
            return requests.reply_error(error)
        finally:
            self._arm()

    async def call(self, op: str, payload: bytes) -> bytes:
        """`answer`, awaited."""
        reply = self.answer(op, payload)
        return reply if isinstance(reply, bytes) else await reply

    async def close(self) -> None:
        """Fail what waits, end the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._room.fire()
        for pulse in self._ready.values():
            pulse.fire()
        await asyncio.get_running_loop().run_in_executor(self._host_thread, self._host.close)
        self._host_thread.shutdown(wait=False)

    # -------------------------------------------------------------- put

    async def _reserve(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Reserve)
        put = request.rows()
        self._directory.check(put)
        self._waiting_puts += 1
        try:
            reservation = await self._wait_for_room(put, self._now() + request.timeout_s)
        except TimeoutError:
            status = self._directory.status(None, self._now())
            wanted = sum(layout.nbytes for layout in put.layouts)
            raise CapacityExceeded(
                f"no room for {wanted} bytes: {status.bytes_used} in use and {status.bytes_reserved} reserved "
                f"of {status.bytes_capacity}",
                op="put",
                partition=put.partition,
                keys=put.keys,
                elapsed_s=request.timeout_s,
            ) from None
        finally:
            self._waiting_puts -= 1
        reserved = requests.Reserved(
            reservation.reservation_id, reservation.block_ids.start, tuple(reservation.locations)
        )
        return messages.encode(reserved)

    async def _wait_for_room(self, put: PutRows, deadline: float) -> Reservation:
        async with asyncio.timeout_at(deadline):
            await self._put_turn.acquire()
        try:
            while True:
                seen = self._room.count
                reservation = await self._try_reserve(put)
                if reservation is not None:
                    return reservation
                async with asyncio.timeout_at(deadline):
                    await self._wait(self._room, seen)
        finally:
            self._put_turn.release()

    async def _try_reserve(self, put: PutRows) -> Reservation | None:
        """Room in the account and in the store, or None."""
        reservation = self._directory.reserve(put, self._now())
        if reservation is None:
            return None
        granted = False
        try:
            granted = await self._on_host(self._allocate, reservation)
        finally:
            if not granted:
                # Not a reason for `_room` to fire: this very put would try again at once, and for ever.
                self._free_later(self._directory.abort(reservation.reservation_id), fire=False)
        return reservation if granted else None

    def _allocate(self, reservation: Reservation) -> bool:
        for block_id, nbytes in zip(reservation.block_ids, reservation.sizes, strict=True):
            location = self._host.allocate(block_id, nbytes)
            if location is None:
                return False
            reservation.locations.append(location)
        return True

    async def _commit(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Commit)
        receipt, freed = self._directory.commit(request.reservation_id, request.locations)
        self._ready_pulse(receipt.partition).fire()
        await self._free(freed)
        return receipt.to_bytes()

    async def _abort(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Abort)
        await self._free(self._directory.abort(request.reservation_id))
        return b""

    # -------------------------------------------------------------- read and consume

    def _lookup(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Lookup)
        keys = requests.unpack_keys(request.keys)
        return self._directory.lookup(request.partition, keys, request.fields).to_bytes()

    async def _claim(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Claim)
        claim = request.rows
        self._directory.check_claim(claim)
        self._waiting_claims += 1
        try:
            async with asyncio.timeout(request.timeout_s), self._claim_turns[claim.partition, claim.task]:
                # No await between a lease and its reply: a claim that is cut off holds no rows.
                pulse = self._ready_pulse(claim.partition)
                while (receipt := self._directory.claim(claim, self._now())) is None:
                    await self._wait(pulse, pulse.count)
        except TimeoutError:
            raise ClaimTimeout(
                self._directory.shortage(claim), op="claim", partition=claim.partition, elapsed_s=request.timeout_s
            ) from None
        finally:
            self._waiting_claims -= 1
        return receipt.to_bytes()

    def _release(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Release)
        keys = requests.unpack_keys(request.keys)
        try:
            self._directory.release(request.partition, request.task, request.lease_id, keys, request.outcome)
        finally:
            self._ready_pulse(request.partition).fire()
        return b""

    async def _clear(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Clear)
        keys = None if request.keys is None else requests.unpack_keys(request.keys)
        count, freed = self._directory.clear(request.partition, keys)
        await self._free(freed)
        return messages.encode(count)

    # -------------------------------------------------------------- partitions and the rest

    def _register(self, payload: bytes) -> bytes:
        request = messages.decode(payload, requests.Register)
        self._directory.register(request.partition, request.schema, request.tasks, request.group_size)
        return b""

    def _describe(self, payload: bytes) -> bytes:
        return messages.encode(self._directory.schema(messages.decode(payload, requests.Describe).partition))

    async def _status(self, payload: bytes) -> bytes:
        status = self._directory.status(messages.decode(payload, requests.Status).partition, self._now())
        return messages.encode(
            replace(
                status,
                waiting_claims=self._waiting_claims,
                waiting_puts=self._waiting_puts,
                store_kind=self._host.spec.kind,
                store_bytes=await self._on_host(self._host.usage_bytes),
            )
        )

    def _store(self, payload: bytes) -> bytes:
        if not isinstance(self._host, Serving):
            raise ValueError(f"store {self._host.spec.kind!r} does not serve bytes through the directory")
        return self._host.serve(payload)

    # -------------------------------------------------------------- inside

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _ready_pulse(self, partition: str) -> Pulse:
        return self._ready.setdefault(partition, Pulse())

    async def _wait(self, pulse: Pulse, seen: int) -> None:
        await pulse.wait(seen)
        if self._closed:
            raise DirectoryLost("the data plane was closed while this call waited")

    async def _on_host(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._closed:
            raise DirectoryLost("the data plane is closed")
        return await asyncio.get_running_loop().run_in_executor(self._host_thread, call, *arguments)

    async def _free(self, blocks: Sequence[FreedBlock]) -> None:
        """Gone from the store when this returns, so that receipts of theirs fail from then on; then puts may follow."""
        if blocks:
            await asyncio.shield(self._free_later(blocks))

    def _free_later(self, blocks: Sequence[FreedBlock], *, fire: bool = True) -> asyncio.Task[None]:
        async def free() -> None:
            if self._closed:  # they went with the store
                return
            await self._on_host(self._free_on_host, [(block.block_id, block.location) for block in blocks])
            if fire:
                self._room.fire()

        task = asyncio.get_running_loop().create_task(free())
        self._freeing.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._freeing.discard)
        return task

    def _free_on_host(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        if isinstance(self._host, FreesMany):
            self._host.free_many(blocks)
            return
        for block_id, location in blocks:
            self._host.free(block_id, location)

    def _arm(self) -> None:
        """Set the timer to the directory's next deadline."""
        if self._closed:
            return
        deadline = self._directory.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        expired = self._directory.expire(self._now())
        if expired.num_rows:
            _logger.warning("leases ran out: %d rows can be claimed again", expired.num_rows)
            for pulse in self._ready.values():
                pulse.fire()
        if expired.writers:
            _logger.warning("writers %s did not commit in time: their bytes are reclaimed", expired.writers)
            self._free_later(expired.freed)
        self._arm()
