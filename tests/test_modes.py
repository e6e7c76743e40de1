"""The controllers in the whole system: streaming gives the gradients of sync, async keeps its staleness bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tests import cli_runs as runs
from headrace.tests.test_end_to_end import steps_of

SHORT = ("validation.every=0", "algorithm.steps=3")


def figures(line: dict[str, float]) -> list[float]:
    return [line["reward/mean"], line["train/loss"], line["train/grad_norm"]]


def test_streaming_gives_the_gradients_of_sync(tmp_path: Path) -> None:
    found = {}
    for mode in ("sync", "streaming"):
        code, output = runs.run(tmp_path / mode, *SHORT, f"algorithm.mode={mode}", "trainer.dp=2", "loss.kl_coef=0.01")
        assert code == 0, output
        found[mode] = steps_of(tmp_path / mode)
    for alone, chunked in zip(found["sync"], found["streaming"], strict=True):
        assert figures(chunked) == pytest.approx(figures(alone), rel=1e-6, abs=1e-6)
        assert alone["staleness/max"] == chunked["staleness/max"] == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_async_stays_within_its_staleness(tmp_path: Path, staleness: int) -> None:
    run_dir = tmp_path / "run"
    code, output = runs.run(
        run_dir, "validation.every=3", "algorithm.steps=6", "algorithm.mode=async",
        f"algorithm.max_staleness={staleness}", "sync.in_flight=keep",
    )  # fmt: skip
    assert code == 0, output
    steps = steps_of(run_dir)
    seen = [step["staleness/max"] for step in steps]
    assert len(steps) == 6 and max(seen) <= staleness
    if staleness:
        assert max(seen) > 0 and steps[0]["queue/groups_in_flight"] == 2 * 8
