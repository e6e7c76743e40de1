"""The table of faults: which processes suffer which faults, how a run may react, and what makes no sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProcessKind = Literal[
    "driver", "directory", "rollout actor", "engine actor", "train worker", "storage unit", "watchdog", "raylet"
]
FaultKind = Literal["stop", "kill", "cut", "disk", "shm", "slow_store", "slow_checkpoint"]
Outcome = Literal["goes on", "restarts", "stops"]
"""How a run reacts to a fault, from mild to severe: it goes on, and only replaces processes that were killed; it goes
back to its last checkpoint by itself; or it stops with an explanation, and goes on when it is started with
`--resume`."""

StoreKind = Literal["shm", "simple", "tcp"]
STORES: tuple[StoreKind, ...] = ("shm", "simple", "tcp")
"""Stores of the benchmark's runs, one run after another. With `shm` the engines run inside the rollout actors; with the
others they are separate actors, and a storage unit (a process of its own) keeps the rows."""
_WITH_UNITS: tuple[StoreKind, ...] = ("simple", "tcp")

PROCESSES: tuple[ProcessKind, ...] = (
    "driver", "directory", "rollout actor", "engine actor", "train worker", "storage unit", "watchdog", "raylet",
)  # fmt: skip
FAULTS: dict[FaultKind, str] = {
    "stop": "SIGSTOP, and SIGCONT after some seconds",
    "kill": "SIGKILL",
    "cut": "its connections to the directory or the storage unit are shut down",
    "disk": "its writes to the run folder fail: no space left on device",
    "shm": "it gets no more memory in /dev/shm: no space left on device",
    "slow_store": "its calls of the store take longer",
    "slow_checkpoint": "its writes to the run folder (checkpoint, journal, metrics) take longer",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """One kind of fault in one kind of process."""

    process: ProcessKind
    fault: FaultKind
    worst: Outcome
    """Most severe outcome that the library's promises allow."""
    stores: tuple[StoreKind, ...] = STORES
    """Stores of the runs in which this fault is injected."""

    def __str__(self) -> str:
        return f"{self.fault} {self.process}"


# A call that is under way when its connection is cut fails, since it is unknown whether it took effect, and the run
# goes back to its last checkpoint. Idle connections are made again.
PAIRS: tuple[Pair, ...] = (
    Pair("driver", "stop", "goes on"),
    Pair("driver", "kill", "stops"),
    Pair("driver", "cut", "restarts"),
    Pair("driver", "disk", "stops"),
    Pair("driver", "slow_checkpoint", "goes on"),
    Pair("directory", "stop", "goes on"),
    Pair("directory", "kill", "restarts"),
    Pair("directory", "cut", "restarts"),
    Pair("directory", "shm", "goes on", ("shm",)),
    Pair("directory", "slow_store", "goes on"),
    Pair("rollout actor", "stop", "goes on"),
    Pair("rollout actor", "kill", "goes on"),
    Pair("rollout actor", "cut", "restarts"),
    Pair("rollout actor", "disk", "stops"),
    Pair("rollout actor", "slow_store", "goes on"),
    Pair("rollout actor", "slow_checkpoint", "goes on"),
    Pair("engine actor", "stop", "goes on", _WITH_UNITS),
    Pair("engine actor", "kill", "goes on", _WITH_UNITS),
    Pair("train worker", "stop", "goes on"),
    Pair("train worker", "kill", "restarts"),
    Pair("train worker", "cut", "restarts"),
    Pair("train worker", "disk", "goes on"),
    Pair("train worker", "shm", "stops"),
    Pair("train worker", "slow_store", "goes on"),
    Pair("train worker", "slow_checkpoint", "goes on"),
    Pair("storage unit", "stop", "goes on", _WITH_UNITS),
    Pair("storage unit", "kill", "restarts", _WITH_UNITS),
    Pair("storage unit", "cut", "restarts", _WITH_UNITS),
    Pair("storage unit", "slow_store", "goes on", _WITH_UNITS),
    Pair("watchdog", "stop", "goes on"),
    Pair("watchdog", "kill", "goes on"),
    Pair("raylet", "stop", "goes on"),
    Pair("raylet", "kill", "restarts"),
)

_NO_FILE = "it writes no file of the run"
_NO_STORE = "it never calls the store"
_NO_SHM = "it takes no memory there"
_NO_LINK = "it has no connection to the data plane"
NO_SENSE: dict[tuple[ProcessKind, FaultKind], str] = {
    ("driver", "shm"): _NO_SHM,
    ("driver", "slow_store"): "it moves receipts and never reads or writes a row",
    ("directory", "disk"): _NO_FILE,
    ("directory", "slow_checkpoint"): _NO_FILE,
    ("rollout actor", "shm"): "the directory takes the memory into which it writes",
    ("engine actor", "cut"): _NO_LINK,
    ("engine actor", "disk"): _NO_FILE,
    ("engine actor", "shm"): "the train worker takes the memory from which it reads weights",
    ("engine actor", "slow_store"): _NO_STORE,
    ("engine actor", "slow_checkpoint"): _NO_FILE,
    ("storage unit", "disk"): _NO_FILE,
    (
        "storage unit",
        "shm",
    ): "one of `simple` keeps rows in memory of its own, one of `tcp` takes it as the directory does",
    ("storage unit", "slow_checkpoint"): _NO_FILE,
    ("watchdog", "cut"): "it has a pipe to the driver and shared memory, which cannot be cut alone",
    ("watchdog", "disk"): "it writes its report only once the run has ended or is stuck",
    ("watchdog", "shm"): _NO_SHM,
    ("watchdog", "slow_store"): _NO_STORE,
    ("watchdog", "slow_checkpoint"): "it writes its report only once the run has ended or is stuck",
    ("raylet", "cut"): _NO_LINK,
    ("raylet", "disk"): "it writes to Ray's own folder, not to the run's",
    ("raylet", "shm"): "it takes the memory of its object store at its start",
    ("raylet", "slow_store"): _NO_STORE,
    ("raylet", "slow_checkpoint"): _NO_FILE,
}
"""Reasons why a fault makes no sense for a kind of process, for all combinations that are not in PAIRS."""
