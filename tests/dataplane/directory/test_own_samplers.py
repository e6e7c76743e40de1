"""Samplers of one's own, what is wrong with some, and rows that are too old."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.samplers import Candidates, ClaimRequest, TaskConfig
from headrace.dataplane.errors import SamplerError, SchemaMismatch
from headrace.tests.dataplane.directory.directory_rows import (
    FIELDS,
    GROUP,
    SCHEMA,
    claim,
    keys_of,
    make_put,
    opened,
    placed,
    put,
    put_prompt,
    taken,
)

# ------------------------------------------------------------------ one's own, and what is wrong with it


class LongestFirst:
    """Whatever has most tokens."""

    order = "ready"
    looks_ahead = None
    arguments = ()

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        return np.argsort(-candidates.tokens, kind="stable")[: request.most]


class Picks:
    """Answers with what it was given."""

    order = "version"
    looks_ahead = 1
    arguments = ()

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def select(self, candidates: Candidates, request: ClaimRequest) -> object:
        if self.answer == "raise":
            raise RuntimeError("no idea")
        if self.answer == "columns":
            shapes = {len(column) for column in (candidates.groups, candidates.versions, candidates.arrivals)}
            assert shapes == {len(candidates)} and candidates.tags["score"].shape == (len(candidates), GROUP)
            assert (
                sorted(candidates.tags) == ["position", "score"]
                and candidates.prompts.tolist() == [0, 1][: len(candidates)]
            )
            return np.flatnonzero(candidates.tags["score"].sum(axis=1) > 0)
        return np.array(self.answer)


def test_a_sampler_of_ones_own_sees_columns_and_decides() -> None:
    directory = opened(f"{__name__}:LongestFirst")
    for number, tokens in ((0, 3), (1, 9), (2, 5)):
        put(directory, keys_of(number), FIELDS, [tokens] * GROUP)
    assert taken(claim(directory, 2)) == [1, 2]
    directory = opened(f"{__name__}:Picks", answer="columns")
    for number, score in ((0, 0.0), (1, 1.0)):
        put(directory, keys_of(number), FIELDS, tags=placed(number) | {"score": np.full(GROUP, score, np.float32)})
    assert taken(claim(directory)) == [1]
    assert claim(directory) is None, "it takes none: the claim waits on"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("raise", "raised RuntimeError: no idea"),
        ([0, 0], "chose an item twice"),
        ([2], "chose item 2, expected one of 2"),
        ([-1], "chose item -1, expected one of 2"),
        ([0.5], "float64.*expected one dimension of integer"),
        ([[0]], r"int64 \[1, 1\]"),
    ],
)
def test_a_bad_sampler_is_named_and_nothing_is_leased(answer: object, words: str) -> None:
    directory = opened(f"{__name__}:Picks", answer=answer)
    for number in (0, 1):
        put_prompt(directory, number)
    with pytest.raises(SamplerError, match=f"task 'a'.*Picks.*{words}") as caught:
        claim(directory)
    assert (caught.value.op, caught.value.partition) == ("claim", "p")
    assert directory.status("p", 0.0).leased_rows == 0


class Pairs:
    """Takes an even number of items only."""

    order = "version"
    looks_ahead = 0
    arguments = ()

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        assert request.least <= len(candidates) <= request.most, "looks_ahead is 0"
        return np.arange(len(candidates) // 2 * 2)


def test_a_sampler_may_take_fewer_than_it_is_offered_but_not_fewer_than_the_claim_wants() -> None:
    directory = opened(f"{__name__}:Pairs")
    for number in range(3):
        put_prompt(directory, number)
    assert claim(directory, 4, at_least=3) is None
    assert taken(claim(directory, 4, at_least=1)) == [0, 1]


def test_rows_without_a_position_cannot_be_taken_in_order() -> None:
    directory = opened("in_order")
    put(directory, ["v-0.0", "v-0.1"], FIELDS)
    with pytest.raises(SamplerError, match="group 0 have no tag 'position'"):
        claim(directory)


def test_a_position_is_an_integer() -> None:
    with pytest.raises(SchemaMismatch, match="tag 'position': got float32, expected integers"):
        put(opened("in_order"), keys_of(0), FIELDS, tags={"position": np.zeros(GROUP, np.float32)})


@pytest.mark.parametrize(
    ("sampler", "options", "words"),
    [
        ("in_oder", {}, "'in_oder': expected oldest_version_first, ready_first, in_order, windowed, rank_aware, "),
        ("windowed", {}, "window"),
        ("windowed", {"window": 0}, "got 0, expected at least 1"),
        ("in_order", {"window": 3}, "window"),
        ("rank_aware", {}, "num_ranks"),
        ("length_balanced", {"num_ranks": 0}, "num_ranks: got 0, expected a whole number from 1"),
        ("no.such.module:thing", {}, "cannot be imported"),
        ("headrace.tests.dataplane.directory.directory_rows:base36", {"number": 3}, "expected a Sampler"),
    ],
)
def test_samplers_that_cannot_be_built_are_refused_at_register(sampler: str, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"task 'a'.*{words}"):
        opened(sampler, **options)


def test_an_import_path_that_the_configuration_does_not_name_is_not_imported() -> None:
    directory = opened(f"{__name__}:LongestFirst")
    bad = TaskConfig("new", "headrace.tests.dataplane.directory.no_such_module:run", {"command": "true"})
    for change in (
        lambda: directory.register("q", SCHEMA, (bad,), GROUP),
        lambda: directory.add_tasks("p", (bad,)),
    ):
        with pytest.raises(ValueError, match="task 'new'.*no_such_module:run.*dataplane.samplers lists, .*:Longest"):
            change()


def test_the_same_tasks_must_be_registered_again() -> None:
    directory = opened("windowed", window=3)
    directory.register("p", SCHEMA, ("b", TaskConfig("a", "windowed", {"window": 3})), GROUP)
    with pytest.raises(ValueError, match="tasks .*'window': 4.*registered with .*'window': 3"):
        directory.register("p", SCHEMA, ("b", TaskConfig("a", "windowed", {"window": 4})), GROUP)


def test_tasks_that_are_added_see_all_rows_and_must_stay_the_same() -> None:
    directory = opened("ready_first")
    for number in (0, 1):
        put_prompt(directory, number)
    assert taken(claim(directory)) == [0]
    late = TaskConfig("late", "windowed", {"window": 2})
    for _ in range(2):
        directory.add_tasks("p", (late, "b"))
    wanted = ClaimRows("p", "late", FIELDS, 2 * GROUP, True)
    assert taken(directory.claim(wanted, 0.0)) == [0, 1]
    put_prompt(directory, 2)
    assert taken(directory.claim(ClaimRows("p", "late", FIELDS, GROUP, True), 0.0)) == [2]
    first = (TaskConfig("a", "ready_first"), "b")
    directory.register("p", SCHEMA, first, GROUP)
    directory.register("p", SCHEMA, (*first, late), GROUP)
    with pytest.raises(ValueError, match="tasks .*registered with .*ready_first"):
        directory.register("p", SCHEMA, (late, "b"), GROUP)
    other = TaskConfig("late", "windowed", {"window": 3})
    for tasks, words in (
        ((TaskConfig("new"), other), "'window': 3.*the partition has .*'window': 2"),
        ((TaskConfig("new"), TaskConfig("x", "in_oder")), "'in_oder'"),
        (("new", "new"), "once each"),
    ):
        with pytest.raises(ValueError, match=words):
            directory.add_tasks("p", tasks)
    with pytest.raises(ValueError, match="task 'new'"):
        directory.claim(ClaimRows("p", "new", FIELDS, GROUP, True), 0.0)


def test_in_order_takes_no_parts_of_groups() -> None:
    with pytest.raises(ValueError, match="'in_order' of task 'a'.*expected whole_groups=True"):
        opened("in_order").claim(ClaimRows("p", "a", FIELDS, GROUP), 0.0)


# ------------------------------------------------------------------ stale rows


def test_stale_rows_stay_until_they_are_cleared_and_others_keep_what_they_hold() -> None:
    directory = opened("oldest_version_first")
    for number, version in enumerate((1, 2, 5, 6)):
        put_prompt(directory, number, version)
    held = directory.claim(ClaimRows("p", "b", FIELDS, GROUP, True), 0.0)
    assert taken(held) == [0]
    assert taken(claim(directory, 1, min_version=5)) == [2]
    assert directory.status("p", 0.0).stale_rows == 2 * GROUP
    assert claim(directory, 2, min_version=5) is None
    assert "4 older than min_version=5" in directory.shortage(ClaimRows("p", "a", FIELDS, 2 * GROUP, True, 5))
    stale = ClaimRows("p", "a", FIELDS, 0, True, 5)
    keys, freed = directory.clear_stale(stale)
    assert sorted(keys) == keys_of(1) and len(freed) == 1, "task b holds prompt 0"
    assert directory.clear_stale(stale) == ([], [])
    assert directory.status("p", 0.0).rows == 3 * GROUP
    with pytest.raises(ValueError, match="min_version=None"):
        directory.clear_stale(ClaimRows("p", "a", FIELDS, 0, True))


def test_rows_newer_than_a_bound_are_passed_over_and_stay() -> None:
    directory = opened("oldest_version_first")
    for number, version in enumerate((4, 7, 5, 9)):
        put_prompt(directory, number, version)
    assert taken(claim(directory, 4, at_least=1, max_version=5)) == [0, 2]
    assert claim(directory, max_version=5) is None
    wanted = ClaimRows("p", "a", FIELDS, GROUP, True, max_version=5)
    assert ", 4 newer than max_version=5" in directory.shortage(wanted)
    assert directory.status("p", 0.0).stale_rows == 0, "they are not too old"
    assert taken(claim(directory, 4, at_least=1, min_version=8, max_version=9)) == [3]
    assert directory.status("p", 0.0).stale_rows == GROUP
    assert taken(claim(directory)) == [1]
    with pytest.raises(ValueError, match="min_version=3, expected at most max_version=2"):
        claim(directory, min_version=3, max_version=2)


@pytest.mark.parametrize("sampler", ["in_order", "windowed", "ready_first"])
def test_rows_passed_over_as_too_new_hold_nothing_up_and_come_in_order_later(sampler: str) -> None:
    directory = opened(sampler, **({"window": 2} if sampler == "windowed" else {}))
    for number, version in enumerate((3, 1, 3, 1, 2)):
        put_prompt(directory, number, version)
    assert taken(claim(directory, 4, at_least=1, max_version=1)) == [1, 3]
    assert taken(claim(directory, 4, at_least=1)) == [0, 2, 4]


def test_a_group_is_as_new_as_its_newest_row() -> None:
    directory = opened("oldest_version_first")
    put(directory, keys_of(0), FIELDS, versions=np.array([2, 9]))
    assert claim(directory, max_version=5) is None
    wanted = ClaimRows("p", "a", FIELDS, GROUP, True, 3, 5)
    assert claim(directory, min_version=3, max_version=5) is None
    assert "2 older than min_version=3" in directory.shortage(wanted) and "newer" not in directory.shortage(wanted)
    assert taken(claim(directory, min_version=2, max_version=9)) == [0]


def test_a_group_is_as_old_as_its_oldest_row_and_a_replace_makes_it_young() -> None:
    directory = opened("ready_first")
    put(directory, keys_of(0), FIELDS, versions=np.array([3, 7]))
    put_prompt(directory, 1, 7)
    assert taken(claim(directory, 1, min_version=5)) == [1]
    made = make_put(keys_of(0), FIELDS, versions=np.full(GROUP, 8), replace=True)
    reservation = directory.reserve(made, 0.0)
    assert reservation is not None
    directory.commit(reservation.reservation_id, made, lambda ids, _: [b"at"] * len(ids))
    assert taken(claim(directory, 1, min_version=5)) == [0]
    assert directory.status("p", 0.0).stale_rows == 0
