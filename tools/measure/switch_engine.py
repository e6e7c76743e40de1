"""Times how a vLLM engine sleeps, takes new weights over CUDA IPC and wakes, while a trainer uses the same GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.bench.weights.vllm_updates import Case, Log, Setup, allow_functions, measure_setup


class KeptLog(Log):
    """Log of the engine's measurements that keeps its records, and tells what comes after each of them."""

    def __init__(self, out: Path, tell: Callable[[str], None]) -> None:
        """tell: function that is called with the name of each phase."""
        super().__init__(out)
        self.records: list[dict[str, Any]] = []
        self._phase = tell

    def tell(self, record: str, /, **found: Any) -> None:
        self.records.append({"record": record, **found})
        self._phase(f"engine: after {record!r}, {self.cycles} cycles over")

    @property
    def cycles(self) -> int:
        """Number of cycles that are over."""
        return sum(record["record"] == "colocated" for record in self.records)


def measure_engine(size: str, cycles: int, folder: Path, log: KeptLog) -> None:
    """Measure `cycles` cycles of an engine with a model of this size. `log` gets a record `colocated` for each of them,
    and errors as failures. folder: where the model is written."""
    allow_functions()
    setup = Setup(size, "none", (Case("ipc", 0, 512, in_flight=0, updates=1),), colocated=cycles)
    asyncio.run(measure_setup(setup, "cuda", 0, folder, log))
