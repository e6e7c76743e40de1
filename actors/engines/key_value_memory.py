"""Computes how much memory the keys and values of a sequence take in an engine, from the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...codecs.integers import ceil_div, round_up

BLOCK = 128
"""Number of tokens in a block of vLLM's key-value cache on CPUs; blocks on GPUs are smaller. A sequence takes whole
blocks, and vLLM itself keeps one."""
CPU_BYTES = 256 << 20
CPU_SEQUENCES = 8
"""Number of sequences for which the key-value cache on CPUs has room, if memory allows."""
_OTHER_LAYERS = ("kv_lora_rank", "text_config", "is_encoder_decoder", "num_kv_shared_layers", "layers_block_type")
"""Keys of the configs of models whose layers do not all keep the keys and values of every token."""
_OTHER_PREFIXES = ("mamba", "ssm", "linear_", "attn_layer")


def token_bytes(model: Mapping[str, Any], *, value_bytes: int, tp: int) -> int | None:
    """Return the number of bytes that the keys and values of one token take in each process of an engine. Returns None
    for a model whose layers do not all attend to all earlier tokens.

    model: content of the model's config.json. value_bytes: bytes of one number of the cache. tp: tensor-parallel size
    of the engine.
    """
    if not {"hidden_size", "num_hidden_layers", "num_attention_heads"} <= set(model):
        return None
    if any(model.get(key) for key in _OTHER_LAYERS) or any(key.startswith(_OTHER_PREFIXES) for key in model):
        return None
    if model.get("sliding_window") and model.get("use_sliding_window", True):
        return None
    if set(model.get("layer_types") or ()) - {"full_attention"}:
        return None
    heads = model["num_attention_heads"]
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    kv_heads = ceil_div(model.get("num_key_value_heads") or heads, tp)
    return model["num_hidden_layers"] * 2 * kv_heads * head_dim * value_bytes


def cache_bytes(per_token: int, length: int, num_sequences: int = 1) -> int:
    """Return the size in bytes of a key-value cache for `num_sequences` sequences of `length` tokens. per_token: see
    `token_bytes`."""
    return per_token * (num_sequences * round_up(length, BLOCK) + BLOCK)


def check_cache(size_bytes: int, per_token: int | None, length: int) -> None:
    """Raise ValueError if `size_bytes` of key-value cache hold no sequence of `length` tokens. No engine starts with so
    little. per_token: see `token_bytes`; with None nothing is checked."""
    if per_token is None or size_bytes >= cache_bytes(per_token, length):
        return
    raise ValueError(
        f"rollout.kv_cache: got {size_bytes >> 20} MiB, expected auto or at least "
        f"{ceil_div(cache_bytes(per_token, length), 1 << 20)} MiB, for one sequence of {length} tokens of "
        f"{per_token:,} bytes each"
    )


def default_on_cpu(per_token: int | None, length: int, max_batch: int, available: int) -> int:
    """Return the size in bytes of an engine's key-value cache on CPUs if none is set.

    It has 256 MiB, or what CPU_SEQUENCES sequences of `length` tokens need if that is more, but then at most a quarter
    of the `available` bytes of memory, and never less than one sequence needs. per_token: see `token_bytes`; with None
    it has 256 MiB.
    """
    if per_token is None:
        return CPU_BYTES
    wanted = min(cache_bytes(per_token, length, min(max_batch, CPU_SEQUENCES)), available // 4)
    return max(CPU_BYTES, wanted, cache_bytes(per_token, length))
