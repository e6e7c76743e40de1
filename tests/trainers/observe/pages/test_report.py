"""Tests that the report page is whole with whatever metrics there are, and is rebuilt beside a run when it is due."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import re
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.trainers.config.config import Config, resolved_yaml, with_run_dir
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.pages import report as live_report
from headrace.trainers.observe.pages.cards import Card, cards, further_figures
from headrace.trainers.observe.pages.plots import MAX_POINTS, Columns, run_plots
from headrace.trainers.observe.pages.report import LiveReport, write_report


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


def data_of(path: Path) -> dict[str, Any]:
    """Return the data that a page's script draws."""
    return json.loads(re.findall(r'id="page-data">(.*?)</script>', path.read_text())[0])


def titles(*records: dict[str, Any]) -> list[str]:
    return [plot.title for plot in run_plots(Columns(records), "val/exact_match")]


def test_the_page_stands_alone_and_is_whole(tmp_path: Path) -> None:
    path = write_report(run_folder(tmp_path, 30))
    text = path.read_text()
    page = Page(text)
    assert page.depth == [] and page.links == []
    assert "@import" not in text and "url(" not in text
    assert re.findall(r"https?:[^\s`'\")]*", text) == [
        "https://github.com/leeoniya/uPlot",
        "http://www.w3.org/2000/svg",
    ]
    data = data_of(path)
    assert data["state"] == {"kind": "finished", "text": "finished, 30 steps", "detail": "", "age_s": 0.0}
    keys = {series["key"] for plot in data["plots"] for panel in plot["panels"] for series in panel["series"]}
    assert keys <= data["columns"].keys() and {card["key"] for card in data["cards"]} - {""} <= data["columns"].keys()
    assert data["columns"]["val/exact_match"][0] == [0, 10, 20, 30]
    assert ["warmup"] == [row[0] for row in data["tables"][-1]["rows"]][:1] and "model:" in data["config"]
    assert not list(tmp_path.glob("*.new"))


def test_only_the_scripts_of_the_page_may_run(tmp_path: Path) -> None:
    text = write_report(run_folder(tmp_path, 3)).read_text()
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    ]
    [allowed] = re.findall(r"script-src ([^;\"]*)", text)
    assert allowed.split() == [f"'sha256-{digest}'" for digest in digests] and len(digests) == 3
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in text, sink


def test_the_style_defines_every_colour_of_the_curves(tmp_path: Path) -> None:
    path = write_report(run_folder(tmp_path, 3))
    plots = run_plots(Columns([ahead_record(step) for step in range(1, 13)]), "val/exact_match")
    colours = {series.colour for plot in plots for panel in plot.panels for series in panel.series}
    assert len(colours) > 4 and all(path.read_text().count(f"--{colour}: #") == 2 for colour in colours)


def test_a_run_with_nothing_but_a_validation_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/exact_match": 0.3}\n')
    path = write_report(tmp_path)
    assert data_of(path)["cards"][0]["value"] == "30.0%" and Page(path.read_text()).depth == []


def test_missing_and_null_figures_are_left_out() -> None:
    records = [
        {"step": 1, "reward/mean": None, "time/step_s": 0.5},
        {"step": 2, "train/loss": None, "reward/mean": 0.25},
    ]
    assert titles(*records) == ["Learning", "Where a step's time goes, seconds"]
    assert Card("Reward", "0.250", "first 0.250, best 0.250", "reward/mean") in cards(Columns(records))
    assert titles() == [] and cards(Columns([])) == []


def test_cards_show_what_decides_a_run_and_tables_the_rest() -> None:
    health = {"train/sampled_entropy": 0.5, "rollout/truncated_share": 0.0}
    records = [step_record(step) | health for step in range(1, 41)]
    records[0]["time/step_s"] = 9.0
    found = {card.label: card for card in cards(Columns(records), "val/exact_match")}
    assert list(found) == [
        "Held-out exact match", "Reward", "Entropy", "Truncated answers", "Tokens per second", "Wall time",
    ]  # fmt: skip
    held_out = found["Held-out exact match"]
    assert (held_out.value, held_out.small) == ("80.0%", "best 80.0% at step 40; step 10: 42.5%")
    assert (found["Wall time"].value, found["Wall time"].small) == ("24.6 s", "400 ms per step, median")
    assert found["Truncated answers"].value == "0%"
    rows = {label: (value, note) for label, value, note in further_figures(Columns(records))}
    assert rows["put per step"] == ("61.0 kB", "median; largest 61.0 kB")
    assert rows["through the driver, per row"][0] == "61 B"


def test_the_wall_time_adds_the_processes_that_worked_on_a_run() -> None:
    elapsed = enumerate((5.0, 9.0, 3.0, 6.0), start=1)
    records = [{"step": step, "time/elapsed_s": at, "time/step_s": 1.0} for step, at in elapsed]
    [card] = cards(Columns(records))
    assert (card.label, card.value) == ("Wall time", "15.0 s")


def test_the_report_goes_by_the_metric_that_judged_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val/exact_match": 0.0, "val/reward": 0.2, "val/reward/math": 0.25}\n'
        '{"step": 1, "val/exact_match": 0.0, "val/reward": 0.9, "val/reward/math": 0.75}\n'
    )
    for metric, label, value in (("math", "Held-out reward/math", "0.750"), ("val/reward", "Held-out reward", "0.900")):
        (tmp_path / "config.yaml").write_text(f"validation: {{metric: {metric}}}")
        data = data_of(write_report(tmp_path))
        assert (data["cards"][0]["label"], data["cards"][0]["value"]) == (label, value)
        assert data["plots"][0]["panels"][0]["series"][0]["label"] == label.replace("H", "h")


def test_the_held_out_curve_has_lines_to_compare_it_with(tmp_path: Path) -> None:
    run_folder(tmp_path, 20)
    (tmp_path / "baselines.json").write_text('{"fixed <b>prompt": 0.625}')
    [panel] = data_of(write_report(tmp_path))["plots"][0]["panels"]
    assert panel["lines"] == [["before step 1: 0.5", 0.5], ["fixed <b>prompt: 0.625", 0.625]]
    for broken in ("[1]", '{"a": "much"}', '{"a": NaN}', "{"):
        (tmp_path / "baselines.json").write_text(broken)
        with pytest.raises(UserError, match=r"baselines.json: got something else, expected a JSON object"):
            write_report(tmp_path)


def test_rollouts_beside_the_training_have_a_plot_and_lock_step_has_none() -> None:
    lock_step = {"queue/groups_in_flight": 0, "queue/groups_ready": 0, "staleness/mean": 0, "staleness/max": 0,
                 "idle/rollout": 0.5, "idle/train": 0.6}  # fmt: skip
    assert "Rollouts beside the training" not in titles(*(step_record(step) | lock_step for step in (1, 2)))
    records = [ahead_record(step) for step in range(1, 30)]
    streaming = [record | {"queue/groups_in_flight": 0, "staleness/max": 0} for record in records]
    panels = [
        [len(panel.series) for panel in plot.panels]
        for run in (records, streaming)
        for plot in run_plots(Columns(run), "val/exact_match")
        if plot.title == "Rollouts beside the training"
    ]
    assert panels == [[2, 2, 2], [2]]


def test_what_a_run_lost_is_added_up_or_counted_already() -> None:
    columns = Columns([ahead_record(s) for s in range(1, 9)])
    found = {card.label: card.value for card in cards(columns) if card.bad}
    assert found == {"Groups dropped": "16", "Actors replaced": "1"}
    rows = {label: (value, note) for label, value, note in further_figures(columns)}
    assert rows["staleness, versions"] == ("1.5", "mean of rows; oldest 2") and rows["training idle"][0] == "25%"
    assert "staleness, versions" not in {label for label, _, _ in further_figures(Columns([step_record(1)]))}


def test_a_long_run_is_thinned_to_means_and_the_page_says_so(tmp_path: Path) -> None:
    count = 2 * MAX_POINTS + 1
    lines = (json.dumps({"step": step, "reward/mean": float(step)}) for step in range(1, count + 1))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    data = data_of(write_report(tmp_path))
    steps, values = data["columns"]["reward/mean"]
    assert data["steps_per_point"] == 3 and len(steps) == math.ceil(count / 3) <= MAX_POINTS
    assert (steps[:2], values[:2]) == ([2, 5], [2.0, 5.0])


def test_settings_that_differ_are_a_short_table(tmp_path: Path) -> None:
    rewards = [{"kind": "exact_match"}, {"kind": "format", "weight": 0.5, "options": {"pattern": "<x>"}}]
    config = build_config({"trainer": {"lr": 1e-4}, "reward": {"functions": rewards}, "run": {"dir": str(tmp_path)}})
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    table = data_of(write_report(tmp_path))["tables"][0]
    assert table["title"] == "Settings that differ from the defaults" and table["rows"] == [
        ["reward.functions.1.kind", "format", "exact_match"],
        ["reward.functions.1.weight", "0.5", "1.0"],
        ["reward.functions.1.options.pattern", "<x>", "-"],
        ["trainer.lr", "0.0001", "1e-06"],
    ]


def test_weights_that_were_dequantized_are_said_with_the_state(tmp_path: Path) -> None:
    (tmp_path / "headrace_source.json").write_text('{"dequantized_from": "Q4_1"}')
    (tmp_path / "config.yaml").write_text(f"model: {{path: {tmp_path}}}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"event": "finished", "step": 1, "time/elapsed_s": 1.0}) + "\n")
    assert "dequantized from Q4_1" in data_of(write_report(tmp_path))["state"]["detail"]


def test_text_of_the_run_cannot_break_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run & co"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {path: '<script>$title</script>'}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"event": "<i>\ud800", "step": 1, "time/elapsed_s": 1.0}) + "\n")
    (folder / "error.txt").write_text("a.b.Error: <u>\n")
    text = write_report(folder).read_text()
    assert "<script>$" not in text and "<b>run" not in text and "<i>" not in text and "<u>" not in text
    assert "$title" in text and data_of(folder / "report.html")["state"]["detail"] == "Error: <u>"


def test_folders_without_metrics_are_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no metrics.jsonl"):
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
    sets = {"eval/minus/avg@4": 0.25, "eval/minus/pass@4": 0.625, "eval/minus/reward": -1.0, "eval/minus/step": 9}
    health = {"train/sampled_entropy": 1.25, "logprob/ratio_error": 1.01, "train/lr": 1e-6, "reward/std": 0.4}
    sources = {"reward_by_source/a": 0.5, "reward_by_source/<b>": 0.25}
    for step in (10, 20):
        writer.log(step, {**sets, **health, **sources, "val/pass@4": 0.9, "rollout/truncated_share": 0.1})
    writer.finish(20)
    writer.close()
    data = data_of(write_report(folder))
    plots = [plot["title"] for plot in data["plots"]]
    for title in ("Evaluation minus", "Validation", "Signal", "Policy and engine", "Rewards by data source"):
        assert title in plots, title
    [table] = [table for table in data["tables"] if table["title"] == "Evaluation minus"]
    assert table["rows"][0] == ["9", "0.25", "0.625", "-1"] and "Validation" in [one["title"] for one in data["tables"]]
    assert data["columns"]["eval/minus/avg@4"][0] == [9.0, 9.0], "the steps that were evaluated"


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
