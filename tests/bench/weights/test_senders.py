"""`headrace bench weights --senders`: its summary, and a small measurement between hosts made of namespaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.weights import senders
from headrace.bench.weights.senders import SenderOptions, SenderResult, plan_of, run_senders, senders_table, summarise
from headrace.cli import main
from headrace.tests.hosts import needs_hosts


def test_the_summary_compares_many_senders_with_one(tmp_path: Path) -> None:
    results = [
        SenderResult("two engines a host", (2.0,), 102.0, 100, 0.5),
        SenderResult("two engines a host, many", (2.0,), 101.0, 100, 0.5),
        SenderResult("one", (7.0, 8.0, 9.0), 410.0, 400, 0.6),
        SenderResult("many whole", (2.0,), 408.0, 400, 0.7),
        SenderResult("many part", (0.5,), 101.0, 100, 0.4),
    ]
    summary = summarise(SenderOptions(tmp_path), results)
    assert summary["weights.bytes_over_link.vs_once"] == 1.02
    assert summary["weights.bytes_over_link.many.vs_once"] == 1.01
    assert summary["weights.senders4.vs_one"] == 4.0 and summary["weights.senders4.part.vs_one"] == 16.0
    assert summary["weights.senders4.bytes_over_link.vs_once"] == 1.02 and summary["weights.senders4.busy"] == 0.7
    assert senders_table(SenderOptions(tmp_path), results).row_count == 5


def test_each_byte_of_the_plan_crosses_a_link_once_for_each_host(tmp_path: Path) -> None:
    options = SenderOptions(tmp_path, size="tiny", bucket_bytes=1 << 16)
    whole, part = (plan_of(options, need) for need in senders.NEEDS)
    assert whole.bytes_over_links.tolist() == pytest.approx([options.num_bytes] * 4, rel=0.01)
    assert whole.bytes_sent.tolist() == pytest.approx([options.num_bytes] * 4, rel=0.1)
    assert part.bytes_over_links.tolist() == pytest.approx([options.num_bytes / 4] * 4, rel=0.05)


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(senders, "why_no_hosts", lambda: "needs root to make namespaces")
    assert main(["bench", "weights", "--senders", "4", "--out", str(tmp_path / "out")]) == 2
    assert "headrace: --senders needs root to make namespaces: it makes" in capsys.readouterr().err
    assert main(["bench", "weights", "--senders", "1", "--out", str(tmp_path / "out")]) == 2
    assert "--senders: got 1, expected at least 2" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_model_is_sent_by_two(tmp_path: Path) -> None:
    needs_hosts()
    results = run_senders(SenderOptions(tmp_path, 2, "tiny", bucket_bytes=1 << 16, repeats=1), lambda line: None)
    assert [result.case for result in results] == [*senders.ONE_COPY, "one", "many whole", "many part"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    for key in ("weights.bytes_over_link.vs_once", "weights.bytes_over_link.many.vs_once"):
        assert 1.0 <= summary[key] < 1.1, "headers and messages of a small model"
