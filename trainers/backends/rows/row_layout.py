"""Lays out the rows of a microbatch, padded side by side or packed into one row, for the model and for the loss.

The inputs of the loss are restricted to the tokens that are trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ....actors.columns import ColumnConfig
from ....actors.engines.hf.pictures import Pictures
from ....actors.protocols import TOP_LOGPROBS
from ....actors.train_backend import MicroBatch
from ....codecs.batch import Batch
from ....codecs.integers import exclusive_cumsum
from ...losses.terms import LossInputs
from ..config import BackendConfig
from ..vocab.allowed import Allowed


def exactly(micros: Iterable[MicroBatch], count: int) -> Iterator[MicroBatch]:
    """Yield the first `count` microbatches. Raises ValueError if there are fewer, because the ranks would then make
    different collective calls."""
    source = iter(micros)
    for given in range(count):
        micro = next(source, None)
        if micro is None:
            raise ValueError(f"microbatches: got {given}, fewer than `count`={count}, expected `count` on every rank")
        yield micro


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The N rows of a microbatch as one tensor of token ids, and the T wanted tokens, whose log-probs are computed.

    The last token of each row is left out of `input_ids`, because it predicts nothing. Right-padded rows need no
    attention mask: under causal attention no token sees the padding to its right, and the outputs at the padding are
    never read. Without a mask, attention kernels stay on their fast path.
    """

    input_ids: torch.Tensor
    """Token ids: int64 `[N, L]` for padded rows, where L is one less than the length of the longest row, or int64 `[1,
    S]` for packed rows, which follow each other. There is at least one token, so that a rank without rows still takes
    part in the collectives."""
    position_ids: torch.Tensor | None
    """Position of each token in its own row: int64 `[1, S]`; None for padded rows. For a model whose pictures have
    positions in time, height and width it has these: int64 `[3, N, L]` for padded rows, or `[4, 1, S]` after the first
    ones for packed rows."""
    ends: torch.Tensor | None
    """Boundaries of the packed rows: 0, then the end of each row, int32 `[rows + 1]`. Rows without a token in
    `input_ids` are left out. None for padded rows."""
    longest: int
    """Length in tokens of the longest row in `input_ids`."""
    source: torch.Tensor
    """Flat positions in `input_ids` of the tokens that predict the wanted tokens: int64 `[T]`. A token is wanted if its
    log-prob is computed."""
    targets: torch.Tensor
    """Token ids of the T wanted tokens, whose log-probs are computed: int64 `[T]`."""
    row_ids: torch.Tensor
    """Row of each wanted token (one whose log-prob is computed): int64 `[T]`, 0..N-1, ascending."""
    row_tokens: torch.Tensor
    """Number of wanted tokens (those whose log-probs are computed) of each row: int64 `[N]`, on the CPU."""
    index: torch.Tensor
    """Position of each wanted token (one whose log-prob is computed) in the batch's packed columns: int64 `[T]`, on the
    CPU."""
    routes: torch.Tensor | None = None
    """Routes of the tokens in the order of `input_ids`, flattened, `[N * L or S, layers, k]`; missing at padding. None
    unless the pass replays routes."""
    owners: torch.Tensor | None = None
    """Row of each token in the order of `input_ids`, flattened, int64 `[N * L or S]`; -1 at padding. None unless
    requested."""
    plan: Any = None
    """`AttentionPlan` of rows that are split over context-parallel ranks; None for whole rows."""
    whole_index: torch.Tensor | None = None
    """Position of each wanted token in packed columns of whole rows, int64 `[T]`; None for whole rows, where it is
    `index`."""
    allowed: Allowed | None = None
    """Sets of tokens from which the wanted tokens were drawn; None if they were drawn from the whole vocabulary."""
    pictures: Pictures | None = None
    """Pictures of the rows; None if they have none."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to `device`. A copy from the host to a GPU goes through pinned memory, so that the host does not
    wait for the GPU, which gets the next microbatch before it has finished the current one."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def lay_out(
    batch: Batch,
    device: torch.device,
    *,
    packed: bool = False,
    routes: torch.Tensor | None = None,
    missing_route: int = 0,
    with_owners: bool = False,
) -> RowLayout:
    """Lay out the rows of a batch, which must have the column `input_ids`, as tensors on `device`.

    routes: routes of all tokens of the batch, `[tokens, layers, k]`, or None. missing_route: value of every entry of a
    missing route. with_owners: true to fill `owners`.

    The wanted tokens, whose log-probs are computed, are those with a nonzero `response_mask`. Without that column they
    are all tokens but the first of each row. Raises ValueError when the mask marks a row's first token, because nothing
    predicts it.
    """
    # Positions depend on the values (5 bytes per token) and are computed in numpy on the host, even for a GPU: torch
    # would wake its threads at each of these small operations, which took 0.1 s per microbatch on 32 cores.
    column = batch.jagged("input_ids")
    ids, lengths = column.values.cpu().numpy(), np.asarray(column.lengths, np.int64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(ids)) - np.repeat(exclusive_cumsum(lengths), lengths)
    kept = np.maximum(lengths - 1, 0)
    width = max(int(kept.max(initial=0)), 1)
    flat = position + (np.repeat(exclusive_cumsum(kept), lengths) if packed else rows * width)
    inside = position < np.repeat(kept, lengths)
    shape = (1, max(int(kept.sum()), 1)) if packed else (max(len(lengths), 1), width)

    def placed(values: np.ndarray, padding: int) -> torch.Tensor:
        """Return `values` of all tokens at their places in `input_ids`, flattened, on the device."""
        result = np.full((shape[0] * shape[1], *values.shape[1:]), padding, values.dtype)
        result[flat[inside]] = values[inside]
        return to_device(torch.from_numpy(result), device)

    positions = ends = None
    if packed:
        positions = placed(position, 0).view(shape)
        filled = kept[kept > 0] if kept.any() else np.ones(1, np.int64)  # An empty microbatch has one token.
        ends = to_device(torch.from_numpy(np.concatenate([[0], np.cumsum(filled)]).astype(np.int32)), device)
    index = np.flatnonzero(_wanted(batch, rows, position))

    def of_wanted(values: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(values[index].astype(np.int64)), device)

    return RowLayout(
        input_ids=placed(ids.astype(np.int64), 0).view(shape),
        position_ids=positions,
        ends=ends,
        longest=width,
        source=of_wanted(flat - 1),
        targets=of_wanted(ids),
        row_ids=of_wanted(rows),
        row_tokens=torch.from_numpy(np.bincount(rows[index], minlength=len(lengths))),
        index=torch.from_numpy(index),
        allowed=_allowed(batch, ids, index, device),
        routes=None if routes is None else placed(routes.cpu().numpy(), missing_route),
        owners=placed(rows, -1) if with_owners else None,
    )


def _allowed(batch: Batch, ids: np.ndarray, index: np.ndarray, device: torch.device) -> Allowed | None:
    wanted, targets = torch.from_numpy(index), torch.from_numpy(ids[index])
    return Allowed.of(batch, len(ids), wanted, targets, partial(to_device, device=device))


def _wanted(batch: Batch, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
    if "response_mask" not in batch:
        return position > 0
    wanted = batch.jagged("response_mask").values.cpu().numpy() != 0
    orphans = rows[wanted & (position == 0)]
    if len(orphans):
        raise ValueError(f"response_mask: row {orphans[0]} marks its first token, expected a prompt before it")
    return wanted


def loss_inputs(
    config: BackendConfig,
    micro: MicroBatch,
    *,
    index: torch.Tensor,
    row_ids: torch.Tensor,
    row_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    candidates: torch.Tensor | None,
    reduce_rows: Callable[[torch.Tensor], torch.Tensor] | None,
) -> LossInputs:
    """Build the `LossInputs` of a microbatch for its trained tokens.

    `index` has the positions of these tokens in the microbatch's columns (int64 `[T]`, on the CPU). The other arguments
    are as in `LossInputs`; `entropy` is None unless it is trained on, `row_tokens` may be on any device, and
    `candidates` is its `candidate_logprobs`. Raises ValueError naming a missing column.
    """
    device = logprobs.device

    def column(name: str, why: str) -> torch.Tensor:
        if name not in micro.batch:
            raise ValueError(f"microbatch: it has no {name!r}, which {why} needs; it has {', '.join(micro.batch)}")
        return to_device(micro.batch.jagged(name).values[index], device)

    loss = config.loss
    rollout = column("rollout_logprobs", "every step")
    if config.prev == "recompute" or config.prev == "fixed" and "prev_logprobs" in micro.batch:
        prev = column("prev_logprobs", f"prev = {config.prev!r}")
    else:
        prev = rollout if config.prev == "rollout" else logprobs.detach()
    teachers = config.distillation
    groups = None
    if loss.aggregation == "prompt":
        if micro.group_tokens is None:
            raise ValueError("microbatch: it has no group_tokens, which loss.aggregation = 'prompt' needs")
        groups = to_device(torch.from_numpy(micro.group_tokens), device)
    return LossInputs(
        logprobs=logprobs,
        prev_logprobs=prev,
        rollout_logprobs=rollout,
        ref_logprobs=column("ref_logprobs", "loss.kl_coef") if loss.kl_coef > 0 else None,
        advantages=to_device(torch.tensor(micro.advantages), device)[row_ids],
        row_ids=row_ids,
        row_tokens=to_device(row_tokens, device),
        group_tokens=groups,
        entropy=entropy,
        reduce_rows=reduce_rows,
        teacher_logprobs=column("teacher_logprobs", "distillation.teachers") if teachers.teachers else None,
        teacher_candidates=column(TOP_LOGPROBS, "distillation.kind = 'topk'") if teachers.top_k else None,
        candidate_logprobs=candidates,
        columns={own.name: _own_column(own, micro, index, device) for own in config.columns},
    )


def _own_column(own: ColumnConfig, micro: MicroBatch, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    if own.kind == "per_sample":
        return to_device(micro.batch.tensor(own.name), device)
    return to_device(micro.batch.jagged(own.name).values[index], device)
