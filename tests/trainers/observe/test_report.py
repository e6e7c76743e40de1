"""Tests that the report page is whole with whatever metrics there are, and is rebuilt beside a run when it is due."""

from __future__ import annotations

import errno
import json
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from headrace.trainers.config.config import Config, resolved_yaml, with_run_dir
from headrace.trainers.errors import UserError
from headrace.trainers.observe import report as live_report
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.plots import MAX_BARS, all_plots
from headrace.trainers.observe.report import LiveReport, summary_cards, write_report


def step_record(step: int) -> dict[str, Any]:
    record = {
        "step": step, "reward/mean": min(1.0, 0.4 + step / 100), "time/step_s": 0.4, "time/rollout_s": 0.2,
        "time/data_wait_s": 0.01, "time/train_s": 0.1, "time/sync_s": 0.02, "rollout/response_length_mean": 6.0,
        "rollout/response_length_max": 9.0, "rollout/tokens_per_s": 15000.0, "rollout/failed_rows": 0,
        "dataplane/bytes_put": 61000, "dataplane/bytes_got": 72000, "dataplane/calls": 21,
        "driver/bytes_per_row": 61.0, "train/loss": -0.01, "train/grad_norm": 0.5, "train/reference_kl": 0.0,
        "train/clip_fraction": 0.01,
    }  # fmt: skip
    if step % 10 == 0:
        record |= {"val/exact_match": min(1.0, 0.3 + step / 80), "val/reward": 0.5, "time/validate_s": 0.2}
    return record


def run_folder(folder: Path, num_steps: int, *, finished: bool = True) -> Path:
    (folder / "config.yaml").write_text(resolved_yaml(with_run_dir(Config())))
    writer = MetricsWriter(folder / "metrics.jsonl")
    writer.event("warmup", 0, steps=300, loss=1.7)
    writer.log(0, {"val/exact_match": 0.31, "val/reward": 0.5})
    for step in range(1, num_steps + 1):
        writer.log(step, {key: value for key, value in step_record(step).items() if key != "step"})
    if finished:
        writer.finish(num_steps)
    writer.close()
    return folder


def ahead_record(step: int) -> dict[str, Any]:
    """Make the record of a run whose rollouts are ahead of its training and that has lost something."""
    return step_record(step) | {
        "queue/groups_in_flight": 64, "queue/groups_ready": step % 7, "staleness/mean": 1.5, "staleness/max": 2,
        "idle/rollout": 0.02, "idle/train": 0.25, "rollout/groups_dropped": 2,
        "rollout/actors_replaced": float(step > 5), "run/restarts": 0,
    }  # fmt: skip


class Page(HTMLParser):
    """Collects tags that were opened and not closed, and everything that would need a network."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.depth: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br", "img"):
            self.depth.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.depth.pop() == tag


def test_the_page_stands_alone_and_is_whole(tmp_path: Path) -> None:
    path = write_report(run_folder(tmp_path, 30))
    text = path.read_text()
    page = Page(text)
    assert page.depth == []
    assert all(link.startswith("#") for link in page.links), page.links
    assert "@import" not in text and "https:" not in text.replace("http://www.w3.org", "")
    assert "finished, 30 steps" in text
    assert text.count("<svg") == 6
    assert "warmup" in text and "model.path" in text
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.long
def test_plots_take_their_colours_from_the_page(tmp_path: Path) -> None:
    page = write_report(run_folder(tmp_path, 12)).read_text()
    for plot in all_plots([ahead_record(step) for step in range(1, 13)]):
        ElementTree.fromstring(plot.svg)
        assert "#01020" not in plot.svg
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", plot.svg)) <= {"#ffffff", "#000000"}, plot.title
        for name in re.findall(r"var\(--(\w+)\)", plot.svg):
            assert f"--{name}: " in page
        # Text without a fill would be black, and lost on the dark page.
        texts = re.findall(r"<text [^>]*>", plot.svg)
        assert texts and all("fill: var(--ink)" in text and "DejaVu" not in text for text in texts)


def test_ids_of_different_plots_do_not_meet() -> None:
    plots = all_plots([ahead_record(step) for step in range(1, 13)])
    defined = [set(re.findall(r'<clipPath id="([^"]+)"', plot.svg)) for plot in plots]
    for i, ids in enumerate(defined):
        for others in defined[i + 1 :]:
            assert not ids & others


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    assert "not finished, 7 of 100 steps" in write_report(run_folder(tmp_path, 7, finished=False)).read_text()


def test_a_run_with_nothing_but_a_validation_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/exact_match": 0.3}\n')
    text = write_report(tmp_path).read_text()
    assert "30.0%" in text and Page(text).depth == []


def test_missing_and_null_figures_are_left_out(tmp_path: Path) -> None:
    records = [
        {"step": 1, "reward/mean": None, "time/step_s": 0.5},
        {"step": 2, "train/loss": None, "reward/mean": 0.25},
    ]
    assert [plot.title for plot in all_plots(records)] == ["Learning", "Where a step's time goes, seconds"]
    assert ("Reward", "0.250", "first 0.250, best 0.250") in summary_cards(records)
    assert all_plots([]) == [] and summary_cards([]) == []


def test_summary_cards_are_last_first_best_and_medians() -> None:
    records = [step_record(step) for step in range(1, 41)]
    records[0]["time/step_s"] = 9.0
    cards = {label: (value, small) for label, value, small in summary_cards(records, "val/exact_match")}
    assert cards["Held-out exact match"] == ("80.0%", "first 42.5%, best 80.0%")
    assert cards["Time per step"] == ("400 ms", "median; largest 9.0 s")
    assert cards["Put per step"][0] == "61.0 kB"
    assert cards["Through the driver"][0] == "61 B per row"
    assert "Failed rows" not in cards


def test_the_report_goes_by_the_metric_that_judged_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val/exact_match": 0.0, "val/reward": 0.2, "val/reward/math": 0.25}\n'
        '{"step": 1, "val/exact_match": 0.0, "val/reward": 0.9, "val/reward/math": 0.75}\n'
    )
    for metric, label, value in (("math", "Held-out reward/math", "0.750"), ("val/reward", "Held-out reward", "0.900")):
        (tmp_path / "config.yaml").write_text(f"validation: {{metric: {metric}}}")
        text = write_report(tmp_path).read_text()
        assert f"<span>{label}</span><b>{value}</b>" in text
        assert f"held-out {label.removeprefix('Held-out ')}</li>" in text, "the plot's legend"


@pytest.mark.long
def test_rollouts_beside_the_training_have_a_plot_and_lock_step_has_none() -> None:
    def titles(*changes: dict[str, Any]) -> list[str]:
        records = [step_record(step) | change for step, change in enumerate(changes, start=1)]
        return [plot.title for plot in all_plots(records)]

    lock_step = {"queue/groups_in_flight": 0, "queue/groups_ready": 0, "staleness/mean": 0, "staleness/max": 0,
                 "idle/rollout": 0.5, "idle/train": 0.6}  # fmt: skip
    assert "Rollouts beside the training" not in titles(lock_step, lock_step)
    records = [ahead_record(step) for step in range(1, 30)]
    [full] = [plot for plot in all_plots(records) if plot.title == "Rollouts beside the training"]
    streaming = [record | {"queue/groups_in_flight": 0, "staleness/max": 0} for record in records]
    [idle] = [plot for plot in all_plots(streaming) if plot.title == "Rollouts beside the training"]
    assert [label for label, _ in idle.legend] == ["rollouts idle", "training idle"]
    assert len(full.legend) == 6 and full.wide
    for text in ("groups at a step", "versions that rows are behind", "idle share"):
        assert text in full.svg, text


def test_what_a_run_lost_is_added_up_or_counted_already() -> None:
    cards = {label: (value, small) for label, value, small in summary_cards([ahead_record(s) for s in range(1, 9)])}
    assert cards["Staleness"] == ("1.5", "versions, mean of rows; oldest 2")
    assert cards["Training idle"] == ("25%", "of a step, median; rollouts 2%")
    assert cards["Groups dropped"][0] == "16" and cards["Actors replaced"][0] == "1"
    assert "Restarts" not in cards and "Groups too old" not in cards
    assert "Staleness" not in {label for label, _, _ in summary_cards([step_record(1)])}


def test_a_long_run_is_drawn_in_bounded_bars_and_a_slow_step_is_cut_off() -> None:
    records = [step_record(step) for step in range(1, 1001)]
    records[0]["time/step_s"] = 500.0
    plot = next(plot for plot in all_plots(records) if plot.title.startswith("Where"))
    assert plot.svg.count("<path") < MAX_BARS * 7
    assert "mean of 13 steps" in plot.note and "cut off" in plot.note
    assert [label.rpartition(" ")[0] for label, _ in plot.legend] == ["rollout", "data wait", "train", "sync", "other"]


def test_text_of_the_run_cannot_break_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run & co"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {path: '<script>$title'}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"event": "<i>", "step": 1, "time/elapsed_s": 1.0}) + "\n")
    text = write_report(folder).read_text()
    assert "<script>$" not in text and "<b>run" not in text and "<i>" not in text
    assert "$title" in text


def test_folders_without_metrics_are_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(UserError, match="line 1"):
        write_report(tmp_path)


def test_builds_come_by_time_and_never_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    now, started = [0.0], list[float]()

    def gone(pid: int) -> psutil.Process:
        raise psutil.NoSuchProcess(pid)

    class Build:
        pid = 1

        def __init__(self, *arguments: object, **keys: object) -> None:
            started.append(now[0])

        def poll(self) -> int | None:
            return None if now[0] < started[-1] + 150 else 0

    monkeypatch.setattr(live_report.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live_report.subprocess, "Popen", Build)
    monkeypatch.setattr(live_report.psutil, "Process", gone)
    often, never = LiveReport(Path("run"), 100.0), LiveReport(Path("run"), 0.0)
    for at in range(0, 500, 10):
        now[0] = at
        often.tick()
        never.tick()
    assert started == [100, 250, 400], "a slow build delays the next one"


@pytest.mark.processes
def test_a_build_that_is_running_ends_with_the_run(tmp_path: Path) -> None:
    report = LiveReport(tmp_path, 1e-9)
    report._command = [sys.executable, "-c", "import time; time.sleep(60)"]
    time.sleep(0.01)
    report.tick()
    assert report._process is not None
    process = psutil.Process(report._process.pid)
    report.close()
    report.close()
    assert not process.is_running()


def test_each_evaluation_set_has_a_curve_and_a_table_and_learning_has_plots(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, 20)
    writer = MetricsWriter(folder / "metrics.jsonl")
    sets = {"eval/minus/avg@4": 0.25, "eval/minus/pass@4": 0.625, "eval/minus/reward": -1.0, "eval/minus/step": 9.0}
    health = {"train/sampled_entropy": 1.25, "logprob/ratio_error": 1.01, "train/lr": 1e-6, "reward/std": 0.4}
    sources = {"reward_by_source/a": 0.5, "reward_by_source/<b>": 0.25}
    for step in (10, 20):
        writer.log(step, {**sets, **health, **sources, "val/pass@4": 0.9, "rollout/truncated_share": 0.1})
    writer.finish(20)
    writer.close()
    text = write_report(folder).read_text()
    Page(text)
    for title in ("Evaluation minus", "Validation", "Signal", "Policy and engine", "Rewards by data source"):
        assert f"<h2>{title}</h2>" in text, title
    assert text.count("<h2>Evaluation minus</h2>") == text.count("<h2>Validation</h2>") == 2, "a plot and a table"
    assert "<td>9.0</td><td>0.25</td><td>0.625</td><td>-1</td>" in text and "&lt;b&gt;" in text
    assert "Truncated answers" in text and "Engine mismatch" in text


def test_a_report_that_cannot_be_started_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(live_report.subprocess, "Popen", refuse)
    live = LiveReport(tmp_path, 1e-9)
    live.tick()
    live.close()
    assert "the report is not built: [Errno 24] Too many open files" in caplog.text
