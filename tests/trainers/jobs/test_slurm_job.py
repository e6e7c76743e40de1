"""The batch file for Slurm: its options, its shell code, and what the command refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli import main

SIZES = ("--nodes", "4", "--gpus-per-node", "8")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("run: {name: first, dir: runs/mine}\n")
    return "run.yaml"


def written(config: str, *words: str) -> list[str]:
    """The lines of the batch file that the command writes."""
    assert main(["launch", "slurm", config, *words]) == 0
    return Path("job.sh").read_text().splitlines()


def test_a_job_has_the_options_of_its_sizes(config: str, tmp_path: Path) -> None:
    lines = written(config, *SIZES, "--time=2:00:00", "--partition", "gpu", "--account", "me", "--sbatch=--mem=0")
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert options == [
        "--job-name=first", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive",
        f"--chdir={tmp_path}", "--output=%x-%j.out", "--open-mode=append", "--requeue", "--signal=B:USR1@120",
        "--partition=gpu", "--account=me", "--time=2:00:00", "--mem=0",
    ]  # fmt: skip
    assert f"TRAIN=(headrace train {tmp_path}/run.yaml run.dir={tmp_path}/runs/mine)" in lines
    assert any(line.startswith("export NUM_GPUS=8") for line in lines)


def test_a_job_on_cpus_in_a_container(config: str, tmp_path: Path) -> None:
    words = ("--nodes=2", "--cpus-per-node=16", "--container=image.sqsh", "algorithm.steps=2", "run.dir=/shared/a b")
    lines = written(config, *words)
    assert "#SBATCH --cpus-per-task=16" in lines and not [line for line in lines if "gpus-per-node" in line]
    assert f"TRAIN=(headrace train {tmp_path}/run.yaml algorithm.steps=2 'run.dir=/shared/a b')" in lines
    mounts = f"'--container-mounts={tmp_path}:{tmp_path},/shared/a b:/shared/a b'"
    assert [line for line in lines if line.startswith("STEP=(srun") and mounts in line]
    assert not [line for line in lines if line.startswith("export PATH")]  # the image has its own programs


def test_keys_of_a_joined_ray_have_an_effect_in_a_job(config: str) -> None:
    lines = written(config, *SIZES, "resources.ship=[mine.py]", "resources.elastic=true")
    assert any(line.startswith("TRAIN=") and "'resources.ship=[mine.py]'" in line for line in lines)


@pytest.mark.processes
@pytest.mark.parametrize("words", [SIZES, ("--nodes=1", "--cpus-per-node=2", "--container=a b")])
def test_the_shell_reads_a_job(config: str, words: tuple[str, ...]) -> None:
    written(config, *words)
    subprocess.run(["bash", "-n", "job.sh"], check=True)
    # SC2016: the nodes expand what is in single quotes. SC2054: mounts have commas. SC2329: a trap calls the function.
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC2016,SC2054,SC2329", "job.sh"], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.dir=null",), "run.dir: not set, expected a folder that all hosts share"),
        (("resources.ray_address=auto",), "resources.ray_address: got 'auto', expected no value"),
        (("--nodes", "0"), "argument --nodes: got '0', expected a positive number"),
        (("--time", "25h"), "argument --time: got '25h', expected minutes, H:MM:SS or D-HH:MM:SS"),
        (("--out", "run.yaml"), "--out: run.yaml exists and is not a job that this command wrote"),
        (("--submit",), "--submit: the program sbatch is not on the PATH"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...], said: str, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert main(["launch", "slurm", config, *SIZES, *words]) == 2
    assert said in capsys.readouterr().err and not Path("job.sh").exists()


@pytest.mark.processes
def test_a_job_is_written_again_and_submitted(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    written(config, *SIZES)
    stand_in = tmp_path / "bin" / "sbatch"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "submitted $1"\n[ "$(grep -c nodes=2 $1)" = 1 ]\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    assert main(["launch", "slurm", config, "--nodes=2", "--submit"]) == 0
    assert capfd.readouterr().out.endswith("submitted job.sh\n")
    assert main(["launch", "slurm", config, "--nodes=4", "--submit"]) == 1


SRUN = """#!/bin/sh
case "$*" in
  *getsockname*) echo 10.0.0.1 ;;
  *"ray start"*) exec sleep 60 ;;
  *) for word; do last=$word; done; echo "$last" > driver ;;
esac
"""


@pytest.mark.processes
@pytest.mark.parametrize("own", [True, False])
def test_a_start_that_is_repeated_without_a_checkpoint_begins_again(config: str, tmp_path: Path, own: bool) -> None:
    """`--resume` would be refused, which only the user should hear whose job finds the figures of another one."""
    written(config, *SIZES)
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho host1\n")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    figures = tmp_path / "runs" / "mine" / "metrics.jsonl"
    text = Path("job.sh").read_text().replace("export PATH=", "OTHER=")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    last = f"resources.ray_address=10.0.0.1:{10000 + 7 * 2}"
    for start in range(2):
        if not own or start:
            figures.parent.mkdir(parents=True, exist_ok=True)
            figures.write_text("{}\n")
        given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host1", "SLURM_RESTART_COUNT": str(start)}
        subprocess.run(["bash", "-c", text], check=True, timeout=30, env=environment | given)
        assert Path("driver").read_text().strip() == (last if own else "--resume")
    assert figures.exists() != own
