"""Serves a run's metrics to Prometheus over HTTP, from the driver.

A scrape returns the metrics of the last finished step, the data-plane calls reported so far, and the current content of
the data plane. The content shows, even while a step hangs, whether rows or consumers are waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...actors.rollout.evaluation_metrics import EXACT_MATCH, REWARD
from ...dataplane.errors import DataPlaneError
from ...dataplane.listen_address import join_host
from ...dataplane.traffic import EDGES, STEPS_PER_OCTAVE, Traffic, at_most
from ..config.config import LoggingConfig
from ..errors import UserError
from .data_plane_watch import DataPlaneWatch
from .metrics import time_split

STATUS_TIMEOUT_S = 2.0
"""Seconds that a scrape waits for an answer of the data plane's directory. Together with the RPC link's grace period,
the wait stays below the usual Prometheus timeout of 10 s."""
END_TIMEOUT_S = 5.0

STEP_GAUGES = (
    ("headrace_reward_mean", "reward/mean", "Mean reward of the step's rows that did not fail."),
    ("headrace_validation_exact_match", EXACT_MATCH, "Held-out exact match of the last validation."),
    ("headrace_validation_reward", REWARD, "Held-out mean reward of the last validation."),
    ("headrace_loss", "train/loss", "Loss of the step."),
    ("headrace_grad_norm", "train/grad_norm", "Gradient norm of the step before clipping."),
    ("headrace_reference_kl", "train/reference_kl", "KL to the reference model."),
    ("headrace_response_tokens_mean", "rollout/response_length_mean", "Mean tokens of the step's responses."),
    ("headrace_failed_rows", "rollout/failed_rows", "Rows of the step that were masked."),
    ("headrace_staleness_mean", "staleness/mean", "Versions between a row's oldest token and the policy, on average."),
    ("headrace_staleness_max", "staleness/max", "Policy versions between the oldest token trained on and the policy."),
    ("headrace_policy_version", "policy/version", "Policy version that the engines serve."),
    ("headrace_step_seconds", "time/step_s", "Seconds of the step, without its validation."),
    ("headrace_rollout_tokens_per_second", "rollout/tokens_per_s", "Response tokens per second of the rollout stage."),
    ("headrace_engines", "engine/count", "Engines of the run."),
    ("headrace_sync_engines_left_out", "sync/engines_left_out", "Engines that do not serve the newest version."),
    ("headrace_actors_replaced", "rollout/actors_replaced", "Rollout actors and engines that died and were replaced."),
    ("headrace_restarts", "run/restarts", "Times that the run restarted from its last checkpoint by itself."),
    ("headrace_driver_bytes_per_row", "driver/bytes_per_row", "Bytes through the driver for each row of the step."),
)
"""Gauges as (name, key in metrics.jsonl, help text). Each shows the value of the last step with that key."""

GROUP_COUNTS = {
    "dropped": "rollout/groups_dropped",
    "stale": "rollout/groups_stale",
    "surplus": "rollout/groups_surplus",
    "reissued": "rollout/groups_reissued",
}
"""Value of the label `fate` -> key in metrics.jsonl. The keys count groups of a step that were not trained on or were
issued again. They are exported as sums over steps, because scrapes miss most steps.
"""
QUEUE = {"ready": "queue/groups_ready", "in_flight": "queue/groups_in_flight"}

STATUS_GAUGES = (
    ("headrace_dataplane_rows", "rows", "Rows that are put and not cleared."),
    ("headrace_dataplane_leases", "leases", "Claims that are not released in full."),
    ("headrace_dataplane_leased_rows", "leased_rows", "Rows of claims that are not released."),
    ("headrace_dataplane_oldest_lease_seconds", "oldest_lease_s", "Age of the oldest lease; 0 without leases."),
    ("headrace_dataplane_waiting_claims", "waiting_claims", "Claims that wait for rows."),
    ("headrace_dataplane_waiting_puts", "waiting_puts", "Puts that wait for room."),
    ("headrace_dataplane_used_bytes", "bytes_used", "Bytes of committed blocks."),
    ("headrace_dataplane_reserved_bytes", "bytes_reserved", "Bytes reserved for puts in flight."),
    ("headrace_dataplane_unfreed_bytes", "bytes_unfreed", "Bytes of cleared blocks that the store still holds."),
    ("headrace_dataplane_credit_bytes", "bytes_credit", "Bytes set aside for writers' next puts."),
    ("headrace_dataplane_capacity_bytes", "bytes_capacity", "Bytes that the data plane can hold."),
)
"""Gauges of the data plane as (name, field of DataPlaneStatus, help text)."""


class RunCollector(Collector):
    """Collects the metrics for each scrape. Thread-safe, because every scrape has its own thread."""

    def __init__(self, run_name: str, judged: str) -> None:
        """judged: key of the metric that `validation.metric` names; it is exported as `headrace_validation`."""
        self._run_name = run_name
        self._judged = judged
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {}
        self._groups = dict.fromkeys(GROUP_COUNTS, 0.0)
        self._step: tuple[int, float] | None = None
        self._watch: DataPlaneWatch | None = None

    def watch(self, watch: DataPlaneWatch) -> None:
        """Include the data plane that `watch` observes in all later scrapes."""
        with self._lock:
            self._watch = watch

    def publish(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Publish the metrics of a finished step. Metrics that the step lacks, such as validation metrics, keep their
        last value."""
        with self._lock:
            self._metrics.update({key: value for key, value in metrics.items() if value is not None})
            for fate, key in GROUP_COUNTS.items():
                self._groups[fate] += metrics.get(key) or 0.0
            self._step = (step, time.time())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            metrics, groups, step, watch = dict(self._metrics), dict(self._groups), self._step, self._watch
        yield labelled("headrace_run_info", "The run, by its name.", "name", {self._run_name: 1.0})
        if step is not None:
            yield GaugeMetricFamily("headrace_step", "Steps finished.", step[0])
            yield GaugeMetricFamily(
                "headrace_last_step_timestamp_seconds", "Unix time at which the last step was finished.", step[1]
            )
            yield from step_families(metrics)
            yield labelled(
                "headrace_validation",
                "Figure of the last validation that validation.metric names.",
                "metric",
                {key: metrics[key] for key in (self._judged,) if key in metrics},
            )
            yield from group_families(metrics, groups)
        if watch is not None:
            yield from call_families(watch.total())
            yield from status_families(watch)


def step_families(metrics: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the Prometheus metrics of the last step. metrics: the step's values, under their keys in metrics.jsonl."""
    for name, key, text in STEP_GAUGES:
        if key in metrics:
            yield GaugeMetricFamily(name, text, metrics[key])
    sides = {side: metrics[f"idle/{side}"] for side in ("rollout", "train") if f"idle/{side}" in metrics}
    yield labelled("headrace_idle_share", "Share of the step in which this side did nothing.", "side", sides)
    yield labelled("headrace_stage_seconds", "Seconds of the step by stage.", "stage", time_split(metrics))


def group_families(metrics: Mapping[str, float], counts: Mapping[str, float]) -> Iterator[Metric]:
    """Yield the Prometheus metrics of queued groups, of rows' staleness, and of dropped or reissued groups. Dropped
    groups were not trained on. counts: numbers of dropped and reissued groups since the run started, under the labels
    of GROUP_COUNTS.
    """
    yield labelled(
        "headrace_queue_groups",
        "Groups issued and not claimed, and those of them that are ready, at the step's end.",
        "state",
        {state: metrics[key] for state, key in QUEUE.items() if key in metrics},
    )
    prefix = "staleness/share_"
    shares = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    yield labelled("headrace_staleness_share", "Share of the step's rows by staleness.", "versions", shares)
    text = "Groups that were not trained on, or issued again."
    yield labelled("headrace_groups", text, "fate", counts, CounterMetricFamily)


def call_families(total: Traffic) -> Iterator[Metric]:
    """Yield the Prometheus metrics of all clients' data-plane calls. They are seconds, bytes, and fitted costs per call
    and per byte."""
    seconds = HistogramMetricFamily(
        "headrace_dataplane_call_seconds", "Seconds of data-plane calls, waits included.", labels=["op"]
    )
    for op, calls in total.ops.items():
        counts = at_most(calls.buckets)[::STEPS_PER_OCTAVE]
        edges = [f"{edge:.10g}" for edge in EDGES[::STEPS_PER_OCTAVE]]
        seconds.add_metric([op], [*zip(edges, counts, strict=True), ("+Inf", calls.calls)], calls.seconds)
    yield seconds
    moved = {op: calls for op, calls in total.ops.items() if calls.nbytes}
    counts = {op: calls.nbytes for op, calls in moved.items()}
    yield labelled("headrace_dataplane_bytes", "Bytes moved by data-plane calls.", "op", counts, CounterMetricFamily)
    known = {op: line for op, calls in moved.items() if (line := calls.cost_line()) is not None}
    yield labelled(
        "headrace_dataplane_fixed_seconds",
        "Seconds of a call that moves next to nothing (least squares; absent while undetermined).",
        "op",
        {op: line.fixed_s for op, line in known.items()},
    )
    yield labelled(
        "headrace_dataplane_bandwidth_bytes_per_second",
        "Bytes per second beyond a call's fixed cost (least squares; absent while undetermined).",
        "op",
        {op: line.bytes_per_s for op, line in known.items()},
    )


def status_families(watch: DataPlaneWatch) -> Iterator[Metric]:
    """Yield the Prometheus metrics of the data plane's current content. If the data plane's directory does not answer,
    yield only `headrace_dataplane_up` with the value 0."""
    try:
        status = watch.status(STATUS_TIMEOUT_S)
    except DataPlaneError:
        status = None
    yield GaugeMetricFamily(
        "headrace_dataplane_up", "1 when the directory answered this scrape, else 0.", float(status is not None)
    )
    if status is not None:
        for name, field, text in STATUS_GAUGES:
            yield GaugeMetricFamily(name, text, getattr(status, field))


def labelled(
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> GaugeMetricFamily | CounterMetricFamily:
    """Return the gauge or counter `name` with one value per value of the label `label`."""
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class PrometheusEndpoint:
    """Context manager that serves metrics while it is open."""

    def __init__(self, collector: Collector, host: str, port: int | None, folder: Path, key: str) -> None:
        """Start listening and write the endpoint's URL to `folder`/prometheus.txt, which is deleted on closing.

        port: port on `host`; 0 picks a free port, and None serves nothing. key: name of the setting of the port, for
        error messages. Raises UserError if the port is not available.
        """
        self.address = ""
        """URL to scrape; "" if nothing is served."""
        self._file = folder / "prometheus.txt"
        self._serving = None
        self._file.unlink(missing_ok=True)  # A process that was killed can have left the file.
        if port is None:
            return
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._serving = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UserError(
                f"{key}: got {port} on {host!r}, expected a port that is free there ({error.strerror or error})"
            ) from error
        self.address = f"http://{join_host(host, self._serving[0].server_port)}/metrics"
        self._file.write_text(self.address + "\n", encoding="utf-8")

    def close(self) -> None:
        """Stop listening. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            server, thread = serving
            self._file.unlink(missing_ok=True)
            server.shutdown()
            server.server_close()
            thread.join(END_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunEndpoint(PrometheusEndpoint):
    """Context manager that serves a run's metrics while it is open, if `logging.prometheus_port` is set."""

    def __init__(self, run: str, judged: str, logging: LoggingConfig, folder: Path) -> None:
        """run: name of the run. judged: full key of the metric by which models are judged. folder: the run folder."""
        self.run = RunCollector(run, judged)
        super().__init__(self.run, logging.prometheus_host, logging.prometheus_port, folder, "logging.prometheus_port")
