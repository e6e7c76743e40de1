"""The command: exit codes, messages, and what it does not import."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import headrace
from headrace.cli import main
from headrace.cli.command import ended
from headrace.cli.outcome import BROKEN_PIPE
from headrace.cli.terminal import print_table
from headrace.dataplane.imports import import_object
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.observe.run_folder import RunFolder
from headrace.trainers.run.launch import run_training

QUIET = ["logging.tensorboard=false", "logging.progress=false"]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the launcher: no Ray, no model."""
    module = types.ModuleType("headrace.trainers.run.early_ray")

    def train_early(config: Config, *, resume: bool) -> None:
        with RunFolder(config, resume=resume) as folder:
            folder.metrics.log(1, {"reward/mean": 0.5})
            folder.metrics.finish(1)

    vars(module)["train_early"] = train_early
    monkeypatch.setitem(sys.modules, "headrace.trainers.run.early_ray", module)
    dry_run = types.ModuleType("headrace.trainers.run.checks.dry_run")
    vars(dry_run)["describe"] = lambda config, plan, notes: f"placement: dp={config.trainer.dp}"
    monkeypatch.setitem(sys.modules, "headrace.trainers.run.checks.dry_run", dry_run)
    return module


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {steps: 2}\ndata: {max_prompt_tokens: 16}\nrollout: {max_new_tokens: 8}\n")
    return str(path)


def fail_with(error: BaseException) -> Callable[..., None]:
    def train_early(config: Config, *, resume: bool) -> None:
        with RunFolder(config, resume=resume) as folder:
            folder.metrics.log(1, {"reward/mean": 0.5})
            raise error

    return train_early


def train(config: str, run_dir: Path, *more: str) -> int:
    return main(["train", config, f"run.dir={run_dir}", *QUIET, *more])


def test_a_finished_run_exits_0_and_resume_goes_on(launch: types.ModuleType, config: str, tmp_path: Path) -> None:
    assert train(config, tmp_path / "run") == 0
    assert '"event": "finished"' in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert train(config, tmp_path / "run", "--resume", "algorithm.steps=3") == 0
    assert "steps: 3" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_second_run_in_the_folder_exits_2(
    launch: types.ModuleType, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config, tmp_path / "run") == 0
    assert train(config, tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "already holds a run" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trainer.dp_=1"], "headrace: trainer.dp_: unknown key; did you mean trainer.dp?"),
        (["trainer.dp=3", "rollout.num_engines=5"], "trainer.dp=3"),
        (["--resume"], "--resume: run.dir is not set"),
        (["--dp=3"], "unknown argument '--dp=3'"),
        (["trainer.lr", "--dry-run"], "expected key.sub=value"),
        (["--dry-run", "run.dir=runs/dry", "trainer.lr"], "headrace: override 'trainer.lr': expected key.sub=value"),
        (["--dry-run", "run.dir=runs/dry", "--lr=3", "trainer.lr"], "unknown argument '--lr=3'"),
    ],
)
def test_mistakes_exit_2_with_a_sentence(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["train", config, *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_a_reader_that_ends_early_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headrace train my.yaml --dry-run | head` prints what `head` takes, and nothing else."""
    for text in ("a line", "x" * 100_000):  # The first one stays in the buffer until the end.
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as output, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", output)
            assert ended(lambda text=text: print(text) or 0) == BROKEN_PIPE
    assert capsys.readouterr().err == ""

    def fails() -> int:
        raise BrokenPipeError("an actor has gone")

    assert ended(fails) == 1 and "an actor has gone" in capsys.readouterr().err


def test_other_mistakes_exit_2(tmp_path: Path) -> None:
    assert main(["train", str(tmp_path / "missing.yaml")]) == 2
    assert main(["train"]) == 2
    assert main([]) == 2
    assert main(["no-such-command"]) == 2
    assert main(["report", str(tmp_path)]) == 2


def test_options_and_overrides_mix_in_any_order(
    launch: types.ModuleType, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, "trainer.dp=2", "--dry-run", "trainer.dp=4", "run.name=mixed"]) == 0
    output = capsys.readouterr().out
    assert "placement: dp=4" in output and "dp: 4" in output and "name: mixed" in output


def test_overrides_behind_the_names_of_sets_are_applied(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", config, "--set", "one", "two", "run.seed=true"]) == 2
    assert "run.seed: got true, expected a number" in capsys.readouterr().err


def test_a_dry_run_leaves_nothing(launch: types.ModuleType, config: str, tmp_path: Path) -> None:
    assert train(config, tmp_path / "run", "--dry-run") == 0
    assert not (tmp_path / "run").exists()


def test_a_failure_exits_1_with_a_panel_a_traceback_file_and_a_report(
    launch: types.ModuleType, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vars(launch)["train_early"] = fail_with(RuntimeError("rollout actor 0 died"))
    assert train(config, tmp_path / "run") == 1
    error = capsys.readouterr().err
    assert "RuntimeError: rollout actor 0 died" in error and f"{tmp_path}/run/error.txt\n" in error
    assert "Traceback (most" not in error
    assert "Traceback (most" in (tmp_path / "run" / "error.txt").read_text()
    assert "at step 1 of 2" in (tmp_path / "run" / "report.html").read_text()


def test_a_failure_before_the_folder_shows_its_traceback(
    launch: types.ModuleType, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_early(config: Config, *, resume: bool) -> None:
        raise RuntimeError("early")

    vars(launch)["train_early"] = train_early
    assert train(config, tmp_path / "run") == 1
    assert "Traceback (most" in capsys.readouterr().err


def test_interrupts_exit_130_and_users_mistakes_2(launch: types.ModuleType, config: str, tmp_path: Path) -> None:
    vars(launch)["train_early"] = fail_with(KeyboardInterrupt())
    assert train(config, tmp_path / "a") == 130
    assert not (tmp_path / "a" / "error.txt").exists()
    vars(launch)["train_early"] = fail_with(UserError("model.path: nothing there"))
    assert train(config, tmp_path / "b") == 2


def test_report_is_built_again(launch: types.ModuleType, config: str, tmp_path: Path) -> None:
    assert train(config, tmp_path / "run") == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "finished, 1 steps" in (tmp_path / "run" / "report.html").read_text()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"headrace {headrace.__version__}"
    assert main(["train", "--help"]) == 0
    assert "key.sub=value" in capsys.readouterr().out


@pytest.mark.processes
def test_mistakes_and_help_import_nothing_heavy(config: str) -> None:
    code = (
        "import sys\n"
        "from headrace.cli import main\n"
        "assert main(['train', sys.argv[1], 'trainer.dp_=1']) == 2\n"
        "assert main(['--help']) == 0\n"
        "assert main(['doctor', '--constraints', 'cpu']) == 0\n"
        "import headrace.trainers.run.checks.doctor\n"
        "heavy = {'torch', 'tensordict', 'ray', 'vllm', 'transformers', 'matplotlib', 'tensorboard'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_sigterm_unwinds_the_run(config: str, tmp_path: Path) -> None:
    code = (
        "import sys, time, types\n"
        "module = types.ModuleType('headrace.trainers.run.early_ray')\n"
        "def train_early(config, *, resume):\n"
        "    try:\n"
        "        print('up', flush=True)\n"
        "        for _ in range(600):\n"  # a signal that another thread is given does not wake a thread that sleeps
        "            time.sleep(0.1)\n"
        "    finally:\n"
        "        print('cleaned up', flush=True)\n"
        "module.train_early = train_early\n"
        "sys.modules['headrace.trainers.run.early_ray'] = module\n"
        "from headrace.cli import main\n"
        "sys.exit(main(['train', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", code, config]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        start = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait(timeout=20) == 143
        assert time.monotonic() - start < 20


def test_a_table_is_printed_whole_in_any_width() -> None:
    table = Table(title="headrace simulate")
    for name in ("run", "mode", "seconds per step", "trainer idle share"):
        table.add_column(name)
    table.add_row("as configured", "streaming", "0.158", "12.5 %")
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=30, force_terminal=terminal, color_system=None)
        print_table(console, table)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        for cell in ("as configured", "streaming", "0.158", "12.5 %", "seconds per step", "trainer idle share"):
            assert cell in text
        assert not terminal or max(map(len, text.splitlines())) <= 34


def test_replay_imports_the_users_modules_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("headrace.trainers.run.rollout_replay")

    def replay_rollouts(*_: object) -> None:
        assert import_object("my_replayed_rewards:f", "reward")() == 7
        raise UserError("replayed")

    vars(module).update(replay_rollouts=replay_rollouts, write_replay=None)
    monkeypatch.setitem(sys.modules, "headrace.trainers.run.rollout_replay", module)
    (tmp_path / "my_replayed_rewards.py").write_text("def f():\n    return 7\n")
    (tmp_path / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main(["replay", "."]) == 2
    assert capsys.readouterr().err == "headrace: replayed\n"


def test_resume_with_nothing_to_do_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 8}, "logging": {"tensorboard": False}}
    done = build_config({"run": {"dir": str(tmp_path / "run")}, "algorithm": {"steps": 5}, **small})
    with RunFolder(done, resume=False) as folder:
        folder.metrics.log(5, {})
        (folder.checkpoints_dir / "step_000005").mkdir()
        (folder.checkpoints_dir / "step_000005.json").write_text('{"step": 5}')
        (folder.path / "model").mkdir()
    assert run_training(done, resume=True) == tmp_path / "run"
    assert "has 5 steps and its model; set algorithm.steps above 5" in capsys.readouterr().out
