"""Tests checkpoints, exported weights and HF folders of the fsdp backend on one rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from headrace.tests.trainers.backends.backend_ranks import (
    backend_config,
    random_rows,
    run_step,
    save_tiny_model,
    weights_of,
)
from headrace.trainers.backends import checkpoint_files as checkpoint
from headrace.trainers.backends import hf_model
from headrace.trainers.backends.fsdp.backend import FsdpBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


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
        patch.setattr(checkpoint, "save", torn)
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


@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_are_those_of_the_hf_model(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path, tied=tied)
    backend = new_backend(folder)
    exported = weights_of(backend)
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert list(exported) == list(expected) and ("lm_head.weight" in exported) != tied
    assert all(torch.equal(exported[name], value) for name, value in expected.items())


def test_an_exported_folder_loads_elsewhere(model: str, tmp_path: Path) -> None:
    backend = new_backend(model)
    run_step(backend, [random_rows(0, 8)])
    backend.export_model(str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(ValueError, match="out: exists already"):
        backend.export_model(str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    exported = weights_of(backend)
    assert all(torch.equal(loaded[name], value) for name, value in exported.items())
    assert torch.equal(loaded["lm_head.weight"], exported["model.embed_tokens.weight"])
    run_step(FsdpBackend(backend_config(str(tmp_path / "out")), 0, 1), [random_rows(1, 8)])


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
