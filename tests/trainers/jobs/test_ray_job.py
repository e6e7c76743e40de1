"""The manifest of a RayJob has KubeRay's fields, and says of each pod what the run needs there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import main
from headrace.tests.trainers.jobs.kuberay_fields import RAY_JOB, problems

GIVEN = ("run.dir=runs/mine", "dataplane.store.capacity_mib=4096")
SIZES = ("--nodes", "4", "--gpus-per-node", "8", "--image", "registry/headrace:1", "--claim", "shared")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("run: {name: My run}\n# Käse\n")
    return "run.yaml"


def manifest(config: str, *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the RayJob that the command writes."""
    assert main(["launch", "k8s", config, *GIVEN, *SIZES, *words]) == 0
    [first, second] = yaml.safe_load_all(Path("job.yaml").read_text())
    return first, second


def test_a_manifest_has_the_fields_of_kuberay(config: str) -> None:
    _, job = manifest(config)
    assert problems(job, RAY_JOB, "RayJob") == []
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["tokens"] = job["spec"]["backoffLimit"] = "3"
    del job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["groupName"]
    assert sorted(problem.split(": ")[1] for problem in problems(job, RAY_JOB, "RayJob")) == [
        "got '3', expected int", "missing", "there is no such field",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "name"), [("2nd run!", "run-2nd-run"), ("a" * 46 + " long", "a" * 46), ("- -", "headrace")]
)
def test_kuberay_accepts_the_name_of_a_job(config: str, given: str, name: str) -> None:
    """It starts with a letter and has at most 47 characters."""
    _, job = manifest(config, f"run.name='{given}'")
    assert job["metadata"]["name"] == name


def test_the_head_has_no_gpu_and_workers_have_room(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, job = manifest(config)
    assert settings["data"]["config.yaml"] == Path(config).read_text()
    assert "    run: {name: My run}\n    # Käse\n" in Path("job.yaml").read_text(), "the text is readable"
    assert Path("job.yaml").read_text() in capsys.readouterr().out
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}  # KubeRay makes the token, which no file of ours has
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    [driver], [container] = (group["template"]["spec"]["containers"] for group in (head, workers))
    assert "nvidia.com/gpu" not in driver["resources"]["limits"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}
    assert (workers["replicas"], job["metadata"]["name"]) == (4, "my-run")
    volumes = {volume["name"]: volume for volume in workers["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "6144Mi"}
    assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == "shared"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/work", "/etc/headrace"}


RAY = """#!{python}
import shlex, subprocess, sys
words = sys.argv[1 + sys.argv.index("--") :]
sys.exit(subprocess.run(shlex.join(words), shell=True, env=dict(PATH={path!r})).returncode)
"""
"""A stand-in for `ray job submit`, whose command a shell runs in the head pod."""


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["K8sJobMode", "HTTPMode"])
def test_a_repeated_job_resumes(config: str, tmp_path: Path, mode: str) -> None:
    """KubeRay writes the entry point unquoted into a line of bash in the pod that submits. Nothing else may run there.

    Or it gives the entry point to a shell in the head pod."""
    _, job = manifest(config, f"--mount={tmp_path}", "algorithm.steps=2", "run.name='it''s'")
    head, submitter = tmp_path / "head", tmp_path / "submitter"
    for folder, program, text in (
        (head, "python", '#!/bin/sh\necho python "$@"\n'),
        (head, "headrace", '#!/bin/sh\necho headrace "$@"\n'),
        (submitter, "ray", RAY.format(python=sys.executable, path=f"{head}:/usr/bin:/bin")),
    ):
        folder.mkdir(exist_ok=True)
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    entry = job["spec"]["entrypoint"]
    shell = ["env", f"PATH={head}:/usr/bin:/bin", "sh", "-c", entry]
    if mode == "K8sJobMode":
        shell = ["env", f"PATH={submitter}", "/bin/bash", "-ce", f"ray job submit --no-wait -- {entry} ; true"]

    def said() -> list[str]:
        return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()

    run_dir = tmp_path / "runs" / "mine"
    train = f"headrace train /etc/headrace/config.yaml {GIVEN[1]} algorithm.steps=2 run.name='it''s'"
    train += f" run.dir={run_dir} resources.ray_address=auto"
    assert said() == ["python -m headrace.trainers.jobs.joined_nodes auto 5 600", train]
    (run_dir / "metrics.jsonl").write_text("{}\n")
    assert said()[1] == train, "a run without a checkpoint begins again"
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (run_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_000001.json").touch()
    assert said()[1] == f"{train} --resume"


def test_memory_needs_a_unit(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "k8s", config, *GIVEN, *SIZES, "--memory", "lots"]) == 2
    said = "argument --memory: got 'lots', expected a number with a unit, such as 64Gi"
    assert said in capsys.readouterr().err and not Path("job.yaml").exists()


def test_a_run_folder_outside_of_the_volume_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "k8s", config, "run.dir=/home/me/runs", *SIZES]) == 2
    assert capsys.readouterr().err == (
        "headrace: run.dir: got '/home/me/runs', expected a folder in --mount /work, the shared volume\n"
    )
