"""Orders for another number of engines: what a run answers, and what ends the wait for its answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataplane.owned_folder import try_lock
from headrace.tests.waiting import in_thread, wait_until
from headrace.trainers.config.load import build_config
from headrace.trainers.elastic import scale_order
from headrace.trainers.elastic.scale_order import ORDER, ScaleAnswer, ScaleOrders, order_engines
from headrace.trainers.errors import ConfigError, UserError


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run under way."""
    (tmp_path / "run.lock").touch()
    descriptor = try_lock(tmp_path / "run.lock")
    assert descriptor is not None
    yield tmp_path
    os.close(descriptor)


def taken(orders: ScaleOrders) -> int:
    """The number of engines of the next order."""
    found: list[int | None] = []
    wait_until(lambda: found.append(orders.read(2)) or found[-1] is not None, "an order")
    assert found[-1] is not None
    return found[-1]


def test_the_command_gets_each_answer_of_the_run(run_dir: Path) -> None:
    orders, heard = ScaleOrders(run_dir), list[str]()
    thread, result = in_thread(lambda: order_engines(run_dir, 3, 30, heard.append))
    assert taken(orders) == 3 and orders.read(2) is None and orders.is_open
    orders.answer("under way", ("engine 0",), "engine 2 starts on far")
    wait_until(lambda: heard == ["engine 2 starts on far"])
    orders.answer("done", ("engine 0", "engine 1", "engine 2"))
    thread.join(30)
    answer = result[0]
    assert (answer.state, answer.before, answer.engines) == ("done", 2, ("engine 0", "engine 1", "engine 2"))
    assert not orders.is_open
    orders.answer("refused", (), "a later word")
    assert ScaleOrders(run_dir).read(2) is None, "a run that begins forgets the orders to the one before"


def test_a_later_order_ends_the_wait_of_an_earlier_one(run_dir: Path) -> None:
    orders = ScaleOrders(run_dir)
    first, told = in_thread(lambda: order_engines(run_dir, 3, 30))
    assert taken(orders) == 3
    second, result = in_thread(lambda: order_engines(run_dir, 1, 30))
    assert taken(orders) == 1
    orders.answer("refused", ("engine 0",), "--engines: got 1, but the pool decides")
    for thread in (first, second):
        thread.join(30)
    assert isinstance(told[0], UserError) and "got 3, but a later order" in str(told[0])
    assert result[0].why == "--engines: got 1, but the pool decides"


def test_the_wait_is_bounded_and_needs_a_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = order_engines(run_dir, 3, 0.0)
    assert answer == ScaleAnswer(answer.id, "under way", 0, (), "the run has not seen the order yet")
    orders = ScaleOrders(run_dir)
    for text in ('{"engines": "many"}', '{"id": "a", "engines": 0}'):
        (run_dir / ORDER).write_text(text)
        assert orders.read(2) is None, "a stranger's file"
    for number in (0, -1):
        with pytest.raises(UserError, match=f"--engines: got {number}, expected a number from 1"):
            order_engines(run_dir, number, 1.0)
    with pytest.raises(UserError, match="no run.lock"):
        order_engines(run_dir / "none", 1, 1.0)
    monkeypatch.setattr(scale_order, "try_lock", lambda path: os.open(path, os.O_RDONLY))
    with pytest.raises(UserError, match="no run is under way"):
        order_engines(run_dir, 1, 1.0)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({}, "resources.ray_address: not set with resources.elastic=true"),
        ({"dataplane": {"store": {"kind": "shm"}}}, "dataplane.store.kind: got 'shm' with resources.elastic=true"),
        ({"sync": {"transport": "ipc"}}, "sync.transport: got 'ipc' with resources.elastic=true"),
    ],
)
def test_what_hosts_that_join_cannot_share_is_refused(sections: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_config({**sections, "resources": {"elastic": True}})
    assert sentence in str(refusal.value)
