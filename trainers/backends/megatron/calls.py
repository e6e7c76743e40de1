"""What every call into megatron-core runs in: the CPU shim where there is no GPU, and known warnings kept quiet."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .cpu_shim import on_cpu

_KNOWN = (
    # megatron-core 0.16.1 calls collectives by names that torch 2.13 has given new ones, at every step.
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",  # DistributedOptimizer, once
    r"Warning: tp_group is None, using default tp group",  # its own layers, which do not pass it
    r"MLP requires ffn_hidden_size",  # its own layer spec does not give it
    r"full scope is deprecated",  # TransformerConfig says so of its own default
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # of whole experts, as they should be
)
_KNOWN_ON_CPU = (r"When using \w+( \w+)* it is recommended to set the environment variable CUDA_",)


@contextmanager
def megatron_calls(device: torch.device) -> Iterator[None]:
    """Around whatever runs Megatron's code for tensors on `device`, backward passes included. Nests."""
    on_host = device.type == "cpu"
    with warnings.catch_warnings(), on_cpu() if on_host else nullcontext():
        for message in (*_KNOWN, *(_KNOWN_ON_CPU if on_host else ())):
            warnings.filterwarnings("ignore", message=message)
        yield
