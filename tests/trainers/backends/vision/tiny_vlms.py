"""Writes tiny random models that take pictures, and makes rows with pictures for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from headrace.actors.train_backend import MicroBatch
from headrace.codecs.blobs import BlobRows, References
from headrace.codecs.jagged import pack
from headrace.codecs.schema import Field, Kind, Schema
from headrace.tests.trainers.backends.backend_ranks import COLUMNS, ReferenceTrainer, Row, micro_batch

IMAGE, VIDEO, START, END, TWIN = 39, 38, 37, 36, 35
"""Tokens of pictures. TWIN is an ordinary token, which can have the embedding of IMAGE."""
TEXT: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "out_hidden_size": 64,
}  # fmt: skip
SQUARE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN, "text_config": {**TEXT, "rope_parameters": MROPE}, "tie_word_embeddings": True,
        "vision_config": {**TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **QWEN, "text_config": {**TEXT, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        "vision_config": {**TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 4, "query_pre_attn_scalar": 16, "num_hidden_layers": 2,
                        "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": SQUARE, "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": START,
        "eoi_token_index": END,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": SQUARE, "image_token_id": IMAGE,
        "image_seq_length": 4, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Config of each model, by its `model_type`. Pictures have several windows, and more tokens than a sliding window."""
TOWERS = {"qwen2_5_vl": "model.visual.", "qwen3_vl": "model.visual.", "gemma3": "model.vision_tower.",
          "internvl": "model.vision_tower."}  # fmt: skip
"""Beginning of the names of the tower's weights."""


def save_vlm(folder: Path, name: str, *, twins: bool = False, **text: Any) -> str:
    """Write the random model `name` as a HF folder. Its weights are large, so that log-probs spread by about 1 nat.
    twins: whether TWIN has the embedding of IMAGE. text: values of the text's configuration that differ from those of
    MODELS."""
    made = MODELS[name]
    config = AutoConfig.for_model(name, **{**made, "text_config": {**made["text_config"], **text}})
    model: Any = AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            # Gemma multiplies embeddings by a root of their size: larger ones would make tokens predict themselves.
            param.copy_(noise * 0.15) if param.ndim >= 2 else param.add_(noise * 0.1)
            if "embed_tokens" in path and not name.startswith("gemma"):
                param.mul_(2)
            if twins and "embed_tokens" in path:
                param[TWIN] = param[IMAGE]
    model.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture as a processor prepares it."""

    parts: dict[str, torch.Tensor]
    num_tokens: int


def picture(name: str, seed: int, height: int, width: int) -> Picture:
    """Make a picture of `height` x `width` placeholders, whose pixels are random. Gemma's pictures have 4 each, and
    those of InternVL 4 in each of `height` tiles."""
    generator, patch = torch.Generator().manual_seed(seed), TOWER["patch_size"]
    if "qwen" not in name:
        tiles = height if name == "internvl" else 1
        return Picture({"pixel_values": torch.randn(tiles, 3, 16, 16, generator=generator)}, 4 * tiles)
    grid = torch.tensor([[1, 2 * height, 2 * width]])
    pixels = torch.randn(int(grid.prod()), 3 * 2 * patch * patch, generator=generator)
    return Picture({"pixel_values": pixels, "image_grid_thw": grid}, height * width)


@dataclass(frozen=True, eq=False)
class Shown:
    """Rows and the pictures of each."""

    rows: list[Row]
    pictures: list[list[Picture]]

    def micro(self, order: Sequence[int] | None = None, beside: Sequence[Picture] = ()) -> MicroBatch:
        """Return the rows as a microbatch in which each distinct picture occurs once. beside: pictures to which no row
        refers."""
        picked = range(len(self.rows)) if order is None else order
        listed = [self.pictures[index] for index in picked]
        of_id = {id(one): one for row in [*listed, beside] for one in row}
        names = list(of_id)
        first = self.pictures[0][0]
        parts = [Field(part, Kind.RAGGED, value.dtype, ndim=value.ndim) for part, value in first.parts.items()]
        schema = Schema([*parts, Field("num_tokens", Kind.PER_SAMPLE, torch.int32)])
        columns: dict[str, Any] = {part: [of_id[one].parts[part] for one in names] for part in first.parts}
        columns["num_tokens"] = torch.tensor([of_id[one].num_tokens for one in names], dtype=torch.int32)
        index = np.array([names.index(id(one)) for row in listed for one in row], np.int64)
        references = References(list(map(str, names)), index, np.array([len(row) for row in listed], np.int64))
        blobs = BlobRows(pack(schema, columns, len(names)), references)
        return replace(micro_batch([self.rows[index] for index in picked]), pictures=blobs)


def shown_rows(name: str) -> Shown:
    """Make two rows of a group with one picture, one with two pictures, and one without any.

    One of the two pictures is that of the group.
    """
    red, blue = picture(name, 1, 2, 3), picture(name, 2, 4, 2)
    pictures, rng = [[red], [red], [blue, red], []], np.random.default_rng(7)
    rows = []
    for index, own in enumerate(pictures):
        prompt = [int(rng.integers(3, 30))]
        for one in own:
            prompt += [START, *[IMAGE] * one.num_tokens, END, int(rng.integers(3, 30))]
        response = rng.integers(3, 30, 4 + index)
        ids = np.array([*prompt, *response], np.int32)
        mask = np.array([0] * len(prompt) + [1] * len(response), np.uint8)
        columns = {part: (rng.normal(-3.5, 0.1, len(ids)) * mask).astype(np.float32) for part in COLUMNS}
        rows.append(Row(ids, mask, columns, float(np.float32(rng.normal())), index // 2))
    return Shown(rows, pictures)


class PlainVlm(ReferenceTrainer):
    """The model as transformers computes it by itself, one row at a time, with its own positions."""

    def __init__(self, folder: str, shown: Shown, dtype: torch.dtype = torch.float32) -> None:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
        self._rows = shown.rows
        self._pictures = {row.ids.tobytes(): own for row, own in zip(shown.rows, shown.pictures, strict=True)}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of the summed loss of all rows, by the weights' names."""
        self.loss_sum(self._rows)[0].backward()
        return {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}

    def row_logprobs(self, row: Row, temperature: float = 1.3) -> torch.Tensor:
        ids = torch.from_numpy(row.ids).long()[None]
        logits = self.model(input_ids=ids, use_cache=False, **self._given(row, ids)).logits[0, :-1] / temperature
        picked = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        return torch.cat([torch.zeros(1), picked])

    def decoded(self, row: Row, temperature: float = 1.3) -> torch.Tensor:
        """Return the log-probs of the response as `generate` computes them, token by token, and 0 in the prompt."""
        self.model.base_model.rope_deltas = None  # Qwen's models would use that of the row before.
        start, ids = int(row.mask.argmax()), torch.from_numpy(row.ids).long()[None]
        output = self.model(input_ids=ids[:, :start], use_cache=True, **self._given(row, ids[:, :start]))
        found = [torch.zeros(start)]
        for at in range(start, ids.shape[1]):
            found.append(torch.log_softmax(output.logits[0, -1:] / temperature, -1)[:, ids[0, at]])
            output = self.model(input_ids=ids[:, at : at + 1], past_key_values=output.past_key_values, use_cache=True)
        return torch.cat(found)

    def _given(self, row: Row, ids: torch.Tensor) -> dict[str, Any]:
        own, given = self._pictures[row.ids.tobytes()], dict[str, Any]()
        if own:
            given = {part: torch.cat([one.parts[part] for one in own]) for part in own[0].parts}
            given["pixel_values"] = given["pixel_values"].to(self.model.dtype)
            if "image_grid_thw" in given:
                given["mm_token_type_ids"] = (ids == IMAGE).int()
            elif self.model.config.model_type == "gemma3":
                given["token_type_ids"] = (ids == IMAGE).int()
        return given
