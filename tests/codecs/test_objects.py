"""Objects: exact round trips, and a refusal of everything that msgpack would quietly change."""

import enum
import math
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.objects import MAX_DEPTH, UnstorableObject, decode, encode, encode_column
from headrace.tests.example_counts import examples


class Color(enum.IntEnum):
    RED = 1


def same(a, b):
    """Equal in type, order of keys and every bit of a float."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex() and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return all(map(same, a, b)) and len(a) == len(b) and all(map(same, a.values(), b.values()))
    return a == b


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=20)
)
keys = st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1)
nested = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=15
)


@settings(max_examples=examples(150))
@given(nested)
def test_objects_come_back_exactly(obj):
    assert same(decode(encode(obj)), obj)


def test_message_log():
    log = [{"role": "user", "content": "¿2+2? 四 😀\0"}, {"role": "tool", "content": b"\xff\x00", "calls": {1: [None]}}]
    assert same(decode(encode(log)), log)


@pytest.mark.parametrize(
    ("obj", "sentence"),
    [
        ((1, 2), "object: cannot store tuple, expected str"),
        ({"a": [1, {2}]}, r"object\['a'\]\[1\]: cannot store set"),
        ([np.float64(1.0)], r"object\[0\]: cannot store numpy.float64"),
        ({"r": np.zeros(2)}, r"object\['r'\]: cannot store numpy.ndarray"),
        ([bytearray(b"a")], r"object\[0\]: cannot store bytearray"),
        (OrderedDict(a=1), "object: cannot store collections.OrderedDict"),
        ([Color.RED], r"object\[0\]: cannot store .*Color"),
        ({(1, 2): 3}, r"object: key \(1, 2\) is tuple, expected str or int"),
        ({"x": {True: 3}}, r"object\['x'\]: key True is bool, expected str or int"),
        ({None: 1}, "key None is NoneType"),
    ],
)
def test_other_types_are_refused(obj, sentence):
    with pytest.raises(TypeError, match=sentence):
        encode(obj)


@pytest.mark.parametrize(
    ("obj", "sentence"),
    [
        ([2**64], r"object\[0\]: 18446744073709551616 does not fit 64 bits"),
        ({"a": -(2**63) - 1}, r"object\['a'\]: -9223372036854775809 does not fit"),
        ({2**70: 1}, "does not fit 64 bits"),
        (["\ud800"], r"a string holds '\\ud800', expected valid Unicode text"),
    ],
)
def test_values_that_do_not_fit(obj, sentence):
    with pytest.raises(ValueError, match=sentence):
        encode(obj)


def test_depth_is_bounded():
    deep: list = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert same(decode(encode(deep)), deep)
    circle: list = []
    circle.append(circle)
    for obj in ([deep], circle):
        with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH}"):
            encode(obj)


def test_columns_name_field_and_row():
    data, ends = encode_column("log", ["a", "", None])
    assert ends.tolist() == [2, 3, 4] and len(data) == 4
    with pytest.raises(UnstorableObject, match=r"field 'log', row 1: object: cannot store set") as error:
        encode_column("log", ["a", {1}])
    assert error.value.row == 1


@pytest.mark.parametrize("damaged", [b"", b"\xa5ab", b"\xc0\xc0", b"\xc1"])
def test_damaged_bytes(damaged):
    with pytest.raises(ValueError, match="bytes are not one msgpack object"):
        decode(damaged)
