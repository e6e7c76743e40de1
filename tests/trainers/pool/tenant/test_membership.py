"""A tenant's part in a pool: before it gives its GPUs back at its start, their memory must have fallen."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.actors.process.memory import ProcessMemory
from headrace.testing import FakeCluster
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.config.load import build_config
from headrace.trainers.grpo import gpu_turns
from headrace.trainers.pool.tenant.membership import PoolMembership


def test_a_process_that_keeps_its_memory_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "FALL_S", 0.0)
    held: dict[str, ProcessMemory] = {}

    def answering(name: str) -> Any:
        return lambda method: held[name]

    member: Any = object.__new__(PoolMembership)
    rollout = {"engine": "vllm", "tp": 2, "num_engines": 2, "num_actors": 1}
    gpus = {"trainer_gpus": [0], "rollout_gpus": [0, 1, 2, 3], "residual_mib": 100}
    pool = {"address": "a"}
    sections = {"pool": pool, "rollout": rollout, "resources": gpus}
    member._config = build_config({**sections, "algorithm": {"mode": "async"}, "sync": {"in_flight": "keep"}})
    cluster = FakeCluster()
    engine, worker = cluster.engine(answering("engine")), cluster.trainer(answering("worker"))
    held |= {"engine": ProcessMemory(200 << 20, 0), "worker": ProcessMemory(100 << 20, 0)}
    member.expect_freed([engine, worker])
    held["engine"] = ProcessMemory(900 << 20, 0, whole_device=True)
    member.expect_freed([engine])
    held["worker"] = ProcessMemory(101 << 20, 0)
    with pytest.raises(
        ActorFailed, match="start: train worker 0 .* still holds 101 MiB .* at most 100 .resources.residual_mib"
    ):
        member.expect_freed([worker])
    held["engine"] = ProcessMemory(201 << 20, 0)
    with pytest.raises(ActorFailed, match="start: engine 0 .* still holds 201 MiB .* at most 200"):
        member.expect_freed([engine])
