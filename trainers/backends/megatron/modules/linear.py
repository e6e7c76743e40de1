"""Provides Megatron's row-parallel linear layer so that torch.compile can trace it."""

from __future__ import annotations

from typing import Any

import torch

from ..library import RowParallelLinear


class RowLinear(RowParallelLinear):
    """Megatron's linear layer whose input is split over the tensor-parallel ranks.

    megatron-core 0.16.1 does not tell its own function the layer's group, and the function then warns at every call
    that it takes the default one, which is the same. torch.compile cannot trace a warning, so that it would leave most
    of the layer uncompiled. Delete when the pin moves to a release that passes `tp_group` (tensor_parallel/layers.py,
    RowParallelLinear.forward).
    """

    def _forward_impl(self, *args: Any, **options: Any) -> torch.Tensor:
        return super()._forward_impl(*args, **{**options, "tp_group": self.tp_group})
