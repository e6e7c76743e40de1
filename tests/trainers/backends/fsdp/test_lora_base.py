"""A rank that starts again reads the base of its adapter from an engine, and notices a copy that is not the base."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from headrace.actors.adapters.spec import AdapterSlots
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.weight_sync.base_offer import BaseRecord, KnownBase, WeightReader
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig
from headrace.dataplane.security.handshake import new_key
from headrace.tests.trainers.backends.backend_ranks import backend_config
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.lora import recorded_base
from headrace.trainers.backends.lora.recorded_base import RecordedSource

KEY = new_key()


class Start:
    """A rank that has started once, and an engine with the same base."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.first, record = self.backend(None)
        assert record is not None and not record.note
        self.record = record
        receiver = ReceiverConfig("engine 0", SyncConfig(timeout_s=10.0), key=KEY)
        self.engine = HfEngine(model, receiver=receiver, adapters=AdapterSlots(4, 2))

    def backend(self, known: KnownBase | None) -> tuple[dict[str, torch.Tensor], BaseRecord | None]:
        config = backend_config(self.model, lora={"rank": 4, "targets": ["q_proj"]})
        backend = build_backend(config, 0, 1, known)
        assert isinstance(backend, FsdpBackend)
        state = {name: value.clone() for name, value in backend._policy.model.state_dict().items()}
        backend.close()
        return state, backend.base_record

    def again(self) -> str:
        """The note of another start, which must have all weights of the first."""
        offer = asyncio.run(self.engine.offer_base())
        assert offer is not None
        state, record = self.backend(KnownBase(self.record, partial(WeightReader, offer, KEY, 10.0), True))
        asyncio.run(self.engine.end_offer())
        assert record is not None and (record.base, record.weights) == (self.record.base, self.record.weights)
        assert state.keys() == self.first.keys()
        assert all(torch.equal(state[name], self.first[name]) for name in state)
        return record.note

    def damage_engine(self, name: str) -> None:
        with torch.no_grad():
            self.engine._model.get_parameter(name).view(-1)[-1] += 1

    def damage_folder(self, name: str) -> None:
        path = Path(self.model) / "model.safetensors"
        tensors = load_file(path)
        tensors[name].view(-1)[-1] += 1
        save_file(tensors, path, {"format": "pt"})


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Callable[[str], Start]:
    return lambda name: Start(shutil.copytree(folder / name, tmp_path / name).as_posix())


@pytest.mark.parametrize("name", ["tied", "moe"])
def test_the_base_comes_from_an_engine_and_a_damaged_copy_is_noticed(start: Callable[[str], Start], name: str) -> None:
    ranks, norm = start(name), "model.norm.weight"
    note = ranks.again()
    assert note.endswith("MB from engine 0's memory"), note
    ranks.damage_folder(norm)
    assert ranks.again() == note, "the folder is not read"
    ranks.damage_engine(norm)
    with pytest.raises(ValueError, match=r"model.path: the weights have changed since the run began: 'model.norm"):
        ranks.again()


def test_a_damaged_engine_or_one_that_is_gone_is_told(start: Callable[[str], Start]) -> None:
    ranks = start("untied")
    ranks.damage_engine("model.layers.1.mlp.up_proj.weight")
    note = ranks.again()
    assert "MB from engine 0's memory, " in note and " MB from the model's folder; no more from an engine, bec" in note
    assert (
        "'model.layers.1.mlp.up_proj.weight' in engine 0's memory has other bytes than were read at the start" in note
    )
    offer = asyncio.run(ranks.engine.offer_base())
    assert offer is not None
    asyncio.run(ranks.engine.end_offer())
    state, record = ranks.backend(KnownBase(ranks.record, partial(WeightReader, offer, KEY, 10.0), True))
    assert record is not None and "memory" not in record.note and "refused" in record.note, record
    assert all(torch.equal(state[name], ranks.first[name]) for name in state)


class Slow:
    """A folder, or an engine, with weights of 100 zeros, each of which takes it some seconds of a clock."""

    engine = "engine 0"

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(self)

    def pieces(self, name: str, ranges: tuple[slice, ...]) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        self._clock[0] += self._seconds
        yield (slice(0, 100),), torch.zeros(100, dtype=torch.uint8)

    def parts(self, name: str, box: object, dtype: torch.dtype) -> Iterator[tuple[Any, torch.Tensor]]:
        for _, values in self.pieces(name, ()):
            yield ((0, 100),), values


@pytest.mark.parametrize(("engine_s", "faster"), [(0.1, "engine 0's memory"), (10.0, "the model's folder")])
def test_the_faster_of_engine_and_folder_is_read(engine_s: float, faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, names = [0.0], [f"w{number}" for number in range(10)]
    monkeypatch.setattr(recorded_base, "PROBE_BYTES", 150)
    monkeypatch.setattr(recorded_base.time, "perf_counter", lambda: clock[0])
    zeros = "uint8", xxhash.xxh3_64_intdigest(bytes(100))
    record = BaseRecord("", dict.fromkeys(names, zeros))
    folder, engine = Slow(clock, 1.0), Slow(clock, engine_s)
    source = RecordedSource(cast(Any, folder), "", KnownBase(record, cast(Any, engine.reading), always=False))
    with source.reading():
        for name in names:
            assert len(list(source.pieces(name, (slice(0, 100),)))) == 1
    assert source.record.weights == record.weights
    # Two weights are read from each to learn which is faster.
    assert source._read[faster][0] == 800 and sum(nbytes for nbytes, _ in source._read.values()) == 1000
