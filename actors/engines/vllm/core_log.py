"""`CoreLog` keeps what vLLM's processes write to their outputs in a file, and finds in it why one of them failed.

vLLM tells the process that started it only that its engine process failed. The reason stands in the output of that
process or of one of its workers.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_BYTES = 1 << 20
"""Size in bytes above which the file is cut down to its newer half."""
MAX_WORDS = 1000
"""Largest number of characters of the line that tells why a process failed."""

_PREFIX = re.compile(
    r"^(?:\(\S+ pid=\d+\)\s?)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?(?:\[[^\]]*\]\s)?"
)
"""Pattern of the prefix that vLLM puts before each line: the process's name, the log level, the time and the place in
the source."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*)?$")
CANCELLED = "cancelled"
"""Last word of vLLM's error for a call to its workers that it gives up because one of them has died. Its engine process
ends right after that."""
_ELSEWHERE = ("root cause", "stack trace", "initialization failed", "EngineDeadError", f"RuntimeError: {CANCELLED}")
"""Phrases of exceptions that only say that another process failed."""
_WORKER_DIED = "died unexpectedly"
"""Phrase of the line in which the engine process says that a worker was killed."""


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
        """Context manager in which stdout and stderr of this process, and of all processes that it starts, are the log.
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
        """Cut the file down to its newer half if it has grown above MAX_BYTES. What is written at that moment may get
        lost."""
        size = os.fstat(self._descriptor).st_size
        if size <= MAX_BYTES:
            return
        newest = os.pread(self._descriptor, MAX_BYTES // 2, size - MAX_BYTES // 2)
        os.ftruncate(self._descriptor, 0)  # all writers append, so they continue at the new end
        os.write(self._descriptor, b"--- older lines were dropped\n" + newest[newest.find(b"\n") + 1 :])
        self._start = 0

    def exception(self) -> str:
        """Return the line in which one of vLLM's processes names the exception that it raised. It is that of the last
        exception that does not point to another one. If there is none, return the line that says that a worker died, or
        "" if there is none of these either."""
        lines = self._lines()
        raised = [line for line in lines if _RAISED.match(line) and not any(words in line for words in _ELSEWHERE)]
        found = raised or [line for line in lines if _WORKER_DIED in line]
        return found[-1][:MAX_WORDS] if found else ""

    def last_line(self) -> str:
        """Return the last line that vLLM's processes wrote; "" if there is none."""
        written = [line.strip() for line in self._lines() if line.strip()]
        return written[-1][:MAX_WORDS] if written else ""

    def _lines(self) -> list[str]:
        """Return the lines that vLLM's processes wrote, without what vLLM puts before each line."""
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
