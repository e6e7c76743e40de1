"""Packed rows of tokens: padded and back to the bit, and the slices of context-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.gather import copy_runs
from headrace.codecs.jagged import from_padded, pack, to_padded
from headrace.codecs.schema import DTYPES, Field, Kind, Schema
from headrace.codecs.tokens import packed_rows
from headrace.codecs.tokens.packed_rows import chunks, piece_lengths, pieces, slice_batch
from headrace.tests.codecs.random_bits import random_bits
from headrace.tests.example_counts import examples

modest = settings(max_examples=examples(40))
both_ways = pytest.mark.parametrize("rowwise_bytes", [0, 1 << 30], ids=["rowwise", "masked"])


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    plain = tensor.detach().cpu().contiguous()
    return tensor.dtype, tensor.shape, plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@st.composite
def columns(draw: st.DrawFn) -> tuple[Schema, dict[str, list[torch.Tensor]]]:
    """Fields of any dtype and trailing shape, and their rows, none and empty ones among them."""
    lengths = draw(st.lists(st.integers(0, 7), max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    fields, rows = [], {}
    for number in range(draw(st.integers(1, 3))):
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        trailing = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        fields.append(Field(f"f{number}", Kind.PER_TOKEN, dtype, trailing, pad_value=draw(st.integers(0, 1))))
        rows[f"f{number}"] = [random_bits(rng, dtype, (length, *trailing)) for length in lengths]
    return Schema(fields), rows


ONE_TOKEN = (Schema([Field("f0", Kind.PER_TOKEN, torch.bfloat16)]), {"f0": [torch.ones(1, dtype=torch.bfloat16)]})
"""A single token is contiguous, whatever the stride of its column is."""


def by_hand(field: Field, rows: list[torch.Tensor], width: int) -> torch.Tensor:
    """The padded tensor, written row by row."""
    out = torch.full((len(rows), width, *field.trailing), field.pad_value, dtype=field.dtype)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out


@both_ways
@modest
@given(columns(), st.integers(1, 4), st.none() | st.integers(7, 9))
def test_padding_is_what_a_loop_over_rows_writes(rowwise_bytes, case, multiple_of, pad_to):
    schema, rows = case
    longest = max((len(row) for row in rows["f0"]), default=0)
    width = -(-(longest if pad_to is None else pad_to) // multiple_of) * multiple_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_rows, "ROWWISE_BYTES", rowwise_bytes)
        padded, lengths = to_padded(pack(schema, rows), pad_to=pad_to, multiple_of=multiple_of)
    assert lengths.tolist() == [len(row) for row in rows["f0"]]
    for name, field in schema.items():
        assert padded[name].is_contiguous()
        assert bits(padded[name]) == bits(by_hand(field, rows[name], width))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda padded: padded,
    "rows of wider rows": lambda padded: torch.cat([padded, padded], dim=1)[:, : padded.shape[1]],
    "end of wider rows": lambda padded: torch.cat([padded, padded], dim=1)[:, padded.shape[1] :],
    "every second row": lambda padded: padded.repeat_interleave(2, dim=0)[::2],
    "every second token": lambda padded: padded.repeat_interleave(2, dim=1)[:, ::2],
    "tokens first": lambda padded: padded.transpose(0, 1).contiguous().transpose(0, 1),
    "trailing reversed": lambda padded: padded.mT.contiguous().mT if padded.ndim > 3 else padded,
    "part of a larger tensor": lambda padded: torch.cat([padded, padded])[len(padded) :],
}


@both_ways
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@settings(max_examples=examples(10))
@example(ONE_TOKEN, 0)
@given(columns(), st.integers(0, 2))
def test_valid_tokens_come_out_of_any_memory(rowwise_bytes, view, case, extra):
    schema, rows = case
    lengths = [len(row) for row in rows["f0"]]
    width = max(lengths, default=0) + extra
    padded = {name: view(by_hand(field, rows[name], width)) for name, field in schema.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_rows, "ROWWISE_BYTES", rowwise_bytes)
        batch = from_padded(schema, padded, lengths)
    assert batch.lengths is not None and batch.lengths.tolist() == lengths
    for name, field in schema.items():
        values = batch.jagged(name).values
        assert values.is_contiguous()
        assert bits(values) == bits(torch.cat([torch.empty((0, *field.trailing), dtype=field.dtype), *rows[name]]))


@both_ways
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_one_row_for_all_and_tensors_with_grad(monkeypatch: pytest.MonkeyPatch, rowwise_bytes: int, device: str):
    monkeypatch.setattr(packed_rows, "ROWWISE_BYTES", rowwise_bytes)
    schema = Schema([Field("x", Kind.PER_TOKEN, torch.float32), Field("n", Kind.PER_TOKEN, torch.float32)])
    row = torch.arange(5, dtype=torch.float32, device=device).requires_grad_()
    shared = row.expand(3, 5)
    negated = torch.complex(row, row).conj().imag.expand(3, 5)
    assert negated.is_neg(), "it has torch's lazy minus sign, else this tests nothing"
    batch = from_padded(schema, {"x": shared, "n": negated}, [2, 0, 5])
    values = batch.jagged("x").values
    assert values.tolist() == [0, 1, 0, 1, 2, 3, 4] and not values.requires_grad and values.is_cpu
    assert batch.jagged("n").values.tolist() == [-number for number in values.tolist()]
    values[0] = 9
    assert row[0] == 0, "the batch has memory of its own"


def test_what_does_not_fit_is_refused():
    schema = Schema([Field("x", Kind.PER_TOKEN, torch.int32, (2,))])
    for tensor in (torch.zeros(2, 3, 2), torch.zeros(2, 3, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="field 'x': values has"):
            from_padded(schema, {"x": tensor}, [1, 3])
    with pytest.raises(ValueError, match=r"field 'x': got shape \[2, 3, 2\], expected \[2, Lmax"):
        from_padded(schema, {"x": torch.zeros(2, 3, 2, dtype=torch.int32)}, torch.ones(2, 1, dtype=torch.int64))


def test_each_column_of_one_batch_is_copied_in_the_way_of_its_rows(monkeypatch: pytest.MonkeyPatch):
    """The width at which 4-byte tokens are copied row by row, but single bytes and no tokens at all are not."""
    schema = Schema(
        [
            Field("ids", Kind.PER_TOKEN, torch.int32, pad_value=-1),
            Field("mask", Kind.PER_TOKEN, torch.uint8),
            Field("nothing", Kind.PER_TOKEN, torch.uint8, (0,)),
        ]
    )
    rng = np.random.default_rng(0)
    lengths = [packed_rows.ROWWISE_BYTES // 4, 0, 17]
    rows = {
        f.name: [random_bits(rng, f.dtype or torch.uint8, (n, *f.trailing)) for n in lengths] for f in schema.values()
    }
    copied: list[int] = []
    monkeypatch.setattr(packed_rows, "copy_runs", lambda out, *rest: (copied.append(len(out)), copy_runs(out, *rest)))
    padded, found = to_padded(pack(schema, rows))
    for name, field in schema.items():
        assert bits(padded[name]) == bits(by_hand(field, rows[name], lengths[0]))
    batch = from_padded(schema, padded, found)
    for name in schema:
        assert bits(batch.jagged(name).values) == bits(torch.cat(rows[name]))
    assert copied == [4 * sum(lengths)]


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
