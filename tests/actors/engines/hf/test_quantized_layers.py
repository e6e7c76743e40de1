"""Trainer and engines agree on the layers in 8 bits: those of the text part, without routers and the output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from headrace.actors.engines.hf.model import linear_layers
from headrace.actors.engines.hf.quantized_layers import quantization_of
from headrace.tests.actors.images.tiny_vision import write_folder

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {"experts.gate_up_proj", "experts.down_proj"}


def saved(folder: Path, config: PreTrainedConfig) -> str:
    config.save_pretrained(folder)
    return str(folder)


def kinds(path: str) -> set[str]:
    return {".".join(name.removesuffix(".weight").split(".")[-2:]) for name in quantization_of(path, "int8").names}


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path) -> None:
    attention = {f"self_attn.{part}_proj" for part in "qkvo"}
    assert kinds(saved(tmp_path / "a", Qwen3MoeConfig(**SIZES))) == attention | EXPERTS
    shared = {f"shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    more = saved(tmp_path / "b", Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=128))
    assert kinds(more) == attention | EXPERTS | shared, "not the gate of the shared expert either"


def test_routers_with_layers_inside_are_routers() -> None:
    attended = {"self_attention.experts.router.layer", "mlp.router.layer"}
    kinds: dict[str, tuple[dict[str, Any], set[str]]] = {
        "jetmoe": ({"num_local_experts": 16}, attended),
        "gemma4_text": (
            {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 64},
            {"router.proj"},
        ),
        "llama4_text": (
            {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
            {"feed_forward.router"},
        ),
        "hunyuan_v1_moe": ({"num_experts": 16, "moe_topk": 2}, {"mlp.gate.wg"}),
    }
    sizes = {name: size for name, size in SIZES.items() if "expert" not in name and name != "moe_intermediate_size"}
    for kind, (keys, routers) in kinds.items():
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **keys))
        left_out = linear_layers(model, with_routers=True).keys() - linear_layers(model).keys()
        assert {name.removeprefix("model.layers.0.") for name in left_out} == routers, kind


def test_what_reads_pictures_is_not_quantized(tmp_path: Path) -> None:
    names = quantization_of(write_folder(tmp_path), "int8").names
    assert len(names) == 2 * 7 and all(".language_model." in name for name in names)


def test_shapes_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", Qwen3MoeConfig(**SIZES))
    with pytest.raises(
        ValueError, match=r"got 'fp8_block', expected 'fp8' for .* 'model.layers.0.mlp.experts.*' has the"
    ):
        quantization_of(path, "fp8_block")
    transposed = saved(tmp_path / "b", GptOssConfig(**SIZES, num_local_experts=4))
    with pytest.raises(
        ValueError, match=r"expected 'none' for .* the experts 'model.layers.0.mlp.experts' are no stacked"
    ):
        quantization_of(transposed, "fp8")
