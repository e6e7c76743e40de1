"""A worker of vLLM that computes experts in int8 on any CPU; tests have engines start it in place of Headrace's own."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch

from headrace.actors.engines.vllm.worker import WeightWorker
from headrace.codecs.weights.quantization import dequantize


class EmulatingWorker(WeightWorker):
    """vLLM's int8 kernel of experts needs a CPU with AMX. All else, from the loader to the layers, is vLLM's own."""


def apply(experts: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: Any, w2: Any, **given: Any) -> None:
    """Compute with the rounded weights in float32."""
    output.zero_()
    first, second = (
        dequantize(w, scales, torch.float32) for w, scales in ((w1, experts.w1_scale), (w2, experts.w2_scale))
    )
    chosen = zip(hidden_states, given["topk_ids"], given["topk_weights"], strict=True)
    for row, (states, ids, weights) in enumerate(chosen):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            gate, up = (first[expert] @ states.float()).chunk(2)
            output[row] += (weight * (second[expert] @ (torch.nn.functional.silu(gate) * up))).to(output.dtype)


def emulate() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

    kernel: Any = CPUExpertsInt8
    kernel._supports_current_device = staticmethod(lambda: True)
    kernel.process_weights_after_loading = lambda self, layer: None
    kernel.apply = apply


emulate()
