"""Distinct values: as numpy finds them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.codecs.integers import distinct, distinct_counts


@given(st.lists(st.integers(-5, 20)), st.booleans(), st.sampled_from([np.int64, np.int32]))
def test_as_numpy(values: list[int], ascending: bool, dtype: type) -> None:
    column = np.array(sorted(values) if ascending else values, dtype)
    before = column.copy()
    expected, counts = np.unique(column, return_counts=True)
    found, found_counts = distinct_counts(column)
    assert distinct(column).tolist() == found.tolist() == expected.tolist()
    assert found_counts.tolist() == counts.tolist()
    assert (column == before).all() and found.dtype == dtype
