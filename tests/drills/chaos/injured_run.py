"""Controls one real run of the chaos drill: starts it, finds its processes, and resumes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from headrace.dataplane.recovery.keeper import kept_process
from headrace.tests.actors.images.tiny_vision import draw, encoded, write_folder
from headrace.tests.drills.chaos.control import VARIABLE, Control
from headrace.tests.drills.chaos.faults import ProcessKind, StoreKind
from headrace.tests.drills.chaos.faulty_calls import starts_a_process
from headrace.tests.drills.chaos.hook import RUN_FOLDER, SITE
from headrace.trainers.supervision.cleanup import is_alive, kill_process
from headrace.trainers.supervision.stuck_report import read_actors

PROMPTS_PER_STEP, GROUP_SIZE = 8, 2
CAPACITY_MIB = 64
NUM_PICTURES = 12
GONE_S = 60.0
"""Seconds within which all processes of a run must be gone after the run has ended. Its watchdog may have to kill
some."""
_NAMES: tuple[tuple[str, ProcessKind], ...] = (
    ("directory", "directory"),
    (r"(headrace-\w+-)?unit-\d+", "storage unit"),
    (r"rollout \d+", "rollout actor"),
    (r"engine \d+", "engine actor"),
    (r"train worker \d+", "train worker"),
)
_WATCHDOG = "headrace.trainers.supervision.watchdog"


def run_config(folder: Path, store: StoreKind, engine: str, seed: int) -> dict[str, Any]:
    """Return the configuration of one run of the drill, as it stands in the run's YAML file."""
    config: dict[str, Any] = {
        "run": {
            "dir": str(folder), "name": f"chaos-{store}", "seed": seed, "checkpoint_every": 5,
            "max_restarts": 1_000_000, "trace_step": 0,
        },
        "algorithm": {
            "mode": "async", "steps": 1_000_000, "prompts_per_step": PROMPTS_PER_STEP, "group_size": GROUP_SIZE,
        },
        "rollout": {"engine": engine, "num_engines": 2, "max_new_tokens": 16},
        "data": {"train": "task:reverse", "options": {"min_digits": 3, "max_digits": 8}, "max_prompt_tokens": 16},
        "trainer": {"backend": "scripted" if engine == "scripted" else "fsdp", "dp": 2},
        "dataplane": {"store": {"kind": store, "capacity_mib": CAPACITY_MIB}, "timeout_s": 10.0},
        "sync": {"timeout_s": 20.0},
        "validation": {"every": 0},
        "resources": {"threads": 1, "stage_timeout_s": 30.0, "start_timeout_s": 120.0, "collective_timeout_s": 60.0},
        "logging": {"tensorboard": False},
    }  # fmt: skip
    if store == "simple":
        config["dataplane"]["trusted_network"] = True
    if store != "shm":
        config["rollout"]["num_actors"] = 2
    if engine == "scripted":
        config["scripted"] = {"latency_s": 0.1, "latency_sigma": 0.5, "train_row_s": 0.005, "train_step_s": 0.02}
    else:
        config["model"] = {"path": "builtin:tiny-qwen3"}
        config["warmup"] = {"corpus": "digit_skills", "steps": 10}
    starts = {"kind": f"{starts_a_process.__module__}:starts_a_process", "runs": "process", "weight": 0.0}
    # Its process can be late on a loaded machine; a row that it fails is trained on like any other.
    config["reward"] = {"functions": [{"kind": "per_position"}, starts], "max_error_share": 1.0}
    return config


def with_pictures(config: Callable[[Path], dict[str, Any]], folder: Path) -> Callable[[Path], dict[str, Any]]:
    """Return a configuration whose prompts have no, one or two of a few pictures. folder: new folder for the pictures,
    the prompts, and the files of a model without weights."""
    model, lines = write_folder(folder), []
    for number in range(NUM_PICTURES):
        (folder / f"{number}.png").write_bytes(encoded(draw(60 + 20 * (number % 4), 60, number)))
    for number in range(5 * NUM_PICTURES):
        shown = [f"{(number * factor) % NUM_PICTURES}.png" for factor in (1, 7)][: number % 3]
        lines.append(json.dumps({"prompt": "count squares", "answer": "1", "images": shown}))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    data = {
        "train": str(folder / "prompts.jsonl"), "chat_template": "all", "max_prompt_tokens": 64,
        "images": {"enabled": True, "workers": 1, "cache_mib": 1},
    }  # fmt: skip
    return lambda path: {**config(path), "model": {"path": model}, "data": data}


class InjuredRun:
    """One run of the chaos drill: its run folder, its control folder and its current driver process."""

    def __init__(self, folder: Path, config: Callable[[Path], dict[str, Any]], site: str = SITE) -> None:
        """Create the run's folders and files in `folder`. Starts no process. config: function that returns the run's
        configuration for its run folder. site: content of `sitecustomize.py` in the run's processes."""
        self.folder = folder / "run"
        self.control = Control(folder / "control")
        self.control.create()
        self.output_path = folder / "output.txt"
        self._config_path = folder / "chaos.yaml"
        self._config_path.write_text(yaml.safe_dump(config(self.folder), sort_keys=False))
        self._site = folder / "site"
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(site)
        self._process: subprocess.Popen[bytes] | None = None
        self._said = 0
        """Number of bytes that earlier drivers wrote to the output file. The current driver's output follows them."""
        self.family: set[psutil.Process] = set()
        """All processes seen so far that are a driver of this run or a descendant of one."""
        self.run_ids: set[str] = set()
        self.launches = 0
        """Number of drivers that were started."""

    # ------------------------------------------------------------ the driver

    def start(self, *, resume: bool) -> None:
        """Start the driver process in a session of its own, with `--resume` if `resume` is true."""
        self.launches += 1
        self._said = self.output_path.stat().st_size if self.output_path.exists() else 0
        paths = [str(self._site), str(Path(__file__).parents[4]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(self.control.folder),
            RUN_FOLDER: str(self.folder) + os.sep, "COLUMNS": "2000",
        }  # fmt: skip
        command = [sys.executable, "-m", "headrace.cli", "train", str(self._config_path)]
        with open(self.output_path, "ab") as output:
            self._process = subprocess.Popen(
                command + (["--resume"] if resume else []),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder.parent,
                env=environment,
                preexec_fn=_obey_interrupts,
                start_new_session=True,
            )
        self.family.add(psutil.Process(self._process.pid))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the driver, -N if signal N killed it; None while it is running."""
        assert self._process is not None
        return self._process.poll()

    def interrupt(self) -> None:
        """Send SIGINT to the driver, as Ctrl-C does, so that it saves a checkpoint and ends."""
        os.kill(self.pid, signal.SIGINT)

    @property
    def output(self) -> str:
        """Everything that the current driver has printed so far."""
        with open(self.output_path, "rb") as file:
            file.seek(self._said)
            return file.read().decode(errors="replace")

    def explanation(self) -> str:
        """Return the sentence that says why the run has ended; "" if there is none. For a driver that was killed, it
        comes from the watchdog's report, otherwise from the driver's output."""
        if self.returncode == -signal.SIGKILL:
            path = self.folder / "watchdog.txt"
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            return next((line.partition(": ")[2] for line in text.splitlines() if "ended without notice" in line), "")
        panel = re.search(r"headrace failed ─*╮\n(.*?)\n╰", self.output, re.DOTALL)
        if panel:
            text = " ".join(line.strip("│ ") for line in panel[1].splitlines())
            return text.partition(" The traceback ")[0].strip()
        said = [line for line in self.output.splitlines() if line.startswith("headrace: ")]
        return said[-1].removeprefix("headrace: ") if said else ""

    # ------------------------------------------------------------ its processes

    def look(self) -> dict[ProcessKind, list[psutil.Process]]:
        """Return the run's living processes by kind. All descendants of the driver are also added to `family`."""
        try:
            driver = psutil.Process(self.pid)
            below = driver.children(recursive=True) if is_alive(driver) else []
        except psutil.NoSuchProcess:
            return {}
        self.family |= set(below)
        found: dict[ProcessKind, list[psutil.Process]] = {"driver": [driver]}
        here = {process.pid: process for process in below}
        for kind, pid in self._actors():
            if pid in here and is_alive(here[pid]):
                found.setdefault(kind, []).append(here[pid])
        for process in below:
            try:
                if process.name() == "raylet":
                    found.setdefault("raylet", []).append(process)
                elif _WATCHDOG in process.cmdline() and is_alive(process):
                    found.setdefault("watchdog", []).append(process)
            except psutil.Error:
                continue
        return found

    def _actors(self) -> Iterator[tuple[ProcessKind, int]]:
        path = self.folder / "actors.json"
        try:
            self.run_ids.add(json.loads(path.read_text())["run_id"])
        except (OSError, ValueError):
            return
        for actor in read_actors(self.folder):
            for pattern, kind in _NAMES:
                if re.fullmatch(pattern, actor.name):
                    yield kind, kept_process(actor.pid) if kind == "directory" else actor.pid

    def unit_ports(self) -> tuple[int, ...]:
        """Return the TCP ports on which the run's storage units listen. They are the processes that keep the rows of
        the stores `simple` and `tcp`."""
        units = self.look().get("storage unit", [])
        return tuple(
            connection.laddr.port
            for unit in units
            for connection in unit.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        )

    def left_behind(self) -> list[str]:
        """Wait, for at most GONE_S, until an ended run has no processes and no folders in /dev/shm any more. Returns
        the names of the remaining ones."""
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            alive = [process for process in self.family if is_alive(process)]
            if not alive and not self.shared_memory():
                return []
            time.sleep(0.2)
        names = []
        for process in self.family:
            try:
                if is_alive(process):
                    names.append(f"{process.name()} (pid {process.pid})")
            except psutil.NoSuchProcess:
                continue
        return names + [path.name for path in self.shared_memory()]

    def shared_memory(self) -> list[Path]:
        """Return the paths in /dev/shm that belong to the run, including those of earlier launches."""
        return [path for path in Path("/dev/shm").iterdir() if any(run_id in path.name for run_id in self.run_ids)]

    def end(self) -> None:
        """Kill all remaining processes of the run, and remove its folders in /dev/shm."""
        for process in [psutil.Process(self.pid)] if self.returncode is None else []:
            self.family |= set(process.children(recursive=True))
        for process in self.family:
            kill_process(process)
        for path in self.shared_memory():
            shutil.rmtree(path, ignore_errors=True)


def _obey_interrupts() -> None:
    """Restore the default handling of SIGINT, because a shell makes background commands ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
