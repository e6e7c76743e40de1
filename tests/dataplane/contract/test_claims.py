"""The data plane's contract: claims, leases and their end, the same over every store."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest

from headrace.dataplane.client.lease_renewal import LeaseRenewal
from headrace.dataplane.errors import ClaimTimeout, LeaseLost
from headrace.dataplane.factory import DataPlane, connect
from headrace.testing.data_plane import SCHEMA, assert_rows
from headrace.tests.dataplane.rows import FIRST, LATER, columns, keys_of
from headrace.tests.waiting import in_thread, wait_until


def test_lowest_version_first_then_in_order_of_arrival(client: Any, partition: str) -> None:
    late, early, same = keys_of(range(0, 2), prefix="late"), keys_of(range(0, 2), prefix="early"), ["late9.0"]
    client.put(partition, late, columns(late), versions=7)
    client.put(partition, early, columns(early), versions=3)
    client.put(partition, same, columns(same), versions=7)
    meta = client.claim(partition, "train", FIRST, 17)
    assert meta.keys == (*early, *late, *same)
    assert meta.versions.tolist() == [3] * 8 + [7] * 9
    assert_rows(client.get(meta), list(meta.keys), FIRST)


def test_a_row_goes_to_one_consumer_of_each_task(client: Any, partition: str) -> None:
    keys = keys_of(range(6))
    client.put(partition, keys, columns(keys))
    first, second = client.claim(partition, "train", FIRST, 10), client.claim(partition, "train", FIRST, 14)
    assert sorted(first.keys + second.keys) == sorted(keys)
    with pytest.raises(ClaimTimeout):
        client.claim(partition, "train", FIRST, 1, timeout_s=0.05)
    other = client.claim(partition, "eval", ("reward",), 24)
    assert sorted(other.keys) == sorted(keys) and set(other.fields) == {"reward"}


def test_done_rows_are_never_claimed_again_and_retried_ones_are(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    client.put(partition, keys, columns(keys))
    meta = client.claim(partition, "train", FIRST, 8)
    client.release(meta.select(np.arange(5)), "train", "done")
    client.release(meta.select(np.arange(5, 8)), "train", "retry")
    again = client.claim(partition, "train", FIRST, 3)
    assert sorted(again.keys) == sorted(meta.keys[5:])
    with pytest.raises(LeaseLost, match=meta.keys[0]):
        client.release(meta, "train", "done")
    client.release(again, "train", "done")
    with pytest.raises(ClaimTimeout, match="8 done"):
        client.claim(partition, "train", FIRST, 1, timeout_s=0.05)


def test_whole_groups_wait_for_their_last_row_and_are_never_mixed(client: Any, partition: str) -> None:
    groups = [keys_of(range(n, n + 1)) for n in range(3)]
    for group in groups[:2]:
        client.put(partition, group[:3], columns(group[:3]))
    client.put(partition, groups[2], columns(groups[2]))
    meta = client.claim(partition, "train", FIRST, 4, whole_groups=True)
    assert sorted(meta.keys) == groups[2] and len(set(meta.groups.tolist())) == 1
    with pytest.raises(ClaimTimeout, match="whole groups"):
        client.claim(partition, "train", FIRST, 4, whole_groups=True, timeout_s=0.05)
    client.put(partition, groups[1][3:], columns(groups[1][3:]))
    meta = client.claim(partition, "train", FIRST, 4, whole_groups=True)
    assert sorted(meta.keys) == groups[1]
    with pytest.raises(ValueError, match="multiple of 4"):
        client.claim(partition, "train", FIRST, 6, whole_groups=True)


def test_rows_can_be_claimed_once_all_wanted_fields_are_there(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    client.put(partition, keys, columns(keys))
    client.put(partition, keys[:3], columns(keys[:3], LATER))
    meta = client.claim(partition, "train", ("ids", "logp"), 3)
    assert meta.keys == tuple(keys[:3])
    assert_rows(client.get(meta), keys[:3], ("ids", "logp"))
    started = time.monotonic()
    with pytest.raises(ClaimTimeout) as caught:
        client.claim(partition, "train", ("ids", "logp"), 4, timeout_s=0.3)
    assert 0.25 < time.monotonic() - started < 1.5
    for part in ("task 'train'", "of 4 rows", "'logp'", "5 lack field 'logp'", "3 leased", partition, "elapsed"):
        assert part in str(caught.value), (part, str(caught.value))
    for arguments in (("nobody", FIRST, 1), ("train", ("nothing",), 1), ("train", FIRST, 0)):
        with pytest.raises(ValueError, match="expected"):
            client.claim(partition, *arguments)


def test_waiting_claim_is_woken_by_the_put_that_completes_it(client: Any, plane: DataPlane, partition: str) -> None:
    consumer, delays, receipts = connect(plane.handle, name="consumer"), [], []
    for attempt in range(7):
        keys = keys_of(range(attempt, attempt + 1))
        before = consumer.stats.directory_calls
        thread, result = in_thread(lambda: consumer.claim(partition, "train", FIRST, 4, timeout_s=10))
        client.put(partition, keys[:3], columns(keys[:3]))
        time.sleep(0.05)
        assert not result, "three rows of four are not enough"
        client.put(partition, keys[3:], columns(keys[3:]))
        put_at = time.monotonic()
        thread.join(10)
        delays.append(result[1] - put_at)
        receipts.append(result[0])
        assert result[0].keys == tuple(keys)
        assert consumer.stats.directory_calls == before + 1, "one call that waits, no polling"
    assert statistics.median(delays) < 0.05, delays
    consumer.close()


def test_at_least_waits_for_few_and_takes_as_many_as_are_ready(client: Any, partition: str) -> None:
    keys = keys_of(range(3))
    client.put(partition, keys[:1], columns(keys[:1]))
    with pytest.raises(ClaimTimeout, match="of 2 to 8 rows; 1 of"):
        client.claim(partition, "train", FIRST, 8, at_least=2, timeout_s=0.05)
    thread, result = in_thread(lambda: client.claim(partition, "train", FIRST, 8, at_least=2, timeout_s=10))
    client.put(partition, keys[1:5], columns(keys[1:5]))
    thread.join(10)
    assert result[0].keys == tuple(keys[:5])
    assert_rows(client.get(result[0]), keys[:5], FIRST)
    client.put(partition, keys[5:], columns(keys[5:]))
    assert client.claim(partition, "train", FIRST, 6, at_least=1).keys == tuple(keys[5:11])
    with pytest.raises(ValueError, match="at_least=6, expected a multiple of 4"):
        client.claim(partition, "eval", FIRST, 8, at_least=6, whole_groups=True)
    assert client.claim(partition, "eval", FIRST, 100, at_least=4, whole_groups=True).keys == tuple(keys)


def test_rows_newer_than_max_version_are_passed_over_and_stay(client: Any, partition: str) -> None:
    keys = keys_of(range(3))
    for number, version in enumerate((2, 8, 5)):
        group = keys[4 * number : 4 * number + 4]
        client.put(partition, group, columns(group), versions=version)
    meta = client.claim(partition, "train", FIRST, 12, at_least=8, whole_groups=True, max_version=5)
    assert meta.keys == (*keys[:4], *keys[8:])
    with pytest.raises(ClaimTimeout, match="4 newer than max_version=5"):
        client.claim(partition, "train", FIRST, 1, max_version=5, timeout_s=0.05)
    assert client.status(partition).stale_rows == 0
    assert client.claim(partition, "train", FIRST, 4, min_version=6, max_version=8).keys == tuple(keys[4:8])


def test_claims_of_a_task_are_served_in_the_order_they_came(client: Any, partition: str) -> None:
    """One for a single row does not overtake one for four that waits longer."""
    waiting, keys = [], keys_of(range(2))[:7]
    for count in (4, 1, 2):
        waiting.append(in_thread(lambda n=count: client.claim(partition, "train", FIRST, n, timeout_s=10)))
        wait_until(lambda: client.status().waiting_claims == len(waiting))
    for start, stop, served in ((0, 2, 0), (2, 4, 1), (4, 5, 2), (5, 7, 3)):
        client.put(partition, keys[start:stop], columns(keys[start:stop]))
        for thread, _ in waiting[:served]:
            thread.join(10)
        time.sleep(0.02)
        assert [bool(result) for _, result in waiting] == [number < served for number in range(3)]
    assert [result[0].keys for _, result in waiting] == [tuple(keys[:4]), tuple(keys[4:5]), tuple(keys[5:])]


def test_expired_lease_returns_its_rows_and_the_late_consumer_is_told(
    tight_plane: DataPlane, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = connect(tight_plane.handle, name="stopped"), connect(tight_plane.handle, name="other")
    monkeypatch.setattr(LeaseRenewal, "add", lambda *_: None)  # as in a process that is stopped
    client.register(partition, SCHEMA, ("train",))
    keys = keys_of(range(1))
    client.put(partition, keys, columns(keys))
    meta = client.claim(partition, "train", FIRST, 4)
    started = time.monotonic()
    status = client.status(partition)
    assert status.leases == 1 and status.leased_rows == 4
    again = other.claim(partition, "train", FIRST, 4, timeout_s=5)
    assert 0.3 < time.monotonic() - started < 5, "woken by the end of the lease of 0.5 s"
    with pytest.raises(LeaseLost, match=keys[0]):
        client.release(meta, "train", "done")
    other.release(again, "train", "done")
    assert client.status(partition).leases == 0
    client.clear(partition)
    client.close()
    other.close()


def test_cleared_rows_leave_their_lease_and_their_task(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    client.put(partition, keys, columns(keys))
    meta = client.claim(partition, "train", FIRST, 4)
    client.clear(partition, list(meta.keys[:2]))
    with pytest.raises(LeaseLost, match=meta.keys[0]):
        client.release(meta, "train", "done")
    rest = client.claim(partition, "train", FIRST, 4)
    assert not set(rest.keys) & set(meta.keys)
    client.clear(partition)
    client.put(partition, keys, columns(keys))
    assert len(client.claim(partition, "train", FIRST, 8)) == 8, "keys put again are new rows"
