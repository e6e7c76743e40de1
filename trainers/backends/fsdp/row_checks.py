"""Checks at the start of a run that a row's log-probs do not depend on the other rows of its microbatch.

Made-up rows run through the sharded model: as long as the run's rows can be where the model's config counts tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ....actors.protocols import ROLLOUT_SCHEMA
from ....codecs.batch import Batch, Jagged
from ..rows.row_layout import lay_out
from .causal_lm import CausalLM
from .sharding import give_back

TOKENS = 4
"""Number of tokens of a made-up row of a model whose config counts no tokens."""
COUNTS = (
    "attention_chunk_size", "chunk_size", "floor_scale", "original_max_position_embeddings", "sliding_window",
    "window_size",
)  # fmt: skip
"""Keys of a model's config, or of a section of it, with a number of tokens at which the model begins to compute
something else."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest mean difference between log-probs, absolute and relative, that counts as rounding: dtype of the computation
-> tolerance."""
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-3}
"""Largest difference between log-probs, absolute and relative, that experts may make by computing other numbers of
tokens together: dtype of the computation -> difference."""
NOISE = 4
"""The same as a multiple of the difference that later rows make, which no token of the row sees."""
OTHERS = 3
"""Number of other tokens that the rows beside the made-up row have in turn. The leak of a model with experts counts as
the smallest difference that they make, and rounding as the largest."""


@torch.no_grad()
def check_rows(
    module: CausalLM,
    device: torch.device,
    precision: AbstractContextManager[object],
    *,
    packed: bool,
    half: bool,
    longest: int,
    budget: int,
) -> None:
    """Check that a row's log-probs are the same alone and in a microbatch with other rows.

    For packed rows, the tokens of the rows before the checked row are also changed. This must not change a bit of its
    log-probs, so rows that see each other are detected however small the model's weights are. Only models with experts
    may round differently, because their experts then compute different numbers of tokens together. Padded rows are
    checked if the model's config counts tokens (see `COUNTS`), or if layers compute in fp8, so that all of these are
    called.

    `module` is already sharded. Collective over all ranks, which together hold one model. Raises ValueError on every
    rank if the check fails on one. precision: context in which the forward passes of `module` run. packed: layout of
    the rows. half: true when the module computes in bfloat16. longest: number of tokens that no row of the run exceeds;
    0 if it is not known. budget: largest number of tokens of a microbatch.
    """
    config = module.model.config.get_text_config().to_dict()
    own, beside = lengths(list(token_counts(config)), packed=packed, longest=longest, budget=budget)
    if not packed and beside == [own] and not module.fp8:
        return
    dtype = torch.bfloat16 if half else torch.float32
    run = _Rows(module, device, own, beside, packed)
    with precision:
        alone, near = run.alone(), run.beside()
        size = 1 + alone.abs().mean()
        differs = packed and not torch.equal(near, run.beside(changed=1))
        far, differs = on_any_rank((alone - near).abs().mean() > TOLERANCE[dtype] * size, differs, device=device)
        if differs and not far and any("expert" in name and value for name, value in config.items()):
            rounding = max(ROUNDING[dtype] * size, NOISE * max(run.changes(first=True)))
            [differs] = on_any_rank(min(run.changes()) > rounding, device=device)
    if far or differs:
        raise ValueError(_sentence(type(module.model).__name__, packed))


def token_counts(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of tokens in a model's config at which the model begins to compute something else."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from token_counts(value)
        elif name in COUNTS and isinstance(value, int) and not isinstance(value, bool):
            yield value


def lengths(counts: Sequence[int], *, packed: bool, longest: int, budget: int) -> tuple[int, list[int]]:
    """Return the number of tokens of the made-up row, and those of the rows beside it.

    Each packed row is longer than every number in `counts` that the run's rows can exceed. Together they fill a
    microbatch beyond every number that fits into it. With padded rows, only the row beside the made-up row is that
    long. The arguments are as in `check_rows`.
    """
    length = max([TOKENS, *(count + TOKENS for count in counts if count + TOKENS <= longest)])
    if not packed:
        return TOKENS, [length]
    before = max([TOKENS, *(count for count in counts if longest and count + length <= budget)])
    return length, [length] * (before // length) + [before % length] * (before % length > 1)


class _Rows:
    """A made-up row and the rows beside it, and their log-probs in several microbatches."""

    def __init__(self, module: CausalLM, device: torch.device, own: int, beside: Sequence[int], packed: bool) -> None:
        """own: number of tokens of the row. beside: those of the rows beside it."""
        self._module, self._device, self._packed = module, device, packed
        self._vocabulary = module.model.config.get_text_config().vocab_size
        self._own, self._lengths = own, list(beside)

    def alone(self) -> torch.Tensor:
        """Return the row's log-probs in a microbatch without other rows, float32 `[own - 1]`. The first token has
        none."""
        return self._logprobs([self._row()], 0)

    def beside(self, *, first: bool = False, changed: int = 0) -> torch.Tensor:
        """Return the row's log-probs behind the other rows, or `first` before them. Each value of `changed` gives the
        other rows other tokens."""
        start = self._vocabulary // 3 + changed
        row, others = self._row(), [self._tokens(start, count) for count in self._lengths]
        return self._logprobs([row, *others] if first else [*others, row], 0 if first else len(others))

    def changes(self, *, first: bool = False) -> list[torch.Tensor]:
        """Return the largest difference of a log-prob that each change of the other rows makes. first: as in
        `beside`."""
        usual = self.beside(first=first)
        return [(self.beside(first=first, changed=1 + other) - usual).abs().max() for other in range(OTHERS)]

    def _row(self) -> np.ndarray:
        return self._tokens(self._vocabulary // 2, self._own)

    def _tokens(self, start: int, count: int) -> np.ndarray:
        return ((start + np.arange(count)) % self._vocabulary).astype(np.int32)

    def _logprobs(self, rows: Sequence[np.ndarray], index: int) -> torch.Tensor:
        """Return the log-probs of the row at `index`."""
        lengths = np.array([len(row) for row in rows], np.int64)
        column = Jagged(torch.from_numpy(np.concatenate(rows)), lengths)
        batch = Batch(ROLLOUT_SCHEMA.subset(("input_ids",)), len(rows), {"input_ids": column})
        values = self._module(lay_out(batch, self._device, packed=self._packed), 1.0).logprobs
        give_back(self._module)  # No backward pass needs the gathered weights.
        start = int((lengths[:index] - 1).sum())
        return values[start : start + len(rows[index]) - 1]


def on_any_rank(*flags: bool | torch.Tensor, device: torch.device) -> list[bool]:
    """Return for each flag whether it is true on any rank. Collective."""
    found = torch.tensor([float(flag) for flag in flags], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [value > 0 for value in found.tolist()]


def _sentence(name: str, packed: bool) -> str:
    if packed:
        return (
            f"trainer.packing: got 'packed', expected 'none' or 'dynamic' for {name}, whose rows affect each other "
            "when they are packed"
        )
    return f"model.path: got a {name}, whose log-probs depend on how long the other rows of a microbatch are"
