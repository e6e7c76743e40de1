"""Tests of the trainer's bucket cache: it keeps two versions, readable when whole, in memory that is used again."""

import threading

import psutil
import pytest
import torch

from headrace.actors.weight_sync import cache as cache_module
from headrace.actors.weight_sync.cache import BucketCache
from headrace.codecs.weights.buckets import BucketPlan, plan_buckets

PLAN = plan_buckets({"a": (torch.int8, (100,)), "b": (torch.int8, (70,))}, 64)


def write(cache: BucketCache, version: int, plan: BucketPlan = PLAN) -> None:
    with cache.writing(version, plan) as draft:
        for bucket in range(len(plan.sizes)):
            draft.bucket(bucket).fill_(version)


def content(cache: BucketCache, version: int) -> set[int]:
    with cache.reading(version) as cached:
        assert [len(cached.bucket(bucket)) for bucket in range(len(cached.plan.sizes))] == list(cached.plan.sizes)
        return set(torch.cat([cached.bucket(bucket) for bucket in range(len(cached.plan.sizes))]).tolist())


def test_the_last_two_versions_are_there() -> None:
    cache = BucketCache(1.0)
    assert cache.newest is None and cache.versions == ()
    for version in range(1, 6):
        write(cache, version)
        assert cache.newest is not None and cache.newest.version == version
        assert cache.versions == ((version - 1, version) if version > 1 else (1,))
        assert all(content(cache, there) == {there} for there in cache.versions)
    with pytest.raises(ValueError, match="version 3 is not in the bucket cache, which holds: 4, 5"):
        content(cache, 3)
    cache.close()
    cache.close()
    with pytest.raises(ValueError, match="holds: none"):
        content(cache, 5)


def test_memory_is_used_again() -> None:
    cache = BucketCache(1.0)
    addresses = []
    for version in range(1, 6):
        write(cache, version)
        with cache.reading(version) as cached:
            addresses.append(cached.memory.data_ptr())
    assert addresses[0] == addresses[2] == addresses[4] != addresses[1] == addresses[3]


def test_what_is_half_written_is_never_read() -> None:
    cache = BucketCache(1.0)
    write(cache, 1)
    write(cache, 2)
    with pytest.raises(RuntimeError, match="by chance"), cache.writing(3, PLAN) as draft:
        draft.bucket(0).fill_(3)
        assert cache.versions == (2,) and content(cache, 2) == {2}  # a delta's base, read meanwhile
        raise RuntimeError("by chance")
    assert cache.versions == (2,) and content(cache, 2) == {2}
    write(cache, 4)
    assert cache.versions == (2, 4) and content(cache, 2) == {2} and content(cache, 4) == {4}


def test_the_same_version_again() -> None:
    cache = BucketCache(1.0)
    write(cache, 1)
    with cache.writing(1, PLAN) as draft:
        draft.memory.fill_(9)
    assert content(cache, 1) == {9}


def test_another_plan() -> None:
    cache = BucketCache(1.0)
    write(cache, 1)
    larger = plan_buckets({"a": (torch.int8, (1000,))}, 128)
    write(cache, 2, larger)
    assert cache.versions == (2,) and content(cache, 2) == {2}
    write(cache, 3)  # smaller again: fits
    assert cache.versions == (2, 3) and content(cache, 2) == {2} and content(cache, 3) == {3}


def test_the_containers_memory_counts_not_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "available_memory", lambda: 1000)
    plan = plan_buckets({"w": (torch.int8, (450,))}, 1 << 30)
    with pytest.raises(ValueError, match="more than 80% of the 1000 available"):
        BucketCache(1.0).reserve(plan)


def test_memory_is_checked_before() -> None:
    cache = BucketCache(1.0)
    nbytes = int(psutil.virtual_memory().total * 0.45)  # one would fit, two do not
    plan = plan_buckets({"w": (torch.int8, (nbytes,))}, 1 << 30)
    with pytest.raises(ValueError, match=r"2 versions .* need \d+ bytes, more than 80% of the \d+ available"):
        cache.reserve(plan)
    with pytest.raises(ValueError, match="need"), cache.writing(1, plan):
        raise AssertionError("not reached")
    assert cache.versions == ()
    write(cache, 1)


def test_memory_is_pinned_where_weights_are_on_a_gpu_and_released_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(at: int, nbytes: int, flags: int) -> int:
            pinned[at] = nbytes
            return 0

        cudaHostUnregister = pinned.pop

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    cache = BucketCache(5.0)
    write(cache, 1)
    slot = len(cache._memories[0])
    assert list(pinned.values()) == [slot, slot]
    larger = plan_buckets({"w": (torch.float32, (4 * slot,))}, 4096)
    cache.reserve(larger)
    assert len(pinned) == 2 and min(pinned.values()) >= 16 * slot, "the smaller slots are released first"
    cache.close()
    cache.close()
    assert not pinned


def test_a_reader_is_not_overtaken() -> None:
    """Another thread waits for the end of a read, and says for what when it is too long."""
    cache = BucketCache(0.2)
    write(cache, 1)
    failures: list[BaseException] = []

    def write_next() -> None:
        try:
            write(cache, 2)
        except TimeoutError as error:
            failures.append(error)

    with cache.reading(1) as cached:
        thread = threading.Thread(target=write_next)
        thread.start()
        thread.join(30)
        assert set(cached.memory[:100].tolist()) == {1} and cache.versions == (1,)
    [error] = failures
    assert "s to write version 2: another thread uses it to read version 1" in str(error)
    thread = threading.Thread(target=write_next)
    thread.start()
    thread.join(30)
    assert content(cache, 2) == {2}
