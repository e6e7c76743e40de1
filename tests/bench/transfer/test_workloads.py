"""Tests the transfer benchmark's rows and digests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.bench.transfer.contenders import Mismatch, check, row_digests
from headrace.bench.transfer.workloads import WORKLOADS, LoadSpec, build_load
from headrace.codecs.jagged import pack


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_rows_every_time_and_as_users_hold_them(name: str):
    spec = LoadSpec(name, 1e-9)
    load, again = build_load(spec), build_load(spec)
    digests = row_digests(load.batch)
    check(row_digests(again.batch), digests, "again")
    values = load.tensordict(load.batch)
    check(row_digests({field: values.get(field) for field in load.batch}), digests, "as a TensorDict")
    check(row_digests(pack(load.schema, values)), digests, "packed again")
    assert len(set(load.keys("run"))) == load.num_rows >= load.group_size


def test_sizes_are_those_of_the_description():
    wide, narrow = (build_load(LoadSpec(name, 1 / 32)) for name in ("wide-32", "narrow-1"))
    assert wide.nbytes() == narrow.nbytes() == 8 << 20
    step = build_load(LoadSpec("step", 0.25))
    assert step.batch.lengths is not None and step.batch.lengths.min() >= 1024
    assert step.nbytes(step.batch) == 21 * step.batch.lengths.sum()
    lengths = build_load(LoadSpec("rl-1024")).batch.lengths
    assert lengths is not None and len(lengths) == 1024 and 800 < lengths.mean() < 1200 and lengths.max() <= 8192


def test_digests_see_a_flipped_bit_another_dtype_and_missing_rows():
    rows = {"a": torch.arange(6, dtype=torch.int32).view(3, 2)}
    expected = row_digests(rows)
    flipped = rows["a"].clone()
    flipped.view(torch.uint8)[1, 5] ^= 64
    with pytest.raises(Mismatch, match="field 'a' differs in 1 rows, the first is row 1"):
        check(row_digests({"a": flipped}), expected, "read")
    with pytest.raises(Mismatch, match="differs in 3 rows"):
        check(row_digests({"a": rows["a"].view(torch.float32)}), expected, "read")
    with pytest.raises(Mismatch, match="2 rows, expected 3"):
        check(row_digests({"a": rows["a"][:2]}), expected, "read")
    with pytest.raises(Mismatch, match="fields"):
        check({}, expected, "read")
    check({"a": row_digests(rows)["a"][np.array([2, 0])]}, {"a": expected["a"][np.array([2, 0])]}, "a share")


def test_unknown_workload_and_share():
    with pytest.raises(ValueError, match="workload: got 'rl', expected one of rl-256"):
        build_load(LoadSpec("rl"))
    with pytest.raises(ValueError, match="share"):
        build_load(LoadSpec("rl-256", 0))
