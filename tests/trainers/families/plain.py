"""Computes log-probs and gradients as transformers does: eager attention and experts, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.tests.trainers.backends.backend_ranks import COLUMNS, Row
from headrace.tests.trainers.families.tiny_models import CONTEXT, LENGTHS, VOCAB

NUM_ROWS = 8
LEAST_SPREAD = 0.5
"""Smallest standard deviation of the log-probs of the trained tokens, below which errors would not show."""


def rows_of(name: str) -> list[Row]:
    """Return rows of 5 to 22 tokens in two groups for the model `name`, or rows of CONTEXT tokens."""
    rng = np.random.default_rng(3)
    rows = []
    for index in range(NUM_ROWS):
        prompt, response = int(rng.integers(2, 12)), int(rng.integers(3, 12))
        if name in LENGTHS:
            response = CONTEXT - prompt
        rows.append(row_of(rng.integers(3, VOCAB, prompt + response), prompt, float(rng.normal()), index // 4))
    return rows


def row_of(ids: np.ndarray, prompt: int, advantage: float, group: int) -> Row:
    """Return a row whose first `prompt` tokens are not trained on, with log-probs that do not matter."""
    mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
    columns = {name: np.float32(-3) * mask for name in COLUMNS}
    return Row(ids.astype(np.int32), mask, columns, float(np.float32(advantage)), group)


def trained(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Return the log-probs of the trained tokens of `rows`. logprobs: those of all of their tokens."""
    return logprobs[torch.from_numpy(np.concatenate([row.mask for row in rows])).bool()]


class PlainModel:
    """The model of a HF folder, in one dtype."""

    def __init__(self, folder: str, dtype: torch.dtype = torch.float32, attention: str | None = "eager") -> None:
        """Load the model with the plainest code that transformers has for it. attention: its attention; None for the
        one that transformers chooses."""
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "experts_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    def logprobs(self, rows: Sequence[Row], *, cached: bool = False) -> torch.Tensor:
        """Return the log-probs of all tokens of `rows`, float `[T]`; those of first tokens are 0. cached: compute one
        token after the other, with a cache."""
        found = []
        for row in rows:
            ids = torch.from_numpy(row.ids).long()
            logits = (self._decoded(ids) if cached else self.model(input_ids=ids[None], use_cache=False).logits[0])[:-1]
            picked = torch.log_softmax(logits.to(self.model.dtype), -1).gather(-1, ids[1:, None])[:, 0]
            found.append(torch.cat([picked.new_zeros(1), picked]))
        return torch.cat(found)

    def _decoded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of one row, `[L, V]`, decoded one token after the other."""
        cache, logits = None, []
        for token in ids:
            output = self.model(input_ids=token[None, None], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0, 0])
        return torch.stack(logits)

    def gradients(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return the gradient of REINFORCE's loss: minus the mean of log-prob times advantage over the trained tokens.
        Weights that it does not depend on are left out."""
        self.model.zero_grad()
        tokens = sum(int(row.mask.sum()) for row in rows)
        for row in rows:
            (trained(self.logprobs([row]), [row]).sum() * (-row.advantage / tokens)).backward()
        return {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients, as one vector each, divided by that of `expected`.

    Weights that only `found` has count as they are. Raises KeyError when it lacks one of `expected`.
    """
    difference = sum(float((found[name].double() - value).square().sum()) for name, value in expected.items())
    difference += sum(float(value.square().sum()) for name, value in found.items() if name not in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5
