"""Wraps a HF causal language model so that it maps rows to log-probs and computes logits only for wanted tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..config import Head
from ..row_layout import RowLayout
from ..vocab.logprobs import Entropy, VocabShard, token_logprobs


class CausalLM(nn.Module):
    """Wraps a HF model so that its forward returns log-probs instead of logits.

    The output layer and the log-probs are computed inside this one module, so that FSDP's hooks cover them.
    """

    def __init__(self, model: Any, head: Head) -> None:
        """Wrap `model`.

        `head` "selected" applies the output layer only to the positions whose log-probs are wanted. "full" lets the
        model compute all logits, for architectures that change them after the output layer; `check_head` detects such
        architectures.
        """
        super().__init__()
        self.model = model
        self.vocab: int | VocabShard = model.config.get_text_config().vocab_size
        """Size of the vocabulary of the output layer, or this rank's part of it under tensor parallelism."""
        self._selected = head == "selected"

    def forward(
        self, layout: RowLayout, temperature: float, entropy: Entropy = "off"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-probs and entropies of the layout's wanted tokens, as `token_logprobs` returns them. Wanted
        are tokens whose log-probs are computed."""
        places = {}
        if layout.position_ids is not None:
            places = {"position_ids": layout.position_ids, "row_ends": layout.ends, "longest_row": layout.longest}
        if self._selected:
            hidden = self.model.base_model(input_ids=layout.input_ids, use_cache=False, **places).last_hidden_state
            layer = self.model.get_output_embeddings()
            plain = layer.bias is None and isinstance(self.vocab, int)
            head = layer.weight if plain else layer
        else:
            hidden = self.model(input_ids=layout.input_ids, use_cache=False, **places).logits
            head = nn.Identity()
        hidden = hidden.flatten(0, 1)[layout.source]
        return token_logprobs(hidden, layout.targets, head, self.vocab, temperature=temperature, entropy=entropy)

    def layers(self) -> list[nn.Module]:
        """Return the decoder layers. Raises ValueError when the model's `_no_split_modules` does not name the class of
        its layers."""
        names = self.model._no_split_modules or ()
        found = [child for child in self.model.modules() if type(child).__name__ in names]
        if not found:
            raise ValueError(f"model.path: {type(self.model).__name__} does not name its layers, cannot be sharded")
        return found
