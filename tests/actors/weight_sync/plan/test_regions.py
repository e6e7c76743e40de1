"""Checks regions against plain torch code that cuts the same parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headrace.actors.weight_sync.plan.regions import Region, held, lengths, region_of_part


def tensor_of(regions: Iterable[Region], shape: Iterable[int], sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a local tensor, filled with its regions, and zeros elsewhere."""
    made = torch.zeros(tuple(shape))
    for region in regions:
        box = tuple(slice(start, stop) for start, stop in region.box)
        made.as_strided(lengths(region.box), region.strides, region.offset).copy_(sources[region.weight][box])
    return made


def test_cuts_are_those_of_chunk() -> None:
    table = torch.randn(70, 3)
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
