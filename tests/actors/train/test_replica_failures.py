"""When a rank fails, dies, is late or holds another plan: named errors on every rank, within the bound."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from headrace.actors.train.links import GRACE_S
from headrace.actors.train.reader import Prefetch, ReplicaReader
from headrace.actors.train.step_rows import StepRows, load_of
from headrace.actors.train.topology import Topology
from headrace.actors.train.wire import PrefetchStopped
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.tests.actors.train.replica_ranks import (
    PARTITION,
    Ranks,
    Step,
    put_rows,
    raised,
    reach,
    reader_of,
    run_on,
    ship,
)
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes

FIRST = ("input_ids", "response_mask")
LENGTHS = [20] * 16
TP2 = Topology(1, tp=2)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rows of rank")]


def wait_for_no_threads(bound_s: float) -> float:
    """Seconds until the prefetch thread has ended."""
    start = time.monotonic()
    while prefetch_threads():
        assert time.monotonic() - start < bound_s, prefetch_threads()
        time.sleep(0.01)
    return time.monotonic() - start


def drain(reader: ReplicaReader) -> None:
    for _ in reader.stream(FIRST):
        pass


def failures(rank: int, folder: Path, steps: dict[str, Step]) -> dict[str, Any]:
    """Several mishaps one after another, each with readers of its own."""
    found: dict[str, Any] = {}

    with reader_of(rank, steps["cleared"]) as (reader, _):
        found["cleared"] = raised(lambda: drain(reader))
        found["cleared, again"] = raised(lambda: drain(reader))
        found["cleared, begin"] = raised(lambda: reader.begin(steps["cleared"].shards[rank]))
        found["cleared, threads"] = prefetch_threads()
        dist.barrier()

    other = steps["mismatch"]
    if rank == 1:
        own = replace(other.shards[1], digest="another")
        other = replace(other, shards=(other.shards[0], own))
    with reader_of(rank, other) as (reader, _):
        found["mismatch"] = raised(lambda: drain(reader))
        dist.barrier()

    with reader_of(rank, steps["abort"]) as (reader, _):
        stream = reader.stream(FIRST)
        next(stream)
        if rank == 0:
            stream.close()  # as `closing` does when the backend raises
            found["abort"] = raised(lambda: drain(reader))
        else:
            found["abort"] = raised(lambda: [*stream])
        found["abort, thread"] = wait_for_no_threads(3.0)
        dist.barrier()

    with reader_of(rank, steps["sibling aborts"]) as (reader, _):
        stream = reader.stream(FIRST)
        next(stream)
        if rank == 1:
            for _ in range(4):
                next(stream)
            time.sleep(0.3)  # its thread waits for the next load by now
            stream.close()
            found["sibling aborts"] = wait_for_no_threads(3.0)
            dist.barrier()
        else:
            dist.barrier()
            found["sibling aborts"] = raised(lambda: [*stream])
        dist.barrier()

    with reader_of(rank, steps["late"]) as (reader, _):
        if rank == 1:
            dist.barrier()
        found["late"] = raised(lambda: drain(reader)) if rank == 0 else None
        if rank == 0:
            dist.barrier()

    with reader_of(rank, steps["unreadable"]) as (reader, _):
        if rank == 0:
            StepRows.columns = _breaks  # type: ignore[method-assign]
        found["unreadable"] = raised(lambda: drain(reader))
        dist.barrier()
    return found


def _breaks(self: StepRows, index: int, fields: Any) -> Any:
    raise ZeroDivisionError("by chance")


def test_mishaps_are_named_on_every_rank_within_the_bound(handle: DataPlaneHandle, tmp_path: Path) -> None:
    client = connect(handle, name="driver")
    names = ("cleared", "mismatch", "abort", "sibling aborts", "late", "unreadable")
    steps = {}
    for name in names:
        meta = put_rows(client, LENGTHS, f"{name.replace(' ', '-')}-r")
        steps[name] = ship(handle, meta, TP2, budget=40, timeout_s=2.0)
        assert [len(load_of(index, len(steps[name].shards[0].sizes))) for index in (0, 1, 5)] == [1, 4, 3]
    client.clear(PARTITION, list(steps["cleared"].receipt(0).keys))
    leader, sibling = run_on(failures, 2, tmp_path / "ranks", tmp_path, steps)
    client.clear(PARTITION)
    client.close()

    for found in (leader, sibling):
        kind, text, seconds = found["cleared"]
        assert kind == "RowsCleared" and "cleared" in text and seconds < 2
        assert found["cleared, threads"] == []
        for call in ("stream", "begin"):
            kind, text, seconds = found["cleared, again" if call == "stream" else "cleared, begin"]
            assert kind == "ReplicaError" and seconds < 0.1
            assert re.fullmatch(rf"{call}: the reader of rank \d is broken: RowsCleared: .*", text, re.S)
    assert leader["cleared"][1] == sibling["cleared"][1]

    kind, text, seconds = sibling["mismatch"]
    digest = steps["mismatch"].shards[0].digest
    assert kind == "PlanMismatch" and seconds < 2
    assert "rank 1: worker 1" in text and "this rank has plan another, but rank 0: worker 0 (pid " in text
    assert f"sent plan {digest}" in text

    assert leader["abort"][:2] == (
        "ReplicaError",
        "stream: the reader of rank 0 is broken: rank 0 ended a pass after 1 of 8 microbatches",
    )
    kind, text, seconds = sibling["abort"]
    assert kind == "ReplicaError" and seconds < 2
    assert "rank 0: worker 0" in text and "ended a pass after 1 of 8 microbatches" in text
    assert leader["abort, thread"] < 1 and sibling["abort, thread"] < 1

    assert sibling["sibling aborts"] < 1
    for found in (leader["sibling aborts"], leader["late"], leader["mismatch"]):
        kind, text, seconds = found
        assert kind == "ReplicaLost" and 1.5 < seconds < 2 + GRACE_S
        assert re.search(
            r"rank 0: worker 0 \(pid \d+ on here\): broadcast of microbatch [\d to]+: not received by rank 1", text
        )
        assert re.search(r"worker 1 \(pid \d+ on here\) after 2\.\d s", text)

    assert leader["unreadable"][:2] == ("ZeroDivisionError", "by chance")
    kind, text, seconds = sibling["unreadable"]
    assert kind == "ReplicaError" and text.endswith("failed: ZeroDivisionError: by chance") and seconds < 2


def leader_goes(rank: int, folder: Path, step: Step) -> Any:
    with reader_of(rank, step) as (reader, _):
        stream = reader.stream(FIRST)
        next(stream)
        next(stream)
        reach(folder, f"two taken by {rank}")
        if rank == 0:
            time.sleep(60)
        error = raised(lambda: [*stream])
        return (*error, time.time(), wait_for_no_threads(3.0))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_siblings_name_a_leader_that_died_or_hangs(handle: DataPlaneHandle, how: int, tmp_path: Path) -> None:
    client = connect(handle, name="driver")
    step = ship(handle, put_rows(client, LENGTHS, f"dies{how}-r"), TP2, budget=40, timeout_s=2.0)
    assert len(step.shards[0].sizes) == 8
    with Ranks(leader_goes, 2, tmp_path / "ranks", tmp_path, step) as ranks:
        for rank in range(2):
            wait_until((tmp_path / f"two taken by {rank}").exists)
        leader = ranks.pid(0)
        killed = time.time()
        os.kill(leader, how)
        [(kind, text, _, when, _)] = ranks.results(ranks=[1])
    client.clear(PARTITION)
    client.close()
    assert kind == "ReplicaLost"
    assert f"nothing received from the leader, rank 0: worker 0 (pid {leader} on here)" in text
    assert re.search(r"broadcast of microbatch 5 to 7: .* after \d+\.\d s", text)
    # A connection that broke is seen at once, a silent one when the bound is over.
    assert when - killed < (1.5 if how == signal.SIGKILL else 2.0 + GRACE_S + 1.5)


# ---------------------------------------------------------------- the thread alone


def test_prefetch_makes_one_item_ahead() -> None:
    made: list[int] = []

    def make(number: int, _: threading.Event) -> int:
        made.append(number)
        return number

    ahead = Prefetch(make, 4, depth=1, name="test")
    wait_until(lambda: made == [0])
    time.sleep(0.05)
    assert made == [0]
    assert ahead.take() == 0
    wait_until(lambda: made == [0, 1])
    assert [ahead.take() for _ in range(3)] == [1, 2, 3] and ahead.close(1.0)


def test_prefetch_ends_when_given_up() -> None:
    def make(number: int, stop: threading.Event) -> int:
        if number and stop.wait(10):
            raise PrefetchStopped
        return number

    for taken in (0, 1):
        ahead = Prefetch(make, 4, depth=1, name="test")
        assert [ahead.take() for _ in range(taken)] == list(range(taken))
        start = time.monotonic()
        assert ahead.close(2.0) and time.monotonic() - start < 1.0


def test_prefetch_hands_on_what_was_raised() -> None:
    def make(number: int, _: threading.Event) -> int:
        if number == 1:
            raise KeyError("second")
        return number

    ahead = Prefetch(make, 3, depth=2, name="test")
    assert ahead.take() == 0
    for _ in range(2):
        with pytest.raises(KeyError, match="second"):
            ahead.take()
    assert ahead.close(1.0)
