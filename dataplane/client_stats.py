"""What one client has done and moved so far. About a microsecond a call; see docs/observability.md."""

from __future__ import annotations

import threading
from collections import Counter

from .traffic import Traffic


class ClientStats:
    """Counters that only grow. Thread-safe; read them whenever you like."""

    def __init__(self) -> None:
        self.directory_calls = 0
        self.directory_bytes = 0
        """Requests and replies."""
        self._lock = threading.Lock()
        self._recent = Traffic()
        """Since the last `take`."""
        self._taken = Traffic()
        self._moved: dict[int, int] = {}
        """Bytes of calls that are not counted yet, by thread."""

    def count_bytes(self, *, put: int = 0, got: int = 0) -> None:
        """Bytes of the call that this thread counts next: of committed blocks, or of the columns handed out.

        Both clients count a call in the thread that ended its operation, with nothing in between.
        """
        self._moved[threading.get_ident()] = put + got

    def count_call(self, op: str, seconds: float) -> None:
        """A call has finished or failed, after so many seconds, waits included."""
        with self._lock:
            self._recent.of(op).count(seconds, self._moved.pop(threading.get_ident(), 0))

    def count_directory(self, nbytes: int) -> None:
        """One request and its reply."""
        with self._lock:
            self.directory_calls += 1
            self.directory_bytes += nbytes

    def take(self) -> Traffic:
        """The calls since the last `take`; they stay in the totals. For whoever reports this client's figures."""
        with self._lock:
            taken, self._recent = self._recent, Traffic()
            self._taken.merge(taken)
        return taken

    def total(self) -> Traffic:
        """All calls, in a copy that agrees with itself."""
        total = Traffic()
        with self._lock:
            total.merge(self._taken)
            total.merge(self._recent)
        return total

    @property
    def calls(self) -> Counter[str]:
        """Finished or failed calls, by operation."""
        return Counter({op: each.calls for op, each in self.total().ops.items()})

    @property
    def bytes_put(self) -> int:
        """Bytes of committed blocks: values, indexes and headers."""
        return self.total().bytes_put

    @property
    def bytes_got(self) -> int:
        """Bytes of the columns handed out."""
        return self.total().bytes_got

    def snapshot(self) -> dict[str, float]:
        """Flat: the counters by name, `calls` in all, and `calls/<op>`, `seconds/<op>`."""
        total = self.total()
        return {
            "calls": total.calls,
            "bytes_put": total.bytes_put,
            "bytes_got": total.bytes_got,
            "directory_calls": self.directory_calls,
            "directory_bytes": self.directory_bytes,
            **{f"calls/{op}": each.calls for op, each in total.ops.items()},
            **{f"seconds/{op}": each.seconds for op, each in total.ops.items()},
        }
