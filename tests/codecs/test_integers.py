"""Distinct values: as numpy finds them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
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


@pytest.mark.processes
def test_distinct_works_while_the_interpreter_ends() -> None:
    """A receipt's `with` can end then, in a generator that was left there."""
    code = (
        "import builtins\nimport numpy as np\nfrom headrace.codecs.integers import distinct\n"
        "class Late:\n"
        "    def __del__(self, find=distinct, rows=np.array([2, 0, 2])):\n"
        "        print(find(rows).tolist())\n"
        "builtins.late = Late()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[0, 2]\n" and not ended.stderr
