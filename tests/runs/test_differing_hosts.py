"""Hosts of a run differ in what must be alike. Each difference is told before anything starts, with the name of the
host, and all of them at once. The driver is on the first host; the second one differs."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import headrace
from headrace.bench.hosts.namespaces import Host
from headrace.tests.hosts import ENVIRONMENT, PORT, TRUSTED, finish, hosts, join_ray, ray_cluster
from headrace.tests.runs import cli_runs
from headrace.trainers.base_model.made_tokenizers import make_tokenizer
from headrace.trainers.base_model.prepare import TINY_QWEN3

pytestmark = [pytest.mark.processes, pytest.mark.slow]
SHORT = ("validation.every=0", "warmup.corpus=none", TRUSTED, "algorithm.steps=2")
SCRIPTED = ("rollout.engine=scripted", "trainer.backend=scripted")
SHIM = """
import os, platform, time
now, parts = time.time, platform.python_version_tuple
time.time = lambda: now() + 90
os.getuid = lambda: 4242
platform.python_version_tuple = lambda: ("3", "99", "0")
os.umask(0o077)
"""
"""Module `sitecustomize`, which Python imports at its start: clock, user, Python and umask of another host."""
REWARD = "from my_helper import VALUE\ndef short(prompt, response, finish_reason): return VALUE\n"


REDUCE = """
import ray
from headrace.trainers.run.hosts.cluster_doctor import reduce_over
from headrace.trainers.cluster.places.placement import ON_CPUS
from headrace.trainers.run.hosts.every_host import hosts_of
ray.init(address="10.77.0.1:6390", logging_level="ERROR")
print(reduce_over(hosts_of(ON_CPUS), "gloo", {}))
"""


@contextmanager
def cluster(
    second: Sequence[str],
    *,
    cpus: tuple[int, int] = (1, 2),
    shm_mib: int = 512,
    environment: Mapping[str, str] = {},
    options: Sequence[str] = (),
) -> Iterator[tuple[Host, ...]]:
    """Two hosts with one Ray cluster. second: shell commands that make the second host differ. environment: variables
    of its Ray. options: of its `ray start`."""
    with hosts(2, shm_mib=shm_mib) as members:
        for line in second:
            subprocess.run(members[1].command("sh", "-c", line), check=True, timeout=30)
        address = ray_cluster(members[:1], cpus[:1])
        join_ray(members[1], address, cpus[1], options=options, environment={**ENVIRONMENT, **environment})
        yield members


def train(host: Host, run_dir: Path, *overrides: str, folder: Path | None = None) -> tuple[int, str]:
    """Train on a host in a folder, that of the run folder by default. Returns the exit code and the words printed."""
    overrides = (*SHORT, *overrides, f"resources.ray_address={host.address}:{PORT}")
    code, output = finish(host, cli_runs.command(run_dir, *overrides), folder or run_dir.parent)
    return code, " ".join(output.split())


def without(folder: Path) -> str:
    """Return the shell command that empties a folder for a host."""
    return f"mount -t tmpfs tmpfs '{folder}'"


def other(file: Path, old: str, new: str, scratch: Path) -> str:
    """Return the shell command that gives a host another text in a file."""
    changed = scratch / f"other {file.name}"
    changed.write_text(file.read_text().replace(old, new))
    assert changed.read_text() != file.read_text()
    return f"mount --bind '{changed}' '{file}'"


TOLD = (
    "has Python 3.99, expected 3.11",
    "has headrace 0.0.9 (code ",
    "has torch 2.0.0, expected ",
    "run.dir: host host1 (10.77.0.2) does not have ",
    "cannot import 'my_reward:short': ModuleNotFoundError: No module named 'my_reward'; expected 'my_reward' there",
    "data.train: got '../rows.jsonl', which host host1 (10.77.0.2) does not have",
    "model.path: got '../model', which host host1 (10.77.0.2) does not have",
    "lacks math_verify, which the reward math_verify needs: pip install 'headrace[math]' there",
    "dataplane.store.capacity_mib: got 1024, but /dev/shm of host host1 (10.77.0.2) has 32 MiB",
    "cannot write temporary files (No space left on device), expected room for them",
    "resources.interface: got '10.77.0.1/32', expected the name or the network of an interface of host host1",
    "has 0 GPU(s), expected 1, which Ray gives the run there",
    "note: host host1 (10.77.0.2) lacks the working folder ",
    "note: host host1 (10.77.0.2) does not know the address of its own name",
    "runs with user id 4242, and the driver with 0",
    "runs with umask 0077, and the driver with 0022",
    "note: the clock of host host1 (10.77.0.2) is +90.0 s",
    "note: host host1 (10.77.0.2) has the name of another host",
)
"""Parts of the sentences about the second host."""


@pytest.mark.timeout(300)
def test_twenty_differences_are_told_at_once(tmp_path: Path) -> None:
    outer, site = tmp_path / "outer", Path(str(importlib.metadata.distribution("torch").locate_file("")))
    for name in ("outer/work", "shim", "full"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shim" / "sitecustomize.py").write_text(SHIM)
    (outer / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    make_tokenizer().save_pretrained(outer / "model")
    (outer / "model" / "config.json").write_text(json.dumps({**TINY_QWEN3, "model_type": "qwen3"}))
    write_modules(outer / "work")
    torch = site / f"torch-{importlib.metadata.version('torch')}.dist-info" / "METADATA"
    version = torch.read_text().partition("\nVersion: ")[2].partition("\n")[0]
    second = [
        other(Path(headrace.__file__).with_name("version.py"), headrace.__version__, "0.0.9", tmp_path),
        other(torch, f"\nVersion: {version}\n", "\nVersion: 2.0.0\n", tmp_path),
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path / 'full'}",
        "hostname host1",
        *(without(folder) for folder in (outer, site / "math_verify")),
    ]
    shimmed = {
        "PYTHONPATH": f"{tmp_path / 'shim'}:{ENVIRONMENT.get('PYTHONPATH', '')}",
        "TMPDIR": str(tmp_path / "full"),
    }
    rows = ("data.train=../rows.jsonl", "data.validation=../rows.jsonl", "model.path=../model")
    rewards = ("reward.functions=[{kind: 'my_reward:short'}, {kind: math_verify}]", "resources.ship=never")
    with cluster(second, shm_mib=32, environment=shimmed, options=("--num-gpus=1",)) as (first, _):
        code, output = train(first, outer / "work" / "run", *rows, *rewards, "resources.interface=10.77.0.1/32")
    assert code == 2, output
    assert [part for part in TOLD if part not in output] == [], output
    assert not (outer / "work" / "run" / "actors.json").exists()


def write_modules(folder: Path) -> None:
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "my_helper.py").write_text("VALUE = 1.0\n")


@pytest.mark.timeout(300)
def test_modules_that_a_host_lacks_are_shipped(tmp_path: Path) -> None:
    """All actors are on the second host. The reward needs another module of the folder."""
    code_folder, runs = tmp_path / "code", tmp_path / "runs"
    code_folder.mkdir()
    runs.mkdir()
    write_modules(code_folder)
    reward = ("reward.functions=[{kind: 'my_reward:short'}]", *SCRIPTED, "dataplane.store.capacity_mib=64")
    with cluster([without(code_folder)], cpus=(0, 3)) as (first, _):
        refused, sentence = train(first, runs / "refused", *reward, "resources.ship=never", folder=code_folder)
        done, output = train(first, runs / "shipped", *reward, folder=code_folder)
    assert refused == 2 and "host host2 cannot import 'my_reward:short'" in sentence, sentence
    assert done == 0, output
    assert "my_helper.py, my_reward.py are sent to the run's processes, because host2 cannot import them" in output
    means = [line["reward/mean"] for line in cli_runs.metrics(runs / "shipped") if "reward/mean" in line]
    assert means == [1.0, 1.0]


@pytest.mark.timeout(300)
def test_a_run_folder_that_a_host_does_not_share_is_refused_where_it_is_needed(tmp_path: Path) -> None:
    """One rank and its rollouts would be on the second host, whose folder is empty or cannot be written to."""
    (tmp_path / "runs").mkdir()
    ranks = (*SCRIPTED, "trainer.dp=2", "dataplane.store.capacity_mib=64")
    differing = {"NCCL_IB_DISABLE": "1", "HF_TOKEN": "hf_secret"}
    with cluster([without(tmp_path / "runs")], environment=differing) as (first, second):
        code, output = train(first, tmp_path / "runs" / "apart", *ranks, folder=tmp_path)
        assert code == 2 and "run.dir: host host2 does not have " in output, output
        assert "need it for checkpoints and the trained model" in output
        assert "note: NCCL_IB_DISABLE is 1 for Ray's processes on host host2, and unset on host1" in output
        assert "note: HF_TOKEN is set for Ray's" in output and "hf_secret" not in output
        again = f"umount '{tmp_path}/runs' && mount --bind -o ro '{tmp_path}/runs' '{tmp_path}/runs'"
        subprocess.run(second.command("sh", "-c", again), check=True, timeout=30)
        code, output = train(first, tmp_path / "runs" / "unwritable", *ranks, folder=tmp_path)
        assert code == 2 and "run.dir: host host2 cannot write to (Read-only file system)" in output, output


@pytest.mark.timeout(300)
def test_a_key_file_that_is_absent_or_another_on_a_host_is_told(tmp_path: Path) -> None:
    """The driver makes the file, on a folder that the hosts do not share at first."""
    keys = tmp_path / "keys"
    keys.mkdir()
    run = (*SCRIPTED, f"dataplane.key_file={keys}/key", "dataplane.tls=true", "dataplane.store.capacity_mib=64")
    states = {
        f"{keys}/key on host2 cannot be read (No such file or directory)": "true",
        f"{keys}/key on host2 has another key than on the host that opened": f"printf %064d 7 > {keys}/key",
        f"{keys}/key on host2 has mode 0640 and belongs to user 0, expected mode 0600": f"chmod 640 {keys}/key",
    }
    with cluster([without(keys)], cpus=(1, 1)) as (first, second):
        for number, (sentence, change) in enumerate(states.items()):
            subprocess.run(second.command("sh", "-c", f"umask 077; {change}"), check=True, timeout=30)
            code, output = train(first, tmp_path / f"run {number}", *run)
            assert code == 2 and f"host host2: dataplane.key_file: {sentence}" in output, output
    assert sorted(path.name for path in keys.iterdir()) == ["key"], "the run made it"


@pytest.mark.timeout(300)
def test_the_doctor_shows_all_hosts_and_the_links_between_them(tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "headrace.cli", "doctor", "--cluster", f"10.77.0.1:{PORT}", TRUSTED]
    code = [sys.executable, "-c", REDUCE]
    with cluster(["mount -t tmpfs -o size=16m tmpfs /dev/shm"], cpus=(1, 1)) as (first, _):
        wrong, shown = finish(first, doctor, tmp_path)
        right, small = finish(first, [*doctor, "dataplane.store.capacity_mib=8"], tmp_path)
        summed, said = finish(first, code, tmp_path)
    assert wrong == 1 and "/dev/shm of host host2 has " in shown, shown
    assert right == 0 and "TCP, Gbit/s" in small and "NCCL: no GPU" in small, small
    assert len(re.findall(r"(?m)^\W*host[12]\W+\d+\.\d\d", small)) == 2, small
    assert summed == 0 and "a sum of 64 MiB over 2 hosts takes " in said, said
