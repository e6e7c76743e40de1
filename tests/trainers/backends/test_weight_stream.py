"""Tests weights streamed from pieces on three ranks: their order and values, the memory they take, and early ends."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.tests.trainers.backends.backend_ranks import run_on_ranks
from headrace.tests.trainers.backends.live_bytes import LiveBytes
from headrace.trainers.backends import weight_stream
from headrace.trainers.backends.weight_stream import Cut, Piece, SpreadWeight, rank_regions, stream_weights

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
RANKS = 3


def rows(num: int, dim: int = 0) -> tuple[Piece, ...]:
    return tuple(Piece(rank, (Cut(dim, num, rank),)) for rank in range(num))


def squares() -> tuple[Piece, ...]:
    """Pieces of a weight whose columns are split over two ranks, the second half of them by rows over ranks 1 and 2."""
    left, right = Cut(1, 2, 0), Cut(1, 2, 1)
    return (Piece(0, (left,)), Piece(1, (right, Cut(0, 2, 0))), Piece(2, (right, Cut(0, 2, 1))))


KINDS: dict[str, tuple[tuple[int, ...], tuple[Piece, ...], tuple[int, ...]]] = {
    "rows": ((7, 5), rows(3), ()),
    "fewer rows than ranks": ((2, 3), rows(3), ()),
    "columns": ((4, 9), rows(3, 1), ()),
    "squares": ((5, 6), squares(), ()),
    "whole on rank 0": ((3, 3), (Piece(0),), ()),
    "whole on rank 2": ((11,), (Piece(2),), ()),
    "all but rank 0": ((6, 2), (Piece(1, (Cut(0, 2, 0),)), Piece(2, (Cut(0, 2, 1),))), ()),
    "gate and up": ((2, 12, 3), rows(3, 2), (2, 2, 6, 3)),
    "scalar": ((), (Piece(1),), ()),
}


def some_weights(seed: int) -> list[SpreadWeight]:
    rng = np.random.default_rng(seed)
    kinds = [list(KINDS)[index] for index in rng.permutation(np.repeat(np.arange(len(KINDS)), 3))]
    return [
        SpreadWeight(f"{index} {kind}", torch.bfloat16 if index % 3 else torch.int32, shape, pieces, boxed)
        for index, kind in enumerate(kinds)
        for shape, pieces, boxed in [KINDS[kind]]
    ]


def whole(weight: SpreadWeight) -> torch.Tensor:
    """Return the value of the weight of this name; float32 becomes bfloat16 without loss on the way."""
    start = int(weight.name.split()[0])
    count = torch.Size(weight.shape).numel()
    return (torch.arange(start, start + count) % 250).view(weight.shape).to(weight.dtype)


def own_pieces(rank: int) -> Any:
    def own(weight: SpreadWeight) -> torch.Tensor:
        [piece] = [piece for piece in weight.pieces if piece.rank == rank]
        found = weight.place(whole(weight), piece)
        return found.float() if weight.dtype.is_floating_point else found

    return own


def differing(weights: list[SpreadWeight], stream: Any, rank: int) -> list[str]:
    """Return the names of the weights that do not arrive as they should."""
    wrong = []
    for weight, (name, tensor) in zip(weights, stream, strict=True):
        expected = whole(weight) if rank == 0 else torch.empty(0, dtype=weight.dtype)
        if name != weight.name or tensor.dtype != weight.dtype or not torch.equal(tensor, expected):
            wrong.append(name)
    return wrong


def on_three_ranks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"wrong": []}
    own = own_pieces(rank)
    for seed, batch_bytes in itertools.product(range(4), (1, 100, 300, 1 << 20)):
        weight_stream.BATCH_BYTES = batch_bytes
        weights = some_weights(seed)
        found["wrong"] += differing(weights, stream_weights(weights, own, rank, CPU), rank)

    weights = some_weights(9)
    for stops, after in ((0, 1), (1, 2), (2, 20)):
        stream = stream_weights(weights, own, rank, CPU)
        if rank == stops:
            for _ in range(after):
                next(stream)
            stream.close()
        else:
            found["wrong"] += differing(weights, stream, rank)
        found["wrong"] += differing(weights, stream_weights(weights, own, rank, CPU), rank)

    large = [SpreadWeight(f"{index} large", torch.float32, (300, 300), rows(3, index % 2), ()) for index in range(9)]
    parts = {weight.name: own(weight).clone() for weight in large}
    with LiveBytes(parts.values()) as live:
        for _ in stream_weights(large, lambda weight: parts[weight.name], rank, CPU):
            pass
    found["peak"] = live.peak
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(on_three_ranks, RANKS, tmp_path_factory.mktemp("stream"))


def test_weights_come_whole_in_order_and_after_someone_stopped_early(ranks: list[dict[str, Any]]) -> None:
    assert [rank["wrong"] for rank in ranks] == [[], [], []]


def test_no_rank_holds_more_than_two_weights(ranks: list[dict[str, Any]]) -> None:
    nbytes = 4 * 300 * 300
    assert nbytes < ranks[0]["peak"] <= 2 * (nbytes + 64)
    assert ranks[1]["peak"] <= 2 * nbytes / RANKS, "pieces that are copied: columns are, to be sent in one"


def one_leaves(rank: int, world: int) -> str:
    told = ""
    if rank == 0:
        weights = [SpreadWeight(f"{index} rows", torch.float32, (8, 3), rows(world)) for index in range(5)]
        try:
            list(stream_weights(weights, own_pieces(0), rank, CPU))
        except RuntimeError as error:
            told = str(error)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # for `run_on_ranks` to end
    return told


def test_a_rank_that_leaves_is_told(tmp_path: Path) -> None:
    told = run_on_ranks(one_leaves, 2, tmp_path)[0]
    assert told.startswith("weights: 0 rows to 0 rows were not transferred between rank 0 and ranks [1] in ")


def test_one_rank_needs_no_process_group_and_makes_no_copies() -> None:
    weights = [
        SpreadWeight("0 a", torch.float32, (4, 4), (Piece(0),)),
        SpreadWeight("1 b", torch.float32, (), (Piece(0),)),
    ]
    live = {weight.name: whole(weight) for weight in weights}
    for name, tensor in stream_weights(weights, lambda weight: live[weight.name], 0, CPU):
        assert tensor.data_ptr() == live.pop(name).data_ptr()
    assert not live


def test_regions_name_what_each_rank_returns() -> None:
    """The region of a weight that is cut in another shape than its own is several regions."""
    weights = [replace(weight, copies=(0, 3)) for weight in some_weights(0)]
    regions = rank_regions(weights, 6)
    assert regions[:3] == regions[3:]
    for rank in range(3):
        found = {region.weight for region in regions[rank]}
        for weight in weights:
            if all(piece.rank != rank for piece in weight.pieces):
                assert weight.name not in found
                continue
            local = own_pieces(rank)(weight).contiguous()
            filled = torch.full_like(local, -1)
            for region in [region for region in regions[rank] if region.weight == weight.name]:
                box = tuple(slice(start, stop) for start, stop in region.box)
                values = whole(weight)[box]
                filled.as_strided(values.shape, region.strides, region.offset).copy_(values)
            assert filled.equal(local), weight.name
