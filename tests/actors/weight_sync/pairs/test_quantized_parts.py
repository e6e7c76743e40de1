"""Ranks that quantize their own rows send the bytes of the whole weight quantized; parts of rows are refused."""

from __future__ import annotations

import pytest
import torch

from headrace.actors.weight_sync.pairs.quantized_parts import QuantizedParts
from headrace.actors.weight_sync.plan.regions import Region, place
from headrace.codecs.weights.quantization import Quantization, Scheme
from headrace.tests.actors.weight_sync.pairs.test_rank_publisher import (
    WIRES,
    Wire,
    expect_equal,
    ranks,
    staged,
    weights,
)


@WIRES
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_ranks_send_the_bytes_of_the_whole_weights_quantized(scheme: Scheme, wire: Wire) -> None:
    plan = Quantization(scheme, frozenset({"a", "big"}))
    delta = not wire
    with ranks(3, "one", "two", wire={**wire, "quantization": plan}, verify="full", delta=delta) as run:
        for version in (1, 2, 3):
            source = weights(version // 2)  # The last two versions are the same.
            update, sends = run.start(version, source, version - 1 if delta and version > 1 else None)
            for prepared in run.prepare(update):
                prepared.result(20)
            reports = [send.result(20) for send in sends]
            expected = dict(plan.stream(iter(source.items())))
            for inbox in run.inboxes:
                named = staged(inbox)
                assert {name: one.dtype for name, one in named.items()} == {n: t.dtype for n, t in expected.items()}
                as_bytes = ({n: t.reshape(-1).view(torch.uint8) for n, t in some.items()} for some in (named, expected))
                expect_equal(*as_bytes)
                inbox.committed(version)
            assert 0 <= reports[0].num_bytes - sum(one.nbytes for one in expected.values()) < 64 * len(expected)
            assert not delta or version < 3 or sum(one.bytes_sent for one in reports) == 0
            run.senders[0].take_digests(version, iter(source.items()))
            assert {one.name for one in run.senders[0].digests(version).weights} == expected.keys()


def test_fused_and_stacked_parts_keep_their_places() -> None:
    """Two weights lie one below the other in a local tensor, and a rank has one of two experts."""
    generator = torch.Generator().manual_seed(0)
    whole = {"gate": (6, 8), "up": (6, 8), "experts": (2, 4, 8)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in whole.items()}
    plan = Quantization("int8", frozenset(whole))
    fused = [place(name, ((2, 6), (0, 8)), "fc1", (8, 8), (4 * number,)) for number, name in enumerate(("gate", "up"))]
    regions = [*fused, place("experts", ((1, 2), (0, 4), (0, 8)))]
    parts = QuantizedParts(plan, {name: (torch.float32, shape) for name, shape in whole.items()}, [regions])
    local = {"fc1": torch.cat([weights["gate"][2:], weights["up"][2:]]), "experts": weights["experts"][1:]}
    read, expected = parts.reading(local.__getitem__), dict(plan.stream(iter(weights.items())))
    assert len(parts.regions[0]) == 6
    for region in reversed(parts.regions[0]):
        sizes = [stop - start for start, stop in region.box]
        got = read(region.tensor).reshape(-1).as_strided(sizes, region.strides, region.offset)
        assert got.equal(expected[region.weight][tuple(slice(*axis) for axis in region.box)])


@pytest.mark.parametrize("region", [place("a", ((0, 4), (0, 4))), Region("a", ((0, 4), (0, 8)), "a", 0, (1, 4))])
def test_parts_of_rows_are_refused_by_name(region: Region) -> None:
    plan = Quantization("int8", frozenset({"a"}))
    with pytest.raises(
        ValueError, match=r"sync.transport: got 'pairs' with .* a train rank has parts of the rows of 'a'"
    ):
        QuantizedParts(plan, {"a": (torch.float32, (4, 8))}, [[region]])
