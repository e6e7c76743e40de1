"""Packs rows for a Megatron model into one sequence of padded rows, or a context-parallel rank's part of it.

Every row is padded to a multiple of `Topology.pad_multiple` tokens or, without packing, to the padded length of the
longest row. With context parallelism each row is cut into 2 * cp chunks, of which this rank computes two (see
`codecs.context_slices`). Padding follows its row, where causal attention hides it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ....actors.protocols import MicroBatch
from ....codecs.context_slices import chunks
from ....codecs.gather import exclusive_cumsum
from ....codecs.integers import round_up
from ....dataplane.topology import Place, Topology
from ..row_layout import to_device
from .attention import AttentionPlan, plan_attention, runs


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The part of a microbatch of N rows that one rank computes: S input tokens, and T wanted tokens, whose log-probs
    it computes."""

    input_ids: torch.Tensor | None
    """Token ids: int64 `[1, S]`; None when this rank received no token ids."""
    positions: torch.Tensor
    """Position of each token in its row: int64 `[S]`."""
    attention: AttentionPlan
    """Plan that says which tokens may attend to which."""
    source: torch.Tensor
    """Positions among the rank's S input tokens of those that predict the wanted tokens (those whose log-probs are
    computed): int64 `[T]`."""
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


def pack_rows(micro: MicroBatch, topology: Topology, place: Place, device: torch.device, *, packed: bool) -> PackedRows:
    """Pack this rank's part of a microbatch into one sequence, the input of a Megatron model.

    Columns may be on any device; positions are computed on the CPU. A microbatch without tokens gets one padding token,
    so that the rank takes part in the collectives. Raises ValueError when a row's first token is to be trained on, or
    when the columns do not have exactly this rank's tokens.
    """
    lengths = micro.lengths if micro.lengths.sum() else np.ones(1, np.int64)
    pieces, padded = _chunks_of(lengths, topology, place, packed=packed)
    positions = runs(pieces.starts, pieces.sizes)
    attention = plan_attention(padded, topology.cp, place.cp, device)
    if "input_ids" not in micro.batch:
        nothing = torch.zeros(0, dtype=torch.int64)
        ids, wanted = None, _Wanted(*[nothing] * 5)
        counts = torch.zeros(len(micro.lengths), dtype=torch.int64)
    else:
        ids, wanted = _place_tokens(micro, pieces, len(positions))
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
    )


def _chunks_of(lengths: np.ndarray, topology: Topology, place: Place, *, packed: bool) -> tuple[_Chunks, np.ndarray]:
    """Return this rank's pieces of rows with `lengths` tokens, and the length of each row with its padding (int64
    `[N]`)."""
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


def _place_tokens(micro: MicroBatch, pieces: _Chunks, size: int) -> tuple[torch.Tensor, _Wanted]:
    """Return the token ids, int64 `[S]` with 0 at padding, and the wanted tokens, whose log-probs are computed.

    For a piece that covers the positions [a, b) of a row, the rank received the tokens at [a, b + 1). All but the last
    are inputs, and all but the first are predicted.
    """
    ends = micro.lengths[pieces.rows] if len(micro.lengths) else np.zeros_like(pieces.rows)
    begins = np.minimum(pieces.starts, ends)
    stops = np.where(pieces.starts < ends, np.minimum(pieces.starts + pieces.sizes + 1, ends), ends)
    sent = stops - begins
    column = micro.batch.jagged("input_ids").values.cpu().long()
    if len(column) != sent.sum():
        raise ValueError(f"microbatch: got {len(column)} token ids, expected the {sent.sum()} of this rank's pieces")
    within = torch.from_numpy(runs(np.zeros_like(sent), sent))
    piece = torch.from_numpy(np.repeat(np.arange(len(sent)), sent))
    offsets, sizes = torch.from_numpy(pieces.offsets)[piece], torch.from_numpy(pieces.sizes)[piece]
    position = torch.from_numpy(begins)[piece] + within
    ids = torch.zeros(size, dtype=torch.int64)
    own = within < sizes
    ids[(offsets + within)[own]] = column[own]
    rows = torch.from_numpy(pieces.rows)[piece]
    wanted = position > 0
    if "response_mask" in micro.batch:
        marked = micro.batch.jagged("response_mask").values.cpu() != 0
        orphans = rows[marked & ~wanted]
        if len(orphans):
            raise ValueError(f"response_mask: row {int(orphans[0])} marks its first token, expected a prompt before it")
        wanted = marked
    index = (wanted & (within > 0)).nonzero().flatten()  # another rank predicts the first token of a later piece
    row_starts = torch.from_numpy(exclusive_cumsum(micro.lengths))
    return ids, _Wanted(
        source=(offsets + within)[index] - 1,
        targets=column[index],
        row_ids=rows[index],
        index=index,
        whole_index=row_starts[rows[index]] + position[index],
    )
