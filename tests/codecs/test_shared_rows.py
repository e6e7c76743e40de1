"""Rows of a group store the tokens with which they all begin once, and are read back whole."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.block_header import ChecksumMismatch
from headrace.codecs.blocks import BlockPieces, EncodedBlock, encode_block, encode_blocks
from headrace.codecs.gather import RowSource, assemble, verify
from headrace.codecs.schema import Field, Kind, Schema
from headrace.codecs.shared_rows import SharedRows, repeated_tokens
from headrace.dataplane.client.block_io import write_blocks
from headrace.tests.example_counts import examples

SCHEMA = Schema(
    [
        Field("ids", Kind.PER_TOKEN, torch.int32, shared=True),
        Field("logprobs", Kind.PER_TOKEN, torch.float32),
        Field("routes", Kind.PER_TOKEN, torch.uint8, (6, 4), shared=True),
    ]
)
SHARED_BYTES = 4 + 24
modest = settings(max_examples=examples(60))


def batch_of(groups: list[tuple[int, list[int]]], seed: int = 0) -> tuple[Batch, np.ndarray]:
    """Rows of groups (tokens in common, lengths of the rows' own rests), and the number of each row's group."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, np.ndarray]] = []
    numbers = []
    for number, (common, rests) in enumerate(groups):
        ids, routes = rng.integers(0, 99, common), rng.integers(0, 99, (common, 6, 4))
        for row, rest in enumerate(rests):
            own = np.concatenate([[1000 + row] * (rest > 0), rng.integers(0, 99, max(rest - 1, 0))])
            rows.append(
                {
                    "ids": np.concatenate([ids, own]).astype(np.int32),
                    "routes": np.concatenate([routes, rng.integers(0, 99, (rest, 6, 4))]).astype(np.uint8),
                }
            )
            numbers.append(number)
    lengths = np.array([len(row["ids"]) for row in rows], dtype=np.int64)
    columns = {name: torch.from_numpy(np.concatenate([row[name] for row in rows])) for name in ("ids", "routes")}
    columns["logprobs"] = torch.arange(int(lengths.sum()), dtype=torch.float32)
    return Batch(SCHEMA, len(rows), {n: Jagged(c, lengths) for n, c in columns.items()}), np.array(numbers)


def read(block: EncodedBlock, lengths: np.ndarray, rows: np.ndarray, names: tuple[str, ...] = tuple(SCHEMA)) -> Batch:
    assert block.row_starts is not None
    source = RowSource(names, np.zeros(len(rows), np.int32), rows.astype(np.int32), block.row_starts[rows])
    return assemble(SCHEMA.subset(names), lengths[rows], [source], [block.layout], [dict(enumerate(block.parts))])


def rows_of(batch: Batch, name: str) -> list[np.ndarray]:
    column = batch.jagged(name)
    return np.split(column.values.numpy(), np.cumsum(column.lengths)[:-1])


many_groups = st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1)


@modest
@given(many_groups, st.integers(0, 9), st.booleans())
def test_any_rows_come_back_whole_in_any_order(groups: list, seed: int, checksum: bool) -> None:
    batch, numbers = batch_of(groups, seed)
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, batch.num_rows))  # a cut may fall within a group
    stop = int(rng.integers(start, batch.num_rows)) + 1
    block = encode_block(batch, start, stop, checksum=checksum, groups=numbers)
    assert batch.lengths is not None
    lengths = batch.lengths[start:stop]
    wanted = rng.integers(0, stop - start, int(rng.integers(1, 9)))
    for names in (tuple(SCHEMA), ("routes",)):
        found = read(block, lengths, wanted, names)
        for name in names:
            expected = rows_of(batch, name)[start:stop]
            for row, values in zip(wanted, rows_of(found, name), strict=True):
                np.testing.assert_array_equal(values, expected[row])
    if checksum:
        assert block.row_starts is not None
        source = RowSource(tuple(SCHEMA), np.zeros(len(wanted), np.int32), wanted.astype(np.int32), wanted)
        verify(SCHEMA, source, 0, block.layout, dict(enumerate(block.parts)))


def test_the_bytes_are_those_of_all_tokens_less_the_repeated_ones() -> None:
    groups = [(50, [3, 4, 5, 0]), (0, [7, 7]), (30, [9]), (20, [1, 2])]
    batch, numbers = batch_of(groups)
    whole = encode_block(batch, 0, batch.num_rows, checksum=False).layout
    shared = encode_block(batch, 0, batch.num_rows, checksum=False, groups=numbers).layout
    assert whole.shared is None and shared.shared is not None
    assert shared.shared.tokens == (50, 20) and shared.shared.counts == (3, 1) and shared.shared.first == (1, 8)
    assert shared.shared.parents == (0, 7) and shared.shared.starts[0] == 0
    saved = (3 * 50 + 20) * SHARED_BYTES
    assert sum(whole.part_bytes[1:]) - sum(shared.part_bytes[1:]) == saved
    assert shared.num_tokens == whole.num_tokens


def tree_batch(rows: list[tuple[int, int, int]], alphabet: int, seed: int) -> tuple[Batch, np.ndarray, list[list[int]]]:
    """Rows of one tree, their group numbers, and their ids. rows: the row to begin like, its tokens, and own tokens.

    Ids are few, so that rows also begin alike by chance."""
    rng = np.random.default_rng(seed)
    ids: list[list[int]] = []
    for like, tokens, own in rows:
        ids.append((ids[like % len(ids)][:tokens] if ids else []) + rng.integers(0, alphabet, own).tolist())
    lengths = np.array([len(one) for one in ids], dtype=np.int64)
    flat = np.array([token for one in ids for token in one], dtype=np.int32)
    columns = {
        "ids": torch.from_numpy(flat),
        "routes": torch.from_numpy(np.repeat(flat.astype(np.uint8), 24).reshape(-1, 6, 4)),
        "logprobs": torch.arange(len(flat), dtype=torch.float32),
    }
    groups = (np.arange(len(rows)) >= len(rows) * 2 // 3).astype(np.int64)
    return Batch(SCHEMA, len(rows), {name: Jagged(c, lengths) for name, c in columns.items()}), groups, ids


trees = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=24)


@modest
@given(trees, st.sampled_from([1, 2, 90]), st.integers(0, 9), st.booleans())
def test_any_rows_of_a_random_tree_come_back_whole(rows: list, alphabet: int, seed: int, checksum: bool) -> None:
    batch, groups, _ = tree_batch(rows, alphabet, seed)
    assert batch.lengths is not None
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, batch.num_rows))
    stop = int(rng.integers(start, batch.num_rows)) + 1
    block = encode_block(batch, start, stop, checksum=checksum, groups=groups)
    wanted = rng.integers(0, stop - start, int(rng.integers(1, 12)))
    found = read(block, batch.lengths[start:stop], wanted)
    for name in SCHEMA:
        expected = rows_of(batch, name)[start:stop]
        for row, values in zip(wanted, rows_of(found, name), strict=True):
            np.testing.assert_array_equal(values, expected[row])
    if checksum:
        source = RowSource(tuple(SCHEMA), np.zeros(len(wanted), np.int32), wanted.astype(np.int32), wanted)
        verify(SCHEMA, source, 0, block.layout, dict(enumerate(block.parts)))


@modest
@given(trees, st.sampled_from([1, 2, 90]), st.integers(0, 9))
def test_repeated_tokens_are_the_longest_beginnings_of_earlier_rows(rows: list, alphabet: int, seed: int) -> None:
    batch, _, ids = tree_batch(rows, alphabet, seed)
    assert batch.lengths is not None
    found = repeated_tokens(batch.jagged("ids").values.numpy(), batch.lengths)
    for row, tokens in enumerate(found.tolist()):
        longest = [len(os.path.commonprefix([ids[row], other])) for other in ids[:row]]
        assert tokens == max(longest, default=0), row


def test_a_history_that_grows_call_by_call_is_stored_once() -> None:
    """Also where filler rows of one token and rows of other conversations stand between the calls."""
    calls = [(0, 0, 100), *((row - 1, 1000, 50) for row in range(1, 10))]
    batch, _, _ = tree_batch(calls, 90, 0)
    shared = encode_block(batch, 0, 10, checksum=False, groups=np.zeros(10, np.int64)).layout
    assert shared.part_bytes[1] == (100 + 9 * 50) * 4 and shared.part_bytes[3] == (100 + 9 * 50) * 24
    # A filler row, then another conversation, then a row that goes on after the third call.
    batch, _, _ = tree_batch([*calls[:3], (0, 1, 0), (0, 0, 70), (2, 200, 40)], 90, 0)
    shared = encode_block(batch, 0, 6, checksum=False, groups=np.zeros(6, np.int64)).layout
    assert shared.part_bytes[1] == (200 + 1 + 70 + 40) * 4
    assert shared.shared is not None and shared.shared.parents == (0, 1, 2)


def test_blocks_in_journals_of_earlier_versions_are_read() -> None:
    """There, a run had no parents and began with the row whose tokens the others take."""
    batch, numbers = batch_of([(50, [3, 4, 5]), (0, [7]), (20, [1, 2])])
    block = encode_block(batch, 0, batch.num_rows, checksum=False, groups=numbers)
    old = SharedRows(("ids", "routes"), (0, 4), (3, 2), (50, 20), (0, 3 * 50 + 3 + 4 + 5 + 7))
    assert old.with_parents() == block.layout.shared


def test_a_store_of_whole_puts_is_given_the_rows_own_memory() -> None:
    """A part is in several pieces where rows share tokens. Joining them would copy all of it."""
    batch, numbers = batch_of([(50, [3, 4, 5]), (30, [9, 9])])
    put: list[BlockPieces] = []

    class Store:
        def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
            put.extend(blocks)
            return (b"",) * len(blocks)

    blocks = encode_blocks(batch, [(0, 3), (3, 5)], checksum=True, groups=numbers)
    store: Any = Store()
    assert write_blocks(store, blocks, 1, b"", time.monotonic() + 1) == (b"", b"")
    memory = [batch.jagged(name).values.numpy() for name in SCHEMA]
    for block, given_ in zip(blocks, put, strict=True):
        assert len(given_[1]) == block.layout.num_rows
        assert all(any(np.shares_memory(piece, own) for own in memory) for part in given_[1:] for piece in part)
        source = RowSource(tuple(SCHEMA), np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64))
        verify(SCHEMA, source, 0, block.layout, {i: np.concatenate(part) for i, part in enumerate(given_)})


def test_rows_share_what_is_before_their_first_difference_in_any_field() -> None:
    batch, numbers = batch_of([(50, [3, 4, 5])])
    routes = batch.jagged("routes").values
    assert batch.lengths is not None
    routes[int(batch.lengths[0]) + 41, 2, 1] += 1  # token 41 of row 1
    block = encode_block(batch, 0, 3, checksum=False, groups=numbers)
    assert block.layout.shared is not None and block.layout.shared.tokens == (41, 50)
    for row, values in enumerate(rows_of(read(block, batch.lengths, np.arange(3)), "routes")):
        np.testing.assert_array_equal(values, rows_of(batch, "routes")[row])


def test_a_row_without_routes_does_not_keep_its_group_from_sharing() -> None:
    batch, numbers = batch_of([(50, [3, 4, 5, 6])])
    assert batch.lengths is not None
    routes, second = batch.jagged("routes").values, int(batch.lengths[0])
    routes[second : second + int(batch.lengths[1])] = 255
    block = encode_block(batch, 0, 4, checksum=False, groups=numbers)
    assert block.layout.shared is not None
    assert (block.layout.shared.first, block.layout.shared.counts) == ((2,), (2,))
    assert block.layout.shared.parents == (0,)
    for row, values in enumerate(rows_of(read(block, batch.lengths, np.arange(4)), "routes")):
        np.testing.assert_array_equal(values, rows_of(batch, "routes")[row])


def test_rows_that_save_next_to_nothing_are_stored_whole() -> None:
    batch, numbers = batch_of([(2, [3, 4, 5])])
    assert encode_block(batch, 0, 3, checksum=False, groups=numbers).layout.shared is None


@pytest.mark.parametrize("row", [0, 70, 99])
def test_a_changed_byte_of_common_tokens_is_found_by_readers_of_every_row(row: int) -> None:
    """The group crosses the bounds of row blocks, of which each has a checksum."""
    batch, numbers = batch_of([(40, [2] * 100)])
    block = encode_block(batch, 0, 100, checksum=True, groups=numbers)
    assert block.row_starts is not None
    source = RowSource(("ids",), np.zeros(1, np.int32), np.array([row], np.int32), block.row_starts[[row]])
    parts = {number: part.copy() for number, part in enumerate(block.parts)}
    verify(SCHEMA.subset(["ids"]), source, 0, block.layout, parts)
    lengths = np.array([42])
    assemble(SCHEMA.subset(["ids"]), lengths, [source], [block.layout], [parts], seed=0)
    parts[1][5] ^= 1
    with pytest.raises(ChecksumMismatch, match="field 'ids'"):
        verify(SCHEMA.subset(["ids"]), source, 0, block.layout, parts)
    with pytest.raises(ChecksumMismatch, match="field 'ids'"):
        assemble(SCHEMA.subset(["ids"]), lengths, [source], [block.layout], [parts], seed=0)


def test_fields_of_other_kinds_share_no_tokens() -> None:
    with pytest.raises(ValueError, match="only per_token fields share tokens, got kind per_sample"):
        Field("reward", Kind.PER_SAMPLE, torch.float32, shared=True)
