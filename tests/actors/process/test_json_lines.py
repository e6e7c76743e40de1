"""Tests that a line torn by a kill or a full disk harms no other line, for every reader and writer of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.actors.process.json_lines import LineTail, append, encoded, read_lines
from headrace.actors.sample_file import SampleFile, SamplesConfig
from headrace.tests.full_disk import file_size_limit
from headrace.trainers.observe.metrics import MetricsWriter, read_metrics
from headrace.trainers.observe.pages.report import write_report
from headrace.trainers.observe.reward_errors import RewardErrors
from headrace.trainers.observe.samples import read_samples
from headrace.trainers.pool.server.gpu_trace import read_events

TURNS = {"turns": [], "rewards": {}, "reward": 1.0, "error": "", "prompt": "", "answer": "", "finish_reason": ""}


def line(number: int, nbytes: int = 50) -> dict[str, object]:
    return {"kind": "episode", "set": "train", "key": f"{number}.0", "version": 0, "step": number, "text": "x" * nbytes}


def steps(path: Path) -> list[object]:
    return [line["step"] for _, line in read_lines(path)]


def test_a_write_that_finds_the_disk_full_leaves_no_part_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append(path, encoded([line(0)]))
    size = path.stat().st_size
    with file_size_limit(size + 150), pytest.raises(OSError, match="lines.jsonl cannot be written: File too large"):
        append(path, encoded([line(1), line(2)]))
    assert path.stat().st_size == size
    append(path, encoded([line(3)]))
    assert steps(path) == [0, 3]


@pytest.mark.parametrize("torn", [b"{", b'{"text": "' + b"x" * 200_000])
def test_half_a_line_of_a_killed_writer_is_cut_off_by_the_next(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    for before in (b"", encoded([line(0)])):
        path.write_bytes(before + torn)
        append(path, encoded([line(1)]))
        assert path.read_bytes() == before + encoded([line(1)])


def test_a_torn_line_in_the_middle_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines.jsonl"
    tail = LineTail(path)
    whole = encoded([line(0)])
    path.write_bytes(whole[:-9] + encoded([line(1), line(2)]) + b"\0\0\n[]\n\xff\n" + whole[:9])
    assert steps(path) == [2] and "lines.jsonl: 4 torn line(s) left out, of 5" in caplog.text
    assert [line["step"] for line in tail.read()] == [2]
    append(path, encoded([line(3)]))
    assert [line["step"] for line in tail.read()] == [3]


READERS: dict[str, Callable[[Path], int]] = {
    "samples": lambda path: len(read_samples(path)),
    "metrics": lambda path: len(read_metrics(path)[0]),
    "trace of the pool": lambda path: len(read_events(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_fails_at_a_torn_line(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "lines.jsonl"
    whole = [line(number) | TURNS for number in range(4)]
    path.write_bytes(encoded(whole[:1])[:-9] + encoded(whole[1:]))
    assert READERS[reader](path) == 2


def test_a_full_file_of_samples_with_a_torn_line_takes_further_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SampleFile(str(path), SamplesConfig(every=1, max_mib=1), prompts_per_step=1)
    path.write_bytes(encoded([line(0, 600_000)])[:-9] + encoded([line(1, 300_000), line(2, 300_000)]))
    file.append([line(3, 600_000)])
    assert [json.loads(text)["key"] for text in path.read_text().splitlines()] == ["2.0", "3.0"]


def test_a_disk_that_is_full_for_a_while_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = SampleFile(str(tmp_path / "samples.jsonl"), SamplesConfig(every=1), prompts_per_step=1)
    MetricsWriter(tmp_path / "metrics.jsonl").log(1, {})
    errors = RewardErrors(tmp_path)
    with file_size_limit(20):
        file.append([line(0) | TURNS])
        errors.note(1, 2, 2, ["reward 'x' raised ValueError"])
    file.append([line(1) | TURNS])
    errors.note(2, 1, 2, [])
    assert caplog.text.count("cannot be written: File too large") + caplog.text.count("are not written: File too") == 2
    assert len(read_samples(tmp_path / "samples.jsonl")) == 1 and steps(tmp_path / "reward_errors.jsonl") == [2]
    assert write_report(tmp_path).exists()
