"""Times how a vLLM engine sleeps, takes new weights over CUDA IPC and wakes, while a trainer uses the same GPU."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from ...weights.gpu import measure_setup
from ...weights.gpu_updates import Case, Log, Setup


class KeptLog(Log):
    """Log of the engine's measurements that keeps its records, and prints none of them."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.records: list[dict[str, Any]] = []

    def tell(self, record: str, /, **found: Any) -> None:
        self.records.append({"record": record, **found})


def measure_engine(size: str, cycles: int, folder: Path) -> KeptLog:
    """Measure `cycles` cycles of an engine with a model of this size. Returns a log with a record `colocated` for each
    of them, and with errors as failures. folder: where the model is written."""
    # vLLM only accepts functions for its workers, by which every byte is checked, with this setting.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    log = KeptLog(folder)
    setup = Setup(size, "none", (Case("ipc", 0, 512, in_flight=0, updates=1),), colocated=cycles)
    asyncio.run(measure_setup(setup, "cuda", 0, folder, log))
    return log
