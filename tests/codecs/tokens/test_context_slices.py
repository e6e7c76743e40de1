"""Zig-zag slices for context parallelism: every token on one rank, look-ahead behind each chunk, exact values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.schema import Field, Kind, Schema
from headrace.codecs.tokens.packed_rows import chunks, piece_lengths, pieces, slice_batch

SCHEMA = Schema(
    [
        Field("ids", Kind.PER_TOKEN, torch.int32),
        Field("routes", Kind.PER_TOKEN, torch.int8, trailing=(2, 3)),
        Field("reward", Kind.PER_SAMPLE, torch.float32),
    ]
)
LENGTHS = st.lists(st.integers(0, 90), max_size=12)


def whole_rows(lengths: list[int]) -> Batch:
    tokens = sum(lengths)
    array = np.array(lengths, np.int64)
    routes = torch.arange(tokens * 6).to(torch.int8).reshape(tokens, 2, 3)
    columns = {
        "ids": Jagged(torch.arange(tokens, dtype=torch.int32), array),
        "routes": Jagged(routes, array),
        "reward": torch.arange(len(lengths), dtype=torch.float32),
    }
    return Batch(SCHEMA, len(lengths), columns)


@settings(max_examples=100)
@given(LENGTHS, st.integers(2, 5), st.integers(1, 3))
def test_chunks_of_all_ranks_are_each_row_exactly_once(lengths: list[int], cp: int, tp: int) -> None:
    seen = [np.zeros(length, np.int64) for length in lengths]
    for rank in range(cp):
        starts, stops = chunks(np.array(lengths, np.int64), 2 * cp * tp, cp, rank)
        for row, length in enumerate(lengths):
            for start, stop in zip(starts[row], stops[row], strict=True):
                seen[row][start : min(stop, length)] += 1
    assert all((row == 1).all() for row in seen)


@settings(max_examples=100)
@given(LENGTHS, st.integers(2, 5), st.integers(1, 3), st.data())
def test_a_piece_is_its_chunk_and_the_next_token(lengths: list[int], cp: int, tp: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, cp - 1))
    array = np.array(lengths, np.int64)
    starts, stops = chunks(array, 2 * cp * tp, cp, rank)
    begins, ends = pieces(array, 2 * cp * tp, cp, rank)
    for row, length in enumerate(lengths):
        for part in range(2):
            wanted = [p for p in range(starts[row, part], stops[row, part]) if p < length]
            wanted += [wanted[-1] + 1] if wanted and wanted[-1] + 1 < length else []
            assert list(range(begins[row, part], ends[row, part])) == wanted


@settings(max_examples=60)
@given(LENGTHS, st.integers(2, 4), st.data())
def test_slicing_takes_just_those_tokens_of_every_column(lengths: list[int], cp: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, cp - 1))
    batch, array = whole_rows(lengths), np.array(lengths, np.int64)
    part = slice_batch(batch, array, 2 * cp, cp, rank)
    starts, stops = pieces(array, 2 * cp, cp, rank)
    offsets = np.cumsum(array) - array
    index = [
        np.arange(offset + start, offset + stop)
        for offset, begins, ends in zip(offsets, starts, stops, strict=True)
        for start, stop in zip(begins, ends, strict=True)
    ]
    wanted = np.concatenate([np.zeros(0, np.int64), *index])
    assert part.jagged("ids").values.tolist() == wanted.tolist()
    assert torch.equal(part.jagged("routes").values, batch.jagged("routes").values[wanted])
    assert part.jagged("ids").lengths.tolist() == piece_lengths(array, 2 * cp, cp, rank).tolist()
    assert torch.equal(part.tensor("reward"), batch.tensor("reward")) and part.num_rows == len(lengths)


def test_mistakes_are_named() -> None:
    lengths = np.array([5])
    with pytest.raises(ValueError, match="got rank 0 of cp=1, expected cp >= 2"):
        pieces(lengths, 4, 1, 0)
    with pytest.raises(ValueError, match="pad_multiple: got 6, expected a multiple of 2 \\* cp = 4"):
        pieces(lengths, 6, 2, 0)
    with pytest.raises(ValueError, match="expected whole rows"):
        slice_batch(whole_rows([4]), lengths, 4, 2, 0)
