"""A model folder for the tests of checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.trainers.base_model.made_tokenizers import make_tokenizer
from headrace.trainers.base_model.prepare import TINY_QWEN3


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, which no check reads. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({**TINY_QWEN3, "model_type": "qwen3"}))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder
