"""Makes what a model folder of a benchmark has beyond text: the config of a vision tower, and pictures of prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens of Qwen2.5-VL, which follow those of text in this order."""
PICTURES = "pictures"
"""Name of the folder of pictures in the model folder."""
PATCH, MERGE = 14, 2
"""Width of a patch in pixels, and width in patches of the square that one token of the text part stands for."""
_BLOCKS = 16
"""Number of coloured blocks along a side of a picture. Its file is then small, as that of a drawing is."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Dimensions of the vision tower of a Qwen2.5-VL."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    full_layers: tuple[int, ...]
    """Layers in which each patch sees all others; in the others it sees those of its window."""
    mrope: tuple[int, int, int]
    """Numbers of rotary frequencies of the text part for time, height and width."""


def vision_config(tower: TowerShape, text: Mapping[str, Any], tokens: int) -> PretrainedConfig:
    """Return the config of a Qwen2.5-VL. text: options of its text part. tokens: number of tokens of text."""
    from transformers import Qwen2_5_VLConfig

    start, end, image, video = range(tokens, tokens + len(SPECIALS))
    rope = {**text["rope_parameters"], "mrope_section": list(tower.mrope)}
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": tower.layers, "hidden_size": tower.hidden, "intermediate_size": tower.intermediate,
            "num_heads": tower.heads, "fullatt_block_indexes": list(tower.full_layers), "patch_size": PATCH,
            "spatial_merge_size": MERGE, "window_size": 8 * PATCH, "out_hidden_size": text["hidden_size"],
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=text["tie_word_embeddings"], dtype=text["dtype"],
    )  # fmt: skip


def picture_tokens(size: int) -> int:
    """Return the number of tokens that a picture of `size` x `size` pixels adds to its prompt; 0 for no picture."""
    return round(size / (PATCH * MERGE)) ** 2 + 2 if size else 0


def add_pictures(
    folder: Path, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Mapping[str, Any]], size: int, seed: int
) -> list[dict[str, Any]]:
    """Write a picture for each prompt and the settings of their processor, and add the special tokens.

    Returns the prompts with their pictures. size: width and height of the pictures in pixels.
    """
    import PIL.Image

    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE,
        "temporal_patch_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / PICTURES).mkdir(exist_ok=True)
    rng, shown = np.random.default_rng(seed), []
    start, end, image, _ = SPECIALS
    for number, prompt in enumerate(prompts):
        colours = PIL.Image.fromarray(rng.integers(0, 256, (_BLOCKS, _BLOCKS, 3), dtype=np.uint8))
        path = f"{PICTURES}/{number}.png"
        colours.resize((size, size), PIL.Image.Resampling.NEAREST).save(folder / path)
        shown.append({**prompt, "prompt": f"{start}{image}{end}{prompt['prompt']}", "images": [path]})
    return shown
