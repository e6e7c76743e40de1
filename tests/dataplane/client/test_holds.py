"""Receipts release their rows: at the end of a `with`, and when nothing refers to them; leases are listed and ended."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import InvalidArgument, LeaseLost, RowsCleared
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids, small_plane
from headrace.tests.waiting import wait_until

KEYS = ["a.0", "a.1", "b.0", "b.1"]


@pytest.fixture
def full(client: DataPlaneClient) -> Iterator[DataPlaneClient]:
    """The client, with four rows in its partition."""
    client.put("p", KEYS, {"ids": ids(4)})
    yield client


def counts(client: DataPlaneClient) -> tuple[int, int]:
    """(leased, done) of the task."""
    status = client.task_status("p", "a", ["ids"])
    return status.leased, status.done


def test_a_with_ends_in_done_and_after_an_error_in_retry(full: DataPlaneClient) -> None:
    with full.claim("p", "a", ["ids"], 2) as batch:
        assert batch.keys == ("a.0", "a.1") and counts(full) == (2, 0)
    assert counts(full) == (0, 2)
    with pytest.raises(ZeroDivisionError), full.claim("p", "a", ["ids"], 2) as batch:
        full.release(batch.select([0]), "a", "done")
        raise ZeroDivisionError
    assert counts(full) == (0, 3), "what was released within stays released"
    with full.claim("p", "a", ["ids"], 1) as batch:
        full.clear("p", batch.keys)
    for ended in (batch, batch.select([0])):
        with pytest.raises(LeaseLost, match="released or cleared before.*b.1"), ended:
            raise AssertionError("the body runs with no rows")
    with pytest.raises(InvalidArgument, match="holds no rows in this process"), full.lookup("p", ["a.0"]):
        pass


def test_a_with_whose_lease_was_lost_says_so_unless_it_fails_anyway(full: DataPlaneClient, plane: DataPlane) -> None:
    other = connect(plane.handle)
    with pytest.raises(LeaseLost, match="a.0"), full.claim("p", "a", ["ids"], 2):
        other.revoke("p", "a", older_than_s=0)
    with pytest.raises(ZeroDivisionError), full.claim("p", "a", ["ids"], 2):
        other.revoke("p", "a", older_than_s=0)
        raise ZeroDivisionError
    assert counts(full) == (0, 0)


def test_an_asyncio_receipt_is_an_asynchronous_context(full: DataPlaneClient, plane: DataPlane) -> None:
    async def use() -> None:
        async with connect_async(plane.handle) as twin:
            async with await twin.claim("p", "a", ["ids"], 2):
                assert counts(full) == (2, 0)
            with pytest.raises(ZeroDivisionError):
                async with await twin.claim("p", "a", ["ids"], 2):
                    raise ZeroDivisionError
            assert counts(full) == (0, 2)
            with pytest.raises(InvalidArgument, match="expected `async with`"):
                with await twin.claim("p", "a", ["ids"], 1):
                    pass

    asyncio.run(use())


def test_rows_whose_receipts_are_gone_come_back(full: DataPlaneClient) -> None:
    def consumer() -> None:
        receipt = full.claim("p", "a", ["ids"], 3)
        full.release(receipt.select([2]), "a", "done")
        raise RuntimeError("a bug in a step")

    with pytest.raises(RuntimeError):
        consumer()
    wait_until(lambda: counts(full) == (0, 1))
    receipt = full.claim("p", "a", ["ids"], 3)
    part = receipt.concat(receipt.select([0])).split(2)[1].with_tags(n=[0, 0])
    again = copy.deepcopy(part)
    del receipt, part
    gc.collect()
    assert full.leases("p")[0].keys == ("a.0", "a.1", "b.1") and len(again) == 2
    del again
    wait_until(lambda: counts(full) == (0, 1))


@pytest.mark.parametrize("leave", [KVBatchMeta.to_bytes, pickle.dumps], ids=["bytes", "pickle"])
def test_rows_whose_receipt_went_elsewhere_stay_leased(full: DataPlaneClient, leave: object) -> None:
    receipt = full.claim("p", "a", ["ids"], 2)
    sent = leave(receipt.select([0]))  # type: ignore[operator]
    del receipt
    full.claim("p", "a", ["ids"], 2)  # given back after the other would have been
    wait_until(lambda: counts(full)[0] == 2)
    assert [lease.keys for lease in full.leases("p")] == [("a.0", "a.1")]
    read = pickle.loads(sent) if leave is pickle.dumps else KVBatchMeta.from_bytes(sent)
    assert read.holds == () and read.generations.tolist() == [0]
    full.release(read, "a", "done")
    assert counts(full) == (1, 1)


def fork() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads.
        pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.processes
def test_rows_whose_receipt_a_fork_took_along_stay_leased(full: DataPlaneClient) -> None:
    kept, receipt = (full.claim("p", "a", ["ids"], 1) for _ in range(2))
    fork()
    full.release(kept, "a", "done")
    del kept, receipt
    full.claim("p", "a", ["ids"], 2)  # given back after the other would have been
    wait_until(lambda: counts(full) == (1, 1))
    assert [lease.keys for lease in full.leases("p")] == [("a.1",)]


@pytest.mark.parametrize(
    "leave",
    [KVBatchMeta.to_bytes, pytest.param(lambda receipt: fork(), marks=pytest.mark.processes)],
    ids=["bytes", "fork"],
)
def test_a_put_of_rows_whose_receipt_went_elsewhere_is_checked(
    full: DataPlaneClient, plane: DataPlane, leave: Callable[[KVBatchMeta], object]
) -> None:
    other = connect(plane.handle)
    receipt = full.claim("p", "a", ["ids"], 2)
    leave(receipt)
    del receipt
    gc.collect()
    full.put("p", KEYS[:2], {"score": [1.0, 2.0]})
    other.clear("p", KEYS[:2])
    with pytest.raises(RowsCleared, match="2 of 2 rows"):
        full.put("p", KEYS[:2], {"ids": ids(2)})
    other.put("p", KEYS[:2], {"ids": ids(2)})
    full.clear("p", KEYS[:2])
    full.put("p", KEYS[:2], {"ids": ids(2)})


def test_a_put_of_rows_whose_lease_is_renewed_is_checked(full: DataPlaneClient, plane: DataPlane) -> None:
    other = connect(plane.handle)
    receipt = full.claim("p", "a", ["ids"], 2)
    other.renew(KVBatchMeta.from_bytes(receipt.to_bytes()))
    full.clear("p", KEYS[:2])
    with pytest.raises(RowsCleared, match="2 of 2 rows"):
        other.put("p", KEYS[:2], {"ids": ids(2)})
    assert full.status("p").rows == 2


def test_a_lost_lease_of_a_receipt_that_went_elsewhere_is_forgotten() -> None:
    with small_plane(lease_s=0.4) as plane, connect(plane.handle) as client, connect(plane.handle) as other:
        client.register("p", SCHEMA, ["a"])
        client.put("p", KEYS, {"ids": ids(4)})
        held, leases = client.claim("p", "a", ["ids"], 2), client._operations._leases
        held.to_bytes()
        other.clear("p")
        wait_until(lambda: not any(rows.is_live for rows in leases._held.values()))
        del held
        client.put("p", KEYS[:2], {"ids": ids(2)})
        client.claim("p", "a", ["ids"], 1).to_bytes()
        other.clear("p")
        wait_until(lambda: not leases._held)


@pytest.mark.parametrize("again", ["redefine", "unregister", "load", "register"])
def test_a_partition_that_a_client_defines_again_has_no_old_receipts(
    full: DataPlaneClient, plane: DataPlane, tmp_path: Path, again: str
) -> None:
    _kept = full.claim("p", "a", ["ids"], 4)
    full.save("p", tmp_path / "rows")
    full.register("p", SCHEMA, ("a",), group_size=2, redefine=True)  # with equal arguments, which does nothing
    assert full._operations._leases.fences("p", KEYS)
    if again == "redefine":
        full.register("p", SCHEMA, ("a",), redefine=True)
    else:
        (full if again == "unregister" else connect(plane.handle)).unregister("p")
    if again == "load":
        full.load(tmp_path / "rows")
    if again == "unregister":
        connect(plane.handle).register("p", SCHEMA, ("a",))
    if again == "register":
        full.register("p", SCHEMA, ("a",))
    full.put("p", KEYS, {"score": torch.ones(4)})
    assert full.status("p").rows == 4


def test_leases_are_listed_and_revoked(full: DataPlaneClient, plane: DataPlane) -> None:
    other = connect(plane.handle, name="other")
    first, second = other.claim("p", "a", ["ids"], 2), full.claim("p", "a", ["ids"], 2)
    listed = full.leases("p")
    assert [lease.lease_id for lease in listed] == [first.lease_id, second.lease_id]
    assert listed[0].keys == first.keys and listed[0].task == "a" and listed[0].holder.startswith("other pid=")
    assert listed[0].held_s >= listed[1].held_s >= 0 and listed[0].expires_s > 0
    assert full.status().oldest_lease == f"task 'a' of 'p', {listed[0].holder}"
    assert full.revoke("p", "a", older_than_s=600) == 0
    assert full.revoke("p", "a", older_than_s=listed[1].held_s) == 4 and full.leases("p") == ()
    with pytest.raises(LeaseLost, match="a.0"):
        other.release(first, "a", "done")
    for wrong, message in (({"task": "b"}, "task 'b'"), ({"older_than_s": -1.0}, "older_than_s: got -1.0")):
        with pytest.raises(ValueError, match=message):
            full.revoke("p", **{"task": "a", "older_than_s": 0.0, **wrong})  # type: ignore[arg-type]


def test_a_hold_is_bounded_though_its_process_lives() -> None:
    with small_plane(lease_s=0.4) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, [TaskConfig("a", max_hold_s=0.6)])
        client.put("p", KEYS, {"ids": ids(4)})
        held = client.claim("p", "a", ["ids"], 4)
        assert client.claim("p", "a", ["ids"], 4, timeout_s=10).keys == held.keys
        with pytest.raises(LeaseLost, match="4 of 4"):
            client.release(held, "a", "done")
        with pytest.raises(ValueError, match="max_hold_s=0, expected seconds > 0"):
            client.add_tasks("p", [TaskConfig("b", max_hold_s=0)])
        with pytest.raises(ValueError, match="max_hold_s=0.6"):
            client.register("p", SCHEMA, ["a"])
