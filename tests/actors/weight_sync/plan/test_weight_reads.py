"""Loaders that read parts of weights, and what is listed of them."""

from __future__ import annotations

import pytest
import torch

from headrace.actors.weight_sync.plan.weight_reads import WeightReads, decode_regions, encode_regions


def test_parts_that_a_loader_reads_are_listed_and_no_more() -> None:
    weights = {
        "rows": torch.randn(8, 6),
        "columns": torch.randn(8, 6),
        "experts": torch.randn(4, 6, 2),
        "flat": torch.randn(4, 6),
        "copied": torch.randn(3),
        "computed": torch.randn(5, 2),
        "unread": torch.randn(2, 2),
    }
    taken = torch.zeros(64)
    with WeightReads(weights) as reads:
        taken[:24].view(4, 6).copy_(weights["rows"].narrow(0, 4, 4))
        taken[:24].view(8, 3).copy_(weights["columns"][:, 3:])
        taken[:8].view(4, 2).copy_(weights["experts"][1, 2:])
        taken[:4].view(2, 2).copy_(weights["experts"].unbind(0)[3][:2])
        taken[:8].copy_(weights["flat"].view(-1)[3:11])
        torch.cat([taken[:3], weights["copied"]])
        taken[:2] += weights["computed"].t()[:, 1]
    assert [(one.weight, one.box, one.tensor, one.offset, one.strides) for one in reads.regions] == [
        ("rows", ((4, 8), (0, 6)), "rows", 24, (6, 1)),
        ("columns", ((0, 8), (3, 6)), "columns", 3, (6, 1)),
        ("experts", ((1, 2), (2, 6), (0, 2)), "experts", 16, (12, 2, 1)),
        ("experts", ((3, 4), (0, 2), (0, 2)), "experts", 36, (12, 2, 1)),
        ("flat", ((0, 4), (0, 6)), "flat", 0, (6, 1)),
        ("copied", ((0, 3),), "copied", 0, (1,)),
        ("computed", ((1, 2), (0, 2)), "computed", 2, (2, 1)),
        ("unread", ((0, 2), (0, 2)), "unread", 0, (2, 1)),
    ]
    assert decode_regions(encode_regions(reads.regions)) == reads.regions
    assert decode_regions(encode_regions(())) == ()
    with pytest.raises(ValueError, match="the regions of a receiver are damaged"):
        decode_regions(b"other")
