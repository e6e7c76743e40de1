"""A stand-in for Slurm, which runs batch files on the hosts of `tests/hosts.py`.

    with StubSlurm(tmp_path, [(first, second), (third, fourth)]) as slurm:
        slurm.submit(["headrace", "launch", "slurm", ..., "--submit"])
        slurm.near_limit()

It has the programs `sbatch`, `srun` and `scontrol`. They ask this process, which alone can enter all hosts. As Slurm
does it, a signal for a step reaches all processes of the step, one with `B:` only the batch shell, and a step's
processes are those that were started in it, even if their parents have ended.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.bench.hosts.namespaces import Host

JOB_ID = 4711
CPUS = 2
"""CPUs that each host has for the job."""
_CLIENT = """#!{python}
import json, os, signal, socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect({path!r})
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: peer.send(bytes([number])))
program, environment = os.path.basename(sys.argv[0]), dict(os.environ)
data = json.dumps(dict(program=program, words=sys.argv[1:], environment=environment, folder=os.getcwd())).encode()
socket.send_fds(peer, [len(data).to_bytes(4, "big")], [1, 2])
peer.sendall(data)
while not (answer := peer.recv(1)):
    pass
sys.exit(answer[0])
"""


@dataclass
class _Step:
    """A command that runs on some hosts of the job."""

    mark: str
    """Value of the variable STUB_STEP in all of its processes."""
    tasks: list[subprocess.Popen[bytes]] = field(default_factory=list)


class StubSlurm:
    """A Slurm with one job. `near_limit`, `preempt` and `cancel` do to it what Slurm does."""

    def __init__(self, folder: Path, allocations: Sequence[tuple[Host, ...]], job_id: int = JOB_ID) -> None:
        """folder: for the programs. allocations: the hosts of the job at each of its starts."""
        self._job_id = job_id
        self._mark = secrets.token_hex(8)
        """Variable of the environment of the job's processes, which tells them from those of other tests."""
        self.starts = 0
        """Number of times that the job was started."""
        self.state = "none"
        """State of the job, in Slurm's words."""
        self.codes: list[int] = []
        """Exit codes of the batch shell at each end."""
        self.left: list[str] = []
        """Names of processes that still ran when the batch shell had ended."""
        self.header: dict[str, str] = {}
        """Options of the batch file."""
        self._allocations = list(allocations)
        self._requeue = False
        self._steps: list[_Step] = []
        self._batch: subprocess.Popen[bytes] | None = None
        self._bin = folder / "slurm"
        self._bin.mkdir()
        self._path = str(self._bin / "socket")
        client = self._bin / "client"
        client.write_text(_CLIENT.format(python=sys.executable, path=self._path))
        client.chmod(0o755)
        for program in ("sbatch", "srun", "scontrol"):
            (self._bin / program).symlink_to(client)
        self._server = socket.socket(socket.AF_UNIX)
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> StubSlurm:
        self._server.bind(self._path)
        self._server.listen(64)
        self._thread(self._serve)
        return self

    def __exit__(self, *_: object) -> None:
        self.state = "CLOSED"
        self._kill_all()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(30)

    # ---------------- What a user does.

    def submit(self, command: Sequence[str], folder: Path) -> str:
        """Run a command that calls sbatch. Returns its output."""
        environment = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait(self, state: str, timeout_s: float = 200) -> None:
        """Wait until the job is in a state."""
        self.wait_for(lambda: self.state == state, timeout_s)

    def wait_for(self, true: Callable[[], bool], timeout_s: float = 200) -> None:
        """Wait until a condition holds. The job must not end before that."""
        until = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < until, f"{self.state}, codes {self.codes}\n{self.output()}"
            time.sleep(0.05)

    def output(self) -> str:
        """Return the output of the job."""
        path = Path(self.header["chdir"]) / f"{self.header['job-name']}-{self._job_id}.out"
        return path.read_text() if path.exists() else ""

    # ---------------- What Slurm does to a job.

    def near_limit(self) -> None:
        """Send the signal of `--signal=B:NAME@SECONDS` to the batch shell."""
        name = self.header["signal"].removeprefix("B:").partition("@")[0]
        assert self._batch is not None
        [shell] = psutil.Process(self._batch.pid).children()
        shell.send_signal(signal.Signals[f"SIG{name}"])

    def preempt(self, grace_s: float) -> None:
        """Take the hosts away: SIGTERM for all steps, and SIGKILL for all that is left after a time."""
        self._requeue = True
        for step in list(self._steps):
            self._signal(f"STUB_STEP={step.mark}", signal.SIGTERM)
        self._later(grace_s)

    def cancel(self, grace_s: float) -> None:
        """Do what scancel does: SIGTERM for steps and batch shell, and SIGKILL after a time."""
        self._signal(f"STUB_SLURM={self._mark}", signal.SIGTERM)
        self._later(grace_s)

    def _later(self, grace_s: float) -> None:
        start = self.starts

        def kill() -> None:
            until = time.monotonic() + grace_s
            while time.monotonic() < until and self.starts == start and self.state == "RUNNING":
                time.sleep(0.05)
            if self.starts == start:
                self._kill_all()

        self._thread(kill)

    # ---------------- How it does that.

    def _thread(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            self._thread(self._answer, peer)

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            size, descriptors, _, _ = socket.recv_fds(peer, 4, 2)
            data = b""
            while len(data) < int.from_bytes(size, "big"):
                data += peer.recv(1 << 16)
            asked = json.loads(data)
            try:
                code = getattr(self, f"_{asked['program']}")(asked, descriptors, peer)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            with suppress(OSError):
                peer.send(bytes([code]))

    def _sbatch(self, asked: dict, descriptors: list[int], _: socket.socket) -> int:
        script = Path(asked["folder"], asked["words"][-1]).read_text()
        options = [line.split("--", 1)[1] for line in script.splitlines() if line.startswith("#SBATCH ")]
        self.header = {key: value.strip("'") for key, _, value in (option.partition("=") for option in options)}
        spool = self._bin / "slurm_script"  # as on a node: the file may change after sbatch
        spool.write_text(script)
        os.write(descriptors[0], f"Submitted batch job {self._job_id}\n".encode())
        self._thread(self._run, spool, asked["environment"])
        return 0

    def _scontrol(self, asked: dict, descriptors: list[int], _: socket.socket) -> int:
        if asked["words"][:2] == ["show", "hostnames"]:
            os.write(descriptors[0], asked["words"][2].replace(",", "\n").encode() + b"\n")
        elif asked["words"] == ["requeue", str(self._job_id)]:
            self._requeue = True
        else:
            return 1
        return 0

    def _run(self, spool: Path, environment: dict[str, str]) -> None:
        """Start the job on its next hosts until it has not been put back."""
        while True:
            self._requeue, self.state = False, "RUNNING"
            hosts = self._allocations[self.starts]
            names = [f"{host.address} {host.name}" for host in hosts]
            private = f"/tmp/ray-{self._job_id}"  # as on nodes that share no /tmp
            Path(private).mkdir(exist_ok=True)
            for host in hosts:
                lines = "\\n".join(name for name in names if not name.endswith(f" {host.name}"))
                script = f"mountpoint -q {private} || mount -t tmpfs tmpfs {private}; printf '{lines}\\n' >> /etc/hosts"
                subprocess.run(host.command("sh", "-c", script), check=True, timeout=30)
            given = {
                **environment,
                "SLURM_JOB_ID": str(self._job_id),
                "STUB_SLURM": self._mark,
                "SLURM_JOB_NODELIST": ",".join(host.name for host in hosts),
                "SLURM_RESTART_COUNT": str(self.starts),
            }
            self.starts += 1
            folder = self.header["chdir"]
            with open(Path(folder) / f"{self.header['job-name']}-{self._job_id}.out", "ab") as output:
                command = hosts[0].command("bash", str(spool), folder=folder)
                self._batch = subprocess.Popen(command, stdout=output, stderr=output, env=given)
                code = self._batch.wait()
            self.left += [process.name() for process in self._processes(f"STUB_SLURM={self._mark}")]
            self._kill_all()
            self.codes.append(code)
            if not self._requeue or self.state == "CLOSED":
                self.state = "CLOSED" if self.state == "CLOSED" else "COMPLETED" if code == 0 else "FAILED"
                return

    def _srun(self, asked: dict, descriptors: list[int], peer: socket.socket) -> int:
        """Run a step, forward the signals of its srun, and return the largest exit code of its tasks."""
        words = list(asked["words"])
        options = {}
        while words[0].startswith("--"):
            key, _, value = words.pop(0).removeprefix("--").partition("=")
            options[key] = value
        hosts = self._allocations[self.starts - 1]
        if "nodelist" in options:
            hosts = [host for host in hosts if host.name == options["nodelist"]]
        assert len(hosts) == int(options["nodes"]) == int(options["ntasks"])
        step = _Step(f"{self._mark}.{self.starts}.{len(self._steps)}")
        self._steps.append(step)
        for rank, host in enumerate(hosts):
            given = {
                **asked["environment"],
                "STUB_STEP": step.mark,
                "SLURM_PROCID": str(rank),
                "SLURM_CPUS_ON_NODE": str(CPUS),
            }
            command = host.command(*words, folder=asked["folder"])
            out, err = descriptors
            step.tasks.append(subprocess.Popen(command, stdout=out, stderr=err, env=given))
        peer.settimeout(0.05)
        while any(task.poll() is None for task in step.tasks):
            with suppress(TimeoutError, ConnectionError):
                if number := peer.recv(1):
                    self._signal(f"STUB_STEP={step.mark}", number[0])
                else:
                    time.sleep(0.05)
        self._signal(f"STUB_STEP={step.mark}", signal.SIGKILL)
        return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in step.tasks)

    def _processes(self, variable: str) -> list[psutil.Process]:
        """Return the processes on the job's hosts that were started with a variable of the environment."""
        key, _, value = variable.partition("=")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(key) == value and process.name() != "nsenter":
                    found.append(process)
        return found

    def _signal(self, variable: str, number: int) -> None:
        for process in self._processes(variable):
            with suppress(psutil.Error, OSError):
                process.send_signal(number)

    def _kill_all(self) -> None:
        self._signal(f"STUB_SLURM={self._mark}", signal.SIGKILL)
