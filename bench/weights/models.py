"""Makes random weights in the shapes of models of 0.1 to 8 billion parameters, so that no model needs to be loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import xxhash

from ...codecs.memory import flat_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a dense decoder with Qwen3's layout."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int


SHAPES = {
    "tiny": ModelShape(64, 128, 2, 512),
    "0.1B": ModelShape(768, 2048, 12, 16_384),
    "0.5B": ModelShape(1024, 4096, 24, 51_200),
    "1.7B": ModelShape(2048, 6144, 28, 50_000),
    "4B": ModelShape(2560, 9728, 36, 76_000),
    "8B": ModelShape(4096, 12_288, 36, 76_000),
}
_STRIDE_BYTES = 4096


def weight_shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its Hugging Face name, in the model's order."""
    shape = SHAPES[size]
    hidden, width = shape.hidden, shape.intermediate
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    for layer in range(shape.layers):
        within = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden, hidden),
            "self_attn.v_proj": (hidden, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        named |= {f"model.layers.{layer}.{name}.weight": dims for name, dims in within.items()}
    return named | {"model.norm.weight": (hidden,), "lm_head.weight": (shape.vocabulary, hidden)}


def num_bytes(size: str, dtype: torch.dtype) -> int:
    """Return the number of bytes of all weights of a model."""
    return sum(math.prod(dims) for dims in weight_shapes(size).values()) * dtype.itemsize


def random_weights(size: str, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Make weights of random bytes, the same in every process, by repeating one megabyte of noise."""
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    named = {}
    for name, dims in weight_shapes(size).items():
        tensor = torch.empty(dims, dtype=dtype, device=device)
        flat = flat_bytes(tensor)
        for start in range(0, len(flat), len(noise)):
            piece = flat[start : start + len(noise)]
            piece.copy_(noise[: len(piece)])
        named[name] = tensor
    return named


def change(named: dict[str, torch.Tensor], version: int) -> None:
    """Set the first byte in every 4 KiB of every tensor to a value that depends on `version`, so that versions differ.
    The values repeat after 251 versions."""
    for tensor in named.values():
        flat = flat_bytes(tensor)
        flat[::_STRIDE_BYTES] = (version * 37) % 251


def digest(named: dict[str, torch.Tensor]) -> str:
    """Return one xxh3 digest over the names and bytes of all weights."""
    hasher = xxhash.xxh3_128()
    for name in sorted(named):
        hasher.update(name.encode())
        hasher.update(flat_bytes(named[name].cpu().contiguous()).numpy().data)
    return hasher.hexdigest()
