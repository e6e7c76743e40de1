"""Limits the lines in the log that strangers can cause, for all services that listen: at most one each second."""

from __future__ import annotations

import logging
import threading
import time

LOG_EVERY_S = 1.0
"""Shortest time in seconds between two lines of one service about what strangers did."""
_NO_ACCEPT = "socket.accept() out of system resource"
"""Message of asyncio's log when a connection cannot be accepted. It logs one for each place in the listener's queue."""


class FewLines(logging.Filter):
    """Filter that lets one line pass every LOG_EVERY_S seconds, and adds the number of those that it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._next_s = 0.0
        """Time by `time.monotonic` from which a line passes."""
        self._left_out = 0

    def passes(self) -> str | None:
        """Return None if the next line is to be left out, else a text to append, which is "" if none was left out."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_s:
                self._left_out += 1
                return None
            left_out, self._left_out, self._next_s = self._left_out, 0, now + LOG_EVERY_S
        return f" (and {left_out} lines like it before)" if left_out else ""

    def filter(self, record: logging.LogRecord) -> bool:
        if (left_out := self.passes()) is None:
            return False
        record.msg, record.args = record.getMessage() + left_out, None
        return True


class _FewAcceptErrors(FewLines):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NO_ACCEPT) or super().filter(record)


def few_lines(name: str) -> logging.Logger:
    """Return the logger of this name, limited by `FewLines`."""
    return _limited(name, FewLines)


def limit_accept_errors() -> None:
    """Limit the lines of asyncio about connections that cannot be accepted, for want of descriptors for example."""
    _limited("asyncio", _FewAcceptErrors)


def _limited(name: str, kind: type[FewLines]) -> logging.Logger:
    logger = logging.getLogger(name)
    if not any(isinstance(one, FewLines) for one in logger.filters):
        logger.addFilter(kind())
    return logger
