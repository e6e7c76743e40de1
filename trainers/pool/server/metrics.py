"""Serves the figures of a pool of GPUs to Prometheus over HTTP, from `headrace pool start`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...observe.prometheus import STATUS_TIMEOUT_S, labelled
from ..report.calls import PoolFigures
from .client import PoolClient, PoolLost


class PoolCollector(Collector):
    """Asks the pool for its figures at each scrape. Thread-safe, because every scrape has its own thread."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        try:
            with self._lock:  # scrapes that pile up must not fill the pool's queue of calls
                figures = self._client.figures(STATUS_TIMEOUT_S)
        except PoolLost:
            figures = None
        yield GaugeMetricFamily("pool_up", "1 when the pool answered this scrape, else 0.", float(figures is not None))
        if figures is not None:
            yield from pool_families(figures)


def pool_families(figures: PoolFigures) -> Iterator[Metric]:
    """Yield the Prometheus metrics of a pool."""
    yield GaugeMetricFamily("pool_gpus", "GPUs of the pool.", figures.num_gpus)
    state = GaugeMetricFamily("pool_gpu_state", "1 for the holder of each held GPU.", labels=["gpu", "tenant", "role"])
    for gpu, tenant, role in figures.holders:
        state.add_metric([str(gpu), tenant, role], 1.0)
    yield state
    text = "Share of the work that is left, less the share of the GPUs; above 0 for a tenant with too few GPUs."
    yield labelled("pool_gap", text, "tenant", figures.gaps)
    wait = GaugeMetricFamily(
        "pool_wait_seconds", "Age of the request that waits for GPUs.", labels=["tenant", "priority"]
    )
    for tenant, priority, seconds in figures.waits:
        wait.add_metric([tenant, priority], seconds)
    yield wait
    switch = SummaryMetricFamily("pool_switch_seconds", "Seconds of a stage of switches.", labels=["kind"])
    for kind, (count, seconds) in figures.switches.items():
        switch.add_metric([kind], count, seconds)
    yield switch
    orders = CounterMetricFamily("pool_orders", "Orders to put engines to sleep or wake them.", labels=["outcome"])
    for outcome, count in figures.orders.items():
        orders.add_metric([outcome], count)
    yield orders
    yield CounterMetricFamily(
        "pool_plan_rejected", "Plans that were dropped because they broke a check.", value=figures.num_rejected
    )
