"""Makes the tables of docs/training/memory.md that say which models fit on how many GPUs, from the memory estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.actors.engines.vllm.options import token_bytes
from headrace.trainers.cluster.gpu_memory import USABLE, GpuMemory, ModelSize, estimate, size_of
from headrace.trainers.config.load import build_config

GIB = 1 << 30
GPUS, SIZES = (1, 2, 4, 8), (24, 80, 140)
"""Numbers of GPUs, and their memory in GiB: an RTX 4090, an H100, and an H200."""
LEAST_SAMPLES = 32
"""Smallest number of samples of the largest length for whose keys and values an engine must have room to count as
fitting."""
LONGEST = (320, 1024)
"""Largest numbers of tokens of a prompt and of its answer."""
MODELS = {
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 64, 49152, True),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151936, False),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128, 128256, False),
}
"""Name of a model -> its width, that of its MLPs, its layers, heads, heads of keys and values, width of a head,
vocabulary, and whether one table serves as embedding and output layer."""
_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip


def what_fits_markdown() -> str:
    """Return one table for each size of a GPU."""
    parts = []
    for gib in SIZES:
        rows = [
            f"| {name} | "
            + " | ".join(f"{cell(name, gib, n, lora=False)} / {cell(name, gib, n, lora=True)}" for n in GPUS)
            for name in MODELS
        ]
        head = f"| GPUs of {gib} GiB | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in GPUS)
        parts.append("\n".join(f"{line} |" for line in (head, "| --- |" + " --- |" * (len(GPUS) - 1) + " ---", *rows)))
    return "\n\n".join(parts) + "\n"


def cell(name: str, gib: int, gpus: int, *, lora: bool) -> str:
    """Return `both`, `turns` or `no`, with a star if layers must be recomputed."""
    size = size_of(dict(zip(_KEYS, MODELS[name], strict=True)))
    for words in ("both", "turns"):
        for recompute, star in (("none", ""), ("full", "*")):
            for tp in (n for n in GPUS if n <= gpus):
                memory = _memory(size, gib, gpus, tp, recompute, lora=lora)
                if _fits(memory, size, gib, tp, turns=words == "turns"):
                    return words + star
    return "no"


def _memory(size: ModelSize, gib: int, gpus: int, tp: int, recompute: str, *, lora: bool) -> GpuMemory:
    sections: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "data": {"max_prompt_tokens": LONGEST[0]},
        "rollout": {"engine": "vllm", "max_new_tokens": LONGEST[1], "max_batch": 256, "tp": tp,
                    "num_engines": gpus // tp},
        "trainer": {
            "dp": gpus, "mixed_precision": True, "compile": True, "recompute": recompute,
            "lora": {"rank": 16 if lora else 0},
        },
        "validation": {"every": 0},
    }  # fmt: skip
    memory = estimate(build_config(sections), gib * GIB, size)
    assert memory is not None, "the size is known"
    return memory


def _fits(memory: GpuMemory, size: ModelSize, gib: int, tp: int, *, turns: bool) -> bool:
    engine = dict(memory.engine_in_turns if turns else memory.engine)
    per_token = token_bytes(size.shape, value_bytes=2, tp=tp)
    assert per_token is not None
    least = LEAST_SAMPLES * sum(LONGEST) * per_token
    if turns:  # An engine that finds less free memory takes a smaller cache.
        memory = replace(memory, engine_in_turns={**engine, "keys and values": least})
    peak = memory.taking_turns if turns else memory.resident
    return engine["keys and values"] >= least and peak <= USABLE * gib * GIB
