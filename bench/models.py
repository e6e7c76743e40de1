"""Makes models for benchmarks without a download: their shapes, folders with random weights, and weights alone.

Engines that load a folder generate samples of random lengths, as in training. A model with random weights gives all
tokens about the same probability. Many tokens, spread over the vocabulary, are end tokens, so that the number of tokens
of a sample has a geometric distribution.

Only the functions that make a folder import transformers, because the processes of the weight benchmark start faster
without it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ..codecs.memory import flat_bytes
from .vision_models import TowerShape, add_pictures, vision_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a Qwen3 model, which is dense or has experts in every layer, or of a Qwen2.5-VL."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    """Number of query heads of each layer."""
    key_value_heads: int
    head_dim: int
    vocabulary: int
    """Number of rows of the embedding. It exceeds the number of the tokenizer's tokens."""
    tokens: int
    """Number of tokens of the tokenizer, special ones included."""
    positions: int
    """Largest number of tokens of a sequence that the model supports."""
    tied: bool = True
    """True if the output layer shares the weights of the embedding."""
    experts: int = 0
    """Number of experts of each layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    """Width of the gated MLP of an expert."""
    tower: TowerShape | None = None
    """Vision tower, which makes the model a Qwen2.5-VL; None for a model of text alone."""

    def options(self) -> dict[str, Any]:
        """Return the dimensions by their names in the model's Hugging Face configuration."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            **self._expert_options(),
        }

    def _expert_options(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_intermediate,
            "norm_topk_prob": True,
        }


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, vocabulary=1024, tokens=1000, positions=256),
    "135m": Shape(576, 1536, 30, 9, 3, 64, vocabulary=49152, tokens=49152, positions=8192),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, vocabulary=151936, tokens=151646, positions=40960),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128, vocabulary=151936, tokens=151646, positions=40960),
    "2g": Shape(2048, 6144, 28, 16, 8, 128, vocabulary=151936, tokens=151646, positions=2048, tied=False),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, vocabulary=151936, tokens=151646, positions=40960),
    "tiny-moe": Shape(
        64, 128, 2, 4, 2, 16, vocabulary=1024, tokens=1000, positions=256, tied=False,
        experts=8, experts_per_token=2, expert_intermediate=32,
    ),
    "tiny-vl": Shape(
        128, 128, 2, 4, 2, 32, vocabulary=1024, tokens=1000, positions=512,
        tower=TowerShape(2, 32, 64, 2, (1,), mrope=(4, 6, 6)),
    ),
    "vl-3b": Shape(
        2048, 11008, 36, 16, 2, 128, vocabulary=151936, tokens=151646, positions=128000,
        tower=TowerShape(32, 1280, 3420, 16, (7, 15, 23, 31), mrope=(16, 24, 24)),
    ),
    "30b-a3b": Shape(
        2048, 6144, 48, 32, 4, 128, vocabulary=151936, tokens=151646, positions=40960, tied=False,
        experts=128, experts_per_token=8, expert_intermediate=768,
    ),
}  # fmt: skip
"""Name of a size -> its shape. `135m` has the sizes of SmolLM2-135M. `0.6b`, `1.7b` and `4b` are the shapes of
Qwen3-0.6B, Qwen3-1.7B and Qwen3-4B; `vl-3b` is that of Qwen2.5-VL-3B; `2g` has 2.03 G parameters. `30b-a3b` is that of
Qwen3-30B-A3B; benchmarks use a few of its layers."""


PROMPTS = "prompts.jsonl"
"""Name of the file of prompts in the model folder."""
_COMPLETE = "complete"
_MAKE_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class FolderTask:
    """Contents of a model folder."""

    shape: Shape
    dtype: str
    """Name of the dtype of the weights on disk."""
    mean_tokens: int
    """Mean number of tokens of a sample, if no limit cut it."""
    prompt_tokens: tuple[int, int]
    """Smallest and largest number of tokens of a prompt."""
    num_prompts: int
    picture: int = 0
    """Width and height in pixels of the picture of each prompt; 0 for prompts without pictures."""
    seed: int = 0

    @property
    def num_ends(self) -> int:
        """Number of end tokens."""
        return max(1, round(self.shape.vocabulary / self.mean_tokens))


def make_folder(folder: Path, task: FolderTask, device: str) -> None:
    """Write the model folder in a separate process, so that no memory of `device` remains in use. A complete folder
    is left as it is.

    Raises RuntimeError when the process fails or takes longer than ten minutes.
    """
    if (folder / _COMPLETE).exists():
        return
    process = multiprocessing.get_context("spawn").Process(target=write_folder, args=(folder, task, device))
    process.start()
    try:
        process.join(_MAKE_TIMEOUT_S)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
    if process.exitcode != 0:
        raise RuntimeError(
            f"{folder}: the model was not made; the process that makes it ended with code {process.exitcode}"
        )


def write_folder(folder: Path, task: FolderTask, device: str) -> None:
    """Write weights, configuration, tokenizer and prompts into `folder`. device: device that draws the random
    weights."""
    from ..trainers.base_model.made_tokenizers import byte_level_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(task.shape.tokens)
    prompts = [{"prompt": text} for text in draw_prompts(tokenizer, task)]
    if task.shape.tower is not None:
        prompts = add_pictures(folder, tokenizer, prompts, task.picture, task.seed)
    tokenizer.save_pretrained(folder)
    lines = map(json.dumps, prompts)
    (folder / PROMPTS).write_text("".join(line + "\n" for line in lines))
    _write_model(folder, task, device)
    (folder / _COMPLETE).touch()


def end_tokens(task: FolderTask) -> list[int]:
    """Return the ids of the end tokens in ascending order. They are `num_ends` - 1 tokens at equal distances, and the
    tokenizer's last token, which is its own end token."""
    spacing = task.shape.tokens / task.num_ends
    return [*(int(spacing * number) for number in range(1, task.num_ends)), task.shape.tokens - 1]


def draw_prompts(tokenizer: PreTrainedTokenizerFast, task: FolderTask) -> list[str]:
    """Return texts of random words. Their numbers of tokens are drawn evenly between the task's bounds."""
    rng = random.Random(task.seed)
    words = [" " + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(2000)]
    # Every word begins with a space, and the tokenizer splits there, so that a text has the tokens of its words.
    sizes = [len(ids) for ids in tokenizer(words)["input_ids"]]
    longest, (least, most) = max(sizes), task.prompt_tokens
    prompts = []
    for _ in range(task.num_prompts):
        left, picked = rng.randint(min(least + longest, most), most), []
        while left >= longest:
            number = rng.randrange(len(words))
            picked.append(words[number])
            left -= sizes[number]
        prompts.append("".join(picked))
    return prompts


def _write_model(folder: Path, task: FolderTask, device: str) -> None:
    from transformers import Qwen3Config, Qwen3MoeConfig
    from transformers.utils.logging import disable_progress_bar

    from ..actors.engines.hf.model import auto_class

    end = task.shape.tokens - 1
    family = Qwen3MoeConfig if task.shape.experts else Qwen3Config
    options: dict[str, Any] = {
        **task.shape.options(), "pad_token_id": end - 2, "bos_token_id": end - 1, "eos_token_id": end,
        "dtype": task.dtype,
    }  # fmt: skip
    tower = task.shape.tower
    config = family(**options) if tower is None else vision_config(tower, options, task.shape.tokens)
    disable_progress_bar()
    torch.manual_seed(task.seed)
    with torch.device(device):
        model: Any = auto_class(config).from_config(config, dtype=getattr(torch, task.dtype))
    model.generation_config.eos_token_id = end_tokens(task)
    model.generation_config.pad_token_id = end - 2
    model.save_pretrained(folder)


def save_config(shape: Shape, folder: Path, dtype: str) -> None:
    """Write a model's folder without weights. It has a tokenizer of four words, because vLLM requires one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    family = Qwen3MoeConfig if shape.experts else Qwen3Config
    config = family(**shape.options(), pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=dtype)
    config.architectures = ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)


# ---------------- Benchmarks of weight transfer need only tensors of a model's shapes.


def _square(hidden: int, intermediate: int, layers: int, vocabulary: int) -> Shape:
    """Return a shape in which all four attention matrices are `hidden` x `hidden`."""
    heads = hidden // 64
    return Shape(
        hidden, intermediate, layers, heads, heads, 64, vocabulary, tokens=vocabulary, positions=2048, tied=False
    )


WEIGHT_SHAPES = {
    "tiny": _square(64, 128, 2, 512),
    "0.02B": _square(512, 1024, 6, 8192),
    "0.1B": _square(768, 2048, 12, 16_384),
    "0.5B": _square(1024, 4096, 24, 51_200),
    "1.7B": _square(2048, 6144, 28, 50_000),
    "4B": _square(2560, 9728, 36, 76_000),
    "8B": _square(4096, 12_288, 36, 76_000),
}
"""Name of a size, up to 8 billion parameters -> shape of the weights that `headrace bench weights` moves."""
_STRIDE_BYTES = 4096


def weight_shapes(size: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its Hugging Face name, in the model's order. size: key of WEIGHT_SHAPES."""
    shape = WEIGHT_SHAPES[size]
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
    """Make weights by repeating one megabyte of random bytes, which is the same in every process."""
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


def change_bytes(named: dict[str, torch.Tensor], version: int) -> None:
    """Set the first byte in every 4 KiB of every tensor to a value that depends on `version`, so that versions differ.
    The values repeat after 251 versions."""
    for tensor in named.values():
        flat = flat_bytes(tensor)
        flat[::_STRIDE_BYTES] = (version * 37) % 251


def digest_of(named: dict[str, torch.Tensor]) -> str:
    """Return one xxh3 digest over the names and bytes of all weights."""
    hasher = xxhash.xxh3_128()
    for name in sorted(named):
        hasher.update(name.encode())
        hasher.update(flat_bytes(named[name].cpu().contiguous()).numpy().data)
    return hasher.hexdigest()
