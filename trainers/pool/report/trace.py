"""Writes pool_trace.jsonl, a line for each change of a GPU's holder and for each stage of a switch: a `PoolEvent`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..state.commands import Order
from ..state.plan import Role
from ..state.pool import Pool
from .calls import Event, PoolEvent, StageNote

Holder = tuple[str, Role]
"""Tenant that holds a GPU, and for which of its roles."""


def holders(pool: Pool) -> dict[int, Holder]:
    """Return who holds each GPU: number of the GPU -> tenant and role. Idle GPUs are left out."""
    found: dict[int, Holder] = {}
    for grant in pool.grants.values():
        found.update(dict.fromkeys(grant.gpus, (grant.tenant, grant.role)))
    for name, tenant in pool.tenants.items():
        for shard in tenant.awake:
            found.update(dict.fromkeys(tenant.map.shards[shard], (name, "rollout")))
    return found


class TraceWriter:
    """The file pool_trace.jsonl of one pool. A pool that is started again goes on with it."""

    def __init__(self, path: Path, began: float, held: Mapping[int, Holder]) -> None:
        """began: time (`time.time()`) from which times are counted. held: who holds which GPU now."""
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._began = began
        self._held = dict(held)
        self._ordered = 0
        self._asked: dict[Holder, float] = {}
        """Time at which each request that waited after the last call was made."""

    def note_state(self, now_s: float, pool: Pool) -> None:
        """Write what has changed since the last call: holders of GPUs, and orders to put shards to sleep."""
        held = holders(pool)
        for gpu in sorted(self._held.keys() | held.keys()):
            before, after = self._held.get(gpu), held.get(gpu)
            if before == after:
                continue
            if before is not None:
                self._write(now_s, gpu, before, "release")
            if after is not None:
                asked_s = self._asked.get(after)
                self._write(now_s, gpu, after, "grant", None if asked_s is None else now_s - asked_s)
        self._held = held
        self._asked = {(one.tenant, one.role): one.since_s for one in pool.requests.values()}
        self._note_orders(now_s, pool, pool.orders.values())

    def note_stages(self, tenant: str, notes: Iterable[StageNote]) -> None:
        """Write the stages of switches that a tenant has measured."""
        for note in notes:
            for gpu in note.gpus:
                self._write(note.ended - self._began, gpu, (tenant, note.role), note.event, note.seconds)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _note_orders(self, now_s: float, pool: Pool, orders: Iterable[Order]) -> None:
        for order in orders:
            if order.number <= self._ordered:
                continue
            self._ordered = order.number
            if order.kind == "shrink":
                shards = pool.tenants[order.tenant].map.shards
                for gpu in (gpu for shard in order.shards for gpu in shards[shard]):
                    self._write(now_s, gpu, (order.tenant, "rollout"), "shrink")

    def _write(self, t: float, gpu: int, holder: Holder, event: Event, seconds: float | None = None) -> None:
        line = PoolEvent(t=round(t, 4), gpu=gpu, tenant=holder[0], role=holder[1], event=event)
        if seconds is not None:
            line["seconds"] = round(seconds, 4)
        self._file.write(json.dumps(line) + "\n")
