"""Tests of weight names and shapes: they equal a saved checkpoint's, and wrong ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headrace.actors.engines.vllm.weight_names import WeightNames

SMALL: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
EXPERTS: dict[str, Any] = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SMALL, tie_word_embeddings=False),
        Qwen3Config(**SMALL, tie_word_embeddings=True),
        LlamaConfig(**SMALL),
        Qwen3MoeConfig(**SMALL, **EXPERTS),
        Qwen3MoeConfig(**SMALL, **EXPERTS, mlp_only_layers=[0]),
        Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
        MixtralConfig(**SMALL, num_local_experts=3),
        Glm4MoeConfig(**SMALL, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1),
    ],
    ids=["dense", "tied", "llama", "moe", "mixed", "shared-expert", "mixtral", "biased"],
)
def test_weights_get_the_names_and_bytes_of_a_saved_checkpoint(config: PretrainedConfig, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = WeightNames(str(tmp_path))
    names.check(named)
    assert set(names.required) == set(named)
    named |= {name: value for name, value in model.named_buffers() if name in model.state_dict()}
    names.check(named)
    views = dict(names.checkpoint(named.items(), ("lm_head",)))
    saved = load_file(tmp_path / "model.safetensors")
    if config.tie_word_embeddings:
        assert views["lm_head.weight"] is named["model.embed_tokens.weight"]
        saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
    assert views.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(views[name], tensor), name
    storages = {tensor.untyped_storage().data_ptr() for tensor in named.values()}
    assert all(view.untyped_storage().data_ptr() in storages for view in views.values()), "a weight was copied"


def test_a_tied_weight_is_not_sent_to_a_module_that_the_served_model_lacks(tmp_path: Path) -> None:
    """vLLM's Gemma 2 has no `lm_head`, and refuses a weight of that name."""
    config = Qwen3Config(**SMALL, tie_word_embeddings=True)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sent = [name for name, _ in WeightNames(str(tmp_path)).checkpoint(named.items(), ("embed_tokens",))]
    assert sorted(sent) == sorted(named) and "lm_head.weight" not in sent


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    names = WeightNames(str(tmp_path))
    good = {name: parameter.detach() for name, parameter in model.named_parameters()}
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    for named, message in (
        ({n: t for n, t in good.items() if n != norm}, "parameter 'model.norm.weight' was not sent"),
        ({norm: good[norm]}, r"parameter .* \(and \d+ more\) was not sent"),
        ({**good, "model.norm.wieght": good[norm]}, "no parameter 'model.norm.wieght'; the nearest is 'model.norm"),
        ({**good, norm: good[norm][:-1]}, r"'model.norm.weight' has shape \(31,\), expected \(32,\)"),
        ({**good, norm: good[norm].int()}, "'model.norm.weight' has dtype torch.int32, expected a float"),
        ({**good, "lm_head.weight": good[embedding] + 1}, "tied in the model but differ as sent"),
    ):
        with pytest.raises(ValueError, match=message):
            names.check(named)
    names.check({**good, "lm_head.weight": good[embedding].clone()})
    names.check({n: t for n, t in good.items() if n != embedding} | {"lm_head.weight": good[embedding]})


def test_a_model_whose_checkpoint_is_laid_out_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, **EXPERTS)).save_pretrained(tmp_path)
    monkeypatch.setattr("headrace.actors.engines.hf.stored_names._stacks", lambda converter: False)
    with pytest.raises(ValueError, match="'qwen3_moe': its checkpoint names are not known .* use rollout.engine=hf"):
        WeightNames(str(tmp_path))
