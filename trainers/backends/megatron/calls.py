"""Provides the context for calls into megatron-core: it hides known warnings and, without a GPU, replaces CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .cpu_shim import on_cpu

_KNOWN = (
    # megatron-core 0.16.1 calls collectives at every step by names that torch 2.13 has deprecated.
    r"`torch\.distributed\.\w+` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",  # DistributedOptimizer, once
    r"Warning: tp_group is None, using default tp group",  # Megatron's own layers do not pass it
    r"MLP requires ffn_hidden_size",  # Megatron's own layer spec does not pass it
    r"full scope is deprecated",  # TransformerConfig says so about its own default
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # right for whole experts
)
_KNOWN_ON_CPU = (r"When using \w+( \w+)* it is recommended to set the environment variable CUDA_",)


@contextmanager
def megatron_calls(device: torch.device) -> Iterator[None]:
    """Context that must enclose all code that runs Megatron on tensors of `device`, including backward passes.

    It hides known warnings and, when `device` is the CPU, turns Megatron's CUDA requests into CPU requests. May be
    nested.
    """
    on_host = device.type == "cpu"
    with warnings.catch_warnings(), on_cpu() if on_host else nullcontext():
        for message in (*_KNOWN, *(_KNOWN_ON_CPU if on_host else ())):
            warnings.filterwarnings("ignore", message=message)
        yield
