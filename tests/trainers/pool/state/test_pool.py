"""Tests the pool's state machine: random tenants, outcomes, delays and deaths never put two holders on one GPU."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.codecs import messages
from headrace.tests.trainers.pool.state.pool_states import tenant_map
from headrace.trainers.errors import UserError
from headrace.trainers.grpo.pool_demand import Demand
from headrace.trainers.pool.server.folder import PoolJournal, replay
from headrace.trainers.pool.state.commands import (
    Alive,
    Ask,
    Command,
    Order,
    Outcome,
    Register,
    Release,
    Report,
    Resume,
    ShrinkToZero,
    StepFinished,
    Tick,
    Unregister,
)
from headrace.trainers.pool.state.plan import Priority, TenantMap
from headrace.trainers.pool.state.pool import Pool, PoolBounds


def with_tenants(num_gpus: int, *names: str) -> Pool:
    """Return a pool whose tenants may all generate on every GPU and train on the first half, all of them admitted."""
    pool = Pool(num_gpus)
    for name in names:
        pool.apply(0.0, Register(tenant_map(name, range(num_gpus), 1, num_gpus // 2)))
        pool.apply(0.0, StepFinished(name))
    return pool


def obey(pool: Pool, now_s: float = 0.0, **failing: str) -> list[Order]:
    """Carry out all orders, and those that follow from them; shards of tenants in `failing` fail with that reason."""
    done = []
    while pool.orders:
        order = min(pool.orders.values(), key=lambda one: one.number)
        done.append(order)
        if order.tenant in failing:
            failed = dict.fromkeys(order.shards, failing[order.tenant])
            pool.apply(now_s, Outcome(order.tenant, order.number, (), failed))
        else:
            pool.apply(now_s, Outcome(order.tenant, order.number, order.shards, {}))
    return done


def test_a_tenant_alone_trains_and_generates_in_turn() -> None:
    pool = with_tenants(4, "a")
    pool.apply(0.0, Ask("a", "rollout", Priority.GENERATION, 32))
    assert [(order.kind, order.shards) for order in obey(pool)] == [("expand", (0, 1, 2, 3))]
    assert pool.has("a", "rollout")
    pool.apply(1.0, Report("a", Demand(32, 16)))
    pool.apply(1.0, Ask("a", "train", Priority.TRAINING))
    assert not pool.has("a", "train")  # its shards are not asleep yet
    assert [(order.kind, order.shards) for order in obey(pool)] == [("shrink", (0, 1))]
    assert pool.has("a", "train")
    pool.apply(2.0, Release("a", "train"))
    assert [(order.kind, order.shards) for order in obey(pool)] == [("expand", (0, 1))]


def test_a_shard_is_left_out_after_failures_but_not_for_want_of_weights() -> None:
    pool = with_tenants(2, "a")
    pool.apply(0.0, Ask("a", "rollout", Priority.GENERATION, 32))
    for number in range(10):
        [order] = pool.orders.values()
        assert (order.kind, order.shards) == ("expand", (0, 1)), number
        reasons = {0: "no version is kept", 1: "no version is kept"}
        pool.apply(float(number), Outcome("a", order.number, (), reasons, unready=(0, 1)))
    assert len(obey(pool, 20.0, a="broken")) == 3 and not pool.orders, "three failures of each, then none is woken"


def test_a_grant_waits_for_every_shrink_of_its_plan() -> None:
    pool = with_tenants(4, "a", "b")
    for name in "ab":
        pool.apply(0.0, Ask(name, "rollout", Priority.GENERATION, 32))
        obey(pool)
    pool.apply(1.0, Ask("a", "train", Priority.TRAINING))
    shrinks = list(pool.orders.values())
    assert {order.kind for order in shrinks} == {"shrink"}
    for order in shrinks:
        assert not pool.has("a", "train")
        pool.apply(1.0, Outcome(order.tenant, order.number, order.shards, {}))
    assert pool.has("a", "train")


def test_outcomes_are_ignored_when_repeated_and_refused_for_other_shards() -> None:
    pool = with_tenants(2, "a", "b")
    pool.apply(0.0, Ask("a", "rollout", Priority.GENERATION, 32))
    [order] = pool.orders.values()
    with pytest.raises(UserError, match=r"shards \[0\] of order 1, which is for \[0, 1\]"):
        pool.apply(0.0, Outcome("a", 1, (0,), {}))
    pool.apply(0.0, Outcome("b", 1, order.shards, {}))  # not its order
    assert pool.orders == {1: order}
    obey(pool)
    before = messages.encode(pool)
    pool.apply(0.0, Outcome("a", 1, (), {0: "late", 1: "late"}))
    assert messages.encode(pool) == before


def test_a_shard_that_cannot_be_woken_is_left_out_and_its_gpu_goes_to_another() -> None:
    pool = with_tenants(2, "a", "b")
    pool.apply(0.0, Ask("a", "rollout", Priority.GENERATION, 32))
    assert len(obey(pool, a="no memory")) == 3
    assert pool.tenants["a"].left_out == {0, 1}
    pool.apply(0.0, Ask("b", "rollout", Priority.GENERATION, 8))
    obey(pool)
    assert pool.tenants["b"].awake == {0, 1}


def test_a_tenant_that_does_not_answer_is_suspect_and_blocks_only_its_own_gpus() -> None:
    pool = with_tenants(4, "a", "b")
    pool.apply(0.0, Ask("a", "rollout", Priority.GENERATION, 32))
    obey(pool)
    pool.apply(0.0, Report("a", Demand(10, 10)))
    pool.apply(0.0, Ask("b", "rollout", Priority.GENERATION, 32))
    shrunk = {shard for order in pool.orders.values() for shard in order.shards}
    assert shrunk
    late = PoolBounds().order_timeout_s + 1
    for second in range(0, int(late) + 1, 10):
        pool.apply(float(second), Alive("a"))
        pool.apply(float(second), Alive("b"))
    pool.apply(late, Tick())
    assert list(pool.suspects) == ["a"]
    assert "not answered" in pool.suspects["a"]
    assert not pool.tenants["b"].awake  # nothing is freed by time alone
    pool.apply(late, Unregister("a", dead=True))
    obey(pool, late)
    assert pool.tenants["b"].awake == {0, 1, 2, 3}


def test_a_silent_driver_is_suspect() -> None:
    pool = with_tenants(2, "a", "b")
    pool.apply(20.0, Alive("a"))
    pool.apply(31.0, Tick())
    assert pool.suspects == {"b": "no sign of life for 31 s"}


def test_a_tenant_is_not_kept_from_generating_by_another_that_trains_and_generates() -> None:
    """Tenant a trains on GPU 0 four fifths of the time and generates on GPU 1. Without turns, b would have GPU 0 for a
    moment between two trainings, and GPU 1 never."""
    pool = Pool(2)
    for name, gpus in (("a", (0,)), ("b", (1,))):
        pool.apply(0.0, Register(TenantMap(name, 1.0, gpus, ((0,), (1,)))))
        pool.apply(0.0, StepFinished(name))
        pool.apply(0.0, Ask(name, "rollout", Priority.GENERATION, 8))
        obey(pool)
        pool.apply(0.0, Report(name, Demand(8, 0)))
        obey(pool)
    had: list[float] = []
    for second in range(0, 400, 5):
        pool.apply(second + 1.0, Ask("a", "train", Priority.TRAINING))
        obey(pool, second + 1.0)
        assert pool.has("a", "train")
        for tick in range(1, 5):
            pool.apply(second + tick, Alive("b"))
            obey(pool, second + tick)
            if pool.tenants["b"].awake:
                had.append(second + tick)
            assert len(pool.tenants["a"].awake) + len(pool.tenants["b"].awake) == 1, "no tenant trains on GPU 1"
        pool.apply(second + 5.0, Release("a", "train"))
        obey(pool, second + 5.0)
    waits = [later - earlier for earlier, later in zip([0, *had], [*had, 400], strict=True)]
    assert PoolBounds().turn_s < had[0] and max(waits) < 3 * PoolBounds().turn_s


def test_an_order_that_hangs_stops_only_what_it_touches_and_no_longer_than_the_pool_allows() -> None:
    pool = Pool(4)
    pool.apply(0.0, Register(TenantMap("a", 1.0, (0,), ((0,), (1,))), order_timeout_s=86400.0))
    pool.apply(0.0, StepFinished("a"))
    for name, gpus in (("b", (2,)), ("c", (1,))):
        pool.apply(0.0, Register(TenantMap(name, 1.0, gpus, ((2,), (3,)))))
        pool.apply(0.0, StepFinished(name))
    pool.apply(1.0, Ask("a", "rollout", Priority.GENERATION, 8))
    [hanging] = pool.orders.values()
    pool.apply(2.0, Ask("b", "train", Priority.TRAINING))
    pool.apply(2.0, Ask("c", "rollout", Priority.GENERATION, 8))
    pool.apply(2.0, Ask("c", "train", Priority.TRAINING))
    assert pool.has("b", "train") and [order.shards for order in pool.orders_of("c")] == [(1,)]
    assert not pool.has("c", "train"), "a has an order for that GPU"
    assert pool.orders_of("a") == [hanging], "a tenant has one order at a time"
    [order] = pool.orders_of("c")
    pool.apply(3.0, Outcome("c", order.number, order.shards, {}))
    late = PoolBounds().max_order_timeout_s + 2
    for second in range(5, int(late) + 5, 5):
        for name in "abc":
            pool.apply(float(second), Alive(name))
    assert list(pool.suspects) == ["a"] and pool.num_rejected == 0
    pool.apply(late + 5, Unregister("a", dead=True))
    assert pool.has("c", "train")


def test_after_an_absence_of_the_pool_leases_and_orders_have_time_again() -> None:
    pool = with_tenants(2, "a", "b")
    pool.apply(0.0, Ask("a", "rollout", Priority.GENERATION, 32))
    [order] = pool.orders.values()
    pool.apply(order.due_s - 1.0, Resume())
    pool.apply(order.due_s + 1.0, Tick())
    assert not pool.suspects
    pool.apply(order.due_s + PoolBounds().lease_s, Tick())
    assert list(pool.suspects) == ["a", "b"]


def test_the_next_tenant_begins_at_the_first_step_of_the_one_before() -> None:
    pool = Pool(2)
    for name in "ab":
        pool.apply(0.0, Register(tenant_map(name, range(2), 1, 1)))
        pool.apply(0.0, Ask(name, "train", Priority.INITIALIZATION))
    assert pool.has("a", "train")
    pool.apply(1.0, Release("a", "train"))
    assert not pool.has("b", "train")
    pool.apply(1.0, StepFinished("a"))
    assert pool.has("b", "train")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (Register(tenant_map("a", range(2), 1, 1)), "registered already"),
        (Register(tenant_map("c", range(8), 1, 1)), "names GPU 4, expected GPUs from 0 to 3"),
        (Ask("z", "train", Priority.TRAINING), "'z' is not a tenant; tenants: a, b"),
        (Ask("a", "train", Priority.GENERATION, 3), "asks for generation with its role 'train'"),
        (Ask("a", "train", Priority.CRITIC), "while it holds or waits for TRAINING"),
        (Release("b", "train"), "holds none and waits for none"),
        (Release("a", "train", Ask("a", "train", Priority.GENERATION)), "asks for generation with its role"),
        (Unregister("a"), r"unregisters while it holds GPUs \[0, 1\]"),
    ],
)
def test_what_is_refused_changes_nothing(command: Command, sentence: str) -> None:
    pool = with_tenants(4, "a", "b")
    pool.apply(0.0, Ask("a", "train", Priority.TRAINING))
    before = messages.encode(pool)
    with pytest.raises(UserError, match=sentence):
        pool.apply(9.0, command)
    assert messages.encode(pool) == before


class Tenants:
    """Behaves as random tenants of a pool: they ask, release, obey orders late, wrongly or never, end and die."""

    def __init__(self, seed: int, num_gpus: int = 8) -> None:
        self.random = random.Random(seed)
        self.num_gpus = num_gpus
        self.now_s = 0.0
        self.num_born = 0

    def next(self, pool: Pool) -> Command:
        """Return the next command. Time passes."""
        self.now_s += self.random.choice([0.0, 0.1, 1.0, 5.0])
        if pool.suspects and self.random.random() < 0.3:
            return Unregister(self.random.choice(sorted(pool.suspects)), dead=True)
        if len(pool.tenants) < 3 and self.random.random() < 0.3:
            return self._register()
        if pool.orders and self.random.random() < 0.6:
            return self._obey(self.random.choice(sorted(pool.orders.values(), key=lambda order: order.number)))
        if not pool.tenants or self.random.random() < 0.1:
            return Tick()
        return self._call(self.random.choice(sorted(pool.tenants)))

    def _register(self) -> Register:
        self.num_born += 1
        tp = self.random.choice([1, 2, 4])
        begin = self.random.choice([0, self.num_gpus // 2])
        return Register(tenant_map(f"t{self.num_born}", range(begin, self.num_gpus), tp, self.random.choice([1, 2])))

    def _obey(self, order: Order) -> Outcome:
        failed = {shard: "broken" for shard in order.shards if self.random.random() < 0.1}
        return Outcome(order.tenant, order.number, tuple(set(order.shards) - set(failed)), failed)

    def _call(self, name: str) -> Command:
        kinds = (
            Ask(name, "train", self.random.choice([Priority.TRAINING, Priority.INITIALIZATION])),
            Ask(name, "rollout", Priority.GENERATION, self.random.randrange(50)), Release(name, "train"),
            Report(name, Demand(50, self.random.randrange(60))), StepFinished(name), Alive(name), Alive(name),
            ShrinkToZero(name) if self.random.random() < 0.1 else Alive(name), Unregister(name),
        )  # fmt: skip
        return self.random.choice(kinds)


def check_gpus(pool: Pool, now_s: float) -> None:
    """Check that no GPU has two holders, that every GPU is held, blocked or idle, and that no tenant has two orders."""
    assert len({order.tenant for order in pool.orders.values()}) == len(pool.orders)
    state = pool.state(now_s)
    held = [gpu for _, gpus in state.holders() for gpu in gpus]
    assert len(held) == len(set(held)), held
    assert len(held) + len(state.idle()) == pool.num_gpus


def check_tick(pool: Pool, now_s: float) -> None:
    """Check that a passing of time says rightly whether it changes the pool: what it says is not kept otherwise."""
    after = copy.deepcopy(pool)
    assert after.apply(now_s, Tick()) == (after != pool)


def run_random(seed: int, num_steps: int, path: Path, restart_every: int) -> None:
    """Run random tenants on a journaled pool, which is closed and opened again every `restart_every` commands."""
    tenants = Tenants(seed)
    journal = PoolJournal(path, Pool(tenants.num_gpus))
    granted = 0
    for step in range(num_steps):
        command = tenants.next(journal.pool)
        check_tick(journal.pool, tenants.now_s)
        try:
            journal.apply(tenants.now_s, command)
        except UserError:
            continue
        check_gpus(journal.pool, tenants.now_s)
        assert journal.pool.num_rejected == 0, journal.pool.rejected
        granted += len(journal.pool.grants)
        if step % restart_every == 0:
            before = journal.pool
            journal.close()
            journal = PoolJournal(path, Pool(tenants.num_gpus))
            assert journal.pool == before
    journal.close()
    assert granted


@pytest.mark.parametrize("seed", range(4))
def test_random_tenants_and_restarts(seed: int, tmp_path: Path) -> None:
    run_random(seed, 500, tmp_path / "pool.journal", 50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_tenants_at_length(seed: int, tmp_path: Path) -> None:
    run_random(100 + seed, 10_000, tmp_path / "pool.journal", 500)


def test_a_journal_cut_anywhere_gives_the_state_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "pool.journal"
    tenants, journal = Tenants(9), PoolJournal(path, Pool(8))
    states = [(path.stat().st_size, copy.deepcopy(journal.pool))]
    for _ in range(60):
        command = tenants.next(journal.pool)
        try:
            journal.apply(tenants.now_s, command)
        except UserError:
            continue
        states.append((path.stat().st_size, copy.deepcopy(journal.pool)))
    journal.close()
    data = path.read_bytes()
    for end in range(states[0][0], len(data) + 1, 7):
        path.write_bytes(data[:end])
        expected = [state for size, state in states if size <= end][-1]
        assert replay(path) == expected


def test_a_pool_has_one_scheduler_and_keeps_its_size(tmp_path: Path) -> None:
    path = tmp_path / "pool.journal"
    journal = PoolJournal(path, Pool(2))
    with pytest.raises(UserError, match="open in another process"):
        PoolJournal(path, Pool(2))
    journal.close()
    with pytest.raises(UserError, match="a pool of 2 GPUs, expected 4"):
        PoolJournal(path, Pool(4))
    path.write_bytes(b"something else")
    with pytest.raises(UserError, match="is not the journal of a pool"):
        PoolJournal(path, Pool(2))


def test_bounds_are_those_of_the_start(tmp_path: Path) -> None:
    path = tmp_path / "pool.journal"
    PoolJournal(path, Pool(2)).close()
    bounds = replace(PoolBounds(), starve_s=1.0)
    journal = PoolJournal(path, Pool(2, bounds))
    assert journal.pool.bounds == bounds
    journal.close()
