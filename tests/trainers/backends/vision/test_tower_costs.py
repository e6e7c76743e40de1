"""Tests that the costs of pictures are those of the towers of known models."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.trainers.backends.vision.tower_costs import most_patches, patch_budget, pixels_of_token, tower_shape

QWEN: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "vision_config": {"depth": 32, "hidden_size": 1280, "spatial_merge_size": 2},
}
GEMMA: dict[str, Any] = {
    "mm_tokens_per_image": 256,
    "vision_config": {"hidden_size": 1152, "image_size": 896, "patch_size": 14, "num_hidden_layers": 27},
}
INTERN: dict[str, Any] = {
    "image_seq_length": 256,
    "vision_config": {"hidden_size": 1024, "image_size": [448, 448], "patch_size": [14, 14], "num_hidden_layers": 24},
}


@pytest.mark.parametrize(("model", "patches"), [(QWEN, 4.0), (GEMMA, 16.0), (INTERN, 4.0), ({}, 1.0)])
def test_patches_of_a_token(model: dict[str, Any], patches: float) -> None:
    found = patch_budget(5000, model)
    assert (found.patches_per_microbatch, found.patches_per_token) == (5000, patches)
    assert found.cost == (pytest.approx(1280**2 * 32 / (2048**2 * 36)) if model is QWEN else 0.0)


@pytest.mark.parametrize("family", ["Qwen2_5_VLConfig", "Qwen3VLConfig", "Gemma3Config", "InternVLConfig"])
def test_a_towers_parameters_are_nearly_those_of_transformers(family: str) -> None:
    import torch
    import transformers

    config = getattr(transformers, family)()
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    beside = model.num_parameters() - model.model.language_model.num_parameters()
    beside -= 0 if config.tie_word_embeddings else model.lm_head.weight.numel()
    sizes = config.to_dict()
    tower = tower_shape({**sizes["text_config"], **sizes})
    assert tower is not None and 0.9 < tower["parameters"] / beside < 1.05
    assert tower_shape(sizes["text_config"]) is None


def test_a_group_shares_its_pictures() -> None:
    budget = patch_budget(None, QWEN)
    assert most_patches(budget, 16384, 8, 1024) == 4 * (16384 // 8 + 1024)
    assert most_patches(patch_budget(5000, QWEN), 16384, 8, 1024) == 5000


@pytest.mark.parametrize(
    ("model", "pixels"),
    [
        ({"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}, 28 * 28 * 3 * 2),
        (GEMMA, 896 * 896 * 3 // 256),
        (INTERN, 448 * 448 * 3 // 256),
        ({}, 0),
    ],
)
def test_pixels_of_a_token(model: dict[str, Any], pixels: int) -> None:
    assert pixels_of_token(model) == pixels
