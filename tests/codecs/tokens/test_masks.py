"""Tests of the stream of sampling masks: it is lossless, short, joined by its bytes, and damage is found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.codecs.batch import Ragged
from headrace.codecs.tokens.masks import (
    MasksDamaged,
    check_seals,
    decode_sets,
    encode_sets,
    first_tokens,
    sealed,
    without_sets,
)


def stream_of(sets: list[list[int] | None], tokens: list[int]) -> np.ndarray:
    counts = np.array([-1 if one is None else len(one) for one in sets], np.int64)
    ids = np.array([token for one in sets for token in one or ()], np.int64)
    return encode_sets(np.array(tokens, np.int64), ids, counts)


def sets_of(stream: np.ndarray, tokens: list[int]) -> list[list[int] | None]:
    found = decode_sets(stream, len(tokens))
    ends = np.cumsum(np.maximum(found.counts, 0))
    return [
        None if count < 0 else sorted([token, *found.ids[end - count : end].tolist()])
        for token, count, end in zip(tokens, found.counts.tolist(), ends.tolist(), strict=True)
    ]


token_set = st.one_of(
    st.none(),
    st.sets(st.integers(0, 200_000), min_size=1, max_size=40).map(sorted),
    st.sets(st.integers(500, 620), min_size=1, max_size=100).map(sorted),
)


@given(st.lists(token_set, max_size=12), st.randoms(use_true_random=False))
def test_any_sets_survive_and_streams_are_joined_and_cut_by_token(sets, random):
    tokens = [random.choice(one) if one else random.randrange(1000) for one in sets]
    stream = stream_of(sets, tokens)
    assert sets_of(stream, tokens) == sets
    cut = random.randrange(len(sets) + 1)
    parts = [stream_of(sets[:cut], tokens[:cut]), stream_of(sets[cut:], tokens[cut:])]
    assert sets_of(np.concatenate(parts), tokens) == sets
    assert np.array_equal(first_tokens(stream, cut), parts[0])
    whole = decode_sets(stream)
    chosen = np.array([index for index in range(len(sets)) if random.random() < 0.5], np.int64)
    picked, alone = whole.select(chosen), [decode_sets(stream_of([sets[i]], [tokens[i]])) for i in chosen]
    assert picked.ids.tolist() == [token for one in alone for token in one.ids.tolist()]
    assert picked.counts.tolist() == [int(one.counts[0]) for one in alone]


def column_of(streams: list[np.ndarray]) -> Ragged:
    return Ragged(torch.from_numpy(np.concatenate(streams)), np.array([[len(one)] for one in streams], np.int64))


@given(st.lists(st.lists(token_set, min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_seals_find_each_changed_bit_and_rows_of_other_lengths(rows, data):
    plain = [stream_of(sets, [one[0] if one else 0 for one in sets]) for sets in rows]
    lengths, keys = np.array([len(sets) for sets in rows]), [f"p{row}.0" for row in range(len(rows))]
    streams = [sealed(stream, len(sets)) for stream, sets in zip(plain, rows, strict=True)]
    check_seals(column_of(streams), lengths, keys)
    whole, bare = decode_sets(np.concatenate(streams), int(lengths.sum())), decode_sets(np.concatenate(plain))
    assert whole.ids.tolist() == bare.ids.tolist() and whole.counts.tolist() == bare.counts.tolist()
    row = data.draw(st.integers(0, len(rows) - 1))
    with pytest.raises(MasksDamaged, match=f"p{row}.0: the sampling masks are damaged"):
        check_seals(column_of(streams), lengths + (np.arange(len(rows)) == row), keys)
    damaged = streams[row].copy()
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(MasksDamaged, match=f"p{row}.0: the sampling masks are damaged"):
        check_seals(column_of([*streams[:row], damaged, *streams[row + 1 :]]), lengths, keys)


@given(st.binary(max_size=40), st.integers(0, 9))
def test_bytes_that_no_encoder_wrote_are_refused_or_are_sets_of_that_many_tokens(content, num_tokens):
    try:
        found = decode_sets(np.frombuffer(content, np.uint8), num_tokens)
    except MasksDamaged:
        return
    assert len(found.counts) == num_tokens and len(found.ids) == np.maximum(found.counts, 0).sum()


def test_a_set_of_one_token_takes_one_byte_and_the_shorter_payload_is_taken():
    lone = stream_of([[7]] * 100, [7] * 100)
    assert len(lone) == 102, "two bytes for the number of tokens"
    assert len(without_sets(1000)) == 2 and not len(without_sets(0))
    crowd = list(range(1000, 1128))
    assert len(stream_of([crowd], [1000])) == 1 + 1 + 2 + 19, "a bitmap of 127 ids, 7 in a byte"
    apart = [100 * place for place in range(64)]
    assert len(stream_of([apart], [0])) == 1 + 1 + 63, "63 differences of one byte each"


def test_a_set_without_its_sampled_token_and_damaged_bytes_are_refused():
    with pytest.raises(MasksDamaged, match="token 1: it lacks the sampled token 9"):
        stream_of([[3], [4, 5]], [3, 9])
    stream = stream_of([[1, 5, 900], [2], None], [5, 2, 0])
    with pytest.raises(MasksDamaged, match=r"row-7: got the sampling masks of 3 tokens, expected 4"):
        decode_sets(stream, 4, "row-7")
    with pytest.raises(MasksDamaged, match="end too early"):
        decode_sets(stream[:3])
    with pytest.raises(MasksDamaged, match="no sampling masks"):
        decode_sets(np.full(9, 255, np.uint8))
    huge = np.array([254, 255, 255, 255, 127], np.uint8)
    with pytest.raises(MasksDamaged, match="expected 3"):
        decode_sets(huge, 3)
