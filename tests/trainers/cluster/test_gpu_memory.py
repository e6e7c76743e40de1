"""Whether engine and trainer fit a GPU together: estimates against measured runs, and the decision that follows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.trainers.cluster.gpu_memory import decide_roles, estimate, parameters
from headrace.trainers.cluster.places.placement import Host, Placement
from headrace.trainers.cluster.places.placement_plan import PlacementRequest, plan_placement
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config

GIB = 1 << 30
QWEN3 = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of Qwen3-0.6B."""


def config(folder: Path, switch_roles: str = "auto", model: dict[str, Any] | None = None, **sections: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(QWEN3 if model is None else model))
    chosen: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "rollout": {"engine": "vllm", "kv_cache": 32768},
        "trainer": {"mixed_precision": True, "tokens_per_microbatch": 16384},
        "resources": {"switch_roles": switch_roles},
        "validation": {"every": 0},
    }
    for name, keys in sections.items():
        chosen[name] = {**chosen.get(name, {}), **keys}
    return build_config(chosen)


def placed(chosen: Config, num_gpus: int) -> Placement:
    """Where a run stands on one host with so many GPUs."""
    return plan_placement(PlacementRequest.of(chosen), [Host("host", num_gpus, tuple(range(num_gpus)), 64)])


def test_the_estimate_adds_up_both_roles(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    assert parameters(chosen.model) == pytest.approx(596e6, rel=0.01)
    memory = estimate(chosen)
    assert memory is not None
    sides = sum(memory.trainer.values()) + sum(memory.engine.values())
    assert memory.resident == sides + memory.buckets + memory.contexts
    assert memory.taking_turns < memory.resident
    assert memory.host["offloaded state"] == sum(memory.trainer[part] for part in ("weights", "gradients", "optimizer"))


def test_the_tower_of_a_model_with_pictures_counts(tmp_path: Path) -> None:
    # One H200 ran Qwen2.5-VL-3B's shape out of memory, because its tower was not counted: the train worker alone took
    # 70.9 GiB.
    tower = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "hidden_act": "silu",
        "spatial_merge_size": 2, "out_hidden_size": 2048,
    }  # fmt: skip
    text = {**QWEN3, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_key_value_heads": 2}
    model = {"text_config": text, "vision_config": tower, "tie_word_embeddings": True}
    asked = {
        "model": model, "trainer": {"recompute": "full"},
        "rollout": {"kv_cache": "auto", "max_batch": 256, "max_new_tokens": 512},
        "data": {"max_prompt_tokens": 1024, "images": {"enabled": True}},
    }  # fmt: skip
    memory = estimate(config(tmp_path, **asked), 140 * GIB)
    assert memory is not None
    assert parameters(config(tmp_path, **asked).model) == pytest.approx(3754622976, rel=0.01)
    assert sum(memory.trainer.values()) / GIB == pytest.approx(70.9, rel=0.1)
    assert memory.engine["keys and values"] < 20 * GIB, "the engine takes what its batch can use, not half of the GPU"


def test_less_is_needed_with_recomputation_and_more_with_a_full_head(tmp_path: Path) -> None:
    full, lean = config(tmp_path, trainer={"head": "full"}), config(tmp_path, trainer={"recompute": "full"})
    plain = estimate(config(tmp_path))
    with_full, with_lean = estimate(full), estimate(lean)
    assert plain is not None and with_full is not None and with_lean is not None
    assert with_lean.trainer["activations"] < plain.trainer["activations"] / 10
    assert with_full.trainer["computation"] > 10 * plain.trainer["computation"]
    kept = estimate(config(tmp_path, trainer={"dp": 2, "reshard_after_forward": False}))
    assert kept is not None
    assert kept.trainer["copied weights"] / GIB == pytest.approx(2 * 0.596e9 / GIB, rel=0.01)
    gathered = estimate(config(tmp_path, trainer={"dp": 2}))
    assert gathered is not None and gathered.trainer["copied weights"] < kept.trainer["copied weights"]
    single = estimate(config(tmp_path, trainer={"mixed_precision": False}))
    assert single is not None and "copied weights" not in single.trainer
    half = estimate(config(tmp_path, trainer={"recompute": "full", "recompute_layers": 14}))
    assert half is not None
    assert half.trainer["activations"] == pytest.approx(
        (plain.trainer["activations"] + with_lean.trainer["activations"]) / 2, rel=0.05
    )


def test_a_rounded_base_takes_a_byte_or_less_per_weight(tmp_path: Path) -> None:
    """No rank shards it, other than the tables of tokens, which stay in bfloat16."""

    def weights(base: str, dp: int) -> float:
        chosen = config(tmp_path, trainer={"lora": {"rank": 8, "base": base}, "dp": dp})
        memory, params = estimate(chosen), parameters(chosen.model)
        assert memory is not None and params is not None
        return (memory.trainer["weights"] - params * 2 * 8 // 1024 * 4 // dp) / params

    assert [weights(base, 1) for base in ("model", "int8", "nf4")] == pytest.approx([2, 1.15, 0.778], abs=1e-3)
    assert [weights(base, 2) for base in ("model", "int8", "nf4")] == pytest.approx([1, 1.0, 0.628], abs=1e-3)


@pytest.mark.parametrize(
    ("gpu_gib", "takes_turns", "words"),
    [
        (141, False, r"share GPUs and both stay in memory, because together they need about \d+\.\d of 141\.0 GiB"),
        (80, True, r"share GPUs and take turns in memory, because .* of 80\.0 GiB on a GPU, and \d+\.\d GiB in turns"),
        (None, True, "take turns in memory, because the memory of the GPUs is not known"),
    ],
)
def test_memory_decides(tmp_path: Path, gpu_gib: int | None, takes_turns: bool, words: str) -> None:
    chosen = config(tmp_path)
    decision = decide_roles(chosen, placed(chosen, 1), None if gpu_gib is None else gpu_gib * GIB)
    assert decision.take_turns is takes_turns
    assert re.search(words, decision.why), decision.why
    applied = decision.applied_to(config(tmp_path).resources).switch_roles
    assert applied == ("always" if takes_turns else "never")


def test_where_turns_are_impossible_both_stay_and_it_says_why(tmp_path: Path) -> None:
    chosen = config(tmp_path, algorithm={"mode": "async"})
    decision = decide_roles(chosen, placed(chosen, 1), 80 * GIB)
    assert not decision.take_turns
    assert "both stay in memory although" in decision.why and "got algorithm.mode='async'" in decision.why


def test_a_model_of_unknown_size_takes_turns(tmp_path: Path) -> None:
    chosen = config(tmp_path, model={"num_experts": 4})
    decision = decide_roles(chosen, placed(chosen, 1), 80 * GIB)
    assert decision.take_turns and "the size of the model is not known" in decision.why


def test_nothing_is_decided_where_nothing_is_shared(tmp_path: Path) -> None:
    auto, always, never = (config(tmp_path, asked) for asked in ("auto", "always", "never"))
    for chosen, num_gpus in ((auto, 0), (auto, 2), (never, 1)):
        decision = decide_roles(chosen, placed(chosen, num_gpus), GIB)
        assert (decision.take_turns, decision.why) == (False, "")
    assert decide_roles(always, placed(always, 0), None).take_turns
    useless = decide_roles(always, placed(always, 2), GIB)
    assert not useless.take_turns and "has no effect" in useless.why


def test_an_engine_in_8_bits_takes_about_half(tmp_path: Path) -> None:
    def of(**rollout: Any) -> int:
        memory = estimate(config(tmp_path, rollout=rollout))
        assert memory is not None
        return memory.engine["weights"]

    assert of(quantization="fp8") == pytest.approx(0.575 * of(), rel=1e-3), "tables of tokens stay in bfloat16"


def test_keys_and_values_take_what_a_batch_can_use_and_no_more_than_the_engines_share(tmp_path: Path) -> None:
    def of(gpu_bytes: int | None, **rollout: Any) -> int:
        memory = estimate(config(tmp_path, rollout={"kv_cache": "auto", **rollout}), gpu_bytes)
        assert memory is not None
        return memory.engine["keys and values"]

    per_token, short = 112 << 10, {"max_batch": 64, "max_model_len": 1024}
    assert of(None, **short) == 1.25 * per_token * (64 * 1024 + 64) == of(80 * GIB, **short)
    assert 2 * of(None, **short, kv_cache_dtype="fp8") == of(None, **short)
    full = estimate(config(tmp_path, rollout={"kv_cache": "auto", "max_model_len": 8192}), 80 * GIB)
    assert full is not None and sum(full.engine.values()) == pytest.approx(0.45 * 80 * GIB, rel=1e-6)
    assert sum(full.engine_in_turns.values()) == pytest.approx(0.9 * 80 * GIB, rel=1e-6)
    assert of(None, vllm={"speculative_config": {"method": "ngram"}}) == 0, "a draft model has a cache, too"


def test_a_small_model_with_default_keys_stays_beside_its_engine(tmp_path: Path) -> None:
    """SmolLM2-135M on 80 GiB. Its engine once took 72 GiB for the keys and values of 512 sequences of 144 tokens, so
    that both roles took turns."""
    shape = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    chosen = config(
        tmp_path,
        model=shape,
        data={"max_prompt_tokens": 96},
        rollout={"kv_cache": "auto", "max_new_tokens": 48},
        trainer={"tokens_per_microbatch": 32768},
    )
    memory, decision = estimate(chosen, 80 * GIB), decide_roles(chosen, placed(chosen, 1), 80 * GIB)
    assert memory is not None and memory.engine["keys and values"] < 3 * GIB
    assert not decision.take_turns and "both stay in memory, because together they need" in decision.why
