"""Float32 weights leave for bfloat16 engines as bfloat16, by one function: what it makes is what arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.codecs.weights import conversion
from headrace.codecs.weights.conversion import wire_dtype
from headrace.codecs.weights.parameter_digests import DigestTaker
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerGroup
from headrace.trainers.backends.weight_stream import Piece, SpreadWeight, stream_weights

MASTERS = {"a": torch.linspace(-1, 1, 333).view(37, 9), "b": torch.full((65,), 1 / 3), "bias": torch.rand(5) + 1e-4}
CPU = torch.device("cpu")
pytestmark = pytest.mark.processes


def _truncate(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Cut digits off instead of rounding, so that it shows in the bytes who has converted."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_((source.float().contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32))


def truncated() -> dict[str, torch.Tensor]:
    found = {name: torch.empty_like(one, dtype=torch.bfloat16) for name, one in MASTERS.items() if name != "bias"}
    _truncate([*found.values()], [MASTERS[name] for name in found])
    assert not any(found[name].equal(MASTERS[name].bfloat16()) for name in found)
    return {**found, "bias": MASTERS["bias"]}


def _stream() -> tuple[list[SpreadWeight], Iterator[tuple[str, torch.Tensor]]]:
    weights = [
        SpreadWeight(
            name,
            one.dtype if name == "bias" else wire_dtype(one.dtype, torch.bfloat16),
            tuple(one.shape),
            (Piece(0),),
        )
        for name, one in MASTERS.items()
    ]
    return weights, stream_weights(weights, lambda weight: MASTERS[weight.name], 0, CPU)


@pytest.mark.parametrize("delta", [False, True])
def test_nothing_but_the_declared_function_converts(
    group: Callable[..., PeerGroup], kind: str, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_copy_all", _truncate)
    peers, expected = group(kind), truncated()
    publisher = WeightPublisher(peers.sender, SyncConfig(verify="full", delta=delta), 512)
    weights, stream = _stream()
    update = publisher.open(1, {one.name: (one.dtype, one.shape) for one in weights}, peers.groups)
    for peer in peers.of(peers.groups):
        peer.start("prepare", update)
    report = publisher.publish(update, stream)
    for peer in peers.of(peers.groups):
        peer.answer().expect()
        got = peer.call("staged").expect()
        assert {name: one.dtype for name, one in got.items()} == {name: one.dtype for name, one in expected.items()}
        assert all(got[name].equal(one) for name, one in expected.items())
    size = sum(one.nbytes for one in expected.values())
    assert size <= report.bytes_sent < size + 64 * len(expected), "half of the float32 bytes, and gaps"
    taker = DigestTaker(1, frozenset(expected))
    for name, one in expected.items():
        taker.take(name, one)
    assert publisher.digests(1) == taker.result(), "digests are of what was converted"
    publisher.close()
