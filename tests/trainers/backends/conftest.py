"""Provides the tiny models that several tests of the backends train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.tests.trainers.backends.backend_ranks import save_tiny_llama, save_tiny_model, save_tiny_moe
from headrace.tests.trainers.backends.families import save_megatron
from headrace.tests.trainers.backends.mesh_ranks import save_plain_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each tiny model, in which tests write their own files, too."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tied")
    save_tiny_model(folder / "untied", tied=False)
    save_tiny_moe(folder / "moe")
    save_tiny_llama(folder / "biased")
    save_plain_llama(folder / "llama")
    for name in ("shared", "latent"):
        save_megatron(folder / name)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(folder / "tied")
