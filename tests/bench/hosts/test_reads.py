"""`headrace bench hosts`: a small measurement between two hosts, its report, and its sentence where hosts cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.hosts import benchmark
from headrace.bench.hosts.benchmark import HostOptions, HostReport, hosts_table, run_hosts, write_report
from headrace.bench.hosts.directory_cost import CostResult
from headrace.bench.hosts.reads import RAW, SHM, ReadOptions, ReadResult, summarise
from headrace.bench.transfer.workloads import LoadSpec
from headrace.cli import main
from headrace.tests.hosts import needs_hosts


def test_the_slowest_link_is_the_figure_of_all(tmp_path: Path) -> None:
    results = [
        ReadResult("same_host", "rl-256", 1 << 20, (0.2, 0.1, 0.4), SHM, (0.1, 0.1, 0.3)),
        ReadResult("other_host.1gbit", "rl-256", 1 << 20, (0.1,), RAW, (0.09,)),
        ReadResult("other_host.10gbit", "rl-256", 1 << 20, (0.1,), RAW, (0.08,)),
    ]
    summary = summarise(results)
    assert summary["hosts.read_same_host.vs_shm"] == 0.5
    assert summary["hosts.read_other_host.vs_raw_tcp"] == summary["hosts.read_other_host.10gbit.rl-256.vs_raw_tcp"]
    assert summary["hosts.read_other_host.vs_raw_tcp"] == pytest.approx(0.8)
    costs = [CostResult(90.0, {}, 50.0)]
    report = HostReport(results, {"cores": 2}, {"hosts.tls_cost": 1.25}, [0.25, 0.5], costs, [4000.0])
    assert hosts_table(report).row_count == 3
    text = write_report(report, HostOptions(tmp_path), "headrace bench hosts").read_text()
    assert "| other host, 10gbit | rl-256, 1.0 MB | raw TCP | 100.00 | 80.00 | 0.08 | 0.10 | 0.80 | 0.85 |" in text
    assert "took at most 0.50 s (bar: 5)" in text


def test_who_cannot_make_hosts_reads_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "why_no_hosts", lambda: "needs root to make namespaces")
    assert main(["bench", "hosts", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("headrace: headrace bench hosts needs root to make namespaces: it makes")
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_batch_is_read_on_both_hosts(tmp_path: Path) -> None:
    needs_hosts()
    small = replace(ReadOptions(), workloads=(LoadSpec("rl-256"),), links_gbit=(1,), repeats=2)
    report = run_hosts(HostOptions(tmp_path, small, kills=1), lambda line: None)
    assert [(result.place, len(result.seconds)) for result in report.results] == [
        ("same_host", 2),
        ("other_host.1gbit", 2),
    ]
    _, far = report.results
    assert min(far.baseline_seconds) > 0.5 * far.num_bytes * 8e-9, "the link is limited to 1 Gbit/s"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["hosts.read_other_host.vs_raw_tcp"] and 0 < summary["hosts.read_same_host.vs_shm"]
