"""Tests the pool as a judge: what it has not seen itself, or cannot write down, harms no tenant, and frees no GPU."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli import main as cli
from headrace.dataplane.owned_folder import pid_space, process_start
from headrace.tests.full_disk import file_size_limit
from headrace.tests.trainers.pool.server.test_actor import BOUND_S, Caller, register, run
from headrace.trainers.errors import UserError
from headrace.trainers.pool.server import actor as pool_actor
from headrace.trainers.pool.server.actor import PoolActor, end_processes
from headrace.trainers.pool.server.folder import ServedPool, find_pool, replay, write_pool
from headrace.trainers.pool.server.server import status_lines
from headrace.trainers.pool.state.commands import Alive, Ask, Outcome, Processes, StepFinished
from headrace.trainers.pool.state.plan import Priority
from headrace.trainers.supervision import own_clock
from headrace.trainers.supervision.stuck_report import ActorLine, write_actors

HOUR_S = 3600.0


class Time:
    """The time of the pool's process, which a test can let pass, or step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed_s = self.stepped_s = 0.0
        monotonic, date = time.monotonic, time.time
        own = SimpleNamespace(monotonic=lambda: monotonic() + self.passed_s)
        monkeypatch.setattr(own_clock, "time", own)
        monkeypatch.setattr(time, "time", lambda: date() + self.stepped_s)


def suspects(pool: Caller) -> dict[str, str]:
    return pool.actor._pool.suspects


@contextmanager
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a process; yields it with its start time."""
    with subprocess.Popen(["sleep", "60"]) as process:
        start = process_start(process.pid)
        assert start is not None
        yield process, start
        process.kill()


def test_no_tenant_is_silent_because_the_pool_was_away_or_the_date_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        now, pool = Time(monkeypatch), Caller(tmp_path)
        await pool.send(register("a"), StepFinished("a"), register("b"), StepFinished("b"))
        await pool.send(Ask("a", "rollout", Priority.GENERATION, 8))
        now.passed_s += HOUR_S
        await pool.send(Alive("a"))
        now.stepped_s += HOUR_S
        pool.actor._look_once()
        assert not suspects(pool) and [order.tenant for order in await pool.orders("a")] == ["a"]
        pool.end()

        now.passed_s += HOUR_S
        now.stepped_s += HOUR_S
        pool = Caller(tmp_path)
        await pool.send(Alive("b"))
        assert not suspects(pool)
        for _ in range(16):  # Now the pool runs, and a says nothing.
            now.passed_s += 2.0
            await pool.send(Alive("b"))
        assert list(suspects(pool)) == ["a"]
        pool.end()

    run(main)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Context manager in which no more than a part of a record can be added to the pool's journal."""
    with file_size_limit((folder / "pool.journal").stat().st_size + 9):
        yield


@pytest.mark.processes
def test_on_a_full_disk_nothing_is_lost_nobody_is_late_and_the_dead_are_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_actor, "TICK_S", 0.02)
    monkeypatch.setattr(pool_actor, "END_AGAIN_S", 0.1)
    write_actors(tmp_path, "r", [])

    async def main(driver: subprocess.Popen[bytes], start: int) -> None:
        now, pool = Time(monkeypatch), Caller(tmp_path)
        own = Processes("host", driver.pid, start, str(tmp_path), "r")
        await pool.send(register("a", own), StepFinished("a"), register("b"), StepFinished("b"))
        await pool.send(Ask("a", "train", Priority.TRAINING), Ask("b", "rollout", Priority.GENERATION, 4))
        [order] = await pool.orders("b")
        with full_disk(tmp_path):
            assert "cannot be written" in (await pool.reply(Ask("b", "train", Priority.TRAINING))).unwritten
            for _ in range(500):  # The leases and the order's bound pass, if this time counts.
                now.passed_s += 1.0
                await pool.send(Alive("a"), Alive("b"))
            assert (await pool.reply(Outcome("b", order.number, order.shards, {}))).unwritten
            assert any("cannot be written" in line for line in status_lines(await pool.call(PoolActor.status)))
            driver.kill()
            driver.wait()
            await asyncio.sleep(0.2)
            assert pool.actor._looking is not None and not pool.actor._looking.done()
            assert list(pool.actor._pool.grants) == ["a/train"], "what cannot be written has not changed"
        await pool.send(Outcome("b", order.number, order.shards, {}), Ask("b", "train", Priority.TRAINING))
        assert not suspects(pool)
        assert await pool.call(PoolActor.wait_for_grant, "b", "train", BOUND_S)
        assert not (await pool.call(PoolActor.status)).troubles
        assert replay(tmp_path / "pool.journal") == pool.actor._pool, "what follows the failed records counts"
        pool.end()

    with sleeper() as (driver, start):
        run(lambda: main(driver, start))


def test_a_pool_starts_while_its_disk_is_full(tmp_path: Path) -> None:
    async def main() -> None:
        pool = Caller(tmp_path)
        for name in "abcdefgh":
            await pool.send(register(name), StepFinished(name))
        pool.end()
        with (tmp_path / "pool.journal").open("ab") as journal:
            journal.write(b"half a record")
        (tmp_path / "pool.json").write_text("")  # A killed process can leave this.
        with file_size_limit(100):
            pool = Caller(tmp_path)
            assert sorted(pool.actor._pool.tenants) == list("abcdefgh")
            assert (await pool.reply(StepFinished("a"))).unwritten
        await pool.send(Ask("a", "train", Priority.TRAINING))
        assert replay(tmp_path / "pool.journal") == pool.actor._pool
        pool.end()

    run(main)


def test_an_error_of_a_look_is_told_and_does_not_end_the_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_actor, "TICK_S", 0.01)
    broken: list[bool] = [True]

    def gone(processes: Processes) -> bool:
        if broken:
            raise KeyError("actors")
        return False

    monkeypatch.setattr(pool_actor, "driver_is_gone", gone)

    async def until(holds: Callable[[list[str]], bool]) -> None:
        while not holds([*(await pool.call(PoolActor.status)).troubles]):
            await asyncio.sleep(0.01)

    async def main() -> None:
        await pool.send(register("a", Processes("host", 1, 2, str(tmp_path))))
        await until(lambda troubles: troubles == ["the look after tenants failed: KeyError: 'actors'"])
        broken.clear()
        await until(lambda troubles: not troubles)
        assert pool.actor._looking is not None
        pool.actor._looking.cancel()
        await until(lambda troubles: any("begun again" in trouble for trouble in troubles))
        assert not pool.actor._looking.done()
        pool.end()

    pool = Caller(tmp_path)
    run(main)


@pytest.mark.processes
def test_gpus_of_a_dead_driver_are_free_only_by_a_list_that_shows_it(tmp_path: Path) -> None:
    with sleeper() as (driver, start), sleeper() as (engine, _):
        own = Processes("host", driver.pid, start, str(tmp_path), "r")
        driver.kill()
        driver.wait()
        assert "is not a list of its processes" in end_processes(own)
        for torn in (
            "",
            "[]",
            '{"run_id": "r"}',
            '{"run_id": "r", "actors": [{"pid": 1}]}',
            '{"run_id": 1, "actors": 2}',
        ):
            (tmp_path / "actors.json").write_text(torn)
            assert "is not a list of its processes" in end_processes(own), torn
        (tmp_path / "actors.json").unlink()
        write_actors(tmp_path, "r", [("engine 0", engine.pid, "host", pid_space())])
        write_actors(tmp_path, "later", [])  # The run's folder is used again, and its engine lives.
        assert end_processes(own) == "" and engine.wait(10) < 0
        write_actors(tmp_path, "r", [("engine 0", 1, "host", "another host", 7)])
        assert "it has processes on host, which no node" in end_processes(own)


@pytest.mark.processes
def test_a_name_of_a_host_makes_no_process_the_run_s(tmp_path: Path) -> None:
    with sleeper() as (stranger, start):
        name = os.uname().nodename
        assert not ActorLine("rollout 0", stranger.pid, name, "another host", start).here
        write_actors(tmp_path, "r", [("rollout 0", stranger.pid, name, "another host", start)])
        assert "no node" in end_processes(Processes(name, stranger.pid, start, str(tmp_path), "r", "another host"))
        assert stranger.poll() is None


@pytest.mark.processes
def test_only_the_process_that_serves_a_pool_is_signalled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sleeper() as (stranger, start):
        write_pool(tmp_path, ServedPool("pool", "address", "token", stranger.pid, 2, pid_space(), start - 1))
        assert cli(["pool", "stop", "--force", "--dir", str(tmp_path)]) == 2
        assert "was killed" in capsys.readouterr().err
        write_pool(tmp_path, ServedPool("pool", "address", "token", stranger.pid, 2, "another host", start))
        assert cli(["pool", "stop", "--force", "--dir", str(tmp_path)]) == 2
        assert "on another host" in capsys.readouterr().err
        (tmp_path / "server.json").write_text(json.dumps({"pid": stranger.pid}))
        with pytest.raises(UserError, match="no running pool of this version"):
            find_pool(tmp_path)
        assert stranger.poll() is None
        write_pool(tmp_path, ServedPool("pool", "address", "token", stranger.pid, 2, pid_space(), start))
        assert cli(["pool", "stop", "--force", "--dir", str(tmp_path)]) == 0
        assert stranger.wait(10) < 0
