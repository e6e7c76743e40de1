"""Tells vLLM to run a model in 8 bits, with the weights that `codecs.weights.quantization` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .....codecs.weights.quantization import BLOCK, Scheme

LOAD_FORMAT = "headrace_quantized"
"""Name under which vLLM knows `QuantizingLoader`."""
EXACT_SCALES = {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
"""Environment variables that keep DeepGEMM from rounding scales to powers of two, which quantizes weights again."""


def quantization_arguments(scheme: Scheme, exact: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for a model in 8 bits, as a checkpoint of the format compressed-tensors would set them.

    Activations are quantized by vLLM, with a scale for each token, or for each BLOCK numbers of a token with
    `fp8_block`. exact: names in the model's files of modules that are not quantized. options: arguments that the user
    sets, of which `hf_overrides` is kept.
    """
    kind = "int" if scheme == "int8" else "float"
    common: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True}
    if scheme == "fp8_block":
        weights = {"strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False}
        activations: dict[str, Any] = {"strategy": "group", "group_size": BLOCK, "dynamic": True}
    else:
        weights, activations = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    groups = {"targets": ["Linear"], "weights": common | weights, "input_activations": common | activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *exact],
        "config_groups": {"group_0": groups},
    }
    return {
        "hf_overrides": {**options.get("hf_overrides", {}), "quantization_config": config},
        "load_format": LOAD_FORMAT,
        "model_loader_extra_config": {"quantization": scheme},
    }
