"""Checks the layouts against plain torch code that builds the same parameters, and against the megatron backend."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from headrace.actors.weight_sync.plan.layouts import (
    Heads,
    fused_heads,
    gated,
    gated_experts,
    grouped_heads,
    held,
    vocabulary,
)
from headrace.actors.weight_sync.plan.regions import Region, lengths, region_of_part
from headrace.trainers.backends.megatron.weights import Entry, Part, cut

NAMES = ("q", "k", "v")


def tensor_of(regions: Iterable[Region], shape: Iterable[int], sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a local tensor, filled with its regions, and zeros elsewhere."""
    made = torch.zeros(tuple(shape))
    for region in regions:
        box = tuple(slice(start, stop) for start, stop in region.box)
        made.as_strided(lengths(region.box), region.strides, region.offset).copy_(sources[region.weight][box])
    return made


@pytest.mark.parametrize(("heads", "kv_heads", "num"), [(8, 4, 1), (8, 4, 2), (8, 8, 4), (12, 4, 4), (4, 1, 1)])
@pytest.mark.parametrize("columns", [(6,), ()])
def test_grouped_heads_are_those_of_the_megatron_backend(
    heads: int, kv_heads: int, num: int, columns: tuple[int, ...]
) -> None:
    sources = {"q": torch.randn(heads * 2, *columns)} | {name: torch.randn(kv_heads * 2, *columns) for name in "kv"}
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    for index in range(num):
        wanted = cut(Entry("qkv", NAMES, "heads"), [*sources.values()], config, Part(tp=index, num_tp=num))
        regions = grouped_heads(Heads(NAMES, heads, kv_heads, 2, columns), num, index, "qkv")
        assert tensor_of(regions, wanted.shape, sources).equal(wanted)


@pytest.mark.parametrize(("heads", "kv_heads", "num"), [(8, 4, 1), (8, 4, 2), (8, 4, 8), (8, 2, 4), (8, 1, 4)])
def test_fused_heads_follow_each_other_and_keys_are_repeated(heads: int, kv_heads: int, num: int) -> None:
    sources = {"q": torch.randn(heads, 2, 6)} | {name: torch.randn(kv_heads, 2, 6) for name in "kv"}
    flat = {name: tensor.flatten(0, 1) for name, tensor in sources.items()}
    for index in range(num):
        queries = sources["q"].chunk(num)[index]
        # Each key serves heads / kv_heads queries in turn.
        first = index * len(queries) * kv_heads // heads
        keys = [sources[name][first : first + max(1, kv_heads // num)] for name in "kv"]
        wanted = torch.cat([queries, *keys]).flatten(0, 1)
        regions = fused_heads(Heads(NAMES, heads, kv_heads, 2, (6,)), num, index, "qkv_proj")
        assert tensor_of(regions, wanted.shape, flat).equal(wanted)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_gate_and_up_are_those_of_the_megatron_backend(num: int) -> None:
    sources = {"gate": torch.randn(8, 6), "up": torch.randn(8, 6), "experts": torch.randn(6, 16, 5)}
    for index in range(num):
        wanted = cut(Entry("fc1", ("gate", "up"), "gated"), [sources["gate"], sources["up"]], None, Part(index, num))
        assert tensor_of(gated("gate", "up", (8, 6), num, index, "fc1"), wanted.shape, sources).equal(wanted)
        config, part = SimpleNamespace(num_experts=6), Part(etp=index, num_etp=num, ep=1, num_ep=2)
        entry = Entry("weight1", ("experts",), "expert_gated")
        wanted = cut(entry, [sources["experts"][3:6]], config, part)
        regions = gated_experts("experts", (6, 16, 5), (3, 6), num, index, "weight1")
        assert tensor_of(regions, wanted.shape, sources).equal(wanted)


def test_a_vocabulary_is_padded_and_cuts_are_those_of_chunk() -> None:
    table = torch.randn(70, 3)
    padded = torch.cat([table, torch.zeros(58, 3)])
    for index in range(4):
        wanted = padded.chunk(4)[index]
        regions = [*vocabulary("embed", (70, 3), 4, index, 64)]
        assert tensor_of(regions, wanted.shape, {"embed": table}).equal(wanted)
        assert len(regions) == (index < 3)
    for index, wanted in enumerate(table.chunk(8)):
        assert tensor_of(held("a", (70, 3), [(0, 8, index)]), wanted.shape, {"a": table}).equal(wanted)
    assert not [*held("a", (5, 3), [(0, 4, 3)])]


def test_a_strided_part_of_a_weight_is_a_box_or_nothing() -> None:
    weight = torch.arange(4 * 6 * 5.0).view(4, 6, 5)
    target = torch.zeros(200)

    def check(source: torch.Tensor, into: torch.Tensor) -> bool:
        region = region_of_part(
            "w",
            weight.shape,
            (int(source.storage_offset()), source.shape, source.stride()),
            ("p", int(into.storage_offset()), into.stride()),
        )
        if region is None:
            return False
        target.zero_()
        box = tuple(slice(start, stop) for start, stop in region.box)
        target.as_strided(lengths(region.box), region.strides, region.offset).copy_(weight[box])
        got = into.clone()
        target.zero_()
        into.copy_(source)
        return got.equal(into)

    parts = [weight, weight[1:3], weight[2], weight[:, 1:4], weight[3, 2:5], weight[1, :, 2:4], weight[2, 3]]
    for source in (*parts, weight[1, 2, 3], weight[:1], weight[:, 2:3]):
        assert check(source, target[7 : 7 + source.numel()].view(source.shape))
    assert check(weight[2, 1:3], target.view(20, 10)[3:5, 2:7])
    assert not check(weight[2].T, target[:30].view(5, 6))
    assert not check(weight.view(24, 5)[5:7], target[:10].view(2, 5))
