"""Lays out the rows of a microbatch for a model, either padded side by side or packed into one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...codecs.batch import Batch


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
    """Position of each token in its own row: int64 `[1, S]`; None for padded rows."""
    ends: torch.Tensor | None
    """Boundaries of the packed rows: 0, then the end of each row, int32 `[rows + 1]`. Rows without a token in
    `input_ids` are left out. None for padded rows."""
    longest: int
    """Length in tokens of the longest row in `input_ids`."""
    source: torch.Tensor
    """Flat positions in `input_ids` of the tokens that predict the wanted tokens (those whose log-probs are computed):
    int64 `[T]`."""
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
    """Row of each token in the order of `input_ids`, flattened, int64 `[N * L or S]`; -1 at padding. None unless it is
    asked for."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to `device`. A copy from the host to a GPU goes through pinned memory, so that the host does not
    wait for what the GPU is doing, and the GPU gets the next microbatch before it has finished this one."""
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
    column = batch.jagged("input_ids")
    # Computed on the host even for columns on a GPU: positions depend on the values, 5 bytes per token.
    ids, lengths = column.values.cpu().long(), torch.tensor(column.lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(ids)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    wanted = _wanted(batch, rows, position)
    kept = (lengths - 1).clamp(min=0)
    starts = kept.cumsum(0) - kept
    width = max(int(kept.max()), 1) if len(kept) else 1
    flat = starts[rows] + position if packed else rows * width + position
    inside = position < kept[rows]
    shape = (1, max(int(kept.sum()), 1)) if packed else (max(len(lengths), 1), width)
    tokens = ids.new_zeros(shape)
    tokens.view(-1)[flat[inside]] = ids[inside]
    positions = ends = None
    if packed:
        positions = torch.zeros(shape, dtype=torch.int64)
        positions.view(-1)[flat[inside]] = position[inside]
        filled = kept[kept > 0]
        filled = filled if len(filled) else torch.ones(1, dtype=torch.int64)  # the one token of an empty microbatch
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), filled.cumsum(0)]).int()
    placed = None
    if routes is not None:
        placed = routes.new_full((tokens.numel(), *routes.shape[1:]), missing_route)
        placed[flat[inside]] = routes[inside]
    owners = None
    if with_owners:
        owners = rows.new_full((tokens.numel(),), -1)
        owners[flat[inside]] = rows[inside]
    index = wanted.nonzero().flatten()
    return RowLayout(
        input_ids=to_device(tokens, device),
        position_ids=None if positions is None else to_device(positions, device),
        ends=None if ends is None else to_device(ends, device),
        longest=width,
        source=to_device(flat[index] - 1, device),
        targets=to_device(ids[index], device),
        row_ids=to_device(rows[index], device),
        row_tokens=torch.bincount(rows[index], minlength=len(lengths)),
        index=index,
        routes=None if placed is None else to_device(placed, device),
        owners=None if owners is None else to_device(owners, device),
    )


def _wanted(batch: Batch, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    if "response_mask" not in batch:
        return position > 0
    wanted = batch.jagged("response_mask").values.cpu() != 0
    orphans = rows[wanted & (position == 0)]
    if len(orphans):
        raise ValueError(f"response_mask: row {int(orphans[0])} marks its first token, expected a prompt before it")
    return wanted
