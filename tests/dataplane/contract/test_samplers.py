"""The data plane's contract: the order of claims and the bound on versions, through both clients, over two stores."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataplane.client.async_client import AsyncDataPlaneClient
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import ClaimTimeout, KeysNotFound, SamplerError
from headrace.dataplane.factory import DataPlane, connect_async
from headrace.dataplane.meta import POSITION
from headrace.dataplane.status import TaskReset, TaskStatus
from headrace.testing.data_plane import SCHEMA, assert_rows
from headrace.tests.dataplane.rows import FIRST, columns
from headrace.tests.dataplane.stubborn import STUBBORN
from headrace.tests.waiting import in_thread, wait_until

pytestmark = pytest.mark.parametrize("kind", ["local", "shm"], indirect=True, scope="package")


TASKS = (
    TaskConfig("train", "in_order"),
    TaskConfig("ranks", "rank_aware", {"num_ranks": 2}),
    TaskConfig("wide", "windowed", {"window": 2}, first_prompt=10),
    TaskConfig("bad", STUBBORN),
)


def group(number: int) -> list[str]:
    """The rows of a prompt."""
    return [f"{np.base_repr(number, 36).lower()}.{sample}" for sample in range(4)]


def put(client: Any, partition: str, number: int, version: int = 0) -> None:
    keys = group(number)
    client.put(partition, keys, columns(keys), versions=version, tags={POSITION: np.full(len(keys), number)})


@pytest.fixture
def ordered(client: Any, partition: str) -> Iterator[Any]:
    """(client, partition) with task `train` in order, and `free` with a sampler that is no use; groups of 4."""
    name = f"{partition}-ordered"
    client.register(name, SCHEMA, TASKS, group_size=4)
    yield client, name
    client.clear(name)


def claim(client: Any, partition: str, groups: int, **options: Any) -> Any:
    return client.claim(partition, "train", FIRST, 4 * groups, whole_groups=True, **options)


def waiting_claim(client: Any, call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread in a claim that the directory has, and where its receipt will be."""
    thread, result = in_thread(call)
    wait_until(lambda: client.status().waiting_claims, "the claim never reached the directory")
    return thread, result


def test_claims_in_order_wait_for_the_missing_prompt_and_are_woken_by_it(ordered: Any) -> None:
    client, partition = ordered
    put(client, partition, 1)
    with pytest.raises(ClaimTimeout, match="'in_order' waits for the prompt at position 0"):
        claim(client, partition, 1, timeout_s=0.05)
    thread, result = waiting_claim(client, lambda: claim(client, partition, 2, timeout_s=10))
    put(client, partition, 0)
    thread.join(10)
    assert result[0].keys == (*group(0), *group(1))
    assert_rows(client.get(result[0]), list(result[0].keys), FIRST)


def test_clear_of_the_missing_prompt_wakes_a_claim_too(ordered: Any) -> None:
    client, partition = ordered
    client.put(partition, group(0)[:3], columns(group(0)[:3]), tags={POSITION: np.zeros(3, int)})
    put(client, partition, 1)
    thread, result = waiting_claim(client, lambda: claim(client, partition, 1, timeout_s=10))
    client.clear(partition, group(0)[:3])
    thread.join(10)
    assert result[0].keys == tuple(group(1))


def test_skip_of_the_missing_prompt_wakes_a_claim_too(ordered: Any) -> None:
    client, partition = ordered
    put(client, partition, 2)
    thread, result = waiting_claim(client, lambda: claim(client, partition, 1, timeout_s=10))
    client.skip(partition, "train", range(2))
    thread.join(10)
    assert result[0].keys == tuple(group(2))
    with pytest.raises(ValueError, match="positions: got float64"):
        client.skip(partition, "train", [0.5])


def test_reset_wakes_a_claim_and_the_status_of_a_task_counts_its_rows(ordered: Any) -> None:
    client, partition = ordered
    for number in (0, 1, 3):
        put(client, partition, number)
    client.put(partition, group(4)[:1], {"reward": columns(group(4)[:1])["reward"]})
    meta = claim(client, partition, 2)
    client.release(meta.select(np.arange(4)), "train", "done")
    assert client.task_status(partition, "train", FIRST) == TaskStatus(13, 4, 4, 4, 1, 2, 0)
    assert client.task_status(partition, "train") == TaskStatus(13, 0, 4, 4, 5, 2, 0)
    assert client.task_status(partition, "bad", ["reward"]) == TaskStatus(13, 13, 0, 0, 0, None, 0)
    thread, result = waiting_claim(client, lambda: claim(client, partition, 1, timeout_s=10))
    assert client.reset(partition, "train") == TaskReset(4, 4)
    thread.join(10)
    assert result[0].keys == tuple(group(0))
    client.release(meta.select(np.arange(4, 8)), "train", "done")
    assert client.reset(partition, "train", group(1)[:2]) == TaskReset(2, 0)
    with pytest.raises(KeysNotFound, match="nothing"):
        client.reset(partition, "train", ["nothing"])
    with pytest.raises(ValueError, match="task 'nobody'"):
        client.task_status(partition, "nobody")


def test_options_travel_and_are_compared(ordered: Any) -> None:
    client, partition = ordered
    client.register(partition, SCHEMA, TASKS[::-1], group_size=4)
    with pytest.raises(ValueError, match="tasks .*'window': 3.*registered with .*'window': 2"):
        client.register(
            partition, SCHEMA, (*TASKS[:2], TASKS[3], TaskConfig("wide", "windowed", {"window": 3}, 10)), group_size=4
        )
    for number in (11, 12):
        put(client, partition, number)
    meta = client.claim(partition, "wide", FIRST, 4, whole_groups=True)
    assert meta.keys == tuple(group(11))
    with pytest.raises(ClaimTimeout, match="'windowed' waits for the prompt at position 10"):
        client.claim(partition, "wide", FIRST, 4, whole_groups=True, timeout_s=0.05)


def test_stale_rows_are_passed_over_named_once_and_cleared(ordered: Any) -> None:
    client, partition = ordered
    for number, version in enumerate((3, 1, 3)):
        put(client, partition, number, version)
    meta = claim(client, partition, 2, min_version=2)
    assert meta.keys == (*group(0), *group(2)) and meta.versions.min() == 3
    assert client.status(partition).stale_rows == 4
    with pytest.raises(ClaimTimeout, match="4 older than min_version=2"):
        claim(client, partition, 1, min_version=2, timeout_s=0.05)
    keys = client.clear_stale(partition, "train", FIRST, 2, whole_groups=True)
    assert sorted(keys) == group(1)
    assert client.clear_stale(partition, "train", FIRST, 2, whole_groups=True) == ()
    status = client.status(partition)
    assert (status.rows, status.stale_rows) == (8, 0)
    client.release(meta, "train", "done")


def test_a_bad_sampler_is_an_error_of_the_claim_and_leases_nothing(ordered: Any) -> None:
    client, partition = ordered
    put(client, partition, 0)
    with pytest.raises(SamplerError, match="task 'bad', sampler '.*:Stubborn': .* chose item 4, expected one of 4"):
        client.claim(partition, "bad", FIRST, 4)
    assert client.status(partition).leased_rows == 0
    assert claim(client, partition, 1).keys == tuple(group(0))
    for name in ("in_oder", "os:system"):
        with pytest.raises(ValueError, match=f"'{name}': expected .* the configuration key dataplane.samplers lists"):
            client.register("never", SCHEMA, (TaskConfig("train", name, {"command": "true"}),))


def test_a_rank_that_is_ahead_does_not_hold_up_the_others(ordered: Any) -> None:
    client, partition = ordered
    receipts = []  # Rows whose receipt is dropped can be claimed again.

    def share(rank: int, **options: Any) -> Any:
        limits = {"timeout_s": 10} | options
        receipts.append(
            client.claim(partition, "ranks", FIRST, 4, whole_groups=True, arguments={"rank": rank}, **limits)
        )
        return receipts[-1]

    for number in range(2):
        put(client, partition, number)
    assert share(0).keys == tuple(group(0))
    thread, result = waiting_claim(client, lambda: share(0))
    assert share(1).keys == tuple(group(1))
    for number in (2, 3):
        put(client, partition, number)
    thread.join(10)
    assert result[0].keys == tuple(group(2)) and share(1).keys == tuple(group(3))
    with pytest.raises(
        ValueError, match=r"got the arguments \[\], but sampler 'rank_aware' of task 'ranks' takes \['rank"
    ):
        client.claim(partition, "ranks", FIRST, 4, whole_groups=True)
    with pytest.raises(ValueError, match="got the arguments .'rank'.*'in_order' of task 'train' takes none"):
        claim(client, partition, 1, arguments={"rank": 0})
    with pytest.raises(ValueError, match="arguments: got 'rank': tensor"):
        share(torch.tensor(0))  # pyright: ignore[reportArgumentType]
    assert client.status().waiting_claims == 0


def test_async_client_chooses_and_clears_alike(ordered: Any, plane: DataPlane) -> None:
    client, partition = ordered
    for number, version in ((0, 1), (1, 5)):
        put(client, partition, number, version)

    async def session() -> None:
        async with connect_async(plane.handle, name="async") as twin:
            meta = await claim(twin, partition, 1, min_version=4)
            assert meta.keys == tuple(group(1))
            keys = await twin.clear_stale(partition, "train", FIRST, 4, whole_groups=True)
            assert sorted(keys) == group(0)

    asyncio.run(session())


def test_both_clients_take_the_same_arguments(kind: str) -> None:
    for name in ("register", "add_tasks", "claim", "renew", "skip", "reset", "task_status", "clear_stale"):
        blocking, twin = (inspect.signature(getattr(each, name)) for each in (DataPlaneClient, AsyncDataPlaneClient))
        assert blocking == twin, name
