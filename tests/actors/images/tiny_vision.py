"""Writes the folder of a tiny Qwen2.5-VL without weights: configuration, tokenizer and processor of pictures."""

from __future__ import annotations

import io
from pathlib import Path

import PIL.Image
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PAD, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}"
    "{% if 'image' in p or p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_folder(folder: Path) -> str:
    """Write the folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["?", "<user>", "<assistant>", "<system>", "count", "squares", "a", "b", "c", *map(str, range(10))]
    specials = [START, END, PAD, VIDEO, "<end>"]
    vocabulary = {word: number for number, word in enumerate([*words, *specials])}
    whole = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    whole.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="?", eos_token="<end>", additional_special_tokens=specials[:-1]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112}).save_pretrained(folder)
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        "bos_token_id": None, "eos_token_id": vocabulary["<end>"],
    }  # fmt: skip
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=vocabulary[PAD],
        video_token_id=vocabulary[VIDEO],
        vision_start_token_id=vocabulary[START],
        vision_end_token_id=vocabulary[END],
    )
    config.save_pretrained(folder)
    return str(folder)


def draw(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """Return a picture of random pixels."""
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return PIL.Image.fromarray(pixels.numpy())


def encoded(image: PIL.Image.Image, kind: str = "PNG") -> bytes:
    """Return a picture as the content of a file."""
    target = io.BytesIO()
    image.save(target, format=kind)
    return target.getvalue()
