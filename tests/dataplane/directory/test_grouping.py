"""Groups of a put's rows: as one would read them off the keys one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataplane.directory.calls import ClaimRows, Grouping
from headrace.tests.dataplane.directory.directory_puts import GROUP, put
from headrace.tests.dataplane.directory.prompt_rows import FIELDS, claim, opened

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


def test_a_claim_that_waits_for_groups_of_one_row_says_so() -> None:
    directory, wanted = opened("ready_first"), ClaimRows("p", "a", FIELDS, GROUP, True)
    put(directory, ["u_g0"], FIELDS)
    assert "groups of 1 row" not in directory.shortage(wanted), "the group's other row may still come"
    put(directory, ["u_g1"], FIELDS)
    assert claim(directory) is None
    words = "; the rows are in 2 groups of 1 row each; name groups by put(groups=...) or by keys `{prompt}.{sample}`"
    assert directory.shortage(wanted).endswith(words)
    put(directory, ["v_g0", "v_g1"], FIELDS, groups=["v", "v"])
    assert claim(directory) is not None
    assert "groups of 1 row" not in directory.shortage(wanted)
