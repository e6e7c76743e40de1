"""Tests the comparison of runs: figures, settings that differ, curves over each other, and mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import main
from headrace.trainers.config.config import resolved_yaml
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.pages.compare import MAX_RUNS, differences, figures, read_runs, tables, write_comparison
from headrace.trainers.observe.pages.plots import Columns, compared_plots, minutes


def make_run(folder: Path, *, step_s: float = 1.0, steps: int = 20, finished: bool = True, **config: Any) -> Path:
    folder.mkdir()
    built = build_config({**config, "run": {"dir": str(folder), "name": folder.name}})
    (folder / "config.yaml").write_text(resolved_yaml(built))
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        metrics = {"reward/mean": step / 20, "time/step_s": step_s, "time/train_s": step_s / 4, "memory/peak_gib": 2.0}
        writer.log(step, metrics | ({"val/reward": 0.5} if step == 10 else {}))
    if finished:
        writer.finish(steps)
    writer.close()
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    slow = make_run(tmp_path / "slow", trainer={"lr": 1e-4})
    return [slow, make_run(tmp_path / "fast", step_s=0.5, steps=10, finished=False, trainer={"lr": 3e-4})]


def test_figures_stand_side_by_side(pair: list[Path]) -> None:
    found = dict(figures(read_runs(pair)))
    assert found["steps"] == ["20", "10, not finished"]
    assert found["reward, last tenth"] == ["0.975", "0.5"]
    assert found["time of all steps"] == ["20.0 s", "5.0 s"]
    assert found["time per step, median"] == ["1.0 s", "500 ms"]
    assert found["held-out reward, last"] == ["0.5", "0.5"]
    assert found["peak memory of a rank"] == ["2.00 GiB", "2.00 GiB"]
    assert found["share of train"] == ["25%", "25%"]
    assert "tokens per second, median" not in found, "neither run has it"


def test_only_settings_that_differ_are_told(pair: list[Path]) -> None:
    assert differences(read_runs(pair)) == [("trainer.lr", ["0.0001", "0.0003"])]


def test_reward_functions_are_compared_key_by_key(tmp_path: Path) -> None:
    kinds = ({"kind": "exact_match"}, {"kind": "exact_match", "weight": 0.5})
    runs = read_runs(
        [make_run(tmp_path / name, reward={"functions": [kind]}) for name, kind in zip("ab", kinds, strict=True)]
    )
    assert differences(runs) == [("reward.functions.0.weight", ["1.0", "0.5"])]


def test_a_key_that_one_run_lacks_differs(pair: list[Path]) -> None:
    path = pair[1] / "config.yaml"
    path.write_text(path.read_text().replace("  watchdog: true\n", ""))
    assert ("resources.watchdog", ["true", "-"]) in differences(read_runs(pair))
    path.unlink()
    assert differences(read_runs(pair)) == [], "nothing is known of the other run"


def test_curves_lie_over_each_other_also_over_time(pair: list[Path]) -> None:
    runs = {run.name: Columns(run.records) for run in read_runs(pair)}
    plots = compared_plots(runs, [("reward", "reward/mean"), ("none", "no/key")])
    assert {plot.title: plot.panels[0].x for plot in plots} == {"Reward over steps": "step", "Reward over time": "min"}
    for plot in plots:
        assert [(one.label, one.colour) for one in plot.panels[0].series] == [("slow", "blue"), ("fast", "orange")]
    assert minutes(runs["fast"].records)[-1] == pytest.approx(10 * 0.5 / 60)
    assert runs["fast"]["minutes/reward/mean"][0][-1] == pytest.approx(10 * 0.5 / 60)


def test_the_page_and_the_terminal_show_both_runs(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "comparison.html"
    assert main(["compare", *map(str, pair), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "trainer.lr" in text and str(out) in text.replace("\n", "")
    page = out.read_text()
    data = json.loads(re.findall(r'id="page-data">(.*?)</script>', page)[0])
    assert data["columns"]["1:reward/mean"][1][-1] == 0.5 and len(data["columns"]["0:minutes/reward/mean"][0]) == 20
    assert ["trainer.lr", "0.0001", "0.0003"] in data["tables"][1]["rows"]
    console = Console(width=80)
    for table in tables(read_runs(pair)):
        assert console.measure(table).maximum <= 80


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")]
    assert [run.name for run in read_runs(folders)] == list(map(str, folders))


def test_mistakes_are_sentences(pair: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got 1 run folders, expected 2 to"):
        read_runs(pair[:1])
    with pytest.raises(UserError, match="got 13 run folders"):
        read_runs([pair[0]] * (MAX_RUNS + 1))
    with pytest.raises(UserError, match="slow twice"):
        read_runs([pair[0], pair[1], pair[0]])
    with pytest.raises(UserError, match="has no metrics.jsonl"):
        read_runs([pair[0], tmp_path])
    with pytest.raises(UserError, match="cannot be written"):
        write_comparison(read_runs(pair), pair[0] / "config.yaml" / "page.html")


def test_every_figure_of_every_evaluation_and_of_learning_is_compared(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    for folder, share in zip(folders, (0.25, 0.75), strict=True):
        writer = MetricsWriter(folder / "metrics.jsonl")
        writer.log(20, {"eval/minus/pass@4": share, "eval/minus/seconds": 9.0, "reward/std": share, "train/lr": 1e-6})
        writer.close()
    runs = read_runs(folders)
    found = dict(figures(runs))
    assert found["evaluation minus pass@4, last"] == ["0.25", "0.75"] and found["reward std, last tenth"][1] == "0.750"
    assert found["learning rate, last tenth"] == ["1e-06", "1e-06"] and not [key for key in found if "seconds" in key]
    page = write_comparison(runs, tmp_path / "page.html").read_text()
    assert '"key":"1:eval/minus/pass@4","colour":"orange","dashed":false,"sparse":true' in page, "it is not smoothed"
    assert "Evaluation minus pass@4 over steps" in page and "Reward std over steps" in page
