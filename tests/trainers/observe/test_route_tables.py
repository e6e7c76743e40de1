"""`headrace routes` prints what a run measured of its routes and experts, and refuses folders that have nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main

LINES: list[dict[str, Any]] = [
    {"step": 1, "routes/missing_share": 0.0, "routes/native_agreement": 0.9375, "routes/native_agreement_layer_0": 0.9,
     "routes/native_agreement_layer_3": 0.975, "logprob/mismatch_mean": 2.5e-4, "moe/load_imbalance": 1.5,
     "moe/load_imbalance_layer_0": 1.25, "moe/load_imbalance_layer_3": 1.75},
    {"step": 2, "routes/missing_share": 0.125, "moe/load_imbalance": 2.0, "moe/load_imbalance_layer_0": 1.75,
     "moe/load_imbalance_layer_3": 2.25},
    {"step": 3, "reward/mean": 1.0},
]  # fmt: skip


def printed(folder: Path, lines: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["routes", str(folder), *more]) == 0
    table = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    return ["|".join(cells) for cells in table if cells]


def test_tables_by_step_and_by_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(tmp_path, LINES, capsys) == [
        "1|0.0%|93.8%|0.00025|1.5", "2|12.5%|||2", "0|90.0%|1.5", "3|97.5%|2",
    ]  # fmt: skip
    assert printed(tmp_path, LINES, capsys, "--last", "1") == ["2|12.5%|2", "0|1.75", "3|2.25"]
    assert printed(tmp_path, [LINES[1] | {"step": 1}], capsys)[0] == "1|12.5%|2"
    assert printed(tmp_path, [{"step": 1, "routes/missing_share": 0.0}], capsys) == ["1|0.0%"]


@pytest.mark.parametrize(
    ("lines", "more", "text"),
    [
        (None, (), "has no metrics.jsonl, expected a run folder"),
        (LINES[2:], (), "have no routes/... and no moe/..., expected a run with router_replay.enabled=true or with"),
        (LINES, ("--last", "0"), "--last: got 0, expected 1 step or more"),
    ],
)
def test_folders_without_routes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: Any, more: tuple[str, ...], text: str
) -> None:
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["routes", str(tmp_path), *more]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
