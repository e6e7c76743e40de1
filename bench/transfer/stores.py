"""Adapts Headrace's own stores to the benchmark's interfaces: `Contender` in the driver, `Endpoint` in the workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from ...codecs.batch import Batch
from ...codecs.schema import Schema
from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.factory import connect, open_data_plane
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.meta import KVBatchMeta, narrow_sources
from .contenders import CHECKSUMMED, STORE_OPS, Digests, Op, Share, row_digests
from .workloads import Load, LoadSpec, build_load

TASK = "bench"
TIMEOUT_S = 60.0
SCHEMA_SHARE = 1e-9
"""Share of a workload's rows that is built when only the schema is needed."""


class StoreContender:
    """The driver's side of one of Headrace's stores. It starts a data plane with this store."""

    ops: frozenset[Op] = STORE_OPS

    def __init__(
        self,
        kind: str,
        *,
        capacity_mib: int,
        block_rows: int | None = None,
        checksum: bool = False,
        in_process: bool = False,
    ) -> None:
        """Start the data plane. Raises the errors of `open_data_plane`, and ValueError for an unknown kind of store."""
        self.name = kind + (CHECKSUMMED if checksum else "")
        store = StoreConfig.model_validate({"kind": kind, "capacity_mib": capacity_mib})
        config = DataPlaneConfig(
            store=store,
            trusted_network=True,
            integrity="verify" if checksum else "off",
            block_rows=block_rows,
            timeout_s=TIMEOUT_S,
        )
        self._plane = open_data_plane(config, in_process=in_process)
        # The store `tcp` is measured as other hosts see it. On the same host, clients would use the memory of its
        # units.
        self._handle = self._plane.handle.over_sockets() if kind == "tcp" else self._plane.handle

    def factory(self, spec: LoadSpec) -> Callable[[], StoreEndpoint]:
        sample = build_load(LoadSpec(spec.name, SCHEMA_SHARE))
        return functools.partial(StoreEndpoint, self._handle, spec.name, sample.schema, sample.group_size, sample.first)

    def part(self, token: KVBatchMeta, share: Share) -> KVBatchMeta:
        return token if share.count == 1 else token.select(share.rows)

    def keys(self, token: KVBatchMeta) -> Sequence[str]:
        return token.keys

    def merge(self, token: KVBatchMeta, written: KVBatchMeta) -> KVBatchMeta:
        return token.merge_fields(written)

    def blocks(self, token: KVBatchMeta, fields: Sequence[str]) -> frozenset[int]:
        sources = narrow_sources(token.sources, fields)
        return frozenset(token.blocks[n].block_id for source in sources for n in np.unique(source.block).tolist())

    def close(self) -> None:
        self._plane.close()


class StoreEndpoint:
    """One of Headrace's stores in a worker process of the benchmark, as a client of the data plane."""

    def __init__(
        self, handle: DataPlaneHandle, partition: str, schema: Schema, group_size: int, first: tuple[str, ...]
    ) -> None:
        self._client = connect(handle, name="bench")
        self._client.register(partition, schema, (TASK,), group_size=group_size)
        self._partition = partition
        self._first = first
        self._claimed: KVBatchMeta | None = None
        """Receipt of the latest claim, which keeps its rows leased."""

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> KVBatchMeta:
        return self._client.put(self._partition, keys, values)

    def write(self, keys: Sequence[str], values: TensorDict, rewards: np.ndarray | None) -> KVBatchMeta:
        tags = None if rewards is None else {"reward": rewards}
        return self._client.put(self._partition, keys, values, tags=tags)

    def get(self, token: KVBatchMeta, share: Share, fields: Sequence[str] | None) -> Batch:
        return self._client.get(token, fields)

    def fingerprint(self, got: Any) -> Digests:
        return row_digests(got)

    def claim(self, num_rows: int, timeout_s: float) -> None:
        self._claimed = self._client.claim(self._partition, TASK, self._first, num_rows, timeout_s=timeout_s)

    def clear(self, token: KVBatchMeta) -> None:
        self._client.clear(self._partition, token.keys)

    def counters(self) -> dict[str, int]:
        stats = self._client.stats.snapshot()
        return {
            "directory_calls": int(stats["directory_calls"]),
            "bytes_got": int(stats["bytes_got"]),
            "wire_bytes_put": int(stats["bytes_put"]),
        }

    def close(self) -> None:
        self._client.close()
