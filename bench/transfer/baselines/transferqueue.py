"""Baseline: TransferQueue's own key-value API, rows as its users store them, on its SimpleStorage or MooncakeStore.

Pinned to how release 0.1.11 behaves: its first user owns it and must be the only one to close it; its init hangs where
Ray has fewer free CPUs than it takes (controller and unit: one each); a metadata request blocks its only thread for
seconds unless `polling_mode` is on; its calls have no bound of their own, so that callers must give them one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from tensordict import TensorDict

from ..contenders import ROW_OPS, Op, Share
from ..digests import Digests, row_digests
from ..workloads import Load, LoadSpec, column_bytes

START_TIMEOUT_S = 90.0
CLOSE_TIMEOUT_S = 30.0
NUM_CPUS = 2
"""Free CPUs that Ray must have for it."""
PROCESS_ENV = {"TQ_NUM_THREADS": "1"}
"""For every process that uses it, from its start: read at import. Above 1 it switches torch's thread count around every
request and the idle OpenMP threads spin: 12 MB then take 100 ms and not 13."""


class TransferQueueContender:
    """TransferQueue, owned by an actor of its own."""

    ops: frozenset[Op] = ROW_OPS

    def __init__(self, name: str = "transferqueue", backend: dict[str, Any] | None = None) -> None:
        """backend: TransferQueue's `backend` section; None: SimpleStorage in one unit.

        Raises RuntimeError when it is not up within START_TIMEOUT_S.
        """
        self.name = name
        section = backend or {
            "storage_backend": "SimpleStorage",
            "SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": None},
        }
        free = ray.available_resources().get("CPU", 0.0)
        if free < NUM_CPUS:
            raise RuntimeError(
                f"TransferQueue needs {NUM_CPUS} free CPUs of Ray, there are {free:g}; its init would hang"
            )
        self._owner: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": PROCESS_ENV})(_Owner).remote()
        try:
            ray.get(self._owner.open.remote(section), timeout=START_TIMEOUT_S)
        except BaseException:
            ray.kill(self._owner)  # what it started ends with it
            raise

    def factory(self, spec: LoadSpec) -> Callable[[], TransferQueueEndpoint]:
        return functools.partial(TransferQueueEndpoint, spec.name)

    def part(self, token: list[str], share: Share) -> list[str]:
        return token if share.count == 1 else [token[row] for row in share.rows]

    def keys(self, token: list[str]) -> list[str]:
        return token

    def merge(self, token: list[str], written: list[str]) -> list[str]:
        return token

    def blocks(self, token: list[str], fields: Sequence[str]) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None and ray.is_initialized():
            try:
                ray.get(owner.close.remote(), timeout=CLOSE_TIMEOUT_S)
            finally:
                ray.kill(owner)


class _Owner:
    """The process that first called init: TransferQueue lives and ends with it."""

    def open(self, backend: dict[str, Any]) -> None:
        import transfer_queue

        transfer_queue.init({"controller": {"polling_mode": True}, "backend": backend})  # type: ignore[arg-type]

    def close(self) -> None:
        import transfer_queue

        transfer_queue.close()


class TransferQueueEndpoint:
    """A process that has joined by its first call."""

    def __init__(self, partition: str) -> None:
        import transfer_queue

        self._queue = transfer_queue
        self._partition = partition
        self._bytes_got = 0

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> list[str]:
        return self.write(keys, values, None)

    def write(self, keys: Sequence[str], values: TensorDict, rewards: np.ndarray | None) -> list[str]:
        names = list(keys)
        tags = None if rewards is None else [{"reward": reward} for reward in rewards.tolist()]
        self._queue.kv_batch_put(keys=names, partition_id=self._partition, fields=values, tags=tags)
        return names

    def get(self, token: list[str], share: Share, fields: Sequence[str] | None) -> TensorDict:
        wanted = None if fields is None else list(fields)
        got = self._queue.kv_batch_get(keys=token, partition_id=self._partition, select_fields=wanted)
        self._bytes_got += sum(column_bytes(_column(got, str(name))) for name in got.keys())  # noqa: SIM118
        return got

    def fingerprint(self, got: TensorDict) -> Digests:
        return row_digests({str(name): got.get(name) for name in got.keys()})  # noqa: SIM118

    def clear(self, token: list[str]) -> None:
        self._queue.kv_clear(keys=token, partition_id=self._partition)

    def counters(self) -> dict[str, int]:
        return {"bytes_got": self._bytes_got}

    def close(self) -> None:
        """Nothing: closing TransferQueue here would end it for all."""


def _column(got: TensorDict, name: str) -> Any:
    value = got.get(name)
    return value.values() if getattr(value, "is_nested", False) else value
