"""Gives a model the functions of the rollout engine, so that its log-probs equal the engine's bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from .....actors.engines.hf.fixed_shapes import divide, linear, token_logprobs, use_fixed_shapes
from ...vocab.logprobs import ExactSoftmax
from .conditions import check_device, check_family
from .exact_layers import EngineFunctions, differentiable, use_exact_layers


def compute_as_engine(model: Any, engine: str, device: torch.device) -> ExactSoftmax:
    """Make a Hugging Face model compute as an engine: as `vllm` on a GPU, as `hf` on a CPU; return its log-probs.

    Raises ValueError for another engine on the device, or for a model whose layers cannot be computed so.
    """
    check_device(engine, gpu=device.type == "cuda")
    check_family(model.config, engine)
    if engine == "vllm":
        return use_functions(model, vllm_functions(model, device))
    use_fixed_shapes(model, differentiable(linear))
    return ExactSoftmax(linear, divide, token_logprobs)


def use_functions(model: Any, functions: EngineFunctions) -> ExactSoftmax:
    """Make a Hugging Face model compute with the functions of an engine; return its log-probs."""
    use_exact_layers(model, functions)
    return ExactSoftmax(functions.linear, functions.divide, functions.token_logprobs)


def vllm_functions(model: Any, device: torch.device) -> EngineFunctions:
    """Return vLLM's functions for the layers of a Hugging Face model. Raises ImportError if vLLM is not installed."""
    from .....actors.engines.vllm.bitwise.kernels import VllmKernels  # It imports vLLM, which takes seconds.

    config = model.config
    return VllmKernels(
        head=config.head_dim,
        context=config.max_position_embeddings,
        rotary=config.rope_parameters,
        device=device,
    )
