"""Packs rows into one sequence of padded rows, or a context-parallel rank's part of it, for both backends.

Every row is padded to a multiple of `Topology.pad_multiple` tokens or, without packing, to the padded length of the
longest row. With context parallelism each row is cut into 2 * cp chunks, of which this rank computes two (see
`codecs.context_slices`). Padding follows its row, where causal attention hides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ....actors.train.topology import Place, Topology
from ....actors.train_backend import MicroBatch
from ....codecs.integers import exclusive_cumsum, round_up
from ....codecs.tokens.packed_rows import chunks
from ..vocab.allowed import Allowed
from .context_attention import AttentionPlan, plan_attention, runs
from .row_layout import to_device


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The part of a microbatch of N rows that one rank computes: S input tokens and T wanted tokens. A token is wanted
    if this rank computes its log-prob."""

    input_ids: torch.Tensor | None
    """Token ids: int64 `[1, S]`; None when this rank received no token ids."""
    positions: torch.Tensor
    """Position of each token in its row: int64 `[S]`."""
    attention: AttentionPlan
    """Plan that says which tokens may attend to which."""
    source: torch.Tensor
    """Positions of the tokens that predict the wanted tokens, among the rank's S input tokens: int64 `[T]`. A token is
    wanted if its log-prob is computed."""
    targets: torch.Tensor
    """Token ids of the T wanted tokens, whose log-probs are computed: int64 `[T]`."""
    row_ids: torch.Tensor
    """Row of each wanted token (one whose log-prob is computed): int64 `[T]`, 0..N-1, ascending."""
    row_tokens: torch.Tensor
    """Number of wanted tokens (those whose log-probs are computed) of each row on this rank: int64 `[N]`, on the
    CPU."""
    index: torch.Tensor
    """Position of each wanted token (one whose log-prob is computed) in this rank's packed columns: int64 `[T]`, on the
    CPU."""
    whole_index: torch.Tensor
    """Position of each wanted token (one whose log-prob is computed) in packed columns that hold whole rows: int64
    `[T]`."""
    routes: torch.Tensor | None = None
    """Routes of the S tokens in the layers of this stage, `[S, layers, k]`; missing at padding. None unless the pass
    replays routes."""
    owners: torch.Tensor | None = None
    """Row of each of the S tokens, int64 `[S]`; -1 at padding and at the last token of each row, which predicts
    nothing. None unless requested."""
    allowed: Allowed | None = None
    """Sets of tokens from which the wanted tokens were drawn; None if they were drawn from the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The C pieces of rows that one rank computes, ordered by row. Each row has one piece, or two with context
    parallelism."""

    rows: np.ndarray
    """Row of each piece: int64 `[C]`."""
    starts: np.ndarray
    """Position in the row at which each piece starts: int64 `[C]`."""
    sizes: np.ndarray
    """Number of tokens of each piece, including padding: int64 `[C]`."""

    @property
    def offsets(self) -> np.ndarray:
        """Position among the rank's S tokens at which each piece starts: int64 `[C]`."""
        return exclusive_cumsum(self.sizes)


def pack_rows(
    micro: MicroBatch,
    topology: Topology,
    place: Place,
    device: torch.device,
    *,
    packed: bool,
    routes: torch.Tensor | None = None,
    missing_route: int = 0,
    with_owners: bool = False,
) -> PackedRows:
    """Pack this rank's part of a microbatch into one sequence, the input of a model.

    routes: routes of the tokens of the batch, `[tokens, layers, k]`, or None. missing_route: value of every entry of a
    missing route. with_owners: true to fill `owners`.

    Columns may be on any device; positions are computed on the CPU. A microbatch without tokens gets one padding token,
    so that the rank takes part in the collectives. Raises ValueError when a row's first token is to be trained on, or
    when the columns do not have exactly this rank's tokens.
    """
    lengths = micro.lengths if micro.lengths.sum() else np.ones(1, np.int64)
    pieces, padded = _chunks_of(lengths, topology, place, packed=packed)
    positions = runs(pieces.starts, pieces.sizes)
    attention = plan_attention(padded, topology.cp, place.cp, device)
    sent = _Sent.of(micro.lengths, pieces)
    if "input_ids" not in micro.batch:
        nothing = torch.zeros(0, dtype=torch.int64)
        ids, wanted = None, _Wanted(*[nothing] * 5)
        counts = torch.zeros(len(micro.lengths), dtype=torch.int64)
    else:
        ids, wanted = _place_tokens(micro, sent, len(positions))
        counts = torch.bincount(wanted.row_ids, minlength=len(micro.lengths))
    return PackedRows(
        input_ids=None if ids is None else to_device(ids[None], device),
        positions=to_device(torch.from_numpy(positions), device),
        attention=attention,
        source=to_device(wanted.source, device),
        targets=to_device(wanted.targets, device),
        row_ids=to_device(wanted.row_ids, device),
        row_tokens=counts,
        index=wanted.index,
        whole_index=to_device(wanted.whole_index, device),
        routes=None
        if routes is None
        else to_device(sent.place("routes", routes, len(positions), missing_route), device),
        owners=to_device(sent.owners(micro.lengths, len(positions)), device) if with_owners else None,
        allowed=Allowed.of(
            micro.batch, int(micro.lengths.sum()), wanted.whole_index, wanted.targets, partial(to_device, device=device)
        ),
    )


def _chunks_of(lengths: np.ndarray, topology: Topology, place: Place, *, packed: bool) -> tuple[_Chunks, np.ndarray]:
    """Return this rank's pieces of rows with `lengths` tokens, and each row's padded length (int64 `[N]`)."""
    multiple = topology.pad_multiple
    padded = round_up(lengths, multiple)
    if not packed:
        padded = np.full_like(padded, padded.max())
    rows = np.arange(len(lengths))
    if topology.cp == 1:
        return _Chunks(rows, np.zeros_like(padded), padded), padded
    starts, stops = chunks(lengths, multiple, topology.cp, place.cp)
    return _Chunks(np.repeat(rows, 2), starts.reshape(-1), (stops - starts).reshape(-1)), padded


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The fields of `PackedRows` that describe the wanted tokens, whose log-probs are computed. All are on the CPU."""

    source: torch.Tensor
    targets: torch.Tensor
    row_ids: torch.Tensor
    index: torch.Tensor
    whole_index: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Sent:
    """The tokens that this rank received, in the order of its columns. All fields are on the CPU.

    For a piece that covers the positions [a, b) of a row, the rank received the tokens at [a, b + 1). All but the last
    are inputs, and all but the first are predicted.
    """

    rows: torch.Tensor
    """Row of each token: int64 `[tokens]`."""
    position: torch.Tensor
    """Position of each token in its row: int64 `[tokens]`."""
    within: torch.Tensor
    """Position of each token in its piece: int64 `[tokens]`."""
    place_of: torch.Tensor
    """Position of each token among the rank's S input tokens, valid only for input tokens: int64 `[tokens]`."""
    own: torch.Tensor
    """True for the tokens that are inputs of this rank: bool `[tokens]`."""

    @staticmethod
    def of(lengths: np.ndarray, pieces: _Chunks) -> _Sent:
        ends = lengths[pieces.rows] if len(lengths) else np.zeros_like(pieces.rows)
        begins = np.minimum(pieces.starts, ends)
        stops = np.where(pieces.starts < ends, np.minimum(pieces.starts + pieces.sizes + 1, ends), ends)
        sent = stops - begins
        within = torch.from_numpy(runs(np.zeros_like(sent), sent))
        piece = torch.from_numpy(np.repeat(np.arange(len(sent)), sent))
        return _Sent(
            rows=torch.from_numpy(pieces.rows)[piece],
            position=torch.from_numpy(begins)[piece] + within,
            within=within,
            place_of=torch.from_numpy(pieces.offsets)[piece] + within,
            own=within < torch.from_numpy(pieces.sizes)[piece],
        )

    def owners(self, lengths: np.ndarray, size: int) -> torch.Tensor:
        """Return the row of each of the rank's `size` input tokens, int64 `[size]` on the CPU. It is -1 at padding and
        at the last token of each row. lengths: number of tokens of each whole row, int64 `[N]`."""
        last = torch.from_numpy(lengths)[self.rows] - 1
        return self.place("rows", self.rows.where(self.position < last, -1), size, -1)

    def place(self, what: str, column: torch.Tensor, size: int, padding: int) -> torch.Tensor:
        """Return a column's values `[tokens, ...]` at the rank's `size` input tokens, `[size, ...]` on the CPU.
        Elsewhere they are `padding`. what: plural noun for the values in the error message. Raises ValueError when the
        column does not have exactly the tokens of this rank's pieces."""
        if len(column) != len(self.own):
            raise ValueError(
                f"microbatch: got {len(column)} {what}, expected the {len(self.own)} of this rank's pieces"
            )
        placed = column.new_full((size, *column.shape[1:]), padding, device="cpu")
        placed[self.place_of[self.own]] = column.cpu()[self.own]
        return placed


def _place_tokens(micro: MicroBatch, sent: _Sent, size: int) -> tuple[torch.Tensor, _Wanted]:
    """Return the token ids, int64 `[S]` with 0 at padding, and the wanted tokens, whose log-probs are computed."""
    column = micro.batch.jagged("input_ids").values.cpu().long()
    ids = sent.place("token ids", column, size, 0)
    wanted = sent.position > 0
    if "response_mask" in micro.batch:
        marked = micro.batch.jagged("response_mask").values.cpu() != 0
        orphans = sent.rows[marked & ~wanted]
        if len(orphans):
            raise ValueError(f"response_mask: row {int(orphans[0])} marks its first token, expected a prompt before it")
        wanted = marked
    index = (wanted & (sent.within > 0)).nonzero().flatten()  # Another rank predicts the first token of a later piece.
    row_starts = torch.from_numpy(exclusive_cumsum(micro.lengths))
    rows = sent.rows[index]
    return ids, _Wanted(
        source=sent.place_of[index] - 1,
        targets=column[index],
        row_ids=rows,
        index=index,
        whole_index=row_starts[rows] + sent.position[index],
    )


def whole_counts(counts: torch.Tensor, cp: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Return the tokens of each of N rows, the sum of the context-parallel ranks' `counts`: int64 `[N]` on the CPU.
    Collective over `cp`."""
    if cp.size() == 1:
        return counts
    total = counts.to(device)
    dist.all_reduce(total, group=cp)
    return total.cpu()


def sum_rows(cp: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """Sum `values` `[N]` over the context-parallel ranks, differentiably, as `LossInputs.reduce_rows` requires.

    Collective over `cp`, including in backward.
    """
    summed = _SumRows.apply(values, cp)
    assert isinstance(summed, torch.Tensor)
    return summed


class _SumRows(torch.autograd.Function):
    """Sums values over ranks in forward, and gradients over ranks in backward.

    The gradients are summed because every rank's loss uses the sum and the losses of all ranks are added up.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
