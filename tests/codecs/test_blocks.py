"""Wire blocks: layout, zero copy, and checksums that catch every flipped byte that a reader would see."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.codecs import block_header, blocks
from headrace.codecs.block_header import CHECKSUM_ROWS, ChecksumMismatch, decode_header
from headrace.codecs.blocks import BlockLayout, encode_block, read_header
from headrace.codecs.gather import RowSource, assemble, verify
from headrace.codecs.jagged import pack, select_rows, to_padded, unpack
from headrace.codecs.schema import Field, Kind, Schema

SCHEMA = Schema(
    [
        Field("log", Kind.OBJECT),
        Field("ids", Kind.PER_TOKEN, torch.int32),
        Field("image", Kind.RAGGED, torch.uint8, ndim=2),
        Field("reward", Kind.PER_SAMPLE, torch.float32),
    ]
)
ROWS = 2 * CHECKSUM_ROWS + 22  # three row blocks, the last one short


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return pack(
        SCHEMA,
        {
            "log": [f"row {index}" for index in range(ROWS)],
            "ids": [rng.integers(0, 99, n, dtype=np.int32) for n in rng.integers(1, 9, ROWS)],
            "image": [rng.integers(0, 256, shape, dtype=np.uint8) for shape in rng.integers(1, 4, (ROWS, 2))],
            "reward": rng.random(ROWS, dtype=np.float32),
        },
    )


def source_of(block, rows):
    rows = np.asarray(rows, dtype=np.int32)
    return RowSource(block.layout.fields, np.zeros(len(rows), dtype=np.int32), rows, block.row_starts[rows])


def read(batch, block, rows, views):
    """Read rows of a block, and check what is copied."""
    source = source_of(block, rows)
    lengths = batch.jagged("ids").lengths[np.asarray(rows)]
    return assemble(SCHEMA, lengths, [source], [block.layout], [views], seed=0)


def part_names(block):
    """Part number -> (field, "values" or "index")."""
    names = {}
    for name in block.layout.fields:
        for number, what in zip(block.layout.field_parts(SCHEMA[name]), ("values", "index"), strict=False):
            names[number] = (name, what)
    return names


def test_shuffled_and_repeated_rows_of_uneven_blocks(batch):
    edges = [0, 40, 40, 41, 120, ROWS]
    blocks = [encode_block(batch, *edge, checksum=False) for edge in zip(edges[:-1], edges[1:], strict=True)]
    wanted = np.random.default_rng(1).integers(0, ROWS, 300)
    number = np.searchsorted(edges, wanted, side="right") - 1
    row = wanted - np.array(edges)[number]
    starts = [block.row_starts for block in blocks]
    first_token = np.array([starts[block][at] for block, at in zip(number, row, strict=True)])
    views = [dict(enumerate(block.parts)) for block in blocks]
    source = RowSource(blocks[0].layout.fields, number, row, first_token)
    lengths = batch.jagged("ids").lengths[wanted]
    out = unpack(assemble(SCHEMA, lengths, [source], [block.layout for block in blocks], views))
    for name, rows in unpack(batch).items():
        for got, index in zip(out[name], wanted, strict=True):
            assert torch.equal(got, rows[index]) if isinstance(got, torch.Tensor) else got == rows[index]


def test_values_are_not_copied(batch):
    block = encode_block(batch, 10, 90, checksum=False)
    memory = {
        "ids": batch.jagged("ids").values,
        "image": batch.ragged("image").values,
        "reward": batch.tensor("reward"),
    }
    for name, values in memory.items():
        number = block.layout.field_parts(SCHEMA[name])[0]
        assert np.shares_memory(block.parts[number], values.numpy())


def test_parts_follow_from_the_layout(batch):
    layout = encode_block(batch, 0, ROWS, checksum=False).layout
    assert layout.fields == ("ids", "reward", "log", "image")  # those with an index part last
    assert layout.field_parts(SCHEMA["image"]) == (5, 6) and layout.field_parts(SCHEMA["ids"]) == (1,)
    assert layout.num_rows == ROWS and layout.num_tokens == len(batch.jagged("ids").values)
    ends = [offset + nbytes for offset, nbytes in zip(layout.offsets, layout.part_bytes, strict=True)]
    assert all(end <= offset for end, offset in zip(ends, layout.offsets[1:], strict=False))
    assert ends[-1] <= layout.nbytes


def test_layout_refuses_what_the_block_does_not_hold():
    layout = BlockLayout(("ids", "log"), 1, 1, (100, 4, 4, 8))
    with pytest.raises(ValueError, match="field 'reward' is not in the block, which holds ids, log"):
        layout.field_parts(SCHEMA["reward"])
    with pytest.raises(ValueError, match="field 'ids': its kind in the block is not object"):
        layout.field_parts(Field("ids", Kind.OBJECT))


def test_rows_without_a_byte():
    """Empty arrays from numpy have strides that torch refuses to view as bytes."""
    data = {"ids": [np.zeros(0, dtype=np.int32)] * 2, "reward": np.zeros(2, dtype=np.float32)}
    batch = pack(SCHEMA, data)
    block = encode_block(batch, 0, 2, checksum=True)
    source, views = source_of(block, [1, 0]), dict(enumerate(block.parts))
    verify(batch.schema, source, 0, block.layout, views)
    out = assemble(batch.schema, np.zeros(2), [source], [block.layout], [views])
    assert out.jagged("ids").lengths.tolist() == [0, 0] and to_padded(out)[0]["ids"].shape == (2, 0)


def test_columns_of_one_element_of_a_wider_tensor():
    """Torch calls such an element contiguous, whatever its stride is."""
    schema = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("reward", Kind.PER_SAMPLE, torch.float32)])
    data = {"ids": [np.arange(1, dtype=np.int32)], "reward": torch.arange(4.0)[1::2][:1]}
    batch = pack(schema, data)
    assert batch.tensor("reward").stride() == (2,), "it was copied, so that this test shows nothing"
    block = encode_block(batch, 0, 1, checksum=True)
    source, views = source_of(block, [0]), dict(enumerate(block.parts))
    out = assemble(schema, np.zeros(1), [source], [block.layout], [views])
    assert out.tensor("reward").tolist() == [1.0]


def test_every_byte_is_under_a_checksum(batch):
    """One byte flipped in each part, at the first, a middle and the last byte."""
    block = encode_block(batch, 0, ROWS, checksum=True)
    everything = source_of(block, range(ROWS))
    for number, part in enumerate(block.parts):
        for position in (0, len(part) // 2, len(part) - 1):
            views = {other: view.copy() for other, view in enumerate(block.parts)}
            verify(SCHEMA, everything, 0, block.layout, views)
            views[number][position] ^= 1
            with pytest.raises(ChecksumMismatch):
                verify(SCHEMA, everything, 0, block.layout, views)
            with pytest.raises(ChecksumMismatch):
                read(batch, block, range(ROWS), views)


@pytest.mark.parametrize("copy_bytes", [100, 2 << 20])
def test_a_reader_copies_no_byte_that_has_changed(batch, copy_bytes, monkeypatch):
    """A read that checks what it copies fails for each changed byte of a row block that it reads. The rows may come in
    any order; other bytes may change."""
    monkeypatch.setattr(block_header, "COPY_BYTES", copy_bytes)
    block = encode_block(batch, 0, ROWS, checksum=True)
    rng = np.random.default_rng(0)
    found = 0
    for rows in (np.arange(ROWS), np.arange(70, 90), rng.permutation(ROWS)[:40], np.array([149, 3, 3, 64])):
        expected = unpack(select_rows(batch, rows))
        for number, part in enumerate(block.parts):
            for position in rng.integers(0, len(part), 30).tolist():
                views = {other: view.copy() for other, view in enumerate(block.parts)}
                views[number][position] ^= 1 << int(rng.integers(8))
                try:
                    got = unpack(read(batch, block, rows, views))
                except ChecksumMismatch as error:
                    assert error.block == 0
                    found += 1
                    continue
                assert number and len(rows) < ROWS, "a reader of the whole block copied a changed byte"
                for name, values in expected.items():
                    for one, other in zip(got[name], values, strict=True):
                        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert found > 30 * len(block.parts)


def test_rows_scattered_over_other_row_blocks_are_read_past_a_changed_one(batch):
    block = encode_block(batch, 0, ROWS, checksum=True)
    views = {number: view.copy() for number, view in enumerate(block.parts)}
    for name in ("ids", "image", "reward", "log"):
        views[block.layout.field_parts(SCHEMA[name])[0]][0] ^= 1
    rows = np.random.default_rng(2).permutation(np.arange(CHECKSUM_ROWS, ROWS))
    assert read(batch, block, rows, views).num_rows == len(rows)
    with pytest.raises(ChecksumMismatch, match=f"rows 0 to {CHECKSUM_ROWS - 1}:"):
        read(batch, block, [*rows, CHECKSUM_ROWS - 1], views)


@pytest.mark.parametrize("copy_bytes", [1, 100, 2 << 20])
def test_pieces_of_a_block_are_its_parts_with_the_same_checksums(batch, copy_bytes, monkeypatch):
    block = encode_block(batch, 3, ROWS, checksum=True)
    expected = np.zeros(block.layout.nbytes, np.uint8)
    for part, offset in zip(block.parts, block.layout.offsets, strict=True):
        expected[offset : offset + len(part)] = part
    monkeypatch.setattr(blocks, "COPY_BYTES", copy_bytes)
    again = encode_block(batch, 3, ROWS, checksum=True)
    offsets, pieces = again.stream()
    memory = np.zeros(again.layout.nbytes, np.uint8)
    for offset, piece in zip(offsets, pieces, strict=True):
        assert offset == 0 or piece.nbytes <= copy_bytes
        memory[offset : offset + piece.nbytes] = piece
    np.testing.assert_array_equal(memory, expected)
    assert decode_header(memory[: again.layout.part_bytes[0]]).checksums is not None


def test_checksums_are_those_of_the_pieces_at_the_time_of_their_copy(batch):
    """The header is made when everything else has been copied: its checksums are no second pass ahead of the copy."""
    block = encode_block(batch, 0, ROWS, checksum=True)
    offsets, pieces = block.stream()
    taken = [next(pieces) for _ in offsets[:-1]]
    np.testing.assert_array_equal(decode_header(block.pieces[0][0]).checksums, [0] * (4 * 3 + 2))
    (header,) = pieces
    assert offsets[-1] == 0 and header is block.pieces[0][0] and len(taken) == len(block.layout.part_bytes) - 1
    assert np.all(decode_header(header).checksums)


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8))
def test_running_sums_do_not_depend_on_how_the_bytes_come(sizes, cuts):
    data = np.random.default_rng(0).integers(0, 256, sum(sizes), dtype=np.uint8).data
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    running = block_header.RunningSums(ends)
    begin = 0
    for size in [*cuts, len(data)]:
        running.feed(data[begin : begin + size])
        begin = min(begin + size, len(data))
    assert running.sums == [
        xxhash.xxh3_64_intdigest(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)
    ]


@pytest.mark.parametrize("flipped", range(3))
def test_only_row_blocks_that_are_read_are_verified(batch, flipped):
    block = encode_block(batch, 0, ROWS, checksum=True)
    for number, (name, what) in part_names(block).items():
        views = {other: view.copy() for other, view in enumerate(block.parts)}
        # Where the flipped row block begins: what the rows before it take when they are a block of their own.
        before = pack(SCHEMA, {name: batch[name]}, ROWS)
        first = encode_block(before, 0, flipped * CHECKSUM_ROWS, checksum=False)
        position = first.layout.part_bytes[1]
        views[number][position] ^= 0x40
        for row_block in range(3):
            source = source_of(block, [min(row_block * CHECKSUM_ROWS + 5, ROWS - 1)])
            if row_block == flipped or what == "index":
                with pytest.raises(ChecksumMismatch, match=f"field '{name}'"):
                    verify(SCHEMA, source, 0, block.layout, views)
            else:
                verify(SCHEMA, source, 0, block.layout, views)
        others = SCHEMA.subset([other for other in SCHEMA if other != name])
        verify(others, source_of(block, range(ROWS)), 0, block.layout, views)


def test_mismatch_names_field_rows_and_both_sums(batch):
    block = encode_block(batch, 0, ROWS, checksum=True)
    views = {number: view.copy() for number, view in enumerate(block.parts)}
    views[block.layout.field_parts(SCHEMA["reward"])[0]][4 * (CHECKSUM_ROWS + 6)] ^= 1
    rows = f"rows {CHECKSUM_ROWS} to {2 * CHECKSUM_ROWS - 1}"
    with pytest.raises(ChecksumMismatch, match=f"field 'reward', {rows}: xxh3 .* is [0-9a-f]{{16}}, but [0-9a-f]"):
        verify(SCHEMA, source_of(block, [CHECKSUM_ROWS + 6]), 0, block.layout, views)


def test_rows_of_other_blocks_are_not_verified(batch):
    block = encode_block(batch, 0, ROWS, checksum=True)
    views = {number: view.copy() for number, view in enumerate(block.parts)}
    views[1][0] ^= 1
    source = RowSource(block.layout.fields, np.array([1, 0]), np.array([0, CHECKSUM_ROWS + 36]), np.array([0, 0]))
    verify(SCHEMA, source, 0, block.layout, views)
    with pytest.raises(ChecksumMismatch):
        verify(SCHEMA, source, 1, block.layout, views)


def test_blocks_without_checksums_cannot_be_verified(batch):
    block = encode_block(batch, 0, 5, checksum=False)
    with pytest.raises(ValueError, match="written without checksums") as caught:
        verify(SCHEMA, source_of(block, [0]), 0, block.layout, dict(enumerate(block.parts)))
    assert not isinstance(caught.value, ChecksumMismatch)


@pytest.mark.parametrize("foreign", [b"", b"short", b"\0" * 200, b"hrblock1" + b"\0" * 200])
def test_foreign_bytes_are_no_header(foreign):
    with pytest.raises(ValueError, match="block header"):
        read_header(np.frombuffer(foreign, dtype=np.uint8))


def test_rows_beyond_a_block_are_refused(batch):
    """A wrong receipt never reads short, or a neighbour's bytes."""
    block = encode_block(batch, 0, 4, checksum=False)
    views = dict(enumerate(block.parts))
    first_token = batch.jagged("ids").lengths[:3].sum()
    source = RowSource(("ids",), np.array([0]), np.array([3]), np.array([first_token + 1]))
    with pytest.raises(ValueError, match="source .*: rows end at byte"):
        assemble(SCHEMA.subset(["ids"]), batch.jagged("ids").lengths[3:4], [source], [block.layout], [views])


def test_rows_of_one_size_scattered_and_in_a_row():
    """PER_SAMPLE rows take the indexed copy when scattered and the run copy otherwise; both give the same."""
    schema = Schema(
        [Field("small", Kind.PER_SAMPLE, torch.int16, (3,)), Field("big", Kind.PER_SAMPLE, torch.int64, (99,))]
    )
    rng = np.random.default_rng(0)
    data = {
        "small": torch.from_numpy(rng.integers(0, 999, (120, 3), dtype=np.int16)),
        "big": torch.from_numpy(rng.integers(0, 999, (120, 99))),
    }
    batch = pack(schema, data)
    blocks = [encode_block(batch, start, start + 40, checksum=False) for start in (0, 40, 80)]
    views = [dict(enumerate(block.parts)) for block in blocks]
    layouts = [block.layout for block in blocks]
    for order in (np.arange(120), rng.permutation(120), rng.integers(0, 120, 300), np.arange(120)[::-1]):
        source = RowSource(tuple(schema), order // 40, order % 40, np.zeros(len(order), dtype=np.int64))
        out = assemble(schema, np.zeros(len(order)), [source], layouts, views)
        for name, values in data.items():
            assert torch.equal(out.tensor(name), values[order.copy()])
