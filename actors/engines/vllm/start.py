"""Starts vLLM's engine process, sets its environment variables, keeps its log, and can import vLLM ahead in a standby.

vLLM starts its engine process as a new interpreter, which imports vLLM a second time: 15 s on a GPU host, during which
nothing else happens. An `EngineStandby` starts with the actor, so that both import at the same time. It stays a child
of the process that started it, and ends with it.

vLLM tells the process that started it only that its engine process failed. The reason is in the output of that process
or of one of its workers, which `CoreLog` keeps.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import reduction, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from ....dataplane.imports import import_each
from ...process.socket_folder import vllm_folder

MAX_BYTES = 1 << 20
"""Size in bytes above which the file is cut down to its newer half."""
MAX_WORDS = 1000
"""Largest number of characters of the line that says why a process failed."""

_PREFIX = re.compile(
    r"^(?:\(\S+ pid=\d+\)\s?)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?(?:\[[^\]]*\]\s)?"
)
"""Pattern of the prefix that vLLM puts before each line: the process's name, the log level, the time and the place in
the source."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?$")
CANCELLED = "cancelled"
"""Last word of vLLM's error for a call to its workers that failed because one of the workers has died. The engine
process ends right after that error."""
_ELSEWHERE = ("root cause", "stack trace", "initialization failed", "EngineDeadError", f"RuntimeError: {CANCELLED}")
"""Phrases in exceptions that say only that another process failed."""
_WORKER_DIED = "died unexpectedly"
"""Phrase of the line in which the engine process says that a worker was killed."""
_FORCED = {
    # The host process has threads (Ray, torch), so a forked worker would hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # FlashInfer ignores the seeds of single requests.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_ON_CPU = {
    # By default every engine of a host binds its threads to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # If tp is 1, this gives one process for engine and worker instead of two. AsyncLLM always starts one process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Even in eager mode vLLM compiles the counting of log-prob ranks, which takes seconds at the first requests.
    "TORCHDYNAMO_DISABLE": "1",
}
MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", f"{__package__}.worker")
"""Modules that an engine process needs and that take seconds to import."""
OUTPUTS = (1, 2)
"""File descriptors of stdout and stderr."""
PATIENCE_S = 1.0
"""Longest time in seconds for which `exit_code` waits until another thread has stored the exit code."""


class CoreLog:
    """A file to which vLLM's processes append what they write to stdout and stderr.

    Its size stays bounded as long as `trim` is called from time to time.
    """

    def __init__(self, path: str = "") -> None:
        """Open the file and note in it that an engine starts. path: an existing file is continued, and its folder is
        made if needed; "" for a file without a name, which is gone when the log is closed."""
        self.path = path
        if path:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        else:
            with tempfile.NamedTemporaryFile() as nameless:
                self._descriptor = os.open(nameless.name, os.O_RDWR | os.O_APPEND)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(self._descriptor, f"--- {stamp}: process {os.getpid()} starts an engine\n".encode())
        self._start = os.fstat(self._descriptor).st_size
        """Position in the file from which on the lines are those of this engine."""

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Context manager that redirects stdout and stderr to the log. It acts on this process and all that it starts.
        The started processes keep it. This process writes to its own outputs again when the block ends."""
        flush_outputs()
        saved = os.dup(1), os.dup(2)
        try:
            os.dup2(self._descriptor, 1)
            os.dup2(self._descriptor, 2)
            yield
        finally:
            flush_outputs()
            for target, own in zip((1, 2), saved, strict=True):
                os.dup2(own, target)
                os.close(own)

    def trim(self) -> None:
        """If the file has grown beyond MAX_BYTES, keep only the whole lines in its last MAX_BYTES / 2 bytes. Lines
        written at that moment can be lost."""
        size = os.fstat(self._descriptor).st_size
        if size <= MAX_BYTES:
            return
        newest = os.pread(self._descriptor, MAX_BYTES // 2, size - MAX_BYTES // 2)
        os.ftruncate(self._descriptor, 0)  # All writers append, so they continue at the new end.
        os.write(self._descriptor, b"--- older lines were dropped\n" + newest[newest.find(b"\n") + 1 :])
        self._start = 0

    def exception(self) -> str:
        """Return the line in which one of vLLM's processes names the exception that it raised. If there are several,
        the last exception that does not refer to another process counts. If there are none, return the line about a
        worker's death; "" if there is no such line either."""
        lines = self._lines()
        raised = [line for line in lines if _RAISED.match(line) and not any(words in line for words in _ELSEWHERE)]
        found = raised or [line for line in lines if _WORKER_DIED in line]
        return found[-1][:MAX_WORDS] if found else ""

    def last_line(self) -> str:
        """Return the last line that vLLM's processes wrote; "" if there is none."""
        written = [line.strip() for line in self._lines() if line.strip()]
        return written[-1][:MAX_WORDS] if written else ""

    def _lines(self) -> list[str]:
        size = os.fstat(self._descriptor).st_size
        start = max(self._start, size - MAX_BYTES)
        text = os.pread(self._descriptor, size - start, start).decode(errors="replace")
        return [_PREFIX.sub("", _COLOR.sub("", line)).rstrip() for line in text.splitlines()]

    @property
    def hint(self) -> str:
        """End of a sentence that says where a user finds the whole output; "" if the file has no name."""
        return f" (its output is in {self.path})" if self.path else ""

    def close(self) -> None:
        """Close the file. Idempotent; no other method may be called afterwards."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def flush_outputs() -> None:
    """Write out what Python has buffered of this process's stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


@contextmanager
def log_level() -> Iterator[None]:
    """Context manager that sets vLLM's log level to errors, unless the user has set a level. Import vLLM inside the
    block, because vLLM reads the level during its import."""
    chosen = "VLLM_LOGGING_LEVEL" in os.environ
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        if not chosen:
            del os.environ["VLLM_LOGGING_LEVEL"]


@contextmanager
def engine_environment(*, cpu: bool, tp: int, further: Mapping[str, str] | None = None) -> Iterator[None]:
    """Context manager that sets the environment variables that vLLM's processes inherit, and the `further` ones. It
    restores this process's own when the block ends.

    vLLM itself writes LD_PRELOAD and more into the environment, which every later child process would inherit. The
    states of the random generators of Python, NumPy and torch are restored, too; those of NumPy and torch only if they
    have been imported, because a process that starts early must not wait for their import.
    """
    before = dict(os.environ)
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    python_state = random.getstate()
    numpy_state = numpy and numpy.random.get_state()
    torch_state = torch and torch.random.get_rng_state()
    os.environ.update({**_FORCED, **(further or {})})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if (short := vllm_folder()) is not None:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", short)  # vLLM's sockets are there.
    if cpu:
        os.environ.update(_ON_CPU)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // tp)))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if torch:
            torch.random.set_rng_state(torch_state)


class EngineStandby:
    """A child process that imports modules and then waits for the function that it is to run. If this process ends
    before that, the child ends, too."""

    def __init__(self, modules: Sequence[str] = MODULES, method: str = "spawn") -> None:
        """Start the process, which imports `modules`. method: start method of multiprocessing."""
        context: Any = multiprocessing.get_context(method)
        self._orders, orders = context.Pipe()
        self._process = context.Process(target=_stand_by, args=(orders, modules), name="EngineCore")
        with engine_environment(cpu=False, tp=1):
            self._process.start()
        orders.close()
        # Python waits for its child processes before it ends, and this child waits for an order or for the end of the
        # pipe. So the pipe is closed first.
        util.Finalize(self, self._orders.close, exitpriority=10)

    @property
    def pid(self) -> int | None:
        """Id of the process."""
        return self._process.pid

    def run(self, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> BaseProcess | None:
        """Make the process run `target(**kwargs)` and end, once it has imported its modules. It gets the environment
        and the outputs that this process has now. Call it once. Returns the process; None if it has ended, or if it
        ends now because the arguments can only be inherited by a process that is started with them."""
        with self._orders:
            try:
                order = reduction.ForkingPickler.dumps((target, kwargs))
                self._orders.recv_bytes()  # The child reports that it is ready.
                for output in OUTPUTS:
                    reduction.send_handle(self._orders, output, self._process.pid)
                self._orders.send(dict(os.environ))
                self._orders.send_bytes(order)  # This has the same effect as `send`.
            except (RuntimeError, EOFError, OSError):  # Pickling a lock or a queue raises RuntimeError.
                return None
        self._process.name = name
        return self._process


def _stand_by(orders: Connection, modules: Sequence[str]) -> None:
    """Import `modules`, wait for the order of `EngineStandby.run`, and carry it out."""
    import_each(modules)
    try:
        orders.send_bytes(b"ready")
        outputs = [reduction.recv_handle(orders) for _ in OUTPUTS]
        environment = orders.recv()
        flush_outputs()
        for received, output in zip(outputs, OUTPUTS, strict=True):
            os.dup2(received, output)
            os.close(received)
        os.environ.clear()
        os.environ.update(environment)
        target, kwargs = orders.recv()
    except (EOFError, OSError):
        return  # The process that started this one has ended.
    orders.close()
    target(**kwargs)


_standby: EngineStandby | None = None
"""Standby that the next `VllmEngine` of this process uses for its engine process; None makes it start a new process."""


def start_ahead() -> None:
    """Start the engine process of the next `VllmEngine` of this process, so that it imports vLLM in the meantime."""
    global _standby
    if _standby is None:
        _standby = EngineStandby()


def take_standby() -> EngineStandby | None:
    """Return the process that `start_ahead` started. Only the first caller gets it; None if there is no such
    process."""
    global _standby
    taken, _standby = _standby, None
    return taken


def lives(process: psutil.Process) -> bool:
    """Return whether the process runs. A process that has ended does not run, even if its exit code was not collected
    yet."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def exit_code(started: BaseProcess, process: psutil.Process) -> int | None:
    """Return the exit code of a child process, negative for a signal. Returns None if the process runs or its exit code
    is unknown.

    A thread of vLLM waits for the same child. While that thread takes the exit code from the operating system and has
    not stored it yet, `started.exitcode` is None although the child has ended. This function then waits for the code,
    for at most PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (code := started.exitcode) is None and not lives(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    return code


def exit_words(code: int | None) -> str:
    """Return how a process ended, in words. code: as in `multiprocessing`, negative for a signal; None if it is not
    known."""
    if code is None:
        return "it is gone"
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
