"""Opens all baselines by name, and implements those that store rows: TransferQueue on two stores, and Ray's put.

The benchmark uses TransferQueue 0.1.11 through its key-value API, as its users do, on SimpleStorage or MooncakeStore.
The first user owns the queue and must be the only one to close it. The queue's init hangs if Ray has fewer free CPUs
than it needs (one each for controller and storage unit). A metadata request blocks the queue's only thread for seconds
unless `polling_mode` is on. The queue's calls have no timeouts, so callers must set them. The queue can start
Mooncake's master (metadata server) itself (`auto_init`), but then it ends every mooncake_master of the host. The
benchmark therefore starts the master.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from tensordict import TensorDict

from ...codecs.batch import Batch
from ...codecs.jagged import pack, select_rows
from ...codecs.schema import Schema
from ...dataplane.stores.mooncake_processes import MooncakeMaster
from ...trainers.run.checks import doctor
from .byte_baselines import (
    Host,
    MemcpyEndpoint,
    PlainContender,
    ServedContender,
    TcpEndpoint,
    TcpServer,
    ZmqEndpoint,
    ZmqServer,
)
from .contenders import ROW_OPS, Contender, Digests, Op, Share, row_digests
from .workloads import Load, LoadSpec, column_bytes

START_TIMEOUT_S = 90.0
CLOSE_TIMEOUT_S = 30.0
NUM_CPUS = 2
"""Number of free CPUs that Ray must have so that TransferQueue can start."""
PROCESS_ENV = {"TQ_NUM_THREADS": "1"}
"""Environment variables that must be set in every process before it imports TransferQueue. With more than one thread,
TransferQueue changes torch's number of threads around every request, and the idle OpenMP threads spin, so that 12 MB
take 100 ms instead of 13."""


class TransferQueueContender:
    """The driver's side of the TransferQueue baseline. It starts one TransferQueue in a separate actor, and all
    benchmark processes share it."""

    ops: frozenset[Op] = ROW_OPS

    def __init__(self, name: str = "transferqueue", backend: dict[str, Any] | None = None) -> None:
        """Start TransferQueue with `backend` as the section `backend` of its configuration. None selects SimpleStorage
        with one storage unit.

        Raises RuntimeError if Ray has too few free CPUs, and Ray's own error if the start takes longer than
        START_TIMEOUT_S.
        """
        self.name = name
        section = backend or {
            "storage_backend": "SimpleStorage",
            "SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": None},
        }
        free = ray.available_resources().get("CPU", 0.0)
        if free < NUM_CPUS:
            raise RuntimeError(
                f"Ray: {free:g} CPUs are free, expected {NUM_CPUS}, because the init of TransferQueue hangs with fewer"
            )
        self._owner: Any = ray.remote(num_cpus=0, runtime_env={"env_vars": PROCESS_ENV})(_Owner).remote()
        try:
            ray.get(self._owner.open.remote(section), timeout=START_TIMEOUT_S)
        except BaseException:
            ray.kill(self._owner)  # Everything that the actor started ends with it.
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
    """Runs in the actor that initialises TransferQueue first and therefore owns it. TransferQueue ends when this actor
    ends."""

    def open(self, backend: dict[str, Any]) -> None:
        import transfer_queue

        transfer_queue.init({"controller": {"polling_mode": True}, "backend": backend})  # type: ignore[arg-type]

    def close(self) -> None:
        import transfer_queue

        transfer_queue.close()


class TransferQueueEndpoint:
    """The TransferQueue baseline in a worker process. It connects to TransferQueue at its first call."""

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
        self._bytes_got += sum(column_bytes(_column(got, str(name))) for name in got.keys())
        return got

    def fingerprint(self, got: TensorDict) -> Digests:
        return row_digests({str(name): got.get(name) for name in got.keys()})

    def clear(self, token: list[str]) -> None:
        self._queue.kv_clear(keys=token, partition_id=self._partition)

    def counters(self) -> dict[str, int]:
        return {"bytes_got": self._bytes_got}

    def close(self) -> None:
        """Do nothing, because closing TransferQueue here would end it for all processes."""


def _column(got: TensorDict, name: str) -> Any:
    value = got.get(name)
    return value.values() if getattr(value, "is_nested", False) else value


SEGMENT_BYTES = 2 << 30
"""Number of bytes that every process gives to the store. MooncakeStore keeps rows in the process that put them."""
BUFFER_BYTES = 1 << 30


class MooncakeContender(TransferQueueContender):
    """The TransferQueue baseline on MooncakeStore in the driver, with its own Mooncake master (metadata server)."""

    def __init__(self, name: str) -> None:
        """Start the Mooncake master and TransferQueue.

        Raises ValueError if mooncake is not installed, and StoreLost or RuntimeError if the Mooncake master or
        TransferQueue does not start.
        """
        self._master = MooncakeMaster(f"bench-{uuid.uuid4().hex[:8]}", "127.0.0.1")
        section: dict[str, Any] = {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self._master.address.endpoint,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": SEGMENT_BYTES,
            "local_buffer_size": BUFFER_BYTES,
        }
        try:
            super().__init__(name, {"storage_backend": "MooncakeStore", "MooncakeStore": section})
        except BaseException:
            self._master.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._master.close()


@dataclass(frozen=True, slots=True)
class RayToken:
    """A reference to an object in Ray's object store, and the schema of the object's rows."""

    refs: tuple[ray.ObjectRef, ...]
    """The reference, in a tuple. Ray would fetch the object for every call of an actor whose argument is the bare
    reference."""
    schema: Schema


class RayPutEndpoint:
    """Reads and writes rows with Ray's own put and get. A reader of a share (a part of the rows) must fetch all rows
    and select the share."""

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> RayToken:
        return RayToken((ray.put(values),), load.schema.subset(load.first))

    def get(self, token: RayToken, share: Share, fields: Sequence[str] | None) -> TensorDict | Batch:
        values = ray.get(token.refs[0])
        return values if share.count == 1 else select_rows(pack(token.schema, values), share.rows)

    def fingerprint(self, got: TensorDict | Batch) -> Digests:
        return row_digests({str(name): got[str(name)] for name in got.keys()})

    def close(self) -> None:
        """Do nothing, because the driver's references keep the objects in Ray's object store."""


SECOND_RUN = "transferqueue_mooncake"
"""Baseline that is measured in a second run, because one Ray cluster cannot host it together with `transferqueue`."""
NAMES = ("transferqueue", SECOND_RUN, "ray", "memcpy", "tcp", "zmq")
_NEED_RAY = ("transferqueue", SECOND_RUN, "ray")


def contender_name(name: str) -> str:
    """Return the name under which a baseline's results are reported. It differs for `ray` and `tcp`, because two stores
    have these names as well."""
    return {"ray": "ray put", "tcp": "raw tcp"}.get(name, name)


def why_absent(name: str, in_process: bool) -> str:
    """Return why a baseline cannot be measured and how to change that; "" if it can be."""
    if in_process and name in _NEED_RAY:
        return "needs Ray, which this run does not use"
    if name != SECOND_RUN:
        return ""
    error = doctor.try_imports({name: ("mooncake.store",)})[name]
    remedy = "apt-get install libibverbs1" if "libibverbs" in error else "pip install -e '.[mooncake]'"
    return f"{error}; to get it: {remedy}" if error else ""


def open_baseline(name: str, host: Host) -> Contender:
    """Start the baseline `name` and return it. Its server, if it has one, runs on `host`. Raises ValueError for an
    unknown name."""
    if name == "transferqueue":
        return TransferQueueContender()
    if name == SECOND_RUN:
        return MooncakeContender(name)
    if name == "ray":
        return PlainContender(contender_name(name), RayPutEndpoint)
    if name == "memcpy":
        return PlainContender(name, MemcpyEndpoint)
    if name == "tcp":
        return ServedContender(contender_name(name), host, TcpServer, TcpEndpoint)
    if name == "zmq":
        return ServedContender(name, host, ZmqServer, ZmqEndpoint)
    raise ValueError(f"baseline: got {name!r}, expected one of {', '.join(NAMES)}")
