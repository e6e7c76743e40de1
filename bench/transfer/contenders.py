"""What takes part in the benchmark: a way to bring rows from one process to others, in its two halves.

`Contender` is the driver's half: it starts and ends what the way needs. `Endpoint` is in every worker process: only its
`put`, `get`, `write`, `claim` and `clear` are timed. Between them travels a token: what a reader must hold (a receipt,
keys, an object reference, a number of bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from tensordict import TensorDict

from .digests import Digests
from .workloads import Load, LoadSpec

Op = Literal["put", "get", "gets", "field", "write_back", "clear", "claim", "step"]
"""`gets`: shuffled over several readers; `field`: one of many; `claim`: by a consumer that waits for the put."""

ROW_OPS: frozenset[Op] = frozenset(("put", "get", "gets", "field", "write_back", "clear", "step"))
STORE_OPS: frozenset[Op] = frozenset(("claim", *ROW_OPS))
BYTE_OPS: frozenset[Op] = frozenset(("put", "get", "gets"))

CHECKSUMMED = "+checksum"
"""Suffix of a store's name when its reads verify checksums."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one of several readers wants of a put."""

    index: int
    count: int
    rows: np.ndarray
    """int64: its rows, for contenders that know rows; the others take part `index` of `count` of the bytes."""

    def byte_range(self, nbytes: int) -> tuple[int, int]:
        """(start, stop) of its part of `nbytes` bytes."""
        return nbytes * self.index // self.count, nbytes * (self.index + 1) // self.count


def shares(num_rows: int, count: int) -> list[Share]:
    """The rows, shuffled, dealt to `count` readers; in order for a single one."""
    if count == 1:
        return [Share(0, 1, np.arange(num_rows))]
    dealt = np.array_split(np.random.default_rng(count).permutation(num_rows), count)
    return [Share(index, count, rows) for index, rows in enumerate(dealt)]


class Endpoint(Protocol):
    """One process's half, for one workload."""

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> Any:
        """Write the first put's fields as new rows; returns the token for all of it."""
        ...

    def get(self, token: Any, share: Share, fields: Sequence[str] | None) -> Any:
        """Read what a token of the share stands for (`fields` None: all that it has)."""
        ...

    def fingerprint(self, got: Any) -> Digests:
        """Digests of what a `get` gave."""
        ...

    def close(self) -> None:
        """Let go of everything this process holds. Idempotent."""
        ...


@runtime_checkable
class ByteEndpoint(Endpoint, Protocol):
    """An endpoint that knows bytes only."""

    def expected(self, load: Load, share: Share) -> Digests:
        """The fingerprint that a right read of the share has; asked of the producer's endpoint."""
        ...


@runtime_checkable
class RowEndpoint(Endpoint, Protocol):
    """An endpoint that knows rows and fields."""

    def write(self, keys: Sequence[str], values: TensorDict, rewards: np.ndarray | None) -> Any:
        """Write fields of rows, new or known; returns the token of what was written. rewards: `[N]`, a tag of each."""
        ...

    def clear(self, token: Any) -> None:
        """Forget the token's rows."""
        ...

    def counters(self) -> dict[str, int]:
        """Growing counts: `directory_calls`, `bytes_got`, `wire_bytes_put`."""
        ...


@runtime_checkable
class ClaimEndpoint(RowEndpoint, Protocol):
    """An endpoint that leases rows to tasks."""

    def claim(self, num_rows: int, timeout_s: float) -> None:
        """Wait for rows with all first fields, lease them; they are given up with the rows themselves."""
        ...


class Contender(Protocol):
    """The driver's half."""

    @property
    def name(self) -> str: ...

    @property
    def ops(self) -> frozenset[Op]: ...

    def factory(self, spec: LoadSpec) -> Callable[[], Endpoint]:
        """Picklable; makes an endpoint in a worker. Called once before a workload begins."""
        ...

    def part(self, token: Any, share: Share) -> Any:
        """The token for one share."""
        ...

    def close(self) -> None:
        """End what was started. Idempotent."""
        ...


@runtime_checkable
class RowContender(Contender, Protocol):
    """A contender whose tokens follow rows through a step."""

    def keys(self, token: Any) -> Sequence[str]:
        """The token's rows."""
        ...

    def merge(self, token: Any, written: Any) -> Any:
        """The token, able to read what was written to its rows since."""
        ...

    def blocks(self, token: Any, fields: Sequence[str]) -> frozenset[int]:
        """Blocks that a read of `fields` touches; empty where there are none."""
        ...
