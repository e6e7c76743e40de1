"""Finds in a model's config.json what the pictures of rows cost, for the driver's plan of microbatches."""

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


def _number(size: Any) -> Any:
    """Return a size that some models give twice, as height and width, once."""
    return size[0] if isinstance(size, list) else size
