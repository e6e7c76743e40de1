"""Provides the functions from which vLLM computes a layer, for a trainer whose log-probs must equal the engine's.

In its batch-invariant mode vLLM computes each row of a batch in the same way, whatever else is in the batch: its own
matrix product and norms, and attention that never splits the keys of a query. The functions here are the same kernels,
called in the process of a trainer. They have no backward pass, and every tensor is in the dtype of the weights.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..start import log_level

RELEASE = "0.26"
"""Release of vLLM with which log-probs of engine and trainer were found to be equal."""
INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Environment variables of a process in which vLLM's functions do not depend on the batch. Its two model runners
compute log-probs by different functions."""


def invariant_environment() -> Mapping[str, str]:
    """Return the environment variables of a process in which vLLM's functions do not depend on the batch.

    Raises ValueError if the installed vLLM is built for CPUs, or is another release than the one that was compared.
    """
    with log_level():
        import vllm
        from vllm.platforms import current_platform
    if current_platform.is_cpu():
        raise ValueError("rollout.engine: got 'vllm' with run.bitwise=true on CPUs, expected 'hf'")
    if not vllm.__version__.startswith(f"{RELEASE}."):
        raise ValueError(f"run.bitwise: got true with vLLM {vllm.__version__}, expected vLLM {RELEASE}")
    return INVARIANT


def normalize_sums_row_by_row() -> None:
    """Make vLLM, in its batch-invariant mode, compute the norm of a sum by the function of its other norms.

    Its own function for sums, `fused_add_rms_norm`, depends on the batch, although its source says that it does not
    (vLLM 0.26): a row in a batch of 256 rows or more has 256 threads, and up to 1024 in smaller batches, which add in
    another order. Without that mode, and in other releases, nothing changes.
    """
    import vllm

    if not vllm.__version__.startswith(f"{RELEASE}."):
        return
    from vllm.model_executor.layers import layernorm
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant as norm

    def norm_of_sum(x: Any, weight: Any, epsilon: float = 1e-6, residual: Any = None) -> Any:
        if residual is None:
            return norm(x, weight, epsilon)
        total = x + residual
        return norm(total, weight, epsilon), total

    norms: Any = layernorm
    norms.rms_norm_batch_invariant = norm_of_sum


class VllmKernels:
    """vLLM's functions for the layers of a dense model with rotary positions, on one GPU."""

    def __init__(self, *, head: int, context: int, rotary: Mapping[str, Any], device: torch.device) -> None:
        """head: width of a head. context: number of positions of the model. rotary: the model's `rope_parameters`.

        Sets the environment variable of vLLM's batch-invariant mode in this process. Raises ImportError if vLLM is not
        installed, and ValueError if it is another release.
        """
        os.environ.update(invariant_environment())  # vLLM's CUDA functions read it once, at the first call.
        with log_level():
            from vllm.config import VllmConfig, set_current_vllm_config
            from vllm.model_executor.layers import batch_invariant
            from vllm.model_executor.layers.activation import SiluAndMul
            from vllm.model_executor.layers.rotary_embedding import get_rope
            from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
            from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
            from vllm.vllm_flash_attn import flash_attn_varlen_func
        self._invariant, self._attention = batch_invariant, flash_attn_varlen_func
        self._divide, self._logprobs = apply_temperature, compute_token_logprobs
        # The engine makes its table on the GPU, too, where powers and cosines can differ from those of a CPU.
        with set_current_vllm_config(VllmConfig()), torch.device(device):
            self._rope = get_rope(head, max_position=context, rope_parameters=dict(rotary), dtype=torch.bfloat16)
            self._gate = SiluAndMul()
        self.cos_sin: torch.Tensor = self._rope.cos_sin_cache
        """Cosines, then sines, of each position: bfloat16 `[context, head]`."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T`; `x` is `[T, K]` and `weight` `[N, K]`."""
        return self._invariant.linear_batch_invariant(x, weight)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the RMS norm of `x` over its last dimension."""
        return self._invariant.rms_norm_batch_invariant(x, weight, epsilon)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries `[T, heads * D]` and keys `[T, kv_heads * D]` turned to their positions, int64 `[T]`."""
        turned: Any = self._rope.forward_cuda(positions, query.clone(), key.clone())  # It overwrites them.
        return turned

    def gate(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(gate) * up`, `[T, I]`, of `x`, which has both side by side, `[T, 2 * I]`."""
        return self._gate.forward_cuda(x)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: torch.Tensor,
        longest: int,
        scale: float,
    ) -> torch.Tensor:
        """Return causal attention within packed rows, `[T, heads, D]`. Keys and values are `[T, kv_heads, D]`. ends: 0,
        then the end of each row, int32. longest: number of tokens of the longest row."""
        mixed: Any = self._attention(
            query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
            softmax_scale=scale, causal=True, num_splits=1, fa_version=3,
        )  # fmt: skip
        return mixed

    def divide(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Return logits divided by the temperature, in place and rounded to their own dtype."""
        rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        self._divide(logits, rows, torch.full((1,), temperature, device=logits.device))
        return logits

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-prob of one token of each row of divided `logits`, and its logit: float32 `[T]`.

        tokens: int64 `[T]`.
        """
        picked = logits.gather(-1, tokens[:, None])[:, 0].float()
        return self._logprobs(logits, tokens[:, None])[:, 0], picked
