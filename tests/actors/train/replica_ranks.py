"""Shared by the replica reader's tests: rows on a data plane, a plan, and scenarios that run on several ranks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS
from headrace.actors.train.microbatch_plan import Budget, plan_shards
from headrace.actors.train.reader import FetchPolicy, ReplicaReader, build_links, holds_receipt
from headrace.actors.train.step_rows import TrainShard
from headrace.actors.train.topology import Topology
from headrace.actors.train_backend import MicroBatch
from headrace.codecs.batch import Batch, Jagged
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.directory.service import DirectoryService
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.rpc.frames import DirectoryAddress
from headrace.dataplane.rpc.server import DirectoryServer
from headrace.dataplane.store_choice import build_store_host
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.process_pool import FORKSERVER, start_ray
from headrace.tests.waiting import wait_until

PARTITION = "train"


@contextlib.contextmanager
def data_plane(kind: str) -> Iterator[DataPlaneHandle]:
    """A data plane that other processes can join."""
    if kind == "shm":
        with _served() as handle:
            yield handle
        return
    start_ray()
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 64})
    config = DataPlaneConfig(store=store, trusted_network=True, timeout_s=20)
    with open_data_plane(config, run_id=fresh_run_id()) as plane:
        yield plane.handle


@contextlib.contextmanager
def _served() -> Iterator[DataPlaneHandle]:
    """Directory and shared memory in this process, for others too; without Ray, which takes seconds to start."""
    config = DataPlaneConfig(store=StoreConfig.model_validate({"kind": "shm", "capacity_mib": 64}), timeout_s=20)
    run_id = fresh_run_id()
    host = build_store_host(config, run_id)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def open_both() -> tuple[DirectoryService, DirectoryServer, DirectoryAddress]:
        service = DirectoryService(config, host)
        server = DirectoryServer(service, host.spec.key)
        return service, server, await server.start(f"headrace-{run_id}", "")

    service, server, address = asyncio.run_coroutine_threadsafe(open_both(), loop).result(20)
    try:
        yield DataPlaneHandle(run_id, config, host.spec, "", address, "directory of the test")
    finally:
        asyncio.run_coroutine_threadsafe(service.close(), loop).result(20)
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def row_columns(lengths: Sequence[int]) -> Batch:
    """Rows whose every value is its token's own number."""
    array, tokens = np.array(lengths, np.int64), int(sum(lengths))
    count = torch.arange(tokens)
    values = {
        "input_ids": count.int(),
        "response_mask": (count % 3 > 0).to(torch.uint8),
        "rollout_logprobs": -count.float(),
    }
    columns = {name: Jagged(values[name], array) for name in TRAIN_FIELDS}
    return Batch(ROLLOUT_SCHEMA.subset(TRAIN_FIELDS), len(array), columns)


def put_rows(client: DataPlaneClient, lengths: Sequence[int], prefix: str = "r") -> KVBatchMeta:
    """The receipt of such rows in groups of 4, with the tags that a step ships."""
    client.register(PARTITION, ROLLOUT_SCHEMA, ("train",), group_size=4)
    keys = [f"{prefix}{index // 4}.{index % 4}" for index in range(len(lengths))]
    meta = client.put(PARTITION, keys, row_columns(lengths))
    rows = np.arange(len(lengths))
    return meta.with_tags(
        advantage=(rows / 7).astype(np.float32),
        group_tokens=(100 + rows // 4).astype(np.float32),
        row_tokens=(3 * rows).astype(np.float32),
    )


@dataclass(frozen=True)
class Step:
    """A step as the driver ships it."""

    topology: Topology
    policy: FetchPolicy
    handle: DataPlaneHandle
    shards: tuple[TrainShard, ...]
    """By rank."""
    timeout_s: float = 20.0
    device: str = "cpu"
    """`cuda`: each rank has the GPU of its number."""

    def receipt(self, rank: int) -> KVBatchMeta:
        """Of a rank that has one."""
        meta = self.shards[rank].meta
        assert meta is not None
        return KVBatchMeta.from_bytes(meta)


def ship(
    handle: DataPlaneHandle,
    meta: KVBatchMeta,
    topology: Topology,
    policy: FetchPolicy = "auto",
    budget: int = 200,
    timeout_s: float = 20.0,
) -> Step:
    plan = plan_shards(meta.lengths, topology, Budget(budget, packing="packed"), meta.groups)
    shards = []
    for rank in range(topology.world):
        rows, sizes = plan.shard(topology.place(rank).dp)
        receipt = meta.select(rows).to_bytes() if holds_receipt(topology, policy, rank) else None
        shards.append(TrainShard(1, receipt, sizes, plan.digest, True))
    return Step(topology, policy, handle, tuple(shards), timeout_s)


@contextlib.contextmanager
def reader_of(rank: int, step: Step) -> Iterator[tuple[ReplicaReader, DataPlaneClient]]:
    """A rank's reader, its shard begun."""
    device = torch.device(step.device, rank) if step.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    client = connect(step.handle, name=f"rank {rank}")
    name = f"worker {rank} (pid {os.getpid()} on here)"
    links = build_links(step.topology, rank, step.policy, name=name, timeout_s=step.timeout_s, device=device)
    reader = ReplicaReader(client, ROLLOUT_SCHEMA, step.topology, rank, links, device=device)
    reader.begin(step.shards[rank])
    yield reader, client
    reader.close()
    client.close()


def content(micro: MicroBatch) -> dict[str, Any]:
    """A microbatch as plain data."""
    columns = {name: micro.batch.jagged(name).values.tolist() for name in micro.batch}
    assert micro.group_tokens is not None and micro.row_tokens is not None
    return {
        "columns": columns,
        "lengths": micro.lengths.tolist(),
        "advantages": micro.advantages.tolist(),
        "groups": micro.group_ids.tolist(),
        "group_tokens": micro.group_tokens.tolist(),
        "row_tokens": micro.row_tokens.tolist(),
    }


# ---------------------------------------------------------------- processes


class Ranks:
    """Processes that each run `scenario(rank, *arguments)`, joined by gloo; all ended by `close`."""

    def __init__(self, scenario: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.processes = [
            FORKSERVER.Process(target=_rank, args=(rank, world, str(folder), scenario, arguments))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait_for(self, mark: str, timeout_s: float = 60) -> None:
        """Until a rank has called `reach(folder, mark)`."""
        wait_until((self._folder / mark).exists, f"no rank reached {mark!r}", timeout_s)

    def results(self, timeout_s: float = 60, ranks: Sequence[int] | None = None) -> list[Any]:
        """What the ranks returned."""
        deadline = time.monotonic() + timeout_s
        found = []
        for rank in range(len(self.processes)) if ranks is None else ranks:
            self.processes[rank].join(max(0.1, deadline - time.monotonic()))
            path = self._folder / f"result.{rank}"
            assert path.exists(), f"rank {rank}: exit code {self.processes[rank].exitcode}, no result"
            found.append(pickle.loads(path.read_bytes()))
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reach(folder: Path, mark: str) -> None:
    (folder / mark).touch()


def _rank(rank: int, world: int, folder: str, scenario: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    result = scenario(rank, *arguments)
    Path(folder, f"draft.{rank}").write_bytes(pickle.dumps(result))
    os.rename(Path(folder, f"draft.{rank}"), Path(folder, f"result.{rank}"))
    os._exit(0)  # groups whose other ranks are dead are not waited for


def run_on(scenario: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> list[Any]:
    """All ranks' results."""
    with Ranks(scenario, world, folder, *arguments) as ranks:
        return ranks.results()


def raised(call: Callable[[], Any]) -> tuple[str, str, float]:
    """(class, text, seconds) of the error that `call` raises."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    pytest.fail("nothing was raised")
