"""Writes tiny GGUF files of Llama's shape with a byte-level tokenizer, as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from headrace.trainers.base_model.made_tokenizers import byte_level_tokenizer

NUM_TOKENS, HIDDEN, HEADS, LAYERS, WIDTH = 300, 64, 2, 1, 96


def write_gguf(path: Path, kind: str = "Q4_1", seed: int = 0, split: str = "default", begins: bool = False) -> None:
    """Write a model with random weights. kind: type of its matrices, such as Q4_1 or F16. split: name of the rule that
    cuts texts before they become tokens. begins: whether each text begins with a token."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(NUM_TOKENS)
    _add_tokenizer(writer, split)
    writer.add_add_bos_token(begins)
    draw = np.random.default_rng(seed)
    for name, shape in _shapes().items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        values = draw.normal(0, 0.05, shape).astype(np.float32)
        of_kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, of_kind), raw_dtype=of_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, split: str) -> None:
    tokenizer = byte_level_tokenizer(NUM_TOKENS)
    vocabulary_ids: dict[str, int] = tokenizer.get_vocab()
    vocabulary = sorted(vocabulary_ids.items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([token for token, _ in vocabulary])
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    merges = [" ".join((token[:-1], token[-1])) for token, _ in vocabulary if len(token) == 2]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocabulary_ids[str(tokenizer.eos_token)])
    writer.add_bos_token_id(vocabulary_ids[str(tokenizer.bos_token)])
    writer.add_pad_token_id(vocabulary_ids[str(tokenizer.pad_token)])


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (NUM_TOKENS, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {f"{block}{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {f"{block}ffn_{name}.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}ffn_down.weight"] = (HIDDEN, WIDTH)
    return shapes
