"""Checks that a model's last hidden states suffice for log-probs, without a forward pass of the whole model."""

from __future__ import annotations

import copy
import logging
from typing import Any, Literal

import torch
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from ..config import Head

TOKENS = 4
"""Number of tokens of the made-up row that the check uses."""
LARGE = 1000.0
"""Size of the made-up logits. The soft cap of Gemma 2 (30) would change logits of about 1 by less than a thousandth."""


_log = logging.getLogger(__name__)


def head_of(model: Any, wanted: Head) -> Literal["selected", "full"]:
    """Return how log-probs of a HF model are computed, see `TrainerConfig.head`.

    Raises ValueError when "selected" is wanted, but the model's logits are not its output layer applied to its last
    hidden state.
    """
    if wanted == "full" or _selects(model):
        return "full" if wanted == "full" else "selected"
    if wanted == "selected":
        raise ValueError(
            f"trainer.head: got 'selected', expected 'auto' or 'full' for {type(model).__name__}, whose logits are not "
            "its output layer applied to its last hidden state"
        )
    _log.info("trainer.head: %s computes all logits, because it changes them", type(model).__name__)
    return "full"


def _selects(model: Any) -> bool:
    """Return whether a HF model's logits are its output layer applied to its last hidden state. A model whose code does
    not run with what the check makes up counts as another formula."""
    try:
        return _logits_are_those_of_the_head(model)
    except Exception as error:  # This is code of the model's authors.
        _log.debug("trainer.head: %s was not understood: %r", type(model).__name__, error)
        return False


@torch.no_grad()
def _logits_are_those_of_the_head(model: Any) -> bool:
    """Run the model's own forward with made-up hidden states and a small made-up output layer.

    The model itself may therefore be on the meta device. The logits are large, so that a soft cap changes them.
    """
    size = model.config.get_text_config().hidden_size
    tried = copy.copy(model)  # The copy shares the modules; some of them are then replaced in the copy only.
    tried._modules = dict(model._modules)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, TOKENS, size, generator=generator)
    head = nn.Linear(size, TOKENS)
    head.weight.copy_(LARGE * torch.randn(TOKENS, size, generator=generator) / size**0.5)
    if model.get_output_embeddings() is None or model.base_model_prefix not in tried._modules:
        return False
    tried._modules[model.base_model_prefix] = _HiddenStates(hidden)
    tried.set_output_embeddings(head)
    logits = tried(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False).logits
    return torch.allclose(logits.float(), head(hidden), rtol=1e-3, atol=1e-3)


class _HiddenStates(nn.Module):
    """Stand-in for the base model of a HF model. It returns the same hidden states for any input."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return _Output(last_hidden_state=self._hidden)  # pyright: ignore[reportArgumentType]


class _Output(MoeModelOutputWithPast):
    """Output of a base model, in which everything that some model reads and this one lacks is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
