"""Tests of what `trainer.packing: auto` means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.model_split import resolved_packing

HALF: dict[str, Any] = {"mixed_precision": True}
QWEN: dict[str, Any] = {"model_type": "qwen3", "use_sliding_window": False}


@pytest.mark.parametrize(
    ("trainer", "model", "gpu", "expected"),
    [
        (HALF, QWEN, True, "packed"),
        ({**HALF, "backend": "megatron"}, QWEN, True, "packed"),
        (HALF, QWEN, False, "none"),
        ({}, QWEN, True, "none"),
        (HALF, {**QWEN, "use_sliding_window": True}, True, "none"),
        (HALF, {"model_type": "gpt2"}, True, "none"),
        (HALF, {}, True, "none"),
        ({"backend": "megatron", "cp": 2}, QWEN, False, "packed"),
        ({**HALF, "packing": "dynamic"}, QWEN, True, "dynamic"),
        ({"packing": "packed"}, {}, False, "packed"),
    ],
)
def test_auto_packs_where_attention_takes_packed_rows(
    trainer: dict[str, Any], model: dict[str, Any], gpu: bool, expected: str
) -> None:
    assert resolved_packing(TrainerConfig(**trainer), SimpleNamespace(**model), gpu=gpu) == expected
