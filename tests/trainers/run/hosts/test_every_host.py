"""The judgement of hosts that differ: each difference has its sentence, with the name of the host."""

from __future__ import annotations

import importlib
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from headrace.cli import main
from headrace.dataplane.listen_address import own_addresses
from headrace.tests import process_pool
from headrace.trainers.cluster.places.placement import ON_CPUS
from headrace.trainers.config.config import with_run_dir
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.run.hosts import host_facts
from headrace.trainers.run.hosts.cluster_doctor import ClusterReport, tables
from headrace.trainers.run.hosts.every_host import HostChecks, examine_hosts, gathered, hosts_of
from headrace.trainers.run.hosts.host_findings import AskedHost, Demands, Finding, HostFacts, judge
from headrace.trainers.run.hosts.shipped_modules import modules_beside, named_modules

HERE = HostFacts(
    resolves=True,
    versions={"Python": "3.11", "headrace": "1.0 (code 12)", "torch": "2.13.0", "ray": "2.60.0", "transformers": "5.1"},
    user=1000,
    umask="0022",
    shm_bytes=2 << 30,
    temporary="",
    settings={},
    num_gpus=0,
    shared={"run.dir": ""},
    clock_error_s=0.001,
)
FAR = AskedHost("b", "far", "10.0.0.2", ("rollout 1", "train worker 1"), 0)
NO_QUESTION = {"folder": "", "shared": {}, "paths": [], "modules": [], "needs": [], "key_file": ()}
DIFFERENCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "version of headrace": (
        {"versions": {**HERE.versions, "headrace": "0.9 (code 34)"}},
        "problem",
        "has headrace 0.9",
    ),
    "its code": ({"versions": {**HERE.versions, "headrace": "1.0 (code 99)"}}, "problem", r"expected 1.0 \(code 12\)"),
    "no headrace": ({"versions": {"Python": "3.11"}}, "problem", "cannot import headrace"),
    "version of torch": ({"versions": {**HERE.versions, "torch": "2.12.0"}}, "problem", "torch 2.12.0, expected 2.13"),
    "version of transformers": ({"versions": {**HERE.versions, "transformers": "4.0"}}, "problem", "transformers 4.0"),
    "Python": ({"versions": {**HERE.versions, "Python": "3.12"}}, "problem", "has Python 3.12, expected 3.11"),
    "run.dir": (
        {"shared": {"run.dir": "does not have"}},
        "problem",
        "run.dir: host far does not have .*/runs/mine, exp",
    ),
    "another run.dir": (
        {"shared": {"run.dir": "has another folder in place of"}},
        "problem",
        "checkpoints and .* journal",
    ),
    "permission": (
        {"shared": {"run.dir": "cannot write to (Read-only file system)"}},
        "problem",
        "write to .Read-only",
    ),
    "working folder": ({"has_folder": False}, "note", "far lacks the working folder"),
    "another key": (
        {"key_file": "dataplane.key_file: /k on far has another key"},
        "problem",
        "host far: dataplane.key_file: /k on far has another key",
    ),
    "module": (
        {"modules": {"my_reward:short": ("no module", "my_reward")}},
        "problem",
        "import 'my_reward:short': no mod",
    ),
    "its content": (
        {"modules": {"my_reward:short": ("the module there has no 'short'", "")}},
        "problem",
        "import 'my_reward:short': the module there has no 'short'; expected it to work there",
    ),
    "its error": (
        {"modules": {"my_reward:short": ("TypeError: odd", "")}},
        "note",
        "TypeError: odd; expected it to work",
    ),
    "model": ({"absent_paths": ["/models/mine"]}, "problem", "model.path: got '/models/mine', which host far does not"),
    "data": ({"absent_paths": ["/data/rows.jsonl"]}, "problem", "data.train: got '/data/rows.jsonl'"),
    "extra": (
        {"absent_packages": ["math_verify"]},
        "problem",
        r"far lacks math_verify.*pip install 'headrace\[math\]'",
    ),
    "shared memory": ({"shm_bytes": 64 << 20}, "problem", "got 1024, but /dev/shm of host far has 64 MiB"),
    "no shared memory": ({"shm_bytes": 0}, "problem", "/dev/shm of host far has 0 MiB"),
    "full disk": (
        {"temporary": "No space left on device"},
        "problem",
        "far cannot write temporary files .*No space",
    ),
    "GPUs": ({"num_gpus": 1}, "problem", r"far has 1 GPU\(s\), expected 2, which Ray gives"),
    "interface": (
        {"network": ["resources.interface: got 'ib0'"]},
        "problem",
        "host far: resources.interface: got 'ib0'",
    ),
    "own name": ({"resolves": False}, "note", "far does not know the address of its own name"),
    "user": ({"user": 1001}, "note", "far runs with user id 1001, and the driver with 1000"),
    "umask": ({"umask": "0077"}, "note", "far runs with umask 0077, and the driver with 0022"),
    "clock": ({"clock_s": -90.0}, "note", "the clock of host far is -90.0 s"),
}
"""Each difference of the host `far` -> facts of it, level, and a part of the sentence."""


@pytest.fixture
def demands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demands:
    settings = {"run": {"dir": str(tmp_path / "runs" / "mine")}, "reward": {"functions": [{"kind": "math_verify"}]}}
    found = {"/models/mine": "model.path", "/data/rows.jsonl": "data.train"}
    monkeypatch.setattr(Demands, "paths", property(lambda self: found))
    return Demands(with_run_dir(build_config(settings)))


def test_what_is_not_encrypted_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(hosts: int, tls: bool, num_gpus: int = 0, **sync: str) -> list[str]:
        plane = {"tls": tls, "key_file": str(tmp_path / "key")}
        demands = Demands(with_run_dir(build_config({"dataplane": plane, "sync": sync})))
        return list(demands.in_clear([replace(FAR, num_gpus=num_gpus)] * hosts))

    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert notes(2, False) == notes(1, True) == []
    assert notes(2, True) == ["dataplane.tls does not encrypt gradients, which gloo or NCCL carry between the hosts"]
    assert "encrypt the weights of sync.transport=collective, which" in notes(1, True, transport="collective")[0]
    assert "encrypt the weights of sync.transport=pairs, which" in notes(1, True, 2, transport="pairs")[0]
    assert not notes(1, True, transport="pairs")
    monkeypatch.delenv("RAY_USE_TLS")
    assert "(RAY_USE_TLS is unset)" in notes(1, False)[0]


@pytest.mark.parametrize("what", DIFFERENCES)
def test_each_difference_has_its_sentence(demands: Demands, what: str) -> None:
    facts, level, sentence = DIFFERENCES[what]
    host = replace(FAR, num_gpus=2) if what == "GPUs" else FAR
    findings = told(judge(demands, [host], {"b": replace(HERE, **facts)}, HERE))
    assert [finding.level for finding in findings] == [level], findings
    assert re.search(sentence, findings[0].sentence), findings[0].sentence


def test_all_differences_of_all_hosts_are_told_together(demands: Demands) -> None:
    facts = replace(HERE, umask="0077", absent_paths=["/models/mine"], shm_bytes=0)
    hosts = [FAR, replace(FAR, node="c", label="third"), replace(FAR, node="d", label="silent")]
    findings = told(judge(demands, hosts, {"b": facts, "c": facts, "d": "it did not answer within 90 s"}, HERE))
    assert [finding.host for finding in findings] == ["far"] * 3 + ["third"] * 3 + ["silent"]
    assert judge(demands, [FAR], {"b": HERE}, HERE) and not told(judge(demands, [FAR], {"b": HERE}, HERE))


def told(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def test_an_engine_needs_no_run_folder_if_nothing_of_it_goes_there(demands: Demands) -> None:
    facts = replace(HERE, shared={"run.dir": "does not have"})
    own = demands.config.model_copy(update={"model": demands.config.model.model_copy(update={"path": "org/model"})})
    [finding] = told(judge(Demands(own), [replace(FAR, actors=("engine 0",))], {"b": facts}, HERE))
    assert finding.level == "note" and finding.sentence.endswith("nothing of the run there needs it")
    [finding] = told(judge(Demands(own), [replace(FAR, actors=("rollout 0",))], {"b": facts}, HERE))
    assert finding.level == "problem" and finding.sentence.endswith("need it for the journal, samples.jsonl")


def test_environment_variables_that_differ_are_told_without_secrets(
    demands: Demands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_1234")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    there = replace(HERE, settings=host_facts.own_facts()["settings"])
    hosts = [replace(FAR, node="a", label="near"), FAR]
    said = [finding.sentence for finding in told(judge(demands, hosts, {"a": HERE, "b": there}, HERE))]
    assert "NCCL_IB_DISABLE is 1 for Ray's processes on host far, and unset on near" in said
    assert "HF_TOKEN is set for Ray's processes on host far, and unset on near" in said


def test_ports_that_are_not_free_on_a_host_are_told() -> None:
    [address, *_] = own_addresses()
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        facts = host_facts.HostProbe().facts(
            {**NO_QUESTION, "interface": f"{address}/32", "ports": f"{port}-{port}", "num_ports": 1}
        )
    said = f"resources.ports: got '{port}-{port}' with 0 free at {address}, expected 1 for the run"
    assert facts["network"] == [said]


def test_the_users_modules_are_found_and_only_these_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "my_first.py",
        "my_second.py",
        "random.py",
        "not-a-module.py",
        "my_package/__init__.py",
        "plain/one.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.invalidate_caches()
    assert modules_beside("pytest") == modules_beside("json") == modules_beside("no_such_module") == []
    found = [Path(path).name for path in modules_beside("my_first")]
    assert found == ["my_first.py", "my_package", "my_second.py"], "`random` would hide Python's own"
    assert str(tmp_path / "plain") in modules_beside("plain")
    assert named_modules([str(tmp_path / "my_package")]) == [str(tmp_path / "my_package")]
    with pytest.raises(UserError, match="resources.ship: got .*, expected a Python file or the folder of a package"):
        named_modules([str(tmp_path / "nowhere")])
    config = build_config({"reward": {"functions": [{"kind": "my_first:f"}]}, "loss": {"kind": "my_package.sub:L"}})
    assert Demands(config).modules == ["my_first:f", "my_package.sub:L"]


def _sleep(seconds: Any) -> None:
    time.sleep(seconds)


@pytest.mark.processes
def test_a_host_that_does_not_answer_is_told() -> None:
    process_pool.start_ray()
    sleep: Any = ray.remote(num_cpus=0, max_retries=0)(_sleep)
    ray.get([sleep.remote(0.5) for _ in range(3)])  # Ray starts the processes, which takes seconds on a busy machine.
    calls = {sleep.remote(600): "slow", sleep.remote("no number"): "failing", sleep.remote(0): "well"}
    answers = gathered(calls, 4)
    ray.cancel(next(iter(calls)), force=True)
    assert answers["slow"] == "it did not answer within 4 s" and answers["well"] is None
    assert answers["failing"].startswith("its probe failed: ")


@pytest.mark.processes
def test_a_host_of_a_cluster_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process_pool.start_ray()
    monkeypatch.chdir(tmp_path)
    demands = Demands(with_run_dir(build_config({"dataplane": {"store": {"capacity_mib": 16}}})))
    [host] = hosts_of(ON_CPUS)
    findings, shipped = examine_hosts(demands, [host])
    assert not [finding for finding in findings if finding.level == "problem"] and not shipped.paths
    assert list(tmp_path.iterdir()) == [], "the marks are removed"
    report = ClusterReport([host], findings, {("a", "b"): "no route"}, "NCCL: no GPU on any host")
    assert report.sentences("problem") == ["host a cannot send to b: no route"]
    [table] = tables(report)
    cells = dict(zip(table.columns[0].cells, map(str, table.columns[1].cells), strict=True))
    assert cells["run.dir"] == "shared" and cells["ray"] == ray.__version__ and cells["clock"].startswith(("+0", "-0"))
    told: list[str] = []
    checks = HostChecks(demands, told.append)
    checks.at_start([host])
    assert told == [] and checks.options() == {}, "nothing is asked on the driver's own host"
    assert checks.fits(host.node) and not checks.fits("gone") and told == []
    vast = Demands(with_run_dir(build_config({"dataplane": {"store": {"kind": "tcp", "capacity_mib": 1 << 30}}})))
    checks = HostChecks(vast, told.append)
    assert not checks.fits(host.node) and not checks.fits(host.node)
    [line] = told
    assert line.startswith(f"host {host.label} is not used, because it differs: dataplane.store.")


def test_the_doctor_of_a_cluster_takes_one_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", "127.0.0.1:1", "a.yaml", "b.yaml"]) == 2
    assert "CONFIG: got a.yaml, b.yaml, expected one file at most" in capsys.readouterr().err
