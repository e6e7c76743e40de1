"""Traffic and its histograms: lines through known points, and sums that do not depend on how calls were split."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.codecs import messages
from headrace.dataplane.traffic import EDGES, MIN_CALLS, NUM_BUCKETS, OpTraffic, Traffic, at_most, bucket_of, percentile

RESOLUTION = 2**0.25


def histogram_of(seconds: np.ndarray) -> list[int]:
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
    found = percentile(histogram_of(seconds), share)
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
    assert percentile(histogram_of(np.array([1e6])), 0.5) == EDGES[-1]
    assert percentile(histogram_of(np.array([1e-9])), 0.5) == EDGES[0]
    assert math.isnan(percentile([0] * NUM_BUCKETS, 0.5))


def test_counts_at_most_each_edge_leave_out_only_what_is_over_the_last() -> None:
    seconds = np.random.default_rng(0).lognormal(0, 6, 1000)
    counts = at_most(histogram_of(seconds))
    assert len(counts) == len(EDGES)
    for number in (0, 40, 79, 120):
        assert counts[number] == int((seconds <= EDGES[number]).sum())


FIXED_S, BYTES_PER_S = 250e-6, 2.5e9


def on_the_line(num_calls: int, *, noise: float = 0.0, seed: int = 0) -> list[tuple[float, int]]:
    """(seconds, bytes) of calls that cost FIXED_S and a second for BYTES_PER_S; `noise` of the seconds."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1_000, 50_000_000, num_calls)
    seconds = (FIXED_S + sizes / BYTES_PER_S) * (1 + noise * rng.standard_normal(num_calls))
    return list(zip(seconds.tolist(), sizes.tolist(), strict=True))


def counted(calls: list[tuple[float, int]]) -> OpTraffic:
    traffic = OpTraffic()
    for seconds, nbytes in calls:
        traffic.count(seconds, nbytes)
    return traffic


def test_least_squares_finds_the_line_that_the_calls_lie_on() -> None:
    line = counted(on_the_line(50)).cost_line()
    assert line is not None
    assert line.fixed_s == pytest.approx(FIXED_S, rel=1e-6)
    assert line.bytes_per_s == pytest.approx(BYTES_PER_S, rel=1e-9)


def test_least_squares_is_numpys_on_calls_that_scatter() -> None:
    calls = on_the_line(400, noise=0.05)
    line = counted(calls).cost_line()
    slope, fixed = np.polyfit([nbytes for _, nbytes in calls], [seconds for seconds, _ in calls], 1)
    assert line is not None
    assert line.bytes_per_s == pytest.approx(1 / slope, rel=1e-9)
    assert line.fixed_s == pytest.approx(max(0.0, fixed), rel=1e-6)


def test_calls_that_move_nothing_are_not_on_the_line() -> None:
    line = counted(on_the_line(50) + [(30.0, 0)] * 5).cost_line()
    assert line is not None and line.fixed_s == pytest.approx(FIXED_S, rel=1e-6)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(on_the_line(MIN_CALLS - 1), id="too few"),
        pytest.param([(1e-3 + 1e-6 * i, 1 << 20) for i in range(100)], id="of one size"),
        pytest.param([(1e-3, 1000 * i) for i in range(1, 100)], id="seconds that do not grow"),
        pytest.param([(1e-3 * (1 + i % 2), 1000 + i % 3) for i in range(99)], id="noise"),
        pytest.param([(1e-9 * (i - 50), 1000 * i) for i in range(51, 200)], id="a fixed cost below 0"),
        pytest.param([(1e-3, 0)] * 100, id="no bytes"),
    ],
)
def test_a_line_that_the_calls_do_not_determine_is_none(calls: list[tuple[float, int]]) -> None:
    assert counted(calls).cost_line() is None


def test_reports_add_up_to_the_whole_however_they_are_split() -> None:
    calls = on_the_line(300, noise=0.02, seed=3)
    whole = counted(calls)
    total = Traffic()
    for start, stop in ((0, 1), (1, 2), (2, 90), (90, 91), (91, 300)):
        part = Traffic()
        for seconds, nbytes in calls[start:stop]:
            part.of("get").count(seconds, nbytes)
        total.merge(Traffic.from_bytes(part.to_bytes()))
    found = total.of("get")
    assert (found.calls, found.nbytes, found.moved) == (whole.calls, whole.nbytes, whole.moved)
    assert found.buckets == whole.buckets
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-6)
    line, expected = found.cost_line(), whole.cost_line()
    assert line is not None and expected is not None
    assert line.bytes_per_s == pytest.approx(expected.bytes_per_s, rel=1e-4)


def test_totals_tell_put_from_what_was_got() -> None:
    traffic = Traffic()
    traffic.of("put").count(0.1, 10)
    traffic.of("get").count(0.1, 20)
    traffic.of("get_keys").count(0.1, 30)
    traffic.of("claim").count(0.1, 0)
    assert (traffic.calls, traffic.bytes_put, traffic.bytes_got) == (4, 10, 50)
    assert Traffic.sum_of([traffic.to_bytes(), b"", traffic.to_bytes()]).bytes_got == 100


def test_a_report_is_small() -> None:
    one, many = Traffic(), Traffic()
    one.of("get").count(1e-3, 100_000)
    for seconds, nbytes in on_the_line(1000):
        many.of("get").count(seconds, nbytes)
    assert len(one.to_bytes()) < 20
    assert len(many.to_bytes()) < 200
    assert Traffic().to_bytes() == b"" and Traffic.from_bytes(b"").ops == {}


@pytest.mark.parametrize(
    "packed",
    [
        ["get", 5, b"\0\0\0", []],
        ["get", 5, bytes(4), [3, 3, 10, 3]],
        ["get", 5, bytes(20), [3, 3, 10]],
        ["get", 5, bytes(20), [3, 3, 122, 3]],
        ["get", 5, bytes(20), [3, 3, -1, 3]],
    ],
)
def test_a_damaged_report_is_refused(packed: list) -> None:
    with pytest.raises(ValueError, match="traffic of 'get'"):
        Traffic.from_bytes(messages.encode([packed]))
    with pytest.raises(ValueError, match="message"):
        Traffic.from_bytes(b"\xc0")


def test_without_calls_there_is_no_percentile() -> None:
    assert math.isnan(OpTraffic().percentile(0.5))
    assert counted([(0.2, 0)] * 3).percentile(0.5) == pytest.approx(0.2, rel=0.19)
