"""mini-swe-agent, unmodified, as an environment: it speaks Anthropic's Messages API, from a Python of its own.

The world of an episode is a folder with a number in the file `n`, and a script that submits. The right answer is the
number backwards, which only rewards can teach.
"""

# pyright: reportOptionalMemberAccess=false
import asyncio
import json
import random
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\necho $1\n"
TASK = "Submit n."


def number_of(task: int) -> str:
    """Return the number of a task."""
    return str(random.Random(task).randint(100, 999))


def share(said: str, wanted: str) -> float:
    """Return the share of characters at which two texts agree."""
    return sum(a == b for a, b in zip(said, wanted, strict=False)) / max(len(said), len(wanted))


class MiniSweAgent:
    """Plays episodes with the command `mini`, each in a folder and a process of its own."""

    def __init__(self, python: str) -> None:
        """python: path of a Python that has mini-swe-agent."""
        self._python = Path(python).expanduser()
        if not self._python.exists():
            raise ValueError(f"environment.options.python: got {python!r}, expected a Python that has mini-swe-agent")
        self._socket = tempfile.TemporaryDirectory()
        self._server: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def play(self, episode) -> float:
        """Let the agent work in a new folder, and return the share of the digits it submits that are right."""
        number, address = number_of(episode.prompt.fields["task"]), episode.endpoint
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            world, log = Path(folder, "world"), Path(folder, "trajectory.json")
            world.mkdir()
            Path(world, "n").write_text(number)
            Path(world, "submit").write_text(SUBMIT)
            arguments = ["-c", str(HERE / "mini.yaml"), "-y", "--exit-immediately", "-t", TASK, "-o", str(log)]
            keys = {"ANTHROPIC_API_BASE": address.url.removesuffix("/v1"), "ANTHROPIC_API_KEY": address.secret}
            await self._run({"folder": str(world), "arguments": arguments, "environment": keys})
            done = json.loads(log.read_text())["info"] if log.exists() else {}
        if not done.get("exit_status"):
            raise RuntimeError("the process of mini-swe-agent died")
        return share(done["submission"].strip(), number[::-1])

    async def close(self) -> None:
        """End the server. Idempotent."""
        if self._server is not None and self._server.returncode is None:
            self._server.stdin.close()
            await self._server.wait()
        self._socket.cleanup()

    async def _run(self, job: dict) -> None:
        """Run one job, until its process ends. If the job is cancelled, its process ends."""
        reader, writer = await asyncio.open_unix_connection(await self._address())
        try:
            writer.write(json.dumps(job).encode() + b"\n")
            await reader.read()
        finally:
            writer.close()

    async def _address(self) -> str:
        """Return the address of the server, which is started if there is none."""
        path = Path(self._socket.name, "server")
        async with self._starting:
            if self._server is None or self._server.returncode is not None:
                path.unlink(missing_ok=True)
                self._server = await asyncio.create_subprocess_exec(
                    self._python, HERE / "mini_server.py", path,
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                if await self._server.stdout.readline() != b"ready\n":
                    raise RuntimeError("mini-swe-agent did not start")
        return str(path)
