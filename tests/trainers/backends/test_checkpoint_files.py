"""Tests checkpoints and HF folders of the fsdp backend: what they contain, writes behind a run, failures and kills."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from headrace.actors.engines.tokenizer import load_tokenizer
from headrace.tests.process_pool import FORKSERVER
from headrace.tests.trainers.backends.backend_ranks import (
    backend_config,
    random_rows,
    run_step,
    save_tiny_model,
    weights_of,
)
from headrace.trainers.backends import checkpoint_files, hf_model
from headrace.trainers.backends.checkpoint_files import Checkpointer
from headrace.trainers.backends.config import BackendConfig, TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.base_model import made_tokenizers


def new_backend(model: str) -> FsdpBackend:
    return FsdpBackend(backend_config(model), 0, 1)


def test_a_loaded_backend_goes_on_as_if_nothing_had_happened(model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    first = new_backend(model)
    for step in range(2):
        run_step(first, [random_rows(step, 8)])
    first.save(path)
    rng = torch.rand(3)
    expected = run_step(first, [random_rows(2, 8)])
    second = new_backend(model)
    second.load(path)
    assert torch.equal(torch.rand(3), rng)
    assert run_step(second, [random_rows(2, 8)]) == expected
    ours, theirs = weights_of(second), weights_of(first)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_step_0_is_whole(model: str, tmp_path: Path) -> None:
    first = new_backend(model)
    first.save(str(tmp_path / "start"))
    expected = run_step(first, [random_rows(0, 8)])
    first.load(str(tmp_path / "start"))
    assert run_step(first, [random_rows(0, 8)]) == expected


def test_a_save_that_fails_leaves_the_last_one_whole(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = new_backend(model)
    backend.save(str(tmp_path / "good"))
    path = tmp_path / "next"

    def torn(state: dict, checkpoint_id: str, process_group: None) -> None:
        Path(checkpoint_id, "half").write_bytes(b"x")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "save", torn)
        with pytest.raises(OSError, match="disk full"):
            backend.save(str(path))
    assert not path.exists() and (tmp_path / "next.tmp" / "half").exists()
    with pytest.raises(ValueError, match="missing or incomplete"):
        backend.load(str(path))
    backend.load(str(tmp_path / "good"))
    backend.save(str(path))
    backend.load(str(path))
    assert sorted(os.listdir(tmp_path)) == ["good", "next"]
    assert "half" not in os.listdir(path)


def test_a_later_save_replaces_an_earlier_one(model: str, tmp_path: Path) -> None:
    backend, path = new_backend(model), str(tmp_path / "same")
    backend.save(path)
    run_step(backend, [random_rows(0, 8)])
    backend.save(path)
    assert os.listdir(tmp_path) == ["same"]
    expected = run_step(backend, [random_rows(1, 8)])
    backend.load(path)
    assert run_step(backend, [random_rows(1, 8)]) == expected


def test_checkpoint_mistakes_change_nothing(model: str, tmp_path: Path) -> None:
    backend = new_backend(model)
    path = str(tmp_path / "one")
    backend.save(path)
    with pytest.raises(ValueError, match="exists already, expected the name of a new folder"):
        backend.save(model)
    backend.load(path)

    other = new_backend(save_tiny_model(tmp_path / "untied", tied=False))
    torch.manual_seed(5)
    before = weights_of(other)["lm_head.weight"]
    with pytest.raises(ValueError, match="has no such tensor for 'optimizer.lm_head.weight.step', the model needs"):
        other.load(path)
    assert torch.equal(weights_of(other)["lm_head.weight"], before)


def test_a_large_folder_is_several_files(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "SHARD_BYTES", 20_000)
    backend = new_backend(model)
    backend.export_model(str(tmp_path / "out"))
    files = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(files) > 2 and max(files) < 25_000
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in weights_of(backend).items())


def test_a_folder_has_the_models_buffers_too(model: str, tmp_path: Path) -> None:
    backend = new_backend(model)
    backend._policy.model.register_buffer("router_bias", torch.arange(3.0))
    backend._policy.model.register_buffer("angles", torch.arange(4.0), persistent=False)
    assert "router_bias" not in backend.weight_specs(), "training does not change it, engines need not be sent it"
    backend.export_model(str(tmp_path / "out"))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("router_bias"), torch.arange(3.0))
        assert set(opened.keys()) == {*backend.weight_specs(), "router_bias"}


KILLS = 10


class Gate:
    """Holds writes back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self._write = threading.Event(), checkpoint_files.write
        monkeypatch.setattr(checkpoint_files, "write", self)

    def __call__(self, *arguments: object) -> None:
        assert self.opened.wait(60)
        self._write(*arguments)  # type: ignore[arg-type]


def test_training_goes_on_while_a_checkpoint_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, path = FsdpBackend(backend_config(model), 0, 1), str(tmp_path / "one")
    gate = Gate(monkeypatch)
    run_step(backend, [random_rows(0, 8)])
    backend.save(path, wait=False)
    expected = run_step(backend, [random_rows(1, 8)])
    assert not os.path.exists(path), "nothing is published before it is whole"
    gate.opened.set()
    backend.load(path)
    assert run_step(backend, [random_rows(1, 8)]) == expected, "what was saved is what was there at the call"


def test_what_goes_wrong_behind_is_raised_once_by_the_next_call(model: str, tmp_path: Path) -> None:
    backend, path = FsdpBackend(backend_config(model), 0, 1), tmp_path / "one"
    with pytest.MonkeyPatch.context() as patch:

        def torn(*_: object) -> None:
            raise OSError("disk full")

        patch.setattr(checkpoint_files, "write", torn)
        backend.save(str(path), wait=False)
        with pytest.raises(OSError, match="disk full"):
            backend.save(str(path), wait=False)
        backend.save(str(path), wait=False)
        with pytest.raises(OSError, match="disk full"):
            backend.close()
    backend.close()
    assert not path.exists()
    backend.save(str(path), wait=False)
    backend.close()
    assert os.listdir(tmp_path) == ["one"]


def test_a_write_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    files = Checkpointer(0, 1, timeout_s=0.05)
    files.save(str(tmp_path / "one"), {"steps": torch.ones(())}, wait=False)
    with pytest.raises(TimeoutError, match="one: still not written after 0 s"):
        files.wait()
    gate.opened.set()
    files._timeout_s = 60.0
    files.close()
    assert os.listdir(tmp_path) == ["one"]


def test_a_checkpoint_caught_between_its_renames_is_found(model: str, tmp_path: Path) -> None:
    backend, path = FsdpBackend(backend_config(model), 0, 1), tmp_path / "one"
    backend.save(str(path))
    expected = run_step(backend, [random_rows(1, 8)])
    path.rename(tmp_path / "one.old")
    backend.load(str(path))
    assert run_step(backend, [random_rows(1, 8)]) == expected
    assert os.listdir(tmp_path) == ["one"]


def train_and_save(model: str, path: str, saved: Connection) -> None:
    """Resume if there is a checkpoint, then train and save steps forever. Prints each step whose checkpoint is on
    disk."""
    torch.set_num_threads(1)
    backend = FsdpBackend(backend_config(model), 0, 1)
    if os.path.exists(path) or os.path.exists(f"{path}.old"):
        backend.load(path)
    saved.send(int(backend._steps))
    while True:
        run_step(backend, [random_rows(0, 4)])
        done = int(backend._steps) - 1
        backend.save(path, wait=False)  # waits for the save before it
        saved.send(done)


@pytest.mark.processes
def test_a_process_killed_while_it_saves_always_resumes(model: str, tmp_path: Path) -> None:
    path, chance, reached = str(tmp_path / "latest"), random.Random(11), 0
    for _ in range(KILLS):
        told, tell = FORKSERVER.Pipe(duplex=False)
        child = FORKSERVER.Process(target=train_and_save, args=(model, path, tell))
        child.start()
        tell.close()
        assert told.poll(60), "the child does not start"
        assert told.recv() >= reached, "it resumes from the last whole checkpoint"
        deadline, seen = time.monotonic() + 60, 0
        while seen < 2 and time.monotonic() < deadline:  # it saves, and has a checkpoint to replace
            if told.poll(1):
                reached, seen = max(reached, told.recv()), seen + 1
        time.sleep(chance.random() * 0.1)
        child.kill()
        child.join(60)
        assert child.exitcode == -9
        try:
            while told.poll():
                reached = max(reached, told.recv())
        except EOFError:
            pass
    last = FsdpBackend(backend_config(model), 0, 1)
    last.load(path)
    assert int(last._steps) >= reached >= KILLS
    assert run_step(last, [random_rows(0, 4)])["train/skipped"] == 0


@pytest.mark.parametrize(
    ("source", "key", "exported"),
    [
        (torch.bfloat16, "source", torch.bfloat16),
        (torch.float32, "source", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "float16", torch.float16),
    ],
)
def test_an_export_has_the_number_format_of_its_source_or_of_the_key(
    source: torch.dtype, key: str, exported: torch.dtype, model: str, tmp_path: Path
) -> None:
    folder, out = tmp_path / "source", tmp_path / "out"
    before = AutoModelForCausalLM.from_pretrained(model, dtype=source)
    before.save_pretrained(folder)
    config = BackendConfig(str(folder), TrainerConfig.model_validate({"export_dtype": key}))
    FsdpBackend(config, 0, 1).export_model(str(out))
    assert json.loads((out / "config.json").read_text())["dtype"] == str(exported).removeprefix("torch.")
    after = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert {value.dtype for value in after.values()} == {exported}
    assert all(torch.equal(after[name], value.to(exported)) for name, value in before.state_dict().items())


def test_an_export_has_the_tokenizer_of_a_folder_with_tokenizer_json_alone(model: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(model, folder)
    made_tokenizers.make_tokenizer().save_pretrained(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    ids = load_tokenizer(str(folder))("r12=")["input_ids"]
    new_backend(str(folder)).export_model(str(out))
    assert load_tokenizer(str(out))("r12=")["input_ids"] == ids
