"""Starts a process of the data plane without Ray, and ends a process when the one that started it ends.

The parent holds the writing end of the child's standard input. The child closes down when this input ends. The input
ends when the parent closes it or dies, however it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil

from ..errors import DataPlaneError, StoreLost

END_TIMEOUT_S = 10.0
"""Seconds that a child may take to end after its standard input has ended; after that it is killed."""
PARENT_LOOK_S = 1.0
"""Seconds between two looks of a Ray actor at its parent process."""
_ERRORS = (ValueError, StoreLost)


def start_module(module: str) -> subprocess.Popen[bytes]:
    """Start a Python process that runs a module. It finds the modules that this process finds, such as samplers next to
    the user's script."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )


class ChildProcess:
    """A process that runs one module of Headrace, in a separate session, so that Ctrl-C does not reach it."""

    def __init__(self, module: str, setup: dict[str, Any], timeout_s: float) -> None:
        """Start the process, give it `setup` (plain JSON) and wait for its answer.

        module: name of a module that calls `serve_parent`. Raises the ValueError or DataPlaneError that the process
        answers with, and StoreLost when it ends or does not answer within `timeout_s`.
        """
        started = time.monotonic()
        self.name = module.rpartition(".")[2]
        self._process = start_module(module)
        _children.add(self)
        try:
            self.pid = self._process.pid
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # If the child has died, its missing answer shows that.
                self._process.stdin.write(json.dumps(setup).encode() + b"\n")
                self._process.stdin.flush()
            self.answer: Any = self._answered(started, timeout_s)
        except BaseException:
            self.close(0.0)
            raise

    def has_died(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Ask the process to end, and kill it after `timeout_s` seconds. Idempotent."""
        _children.discard(self)
        self._close_pipes()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Close the pipes in a process that was forked from the parent. Otherwise the child would outlive the
        parent."""
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _answered(self, started: float, timeout_s: float) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left_s = started + timeout_s - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise self._failed(f"did not start within {timeout_s:g} s", started)
                data = os.read(stdout.fileno(), 1 << 16)
                if not data:
                    code = self._process.wait()
                    raise self._failed(f"ended with code {code} as it started; its output says why", started)
                line += data
        answer = json.loads(line)
        if "error" in answer:
            kind = next((kind for kind in _ERRORS if kind.__name__ == answer["kind"]), DataPlaneError)
            raise kind(answer["error"])
        return answer["answer"]

    def _failed(self, what: str, started: float) -> StoreLost:
        elapsed_s = time.monotonic() - started
        return StoreLost(f"the process {self.name} {what}", op="start", peer=str(self.pid), elapsed_s=elapsed_s)


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _forget_children() -> None:
    for child in list(_children):
        with contextlib.suppress(OSError):
            child.forget()
        _children.discard(child)


os.register_at_fork(after_in_child=_forget_children)


def serve_parent(start: Callable[[dict[str, Any]], tuple[Any, Callable[[], None]]]) -> None:
    """Run a child process: read its setup, call `start`, answer the parent, and close down. The child closes down when
    the parent ends or closes the child's standard input.

    start: function (setup) -> (answer as plain JSON, function that closes what was started). A ValueError or
    DataPlaneError that it raises is raised in the parent.
    """
    setup = json.loads(sys.stdin.buffer.readline() or b"{}")
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Later prints go to stderr, because they must not be read as an answer.
    try:
        answer, close = start(setup)
    except (ValueError, DataPlaneError) as error:
        said.write(json.dumps({"error": str(error), "kind": type(error).__name__}).encode() + b"\n")
        said.close()
        sys.exit(1)
    try:
        with contextlib.suppress(BrokenPipeError):  # The parent has ended, which also ends the child's input.
            said.write(json.dumps({"answer": answer}).encode() + b"\n")
            said.close()
        while sys.stdin.buffer.read(1 << 16):
            pass
    finally:
        close()
        sys.stdout.flush()
        _exit_soon()


def _exit_soon() -> None:
    """End this process within a second even if a thread that serves a client does not end."""
    timer = threading.Timer(1.0, os._exit, (0,))
    timer.daemon = True
    timer.start()


def end_with_parent() -> None:
    """Kill this process and its descendants as soon as its parent process has ended, however that ended.

    Ray 2.60 leaves its workers alone when their raylet dies, as it does on a host that was cut off. They would keep
    their memory, ports and GPUs, and the run has replaced them by then.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_S)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
