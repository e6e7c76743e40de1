"""What one client has moved so far."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ClientStats:
    """Counters that only grow. Read them whenever you like; `snapshot` gives a copy that agrees with itself."""

    calls: Counter[str] = field(default_factory=Counter)
    """Finished or failed calls, by operation."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in them, waits included, by operation."""
    bytes_put: int = 0
    """Bytes of committed blocks: values, indexes and headers."""
    bytes_got: int = 0
    """Bytes of the columns handed out."""
    directory_calls: int = 0
    directory_bytes: int = 0
    """Requests and replies."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_call(self, op: str, seconds: float) -> None:
        with self._lock:
            self.calls[op] += 1
            self.seconds[op] = self.seconds.get(op, 0.0) + seconds

    def count_directory(self, nbytes: int) -> None:
        with self._lock:
            self.directory_calls += 1
            self.directory_bytes += nbytes

    def count_bytes(self, *, put: int = 0, got: int = 0) -> None:
        with self._lock:
            self.bytes_put += put
            self.bytes_got += got

    def snapshot(self) -> dict[str, float]:
        """Flat: the counters by name, `calls` in all, and `calls/<op>`, `seconds/<op>`."""
        with self._lock:
            return {
                "calls": self.calls.total(),
                "bytes_put": self.bytes_put,
                "bytes_got": self.bytes_got,
                "directory_calls": self.directory_calls,
                "directory_bytes": self.directory_bytes,
                **{f"calls/{op}": count for op, count in self.calls.items()},
                **{f"seconds/{op}": seconds for op, seconds in self.seconds.items()},
            }
