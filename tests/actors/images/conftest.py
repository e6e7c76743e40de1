"""Fixtures of a tiny Qwen2.5-VL with its tokenizer and processor of pictures, made once per session."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.actors.engines.tokenizer import load_tokenizer
from headrace.actors.images.config import ImagesConfig
from headrace.actors.images.processor import PictureProcessor
from headrace.tests.actors.images import tiny_vision


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vision.write_folder(tmp_path_factory.mktemp("tiny-vision"))


@pytest.fixture(scope="session")
def vision_tokenizer(vision_folder: str) -> Any:
    return load_tokenizer(vision_folder)


@pytest.fixture(scope="session")
def processor(vision_folder: str, vision_tokenizer: Any) -> PictureProcessor:
    return PictureProcessor(ImagesConfig(enabled=True), vision_folder, vision_tokenizer)
