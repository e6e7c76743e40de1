"""Tests what a run folder contains, which folders it refuses, and what it keeps."""

from __future__ import annotations

import errno
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.tests.full_disk import file_size_limit
from headrace.trainers.config.config import Config, resolved_yaml
from headrace.trainers.config.load import build_config, load_config
from headrace.trainers.errors import UserError
from headrace.trainers.observe.metrics import MetricsWriter, read_metrics
from headrace.trainers.observe.pages.report import write_report
from headrace.trainers.observe.progress import Progress
from headrace.trainers.observe.run_folder import RunFolder
from headrace.trainers.run.launch import tell_how_to_go_on


def config_for(folder: Path, **algorithm: int) -> Config:
    return build_config({"run": {"dir": str(folder)}, "logging": {"tensorboard": False}, "algorithm": algorithm})


def finished_run(folder: Path) -> Path:
    with RunFolder(config_for(folder), resume=False) as run:
        run.metrics.log(1, {"reward/mean": 0.5})
        run.metrics.finish(1)
    return folder


def test_it_holds_the_resolved_configuration_and_the_figures(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "deep" / "run")
    assert load_config(folder / "config.yaml") == config_for(folder)
    assert (folder / "config.yaml").read_text() == resolved_yaml(config_for(folder)), "the whole one"
    records, events = read_metrics(folder / "metrics.jsonl")
    assert (len(records), events[-1]["event"]) == (1, "finished")
    assert (folder / "checkpoints").is_dir()
    assert not (folder / "error.txt").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)

    def contents() -> dict[str, bytes]:
        return {
            path.name: path.read_bytes() if path.suffix in (".yaml", ".jsonl") else b"" for path in folder.iterdir()
        }

    before = contents()
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder(config_for(folder, steps=7), resume=False)
    assert contents() == before


def test_a_live_run_is_refused_with_and_without_resume(tmp_path: Path) -> None:
    with RunFolder(config_for(tmp_path), resume=False) as run:
        with pytest.raises(UserError, match=r"under way in .* \(pid \d+\)"):
            RunFolder(config_for(tmp_path), resume=False)
        run.metrics.log(1, {})
        with pytest.raises(UserError, match="under way"):
            RunFolder(config_for(tmp_path), resume=True)


@pytest.mark.processes
def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from headrace.trainers.config.load import build_config\n"
        "from headrace.trainers.observe.run_folder import RunFolder\n"
        "config = build_config({'run': {'dir': sys.argv[1]}, 'logging': {'tensorboard': False}})\n"
        "run = RunFolder(config, resume=False)\n"
        "run.metrics.log(1, {})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == -9
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder(config_for(tmp_path), resume=False)
    RunFolder(config_for(tmp_path), resume=True).close()


def test_resume_goes_on_and_keeps_the_earlier_configuration(tmp_path: Path) -> None:
    folder = finished_run(tmp_path)
    with RunFolder(config_for(folder, steps=200), resume=True) as run:
        run.resumed(1)
        run.metrics.log(2, {"reward/mean": 0.6})
    records, events = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert [event["event"] for event in events] == ["finished", "resumed"]
    assert load_config(folder / "config.yaml").algorithm.steps == 200
    assert load_config(folder / "config.before-resume-1.yaml") == config_for(folder)
    with RunFolder(config_for(folder, steps=200), resume=True):
        pass
    assert not (folder / "config.before-resume-2.yaml").exists()


def test_resume_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to resume"):
        RunFolder(config_for(tmp_path / "new"), resume=True)


def test_a_failure_leaves_its_traceback_and_says_where(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught, RunFolder(config_for(tmp_path), resume=False):
        raise RuntimeError("engine exploded")
    assert "engine exploded" in (tmp_path / "error.txt").read_text()
    assert "Traceback" in (tmp_path / "error.txt").read_text()
    assert caught.value.__notes__ == [f"The traceback is in {tmp_path / 'error.txt'}"]
    (tmp_path / "watchdog.txt").write_text("step 3, stage 'train'")
    # It had no figures yet: the next run may have the folder, and what there was to say of the old one is gone.
    RunFolder(config_for(tmp_path), resume=False).close()
    assert not (tmp_path / "error.txt").exists() and not (tmp_path / "watchdog.txt").exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be created"):
        RunFolder(config_for(tmp_path / "file" / "run"), resume=False)
    with pytest.raises(UserError, match="run.dir: not set"):
        RunFolder(Config(), resume=False)


# ---------------------------------------------------------------- what a failure leaves


def test_a_users_mistake_at_the_start_leaves_no_folder(tmp_path: Path) -> None:
    """A next start in the same folder works, even when the built-in model had been made."""
    for folder in (tmp_path / "deep" / "run", tmp_path):
        before = {path.name for path in tmp_path.iterdir()}
        with pytest.raises(UserError, match="no such model"), RunFolder(config_for(folder), resume=False) as run:
            run.metrics.event("warmup", 0, seconds=1.0)
            (run.path / "base_model").mkdir()
            raise UserError("no such model")
        assert {path.name for path in tmp_path.iterdir()} - {"run.lock"} == before
    RunFolder(config_for(tmp_path), resume=False).close()


def test_a_users_mistake_after_a_step_leaves_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError), RunFolder(config_for(tmp_path / "run"), resume=False) as run:
        run.metrics.log(1, {"reward/mean": 0.5})
        raise UserError("too late")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0] and not (tmp_path / "run" / "error.txt").exists()


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write of a text fail from now on, as on a full disk."""

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()  # as an open of a full disk leaves it
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)


def test_a_full_disk_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="journal of rollout 0 cannot be written") as caught:  # noqa: SIM117
        with RunFolder(config_for(tmp_path), resume=False) as run:
            run.metrics.log(1, {"reward/mean": 0.5})
            (run.checkpoints_dir / "step_000001.tmp").mkdir()
            (run.path / "model.new").mkdir()
            fill_disk(monkeypatch)
            raise RuntimeError("journal of rollout 0 cannot be written: No space left on device")
    [note] = caught.value.__notes__
    assert note.endswith("error.txt: No space left on device")
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"config.yaml", "metrics.jsonl", "checkpoints", "run.lock"}


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "checkpoints"), UserError("x")])
def test_an_error_after_the_folder_was_removed_says_so(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(FileNotFoundError, match="run.dir: .*run is gone: it was removed or renamed while") as caught:  # noqa: SIM117
        with RunFolder(config_for(tmp_path / "run"), resume=False) as run:
            run.metrics.log(1, {})
            shutil.rmtree(tmp_path / "run")
            raise error
    assert caught.value.__cause__ is error and not (tmp_path / "run").exists()


def test_a_report_that_cannot_be_written_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run(tmp_path / "run")
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        write_report(folder)
    assert not list(folder.glob("report*"))


def test_metrics_that_cannot_be_written_name_their_file(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.log(1, {})
    with file_size_limit(70), pytest.raises(OSError, match=r"metrics.jsonl cannot be written: File too large"):
        metrics.log(2, {})
    metrics.log(3, {})
    metrics.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")[0]] == [1, 3]


def test_incidents_are_sentences_in_a_file_with_their_step(tmp_path: Path) -> None:
    with RunFolder(config_for(tmp_path), resume=False) as run:
        assert not run.incidents_path.exists()
        run.incident(3, "engine 0 died:\n  out of memory")
        run.incident(4, "engine 1 died")
    first, second = run.incidents_path.read_text().splitlines()
    assert first.endswith(" step 3: engine 0 died: out of memory") and second.endswith(" step 4: engine 1 died")


def test_a_new_run_begins_without_the_samples_of_one_that_never_began(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with RunFolder(config_for(tmp_path), resume=False) as run:
        assert not (tmp_path / "samples.jsonl").exists()
        run.metrics.log(1, {})
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with RunFolder(config_for(tmp_path), resume=True):
        assert (tmp_path / "samples.jsonl").exists()


def test_a_run_that_stops_says_how_it_goes_on_or_that_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("tiny", 5)
    with RunFolder(config_for(tmp_path), resume=False) as run:
        tell_how_to_go_on(run, progress)
        assert capsys.readouterr().out == "", "nothing has begun"
        run.metrics.log(1, {})
        tell_how_to_go_on(run, progress)
        assert "has no checkpoint, so this run cannot be continued" in capsys.readouterr().out
        (run.checkpoints_dir / "step_000001").mkdir()
        (run.checkpoints_dir / "step_000001.json").write_text('{"step": 1}')
        tell_how_to_go_on(run, progress)
        said = capsys.readouterr().out
    assert said == f"to continue from the checkpoint of step 1: headrace train {run.config_path} --resume\n"
    with RunFolder(config_for(tmp_path / "it's ended"), resume=False) as run:
        run.metrics.log(1, {})
        run.metrics.finish(1)
        tell_how_to_go_on(run, progress)
        assert capsys.readouterr().out == "", "it has ended, without checkpoints"
        (run.checkpoints_dir / "step_000001").mkdir()
        (run.checkpoints_dir / "step_000001.json").write_text('{"step": 1}')
        tell_how_to_go_on(run, progress)
        said = capsys.readouterr().out
    assert said.startswith("to train longer, with N above 1: headrace train ")
    command = shlex.split(said.partition(": ")[2])
    assert command == ["headrace", "train", str(run.config_path), "--resume", "algorithm.steps=N"]
