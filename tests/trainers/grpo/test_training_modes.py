"""The loop of all modes: equal updates for equal rows, each row once an epoch, capacity that comes back by chunk."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.train.microbatch_plan import Budget
from headrace.dataplane.factory import DataPlane
from headrace.testing.data_plane import open_plane
from headrace.tests.trainers.backends.backend_ranks import save_tiny_model
from headrace.tests.trainers.grpo.controller_world import (
    CountingWorker,
    Handle,
    Killed,
    Loop,
    RowWorld,
    train_worker,
    trained,
)
from headrace.tests.trainers.grpo.feed_world import World, saved
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.grpo.checkpoints import State

PROMPTS, SAMPLES = 6, 4


@pytest.fixture(scope="module")
def plane() -> Iterator[DataPlane]:
    with open_plane() as plane:
        yield plane


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


def settings(mode: str, steps: int, sections: dict[str, dict[str, Any]] | None = None, **algorithm: Any) -> Config:
    sizes = {"prompts_per_step": PROMPTS, "group_size": SAMPLES, "steps": steps, "mode": mode}
    shared = {"validation": {"every": 0}, "loss": {"clip_low": 0.05, "clip_high": 0.05}, "trainer": {"lr": 2e-4}}
    return build_config({**shared, **(sections or {}), "algorithm": {**sizes, **algorithm}})


# ---------------------------------------------------------------- the same rows give the same update

MEGATRON: dict[str, dict[str, Any]] = {"trainer": {"backend": "megatron", "lr": 2e-4}}
CORRECTED: dict[str, dict[str, Any]] = {"loss": {"correction": "tis", "clip_low": 0.05, "clip_high": 0.05}}
SAME_STEP = {
    "sync": {"mode": "sync"},
    "one group at a time": {"mode": "streaming", "chunk_groups": 1},
    "chunks of four": {"mode": "streaming", "chunk_groups": 4},
    "async": {"mode": "async", "max_staleness": 0},
    "async_streaming": {"mode": "async_streaming", "max_staleness": 0, "chunk_groups": 2},
    "two versions ahead": {"mode": "async_streaming", "max_staleness": 2, "chunk_groups": 1},
}  # fmt: skip
SAME_MINIBATCHES = {
    "one group at a time": {"mode": "streaming", "chunk_groups": 1, "sampler": "in_order"},
    "chunks of three": {"mode": "streaming", "chunk_groups": 3, "sampler": "in_order"},
    "async_streaming": {"mode": "async_streaming", "max_staleness": 1, "chunk_groups": 2},
}


def equal_updates(
    plane: DataPlane,
    model: str,
    build: Callable[..., Any],
    cases: dict[str, dict[str, Any]],
    *,
    within: float,
    **algorithm: Any,
) -> None:
    """Train each case on the same rows, and expect the figures of all updates, and the weights after them, to agree.
    The rows arrive in another order and are cut into other microbatches."""
    found = {}
    for seed, (name, case) in enumerate(cases.items()):
        config = settings(**{"steps": 2, **case, **algorithm})
        found[name] = trained(plane, config, model, build, seed=seed, budget=Budget((24, 48, 100)[seed % 3]))
    (figures, weights), *others = found.values()
    for name, (other, moved) in zip(list(found)[1:], others, strict=True):
        for step, again in zip(figures, other, strict=True):
            keys = [key for key in step if key.startswith(("train/", "update_", "logprob/", "reward/"))]
            keys = [key for key in keys if not key.endswith(("tokens_per_s", "tflops", "peak_gib", "mfu"))]
            assert len(keys) > 10 and {key: again[key] for key in keys} == pytest.approx(
                {key: step[key] for key in keys}, rel=within, abs=within
            ), name
        for key, tensor in weights.items():
            torch.testing.assert_close(moved[key], tensor, rtol=0, atol=within, msg=lambda text, name=name: name + text)


@pytest.mark.long
def test_every_mode_and_chunking_gives_the_same_updates(plane: DataPlane, model: str) -> None:
    equal_updates(plane, model, FsdpBackend, SAME_STEP, within=1e-6)


def test_mini_batches_of_the_same_rows_give_the_same_updates(plane: DataPlane, model: str) -> None:
    equal_updates(plane, model, FsdpBackend, SAME_MINIBATCHES, within=1e-6, minibatches=2)


@pytest.mark.megatron
def test_mini_batches_and_epochs_give_the_same_updates_with_megatron(plane: DataPlane, model: str) -> None:
    """Also with the other backend: it is the first case, to which the others are compared."""
    from headrace.trainers.backends.megatron.backend import MegatronBackend

    def build(settings: Any, rank: int, world: int) -> Any:
        kind = MegatronBackend if settings.trainer.backend == "megatron" else FsdpBackend
        return kind(settings, rank, world)

    dealt = {"minibatches": 2, "epochs": 2, "prev_logprobs": "recompute"}
    cases = {
        "fsdp": {"mode": "sync", "sections": CORRECTED},
        "megatron": {"mode": "sync", "sections": MEGATRON | CORRECTED},
        "megatron, async": {"mode": "async", "max_staleness": 1, "sections": MEGATRON | CORRECTED},
    }
    equal_updates(plane, model, build, cases, within=1e-6, **dealt)
    equal_updates(
        plane,
        model,
        build,
        {name: {**case, "sections": MEGATRON} for name, case in SAME_MINIBATCHES.items()},
        within=1e-6,
        minibatches=2,
    )


# ---------------------------------------------------------------- each row once an epoch

DEALT = {
    "sync": {"mode": "sync", "minibatches": 3, "epochs": 2},
    "async": {"mode": "async", "max_staleness": 2, "minibatches": 2, "epochs": 3},
    "streaming": {"mode": "streaming", "chunk_groups": 2, "minibatches": 2},
    "async_streaming": {"mode": "async_streaming", "max_staleness": 1, "chunk_groups": 1, "minibatches": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", DEALT)
def test_every_row_is_trained_on_once_an_epoch(plane: DataPlane, name: str) -> None:
    config = settings(steps=4, **DEALT[name])
    world = World(plane, config, random.Random(name))
    worker, state = CountingWorker(world), State()
    seen: list[str] = []

    def after_step(state: State, metrics: dict[str, float]) -> None:
        updates, algorithm = worker.updates, config.algorithm
        assert len(updates) == algorithm.updates_per_step == metrics.get("train/updates", 1)
        for epoch in range(algorithm.epochs):
            rows = [
                key for update in updates[epoch * algorithm.minibatches :][: algorithm.minibatches] for key in update
            ]
            assert len(rows) == len(set(rows)) == PROMPTS * SAMPLES
            assert epoch == 0 or set(rows) == set(updates[0] + [key for update in updates[1:] for key in update])
        seen.extend({key for update in updates for key in update})
        worker.updates = []

    Loop(world, [worker]).go_on(state, world.begin(state), after_step)
    assert len(seen) == len(set(seen)) == 4 * PROMPTS * SAMPLES
    world.inner.close()


# ---------------------------------------------------------------- kills and resumes

DRILLED = {
    "sync, minibatches": {"mode": "sync", "minibatches": 2, "epochs": 2},
    "streaming": {"mode": "streaming", "chunk_groups": 1, "minibatches": 2},
    "async": {"mode": "async", "max_staleness": 2},
    "async_streaming": {"mode": "async_streaming", "max_staleness": 1, "chunk_groups": 2, "minibatches": 2},
    "async_streaming, ready first": {
        "mode": "async_streaming", "max_staleness": 2, "chunk_groups": 1, "sampler": "ready_first",
    },
}  # fmt: skip


def drill(plane: DataPlane, name: str, steps: int) -> None:
    """Train while rollouts end in any order, actors die, and the run is killed between any two calls. It continues from
    the checkpoint of every third step, in a new run or with new train workers."""
    config = settings(steps=steps, **DRILLED[name])
    world = World(plane, config, random.Random(name), deaths=0.02)
    state, by_step, most, kills = State(), dict[int, list[str]](), 0.0, 0
    checkpoint, feed, worker = saved(state), world.begin(state), CountingWorker(world, deaths=0.03)

    def after_step(state: State, metrics: dict[str, float]) -> None:
        nonlocal checkpoint, most
        by_step[state.step] = [key for update in worker.updates for key in update]
        assert worker.updates and metrics["staleness/max"] <= config.overlap.window
        most = max(most, metrics["staleness/max"])
        worker.updates = []
        if state.step % 3 == 0:
            checkpoint = saved(state)

    while state.step < steps:
        try:
            Loop(world, [worker]).go_on(state, feed, after_step)
        except Killed:
            kills += 1
            worker, left = CountingWorker(world, deaths=0.03), world.partition
            if world.dice.random() < 0.5:
                state.go_back(State(**json.loads(checkpoint)))
                feed = world.begin_again(feed, state)
            else:
                state = State(**json.loads(checkpoint))
                feed = world.begin(state)
            world.inner.unregister(left)  # the status of thousands of partitions would take most of the time
            for step in [step for step in by_step if step > state.step]:
                del by_step[step]
    assert list(by_step) == list(range(1, steps + 1)) and kills and world.num_dead
    assert most > 0 or not config.overlap.window, "nothing ran ahead"
    epochs, rows = config.algorithm.epochs, PROMPTS * SAMPLES
    seen = set[str]()
    for keys in by_step.values():
        assert len(keys) == epochs * rows and len(set(keys)) == rows and not seen & set(keys)
        seen |= set(keys)
    status = world.inner.status(world.partition)
    assert status.leased_rows == 0
    world.inner.clear(world.partition)
    world.inner.close()


@pytest.mark.long
@pytest.mark.parametrize("name", DRILLED)
def test_each_prompt_is_trained_on_once_within_the_window_whatever_is_killed(plane: DataPlane, name: str) -> None:
    drill(plane, name, 40)


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DRILLED)
def test_ten_thousand_steps_with_kills_and_resumes(plane: DataPlane, name: str) -> None:
    drill(plane, name, 10_000)


class Dying(FsdpBackend):
    """A backend whose process is killed at its sixth update."""

    left = 5

    def finish_step(self) -> dict[str, float]:
        if not self.left:
            raise Killed
        self.left -= 1
        return super().finish_step()


def test_a_resume_inside_an_epoch_is_exact(plane: DataPlane, model: str, tmp_path: Path) -> None:
    """Killed at the second of a step's four updates, the run continues from the checkpoint before that step."""
    config = settings("sync", 2, minibatches=2, epochs=2, prev_logprobs="recompute")
    budget, path = Budget(48), str(tmp_path / "checkpoint")
    whole, expected = trained(plane, config, model, FsdpBackend, seed=0, budget=budget)
    world, state, states, figures = RowWorld(plane, config, random.Random(1)), State(), list[str](), []
    worker = train_worker(config, plane, model, Dying)

    def after_step(state: State, metrics: dict[str, float]) -> None:
        figures.append(metrics)
        states.append(saved(state))
        if state.step == 1:
            worker.save(path)
            worker.wait_saved()

    with pytest.raises(Killed):
        Loop(world, [Handle(worker)], budget=budget).go_on(state, world.begin(state), after_step)
    worker.close()
    world.inner.clear(world.partition)
    assert state.ahead and len(states) == 1
    state = State(**json.loads(states[0]))
    worker = train_worker(config, plane, model, FsdpBackend)
    worker.load(path)
    Loop(world, [Handle(worker)], budget=budget).go_on(state, world.begin(state), after_step)
    backend: Any = worker._backend
    for name, tensor in backend.weights():
        assert torch.equal(tensor, expected[name]), name
    for one, other in zip(whole, figures, strict=True):
        compared = [key for key in one if key.startswith("update_")]
        assert len(compared) > 12 and [one[key] for key in compared] == [other[key] for key in compared]
    worker.close()
    world.inner.close()


# ---------------------------------------------------------------- capacity


@pytest.mark.parametrize("mode", ["streaming", "async_streaming"])
def test_a_store_smaller_than_a_step_suffices_as_chunks_give_their_bytes_back(mode: str) -> None:
    config = settings(mode, 2, chunk_groups=1)
    if config.overlap.window:
        config = settings(mode, 2, chunk_groups=1, max_staleness=0)
    with open_plane(capacity_mib=1, timeout_s=2.0) as plane:
        world = RowWorld(plane, config, random.Random(3))
        world.stretch = 1600
        worker, state = CountingWorker(world), State()
        rows = list[int]()
        Loop(world, [worker], budget=Budget(1 << 14)).go_on(
            state, world.begin(state), lambda state, metrics: rows.append(world.inner.status().rows)
        )
        traffic = world.inner.stats.take()
        assert traffic.bytes_put > 2 * (1 << 20) and 0 < worker.most_bytes < 1 << 20
        assert len(worker.updates) == 2 and rows == [0, 0]
        assert (traffic.ops["free"].calls, traffic.ops["clear"].calls) == (2 * (PROMPTS - 1), 2)
        world.inner.close()
