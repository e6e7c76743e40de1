"""Latency histograms against numpy's percentiles of the very numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.dataplane.traffic import EDGES, NUM_BUCKETS, at_most, bucket_of, percentile

RESOLUTION = 2**0.25


def counted(seconds: np.ndarray) -> list[int]:
    counts = [0] * NUM_BUCKETS
    for value in seconds:
        counts[bucket_of(float(value))] += 1
    return counts


@pytest.mark.parametrize("num_calls", [1, 2, 7, 100, 5000])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("spread", [0.01, 0.5, 2.0])
def test_percentiles_are_numpys_within_a_buckets_width(num_calls: int, share: float, spread: float) -> None:
    seconds = np.random.default_rng(num_calls).lognormal(math.log(1e-3), spread, num_calls)
    exact = float(np.quantile(seconds, share, method="inverted_cdf"))
    found = percentile(counted(seconds), share)
    assert exact / RESOLUTION <= found * (1 + 1e-9) and found <= exact * RESOLUTION * (1 + 1e-9)


def test_percentiles_inside_one_bucket_rise() -> None:
    counts = [0] * NUM_BUCKETS
    counts[40] = 100
    found = [percentile(counts, share) for share in (0.01, 0.5, 0.9, 1.0)]
    assert found == sorted(set(found)) and EDGES[39] < found[0] and found[-1] == EDGES[40]


def test_a_bucket_holds_what_is_at_most_its_edge() -> None:
    for number, edge in enumerate(EDGES):
        assert bucket_of(edge) == number
        assert bucket_of(math.nextafter(edge, math.inf)) == number + 1


def test_what_is_out_of_range_counts_at_the_ends() -> None:
    assert bucket_of(0.0) == bucket_of(1e-9) == 0
    assert bucket_of(1e6) == NUM_BUCKETS - 1
    assert percentile(counted(np.array([1e6])), 0.5) == EDGES[-1]
    assert percentile(counted(np.array([1e-9])), 0.5) == EDGES[0]
    assert math.isnan(percentile([0] * NUM_BUCKETS, 0.5))


def test_counts_at_most_each_edge_leave_out_only_what_is_over_the_last() -> None:
    seconds = np.random.default_rng(0).lognormal(0, 6, 1000)
    counts = at_most(counted(seconds))
    assert len(counts) == len(EDGES)
    for number in (0, 40, 79, 120):
        assert counts[number] == int((seconds <= EDGES[number]).sum())
