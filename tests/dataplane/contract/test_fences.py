"""The data plane's contract: who comes late creates no rows and overwrites nothing, the same over every store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.dataplane.errors import AlreadyWritten, LeaseLost, RowsCleared
from headrace.dataplane.factory import DataPlane, connect
from headrace.tests.dataplane.rows import FIRST, columns, keys_of


@pytest.fixture
def late(plane: DataPlane) -> Iterator[Any]:
    """A second client: a consumer that is about to come late."""
    with connect(plane.handle, name="late") as late:
        yield late


def reward(value: float, count: int = 4) -> dict[str, torch.Tensor]:
    return {"reward": torch.full((count,), value)}


def prompts(keys: list[str]) -> dict[str, Any]:
    """The columns of a first put, without the one that a consumer writes back."""
    return {name: column for name, column in columns(keys).items() if name != "reward"}


WITHOUT = tuple(name for name in FIRST if name != "reward")


def test_a_late_consumer_brings_no_cleared_row_back(client: Any, late: Any, partition: str) -> None:
    keys = keys_of(range(1))
    client.put(partition, keys, prompts(keys))
    held = late.claim(partition, "train", WITHOUT, 4)
    assert client.revoke(partition, "train", older_than_s=0) == 4
    again = client.claim(partition, "train", WITHOUT, 4)
    client.write(again, reward(1.0))
    client.release(again, "train", "done")
    client.clear(partition, keys)
    for attempt in (
        lambda: late.write(held, reward(0.0)),
        lambda: late.write(held, reward(0.0), replace=True),
        lambda: late.put(partition, held.keys, reward(0.0)),
        lambda: late.put(partition, ["new.0", held.keys[0]], reward(0.0, 2)),
    ):
        with pytest.raises(RowsCleared, match=keys[0]):
            attempt()
    assert len(client.rows(partition)) == 0 and client.status().bytes_reserved == 0
    late.put(partition, ["new.0"], reward(0.0, 1))
    assert client.rows(partition).keys.tolist() == ["new.0"], "a put of new keys creates rows"


def test_a_row_that_was_put_again_is_another_row(client: Any, late: Any, partition: str) -> None:
    keys = keys_of(range(1))
    client.put(partition, keys, prompts(keys))
    held, found = late.claim(partition, "train", WITHOUT, 4), late.lookup(partition, keys)
    client.clear(partition, keys[:1])
    client.put(partition, keys[:1], prompts(keys[:1]))
    for receipt in (held, found):
        with pytest.raises(RowsCleared, match=rf"1 of 4 rows were cleared.*keys=\['{keys[0]}'\]"):
            late.write(receipt, reward(0.0), replace=True)
    late.write(found.select([1, 2, 3]), reward(0.0, 3))
    client.write(client.lookup(partition, keys[:1]), reward(2.0, 1))
    assert client.get_keys(partition, keys, ["reward"]).tensor("reward").tolist() == [2.0, 0.0, 0.0, 0.0]


def test_a_lost_lease_overwrites_nothing(client: Any, late: Any, partition: str) -> None:
    keys = keys_of(range(1))
    client.put(partition, keys, prompts(keys))
    held = late.claim(partition, "train", WITHOUT, 4)
    late.write(held.select([0, 1]), reward(0.0, 2))
    client.revoke(partition, "train", older_than_s=0)
    client.write(client.claim(partition, "train", WITHOUT, 4), reward(1.0), replace=True)
    for attempt in (
        lambda: late.write(held, reward(0.0), replace=True),
        lambda: late.put(partition, keys, reward(0.0), replace=True),
    ):
        with pytest.raises(LeaseLost, match=f"no longer holds 4 of 4 rows.*{keys[0]}"):
            attempt()
    assert client.get_keys(partition, keys, ["reward"]).tensor("reward").tolist() == [1.0] * 4


def test_a_lease_for_another_task_replaces_no_lost_one(client: Any, late: Any, partition: str) -> None:
    """The late consumer has the rows again, but for another task: what it does for the first task comes late."""
    keys = keys_of(range(1))
    client.put(partition, keys, prompts(keys))
    held = late.claim(partition, "train", WITHOUT, 4)
    client.revoke(partition, "train", older_than_s=0)
    again = client.claim(partition, "train", WITHOUT, 4)
    client.write(again, reward(1.0))
    client.release(again, "train", "done")
    other = late.claim(partition, "eval", FIRST, 4)
    with pytest.raises(LeaseLost, match="no longer holds 4 of 4 rows"):
        late.put(partition, held.keys, reward(0.0), replace=True)
    late.write(other, reward(2.0), replace=True)
    assert client.get_keys(partition, keys, ["reward"]).tensor("reward").tolist() == [2.0] * 4


def test_released_rows_are_written_under_no_old_lease(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    client.put(partition, keys, prompts(keys))
    first, second = (client.claim(partition, "train", WITHOUT, 4) for _ in range(2))
    joined = first.concat(second)
    client.write(joined.select([0, 4]), reward(0.5, 2))
    client.release(first, "train", "done")
    with pytest.raises(LeaseLost, match=first.keys[1]):
        client.write(first.select([1]), reward(0.0, 1))
    with pytest.raises(LeaseLost, match=first.keys[1]):
        client.write(joined.select([1, 5]), reward(0.0, 2))
    client.put(partition, [first.keys[1]], reward(0.5, 1))  # by whoever has no claim on it
    with pytest.raises(AlreadyWritten):
        client.write(second.select([0]), reward(0.0, 1))


def test_a_partition_registered_again_has_other_rows(client: Any, partition: str) -> None:
    keys = keys_of(range(1))
    client.put(partition, keys, prompts(keys))
    found, name = client.lookup(partition, keys), partition
    schema = found.schema
    client.unregister(name)
    client.register(name, schema, ("train", "eval"), group_size=4)
    client.put(name, keys, prompts(keys))
    with pytest.raises(RowsCleared, match="4 of 4"):
        client.write(found, reward(0.0))
