"""Groups of a put's rows: as one would read them off the keys one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataplane.directory.partition import Grouping

KEYS = st.lists(st.text(st.sampled_from("ab.é…0"), min_size=1, max_size=6), max_size=12)


@given(KEYS)
@example([".3", "..3", "3", "a.b.c", "a.b.d", "a.b", "a", "a.b.e"])
def test_groups_of_keys(keys: list[str]) -> None:
    expected = [key.rpartition(".")[0] or key for key in keys]
    found = Grouping.of(keys, None)
    assert not found.given and list(found.names) == list(dict.fromkeys(expected))
    assert [found.names[i] for i in found.index.tolist()] == expected


@given(st.lists(st.sampled_from(["x", "y", "é"])))
def test_given_groups(groups: list[str]) -> None:
    found = Grouping.of([f"k{i}" for i in range(len(groups))], groups)
    assert found.given and list(found.names) == list(dict.fromkeys(groups))
    assert [found.names[i] for i in found.index.tolist()] == groups
    assert found.index.dtype == np.int64
