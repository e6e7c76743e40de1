"""Which failures send a run back to its last checkpoint, which end it, and who is root_cause for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from headrace.actors.engines.protocol import EngineDied
from headrace.dataplane.errors import ClaimTimeout, DataPlaneTimeout, DirectoryLost, StoreLost
from headrace.testing import FakeCluster
from headrace.trainers.cluster import gpu_bundles
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.cluster.engine_pool import EnginePool
from headrace.trainers.cluster.lost_hosts import NoRoom, Patience
from headrace.trainers.cluster.places.placement import Host
from headrace.trainers.cluster.places.placement_plan import PlacementRequest
from headrace.trainers.cluster.run_actors import RunActors
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.gpu_turns import BothResident
from headrace.trainers.run import launch, processes, restarts
from headrace.trainers.run.restarts import lost_process, root_cause

ALIVE = {"directory": os.getpid()}
RESET = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40123")


@pytest.mark.parametrize(
    "error",
    [
        ActorFailed("train: train worker 1 (pid 7 on here) died", died=True),
        ActorFailed("train: no answer within 300 s from train worker 1"),
        ActorFailed("rollout 0 failed", DirectoryLost("gone", op="put")),
        ActorFailed("rollout 0 failed", EngineDied("vLLM's engine process died")),
        DirectoryLost("gone", op="claim"),
        StoreLost("gone", op="get"),
        DataPlaneTimeout("3 of 4 bytes", op="get"),
        RayActorError(),
    ],
)
def test_a_lost_process_is_one(error: Exception) -> None:
    assert lost_process(error) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        ActorFailed("rollout 0 failed: TypeError: of a reward", TypeError("of a reward")),
        ActorFailed("train worker 0 failed", ValueError("not finite")),
        ActorFailed("train worker 0 failed: connection closed", RESET),
        ClaimTimeout("16 of 64 rows", op="claim"),
        UserError("no such model"),
        RuntimeError("in the driver itself"),
        RayTaskError("train", "a traceback", ValueError("not finite")),
    ],
)
def test_an_error_of_its_own_is_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch, actors: Callable[..., RunActors]
) -> None:
    for bound in ("DEATH_S", "NEWS_S"):
        monkeypatch.setattr(restarts, bound, 0.05)  # no process dies here
    assert root_cause(error, actors(0, 0), ALIVE) is error
    assert lost_process(error) is None


@pytest.fixture
def actors() -> Callable[..., RunActors]:
    """Make train workers that answer, or whose death Ray tells after some questions: the numbers of these, or None."""

    def make(*dies_after: int | None) -> RunActors:
        def answer(rank: int, questions: int | None) -> Callable[[str], Any]:
            asked = [0]

            def progress(method: str) -> Any:
                asked[0] += 1
                return RayActorError() if questions and asked[0] > questions else 1

            return progress

        workers = [FakeCluster().trainer(answer(rank, after), rank) for rank, after in enumerate(dies_after)]
        return RunActors(EnginePool([], True), [], workers, 3, (), 300.0)

    return make


@pytest.mark.parametrize("stage", ["train", "weight sync", "checkpoint"])
def test_who_died_is_blamed_and_not_who_noticed(stage: str, actors: Callable[..., RunActors]) -> None:
    """Ray tells of a death on another host later than the broken connection does."""
    error = ActorFailed(f"{stage}: train worker 0 failed after 1.0 s: {RESET}", RESET)
    cause = root_cause(error, actors(None, 3), {})
    assert isinstance(cause, ActorFailed) and cause.died
    assert str(cause).startswith("train worker 1 (") and f" died: {error}" in str(cause)
    assert lost_process(cause) == str(cause)


def test_a_death_is_its_own_cause(actors: Callable[..., RunActors]) -> None:
    error = ActorFailed("train: train worker 1 died", died=True)
    assert root_cause(error, actors(1, None), {}) is error


@pytest.mark.processes
def test_an_error_beside_a_dead_process_of_this_host_is_of_its_death(actors: Callable[..., RunActors]) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    error = ActorFailed("train worker 0 failed: connection closed by peer", RESET)
    cause = root_cause(error, actors(None, None), {**ALIVE, "train worker 1": dead.pid})
    assert lost_process(cause) == f"train worker 1 (pid {dead.pid}) died: {error}"


@pytest.mark.parametrize(
    ("journal", "stuck", "may"), [(True, None, True), (False, None, False), (True, "stuck", False)]
)
def test_train_workers_alone_are_restarted_only_with_a_journal_and_unless_the_watchdog_stopped_the_run(
    journal: bool, stuck: str | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "needed_processes", lambda path: {})
    monkeypatch.setattr(launch, "lost_only_workers", lambda *_: True)
    config = SimpleNamespace(run=SimpleNamespace(keeps_journal=journal))
    training: Any = SimpleNamespace(
        _config=config, _watch=SimpleNamespace(reason=lambda: stuck), _folder=SimpleNamespace(path="")
    )
    run: Any = SimpleNamespace(actors=SimpleNamespace(may_replace=True), client=None)
    assert launch._Training._may_restart_workers(training, run, ActorFailed("worker 0 died", died=True)) is may


def test_an_interrupt_while_rows_are_made_again_saves_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The open step has changed no weight, so the last step is as whole as during any other wait for rollouts."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    state, saved = State(7, 7), list[Any]()
    training: Any = object.__new__(launch._Training)  # pyright: ignore[reportPrivateUsage]
    training._restarts, training._progress = 0, SimpleNamespace(message=str)
    training._folder = SimpleNamespace(incident=lambda step, sentence: None)
    monkeypatch.setattr(type(training), "_save_interrupted", lambda self, *given: saved.append(given))
    run: Any = SimpleNamespace(actors=SimpleNamespace(max_replaced=3, ensure_units=lambda: None))
    feed: Any = SimpleNamespace(give_up=interrupted)
    with pytest.raises(KeyboardInterrupt):
        training._repeat_step(run, state, feed, None, StoreLost("a unit died", op="get"))
    assert saved == [(run, state, None)]


def test_a_host_that_has_joined_is_compared_before_a_restart_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would not start with one that differs."""
    hosts = [Host(name, 0, (), 8.0, name, name == "a") for name in "abc"]
    asked: list[str] = []

    def fits(node: str) -> bool:
        asked.append(node)
        return node == "c"

    monkeypatch.setattr(gpu_bundles, "read_hosts", lambda: hosts)
    again: Any = object.__new__(processes._Launch)  # pyright: ignore[reportPrivateUsage]
    again._patience, again._checks = Patience(hosts[:1], 1.0, lambda line: None), SimpleNamespace(fits=fits)
    scripted = {"rollout": {"engine": "scripted"}, "trainer": {"backend": "scripted"}}
    again._config = build_config({**scripted, "resources": {"ray_address": "auto"}})
    request = PlacementRequest.of(again._config)
    placement = gpu_bundles.reserve_places(request, 5.0, again._usable).placement
    assert [host.name for host in placement.hosts] == ["a", "c"] and asked == ["b", "c"]
    again._config = build_config(scripted)
    assert again._usable("new id of the run's own Ray") and asked == ["b", "c"]


@pytest.mark.parametrize("starts_again", [False, True])
def test_a_start_that_was_possible_once_is_no_mistake_of_the_user(
    starts_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job script starts the job again after the exit code 1, and not after 2."""

    @contextmanager
    def refused(*given: Any, **named: Any) -> Iterator[None]:
        raise UserError("sync.transport: got 'ipc' with engines and train workers on several hosts")
        yield

    monkeypatch.setattr(launch, "launched", refused)
    training: Any = object.__new__(launch._Training)  # pyright: ignore[reportPrivateUsage]
    training._config, training._begun = Config(), True
    training._engines = SimpleNamespace(at_start=lambda rollout: rollout)
    training._progress = SimpleNamespace(phase=str, message=str)
    training._folder = SimpleNamespace(path=Path())
    training._watch = SimpleNamespace(reason=lambda: None)
    training._times = training._cluster = training._tracer = None
    training._restarts = training._replaced = 0
    training._patience = Patience((), 1.0, lambda line: None) if starts_again else None
    with pytest.raises(NoRoom if starts_again else UserError, match="sync.transport: got 'ipc'"):
        next(training._attempt(State()))


def test_rows_lost_on_the_only_host_send_the_run_back() -> None:
    """Nothing would start another storage unit there, so the rows could not be made again."""
    weights: Any = None
    client = SimpleNamespace(status=lambda timeout_s: None)
    for hosts, only_rows in ((("a", "b"), True), (("a",), False)):
        actors = SimpleNamespace(placement=SimpleNamespace(hosts=hosts), workers=[])
        run: Any = SimpleNamespace(roles=BothResident(weights), actors=actors, client=client)
        assert restarts.lost_only_rows(StoreLost("gone", op="put"), run) is only_rows
