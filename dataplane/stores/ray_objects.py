"""Implements the store `ray`: blocks are objects in Ray's object store, read without a copy on their own host.

One keeper actor per node owns the objects of the writers on that node, so that blocks survive the producer that wrote
them. Since Ray 2.56 an object belongs to the process that put it, and no other process can be made its owner. A put
therefore copies twice, into the argument of the actor call and into the object that the keeper owns. A get copies
nothing: the keeper hands out references, and the views keep their object in memory. Ray moves objects between hosts,
and spills them to disk.

Ray has no call that frees an object to which others refer. A freed block is unreadable because its keeper no longer
hands out references to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...codecs.blocks import BlockPieces, joined
from ..block_store import HOLDER_BYTES, PutsAll, StoreSpec, Want, holder_of
from ..errors import CapacityExceeded, RowsCleared, StoreLost
from ..rpc.child_process import end_with_parent
from .counting_host import CountingHost
from .deadline import received_part, unanswered
from .ray_processes import end_actors, has_died
from .registry import StoreEntry

NAMESPACE = "headrace"
START_TIMEOUT_S = 60.0
LATE_BLOCKS = 1 << 16


class Keeper:
    """Ray actor that owns the blocks written on its node."""

    def __init__(self) -> None:
        end_with_parent()
        self._blocks: dict[int, ray.ObjectRef] = {}
        self._dropped_early: dict[int, None] = {}
        """Ids of the blocks that were freed before their content arrived; only the latest LATE_BLOCKS are kept."""

    def pid(self) -> int:
        """Return the pid of the actor's process."""
        return os.getpid()

    def keep(self, first_block_id: int, blocks: list[list[np.ndarray]]) -> bool:
        """Copy each block's parts into an object that this process owns. Returns False at the first block that has
        already been freed; later blocks are not kept."""
        for block_id, parts in enumerate(blocks, first_block_id):
            if block_id not in self._dropped_early:
                self._blocks[block_id] = ray.put(parts)
            # The block was dropped earlier, or by another thread while the object was put.
            if block_id in self._dropped_early:
                self._blocks.pop(block_id, None)
                return False
        return True

    def lend(self, block_ids: list[int]) -> list[ray.ObjectRef | None]:
        """Return a reference to the object with each block's parts; None for a block that is not here."""
        return [self._blocks.get(block_id) for block_id in block_ids]

    def drop(self, block_ids: list[int]) -> None:
        """Forget blocks. A block whose content has not arrived yet is refused when it arrives."""
        for block_id in block_ids:
            if self._blocks.pop(block_id, None) is None:
                self._dropped_early[block_id] = None
        while len(self._dropped_early) > LATE_BLOCKS:
            self._dropped_early.pop(next(iter(self._dropped_early)), None)


class RayObjectsHost(CountingHost):
    """Starts a keeper (the actor that owns the blocks) on every node that is alive now. Nodes that join later use the
    first keeper. Called from one thread."""

    def __init__(self, run_id: str, capacity_bytes: int) -> None:
        """Raise ValueError if Ray is not initialised, and StoreLost if a keeper does not start in START_TIMEOUT_S. A
        keeper is an actor that owns blocks."""
        if not ray.is_initialized():
            raise ValueError("dataplane.store.kind='ray' needs Ray: call ray.init() first, or use 'local' or 'shm'")
        self._keepers: list[Any] = []
        self._local: dict[str, int] = {}
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        here = ray.get_runtime_context().get_node_id()
        nodes.sort(key=lambda node: node != here)
        names = [f"headrace-{run_id}-keeper-{number}" for number in range(len(nodes))]
        actor_class = ray.remote(Keeper)
        for node, name in zip(nodes, names, strict=True):
            self._keepers.append(
                actor_class.options(
                    name=name,
                    namespace=NAMESPACE,
                    num_cpus=0,
                    max_concurrency=4,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                ).remote()
            )
        started = time.monotonic()
        pids: list[int] = []
        for keeper, name in zip(self._keepers, names, strict=True):
            try:
                pids.append(keeper.pid.remote().future().result(START_TIMEOUT_S))
            except (RayError, FutureTimeout) as error:
                self.close()
                elapsed = time.monotonic() - started
                raise StoreLost(f"keeper did not start: {error}", op="start", peer=name, elapsed_s=elapsed) from None
        self._local = {name: pid for name, pid, node in zip(names, pids, nodes, strict=True) if node == here}
        peers = [f"{name} pid={pid} node={node[:12]}" for name, pid, node in zip(names, pids, nodes, strict=True)]
        super().__init__(peers, capacity_bytes)
        address = {"nodes": nodes, "names": names, "pids": pids}
        self.spec = StoreSpec(kind="ray", run_id=run_id, address=address)

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Make the keepers (the actors that own the blocks) drop these blocks, so that they can no longer be read. It
        takes one round trip, about a millisecond. Idempotent.

        If a keeper does not answer, its blocks are remembered and sent to it again with the next call, unless it is
        dead.
        """
        for block_id, location in blocks:
            nbytes = self._bytes.pop(block_id, None)
            if nbytes is None:
                continue
            # A reserved block that was not committed may be with any keeper, or still on its way to one.
            for keeper in [holder_of(location)] if location else range(len(self._keepers)):
                self._unfreed.add(keeper, block_id, nbytes)
        self._deliver()

    def _deliver(self) -> None:
        calls = [
            (number, block_ids, self._keepers[number].drop.remote(block_ids).future())
            for number, block_ids in self._unfreed.waiting()
        ]
        for number, block_ids, call in calls:
            try:
                call.result(self._unfreed.timeout_s(number))
            except (RayError, FutureTimeout) as error:
                self._undelivered(number, error, dead=has_died(self._keepers[number]))
            else:
                self._unfreed.delivered(number, block_ids)

    def _death(self, peer: int) -> Exception | None:
        return StoreLost("Ray reports that the actor has died") if has_died(self._keepers[peer]) else None

    def processes(self) -> dict[str, int]:
        """Return the pids of the keepers (actors that own the blocks) on this node, by name."""
        return dict(self._local)

    def close(self) -> None:
        """Kill the keepers (the actors that own the blocks), and with them their objects. The keepers on this node have
        ended when this returns. Idempotent."""
        keepers, self._keepers = self._keepers, []
        if keepers:
            end_actors(keepers, list(self._local.values()))


class RayObjectsStore(PutsAll):
    """Reads and writes blocks through the keeper actors, from any process connected to the Ray cluster. Thread-safe."""

    def __init__(self, spec: StoreSpec) -> None:
        """Raise ValueError if Ray is not initialised, and StoreLost if a keeper has ended. A keeper is an actor that
        owns blocks."""
        if not ray.is_initialized():
            raise ValueError("dataplane.store.kind='ray' needs Ray: call ray.init() before connecting")
        started = time.monotonic()
        nodes: Any = spec.address["nodes"]
        names: Any = spec.address["names"]
        pids: Any = spec.address["pids"]
        here = ray.get_runtime_context().get_node_id()
        self._own = nodes.index(here) if here in nodes else 0
        self._peers = [f"{name} pid={pid} node={node[:12]}" for name, pid, node in zip(names, pids, nodes, strict=True)]
        self._keepers: list[Any] = []
        for number, name in enumerate(names):
            try:
                self._keepers.append(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                raise self._died("connect", number, started, "no such actor") from None

    @property
    def holders(self) -> list[str]:
        """Names of the keepers (the actors that own the blocks); see `NamesHolders`."""
        return self._peers

    def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
        """Send the blocks to this node's keeper, and wait until it has copied them.

        Raises RowsCleared when the put's reservation has ended, CapacityExceeded when Ray's object store has no room
        (in memory or on disk), StoreLost when the keeper has died or is silent, and DataPlaneTimeout when the time
        limit passes first.
        """
        started = time.monotonic()
        own, peer = self._own, self._peers[self._own]
        try:
            reply = self._keepers[own].keep.remote(
                first_block_id, [[joined(pieces) for pieces in parts] for parts in blocks]
            )
            kept = self._wait("put", own, reply, started, timeout_s)
        except ObjectStoreFullError as error:
            text = f"Ray's object store has no room for {len(blocks)} blocks: {error}"
            raise CapacityExceeded(text, op="put", peer=peer, elapsed_s=time.monotonic() - started) from None
        if not kept:
            text = f"of blocks {first_block_id} and {len(blocks) - 1} more, some were freed before they were written"
            raise RowsCleared(text, op="put", elapsed_s=time.monotonic() - started)
        return (own.to_bytes(HOLDER_BYTES),) * len(blocks)

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return read-only views of the objects in Ray's object store, which keep these objects in memory. Blocks on
        other nodes are transferred whole."""
        started = time.monotonic()
        by_keeper: dict[int, list[int]] = {}
        for want in wants:
            by_keeper.setdefault(holder_of(want.block.location), []).append(want.block.block_id)
        lent = []
        for number, block_ids in by_keeper.items():
            lent.append((number, block_ids, self._keepers[number].lend.remote(block_ids)))
        parts: dict[int, list[np.ndarray]] = {}
        for number, block_ids, reply in lent:
            references = self._wait("get", number, reply, started, timeout_s)
            if None in references:
                cleared = block_ids[references.index(None)]
                raise RowsCleared(f"block {cleared} was freed", op="get", elapsed_s=time.monotonic() - started)
            futures = [reference.future() for reference in references]
            for block_id, future in zip(block_ids, futures, strict=True):
                parts[block_id] = self._result("get", number, future, started, timeout_s)
        found = []
        for want in wants:
            views, peer = parts[want.block.block_id], self._peers[holder_of(want.block.location)]
            found.append({part: received_part(views[part], want, part, peer) for part in want.parts})
        return found

    def settle(self, wants: Sequence[Want]) -> None:
        """No-op: Ray's objects never change. A view shows the right bytes even if its block was freed during the
        copy."""

    def close(self) -> None:
        """Drop this process's handles to the keepers (the actors that own the blocks), which keep running."""
        self._keepers = []

    def _wait(self, op: str, number: int, reference: Any, started: float, timeout_s: float) -> Any:
        # In a process that is an async actor, ray.get would log a warning, whatever the thread.
        return self._result(op, number, reference.future(), started, timeout_s)

    def _result(self, op: str, number: int, future: Any, started: float, timeout_s: float) -> Any:
        try:
            return future.result(max(0.0, started + timeout_s - time.monotonic()))
        except FutureTimeout:
            raise unanswered("the keeper of Ray objects", op, self._peers[number], started) from None
        except ObjectStoreFullError:
            raise
        except RayError as error:
            raise self._died(op, number, started, str(error).partition("\n")[0]) from None

    def _died(self, op: str, number: int, started: float, why: str) -> StoreLost:
        return StoreLost(
            f"keeper of Ray objects is lost: {why}",
            op=op,
            peer=self._peers[number],
            elapsed_s=time.monotonic() - started,
        )


STORE = StoreEntry(
    lambda config, run_id, host: RayObjectsHost(run_id, config.capacity_mib << 20),
    lambda spec, link: RayObjectsStore(spec),
)
