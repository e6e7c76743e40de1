"""`headrace bench gpu` when it is interrupted or fails: it shows and writes the figures of what was finished."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.bench import records
from headrace.bench.gpu import whole_runs
from headrace.bench.gpu.nvml import GpuSamples
from headrace.bench.gpu.train_run import TrainOutcome, TrainTask, read_outcome
from headrace.bench.gpu.work_report import WorkReport
from headrace.bench.gpu.works import WORKS
from headrace.bench.progress import Progress
from headrace.cli import main, outcome
from headrace.tests.bench.gpu.runs import record, write_run
from headrace.trainers.errors import UserError


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def test_each_phase_is_shown_once_with_its_seconds() -> None:
    shown: list[str] = []
    tell = Progress(shown.append, started=time.monotonic() - 5)
    tell.plan("check", "round 1", "round 2", "round 3", "part 4", "part 6", "host link")
    assert tell.missing() == "not measured or not to the end: check, round 1 to 3, part 4, part 6, host link"
    for phase in ("making the model", "round 1 of 2", "round 1 of 2"):
        tell(phase)
    assert [line.split(" s  ")[1] for line in shown] == ["making the model", "round 1 of 2"]
    assert 5 <= float(shown[0].split()[0]) < 15


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory\nat all")], ids=["Ctrl-C", "failure"])
def test_a_work_that_does_not_end_keeps_its_figures(error: BaseException, tmp_path: Path) -> None:
    report = WorkReport("w", tmp_path / "out")
    report.tell.plan("first", "second", "third")

    def judge() -> None:
        report.summary = {"gpu.w.first": 1.0}

    with pytest.raises(type(error)), report.kept(judge):
        report.tell.finish("first")
        report.tell("measuring the second")
        raise error
    found = summary_of(tmp_path / "out")
    assert found["gpu.w.first"] == 1.0
    told = found["conditions"]["interrupted"]
    assert told.endswith("; not measured or not to the end: second, third") and "'measuring the second'" in told
    assert told.startswith(
        "interrupted 0 s" if isinstance(error, KeyboardInterrupt) else "failed with RuntimeError (no"
    )


def test_a_part_that_is_left_out_is_complained_of_and_a_mistake_leaves_nothing(tmp_path: Path) -> None:
    report = WorkReport("w", tmp_path / "out")
    report.tell.plan("first")
    with pytest.raises(UserError), report.kept(lambda: None):
        raise UserError("--work: got a mistake")
    assert not report.out.exists() and not report.interrupted
    with report.kept(lambda: None):
        pass
    assert report.complaints == ["not measured or not to the end: first"]
    assert "interrupted" not in summary_of(report.out)["conditions"]


def test_runs_that_are_over_are_shown_when_a_later_one_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of three runs is interrupted after its first step."""

    def fake_run(
        one: TrainTask, bounds: object, sampler: object, tell: Progress, keep: Callable[[TrainOutcome], None]
    ) -> None:
        first = one.folder.name == "cpu.1"
        tell(f"{one.folder.name}: starting")
        write_run(one.folder, [record(number, 2.0 * number, 1.0) for number in ((1, 2, 3) if first else (1,))])
        keep(read_outcome(one, time.time(), GpuSamples([])))
        if not first:
            raise KeyboardInterrupt

    monkeypatch.setattr(whole_runs, "run_train", fake_run)
    monkeypatch.setattr(whole_runs, "make_folder", lambda *_: None)
    monkeypatch.setattr(records, "_commit", lambda: "unknown")
    out = tmp_path / "out"
    assert main(["bench", "gpu", "--work", "grpo-tiny", "--repeat", "3", "--out", str(out)]) == 130
    printed = capsys.readouterr()
    assert "headrace: interrupted" in printed.err and "s a step" in printed.out and "1.00" in printed.out
    assert "in the phase 'cpu.2: starting'" in printed.out and " s  making the model\n" in printed.out
    found = summary_of(out)
    assert found["gpu.grpo-tiny.cpu.step_s"] == 1.0
    assert found["conditions"]["interrupted"].endswith("not measured or not to the end: cpu.2, cpu.3")
    assert found["conditions"]["interrupted"] in printed.out
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [len(line["steps"]) for line in lines] == [3, 1]
    assert found["conditions"]["interrupted"] in (out / "report.md").read_text()


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files and folders of shared memory in which these processes map anything."""
    found: set[Path] = set()
    for process in processes:
        with suppress(psutil.Error):
            found |= {Path(one.path) for one in process.memory_maps() if one.path.startswith("/dev/shm/")}
    return {Path("/dev/shm", path.relative_to("/dev/shm").parts[0]) for path in found}


def test_two_signals_are_one_and_one_that_gets_lost_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "LOST_S", 0.05)
    before, cleaned = signal.getsignal(signal.SIGINT), False
    with outcome.stop_at_once():
        with pytest.raises(KeyboardInterrupt):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)  # it does not end the cleaning up
                cleaned = True
        assert cleaned
    with outcome.stop_at_once(), pytest.raises(KeyboardInterrupt):
        with suppress(KeyboardInterrupt):  # as vLLM does
            signal.raise_signal(signal.SIGINT)
        time.sleep(10)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("work", "options", "phase", "figure"),
    [
        pytest.param("train-tiny", ("--tokens", "64"), "step 5 of", "tokens_per_s", id="train"),
        pytest.param("grpo-tiny", (), r"cpu: ([3-9]|\d\d+) of", "cpu.step_s", id="grpo"),
        pytest.param("pool-tiny", (), r"alone: ([3-9]|\d\d+) of", "alone.step_s", id="pool"),
    ],
)
def test_the_command_ends_at_a_signal_with_its_figures(
    work: str, options: tuple[str, ...], phase: str, figure: str, tmp_path: Path
) -> None:
    """The signal comes twice, as from `timeout`. No process stays behind."""
    out = tmp_path / "out"
    module = ["headrace.cli", "bench", "gpu"] if work in WORKS else ["headrace.tools.measure.pool"]
    command = [sys.executable, "-m", *module, "--work", work, "--steps", "1000", *options]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not lines or not re.search(phase, lines[-1]):
            lines.append(process.stdout.readline())
            assert lines[-1], f"ended early: {lines} {process.communicate()[1]}"
        started = psutil.Process(process.pid).children(recursive=True)
        mapped = shared_memory(started)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130 and "headrace: interrupted" in errors, errors
    found = summary_of(out)
    assert found[f"gpu.{work}.{figure}"] > 0
    told = found["conditions"]["interrupted"]
    assert told in printed and f"in the phase '{phase.split()[0]}" in told, "it may have gone on meanwhile"
    assert not psutil.wait_procs(started, timeout=10)[1], "a process is left"
    assert mapped or not work.startswith("grpo"), "the rows of a run are in shared memory"
    assert not [path for path in mapped if path.exists()]
