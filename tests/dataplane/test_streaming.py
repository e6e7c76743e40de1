"""A dataset over a partition: what it yields, which rows are done, and torch's DataLoader with and without workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from headrace.codecs.batch import Batch
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import ClaimTimeout, DataPlaneError, InvalidArgument
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.streaming import ROWS_A_CLAIM, StreamingDataset
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.rpc.served import Served, config
from headrace.tests.waiting import wait_until

SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("number", Kind.PER_SAMPLE, torch.int64)])
FIELDS = ("ids", "number")


@pytest.fixture
def handle() -> Iterator[DataPlaneHandle]:
    with open_data_plane(config(), run_id=fresh_run_id(), in_process=True) as plane:
        yield plane.handle


@pytest.fixture
def client(handle: DataPlaneHandle) -> Iterator[DataPlaneClient]:
    with connect(handle) as client:
        client.register("p", SCHEMA, ("train",), group_size=2)
        yield client


def put(client: DataPlaneClient, numbers: range, partition: str = "p") -> None:
    """Rows with these numbers, of which each has its number modulo 4 of tokens; two in a group."""
    ids = [torch.full((number % 4,), number, dtype=torch.int32) for number in numbers]
    client.put(partition, [f"{n // 2}.{n % 2}" for n in numbers], {"ids": ids, "number": torch.tensor(list(numbers))})


def dataset(handle: DataPlaneHandle, batch_size: int | None, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        handle, "p", "train", FIELDS, batch_size=batch_size, **{"timeout_s": 0.2, "on_timeout": "stop"} | options
    )


def counts(client: DataPlaneClient) -> tuple[int, int, int]:
    """Return the task's rows that are (ready, leased, done)."""
    status = client.task_status("p", "train")
    return status.ready, status.leased, status.done


def test_a_batch_is_done_when_the_next_is_asked_for(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    put(client, range(10))
    batches = iter(dataset(handle, 4, at_least=2, whole_groups=True))
    first = next(batches)
    assert isinstance(first, Batch) and first.tensor("number").tolist() == [0, 1, 2, 3]
    assert first.jagged("ids").values.tolist() == [1, 2, 2, 3, 3, 3]
    assert counts(client) == (6, 4, 0)
    assert next(batches).tensor("number").tolist() == [4, 5, 6, 7] and counts(client) == (2, 4, 4)
    assert [batch.tensor("number").tolist() for batch in batches] == [[8, 9]]
    assert counts(client) == (0, 0, 10)


def test_an_abandoned_iteration_gives_its_rows_back(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    put(client, range(10))
    with pytest.raises(RuntimeError, match="the trainer fails"):
        for batch in dataset(handle, 4):
            if batch.tensor("number")[0] == 4:
                raise RuntimeError("the trainer fails")
    wait_until(lambda: counts(client) == (6, 0, 4))
    assert client.status().leases == 0


def test_rows_come_one_by_one_and_those_before_the_last_are_done(
    handle: DataPlaneHandle, client: DataPlaneClient
) -> None:
    put(client, range(ROWS_A_CLAIM + 6))
    rows = iter(dataset(handle, None, with_receipts=True))
    for number in range(3):
        row, meta = next(rows)
        assert row["number"] == number and row["ids"].tolist() == [number] * (number % 4)
        assert meta.keys == (f"{number // 2}.{number % 2}",)
    assert counts(client) == (6, ROWS_A_CLAIM, 0)
    del rows
    assert counts(client) == (ROWS_A_CLAIM + 4, 0, 2)
    assert [int(row["number"]) for row in dataset(handle, None)] == list(range(2, ROWS_A_CLAIM + 6))


def test_a_loader_that_joins_rows_counts_them_before_they_are_trained_on(
    handle: DataPlaneHandle, client: DataPlaneClient
) -> None:
    """Only batches that the dataset makes are trained on at least once, as its docstring says."""
    put(client, range(8))
    with pytest.raises(RuntimeError, match="the trainer fails"):
        for _ in DataLoader(dataset(handle, None, clear=True), batch_size=4):
            raise RuntimeError("the trainer fails")
    wait_until(lambda: counts(client) == (5, 0, 0))
    with pytest.raises(RuntimeError, match="the trainer fails"):
        for _ in DataLoader(dataset(handle, 4, clear=True), batch_size=None):
            raise RuntimeError("the trainer fails")
    wait_until(lambda: counts(client) == (5, 0, 0))


def test_it_ends_after_as_many_rows_or_in_time_and_may_clear_them(
    handle: DataPlaneHandle, client: DataPlaneClient
) -> None:
    put(client, range(10))
    loader = DataLoader(dataset(handle, 2, stop_after=4, clear=True, on_timeout="raise"), batch_size=None)
    found = [batch["number"].tolist() for batch in loader]
    assert found == [[0, 1], [2, 3]]
    assert client.status("p").rows == 6 and counts(client) == (6, 0, 0)
    with pytest.raises(ClaimTimeout, match="2 of the partition's 6 rows are ready, 4 done"):
        list(dataset(handle, 4, on_timeout="raise"))
    assert [len(batch["number"]) for batch in dataset(handle, 4, at_least=1, stop_after=4)] == [2]


def test_ranks_get_equally_many_batches_whoever_is_faster(handle: DataPlaneHandle, client: DataPlaneClient) -> None:
    client.register("ranks", SCHEMA)
    put(client, range(22), "ranks")
    options: dict[str, Any] = {"batch_size": 2, "timeout_s": 0.2, "on_timeout": "stop", "world": 3}
    ranks = [StreamingDataset(handle, "ranks", "all", FIELDS, rank=rank, **options) for rank in (0, 1, 2)]
    fast = [batch.tensor("number").tolist() for batch in ranks[2]]
    slow = [[batch.tensor("number").tolist() for batch in rank] for rank in ranks[:2]]
    assert [len(batches) for batches in (*slow, fast)] == [3, 3, 3], "4 of the rows make no batch for each rank"
    assert sorted(n for batches in (*slow, fast) for batch in batches for n in batch) == list(range(18))
    ends = [StreamingDataset(handle, "ranks", "ends", FIELDS, rank=1, stop_after=12, **options) for _ in range(2)]
    assert [len(end) for end in ends] == [2, 2] and len(list(ends[0])) == 2
    with pytest.raises(InvalidArgument, match="num_ranks.*expected equal settings, or another name for the task"):
        next(iter(StreamingDataset(handle, "ranks", "all", FIELDS, rank=0, **{**options, "world": 2})))
    with pytest.raises(InvalidArgument, match="rank_aware"):
        list(StreamingDataset(handle, "p", "train", FIELDS, rank=0, **options))


def test_a_loader_keeps_the_columns_of_batches_and_of_single_rows(
    handle: DataPlaneHandle, client: DataPlaneClient
) -> None:
    put(client, range(12))
    (plain,) = DataLoader(dataset(handle, 4, stop_after=4))  # Without batch_size=None.
    assert plain["number"].tolist() == [0, 1, 2, 3] and plain["ids"].lengths.tolist() == [0, 1, 2, 3]
    loader = DataLoader(dataset(handle, None, stop_after=8, with_receipts=True), batch_size=4)
    found = [(batch["ids"].values.tolist(), batch["number"].tolist(), meta.keys) for batch, meta in loader]
    assert found[0] == ([5, 6, 6, 7, 7, 7], [4, 5, 6, 7], ("2.0", "2.1", "3.0", "3.1")) and len(found) == 2
    client.reset("p", "train")
    rows = list(dataset(handle, None, stop_after=2))
    assert StreamingDataset.collate_fn(rows)["number"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="a dataset that yields batches, expected batch_size=None"):
        list(DataLoader(dataset(handle, 2, stop_after=4), batch_size=2))


def test_a_length_is_known_where_it_is_set(handle: DataPlaneHandle) -> None:
    assert len(dataset(handle, 4, stop_after=12)) == 3 and len(dataset(handle, None, stop_after=12)) == 12
    assert len(DataLoader(dataset(handle, 4, stop_after=12), batch_size=None)) == 3
    with pytest.raises(TypeError, match="made without stop_after"):
        len(dataset(handle, 4))


def test_arguments_that_exclude_each_other_are_refused(handle: DataPlaneHandle) -> None:
    for options, words in (
        ({"batch_size": None, "whole_groups": True}, "batch_size: got None with"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"batch_size": 4, "stop_after": 6}, "stop_after: got 6, expected a multiple of batch_size=4"),
        ({"batch_size": 4, "on_timeout": "wait"}, "on_timeout: got 'wait'"),
        ({"batch_size": 4, "stop_after": 12, "rank": 0, "world": 2}, "a multiple of batch_size=4 times world=2"),
        ({"batch_size": 4, "rank": 0}, "rank: got 0 with world=None, expected both or neither"),
        ({"batch_size": 4, "rank": 2, "world": 2}, "rank: got 2 with world=2"),
        ({"batch_size": 4, "rank": 0, "world": 2, "at_least": 1}, "rank: got it with arguments or at_least"),
        ({"batch_size": "4"}, "batch_size: got '4', expected an integer"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            dataset(handle, **cast(Any, options))
    with pytest.raises(InvalidArgument, match=r"fields: got 'ids', expected a sequence of names.*op=StreamingDataset"):
        StreamingDataset(handle, "p", "train", "ids", batch_size=1)


# ------------------------------------------------------------------ workers


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(store={"kind": "shm", "capacity_mib": 4})
    yield served
    served.close()


@pytest.fixture
def far(served: Served) -> Iterator[DataPlaneClient]:
    with connect(served.handle) as client:
        client.register("p", SCHEMA, ("train",), group_size=2)
        yield client


@pytest.mark.processes
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_share_the_rows_and_give_back_what_nobody_took(
    served: Served, far: DataPlaneClient, context: str
) -> None:
    put(far, range(40))
    options: dict[str, Any] = {"batch_size": None, "num_workers": 2, "multiprocessing_context": context}
    loader = DataLoader(dataset(served.handle, 4, stop_after=20, timeout_s=20, on_timeout="raise"), **options)
    found = [batch["number"].tolist() for batch in loader]
    assert sorted(map(len, found)) == [4] * 5
    assert sorted(number for batch in found for number in batch) == list(range(20)), "each row once, the oldest first"
    assert counts(far) == (20, 0, 20)
    batches = iter(DataLoader(dataset(served.handle, 2, timeout_s=20), **options))
    assert len(next(batches)["number"]) == 2
    del batches
    wait_until(lambda: far.task_status("p", "train").leased == 0)
    ready, _, done = counts(far)
    assert 20 <= done <= 26, "of the five batches that were asked for, each worker gives its last one back"
    rest = [number for batch in dataset(served.handle, 2) for number in batch.tensor("number").tolist()]
    assert len(set(rest)) == len(rest) == ready == 40 - done


@pytest.mark.processes
def test_a_worker_cannot_use_the_data_plane_of_another_process(handle: DataPlaneHandle) -> None:
    loader = DataLoader(dataset(handle, 2), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(DataPlaneError, match="from which this one was forked"):
        list(loader)
