"""Computes the log-probs that a Hugging Face model gives to the tokens of rows, several rows in a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..protocol import RowScores

LOGITS = 2**26
"""Largest number of float32 logits of one pass (256 MiB), unless a single row has more."""


@torch.inference_mode()
def score_rows(
    model: Any, rows: Sequence[np.ndarray], wanted: Sequence[np.ndarray], top_k: int, temperature: float
) -> list[RowScores]:
    """Return the scores of the wanted tokens of each row, in order; see `Scorer.score`.

    Rows of similar length share a pass and are padded on the right, where no token of a row sees the padding.
    """
    vocab = model.get_input_embeddings().num_embeddings
    found = dict[int, RowScores]()
    for batch in _batches(rows, LOGITS // vocab):
        longest = max(len(rows[index]) for index in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        for place, index in enumerate(batch):
            ids[place, : len(rows[index])] = rows[index]
        logits = model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=False).logits
        for place, index in enumerate(batch):
            at = np.flatnonzero(wanted[index])
            every = torch.log_softmax(logits[place, torch.from_numpy(at - 1)].float() / temperature, -1)
            targets = torch.from_numpy(rows[index][at].astype(np.int64)).to(every.device)
            values, top = every.topk(top_k, dim=-1)
            parts = (every.gather(-1, targets[:, None])[:, 0], top.to(torch.int32), values)
            logprobs, top_ids, top_logprobs = (part.cpu().numpy() for part in parts)
            found[index] = (logprobs, top_ids, top_logprobs)
    return [found[index] for index in range(len(rows))]


def _batches(rows: Sequence[np.ndarray], most: int) -> Iterator[list[int]]:
    """Yield the indices of rows that share a pass of at most `most` tokens with padding, the longest rows first."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index])):
        if batch and (len(batch) + 1) * len(rows[batch[0]]) > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
