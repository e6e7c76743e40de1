"""Provides the mixture of experts that the tests of routes and balance share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.tests.trainers.backends.experts.routed_rows import save_moe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    save_moe(folder / "routed")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(folder / "routed")
