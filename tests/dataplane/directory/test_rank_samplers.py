"""The samplers `rank_aware` and `length_balanced`: which rows a rank gets, however the ranks ask, and after a retry."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.directory.samplers import RankShares
from headrace.dataplane.errors import SamplerError
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.dataplane.directory.directory_rows import (
    FIELDS,
    GROUP,
    claim,
    keys_of,
    opened,
    put,
    put_prompt,
    taken,
)
from headrace.tests.example_counts import examples


def ranks(count: int, sampler: str = "rank_aware", prompts: int = 0) -> Directory:
    """A task whose rows are dealt to `count` ranks, with some prompts."""
    directory = opened(sampler, num_ranks=count)
    for number in range(prompts):
        put_prompt(directory, number)
    return directory


def share(directory: Directory, rank: int, groups: int = 2, **options: int) -> KVBatchMeta | None:
    return claim(directory, groups, arguments={"rank": rank}, **options)


def release(directory: Directory, meta: KVBatchMeta | None, outcome: str, prompts: list[int] | None = None) -> None:
    assert meta is not None
    keys = meta.keys if prompts is None else [key for number in prompts for key in keys_of(number)]
    directory.release("p", "a", meta.lease_id, keys, outcome)  # type: ignore[arg-type]


@pytest.mark.parametrize("asks", sorted(set(itertools.permutations([0, 0, 1, 1, 2, 2]))))
def test_each_rank_gets_its_share_of_each_round_in_whatever_order_they_ask(asks: tuple[int, ...]) -> None:
    directory = ranks(3, prompts=13)
    shares: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for rank in asks:
        shares[rank].append(taken(share(directory, rank)))
    assert shares == {0: [[0, 3], [6, 9]], 1: [[1, 4], [7, 10]], 2: [[2, 5], [8, 11]]}
    assert share(directory, 1) is None, "one prompt is not a round"


def test_what_a_rank_gives_back_is_its_own_and_comes_before_its_later_shares() -> None:
    directory = ranks(2, prompts=12)
    first = share(directory, 1)
    assert taken(first) == [1, 3] and taken(share(directory, 0)) == [0, 2]
    release(directory, first, "retry")
    assert taken(share(directory, 0)) == [4, 6], "not what rank 1 gave back"
    again = share(directory, 1)
    assert taken(again) == [1, 3]
    release(directory, again, "done", [1])
    release(directory, again, "retry", [3])
    assert taken(share(directory, 1)) == [3, 5], "its next share, to be two"
    assert taken(share(directory, 1, at_least=1)) == [7], "what is left of its oldest share"
    assert taken(share(directory, 1)) == [9, 11]


def test_the_share_of_a_rank_that_died_is_that_of_its_successor() -> None:
    directory = ranks(2, prompts=8)
    assert taken(share(directory, 0)) == [0, 2] and taken(share(directory, 1)) == [1, 3]
    directory.expire(2e9)
    assert taken(share(directory, 1)) == [1, 3] and taken(share(directory, 0)) == [0, 2]


def test_shares_are_smaller_where_fewer_are_ready_and_equally_large() -> None:
    directory = ranks(2, prompts=5)
    assert share(directory, 0, 4) is None
    assert taken(share(directory, 0, 4, at_least=1)) == [0, 2]
    put_prompt(directory, 5)
    assert taken(share(directory, 1, 4, at_least=1)) == [1, 3], "of the same round, though more are ready now"
    assert taken(share(directory, 1, 4, at_least=1)) == [5] and taken(share(directory, 0, 4, at_least=1)) == [4]


def test_cleared_rows_and_rows_that_are_too_old_are_made_up_for_by_the_next_share() -> None:
    directory = ranks(2, prompts=4)
    for number in range(4, 8):
        put_prompt(directory, number, 3)
    assert taken(share(directory, 0)) == [0, 2]
    directory.clear("p", keys_of(1))
    assert taken(share(directory, 1)) == [3, 5]
    assert taken(share(directory, 1, 1, min_version=2)) == [7]
    put(directory, keys_of(1), FIELDS)
    for number in range(8, 11):
        put_prompt(directory, number, 3)
    assert taken(share(directory, 0)) == [4, 6] and taken(share(directory, 0)) == [1, 9], "prompt 1 is a new one"


def test_rows_that_are_reset_are_dealt_anew() -> None:
    directory = ranks(2, prompts=4)
    release(directory, share(directory, 1), "done")
    assert directory.reset("p", "a", None).reset == 2 * GROUP
    assert taken(share(directory, 0)) == [0, 2], "dealt before"
    assert share(directory, 0) is None
    assert taken(share(directory, 1, 1)) == [3], "of the two that are dealt again"
    assert taken(share(directory, 0, 1)) == [1]


def test_a_rank_out_of_range_is_told_and_a_claim_that_waits_says_for_what() -> None:
    directory = ranks(2, prompts=3)
    for rank in (2, -1, "0", True):
        with pytest.raises(SamplerError, match=f"ValueError: rank: got {rank!r}, expected 0 to 1"):
            share(directory, rank)  # pyright: ignore[reportArgumentType]
    assert share(directory, 0) is None
    wanted = ClaimRows("p", "a", FIELDS, 2 * GROUP, True, arguments={"rank": 0})
    assert "6 of the partition's 6 rows are ready, and sampler 'rank_aware' waits for" in directory.shortage(wanted)
    with pytest.raises(ValueError, match=r"got the arguments \['num_ranks', 'rank'\], but .* takes \['rank'\]"):
        claim(directory, arguments={"rank": 0, "num_ranks": 2})


def test_lengths_are_balanced_within_a_round() -> None:
    directory = ranks(2, "length_balanced")
    for number, tokens in enumerate((9, 1, 8, 2, 5, 5)):
        put(directory, keys_of(number), FIELDS, [tokens] * GROUP)
    shares = [share(directory, rank, 3) for rank in (1, 0)]
    assert sorted(number for meta in shares for number in taken(meta)) == list(range(6))
    assert [int(meta.lengths.sum()) for meta in shares if meta is not None] == [15 * GROUP, 15 * GROUP]


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=24), st.integers(1, 6))
def test_balanced_shares_are_equally_many_and_no_worse_than_in_turn(lengths: list[int], num_ranks: int) -> None:
    tokens = np.sort(np.repeat(lengths, num_ranks))[::-1]  # in turn, the first rank gets the longest of each turn
    sums = []
    for balanced in (True, False):
        owners = RankShares(num_ranks, balanced=balanced)._deal(tokens)
        assert np.bincount(owners, minlength=num_ranks).tolist() == [len(lengths)] * num_ranks
        sums.append(int(np.bincount(owners, tokens, num_ranks).max()))
    assert sums[0] <= sums[1]
