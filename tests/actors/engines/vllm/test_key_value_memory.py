"""Memory for keys and values of sequences, against the figures that vLLM itself gave for the same models."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.actors.engines.vllm.options import cache_bytes, check_cache, default_on_cpu, most_on_gpu, token_bytes

QWEN3: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Of Qwen3-0.6B, whose sequence of 40960 tokens takes 4.38 GiB in bfloat16."""

SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}


def test_a_token_s_bytes_are_those_of_the_model_s_heads() -> None:
    per_token = token_bytes(QWEN3, value_bytes=2, tp=1)
    assert per_token == 112 << 10
    assert round(per_token * 40960 / 2**30, 2) == 4.38
    assert token_bytes(QWEN3, value_bytes=4, tp=2) == per_token
    assert token_bytes(QWEN3, value_bytes=2, tp=16) == per_token // 8, "each process has a head at least"
    without = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert token_bytes(without, value_bytes=4, tp=1) == 2 * 2 * 64 * 4


@pytest.mark.parametrize(
    "other",
    [
        {"kv_lora_rank": 512},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"linear_key_head_dim": 128},
        {"text_config": {"hidden_size": 64}},
    ],
)
def test_of_layers_of_other_kinds_nothing_is_claimed(other: dict[str, Any]) -> None:
    assert token_bytes({**QWEN3, **other}, value_bytes=2, tp=1) is None
    check_cache(1, None, 40960)
    assert default_on_cpu(None, 40960, 256, 1 << 40) == 256 << 20


def test_a_tower_keeps_no_keys_and_values() -> None:
    seeing = {"vision_config": {"hidden_size": 64}, "text_config": QWEN3, "hidden_size": None}
    assert token_bytes(seeing, value_bytes=2, tp=1) == token_bytes(QWEN3, value_bytes=2, tp=1)
    crossing = {**seeing, "text_config": {**QWEN3, "cross_attention_layers": [1]}}
    assert token_bytes(crossing, value_bytes=2, tp=1) is None


def test_a_sliding_window_that_is_not_used_changes_nothing() -> None:
    unused = {**QWEN3, "sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"] * 28}
    assert token_bytes(unused, value_bytes=2, tp=1) == 112 << 10


def test_a_cache_that_has_no_room_for_one_sequence_is_refused_with_the_size_it_needs() -> None:
    per_token, length = 112 << 10, 1300
    needed = cache_bytes(per_token, length)
    assert needed == per_token * (1408 + 128)
    check_cache(needed, per_token, length)
    with pytest.raises(ValueError, match=r"rollout.kv_cache: got 100 MiB, expected auto or at least 168 MiB, for one "):
        check_cache(100 << 20, per_token, length)


def test_on_a_cpu_the_cache_holds_a_few_sequences_but_takes_no_more_than_a_quarter_of_the_memory() -> None:
    per_token, length = 112 << 10, 4096
    assert default_on_cpu(1024, 512, 64, 1 << 40) == 256 << 20
    assert default_on_cpu(per_token, length, 64, 1 << 40) == cache_bytes(per_token, length, 8)
    assert default_on_cpu(per_token, length, 2, 1 << 40) == cache_bytes(per_token, length, 2)
    assert default_on_cpu(per_token, length, 64, 4 << 30) == 1 << 30
    assert default_on_cpu(per_token, length, 64, 1 << 30) == cache_bytes(per_token, length), "one sequence must fit"


def test_on_a_gpu_a_full_batch_of_the_longest_sequences_fits_and_one_sequence_always_does() -> None:
    per_token = token_bytes(SMOLLM2, value_bytes=2, tp=1)
    assert per_token == 23040
    for batch, length in ((512, 144), (1, 17)):
        most = most_on_gpu(per_token, length, batch, {})
        assert most is not None and most >= batch * length * per_token + 64 * per_token
    assert (most_on_gpu(per_token, 144, 512, {}) or 1 << 40) < 3 << 30
    for unknown in ((None, 144, {}), (per_token, 0, {}), (per_token, 144, {"speculative_config": {"method": "ngram"}})):
        assert most_on_gpu(*unknown[:2], 512, unknown[2]) is None
