"""Metadata messages: dataclasses, enums and arrays come back as what they were."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.gather import RowSource
from headrace.codecs.messages import decode, encode
from headrace.codecs.schema import Field, Kind, Schema


class Outcome(enum.StrEnum):
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Inner:
    outcome: Outcome
    layout: BlockLayout
    source: RowSource


@dataclass(frozen=True, slots=True)
class Outer:
    inner: tuple[Inner, ...]
    tags: Mapping[str, np.ndarray]
    schema: Schema
    location: bytes
    lengths: np.ndarray | None = None
    deadline_s: float | None = None


def outer(**changes):
    source = RowSource(("ids",), np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.arange(3))
    inner = Inner(Outcome.DONE, BlockLayout(("ids",), 3, 9, (64, 36)), source)
    schema = Schema([Field("ids", Kind.PER_TOKEN, torch.int32, (2,), pad_value=-1), Field("log", Kind.OBJECT)])
    return Outer((inner,), MappingProxyType({"reward": np.array([0.5, np.nan])}), schema, b"\0\xff", **changes)


def test_nested_dataclasses():
    for message in (outer(), outer(lengths=np.arange(4), deadline_s=1.5)):
        got = decode(encode(message), Outer)
        assert isinstance(got, Outer) and isinstance(got.inner[0], Inner)
        assert got.inner[0].outcome is Outcome.DONE
        assert got.inner[0].layout == message.inner[0].layout
        assert got.schema == message.schema and got.location == message.location
        np.testing.assert_array_equal(got.tags["reward"], message.tags["reward"])
        assert got.inner[0].source.row.dtype == np.int32
        assert (got.lengths is None) == (message.lengths is None) and got.deadline_s == message.deadline_s


@settings(max_examples=100)
@given(
    hnp.arrays(
        st.one_of(
            hnp.integer_dtypes(),
            hnp.unsigned_integer_dtypes(),
            hnp.floating_dtypes(),
            hnp.boolean_dtypes(),
            hnp.unicode_string_dtypes(max_len=4),
            hnp.byte_string_dtypes(max_len=4),
        ),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
def test_arrays_keep_dtype_shape_and_bits(array):
    got = decode(encode({"a": array}), dict[str, np.ndarray])["a"]
    assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
    assert got.flags.owndata and got.flags.writeable and got.flags.aligned


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["math", "", "code"]) | st.text(st.characters(exclude_categories=("Cs",)), max_size=5)))
def test_columns_of_text_travel(texts):
    column = np.array(texts, dtype=object)
    got = decode(encode({"a": column}), dict[str, np.ndarray])["a"]
    assert got.dtype == object and got.tolist() == texts


def test_texts_that_repeat_take_a_byte_or_two_each():
    few = np.array([("math", "code")[number % 2] for number in range(1000)], dtype=object)
    many = np.array([f"source {number % 300}" for number in range(1000)], dtype=object)
    assert len(encode(few)) < 1050 and len(encode(many)) < 2000 + 300 * 12
    with pytest.raises(ValueError, match="damaged column of text"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"abc")), np.ndarray)


def test_strided_arrays_and_scalars():
    array = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(decode(encode(array[::2, ::-1]), np.ndarray), array[::2, ::-1])
    assert decode(encode([np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a")]), list) == [0.5, 3, True, "a"]


def test_small_messages_stay_small():
    array = np.arange(64, dtype=np.int32)
    assert len(encode(array)) <= array.nbytes + 10


@pytest.mark.parametrize("value", [object(), torch.zeros(2), np.array([object()]), np.zeros(2, dtype=complex)])
def test_what_does_not_travel(value):
    with pytest.raises(TypeError, match="message: cannot encode"):
        encode({"a": value})


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_damaged_messages(cut):
    data = encode(outer())
    with pytest.raises(ValueError, match="message: [0-9]+ bytes are not a Outer"):
        decode(data[:cut], Outer)


def test_another_type_is_refused():
    with pytest.raises(ValueError, match="not a Inner"):
        decode(encode(outer()), Inner)
    with pytest.raises(ValueError, match="got list, expected ndarray"):
        decode(encode([1, 2]), np.ndarray)
    with pytest.raises(ValueError, match="not a numpy array"):
        decode(b"\xd4\x05\x00", np.ndarray)
    with pytest.raises(ValueError, match="damaged numpy array"):
        decode(b"\xc7\x05\x01\x02\xff<4ab", np.ndarray)


def test_a_damaged_schema_is_no_message() -> None:
    whole = Schema([Field("x", Kind.RAGGED, torch.uint8, ndim=2)])
    [field] = whole.to_list()
    for name in field.keys() - {"shared", "parts"}:  # which journals and files of earlier versions lack
        with pytest.raises(ValueError, match="are not a Schema"):
            decode(encode([{key: value for key, value in field.items() if key != name}]), Schema)


@pytest.mark.parametrize("num_rows", [1, 8, 100])
@pytest.mark.parametrize("spread", [0, 200, 60_000, 1 << 31, 1 << 62])
@pytest.mark.parametrize("low", [0, -5, -(1 << 63)])
def test_integers_travel_in_as_few_bytes_as_they_need(num_rows: int, spread: int, low: int) -> None:
    values = np.full(num_rows, low, dtype=np.int64)
    values[-1] = low + spread
    data = encode(values)
    found = decode(data, np.ndarray)
    assert found.dtype == np.int64 and found.tolist() == values.tolist()
    width = 1 if num_rows == 1 else next(width for width in (1, 2, 4, 8) if spread < 1 << (8 * width))
    assert len(data) <= 9 + num_rows * width + 6
    assert len(decode(encode(values[:0]), np.ndarray)) == 0
