"""Tests of the actor of a shared engine, without Ray: which runs get a seat, and which base adapters must belong to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.actors.adapters.spec import AdapterSlots
from headrace.actors.engine_actor import EngineSetup
from headrace.actors.engines.config import EngineKeys, ModelConfig
from headrace.actors.engines.factory import EngineConfig
from headrace.actors.shared_engine import SharedEngineActor, SharedSetup
from headrace.tests.actors.engines.hf.adapter_updates import RANK, Trainer, adapter
from headrace.tests.actors.weight_sync.weight_updates import receiver


def share(
    test: Callable[[Any, EngineSetup], Coroutine[Any, Any, None]], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a test with an actor for one run at a time, and with the settings that a run would give it."""
    config = EngineConfig(
        EngineKeys(engine="hf"), ModelConfig(path=folder), receiver=receiver(),
        adapters=AdapterSlots(RANK, 2),
    )  # fmt: skip
    setup = EngineSetup("engine 0", 1, config)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    asyncio.run(test(SharedEngineActor(SharedSetup(setup, 1, ((0,),))), setup))


def test_an_adapter_must_belong_to_the_base_that_was_loaded(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder can get other weights while the engine runs on for days."""
    folder = tmp_path / "base"
    folder.mkdir()
    for path in Path(model_folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())

    async def main(actor: Any, setup: EngineSetup) -> None:
        await actor.build()
        weights = {name: 2.0 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        await actor._configure("a", setup)
        await actor.call("a/build", b"\x90")
        trainer = Trainer(tmp_path / "sync", str(folder))
        update = trainer.publish(1, adapter(str(folder), 1))
        with pytest.raises(ValueError, match="for a base model with the digest"):
            await actor._seats["a"]._engine.prepare_weights(update)
        trainer.publisher.close()

    share(main, str(folder), monkeypatch)


def test_the_first_of_two_runs_gets_the_only_place(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(actor: Any, setup: EngineSetup) -> None:
        for run in ("a", "b"):
            await actor._configure(run, setup)
        with pytest.raises(ValueError, match="serve rollout.max_adapters=1 runs at the same time, and have a"):
            await actor._seats["b"].build()
        await actor._seats["a"].build()
        assert await actor.runs() == ["a"]

    share(main, model_folder, monkeypatch)


def test_a_run_must_know_in_how_many_bits_the_engine_computes(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It corrects for the engine's probabilities, or does not."""

    async def main(actor: Any, setup: EngineSetup) -> None:
        other = replace(setup.engine, rollout=EngineKeys(engine="hf", quantization="int8"))
        await actor._configure("a", replace(setup, engine=other))
        with pytest.raises(ValueError, match="rollout.quantization: got int8, expected none, because pool.engines=sha"):
            await actor._seats["a"].build()

    share(main, model_folder, monkeypatch)


def test_a_seat_opens_after_the_one_of_the_same_name_has_closed(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(actor: Any, setup: EngineSetup) -> None:
        await actor._configure("a", setup)
        first, closing = actor._seats["a"], asyncio.Event()
        monkeypatch.setattr(first, "close", closing.wait)
        leaving = asyncio.create_task(actor.leave("a"))
        await asyncio.sleep(0)
        again = asyncio.create_task(actor._configure("a", setup))
        await asyncio.sleep(0.01)
        assert not again.done() and await actor.runs() == []
        closing.set()
        await asyncio.gather(leaving, again)
        assert await actor.runs() == ["a"] and actor._seats["a"] is not first

    share(main, model_folder, monkeypatch)


def test_an_engine_that_has_died_without_runs_is_started_again(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next run would find it dead when it takes its seat, and its start would fail."""
    killed = list[tuple[int, int]]()

    async def main(actor: Any, _: EngineSetup) -> None:
        await actor.build()
        await actor.keep([])
        assert killed == []
        actor._hosted.died = "its process has ended"
        await actor.keep([])
        assert killed == [(os.getpid(), signal.SIGKILL)]

    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    share(main, model_folder, monkeypatch)
