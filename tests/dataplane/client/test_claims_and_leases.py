"""Claims that wait and are woken, and leases that last as long as their client."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import CapacityExceeded, ClaimTimeout, LeaseLost
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids, small_plane
from headrace.tests.waiting import wait_until


def test_rows_of_an_expired_lease_wake_a_claim() -> None:
    with small_plane(lease_s=0.3) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0"], {"ids": ids(1)})
        gone = connect(plane.handle)
        dead = gone.claim("p", "a", ("ids",), 1)
        started = time.perf_counter()
        gone.close()
        assert client.claim("p", "a", ("ids",), 1).keys == ("a.0",)
        assert time.perf_counter() - started > 0.15
        with pytest.raises(LeaseLost, match="a.0"):
            client.release(dead, "a", "done")


@pytest.mark.long
def test_a_lease_lasts_as_long_as_its_client() -> None:
    with small_plane(lease_s=1.0) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0", "b.0"], {"ids": ids(2)})
        holder = connect(plane.handle)
        held = holder.claim("p", "a", ("ids",), 2)
        holder.release(held.select([0]), "a", "done")
        while (status := client.status()).oldest_lease_s < 2.5:
            assert status.leased_rows == 1, "the lease of a live consumer has run out"
            time.sleep(0.05)
        with pytest.raises(ClaimTimeout, match="1 leased"):
            client.claim("p", "a", ("ids",), 1, timeout_s=0)
        holder.release(held.select([1]), "a", "retry")
        again = holder.claim("p", "a", ("ids",), 1)
        del holder  # it was not closed
        assert client.claim("p", "a", ("ids",), 1).keys == again.keys, "its rows return"


@pytest.mark.long
def test_a_receipt_that_was_handed_over_is_renewed_by_its_new_holder() -> None:
    with small_plane(lease_s=0.6) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0", "b.0", "c.0"], {"ids": ids(3)})
        first = connect(plane.handle)
        meta = first.claim("p", "a", ("ids",), 3)
        first.close()  # renews no more
        client.renew(meta.select([0, 1]))
        while (status := client.status()).oldest_lease_s < 1.5:
            assert status.leased_rows == 3, "the lease of a live consumer has run out"
            time.sleep(0.05)
        client.release(meta.select([0]), "a", "done")
        with pytest.raises(LeaseLost, match=r"no longer holds 1 of 3 rows \(op=renew .*keys=\['a.0'\]"):
            client.renew(meta)
        client.release(meta.select([1]), "a", "retry")  # the last row for which this client renews
        again = client.claim("p", "a", ("ids",), 2)
        assert sorted(again.keys) == ["b.0", "c.0"], "the third row returns when it is not renewed"
        with pytest.raises(LeaseLost, match="3 of 3"):
            client.renew(meta)
        with pytest.raises(ValueError, match="renew: the receipt has no lease"):
            client.renew(client.lookup("p", ["a.0"]))


@pytest.mark.long
def test_leases_are_renewed_for_asyncio_too_and_a_blocked_loop_keeps_them() -> None:
    with small_plane(lease_s=1.0) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0"], {"ids": ids(1)})

        async def hold() -> None:
            async with connect_async(plane.handle) as twin:
                held = await twin.claim("p", "a", ("ids",), 1)
                while client.status().oldest_lease_s < 1.5:  # the event loop does not run meanwhile
                    assert client.status().leased_rows == 1
                    time.sleep(0.05)
                await twin.release(held, "a", "done")

        asyncio.run(hold())


@pytest.mark.long
def test_renewals_that_come_during_a_stall_of_the_directory_count() -> None:
    with small_plane(lease_s=0.5) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["a.0"], {"ids": ids(1)})
        held = client.claim("p", "a", ("ids",), 1)
        client._link._loop.call_soon_threadsafe(time.sleep, 1.5)  # type: ignore[attr-defined]
        assert client.status().leased_rows == 1
        client.release(held, "a", "done")


@pytest.mark.long
def test_who_waits_behind_others_is_told_so(client: DataPlaneClient, plane: DataPlane) -> None:
    client.put("p", [f"a.{n}" for n in range(2)], {"ids": ids(2), "blob": torch.zeros(2, 100_000, dtype=torch.uint8)})
    other = connect(plane.handle)

    def claim_more() -> None:
        with pytest.raises(ClaimTimeout, match=r"of 100 rows; 2 of the partition's 2 rows are ready \(op"):
            other.claim("p", "a", ["ids"], 100, timeout_s=1.0)

    def put_more() -> None:
        with pytest.raises(CapacityExceeded, match=r"of 1048576 \(op"):
            other.put(
                "p", [f"b{n}" for n in range(9)], {"blob": torch.zeros(9, 100_000, dtype=torch.uint8)}, timeout_s=1.0
            )

    threads = [threading.Thread(target=claim_more), threading.Thread(target=put_more)]
    for thread in threads:
        thread.start()
    wait_until(lambda: client.status().waiting_claims + client.status().waiting_puts == 2)
    with pytest.raises(ClaimTimeout, match="2 rows are ready, behind 1 claim that waits for 100 rows"):
        client.claim("p", "a", ["ids"], 1, timeout_s=0)
    with pytest.raises(CapacityExceeded, match=r"of 1048576, behind 1 put that waits for 9\d{5} bytes"):
        client.put("p", ["c"], {"blob": torch.zeros(1, 100_000, dtype=torch.uint8)}, timeout_s=0)
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert len(client.claim("p", "a", ["ids"], 1, timeout_s=0)) == 1
