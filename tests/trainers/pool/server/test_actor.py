"""Tests the pool's actor without Ray: long polls, refusals, the trace, and what stands after a restart."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.process.remote_methods import decode_result, encode_arguments
from headrace.codecs import messages
from headrace.dataplane.owned_folder import pid_space, process_start
from headrace.tests.trainers.pool.state.pool_states import tenant_map
from headrace.trainers.grpo.pool_demand import Demand
from headrace.trainers.pool.server import actor as pool_actor
from headrace.trainers.pool.server.actor import PoolActor, PoolSetup
from headrace.trainers.pool.state.commands import (
    Ask,
    Command,
    Order,
    Outcome,
    Processes,
    Register,
    Release,
    Reply,
    Report,
    StepFinished,
    Unregister,
)
from headrace.trainers.pool.state.plan import Priority
from headrace.trainers.pool.state.pool import PoolBounds
from headrace.trainers.pool.state.status import StageNote
from headrace.trainers.supervision.stuck_report import write_actors

BOUND_S = 20.0


class Caller:
    """Calls a pool's actor as other processes do, with encoded messages."""

    def __init__(self, folder: Path) -> None:
        self.actor = PoolActor(PoolSetup("pool", str(folder), 2, PoolBounds()))

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return decode_result(method, await self.actor.call(method.__name__, encode_arguments(arguments)))

    async def send(self, *commands: Command) -> None:
        for command in commands:
            assert await self.reply(command) == Reply()

    async def refused(self, command: Command) -> str:
        return (await self.reply(command)).refusal

    async def reply(self, command: Command) -> Reply:
        return await self.call(PoolActor.apply, type(command).__name__, messages.encode(command))

    async def orders(self, tenant: str, timeout_s: float = 0.0) -> list[Order]:
        return await self.call(PoolActor.wait_for_orders, tenant, timeout_s)

    def end(self) -> None:
        """End as a process does that dies."""
        if self.actor._looking is not None:
            self.actor._looking.cancel()
        self.actor._journal.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


def register(name: str, processes: Processes | None = None) -> Register:
    return Register(tenant_map(name, range(2), 1, 1), processes)


def test_long_polls_are_answered_by_the_next_change_and_a_restart_forgets_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        pool = Caller(tmp_path)
        await pool.send(register("a"), StepFinished("a"))
        waiting = asyncio.create_task(pool.orders("a", BOUND_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await pool.send(Ask("a", "rollout", Priority.GENERATION, 8))
        [order] = await waiting
        assert (order.kind, order.shards) == ("expand", (0, 1))
        pool.end()

        pool = Caller(tmp_path)
        assert await pool.orders("a") == [order], "it is sent again"
        await pool.send(Outcome("a", order.number, order.shards, {}), Report("a", Demand(8, 2)))
        await pool.send(Ask("a", "train", Priority.TRAINING))
        granted = asyncio.create_task(pool.call(PoolActor.wait_for_grant, "a", "train", BOUND_S))
        status = await pool.call(PoolActor.status)
        [request, ordered] = status.waits
        [(tenant, priority, seconds)] = (await pool.call(PoolActor.figures)).waits
        assert (tenant, priority) == ("a", "training") and 0 <= seconds < BOUND_S
        assert request.who == "a (train)" and "GPU 0: a is putting its engine to sleep" in request.freed_by
        assert ordered.what == "a to shrink its shards [0]" and status.tenants[0].remaining == 6
        assert not granted.done()
        [order] = await pool.orders("a")
        await pool.call(PoolActor.note, "a", [StageNote("sleep", "rollout", (0,), pool.actor._began + 1.5, 0.25)])
        await pool.send(Outcome("a", order.number, order.shards, {}))
        assert await granted
        assert (await pool.call(PoolActor.status)).gpus == ("a train", "a rollout")
        figures = await pool.call(PoolActor.figures)
        assert figures.holders == ((0, "a", "train"), (1, "a", "rollout")) and figures.waits == ()
        assert figures.switches == {"sleep": (1, 0.25)} and figures.gaps == {"a": 0.0}
        assert figures.orders == {"done": 2, "failed": 0, "void": 0}
        await pool.send(Release("a", "train"))
        assert "holds none" in await pool.refused(Release("a", "train"))
        await pool.send(Unregister("a", dead=True))
        pool.end()

    run(main)
    lines = [json.loads(line) for line in (tmp_path / "pool_trace.jsonl").read_text().splitlines()]
    told = [(line["gpu"], line["role"], line["event"]) for line in lines]
    assert told == [
        (0, "rollout", "grant"), (1, "rollout", "grant"), (0, "rollout", "shrink"), (0, "rollout", "sleep"),
        (0, "rollout", "release"), (0, "train", "grant"), (0, "train", "release"), (0, "rollout", "grant"),
        (0, "rollout", "release"), (1, "rollout", "release"),
    ]  # fmt: skip
    assert abs(lines[3]["t"] - 1.5) < 0.01 and lines[3]["seconds"] == 0.25 and lines[5]["seconds"] > 0


def test_a_run_that_has_missed_the_answer_may_register_again(tmp_path: Path) -> None:
    async def main() -> None:
        pool = Caller(tmp_path)
        mine = Processes("elsewhere", 1, 2, "folder")
        await pool.send(register("a", mine), register("a", mine))
        assert "registered already" in await pool.refused(register("a", Processes("elsewhere", 3, 4, "folder")))
        pool.end()

    run(main)


@pytest.mark.processes
def test_a_dead_driver_s_processes_are_ended_before_its_gpus_go_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_actor, "TICK_S", 0.05)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    driver, actor = subprocess.Popen(sleeper), subprocess.Popen(sleeper)
    here = socket.gethostname()
    write_actors(tmp_path, "r", [("engine 0", actor.pid, here, pid_space())])

    async def main() -> None:
        pool = Caller(tmp_path)
        start = process_start(driver.pid)
        assert start is not None
        await pool.send(register("a", Processes(here, driver.pid, start, str(tmp_path), "r")), StepFinished("a"))
        await pool.send(Ask("a", "train", Priority.TRAINING), register("b"))
        await pool.send(Ask("b", "train", Priority.TRAINING))
        await asyncio.sleep(0.2)
        assert not await pool.call(PoolActor.wait_for_grant, "b", "train", 0.0) and actor.poll() is None
        driver.kill()
        driver.wait()
        assert await pool.call(PoolActor.wait_for_grant, "b", "train", BOUND_S)
        assert actor.wait(timeout=10) != 0
        assert [tenant.name for tenant in (await pool.call(PoolActor.status)).tenants] == ["b"]
        pool.end()

    run(main)
    assert os.path.exists(tmp_path / "pool.journal")
