"""Actors that start before their settings are known."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any, ClassVar, cast

import pytest

from headrace.actors import early_actors
from headrace.actors.early_actors import EarlyEngineActor, EarlyTrainActor
from headrace.actors.engine_actor import EngineActor, EngineSetup
from headrace.actors.engines.config import EngineKeys, ModelConfig
from headrace.actors.engines.factory import MODULES, EngineConfig
from headrace.actors.process.own_process import ActorInfo
from headrace.actors.process.remote_methods import decode_result, encode_arguments
from headrace.codecs import messages
from headrace.dataplane.imports import import_ahead

NOTHING = encode_arguments([])


class Host:
    """Takes the place of an engine actor, and notes the calls."""

    told: ClassVar[list[str]] = []

    def __init__(self, setup: EngineSetup) -> None:
        pass

    async def call(self, method: str, message: bytes) -> bytes:
        self.told.append(method)
        return NOTHING


def test_an_engine_actor_answers_once_it_is_configured() -> None:
    host = f"{EngineActor.__module__}:EngineActor"
    actor = EarlyEngineActor(host, [MODULES["scripted"], "headrace.no_such_module"], False, None, os.getcwd())
    setup = EngineSetup("engine 3", 1, EngineConfig(EngineKeys(engine="scripted"), ModelConfig(path="/nowhere")))

    async def ask(method: str, *arguments: Any) -> bytes:
        return await actor.call(method, NOTHING, *arguments)

    with pytest.raises(RuntimeError, match="info: the actor is not configured yet"):
        asyncio.run(ask("info"))
    told = decode_result(EarlyEngineActor.configure, asyncio.run(ask("configure", setup)))
    assert told == ActorInfo.here("engine 3") == messages.decode(asyncio.run(ask("info")), ActorInfo)
    with pytest.raises(RuntimeError, match="engine 3: the engine is not built yet"):
        asyncio.run(ask("version"))


def test_an_engine_actor_settles_once_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Host, "told", told)
    monkeypatch.setattr(early_actors, "settle", lambda: told.append("settled"))  # it would change this process
    actor = EarlyEngineActor(f"{__name__}:Host", [], False, None, os.getcwd())
    actor.configure(EngineSetup("engine 3", 1, cast(EngineConfig, None)))
    for method in ("info", "build", "version"):
        asyncio.run(actor.call(method, NOTHING))
    assert told == ["info", "build", "settled", "version"]


def test_a_train_actor_waits_for_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    made: list[str] = []

    class Worker:
        def __init__(self, setup: str) -> None:
            made.append(setup)

        def info(self) -> ActorInfo:
            return ActorInfo("train worker 0", 7, "here")

        def call(self, method: str, message: bytes) -> bytes:
            return f"{method} {'this' in sys.modules}".encode()

    monkeypatch.setattr("headrace.actors.train.actor.TrainActor", Worker)
    monkeypatch.setattr(early_actors, "settle", lambda: made.append("settled"))  # it would change this process
    actor = EarlyTrainActor(["this"], None, os.getcwd())
    with pytest.raises(RuntimeError, match="build: the actor is not configured yet"):
        actor.call("build", NOTHING)
    assert messages.decode(actor.call("configure", NOTHING, "settings"), ActorInfo).pid == 7
    assert actor.call("build", NOTHING) == b"build True" and made == ["settings", "settled"]
    actor.call("begin", NOTHING)
    assert made == ["settings", "settled"]


def test_a_module_that_is_not_there_is_passed_over() -> None:
    thread = import_ahead(["headrace.no_such_module", "headrace.version"])
    thread.join(30)
    assert not thread.is_alive() and "headrace.version" in sys.modules


@pytest.mark.processes
def test_nothing_is_imported_before_vllms_engine_process_starts() -> None:
    """Torch alone takes seconds on a host with GPUs."""
    script = "import headrace.actors.early_actors, sys; print({'torch', 'numpy', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["set()"]


@pytest.mark.parametrize(("chosen", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_compute_threads_sleep_unless_the_environment_says_otherwise(
    chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen or "")
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    EarlyTrainActor([], None, os.getcwd())
    assert os.environ["OMP_WAIT_POLICY"] == expected
