"""Hosts a pool of GPUs: starts or joins a Ray cluster, starts the pool's actor, serves its figures, and stops both."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ....dataplane.owned_folder import pid_space, process_start
from ...cluster.ray_cluster import MIN_OBJECT_STORE_MIB, Cluster, CpuDemand
from ...errors import UserError
from ...observe.prometheus import STATUS_TIMEOUT_S, PrometheusEndpoint, labelled
from ..state.pool import PoolBounds
from ..state.status import PooledGpu, PoolFigures, PoolStatus
from .actor import PoolActor, PoolSetup
from .bundles import reserve_pool
from .client import NAMESPACE, PoolClient, PoolLost, actor_name
from .folder import AUTH_MODE, SERVER, ServedPool, write_pool


class PoolCollector(Collector):
    """Asks the pool for its figures at each scrape. Thread-safe, because every scrape has its own thread."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client
        self._lock = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        try:
            with self._lock:  # Scrapes that pile up must not fill the pool's queue of calls.
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
    text = "Orders to put engines to sleep or wake them."
    yield labelled("pool_orders", text, "outcome", figures.orders, CounterMetricFamily)
    yield CounterMetricFamily(
        "pool_plan_rejected", "Plans that were dropped because they broke a check.", value=figures.num_rejected
    )


CALLS = 1 << 12
"""Number of calls that a pool's actor answers at the same time; most of them are long polls."""
RESERVE_S = 60.0
"""Seconds within which Ray must have given the pool all GPUs of its cluster."""


@contextmanager
def served_pool(
    folder: Path,
    *,
    name: str,
    num_gpus: int | None,
    address: str | None,
    num_cpus: int | None,
    prometheus_port: int | None = None,
    trusted_network: bool = False,
) -> Iterator[ServedPool]:
    """Context manager that starts a pool, or restarts it from its journal in `folder`, and stops it at the end.
    num_gpus: number of GPUs, which are plain numbers without devices in a cluster without GPUs; None for the GPUs of
    the cluster, which are reserved in Ray for as long as the pool exists. address: Ray cluster to join; None starts one
    with `num_cpus` logical CPUs (None: those of this machine). prometheus_port: port on loopback at which the pool's
    figures are served; 0 for any free one, None for none. trusted_network: whether the cluster may be one that asks for
    no token. Raises UserError if it may not, if the cluster has a pool of this name already, if its number of GPUs
    differs, if other programs hold some of them, or if the port is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cluster = _cluster(address, num_cpus, trusted_network)
    held = ExitStack()
    try:
        present = int(ray.cluster_resources().get("GPU", 0))
        if num_gpus is None and not present:
            raise UserError("--gpus: not set, expected a number, because the Ray cluster has no GPU")
        if num_gpus is not None and present and num_gpus != present:
            raise UserError(f"--gpus: got {num_gpus}, expected {present}, the number of GPUs of the Ray cluster")
        num_gpus = num_gpus or present
        reserved = reserve_pool(name, RESERVE_S, held) if present else ()
        actor = start_actor(folder, name, num_gpus, reserved)
        try:
            address, mode = ray.get_runtime_context().gcs_address, os.environ.get(AUTH_MODE, "disabled")
            assert address is not None, "Ray has been started above"
            own = os.getpid()
            served = ServedPool(name, address, mode, own, num_gpus, pid_space(), process_start(own))
            collector = PoolCollector(PoolClient(name))
            with PrometheusEndpoint(collector, "127.0.0.1", prometheus_port, folder, "--prometheus-port"):
                write_pool(folder, served)
                yield served
        finally:
            (folder / SERVER).unlink(missing_ok=True)
            ray.kill(actor, no_restart=True)
    finally:
        held.close()
        cluster.close()


def _cluster(address: str | None, num_cpus: int | None, trusted_network: bool) -> Cluster:
    """Connect this process to the Ray cluster at `address`, or start a cluster; see `served_pool`."""
    return Cluster(
        address=address,
        num_cpus=num_cpus,
        demand=CpuDemand(0, 0, 0),
        namespace=NAMESPACE,
        object_store_mib=MIN_OBJECT_STORE_MIB,
        trusted_network=trusted_network,
    )


def start_actor(folder: Path, name: str, num_gpus: int, reserved: Sequence[PooledGpu] = ()) -> Any:
    """Start the actor of a pool in the Ray cluster that this process has joined; returns Ray's handle of it. reserved:
    where each GPU is; () for GPUs that are numbers only. Raises UserError if the cluster has a pool of this name
    already."""
    setup = PoolSetup(name, str(folder.absolute()), num_gpus, PoolBounds(), tuple(reserved))
    options = {"name": actor_name(name), "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": -1}
    try:
        actor = ray.remote(PoolActor).options(**options, max_concurrency=CALLS).remote(setup)
        PoolClient(name).status()
    except ValueError as error:
        raise UserError(f"pool: the Ray cluster has a pool named {name!r} already ({error})") from error
    return actor


@contextmanager
def joined(served: ServedPool) -> Iterator[PoolClient]:
    """Context manager that connects to a pool's cluster and yields a client of the pool."""
    cluster = _cluster(served.address, None, True)  # Its network was judged when the pool started.
    try:
        yield PoolClient(served.name)
    finally:
        cluster.close()


def status_lines(status: PoolStatus) -> list[str]:
    """Return what `headrace pool status` prints."""
    lines = [
        f"pool {status.name}: {len(status.gpus)} GPU(s), {len(status.tenants)} tenant(s), {status.age_s:.0f} s old"
    ]
    places = [f"{gpu.host} {gpu.number}: " for gpu in status.reserved] or [""] * len(status.gpus)
    lines += [
        f"  GPU {gpu:<4} {place}{holder}" for gpu, (place, holder) in enumerate(zip(places, status.gpus, strict=True))
    ]
    for tenant in status.tenants:
        if not tenant.train_gpus:
            lines.append(f"  {tenant.name}: {len(tenant.shards)} engine(s), for runs with pool.engines=shared")
            continue
        awake = sum(len(tenant.shards[shard]) for shard in tenant.awake)
        left = "unknown" if tenant.remaining is None else str(tenant.remaining)
        trains = ", trains" if tenant.trains else ""
        lines.append(
            f"  {tenant.name}: {len(tenant.awake)} of {len(tenant.shards)} engines awake on {awake} GPU(s){trains}; "
            f"{left} groups left, {tenant.work_share:.0%} of the work (driver pid {tenant.driver})"
        )
        if tenant.suspect:
            lines.append(f"    is being ended: {tenant.suspect}")
    for wait in status.waits:
        freed = f" (freed by {wait.freed_by})" if wait.freed_by else ""
        lines.append(f"  {wait.who} waits for {wait.what}, for {wait.since_s:.1f} s{freed}")
    if status.num_rejected:
        lines.append(f"  {status.num_rejected} plan(s) broke a check and were dropped: {'; '.join(status.rejected)}")
    return lines + [f"  {trouble}" for trouble in status.troubles]
