"""Samplers over the pure directory: the order they promise, under any order of puts, returns, clears and versions."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.directory.samplers import StreamProgress
from headrace.tests.dataplane.directory.directory_rows import (
    FIELDS,
    GROUP,
    claim,
    keys_of,
    opened,
    placed,
    put,
    put_prompt,
    taken,
)
from headrace.tests.example_counts import examples

# ------------------------------------------------------------------ orders


def test_each_sampler_has_its_order() -> None:
    puts = [(3, 5), (1, 7), (0, 6), (2, 5)]  # prompt, version
    expected = {
        "oldest_version_first": [3, 2, 0, 1],
        "ready_first": [3, 1, 0, 2],
        "in_order": [0, 1, 2, 3],
        "windowed": [0, 1, 2, 3],
    }
    for name, order in expected.items():
        directory = opened(name, **({"window": 2} if name == "windowed" else {}))
        for number, version in puts:
            put_prompt(directory, number, version)
        assert [taken(claim(directory))[0] for _ in puts] == order, name


def test_ready_first_counts_from_the_last_field_and_from_the_return() -> None:
    directory = opened("ready_first")
    assert claim(directory) is None, "from its first claim on the order is kept"
    for number in (0, 1, 2):
        put(directory, keys_of(number), ("score",))
    for number in (1, 2, 0):
        put(directory, keys_of(number), FIELDS)
    first = claim(directory)
    assert taken(first) == [1] and first is not None
    directory.release("p", "a", first.lease_id, first.keys, "retry")
    assert [taken(claim(directory))[0] for _ in range(3)] == [2, 0, 1]


def test_in_order_waits_for_the_next_prompt_and_says_so() -> None:
    directory = opened("in_order", first_prompt=35)
    put_prompt(directory, 36)
    assert claim(directory) is None
    assert "waits for the prompt at position 35" in directory.shortage(ClaimRows("p", "a", FIELDS, GROUP, True))
    put_prompt(directory, 35)
    assert taken(claim(directory, 2)) == [35, 36]


def test_in_order_goes_on_past_what_was_cleared_or_is_too_old() -> None:
    directory = opened("in_order")
    for number, version in ((0, 4), (1, 4), (2, 1), (3, 4)):
        put_prompt(directory, number, version)
    directory.clear("p", keys_of(0))
    assert taken(claim(directory, 2, min_version=3)) == [1, 3]
    assert taken(claim(directory, 1)) == [2], "without a bound it is not too old any more"


def test_in_order_goes_on_past_what_was_skipped() -> None:
    directory = opened("in_order")
    for number in (1, 3, 4):
        put_prompt(directory, number)
    directory.skip("p", "a", np.array([2, 0]))
    assert taken(claim(directory, 2)) == [1, 3]
    put_prompt(directory, 0)  # it came after all
    assert taken(claim(directory, 2)) == [0, 4]
    with pytest.raises(ValueError, match="got position -1"):
        directory.skip("p", "a", np.array([5, -1]))
    put_prompt(directory, 6)
    assert claim(directory) is None, "a call that raises settles nothing"
    with pytest.raises(ValueError, match="'oldest_version_first' of task 'b' does not follow the prompts"):
        directory.skip("p", "b", np.array([0]))
    with pytest.raises(ValueError, match="task 'c': partition 'p' has"):
        directory.skip("p", "c", np.array([0]))


def test_a_returned_prompt_is_taken_again_before_later_ones() -> None:
    directory = opened("in_order")
    for number in range(4):
        put_prompt(directory, number)
    first = claim(directory, 2)
    assert first is not None
    directory.release("p", "a", first.lease_id, keys_of(0), "retry")
    assert taken(claim(directory, 2)) == [0, 2]


def test_windowed_takes_what_is_ready_within_its_window_only() -> None:
    directory = opened("windowed", window=3)
    for number in (1, 2, 3):
        put_prompt(directory, number)
    assert taken(claim(directory, 2)) == [1, 2]
    assert claim(directory) is None, "3 is beyond the window from 0"
    put_prompt(directory, 0)
    assert taken(claim(directory, 2)) == [0, 3]


@pytest.mark.parametrize("sampler", ["oldest_version_first", "ready_first", "in_order", "windowed"])
def test_at_least_takes_what_is_ready_and_no_more_than_n(sampler: str) -> None:
    directory = opened(sampler, **({"window": 4} if sampler == "windowed" else {}))
    put_prompt(directory, 0)
    assert claim(directory, 3, at_least=2) is None
    put_prompt(directory, 1)
    assert taken(claim(directory, 3, at_least=2)) == [0, 1]
    for number in range(2, 6):
        put_prompt(directory, number)
    assert taken(claim(directory, 3, at_least=1)) == [2, 3, 4]
    assert taken(claim(directory, 3, at_least=1)) == [5]
    assert claim(directory, 3, at_least=1) is None


def test_in_order_takes_up_to_the_first_missing_prompt() -> None:
    directory = opened("in_order")
    for number in (0, 1, 3):
        put_prompt(directory, number)
    assert claim(directory, 4, at_least=3) is None
    assert taken(claim(directory, 4, at_least=1)) == [0, 1]


@pytest.mark.parametrize(("n", "at_least"), [(4, 0), (4, 6), (4, 3), (4, -2)])
def test_at_least_is_a_multiple_of_the_group_size_up_to_n(n: int, at_least: int) -> None:
    with pytest.raises(ValueError, match=f"at_least={at_least}, expected a multiple of 2 from 2 to n, which is {n}"):
        opened("ready_first").claim(ClaimRows("p", "a", FIELDS, n, True, at_least=at_least), 0.0)


def test_rows_without_groups_follow_the_stream_too() -> None:
    directory = opened("in_order", group_size=1)
    put(directory, ["a", "b"], FIELDS, tags=placed(1, 2, rows=1))
    assert directory.claim(ClaimRows("p", "a", FIELDS, 1), 0.0) is None
    put(directory, ["c"], FIELDS, tags=placed(0, rows=1))
    meta = directory.claim(ClaimRows("p", "a", FIELDS, 3), 0.0)
    assert meta is not None and meta.keys == ("c", "a", "b")


# ------------------------------------------------------------------ properties

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "claim", "claim", "retry", "done", "clear", "skip"]), st.integers(0, 10**6)
    ),
    min_size=10,
    max_size=120,
)


class Story:
    """Puts prompts 0.. in a random order, as events say, and notes what each claim took."""

    def __init__(self, directory: Directory, order: list[int], spread: int) -> None:
        self.directory = directory
        self.left = list(order)
        self.spread = spread
        self.version = 0
        self.versions: dict[int, int] = {}
        self.held: dict[int, list[int]] = {}
        """Lease -> prompts."""
        self.free: set[int] = set()
        self.settled: set[int] = set()
        """Taken once, cleared, or passed over as too old."""

    def put(self, seed: int) -> None:
        if self.left:
            number = self.left.pop(0)
            self.version += seed % 3 == 0
            self.versions[number] = max(0, self.version - seed % (self.spread + 1))
            put_prompt(self.directory, number, self.versions[number])
            self.free.add(number)

    def claim(self, seed: int, bound: int | None = None) -> list[int]:
        min_version = None if bound is None else self.version - bound
        meta = claim(self.directory, 1 + seed % 3, min_version=min_version)
        found = taken(meta)
        if min_version is not None:
            self.settled |= {number for number in self.free if self.versions[number] < min_version}
        assert set(found) <= self.free, "only what is free, and each once"
        assert len(set(found)) == len(found)
        if meta is not None:
            assert sorted(meta.keys) == sorted(key for number in found for key in keys_of(number))
            self.held[meta.lease_id] = found
            self.free -= set(found)
        return found

    def end(self, seed: int, outcome: str) -> None:
        if self.held:
            lease = sorted(self.held)[seed % len(self.held)]
            numbers = self.held.pop(lease)
            keys = [key for number in numbers for key in keys_of(number)]
            self.directory.release("p", "a", lease, keys, outcome)  # type: ignore[arg-type]
            self.free |= set(numbers) if outcome == "retry" else set()

    def clear(self, seed: int) -> None:
        if self.free:
            number = sorted(self.free)[seed % len(self.free)]
            self.directory.clear("p", keys_of(number))
            self.free.discard(number)
            self.settled.add(number)

    def skip(self, seed: int) -> None:
        """Skip a prompt that will never be put, where the task follows the prompts."""
        if self.left and self.directory._partitions["p"].tasks["a"].progress is not None:
            number = self.left.pop(seed % len(self.left))
            self.directory.skip("p", "a", np.array([number]))
            self.settled.add(number)


def shuffled(draw_seed: int, count: int, spread: int) -> list[int]:
    """0..count, each at most about `spread` places from its own."""
    rng = np.random.default_rng(draw_seed)
    return np.argsort(np.arange(count) + rng.uniform(0, spread, count)).tolist()


@settings(max_examples=examples(60))
@given(events=EVENTS, seed=st.integers(0, 2**32 - 1), window=st.integers(1, 6))
def test_window_is_never_exceeded_and_each_prompt_is_leased_once(
    events: list[tuple[str, int]], seed: int, window: int
) -> None:
    directory = opened("windowed", window=window) if window > 1 else opened("in_order")
    story = Story(directory, shuffled(seed, 60, 8), 0)
    for event, number in events:
        if event == "claim":
            for prompt in story.claim(number):
                head = next(n for n in itertools.count() if n not in story.settled)
                assert prompt < head + window, f"{prompt} taken while {head} was still to come"
                if prompt not in story.settled and window == 1:
                    assert prompt == head, "in_order overtakes no prompt"
                story.settled.add(prompt)
        elif event in ("retry", "done"):
            story.end(number, event)
        else:
            getattr(story, event)(number)


@settings(max_examples=examples(60))
@given(
    events=EVENTS,
    seed=st.integers(0, 2**32 - 1),
    bound=st.integers(0, 2),
    sampler=st.sampled_from(["oldest_version_first", "ready_first", "in_order", "windowed"]),
)
def test_staleness_never_exceeds_the_bound_and_stale_rows_hold_nothing_up(
    events: list[tuple[str, int]], seed: int, bound: int, sampler: str
) -> None:
    directory = opened(sampler, **({"window": 4} if sampler == "windowed" else {}))
    story = Story(directory, shuffled(seed, 60, 4), 4)
    for event, number in events:
        if event == "claim":
            for prompt in story.claim(number, bound):
                assert story.version - story.versions[prompt] <= bound
                story.settled.add(prompt)
        elif event in ("retry", "done"):
            story.end(number, event)
        else:
            getattr(story, event)(number)
    low = story.version - bound
    stale = {number for number in story.free if story.versions[number] < low}
    keys, _ = directory.clear_stale(ClaimRows("p", "a", FIELDS, 0, True, low))
    assert sorted(keys) == sorted(key for number in stale for key in keys_of(number))
    while story.left:
        story.put(1)  # of the newest version but one
    story.free -= stale
    story.settled |= stale
    fresh = {number for number in story.free if story.versions[number] >= story.version - bound}
    found = [prompt for _ in range(len(fresh)) for prompt in story.claim(0, bound)]
    assert sorted(found) == sorted(fresh), "all prompts were put: whatever is fresh enough is served"


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(0, 5))
def test_stream_progress_is_that_of_a_set(numbers: list[int], first: int) -> None:
    progress = StreamProgress(first)
    for number in numbers:
        progress.settle([number])
    settled = set(numbers) | set(range(first))
    assert progress.first == next(n for n in itertools.count() if n not in settled)
    assert progress.ahead == {n for n in settled if n > progress.first}


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=300), st.integers(1, 40))
def test_queue_serves_by_version_then_arrival_however_rows_come(entries: list[tuple[int, bool]], count: int) -> None:
    directory = opened("oldest_version_first", group_size=1)
    rows: list[tuple[int, int, str]] = []
    for arrival, (version, claims) in enumerate(entries):
        put(directory, [f"k{arrival}"], FIELDS, versions=np.array([version]))
        rows.append((version, arrival, f"k{arrival}"))
        if claims:
            wanted = min(count, len(rows))
            meta = directory.claim(ClaimRows("p", "a", FIELDS, wanted), 0.0)
            rows.sort()
            assert meta is not None and list(meta.keys) == [key for _, _, key in rows[:wanted]]
            del rows[:wanted]


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["oldest_version_first", "ready_first", "in_order", "windowed"])
def test_a_claim_costs_its_own_rows_however_many_are_ready(sampler: str) -> None:
    """30 k groups ready, put in disorder: a claim of four touches few of them."""
    directory = opened(sampler, **({"window": 64} if sampler == "windowed" else {}))
    order = shuffled(0, 30_000, 200)
    for start in range(0, len(order), 1000):
        numbers = order[start : start + 1000]
        keys = [key for number in numbers for key in keys_of(number)]
        put(directory, keys, FIELDS, versions=np.full(len(keys), start // 1000), tags=placed(*numbers))
    assert claim(directory) is not None  # builds the view
    started = time.thread_time()  # of this thread only, as other processes may have the cores
    for number in range(100):
        assert claim(directory, 4, min_version=number // 100) is not None
    assert time.thread_time() - started < 1.0, "about 0.3 ms each here; looking at all would take more"
