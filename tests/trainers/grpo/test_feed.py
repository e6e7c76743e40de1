"""The feed: staleness stays within its bound and every prompt is trained on once, whatever dies, is late or resumed."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.actors.engines.config import RouterReplayConfig
from headrace.actors.rollout.prompts import base36, row_key
from headrace.actors.rollout.rows import RouteCounts
from headrace.dataplane.client.lease_renewal import LeaseRenewal
from headrace.dataplane.errors import LeaseLost, StoreLost
from headrace.dataplane.factory import DataPlane
from headrace.dataplane.meta import KVBatchMeta
from headrace.testing.data_plane import open_plane
from headrace.tests.trainers.grpo.feed_world import World, positions_of, saved
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.feed import TooManyFailedRows, TooManyMissingRoutes

PROMPTS = 3
FOR_EVER = 1 << 30


@pytest.fixture(scope="module")
def plane() -> Iterator[DataPlane]:
    with open_plane() as plane:
        yield plane


def settings(mode: str, **algorithm: object) -> Config:
    sizes = {"prompts_per_step": PROMPTS, "group_size": 2, "steps": FOR_EVER, "mode": mode}
    return build_config({"algorithm": {**sizes, **algorithm}, "validation": {"every": 0}})


def train(world: World, steps: int, kills: float = 0.0) -> dict[int, list[int]]:
    """Positions that each step was trained on, after `steps` steps. With chance `kills` each, everything is killed
    after one and resumed from the last checkpoint, of every third step; or only the train workers die, before its
    end."""
    algorithm = world.config.algorithm
    state = State()
    checkpoint = saved(state)
    feed = world.begin(state)
    trained: dict[int, list[int]] = {}
    overlap = world.config.overlap
    while state.step < steps:
        feed.top_up()
        claimed = []
        while (left := PROMPTS - sum(len(part) for part in claimed) // algorithm.group_size) > 0:
            claimed.append(feed.claim(left, min(left, overlap.chunk)))
        if not overlap.window:
            feed.give_up_surplus()
        meta = claimed[0].concat(*claimed[1:])
        assert len(meta) == PROMPTS * algorithm.group_size
        assert (state.version - meta.versions <= overlap.window).all(), "staleness"
        if world.dice.random() < kills:
            world.num_lost += 1
            state.go_back(State(**json.loads(checkpoint)))
            trained = {step: positions for step, positions in trained.items() if step <= state.step}
            before, feed = world.partition, world.begin_again(feed, state)
            assert world.inner.status(before).rows == 0
            continue
        for part in claimed:
            world.inner.clear(part.partition, part.keys)
        state.step, state.version = state.step + 1, state.version + 1
        world.version = max(world.version, state.version)
        trained[state.step] = positions_of(meta)
        feed.settle()
        if state.step % 3 == 0:
            checkpoint = saved(state)
        if world.dice.random() < kills:
            world.inner.clear(world.partition)
            state = State(**json.loads(checkpoint))
            trained = {step: positions for step, positions in trained.items() if step <= state.step}
            feed = world.begin(state)
    outstanding = set(state.outstanding)
    seen = [position for positions in trained.values() for position in positions]
    assert len(seen) == len(set(seen)), "a prompt was trained on twice"
    assert not outstanding & set(seen) and max(seen) < state.position
    return trained


def nothing_is_left(world: World) -> None:
    status = world.inner.status(world.partition)
    assert status.leased_rows == 0
    world.inner.clear(world.partition)
    assert world.inner.status(world.partition).rows == 0


CASES = {
    "sync": {"mode": "sync"},
    "streaming": {"mode": "streaming"},
    "streaming, oversampled": {"mode": "streaming", "dynamic_sampling": {"enabled": True, "oversample": 2.0}},
    "async in order": {"mode": "async", "max_staleness": 2},
    "async ready first": {"mode": "async", "max_staleness": 1, "sampler": "ready_first"},
    "async oldest first, dropping": {
        "mode": "async", "max_staleness": 2, "sampler": "oldest_version_first", "stale_groups": "drop",
    },
    "async windowed": {"mode": "async", "max_staleness": 2, "sampler": "windowed", "sampler_options": {"window": 4}},
    "async ready first, dynamic": {
        "mode": "async", "max_staleness": 3, "sampler": "ready_first", "dynamic_sampling": {"enabled": True},
    },
    "async streaming in order": {"mode": "async_streaming", "max_staleness": 1, "chunk_groups": 1},
    "async streaming ready first": {
        "mode": "async_streaming", "max_staleness": 2, "chunk_groups": 2, "sampler": "ready_first",
    },
    "async in order, dynamic": {"mode": "async", "max_staleness": 1, "dynamic_sampling": {"enabled": True}},
}  # fmt: skip


def drill(plane: DataPlane, name: str, steps: int) -> None:
    case = CASES[name]
    flat = 0.3 if "dynamic_sampling" in case else 0.0
    world = World(plane, settings(**case), random.Random(name), deaths=0.02, flat=flat)  # pyright: ignore[reportArgumentType]
    trained = train(world, steps, kills=0.05)
    assert len(trained) == steps and world.num_dead and world.num_lost
    if "order" in name or name in ("sync", "streaming"):
        # With a journal nothing that was finished is generated again, unless it grew too old.
        assert len(world.generated) == len(set(world.generated))
    nothing_is_left(world)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_bounds_hold_while_actors_die_and_runs_are_resumed(plane: DataPlane, name: str) -> None:
    drill(plane, name, 100)


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["async in order", "async ready first", "async ready first, dynamic"])
def test_bounds_hold_for_ten_thousand_steps(plane: DataPlane, name: str) -> None:
    drill(plane, name, 10_000)


@pytest.mark.long
def test_in_order_repeats_whatever_the_timing(plane: DataPlane) -> None:
    config = settings("async", max_staleness=2, dynamic_sampling={"enabled": True})
    found = [train(World(plane, config, random.Random(seed), flat=0.4), 40) for seed in (1, 2)]
    assert found[0] == found[1]


# ---------------------------------------------------------------- leases


LEASE_S = 1.0


@pytest.fixture
def short_leases() -> Iterator[DataPlane]:
    """A data plane whose leases are shorter than a step."""
    with open_plane(lease_s=LEASE_S) as plane:
        yield plane


def outlast_lease(world: World) -> None:
    """Return when the leases of rows that are held now would have run out."""
    until = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < until and world.inner.status().leases:
        time.sleep(0.02)


@pytest.mark.long
def test_a_step_longer_than_the_lease_trains_each_row_once(short_leases: DataPlane) -> None:
    world, state = World(short_leases, settings("streaming"), random.Random(1)), State()
    feed = world.begin(state)
    feed.top_up()
    claimed = [feed.claim(1)]
    outlast_lease(world)  # training of a chunk, or the wait for a long answer
    claimed += [feed.claim(1) for _ in range(PROMPTS - 1)]
    positions = [position for meta in claimed for position in positions_of(meta)]
    assert sorted(positions) == list(range(PROMPTS))


def lose(world: World, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the group at a position as with a storage unit: the directory counts its rows until they are forgotten."""
    keys = (row_key(base36(position), 0), row_key(base36(position), 1))
    world.inner.clear(world.partition, keys)
    lost = {world.partition: keys}
    real = world.inner.status
    monkeypatch.setattr(world, "status", lambda *_: replace(real(), lost_rows=2 * len(lost)), raising=False)
    monkeypatch.setattr(world, "forget_unit", lambda *_: dict(lost.popitem() for _ in [*lost]), raising=False)


def test_a_group_that_is_lost_with_a_storage_unit_is_made_again(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(plane, settings("sync"), random.Random(1))
    feed = world.begin(State())
    feed.top_up()
    while world.put_one():
        pass
    lose(world, 1, monkeypatch)
    assert positions_of(feed.claim(PROMPTS)) == [0, 1, 2] and len(world.generated) == PROMPTS, "the journal had it"
    assert feed.settle().reissued == 1


def test_a_lost_group_that_the_step_has_claimed_ends_the_step(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, state = World(plane, settings("sync"), random.Random(1)), State()
    feed = world.begin(state)
    feed.top_up()
    [position] = positions_of(feed.claim(1))
    lose(world, position, monkeypatch)
    monkeypatch.setattr(world, "put_one", lambda: False)
    with pytest.raises(StoreLost, match=r"the rows of 1 group\(s\) of the current step were lost"):
        feed.claim(PROMPTS - 1)
    monkeypatch.undo()
    feed = world.begin_again(feed, state)
    feed.top_up()
    assert positions_of(feed.claim(PROMPTS)) == [0, 1, 2]


@pytest.mark.long
def test_late_replacements_do_not_bring_the_same_rows_again(
    short_leases: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("sync", prompts_per_step=6, dynamic_sampling={"enabled": True})
    world, calls = World(short_leases, config, random.Random(1), flat=0.4), []
    real = world.claim

    def claim(*args: object, **options: object) -> KVBatchMeta:
        calls.append(args)
        if len(calls) == 2:
            outlast_lease(world)  # the replacements' answers take their time
        return real(*args, **options)

    monkeypatch.setattr(world, "claim", claim)
    feed = world.begin(State())
    feed.top_up()
    feed.drain()
    meta = feed.claim(6)
    assert len(calls) > 1 and len(set(meta.keys)) == len(meta) == 12


@pytest.mark.long
def test_rows_that_the_open_step_holds_are_refused(short_leases: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseRenewal, "add", lambda *_: None)  # as if this process had been stopped
    world = World(short_leases, settings("streaming"), random.Random(1))
    feed = world.begin(State())
    feed.top_up()
    first = feed.claim(1)
    outlast_lease(world)
    with pytest.raises(LeaseLost, match="lease_s") as caught:
        for _ in range(PROMPTS):
            feed.claim(1)
    assert set(caught.value.keys) == set(first.keys)


# ---------------------------------------------------------------- dynamic sampling


@pytest.mark.long
def test_groups_without_a_signal_are_replaced(plane: DataPlane) -> None:
    for mode in ("sync", "streaming", "async"):
        world = World(plane, settings(mode, dynamic_sampling={"enabled": True}), random.Random(0), flat=0.5)
        trained = [position for group in train(world, 30).values() for position in group]
        assert all(random.Random(position).random() >= 0.5 for position in trained)
        nothing_is_left(world)


def test_a_step_has_its_size_even_when_no_group_has_a_signal(plane: DataPlane) -> None:
    config = settings("sync", dynamic_sampling={"enabled": True, "max_factor": 2.0})
    world = World(plane, config, random.Random(0), flat=1.0)
    assert len(train(world, 5)) == 5
    assert len(world.generated) == 5 * 2 * PROMPTS
    nothing_is_left(world)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rollout_may_take_hours_while_it_makes_progress(plane: DataPlane, mode: str) -> None:
    world = World(plane, settings(mode), random.Random(0), slow_looks=50)
    feed = world.begin(State())
    feed.top_up()
    feed.drain()
    feed.claim(PROMPTS)
    assert world.num_dead == 0 and len(world.generated) == PROMPTS * (1 if mode == "sync" else 2)
    world.inner.clear(world.partition)


@pytest.mark.parametrize("mode", ["sync", "async", "streaming"])
def test_an_actor_that_makes_no_progress_is_killed_and_its_prompts_are_issued_again(
    plane: DataPlane, mode: str
) -> None:
    """A hung call is found in a drain as well as in a claim, however many others answer meanwhile."""
    world = World(plane, settings(mode), random.Random(0))
    feed = world.begin(State())
    feed.top_up()
    world.hung.append(world.active[1])
    if mode == "sync":
        feed.drain()
        assert world.killed_at == 1, "an hour is longer than resources.stage_timeout_s"
    meta = feed.claim(PROMPTS)
    assert sorted(positions_of(meta)) == list(range(PROMPTS)) and world.num_dead == 1
    assert feed.settle().reissued >= 1
    world.inner.clear(world.partition)


def test_prompts_of_an_actor_that_leaves_are_rolled_out_by_others(plane: DataPlane) -> None:
    """It leaves between the update of a step and its weight sync, so others get the prompts at the next step."""
    world = World(plane, settings("async"), random.Random(1))
    state = State()
    feed = world.begin(state)
    leaving, unfinished = world.active[0], set[int]()
    trained: list[int] = []
    for step in range(1, 9):
        feed.top_up()
        meta = feed.claim(world.config.algorithm.prompts_per_step)
        trained += positions_of(meta)
        state.step, state.version = step, step
        feed.commit()
        if step == 4:
            unfinished = {position for work in world.works if work.actor is leaving for position in work.left}
            world.active.remove(leaving)
            feed.withdraw(leaving)
            assert not any(work.actor is leaving for work in world.works)
        world.version = step
        feed.clear(meta)
        assert feed.settle().reissued == (len(unfinished) if step == 4 else 0)
        assert step != 4 or unfinished <= set(state.outstanding)
    assert unfinished and sorted(trained) == list(range(len(trained))), "each prompt once"
    assert not [position for position in unfinished if world.generated.count(position) > 1]


def test_a_wait_for_rollouts_tells_the_watchdog_that_it_gets_on(plane: DataPlane) -> None:
    world = World(plane, settings("sync"), random.Random(0), slow_looks=20)
    feed = world.begin(State())
    feed.top_up()
    beats: list[str] = []
    heartbeat = feed._stages.heartbeat
    enter = heartbeat.enter
    heartbeat.enter = lambda stage, bound_s=None: (beats.append(stage), enter(stage, bound_s))[1]  # pyright: ignore
    feed.drain()
    assert beats.count("rollout") >= 20
    world.inner.clear(world.partition)


def test_failed_rows_are_counted_over_the_step(plane: DataPlane) -> None:
    """One call of three may fail as a whole, because it has a third of the step's rows."""
    config = build_config(
        {"algorithm": {"prompts_per_step": 3, "group_size": 8, "steps": 10}, "validation": {"every": 0}}
    )
    for failing_calls in (1, 2):
        world = World(plane, config, random.Random(1), reported_rows=8)
        feed = world.begin(State())
        feed.top_up()
        ended, seen = world.ended, []

        def end(calls, timeout_s, ended=ended, seen=seen, world=world, failing=failing_calls):  # type: ignore[no-untyped-def]
            world.reported_failed = 8 if len(seen) < failing else 0
            found = ended(calls, timeout_s)
            seen += found
            return found

        world.ended = end  # pyright: ignore[reportAttributeAccessIssue]
        if failing_calls == 1:
            feed.drain()
        else:
            with pytest.raises(TooManyFailedRows, match="failed for 16 of 24 rows of a step.*: no answer"):
                feed.drain()
        world.inner.clear(world.partition)


@pytest.mark.parametrize(
    ("missing", "tokens", "text"),
    [
        ("native", 24, None),
        ("native", 25, r"no experts for 25 of 800 tokens of a step, more than router_replay.max_missing_share=0.01"),
        ("error", 0, None),
        ("error", 1, r"no experts for 1 of 800 tokens of a step, more than router_replay.missing='error' allows"),
    ],
)
def test_missing_routes_are_counted_over_the_step(
    plane: DataPlane, missing: str, tokens: int, text: str | None
) -> None:
    """One call of three has a third of the step's tokens."""
    config = build_config(
        {"algorithm": {"prompts_per_step": 3, "group_size": 8, "steps": 10}, "validation": {"every": 0}}
    )
    replay = RouterReplayConfig(missing=missing)  # pyright: ignore[reportArgumentType]
    world = World(plane, config.model_copy(update={"router_replay": replay}), random.Random(1), reported_rows=8)
    world.routes = RouteCounts(possible=800, missing=tokens)
    feed = world.begin(State())
    feed.top_up()
    with contextlib.nullcontext() if text is None else pytest.raises(TooManyMissingRoutes, match=text):
        feed._look_after(1.0)
    world.inner.clear(world.partition)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"mode": "async", "dynamic_sampling": {"oversample": 1.5}},
         "algorithm.dynamic_sampling.oversample: got 1.5 with"),
        ({"mode": "sync", "sampler": "in_order", "dynamic_sampling": {"oversample": 2}},
         "takes the groups that are ready"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_named(algorithm: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_config({"algorithm": algorithm})
