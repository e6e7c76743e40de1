"""Tests writing metrics.jsonl, reading metrics back, and the partial line of a dead writer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from headrace.trainers.observe.metrics import MetricsWriter, read_metrics, time_split


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_flat_flushed_and_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.log(
        1, {"reward/mean": np.float32(0.5), "train/loss": math.nan, "policy/version": np.int64(1), "val/x": None}
    )
    [line] = lines(path)  # before close: every line is flushed
    assert list(line)[0] == "step"
    assert line.pop("time/elapsed_s") >= 0 and line.pop("run/attempt") == 0
    assert line == {"step": 1, "reward/mean": 0.5, "train/loss": None, "policy/version": 1, "val/x": None}
    writer.finish(1, reward=0.5)
    writer.close()
    writer.close()
    assert lines(path)[-1]["event"] == "finished"


def test_a_value_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="'reward/parts': got"):
        writer.log(1, {"reward/mean": 0.5, "reward/parts": {"a": 1}})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_torn_line_is_cut_off_by_the_next_writer_and_left_out_by_readers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1}\n{"step": 2, "a"')
    assert read_metrics(path) == ([{"step": 1, "a": 1}], [])
    writer = MetricsWriter(path)
    writer.log(2, {"a": 2})
    writer.close()
    records, _ = read_metrics(path)
    assert [record["a"] for record in records] == [1, 2]


def test_a_resumed_run_replaces_the_steps_it_takes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(5):
        writer.log(step, {"a": 0})
    writer.event("resumed", 2)
    writer.log(3, {"a": 1})
    writer.log(3, {"val/exact_match": 0.5})
    writer.close()
    records, events = read_metrics(path)
    assert [(record["step"], record["a"]) for record in records] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert records[-1]["val/exact_match"] == 0.5
    assert [event["event"] for event in events] == ["resumed"]


def test_every_line_says_after_how_many_restarts_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for attempt in range(2):
        writer = MetricsWriter(path)
        if attempt:
            writer.event("resumed", 1)
        writer.log(2, {"a": attempt})
        writer.event("resumed", 1, died="train worker 0")
        writer.log(2, {"a": attempt})
        writer.close()
    assert [line["run/attempt"] for line in lines(path) if "event" not in line] == [0, 1, 2, 3]


@pytest.mark.parametrize("line", ['{"reward": 1}', '{"step": "x"}'])
def test_a_line_without_a_step_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_time_split_adds_up_to_the_step() -> None:
    record = {"time/step_s": 1.0, "time/rollout_s": 0.4, "time/train_s": 0.3, "time/logprob_s": 0.1}
    split = time_split({**record, "time/data_wait_s": 0.15, "time/sync_s": 0.05})
    assert split == pytest.approx(
        {"rollout": 0.4, "data wait": 0.15, "log-probs": 0.0, "train": 0.25, "sync": 0.05, "other": 0.15}
    )
    assert sum(split.values()) == pytest.approx(1.0)
    assert time_split({"val/exact_match": 1.0}) == {}
