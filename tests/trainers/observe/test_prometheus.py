"""Tests the Prometheus endpoint over real HTTP, and that the dashboard and the docs use the metrics that it serves."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.dataplane.errors import DirectoryLost
from headrace.dataplane.status import DataPlaneStatus
from headrace.dataplane.traffic import Traffic
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.observe.prometheus import STEP_GAUGES, RunEndpoint

DOCS = Path(__file__).parents[3] / "docs"
STATUS = DataPlaneStatus({"train": 64}, 64, {"ids": 64}, 2, 32, 1.5, 4, 1000, 200, 5000, 300, 3, 1, 0, "shm", 1000)
STEP = {key: 0.25 for _, key, _ in STEP_GAUGES} | {
    "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.5, "idle/rollout": 0.4, "idle/train": 0.75,
    "staleness/share_0": 0.75, "staleness/share_5_or_more": 0.25, "queue/groups_ready": 3.0,
    "queue/groups_in_flight": 8.0, "rollout/groups_stale": 2.0,
}  # fmt: skip


class FakeWatch:
    """A data plane with 20 gets whose costs are on a line and one claim; its directory can be made to fail."""

    def __init__(self) -> None:
        self.lost = False
        self.rows = 64
        self.traffic = Traffic()
        self.traffic.of("claim").count(3.0, 0)
        for number in range(20):
            nbytes = 1_000_000 * (1 + number)
            self.traffic.of("get").count(2e-3 + nbytes / 1e9, nbytes)

    def total(self) -> Traffic:
        return self.traffic

    def status(self, timeout_s: float) -> DataPlaneStatus:
        assert 0 < timeout_s < 5
        if self.lost:
            raise DirectoryLost("gone", op="status")
        return DataPlaneStatus(**{**vars_of(STATUS), "rows": self.rows})


def vars_of(status: DataPlaneStatus) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__dataclass_fields__}


def opened(config: Config, folder: Path) -> RunEndpoint:
    return RunEndpoint(config.run.name, config.judged_figure, config.logging, folder)


def config(port: int | None = 0, host: str = "127.0.0.1") -> Any:
    return build_config({"run": {"name": "probe"}, "logging": {"prometheus_port": port, "prometheus_host": host}})


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[RunEndpoint]:
    with opened(config(), tmp_path) as endpoint:
        yield endpoint


def scrape(address: str) -> dict[tuple[str, str], float]:
    """Scrape the endpoint; returns the values by (sample name, label values)."""
    with urllib.request.urlopen(address, timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = reply.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value for sample in samples
    }


def full_scrape(endpoint: RunEndpoint) -> dict[tuple[str, str], float]:
    watch: Any = FakeWatch()
    endpoint.run.watch(watch)
    endpoint.run.publish(7, STEP)
    return scrape(endpoint.address)


def test_a_scrape_has_the_last_step_the_calls_and_what_stands_there(endpoint: RunEndpoint) -> None:
    found = full_scrape(endpoint)
    assert found["headrace_run_info", "probe"] == 1
    assert found["headrace_step", ""] == 7 and found["headrace_step_seconds", ""] == 2.0
    assert abs(time.time() - found["headrace_last_step_timestamp_seconds", ""]) < 60
    assert found["headrace_idle_share", "train"] == 0.75 and found["headrace_stage_seconds", "other"] == 0.5
    assert found["headrace_dataplane_call_seconds_count", "get"] == 20
    assert found["headrace_dataplane_call_seconds_sum", "claim"] == 3.0
    assert found["headrace_dataplane_bytes_total", "get"] == 210_000_000
    assert ("headrace_dataplane_bytes_total", "claim") not in found
    assert found["headrace_dataplane_fixed_seconds", "get"] == pytest.approx(2e-3)
    assert found["headrace_dataplane_bandwidth_bytes_per_second", "get"] == pytest.approx(1e9)
    assert found["headrace_dataplane_waiting_claims", ""] == 3 and found["headrace_dataplane_up", ""] == 1


def test_buckets_are_cumulative_and_end_at_all_calls(endpoint: RunEndpoint) -> None:
    found = full_scrape(endpoint)
    edges = {}
    for (name, labels), value in found.items():
        edge, _, op = labels.partition(",")
        if name == "headrace_dataplane_call_seconds_bucket" and op == "get":
            edges[float(edge)] = value
    assert list(edges) == sorted(edges) and list(edges.values()) == sorted(edges.values())
    # 2 ms and one more for every MB: 3 to 22 ms.
    assert (edges[2.048e-3], edges[8.192e-3], edges[16.384e-3], edges[32.768e-3]) == (0, 6, 14, 20)
    assert edges[float("inf")] == 20


def test_before_the_first_step_and_the_data_plane_there_is_only_the_run(endpoint: RunEndpoint) -> None:
    assert {name for name, _ in scrape(endpoint.address)} == {"headrace_run_info"}


def test_what_stands_there_is_asked_for_at_each_scrape_and_its_loss_shows(endpoint: RunEndpoint) -> None:
    watch: Any = FakeWatch()
    endpoint.run.watch(watch)
    assert scrape(endpoint.address)["headrace_dataplane_rows", ""] == 64
    watch.rows = 65
    assert scrape(endpoint.address)["headrace_dataplane_rows", ""] == 65
    watch.lost = True
    found = scrape(endpoint.address)
    assert found["headrace_dataplane_up", ""] == 0
    assert ("headrace_dataplane_rows", "") not in found and ("headrace_dataplane_bytes_total", "get") in found


def test_a_figure_stays_until_a_step_has_it_again(endpoint: RunEndpoint) -> None:
    endpoint.run.publish(1, {"reward/mean": 0.5, "val/exact_match": 0.9, "val/reward": 0.7})
    endpoint.run.publish(2, {"reward/mean": 0.6, "val/exact_match": None})
    found = scrape(endpoint.address)
    assert found["headrace_validation_exact_match", ""] == 0.9 and found["headrace_validation", "val/reward"] == 0.7
    assert found["headrace_reward_mean", ""] == 0.6


def test_the_queue_and_its_staleness_are_of_the_last_step_and_lost_groups_add_up(endpoint: RunEndpoint) -> None:
    endpoint.run.publish(1, STEP)
    endpoint.run.publish(2, STEP | {"queue/groups_ready": 5.0, "rollout/groups_stale": 1.0})
    found = scrape(endpoint.address)
    assert (found["headrace_queue_groups", "ready"], found["headrace_queue_groups", "in_flight"]) == (5, 8)
    assert found["headrace_staleness_share", "0"] == 0.75 and found["headrace_staleness_share", "5_or_more"] == 0.25
    assert found["headrace_groups_total", "stale"] == 3 and found["headrace_groups_total", "dropped"] == 0


def test_the_address_stands_in_the_folder_while_somebody_listens(tmp_path: Path) -> None:
    with opened(config(), tmp_path) as endpoint:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", endpoint.address)
        assert (tmp_path / "prometheus.txt").read_text() == endpoint.address + "\n"
    assert not (tmp_path / "prometheus.txt").exists()
    with pytest.raises(urllib.error.URLError):
        scrape(endpoint.address)
    endpoint.close()


def test_nothing_listens_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "prometheus.txt").write_text("http://of-a-run-that-was-killed\n")
    with opened(config(None), tmp_path) as endpoint:
        endpoint.run.publish(1, STEP)
        assert endpoint.address == "" and not (tmp_path / "prometheus.txt").exists()


def test_a_port_that_is_taken_or_a_host_that_is_not_ours_is_a_users_mistake(
    endpoint: RunEndpoint, tmp_path: Path
) -> None:
    port = int(endpoint.address.rpartition(":")[2].partition("/")[0])
    with pytest.raises(UserError, match=rf"logging.prometheus_port: got {port} on '127.0.0.1', expected a port"):
        opened(config(port), tmp_path)
    with pytest.raises(UserError, match=r"logging.prometheus_port: got 0 on '192.0.2.1'"):
        opened(config(0, "192.0.2.1"), tmp_path)


@pytest.mark.parametrize("port", [-1, 65536, "true"])
def test_a_port_out_of_range_names_the_key(port: Any) -> None:
    with pytest.raises(UserError, match="logging.prometheus_port"):
        config(port)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bheadrace_[a-z0-9_]+", text))


def test_the_dashboard_queries_only_what_is_exported(endpoint: RunEndpoint) -> None:
    exported = {name for name, _ in full_scrape(endpoint)}
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [item["definition"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    queried = set().union(*map(names_in, queries))
    assert queried <= exported, queried - exported
    assert exported - queried == set(), "nothing is exported that the dashboard does not show"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_docs_name_every_metric_and_no_other(endpoint: RunEndpoint) -> None:
    exported = {name for name, _ in full_scrape(endpoint)}
    families = {re.sub(r"^(headrace_dataplane_call_seconds)_(bucket|sum|count)$", r"\1", name) for name in exported}
    assert names_in((DOCS / "reference" / "metrics.md").read_text()) == families
