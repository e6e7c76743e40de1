"""Tests that every rank reads its own pieces of the model's files, and that they are the model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    TINY,
    backend_config,
    logprobs_of,
    micro_batch,
    random_rows,
    run_on_ranks,
    save_tiny_model,
    summed_gradients,
    weights_of,
)
from headrace.trainers.backends import hf_model
from headrace.trainers.backends.fsdp import sharding
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.hf_model import HfSource

MODELS = ("tied", "untied", "moe", "biased")


def from_pretrained(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def read_elements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the size of everything that is read from files from now on."""
    read: list[int] = []
    original = HfSource._read

    def noted(self: HfSource, name: str, ranges: tuple[slice, ...] = ()) -> torch.Tensor:
        found = original(self, name, ranges)
        read.append(found.numel())
        return found

    monkeypatch.setattr(HfSource, "_read", noted)
    return read


def no_whole_model(model: str, attention: str) -> Any:
    raise AssertionError(f"the whole of {model} is loaded")


def loaded(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Return what one of two ranks has and has read, by model and mesh."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sharding, "load_causal_lm", no_whole_model)
        read = read_elements(monkeypatch)
        for name in MODELS:
            for mesh in (Topology(2), Topology(1, tp=2)):
                config = backend_config(f"{folder}/{name}", topology=mesh, offload=name == "untied")
                backend = FsdpBackend(config, rank, world)
                elements, read[:] = sum(read), []
                assert backend._reference is not None
                reference = {
                    key: param.full_tensor() if isinstance(param, DTensor) else param
                    for key, param in backend._reference.model.named_parameters()
                }
                buffers = dict(backend._policy.model.named_buffers())
                rows = micro_batch(random_rows(4, 5))
                same = torch.equal(*[torch.cat(backend.logprobs([rows], 1, reference=ref) or [torch.zeros(1)])
                                     for ref in (False, True)])  # fmt: skip
                found[f"{name} dp{mesh.dp} tp{mesh.tp}"] = (weights_of(backend), reference, buffers, elements, same)
                backend.close()
    return found


@pytest.mark.processes
def test_two_ranks_read_half_the_model_each_and_have_its_very_weights(folder: Path) -> None:
    ranks = run_on_ranks(loaded, 2, folder / "run", str(folder))
    for case, (weights, *_) in ranks[0].items():
        model = from_pretrained(str(folder / case.split()[0]))
        expected = dict(model.named_parameters())
        assert weights.keys() == expected.keys(), case
        assert all(torch.equal(weights[name], expected[name]) for name in expected), case
        for rank in ranks:
            _, reference, buffers, elements, same = rank[case]
            assert all(torch.equal(reference[name], expected[name]) for name in expected if "tp1" in case), case
            assert {name: value.tolist() for name, value in buffers.items()} == {
                name: value.tolist() for name, value in model.named_buffers()
            }, case
            assert same, "policy and reference start alike"
            size = sum(param.numel() for param in expected.values())
            whole = sum(param.numel() for name, param in expected.items() if "norm" in name or "bias" in name)
            assert 0.9 * size <= elements <= 1.02 * size + 2 * whole, f"{case}: half of it for each of two modules"


def test_one_rank_has_the_model_s_buffers_ties_and_generation_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma scales its embedding by a buffer that no folder has."""
    torch.manual_seed(3)
    gemma = GemmaForCausalLM(GemmaConfig(**TINY))
    assert gemma.generation_config is not None
    gemma.generation_config.do_sample, gemma.generation_config.top_k = True, 17
    gemma.save_pretrained(tmp_path / "gemma")
    monkeypatch.setattr(sharding, "load_causal_lm", no_whole_model)
    plain = from_pretrained(str(tmp_path / "gemma"))
    backend = FsdpBackend(backend_config(str(tmp_path / "gemma")), 0, 1)
    model = backend._policy.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {name: value.tolist() for name, value in model.named_buffers()} == {
        name: value.tolist() for name, value in plain.named_buffers()
    }
    ids = torch.arange(4)[None]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    backend.export_model(str(tmp_path / "exported"))
    assert json.loads((tmp_path / "exported" / "generation_config.json").read_text())["top_k"] == 17


def test_a_model_whose_files_have_other_names_is_read_piece_by_piece_or_held_whole_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers knows the names without the prefix, as a folder of the base model has them."""
    folder = save_tiny_model(tmp_path / "model")
    expected = weights_of(FsdpBackend(backend_config(folder), 0, 1))
    assert not caplog.records
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    found = weights_of(FsdpBackend(backend_config(folder), 0, 1))
    assert all(torch.equal(found[name], expected[name]) for name in expected) and not caplog.records
    monkeypatch.setattr(HfSource, "has", lambda source, name: not name.endswith("up_proj.weight"))
    backend = FsdpBackend(backend_config(folder), 0, 1)
    found = weights_of(backend)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "every train worker holds the whole model in host memory while it starts: its safe" in caplog.text
    rows = micro_batch(random_rows(4, 5))
    assert torch.equal(logprobs_of(backend, rows), logprobs_of(backend, rows, reference=True))


def test_a_model_that_does_not_exist_is_named(tmp_path: Path) -> None:
    assert sharding.load_causal_lm is hf_model.load_causal_lm
    with pytest.raises(ValueError, match="model.path: got .*nowhere.*expected a folder with a HF causal LM"):
        FsdpBackend(backend_config(str(tmp_path / "nowhere")), 0, 1)


def test_weights_are_sent_in_the_engines_dtype_and_exported_in_their_own(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    masters = weights_of(FsdpBackend(backend_config(folder), 0, 1))
    backend = FsdpBackend(backend_config(folder, engine_dtype="bfloat16"), 0, 1)
    sent = weights_of(backend)
    assert all(sent[name].view(torch.int16).equal(one.bfloat16().view(torch.int16)) for name, one in masters.items())
    backend.export_model(str(tmp_path / "exported"))
    assert all(one.dtype == torch.float32 for one in load_file(tmp_path / "exported" / "model.safetensors").values())
    model = backend._policy.model
    model._keep_in_fp32_modules_strict = {"norm"}  # pyright: ignore[reportAttributeAccessIssue]
    backend._weights = sharding.spread_weights(model, Topology(1), torch.float32)
    specs = backend.weight_specs()
    assert {name for name, (dtype, _) in specs.items() if dtype == torch.float32} == {n for n in specs if "norm" in n}


def half_logprobs(rank: int, world: int, folder: str) -> tuple[torch.Tensor, str, dict[str, torch.Tensor]]:
    """Log-probs of rows that every rank computes alike, the dtype between the layers, and the summed gradients."""
    mesh = Topology(world)
    backend = FsdpBackend(backend_config(folder, topology=mesh, mixed_precision=True, recompute="full"), rank, world)
    dtypes: list[torch.dtype] = []
    last = backend._policy.model.model.layers[-1]  # pyright: ignore[reportAttributeAccessIssue]
    last.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    rows = random_rows(4, 6)
    values = logprobs_of(backend, micro_batch(rows))
    backend.begin_step()
    backend.accumulate([micro_batch(rows if rank == 0 else [])], 1)
    return values, str(dtypes[0]), summed_gradients(backend)


@pytest.mark.processes
def test_mixed_precision_is_the_same_on_one_rank_as_on_two(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    one = half_logprobs(0, 1, folder)
    two = run_on_ranks(half_logprobs, 2, tmp_path / "run", folder)[0]
    assert one[1] == two[1] == "torch.bfloat16"
    assert torch.equal(one[0], two[0])
    assert one[2].keys() == two[2].keys()
    for name, gradient in one[2].items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, two[2][name], rtol=1e-2, atol=1e-5)
