"""One real run of the host drill over four hosts, which are namespaces of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.bench.hosts.namespaces import Host
from headrace.tests.drills.chaos.control import VARIABLE, Control, Note
from headrace.tests.drills.chaos.hook import RUN_FOLDER, SITE
from headrace.tests.drills.chaos.injured_run import run_config
from headrace.tests.hosts import ENVIRONMENT, join_ray, ray_cluster
from headrace.tests.runs import cli_runs

PIDS = 10_000_000
"""Number by which the pids in the notes of two hosts differ, because each host counts its processes from 1."""
POLL_S = 0.5


class InjuredCluster:
    """A run whose hosts are killed and cut off. Ray's head is the first host, where no actor runs."""

    def __init__(self, folder: Path, members: Sequence[Host], cpus: Sequence[int], driver: int) -> None:
        """Start Ray on `members`, each with its number of logical CPUs. driver: index of the host of the driver."""
        self.folder = folder / "run"
        self.members, self._cpus, self.driver = tuple(members), tuple(cpus), driver
        self._outer = folder
        self._config_path = folder / "drill.yaml"
        site = folder / "site"
        site.mkdir(parents=True)
        (site / "sitecustomize.py").write_text(SITE)
        self._paths = os.pathsep.join([str(site), str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")])
        self.controls = [Control(folder / "control" / host.name) for host in members]
        for control in self.controls:
            control.create()
        self._process: subprocess.Popen[bytes] | None = None
        self.launches = 0
        self.address = ray_cluster(members[:1], cpus[:1], environment=self._environment(0))
        for number in range(1, len(members)):
            self.join(number)

    def configure(self, seed: int, **sections: dict[str, Any]) -> None:
        """Write the configuration: that of the chaos drill on the store `tcp`, with changed `sections`."""
        config = run_config(self.folder, "tcp", "scripted", seed)
        config["dataplane"]["trusted_network"] = True
        config["resources"] |= {"ray_address": self.address, "start_timeout_s": 180.0}
        for name, changes in sections.items():
            config[name] = {**config.get(name, {}), **changes}
        self._config_path.write_text(yaml.safe_dump(config, sort_keys=False))

    def join(self, number: int) -> None:
        """Make the host with this index a member of the Ray cluster."""
        join_ray(self.members[number], self.address, self._cpus[number], environment=self._environment(number))

    def _environment(self, number: int) -> dict[str, str]:
        noted = {VARIABLE: str(self.controls[number].folder), RUN_FOLDER: f"{self.folder}{os.sep}"}
        return {**ENVIRONMENT, **noted, "PYTHONPATH": self._paths, "COLUMNS": "2000"}

    # ------------------------------------------------------------ the driver

    def start(self, *overrides: str, resume: bool) -> None:
        """Start the driver on its host."""
        self.launches += 1
        train = [sys.executable, "-m", "headrace.cli", "train", str(self._config_path), *overrides]
        train += ["--resume"] if resume else []
        noting = [
            "sh",
            "-c",
            'echo $$ > "$0"; exec "$@"',
            str(self._outer / "driver.pid"),
            "env",
            "--default-signal=INT",
        ]
        with open(self._outer / "output.txt", "ab") as output:
            self._process = subprocess.Popen(
                self.members[self.driver].command(*noting, *train, folder=str(self._outer)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(self.driver),
            )

    @property
    def returncode(self) -> int | None:
        """Exit code of the driver; None while it is running."""
        assert self._process is not None
        return self._process.poll()

    def interrupt(self) -> None:
        """Send SIGINT to the driver, as Ctrl-C does, and wait until it has saved a checkpoint and ended."""
        pid = (self._outer / "driver.pid").read_text().strip()
        subprocess.run(self.members[self.driver].command("kill", "-INT", pid), check=False, timeout=30)
        self.wait(180.0)

    def wait(self, timeout_s: float) -> int:
        """Wait until the driver has ended, and return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    @property
    def output(self) -> str:
        """Everything that all drivers have printed so far."""
        path = self._outer / "output.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def explanation(self) -> str:
        """Return the sentence that says why the driver has ended; "" if there is none."""
        panels = re.findall(r"headrace failed ─*╮\n(.*?)\n╰", self.output, re.DOTALL)
        if panels:
            return (
                " ".join(line.strip("│ ") for line in panels[-1].splitlines()).partition(" The traceback ")[0].strip()
            )
        said = [line for line in self.output.splitlines() if line.startswith("headrace: ")]
        return said[-1].removeprefix("headrace: ") if said else ""

    # ------------------------------------------------------------ its state

    def step(self) -> int:
        """Return the number of the step that was finished last."""
        return max((line["step"] for line in cli_runs.steps_of(self.folder)), default=0)

    def wait_for_steps(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` more lines of steps are logged. Returns False if the driver ends, or the time is over."""
        began, until_s = len(cli_runs.steps_of(self.folder)), time.monotonic() + timeout_s
        return self._wait(lambda: len(cli_runs.steps_of(self.folder)) >= began + count, until_s)

    def _wait(self, happened: Callable[[], bool], until_s: float) -> bool:
        while not happened():
            if self.returncode is not None or time.monotonic() > until_s:
                return False
            time.sleep(POLL_S)
        return True

    def places(self) -> dict[str, list[str]]:
        """Return the names of the run's processes on each host."""
        told = json.loads((self.folder / "actors.json").read_text())
        found: dict[str, list[str]] = {host.name: [] for host in self.members}
        for actor in told["actors"]:
            found[actor["host"]].append(actor["name"])
        return found

    def notes(self) -> list[Note]:
        """Return the notes of all hosts in order of time."""
        found = [
            {**note, "pid": note["pid"] + PIDS * number}
            for number, control in enumerate(self.controls)
            for note in control.notes()
        ]
        return sorted(found, key=lambda note: note["t"])
