"""Tests how rows are packed for Megatron and which tokens see which. All context-parallel ranks are simulated in one
process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.train.topology import Place, Topology
from headrace.tests.trainers.backends.backend_ranks import Row, micro_batch, random_rows
from headrace.tests.trainers.backends.mesh_ranks import sent
from headrace.trainers.backends.megatron.modules import PackedAttention
from headrace.trainers.backends.rows.context_attention import attend, plan_attention
from headrace.trainers.backends.rows.packed_rows import PackedRows, pack_rows

CPU = torch.device("cpu")


def packed(rows: list[Row], topology: Topology, place: Place, *, packing: bool = True) -> PackedRows:
    return pack_rows(sent(rows, topology, place), topology, place, CPU, packed=packing)


@pytest.mark.parametrize("topology", [Topology(1), Topology(1, tp=2), Topology(1, cp=2), Topology(1, tp=2, cp=3)])
def test_every_wanted_token_is_predicted_once(topology: Topology) -> None:
    rows = random_rows(1, 9)
    seen: list[tuple[int, int]] = []
    whole = np.concatenate([row.mask for row in rows]).nonzero()[0]
    ids = np.concatenate([row.ids for row in rows])
    for cp in range(topology.cp):
        here = packed(rows, topology, Place(0, cp=cp))
        assert here.input_ids is not None and here.input_ids.shape[1] % topology.tp == 0
        flat = here.input_ids[0]
        for source, target, row, index in zip(here.source, here.targets, here.row_ids, here.whole_index, strict=True):
            position = int(here.positions[source])
            assert flat[source] == rows[row].ids[position]
            assert target == rows[row].ids[position + 1] == ids[index]
            seen.append((int(row), int(index)))
        counted = torch.bincount(here.row_ids, minlength=len(rows))
        assert torch.equal(here.row_tokens, counted)
        assert torch.equal(here.row_ids, here.row_ids.sort().values)
    assert sorted(index for _, index in seen) == whole.tolist()


def test_unpacked_rows_are_all_as_long_as_the_longest() -> None:
    rows = random_rows(2, 5)
    here = packed(rows, Topology(1, tp=2), Place(0), packing=False)
    longest = -(-max(len(row.ids) for row in rows) // 2) * 2
    assert here.input_ids is not None and here.input_ids.shape == (1, 5 * longest)
    assert here.attention.reaches[0].query_sizes == (longest,) * 5


def test_nothing_is_one_row_of_padding() -> None:
    for topology in (Topology(1), Topology(1, tp=2, cp=2)):
        here = packed([], topology, Place(0))
        assert here.input_ids is not None and here.input_ids.shape == (1, topology.pad_multiple // topology.cp)
        assert len(here.targets) == len(here.row_tokens) == 0


def test_a_stage_in_the_middle_has_positions_only() -> None:
    topology = Topology(1, pp=3)
    rows = random_rows(3, 4)
    here = packed(rows, topology, Place(0, pp=1))
    assert here.input_ids is None and len(here.targets) == 0
    assert len(here.positions) == sum(len(row.ids) for row in rows)


def test_a_marked_first_token_is_named() -> None:
    rows = random_rows(4, 3)
    rows[2].mask[0] = 1
    with pytest.raises(ValueError, match="response_mask: row 2 marks its first token"):
        packed(rows, Topology(1), Place(0))


def test_columns_of_another_rank_are_refused() -> None:
    topology = Topology(1, cp=2)
    with pytest.raises(ValueError, match=r"microbatch: got \d+ token ids, expected the \d+ of this rank's pieces"):
        pack_rows(micro_batch(random_rows(5, 4)), topology, Place(0), CPU, packed=True)


def whole_attention(rows: list[torch.Tensor], window: int | None = None) -> torch.Tensor:
    """Compute the attention of each row alone, from `[L, 3, 4, 8]`. Queries have four heads, keys and values two.

    window: number of keys that a query sees, counted back from its own; None for all.
    """
    out = []
    for row in rows:
        back = torch.arange(len(row))[:, None] - torch.arange(len(row))
        seen = (back >= 0) & (back < (window or len(row)))
        q, k, v = row[:, 0], row[:, 1, :2], row[:, 2, :2]
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


@settings(max_examples=25)
@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    st.none() | st.integers(1, 9),
)
def test_all_context_ranks_together_attend_as_whole_rows_do(cp: int, units: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    step = 2 * cp if cp > 1 else 1
    padded = np.array(units) * step
    rows = [torch.randn(size, 3, 4, 8) for size in padded if size]
    order = [torch.cat([_own(row, cp, rank) for row in rows]) for rank in range(cp)]
    gathered = torch.cat(order)
    expected = whole_attention(rows, window)
    places = torch.arange(len(expected)).split([len(row) for row in rows])
    for rank in range(cp):
        q = order[rank][:, 0]
        got = torch.empty(len(q), 4, 8)
        for reach in plan_attention(padded, cp, rank, CPU).reaches:
            queries = slice(None) if reach.queries is None else reach.queries
            keys = slice(None) if reach.keys is None else reach.keys
            part = attend(q[queries], gathered[keys, 1, :2], gathered[keys, 2, :2], reach, 8**-0.5, window)
            got[queries] = part
        wanted = expected[torch.cat([_own(place, cp, rank) for place in places])]
        torch.testing.assert_close(got, wanted)


def _own(row: torch.Tensor, cp: int, rank: int) -> torch.Tensor:
    if cp == 1:
        return row
    parts = row.chunk(2 * cp)
    return torch.cat([parts[rank], parts[2 * cp - 1 - rank]])


@pytest.mark.parametrize(("layer", "window"), [(1, None), (2, 3)])
@pytest.mark.parametrize("width", [8, 5])
def test_a_layer_gets_its_own_shape_back(layer: int, window: int | None, width: int) -> None:
    """The second layer has a window. Narrow values give the first columns of wide ones."""
    config = SimpleNamespace(kv_channels=8, window_size=(2, 0), window_attn_skip_freq=[0, 1], softmax_type="vanilla")
    module = PackedAttention(config, layer, pg_collection=SimpleNamespace(cp=OneRank()))
    rows = [torch.randn(5, 3, 4, 8), torch.randn(3, 3, 4, 8)]
    flat = torch.cat(rows)
    plan = plan_attention(np.array([5, 3]), 1, 0, CPU)
    parts = (flat[:, None, 0], flat[:, None, 1, :2], flat[:, None, 2, :2, :width])
    wanted = whole_attention(rows, window)[..., :width].flatten(1)[:, None]
    torch.testing.assert_close(module(*parts, None, packed_seq_params=plan), wanted)
    torch.testing.assert_close(module(*(part[:, 0] for part in parts), None, packed_seq_params=plan), wanted)


class OneRank:
    """A stand-in for a process group of one rank."""

    def size(self) -> int:
        return 1
