"""Measures for how long the directory's calls wait when its process is killed, until another process goes on.

The directory then holds ROWS rows, so that their state is to be made again. The time is that of a call which a client
begins right after the kill.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from ...codecs.schema import Field, Kind, Schema
from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.factory import connect, open_data_plane

RECOVERY = "hosts.directory.recovery_s"
"""Key of the figure in the summary: the longest of the measured times."""
ROWS, GROUP = 8192, 8
SETTLE_S = 1.0
"""Seconds between two kills. A process that dies sooner counts as one that cannot run."""


def measure_recovery(repeats: int) -> list[float]:
    """Return the seconds that a call took after each of `repeats` kills. Raises RuntimeError if a row is missing."""
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=64), timeout_s=60.0)
    fields = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("reward", Kind.PER_SAMPLE, torch.float32)])
    seconds = []
    with open_data_plane(config, process=True, listen="127.0.0.1") as plane, connect(plane.handle) as client:
        client.register("train", fields, tasks=["train"], group_size=GROUP)
        rows = {"ids": [torch.arange(20, dtype=torch.int32)] * GROUP, "reward": torch.rand(GROUP)}
        for number in range(ROWS // GROUP):
            client.put("train", [f"{number}.{row}" for row in range(GROUP)], rows, versions=0)
        for _ in range(repeats):
            began_s = time.monotonic()
            os.kill(plane.serving_pid(), signal.SIGKILL)
            found = client.status().rows
            seconds.append(time.monotonic() - began_s)
            if found != ROWS:
                raise RuntimeError(f"the directory has {found} rows after its death, expected {ROWS}")
            time.sleep(SETTLE_S)
    return seconds
