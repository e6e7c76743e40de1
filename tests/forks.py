"""Processes for tests that are forked from one process, which has imported torch and the model classes.

Importing these takes 4 seconds of a core. A run through the command line does so in its driver and in each of its
actors, which are workers of Ray. Ray starts this file in place of its own `setup_worker.py`, and the server below forks
a process that continues with Ray's `default_worker.py`, as a worker that Ray starts does. In these processes and in
that of the tests, the processes of the data plane without Ray are forked, too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ADDRESS = "HEADRACE_TESTS_FORKS"
"""Name of the environment variable that holds the path of the server's socket."""
_CONTEXT = "--serialized-runtime-env-context="
_IMPORTED = (
    "tensordict",
    "transformers.models.llama.modeling_llama",
    "headrace.actors.engines.hf.engine",
    "headrace.trainers.backends.fsdp.backend",
    "headrace.dataplane.directory_process",
    "headrace.dataplane.stores.tcp.unit",
)
"""Names of the modules that the server imports. None imports Ray, which reads the environment as it is imported."""

# ---------------------------------------------------------------- the test process

_server: subprocess.Popen[bytes] | None = None
"""Server that this process has started."""


def start_server() -> None:
    """Start this process's server unless it runs; it ends with this process. One that has died is replaced at the same
    address, which the workers of a running Ray have; a warning has its last words."""
    global _server
    if _server is None and _ADDRESS in os.environ:
        return  # that of the process which started this one
    if _server is None:
        folder = tempfile.mkdtemp(prefix="headrace-forks-")
        os.environ[_ADDRESS] = os.path.join(folder, "socket")
        atexit.register(_end_server, Path(folder))
    elif (code := _server.poll()) is None:
        return
    else:
        _close_pipes(_server)
        warnings.warn(f"the fork server has died with exit code {code}: {_words().read_text()[-2000:]}", stacklevel=2)
    # The server ends when this end of its standard input closes.
    with _words().open("wb") as words:
        _server = subprocess.Popen(
            [sys.executable, __file__, "serve", os.environ[_ADDRESS]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, env=os.environ,
        )  # fmt: skip
    assert _server.stdout is not None and _server.stdout.readline() == b"ready\n", _words().read_text()


def _words() -> Path:
    """Return the path of the file that has what the server wrote to its standard error."""
    return Path(os.environ[_ADDRESS]).with_name("stderr")


def _close_pipes(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.close()
    server.stdout.close()


def _end_server(folder: Path) -> None:
    assert _server is not None
    _close_pipes(_server)
    _server.wait(timeout=10)
    shutil.rmtree(folder)


def run(argv: Sequence[str], folder: Path, env: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit code and output (stdout and stderr) of a script or module, run in a forked process in `folder`. It is
    killed, and TimeoutError raised, when it takes longer than `timeout_s` seconds."""
    start_server()
    with tempfile.TemporaryFile() as output:
        link = _request(list(argv), dict(env), str(folder), [output.fileno()] * 2)
        link.settimeout(timeout_s)
        with link:  # the server kills the process when this closes before its end
            try:
                code = int(link.recv(32))
            except TimeoutError:
                output.seek(0)
                raise TimeoutError(f"it takes longer than {timeout_s:g} s:\n{output.read().decode()}") from None
        output.seek(0)
        return code, output.read().decode()


def _request(argv: list[str], env: dict[str, str], folder: str, files: list[int], **more: Any) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(os.environ[_ADDRESS])
    socket.send_fds(link, [json.dumps({"argv": argv, "env": env, "folder": folder, **more}).encode()], files)
    return link


class ForkedModule:
    """A forked process that runs a module, with what `ChildProcess` uses of `subprocess.Popen`."""

    def __init__(self, module: str) -> None:
        """Fork it. It finds the modules that this process finds, and goes on when this process ends."""
        (theirs, written), (read, their_output) = os.pipe(), os.pipe()
        sys.audit("subprocess.Popen", sys.executable, [module], None, None)  # for the look after tests' processes
        start_server()
        files, path = [theirs, their_output, 2], [path or os.getcwd() for path in sys.path]
        self._link = _request([module], dict(os.environ), os.getcwd(), files, path=path)
        os.close(theirs)
        os.close(their_output)
        self.stdin, self.stdout = open(written, "wb"), open(read, "rb")
        self.pid = int(self._link.recv(32))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                self.returncode = int(self._link.recv(32) or -signal.SIGKILL)  # no code from a server that has died
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self._link.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_modules() -> None:
    """Have the processes of the data plane that this process starts from now on forked."""
    from headrace.dataplane.rpc import child_process

    child_process.start_module = ForkedModule  # type: ignore[assignment]


# ---------------------------------------------------------------- Ray's worker command


def start_worker() -> None:
    """Have a worker of Ray forked, and end when it ends. It has a process group of its own, as Ray's workers do."""
    context = next((a.removeprefix(_CONTEXT) for a in sys.argv if a.startswith(_CONTEXT)), "{}")
    argv = [a for a in sys.argv[1:] if not a.startswith((_CONTEXT, "--language="))]
    link = _request(argv, {**os.environ, **json.loads(context).get("env_vars", {})}, os.getcwd(), [1, 2])
    sys.exit(int(link.recv(32)))


# ---------------------------------------------------------------- the server


def serve(address: str) -> None:
    """Fork a process for each request that arrives and tell its exit code, until standard input ends."""
    for module in _IMPORTED:
        __import__(module)
    assert "ray._raylet" not in sys.modules
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Path(address).unlink(missing_ok=True)  # left by a server that has died
    server.bind(address)
    server.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ, None)
    selector.register(server, selectors.EVENT_READ, None)
    print("ready", flush=True)
    while True:
        # Of a process that ends while the one that asked for it goes, the latter is handled first.
        for key, _ in sorted(selector.select(), key=lambda event: isinstance(event[0].fileobj, int)):
            if key.fileobj == 0:
                return
            if key.fileobj is server:
                link, _ = server.accept()
                try:
                    message, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
                except ConnectionError:
                    message, files = b"", []
                if not message:  # who asked has gone
                    link.close()
                    continue
                request = json.loads(message)
                if (pid := os.fork()) == 0:
                    selector.close()
                    server.close()
                    link.close()
                    return _become(request, files)
                for file in files:
                    os.close(file)
                end = os.pidfd_open(pid)
                selector.register(end, selectors.EVENT_READ, (pid, end, link))
                if "path" in request:  # a module, which goes on when who asked has gone
                    with contextlib.suppress(ConnectionError):
                        link.send(str(pid).encode())
                else:
                    selector.register(link, selectors.EVENT_READ, (pid, end, link))
                continue
            pid, end, link = key.data
            if key.fileobj is link:  # who asked has gone
                selector.unregister(link)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                continue
            selector.unregister(end)
            os.close(end)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if link in selector.get_map():
                selector.unregister(link)
            with contextlib.suppress(ConnectionError):  # who asked goes at this moment
                link.send(str(code).encode())
            link.close()


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Continue as the main process of a request: run its script or module."""
    if "path" in request:
        os.setsid()
        sys.path[:] = request["path"]
    else:
        files.insert(0, os.open(os.devnull, os.O_RDONLY))
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request["folder"])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in tests that a shell has started in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (main := request["argv"][0]).endswith(".py"):
        os.setpgid(0, 0)
    for name in os.environ.keys() - request["env"].keys():
        del os.environ[name]
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    fork_modules()
    code = 0
    try:
        if main.endswith(".py"):
            runpy.run_path(main, run_name="__main__")
        else:
            sys.modules.pop(main, None)  # as in a new interpreter
            runpy.run_module(main, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    # What follows is what the interpreter does at its end but for the deletion of all modules, which takes a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        start_worker()
