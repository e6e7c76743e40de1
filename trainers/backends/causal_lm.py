"""A HF causal language model from token ids to log-probs: padded rows in, logits only where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...codecs.batch import Batch

Head = Literal["selected", "full"]

LOGIT_ELEMENTS = 2**24
"""Float32 logits that exist at a time (64 MiB); more tokens go chunk by chunk, each computed again in backward."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Rows of a batch as right-padded tensors, and T of their tokens whose log-probs are wanted.

    There is no attention mask: under causal attention no token sees the padding to its right, and what stands at the
    padding itself is never read. This keeps attention kernels on their fast path.
    """

    input_ids: torch.Tensor
    """int64 `[N, L]`, L being one less than the longest row; at least `[1, 1]`, so that a rank without rows still takes
    part in the collectives."""
    source: torch.Tensor
    """int64 `[T]`: flat positions in `[N * L]` whose hidden state predicts the token."""
    targets: torch.Tensor
    """int64 `[T]`: the tokens."""
    row_ids: torch.Tensor
    """int64 `[T]`: 0..N-1, ascending."""
    row_tokens: torch.Tensor
    """int64 `[N]`, CPU: wanted tokens of each row."""
    index: torch.Tensor
    """int64 `[T]`, CPU: where they stand in the batch's packed columns."""


def lay_out(batch: Batch, device: torch.device) -> RowLayout:
    """Lay out a batch with `input_ids`, wanting the tokens that `response_mask` marks, or all but each row's first when
    the batch has no such field. Raises ValueError when a row's first token is marked: nothing predicts it."""
    column = batch.jagged("input_ids")
    ids, lengths = column.values.long(), torch.tensor(column.lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(ids)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    if "response_mask" in batch:
        wanted = batch.jagged("response_mask").values != 0
        orphans = rows[wanted & (position == 0)]
        if len(orphans):
            raise ValueError(f"response_mask: row {int(orphans[0])} marks its first token, expected a prompt before it")
    else:
        wanted = position > 0
    # One less than the longest row: a row's last token predicts nothing that is wanted.
    width = max(int(lengths.max()) - 1, 1) if len(lengths) else 1
    padded = ids.new_zeros(max(len(lengths), 1), width)
    flat = rows * width + position
    inside = position < width
    padded.view(-1)[flat[inside]] = ids[inside]
    index = wanted.nonzero().flatten()
    return RowLayout(
        input_ids=padded.to(device),
        source=(flat[index] - 1).to(device),
        targets=ids[index].to(device),
        row_ids=rows[index].to(device),
        row_tokens=torch.bincount(rows[index], minlength=len(lengths)),
        index=index,
    )


class CausalLM(nn.Module):
    """Wraps a HF model so that one forward, which is what FSDP hooks on to, ends in log-probs instead of logits."""

    def __init__(self, model: Any, head: Head) -> None:
        """`head` "selected" applies the output layer to the wanted positions only; "full" lets the model compute all
        logits, for architectures that do something to them behind that layer.

        Raises ValueError when "selected" would give other logits than the model itself.
        """
        super().__init__()
        self.model = model
        self._selected = head == "selected"
        if self._selected:
            self._check_head()

    def forward(
        self,
        input_ids: torch.Tensor,
        source: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log-probs float32 `[T]`, entropy of their distributions float32 `[T]` without grad, or None).

        Arguments as in `RowLayout`. Logits are divided by `temperature`.
        """
        if self._selected:
            hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            head = self.model.get_output_embeddings()
        else:
            hidden = self.model(input_ids=input_ids, use_cache=False).logits
            head = nn.Identity()
        hidden = hidden.flatten(0, 1)[source]
        rows = max(1, LOGIT_ELEMENTS // self.model.config.get_text_config().vocab_size)
        arguments = (head, temperature, with_entropy)
        if len(hidden) <= rows:
            return _token_logprobs(hidden, targets, *arguments)
        parts = [
            checkpoint(_token_logprobs, h, t, *arguments, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(4).reshape(1, 4) % self.model.config.get_text_config().vocab_size
        head = self.model.get_output_embeddings()
        own = self.model(input_ids=ids, use_cache=False).logits
        ours = None
        if head is not None:
            ours = head(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        if ours is None or not torch.allclose(own.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"trainer.head: 'selected' does not fit {type(self.model).__name__}, whose logits are not its output "
                "layer applied to its last hidden state; set it to 'full'"
            )


def _token_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():
        every = torch.log_softmax(logits, -1)
        return logprobs, -(every.exp() * every).sum(-1)
