"""Tests what a pool tells of itself: the lines of `headrace pool status`, and its figures over real HTTP."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from headrace.trainers.observe.prometheus import PrometheusEndpoint
from headrace.trainers.pool.server.client import PoolLost
from headrace.trainers.pool.server.server import PoolCollector, status_lines
from headrace.trainers.pool.state.status import PooledGpu, PoolFigures, PoolStatus


def test_status_tells_where_each_gpu_is_unless_they_are_numbers_only() -> None:
    reserved = (PooledGpu("north", "n", 0, "GPU-a", 1), PooledGpu("south", "s", 0, "0", 0))
    status = PoolStatus("p", 5.0, ("a train", "idle"), (), (), (), 0, 77, reserved)
    assert status_lines(status)[1:] == ["  GPU 0    north 0: a train", "  GPU 1    south 0: idle"]
    numbers = PoolStatus("p", 5.0, ("a train", "idle"), (), (), (), 0, 77, ())
    assert status_lines(numbers)[1:] == ["  GPU 0    a train", "  GPU 1    idle"]


DOCS = Path(__file__).parents[4] / "docs"
FIGURES = PoolFigures(
    num_gpus=2, holders=((0, "math", "train"),), gaps={"math": -0.25, "code": 0.25},
    waits=(("code", "training", 3.5),), switches={"sleep": (4, 1.5)}, orders={"done": 7, "failed": 1, "void": 0},
    num_rejected=2,
)  # fmt: skip


class FakePool:
    lost = False

    def figures(self, timeout_s: float) -> PoolFigures:
        assert 0 < timeout_s < 5
        if self.lost:
            raise PoolLost("gone")
        return FIGURES


def scrape(address: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_a_scrape_has_the_pool_s_figures_and_tells_when_it_is_gone(tmp_path: Path) -> None:
    pool: Any = FakePool()
    with PrometheusEndpoint(PoolCollector(pool), "127.0.0.1", 0, tmp_path, "--prometheus-port") as endpoint:
        assert (tmp_path / "prometheus.txt").read_text().strip() == endpoint.address
        found = scrape(endpoint.address)
        pool.lost = True
        assert scrape(endpoint.address) == {("pool_up",): 0.0}
    assert found == {
        ("pool_up",): 1.0, ("pool_gpus",): 2.0, ("pool_gpu_state", "0", "train", "math"): 1.0,
        ("pool_gap", "math"): -0.25, ("pool_gap", "code"): 0.25, ("pool_wait_seconds", "training", "code"): 3.5,
        ("pool_switch_seconds_count", "sleep"): 4.0, ("pool_switch_seconds_sum", "sleep"): 1.5,
        ("pool_orders_total", "done"): 7.0, ("pool_orders_total", "failed"): 1.0, ("pool_orders_total", "void"): 0.0,
        ("pool_plan_rejected_total",): 2.0,
    }  # fmt: skip
    documented = set(re.findall(r"`(pool_[a-z_]+)", (DOCS / "scale" / "time-sharing.md").read_text())) - {"pool_trace"}
    assert {name.removesuffix("_count").removesuffix("_sum") for name, *_ in found} == documented
