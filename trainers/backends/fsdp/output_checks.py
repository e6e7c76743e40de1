"""Checks that a model's last hidden states suffice for log-probs, and that packed rows do not affect each other.

Neither check needs a forward pass of the whole model on the host.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from ....actors.protocols import ROLLOUT_SCHEMA
from ....codecs.batch import Batch, Jagged
from ..row_layout import lay_out
from .causal_lm import CausalLM
from .sharding import give_back

TOKENS = 4
"""Number of tokens of the made-up row that the checks use."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest absolute and relative difference between log-probs that counts as rounding: dtype of the computation ->
tolerance."""


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


@torch.no_grad()
def check_packing(
    module: CausalLM, device: torch.device, precision: AbstractContextManager[object], *, half: bool
) -> None:
    """Check that rows packed into one sequence do not see each other. Otherwise the model would compute wrong
    log-probs.

    The log-probs of a row of four tokens must be the same alone and packed after a copy of itself. `module` is already
    sharded. Collective over all ranks, which together hold one model. Raises ValueError on every rank if the check
    fails on one. precision: context in which the forward passes of `module` run. half: true when the module computes in
    bfloat16.
    """
    tolerance = TOLERANCE[torch.bfloat16 if half else torch.float32]
    with precision:
        alone = _logprobs(module, device, 1)
        second = _logprobs(module, device, 2)[len(alone) :]
    close = torch.tensor(float(torch.allclose(alone, second, rtol=tolerance, atol=tolerance)), device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(close, op=dist.ReduceOp.MIN)
    if not close:
        raise ValueError(
            f"trainer.packing: got 'packed', expected 'none' or 'dynamic' for {type(module.model).__name__}, whose "
            "rows attend to each other when they are packed"
        )


def _logprobs(module: CausalLM, device: torch.device, rows: int) -> torch.Tensor:
    """Return the log-probs of `rows` identical rows that are packed into one sequence, float32 `[rows * 3]`.

    Each row has four tokens, and all but the first have a log-prob.
    """
    row = torch.arange(TOKENS, dtype=torch.int32) % module.model.config.get_text_config().vocab_size
    column = Jagged(row.repeat(rows), np.full(rows, TOKENS, np.int64))
    batch = Batch(ROLLOUT_SCHEMA.subset(("input_ids",)), rows, {"input_ids": column})
    values, _ = module(lay_out(batch, device, packed=True), 1.0)
    give_back(module)  # No backward pass needs the gathered weights.
    return values
