"""Whatever goes into a batch comes out with the same bits: pack, unpack, blocks, padding, slices, TensorDict."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.blocks import encode_block, read_header
from headrace.codecs.gather import RowSource, assemble, verify
from headrace.codecs.jagged import concat, from_padded, pack, select_rows, slice_rows, to_padded, unpack
from headrace.codecs.objects import encode
from headrace.codecs.schema import DTYPES, Field, Kind, Schema
from headrace.tests.codecs.random_bits import random_bits
from headrace.tests.example_counts import examples

modest = settings(max_examples=examples(60))

keys = st.text(max_size=4) | st.integers(-(2**63), 2**64 - 1)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
)
objects = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
trailings = st.lists(st.integers(0, 3), max_size=2).map(tuple)


@st.composite
def fields(draw, index):
    kind = draw(st.sampled_from(Kind))
    name = f"field_{index}"
    if kind is Kind.OBJECT:
        return Field(name, kind)
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    if kind is Kind.RAGGED:
        return Field(name, kind, dtype, ndim=draw(st.integers(1, 3)))
    return Field(name, kind, dtype, draw(trailings), pad_value=draw(st.integers(0, 1)))


@st.composite
def rows_by_field(draw, max_rows=6):
    """(schema, rows, field name -> list of row tensors or objects)."""
    schema = Schema([draw(fields(index)) for index in range(draw(st.integers(1, 4)))])
    num_rows = draw(st.integers(0, max_rows))
    lengths = draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    data = {}
    for field in schema.values():
        if field.kind is Kind.OBJECT:
            data[field.name] = draw(st.lists(objects, min_size=num_rows, max_size=num_rows))
            continue
        shapes = {
            Kind.PER_TOKEN: lambda row, field=field: (lengths[row], *field.trailing),
            Kind.PER_SAMPLE: lambda row, field=field: field.trailing,
            Kind.RAGGED: lambda row, field=field: tuple(rng.integers(0, 4, field.ndim).tolist()),
        }[field.kind]
        assert field.dtype is not None
        data[field.name] = [random_bits(rng, field.dtype, shapes(row)) for row in range(num_rows)]
    return schema, num_rows, data


def bits(row):
    """What must not change of a row: type, shape and every bit."""
    if isinstance(row, torch.Tensor):
        data = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if row.numel() else b""
        return row.dtype, tuple(row.shape), data
    return encode(row)


def all_bits(batch: Batch):
    return {name: [bits(row) for row in rows] for name, rows in unpack(batch).items()}


def expect_rows(batch, schema, data, indices):
    assert batch.schema == schema
    assert batch.num_rows == len(indices)
    assert all_bits(batch) == {name: [bits(rows[index]) for index in indices] for name, rows in data.items()}
    for column in batch.values():
        values = getattr(column, "values", column)
        if isinstance(values, torch.Tensor):
            assert values.is_contiguous() and not values.requires_grad and values.device.type == "cpu"


def strided(row):
    """The same values with gaps between them."""
    if not isinstance(row, torch.Tensor) or not row.ndim:
        return row
    wide = torch.stack([row, row], dim=-1)
    return wide[..., 0]


def with_grad(row):
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return row.clone().requires_grad_() if isinstance(row, torch.Tensor) and row.dtype in floats else row


def as_numpy(row):
    known = isinstance(row, torch.Tensor) and not str(row.dtype).startswith(("torch.float8", "torch.bfloat"))
    return row.numpy() if known else row


@modest
@given(rows_by_field(), st.sampled_from([list, tuple]))
def test_pack_keeps_every_bit_of_rows(case, sequence):
    schema, num_rows, data = case
    for convert in (lambda row: row, strided, with_grad, as_numpy):
        given_rows = {name: sequence(map(convert, rows)) for name, rows in data.items()}
        expect_rows(pack(schema, given_rows, num_rows), schema, data, range(num_rows))


@modest
@given(rows_by_field())
def test_pack_takes_its_own_columns_and_batches(case):
    schema, num_rows, data = case
    batch = pack(schema, data)
    expect_rows(pack(schema, batch), schema, data, range(num_rows))
    expect_rows(pack(schema, dict(batch)), schema, data, range(num_rows))


def as_tensordict(batch: Batch) -> TensorDict:
    """A TensorDict with the batch's columns."""
    values: dict[str, Any] = {}
    for name, column in batch.items():
        if isinstance(column, Jagged):
            offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(column.lengths))))
            values[name] = torch.nested.nested_tensor_from_jagged(column.values, offsets)
        elif isinstance(column, torch.Tensor):
            values[name] = column
        else:  # NonTensorStack has no batch size without rows.
            rows = unpack(batch)[name]
            values[name] = NonTensorStack(*rows) if rows else NonTensorData([], batch_size=[0])
    return TensorDict(values, batch_size=[batch.num_rows])


@modest
@given(rows_by_field())
def test_tensordict_there_and_back(case):
    schema, num_rows, data = case
    expect_rows(pack(schema, as_tensordict(pack(schema, data, num_rows))), schema, data, range(num_rows))


@modest
@given(rows_by_field(), st.data())
def test_select_slice_and_concat(case, draw):
    schema, num_rows, data = case
    batch = pack(schema, data, num_rows)
    indices = draw.draw(st.lists(st.integers(0, num_rows - 1), max_size=8)) if num_rows else []
    expect_rows(select_rows(batch, indices), schema, data, indices)
    cut = draw.draw(st.integers(0, num_rows))
    head, tail = slice_rows(batch, 0, cut), slice_rows(batch, cut, num_rows)
    expect_rows(head, schema, data, range(cut))
    expect_rows(tail, schema, data, range(cut, num_rows))
    expect_rows(concat([head, tail, head]), schema, data, [*range(num_rows), *range(cut)])


@modest
@given(rows_by_field(), st.integers(1, 4), st.integers(0, 3))
def test_padding_there_and_back(case, multiple_of, extra):
    schema, num_rows, data = case
    batch = pack(schema, data, num_rows)
    pad_to = None if not extra else extra + (0 if batch.lengths is None else int(batch.lengths.max(initial=0)))
    padded, lengths = to_padded(batch, pad_to=pad_to, multiple_of=multiple_of)
    assert set(padded) == {name for name in schema if schema[name].kind is Kind.PER_TOKEN}
    for name, tensor in padded.items():
        width = tensor.shape[1]
        assert width % multiple_of == 0 and width - max([len(row) for row in data[name]], default=0) < 4 + extra
        for row, out in zip(data[name], tensor, strict=True):
            assert bits(out[: len(row)]) == bits(row)
            filler = torch.full((width - len(row), *row.shape[1:]), schema[name].pad_value, dtype=row.dtype)
            assert bits(out[len(row) :]) == bits(filler)
    if padded:
        expect_rows(
            from_padded(schema, padded, lengths),
            schema.subset(padded),
            {name: data[name] for name in schema if name in padded},
            range(num_rows),
        )


@st.composite
def cuts(draw, num_rows):
    """Row ranges of consecutive blocks."""
    inner = draw(st.lists(st.integers(0, num_rows), max_size=3))
    edges = [0, *sorted(inner), num_rows]
    return list(zip(edges[:-1], edges[1:], strict=True))


@modest
@given(rows_by_field(), st.booleans(), st.data())
def test_blocks_give_back_any_rows_in_any_order(case, checksum, draw):
    """Fields in two sets written apart, each cut into blocks of its own; rows wanted shuffled and repeated."""
    schema, num_rows, data = case
    batch = pack(schema, data, num_rows)
    names = list(schema)
    split = draw.draw(st.integers(0, len(names)))
    indices = draw.draw(st.lists(st.integers(0, num_rows - 1), max_size=8)) if num_rows else []
    layouts, views, sources = [], [], []
    for written in (names[:split], names[split:]):
        part = pack(schema.subset(written), {name: batch[name] for name in written}, num_rows)
        where = np.zeros((num_rows, 3), dtype=np.int64)  # block, row, first token
        for start, stop in draw.draw(cuts(num_rows)):
            block = encode_block(part, start, stop, checksum=checksum)
            assert tuple(len(p) for p in block.parts) == block.layout.part_bytes
            where[start:stop, 0] = len(layouts)
            where[start:stop, 1] = np.arange(stop - start)
            where[start:stop, 2] = 0 if block.row_starts is None else block.row_starts
            layouts.append(block.layout)
            views.append(dict(enumerate(through_one_buffer(block))))
        found = where[indices] if indices else where[:0]
        block_of, row = found[:, 0].astype(np.int32), found[:, 1].astype(np.int32)
        sources.append(RowSource(tuple(written), block_of, row, found[:, 2].copy()))
    lengths = np.zeros(num_rows, dtype=np.int64) if batch.lengths is None else batch.lengths
    wanted = schema.subset(draw.draw(st.permutations(names)))
    seed = 0 if checksum else None
    out = assemble(wanted, lengths[indices] if indices else lengths[:0], sources, layouts, views, seed=seed)
    expect_rows(out, wanted, data, indices)
    if checksum:
        for source in sources:
            for number in set(source.block.tolist()):
                verify(schema.subset(source.fields), source, number, layouts[number], views[number])


def through_one_buffer(block):
    """The parts as a reader sees them: read-only views of one buffer, laid end to end."""
    buffer = np.zeros(block.layout.nbytes, dtype=np.uint8)
    for part, offset in zip(block.parts, block.layout.offsets, strict=True):
        assert offset % 64 == 0
        buffer[offset : offset + len(part)] = part
    buffer.flags.writeable = False
    sizes = zip(block.layout.offsets, block.layout.part_bytes, strict=True)
    return [buffer[offset : offset + nbytes] for offset, nbytes in sizes]


@modest
@given(rows_by_field())
def test_header_tells_schema_rows_and_lengths(case):
    schema, num_rows, data = case
    batch = pack(schema, data, num_rows)
    block = encode_block(batch, 0, num_rows, checksum=False)
    found, rows, lengths = read_header(block.parts[0])
    assert dict(found) == dict(schema) and rows == num_rows
    assert tuple(found) == block.layout.fields
    if batch.lengths is None:
        assert lengths is None
    else:
        assert lengths is not None and lengths.tolist() == batch.lengths.tolist()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_through_every_step(dtype):
    """hypothesis picks dtypes at random; this leaves none out."""
    schema = Schema(
        [
            Field("flat", Kind.PER_TOKEN, dtype, pad_value=1),
            Field("routed", Kind.PER_TOKEN, dtype, (3, 2)),
            Field("sample", Kind.PER_SAMPLE, dtype, (5,)),
            Field("image", Kind.RAGGED, dtype, ndim=2),
        ]
    )
    rng = np.random.default_rng(0)
    lengths = [3, 0, 7]
    data = {
        "flat": [random_bits(rng, dtype, (n,)) for n in lengths],
        "routed": [random_bits(rng, dtype, (n, 3, 2)) for n in lengths],
        "sample": [random_bits(rng, dtype, (5,)) for _ in lengths],
        "image": [random_bits(rng, dtype, shape) for shape in ((2, 3), (0, 4), (1, 1))],
    }
    batch = pack(schema, data)
    block = encode_block(batch, 0, 3, checksum=True)
    assert block.row_starts is not None
    order = np.array([2, 0, 1, 2], dtype=np.int32)
    source = RowSource(tuple(schema), np.zeros(4, dtype=np.int32), order, block.row_starts[order])
    views = dict(enumerate(through_one_buffer(block)))
    verify(schema, source, 0, block.layout, views)
    out = assemble(schema, np.array(lengths)[order], [source], [block.layout], [views], seed=0)
    expect_rows(out, schema, data, order)
    padded, found = to_padded(out, multiple_of=4)
    expect_rows(
        from_padded(schema, padded, found),
        schema.subset(["flat", "routed"]),
        {"flat": data["flat"], "routed": data["routed"]},
        order,
    )
    expect_rows(concat([out, select_rows(out, [])]), schema, data, order)


def test_large_columns_come_back_whole():
    """From 4 MiB on columns are allocated in another way."""
    schema = Schema(
        [Field("ids", Kind.PER_TOKEN, torch.int32), Field("image", Kind.PER_SAMPLE, torch.uint8, (600, 500))]
    )
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 200_000, 16)
    data = {
        "ids": [torch.from_numpy(rng.integers(0, 1000, n, dtype=np.int32)) for n in lengths],
        "image": [torch.from_numpy(rng.integers(0, 256, (600, 500), dtype=np.uint8)) for _ in lengths],
    }
    batch = pack(schema, data)
    order = rng.permutation(16)
    expect_rows(select_rows(batch, order), schema, data, order)
    column = concat([batch, batch])["ids"]
    assert isinstance(column, Jagged) and bits(column.values) == bits(torch.cat(data["ids"] * 2))
