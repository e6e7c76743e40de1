"""Checks that a model's last hidden states suffice for log-probs, without a forward pass of the whole model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

TOKENS = 4
"""Number of tokens of the made-up row that the check uses."""


@torch.no_grad()
def check_head(model: Any) -> None:
    """Check that a HF model's logits are its output layer applied to its last hidden state.

    The option `head` "selected" relies on this. The model's own forward runs with made-up hidden states and a small
    made-up output layer, so the model itself may be on the meta device. Raises ValueError when the logits differ.
    """
    size = model.config.get_text_config().hidden_size
    tried = copy.copy(model)  # The copy shares the modules; some of them are then replaced in the copy only.
    tried._modules = dict(model._modules)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, size, generator=generator)
    head = nn.Linear(size, TOKENS)
    head.weight.copy_(torch.randn(TOKENS, size, generator=generator) / size**0.5)
    logits = None
    if model.get_output_embeddings() is not None and model.base_model_prefix in tried._modules:
        tried._modules[model.base_model_prefix] = _HiddenStates(hidden)
        tried.set_output_embeddings(head)
        logits = tried(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False).logits
    if logits is None or not torch.allclose(logits.float(), head(hidden), rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"trainer.head: got 'selected', expected 'full' for {type(model).__name__}, whose logits are not its "
            "output layer applied to its last hidden state"
        )


class _HiddenStates(nn.Module):
    """Stand-in for the base model of a HF model. It returns the same hidden states for any input."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._hidden)  # pyright: ignore[reportArgumentType]
