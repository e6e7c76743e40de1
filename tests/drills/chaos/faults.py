"""Says which processes suffer which faults and how a run may react, and draws from a seed when each fault strikes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

ProcessKind = Literal[
    "driver", "directory", "rollout actor", "engine actor", "train worker", "storage unit", "watchdog", "raylet"
]
FaultKind = Literal["stop", "pause", "kill", "clock", "cut", "disk", "shm", "slow_store", "slow_checkpoint"]
Outcome = Literal["goes on", "restarts", "stops"]
"""How a run reacts to a fault, from mild to severe: it continues, and only replaces processes that were killed; it goes
back to its last checkpoint by itself; or it stops with an explanation, and continues when it is started with
`--resume`."""

StoreKind = Literal["shm", "simple", "tcp"]
STORES: tuple[StoreKind, ...] = ("shm", "simple", "tcp")
"""Stores of the drill's runs, one run after another. With `shm` the engines run inside the rollout actors; with the
others they are separate actors, and a storage unit (a process of its own) keeps the rows."""
_WITH_UNITS: tuple[StoreKind, ...] = ("simple", "tcp")

PROCESSES: tuple[ProcessKind, ...] = (
    "driver", "directory", "rollout actor", "engine actor", "train worker", "storage unit", "watchdog", "raylet",
)  # fmt: skip
FAULTS: dict[FaultKind, str] = {
    "stop": "SIGSTOP, and SIGCONT after some seconds",
    "pause": "SIGSTOP for longer than other processes may be silent, and SIGCONT",
    "kill": "SIGKILL",
    "clock": "its date is an hour ahead for some seconds",
    "cut": "its connections to the directory or the storage unit are shut down",
    "disk": "its writes to the run folder fail half done: no space left on device",
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
    Pair("driver", "pause", "goes on"),
    Pair("driver", "kill", "stops"),
    Pair("driver", "clock", "goes on"),
    Pair("driver", "cut", "restarts"),
    Pair("driver", "disk", "stops"),
    Pair("driver", "slow_checkpoint", "goes on"),
    Pair("directory", "stop", "goes on"),
    Pair("directory", "kill", "goes on", ("shm", "tcp")),
    Pair("directory", "kill", "restarts", ("simple",)),
    Pair("directory", "clock", "goes on"),
    Pair("directory", "cut", "restarts"),
    Pair("directory", "shm", "goes on", ("shm",)),
    Pair("directory", "slow_store", "goes on"),
    Pair("rollout actor", "stop", "goes on"),
    Pair("rollout actor", "kill", "goes on"),
    Pair("rollout actor", "clock", "goes on"),
    Pair("rollout actor", "cut", "restarts"),
    Pair("rollout actor", "disk", "stops"),
    Pair("rollout actor", "slow_store", "goes on"),
    Pair("rollout actor", "slow_checkpoint", "goes on"),
    Pair("engine actor", "stop", "goes on", _WITH_UNITS),
    Pair("engine actor", "kill", "goes on", _WITH_UNITS),
    Pair("train worker", "stop", "goes on"),
    Pair("train worker", "kill", "restarts"),
    Pair("train worker", "clock", "goes on"),
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
    Pair("watchdog", "pause", "goes on"),
    Pair("watchdog", "kill", "goes on"),
    Pair("raylet", "stop", "goes on"),
    Pair("raylet", "kill", "restarts"),
)

_NO_FILE = "it writes no file of the run"
_NO_STORE = "it never calls the store"
_NO_SHM = "it takes no memory there"
_NO_JUDGE = "it ends no other process for its silence"
_NO_HOOK = "the hook does not change its date"
_NO_LINK = "it has no connection to the data plane"
_NO_JUDGES: tuple[ProcessKind, ...] = (
    "directory", "rollout actor", "engine actor", "train worker", "storage unit", "raylet",
)  # fmt: skip
_WITHOUT_HOOK: tuple[ProcessKind, ...] = ("engine actor", "storage unit", "watchdog", "raylet")
NO_SENSE: dict[tuple[ProcessKind, FaultKind], str] = {
    **{(process, "pause"): _NO_JUDGE for process in _NO_JUDGES},
    **{(process, "clock"): _NO_HOOK for process in _WITHOUT_HOOK},
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


TWICE = 2
"""Minimum number of times that each fault must strike each kind of process for which it is planned."""
REST_S = 1.5
"""Maximum number of seconds between the recovery from a fault and the next fault."""
LASTS_S = (1.0, 4.0)
"""Minimum and maximum duration of a fault in seconds."""
PAUSE_S = 36.0
"""Seconds that a pause lasts. This is longer than the `resources.stage_timeout_s` of the drill's runs."""
ON_TOP_SHARE = 0.15
"""Share of faults after which the next fault strikes without waiting for the run's recovery."""


@dataclass(frozen=True, slots=True)
class Injury:
    """One planned fault: where, for how long, and how it follows the fault before it."""

    pair: Pair
    lasts_s: float
    """Duration of the fault in seconds. A kill or a cut ignores it, because it is over at once."""
    rest_s: float
    """Seconds to wait before this fault, once the run has recovered from the one before."""
    on_top: bool
    """True if the next fault is to strike without waiting until the run has recovered from this one."""
    choice: float
    """Random number in [0, 1) that selects one of the run's processes of the wanted kind."""


def schedule(seed: int) -> dict[StoreKind, list[Injury]]:
    """Return the planned faults of each store's run, in random order. Over all runs together, each pair (a kind of
    fault in a kind of process) occurs at least twice.

    If a run has suffered all of its faults before its time is over, it continues with those of `more`.
    """
    dice = random.Random(seed)
    found: dict[StoreKind, list[Pair]] = {store: [] for store in STORES}
    for position, pair in enumerate(PAIRS):
        for number in range(TWICE):  # in another store each time, and equally often in each store over all pairs
            found[pair.stores[(position + number) % len(pair.stores)]].append(pair)
    return {store: _injuries(pairs, dice) for store, pairs in found.items()}


def more(store: StoreKind, seed: int, again: int) -> list[Injury]:
    """Return further faults for a run that has suffered all faults of `schedule`. Each pair that exists with the store
    comes once, in a new random order.

    again: 1 for the first additional list, 2 for the second, and so on.
    """
    pairs = [pair for pair in PAIRS if store in pair.stores]
    return _injuries(pairs, random.Random(f"{seed}/{store}/{again}"))


def _injuries(pairs: list[Pair], dice: random.Random) -> list[Injury]:
    pairs = list(pairs)
    dice.shuffle(pairs)
    return [
        Injury(
            pair,
            lasts_s=PAUSE_S if pair.fault == "pause" else dice.uniform(*LASTS_S),
            rest_s=dice.uniform(0.0, REST_S),
            on_top=dice.random() < ON_TOP_SHARE,
            choice=dice.random(),
        )
        for pair in pairs
    ]
