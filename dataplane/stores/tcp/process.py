"""Runs a storage unit in a process of its own, as a child of the process that starts it; run as a module."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from ...rpc.child_process import ChildProcess, serve_parent
from .messages import UnitAddress
from .unit import StorageUnit

START_TIMEOUT_S = 60.0


class UnitProcess:
    """A storage unit in a child process. It ends with this process at the latest."""

    def __init__(self, run_id: str, name: str, key: bytes, host: str, capacity_bytes: int) -> None:
        """Start the unit; arguments and errors are those of `StorageUnit`. Raises StoreLost when it does not start
        within START_TIMEOUT_S."""
        setup = {"run_id": run_id, "name": name, "key": key.hex(), "host": host, "capacity_bytes": capacity_bytes}
        self._child = ChildProcess(__name__, setup, START_TIMEOUT_S)
        self.address = UnitAddress(**self._child.answer)
        self.pid = self.address.pid

    def has_died(self) -> bool:
        return self._child.has_died()

    def close(self) -> None:
        """End the process and with it the unit's pool. Idempotent."""
        self._child.close()


def _start(setup: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    try:
        unit = StorageUnit(
            setup["run_id"], setup["name"], bytes.fromhex(setup["key"]), setup["host"], setup["capacity_bytes"]
        )
    except OSError as error:
        raise ValueError(f"storage unit {setup['name']}: cannot listen on {setup['host']}: {error.strerror}") from None
    gc.freeze()  # what was imported stays: the collector need not look at it again and again
    return dataclasses.asdict(unit.address), unit.close


if __name__ == "__main__":
    serve_parent(_start)
