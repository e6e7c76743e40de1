"""Trainer and engines agree on the layers in 8 bits: those of the text part, without routers and the output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

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
