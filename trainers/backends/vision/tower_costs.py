"""Finds in a model's config.json what its vision tower and the pictures of rows cost, for plans and for estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....actors.train.picture_plan import PatchBudget


def patch_budget(limit: int | None, model: Mapping[str, Any]) -> PatchBudget:
    """Return the limit on patches of a microbatch, and the cost of a patch relative to that of a token.

    The matrix products of a layer cost the square of its width, for a patch as for a token. Attention within a picture
    is left out: with 2,000 patches and a width of 1,280 it adds a quarter in layers that see the whole picture. limit:
    value of `trainer.patches_per_microbatch`. model: content of config.json; what it lacks costs nothing.
    """
    vision = model.get("vision_config") or {}
    width, depth = _number(vision.get("hidden_size")), vision.get("depth", vision.get("num_hidden_layers"))
    text_width, text_depth = model.get("hidden_size"), model.get("num_hidden_layers")
    cost = 0.0
    if width and depth and text_width and text_depth:
        cost = width**2 * depth / (text_width**2 * text_depth)
    side, patch = _number(vision.get("image_size")), _number(vision.get("patch_size"))
    features = model.get("mm_tokens_per_image", model.get("image_seq_length"))
    if merged := vision.get("spatial_merge_size"):
        return PatchBudget(limit, float(merged**2), cost)
    return PatchBudget(limit, (side // patch) ** 2 / features if side and patch and features else 1.0, cost)


def pixels_of_token(model: Mapping[str, Any]) -> int:
    """Return the number of values in the pixels of a picture for each of its tokens; 0 if config.json lacks the sizes.

    model: content of config.json.
    """
    vision = model.get("vision_config") or {}
    side, patch = _number(vision.get("image_size")), _number(vision.get("patch_size"))
    channels = vision.get("num_channels") or vision.get("in_channels") or 3
    features = model.get("mm_tokens_per_image", model.get("image_seq_length"))
    if patch and (merged := vision.get("spatial_merge_size")):
        return channels * vision.get("temporal_patch_size", 2) * (patch * merged) ** 2
    return channels * side**2 // features if side and features else 0


def tower_shape(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the sizes of a model's vision tower, by the names that a language model has for them in its config.json.

    `parameters` is their number, with those of the layers that turn patches into features. Returns None for a model
    without a tower, or whose config.json lacks the sizes. model: content of config.json.
    """
    vision = model.get("vision_config") or {}
    depth, width = vision.get("depth", vision.get("num_hidden_layers")), _number(vision.get("hidden_size"))
    inner = vision.get("intermediate_size")
    heads = vision.get("num_heads", vision.get("num_attention_heads"))
    if not (depth and width and inner and heads):
        return None
    matrices = 3 if vision.get("hidden_act", "silu") == "silu" else 2  # Only towers with this activation have gates.
    merged = width * vision.get("spatial_merge_size", 1) ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    features = vision.get("out_hidden_size") or model.get("hidden_size") or width
    return {
        "parameters": depth * (4 * width**2 + matrices * width * inner) + mergers * merged * (merged + features),
        "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads, "intermediate_size": inner,
    }  # fmt: skip


def most_patches(budget: PatchBudget, tokens: int, group_size: int, prompt_tokens: int) -> int:
    """Return about the largest number of patches of a microbatch of `tokens` tokens, whose rows are mostly pictures.

    The rows of a group share their pictures; one group more is counted, because a microbatch may begin within one.
    prompt_tokens: largest number of tokens of a prompt.
    """
    most = int(budget.patches_per_token * (tokens / group_size + prompt_tokens))
    return most if budget.patches_per_microbatch is None else min(most, budget.patches_per_microbatch)


def _number(size: Any) -> Any:
    """Return a size that some models give twice, as height and width, once."""
    return size[0] if isinstance(size, list) else size
