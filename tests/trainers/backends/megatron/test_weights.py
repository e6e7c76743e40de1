"""Tests that weights survive the way to Megatron and back for every split, and that files are read by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from headrace.tests.trainers.backends.backend_ranks import TINY, save_tiny_model, save_tiny_moe
from headrace.tests.trainers.backends.families import save_family
from headrace.trainers.backends import hf_model
from headrace.trainers.backends.hf_model import HfSource
from headrace.trainers.backends.megatron.pieces import spread_weight
from headrace.trainers.backends.megatron.weights import (
    Entry,
    Part,
    boxes,
    cut,
    entries_of,
    expert_range,
    split_of,
    unbox,
)

pytestmark = pytest.mark.megatron

CONFIG = Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
LATENT = DeepseekV3Config(
    **{**TINY, "num_key_value_heads": 4}, n_routed_experts=4, moe_intermediate_size=12, q_lora_rank=12, kv_lora_rank=8,
    qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5,
)  # fmt: skip
HIDDEN, VOCAB = CONFIG.hidden_size, CONFIG.vocab_size
ATTENTION, EXPERTS = "decoder.layers.0.self_attention.", "decoder.layers.1.mlp."
NAMES = (
    "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight",
    f"{ATTENTION}linear_qkv.weight", f"{ATTENTION}linear_proj.weight", f"{ATTENTION}q_layernorm.weight",
    f"{EXPERTS}router.weight", "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight", f"{EXPERTS}experts.weight1", f"{EXPERTS}experts.weight2",
)  # fmt: skip
LATENT_NAMES = (
    f"{ATTENTION}linear_q_down_proj.weight", f"{ATTENTION}linear_q_up_proj.weight",
    f"{ATTENTION}linear_kv_down_proj.weight", f"{ATTENTION}linear_kv_up_proj.weight",
    f"{EXPERTS}shared_experts.linear_fc1.weight", f"{EXPERTS}shared_experts.linear_fc2.weight",
    f"{EXPERTS}router.expert_bias", f"{EXPERTS}experts.weight1",
)  # fmt: skip
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {"heads": (CONFIG, NAMES), "latent": (LATENT, LATENT_NAMES)}
each_kind = pytest.mark.parametrize(("config", "names"), KINDS.values(), ids=KINDS.keys())
SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,),
    "q_proj.weight": (32, HIDDEN), "k_proj.weight": (16, HIDDEN), "v_proj.weight": (16, HIDDEN),
    "o_proj.weight": (HIDDEN, 32), "q_norm.weight": (8,), "gate.weight": (4, HIDDEN), "gate_proj.weight": (48, HIDDEN),
    "up_proj.weight": (48, HIDDEN), "down_proj.weight": (HIDDEN, 48), "gate_up_proj": (4, 24, HIDDEN),
    "down_proj": (4, HIDDEN, 12), "q_a_proj.weight": (12, HIDDEN), "q_b_proj.weight": (40, 12),
    "kv_a_proj_with_mqa.weight": (12, HIDDEN), "kv_b_proj.weight": (44, 8), "gate.e_score_correction_bias": (4,),
}  # fmt: skip


def whole_tensors(entry: Entry) -> list[torch.Tensor]:
    """Make a tensor of numbers that tell their original positions."""
    shapes = [SHAPES[_tail(name)] for name in entry.hf_names]
    return [torch.randperm(torch.Size(shape).numel()).view(shape).float() for shape in shapes]


def _tail(name: str) -> str:
    parts = name.split(".")
    return parts[-1] if parts[-1] in SHAPES else ".".join(parts[-2:])


PARTS = {
    "whole": [Part()],
    "tp2": [Part(tp, 2, tp, 2) for tp in range(2)],
    "ep2": [Part(ep=ep, num_ep=2) for ep in range(2)],
    "ep4": [Part(ep=ep, num_ep=4) for ep in range(4)],
    "ep2 of tp2": [Part(tp, 2, 0, 1, tp, 2) for tp in range(2)],
}


@each_kind
@pytest.mark.parametrize("members", PARTS.values(), ids=PARTS.keys())
def test_there_and_back(members: list[Part], config: Any, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    for entry in entries_of(names, 2, config):
        tensors = whole_tensors(entry)
        spans = [expert_range(config, part) if entry.is_expert else (None, None) for part in members]
        own = [[tensor[slice(*span)] for tensor in tensors] for span in spans]
        parts = [cut(entry, tensors, config, part) for tensors, part in zip(own, members, strict=True)]
        assert len({part.shape for part in parts}) == 1, "ranks' parts are alike in shape"
        first = members[0]
        order = sorted(zip(members, parts, strict=True), key=lambda item: (item[0].ep, item[0].etp))
        for place, (name, tensor) in enumerate(zip(entry.hf_names, tensors, strict=True)):
            sizes = (first.num_tp, first.num_etp, first.num_ep)
            split = split_of(name, config.model_type)
            assert split == entry.split
            weight = spread_weight(name, split, tuple(tensor.shape), torch.float32, 0, *sizes)
            back = torch.full_like(tensor, -1)
            for piece, (part, held) in zip(weight.pieces, order, strict=False):  # of those that have the same the first
                weight.place(back, piece).copy_(list(boxes(entry, held, config, part))[place])
            assert torch.equal(back, tensor), name


@each_kind
@pytest.mark.parametrize("members", PARTS.values(), ids=PARTS.keys())
def test_boxes_and_back(members: list[Part], config: Any, names: tuple[str, ...]) -> None:
    for entry in entries_of(names, 0, config):
        tensors = whole_tensors(entry)
        for part in members:
            span = expert_range(config, part) if entry.is_expert else (None, None)
            own = cut(entry, [tensor[slice(*span)] for tensor in tensors], config, part)
            again = unbox(entry, list(boxes(entry, own, config, part)), config, part)
            assert torch.equal(own, again), entry


def test_names_count_layers_of_the_whole_model() -> None:
    [entry] = entries_of([f"{ATTENTION}linear_qkv.weight"], 7, CONFIG)
    assert entry.hf_names == tuple(f"model.layers.7.self_attn.{part}_proj.weight" for part in "qkv")


def test_a_tied_output_layer_is_the_embedding() -> None:
    [entry] = entries_of(["output_layer.weight"], 0, Qwen3MoeConfig(**TINY, tie_word_embeddings=True))
    assert entry.hf_names == ("model.embed_tokens.weight",)


def test_an_unknown_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="'decoder.layers.0.mlp.linear_fc1.bias' has no counterpart"):
        entries_of(["decoder.layers.0.mlp.linear_fc1.bias"], 0, CONFIG)
    with pytest.raises(ValueError, match="HF tensor 'model.layers.0.self_attn.q_proj.bias' has no counterpart in .*'"):
        split_of("model.layers.0.self_attn.q_proj.bias", "qwen3_moe")


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


@pytest.mark.parametrize("sharded", [False, True])
def test_files_have_the_models_own_tensors(tmp_path: Path, sharded: bool) -> None:
    folder = save_tiny_moe(tmp_path / "experts")
    if sharded:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
        (tmp_path / "experts" / "model.safetensors").unlink()
        assert len(list((tmp_path / "experts").glob("*.safetensors"))) > 1
    source = HfSource(folder)
    for name, tensor in weights_of(folder).items():
        assert torch.equal(source.tensor(name), tensor), name
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(source.tensor(experts, 1, 3), weights_of(folder)[experts][1:3])


@pytest.mark.parametrize("sharded", [False, True])
def test_experts_that_are_stored_one_by_one_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    """Parts of stacked experts whose rows begin and end within the matrices that they are stacked of."""
    folder = save_tiny_moe(tmp_path)
    if sharded:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
        (tmp_path / "model.safetensors").unlink()
    weights, source, opened = weights_of(folder), HfSource(folder), []
    real = hf_model.safe_open
    monkeypatch.setattr(hf_model, "safe_open", lambda path, **options: opened.append(path) or real(path, **options))
    parts = [(slice(0, 4), slice(None), slice(None)), (slice(1, 3), slice(5, 17), slice(3, 11))]
    with source.reading():
        for name, tensor in ((name, tensor) for name, tensor in weights.items() if "experts" in name):
            for part in parts:
                ranges = tuple(slice(*rows.indices(size)) for rows, size in zip(part, tensor.shape, strict=True))
                found = torch.full_like(tensor[ranges], torch.nan)
                for place, values in source.pieces(name, ranges):
                    assert values.ndim == 2 and torch.isnan(found[place]).all(), "one matrix, and none twice"
                    found[place] = values
                assert torch.equal(found, tensor[ranges]), (name, part)
    assert len(opened) < 20 if sharded else len(opened) == 1, "a file is not opened for each of its tensors"
    del opened[:]
    assert torch.equal(source.tensor("model.norm.weight"), weights["model.norm.weight"]) and len(opened) == 1


def test_tensors_have_the_dtype_of_the_file(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "mixtral")
    assert any("block_sparse_moe.experts.3.w2" in name for name in HfSource(folder)._files), "names that change"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    source = HfSource(folder)
    for name, tensor in weights_of(folder).items():
        assert source.tensor(name).dtype == source.dtype(name) == torch.bfloat16
        assert source.has(name) and torch.equal(source.tensor(name).float(), tensor), name


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path: got .*nowhere.*expected a folder"):
        HfSource(str(tmp_path / "nowhere"))
    folder = save_tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match="has no tensor 'model.layers.9.mlp.down_proj.weight'"):
        HfSource(folder).tensor("model.layers.9.mlp.down_proj.weight")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"found neither model.safetensors nor model.safetensors.index.json"):
        HfSource(folder)


def test_an_empty_model_costs_no_memory(tmp_path: Path) -> None:
    model: Any = HfSource(save_tiny_model(tmp_path / "model")).empty_model()
    assert {param.device.type for param in model.parameters()} == {"meta"}
