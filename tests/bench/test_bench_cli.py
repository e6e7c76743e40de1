"""`headrace bench`: its arguments and exit codes, and that the command line starts without heavy imports."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bench.transfer import benchmark
from headrace.cli import main


def test_the_command_has_everything(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("train", "doctor", "report", "bench"))
    assert main(["bench", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("transfer", "replica", "step", "weights", "hosts", "gpu"))


def test_mistakes_exit_2_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "transfer", "--stores", "shn", "--out", str(tmp_path)]) == 2
    assert "headrace: --stores: got shn, expected some of local" in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    assert main(["bench", "replica", "--out", str(file)]) == 2
    assert "is a file, expected a folder" in capsys.readouterr().err
    assert main(["bench", "replica", "--sizes", "1"]) == 2
    assert "--sizes: got 1, expected replicas of at least 2 ranks" in capsys.readouterr().err
    assert main(["bench", "chaos"]) == 2
    assert "invalid choice: 'chaos'" in capsys.readouterr().err
    assert main(["bench"]) == 2


@pytest.mark.processes
def test_transfer_prints_tables_and_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = benchmark.TransferOptions
    small = functools.partial(real, in_process=True, share=1e-9)
    monkeypatch.setattr(benchmark, "TransferOptions", small)
    arguments = ["--stores", "local", "--workloads", "tiny", "--pattern", "put", "get", "--quick"]
    assert main(["bench", "transfer", *arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "tiny: milliseconds" in printed and "not measured: transferqueue" in printed
    assert (tmp_path / "report.md").exists()


@pytest.mark.processes
def test_starting_the_command_imports_nothing_heavy():
    code = "import sys, headrace.cli; print([m for m in ('torch', 'ray', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.processes
def test_transfer_over_ray_against_transferqueue(tmp_path: Path):
    arguments = ["--stores", "shm", "simple", "--workloads", "rl-256", "--quick", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "headrace.cli", "bench", "transfer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    for store in ("shm", "simple"):
        for op in ("put", "get", "get8", "clear"):
            assert summary[f"rl-256.{op}.{store}.vs_transferqueue"] > 1
        assert summary[f"step.{store}.vs_transferqueue"] > 0
        assert summary[f"rl-256.put.{store}.vs_ray"] > 0
