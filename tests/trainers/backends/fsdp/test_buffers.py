"""Buffers of a model that is built on the meta device are those of `from_pretrained`, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.tests.trainers.backends.backend_ranks import TINY, backend_config, save_tiny_model
from headrace.tests.trainers.backends.families import FAMILIES, SCALED, save_family
from headrace.trainers.backends.fsdp import sharding
from headrace.trainers.backends.fsdp.backend import FsdpBackend


def differing(folder: str) -> list[str]:
    """Names of the backend's buffers that differ from those of transformers' own loading."""
    try:
        backend: Any = FsdpBackend(backend_config(folder, head="full", trains=False), 0, 1)
    except ValueError as error:
        if "attention implementation" in str(error):
            pytest.skip(str(error))
        raise
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_buffers())
    found = dict(backend._policy.model.named_buffers())
    assert list(found) == list(expected)
    return [name for name, value in expected.items() if not torch.equal(found[name].float(), value.float())]


def test_a_buffer_that_a_parent_module_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty_like

    def dirty(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        empty = plain(tensor, **options)
        return empty.fill_(float("nan")) if tensor.is_floating_point() else empty

    monkeypatch.setattr(torch, "empty_like", dirty)  # Memory that nobody writes shows.
    assert differing(save_family(tmp_path, "falcon_h1")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *SCALED])
def test_buffers_of_every_family(tmp_path: Path, name: str) -> None:
    assert differing(save_family(tmp_path, name)) == []


class Extended(LlamaForCausalLM):
    """A Llama with a buffer that its initialisation does not know."""

    extra = torch.zeros(2)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[0].register_buffer("extra", self.extra.clone(), persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.uint8])
def test_a_buffer_without_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    folder = save_tiny_model(tmp_path)
    monkeypatch.setattr(Extended, "extra", torch.zeros(2, dtype=dtype))

    def empty_model(self: Any, dtype: torch.dtype | None = None) -> nn.Module:
        with torch.device("meta"):
            return Extended(LlamaConfig(**TINY, tie_word_embeddings=True)).eval()

    monkeypatch.setattr(sharding.HfSource, "empty_model", empty_model)
    with pytest.raises(ValueError, match="got a Extended, which leaves its buffer 'model.layers.0.extra' without val"):
        FsdpBackend(backend_config(folder), 0, 1)
