"""Measures FLOP/s, MFU, tokens per second and peak memory of train steps, over the duration of the steps alone.

The operations of a step are counted from a HF model's config; a table has the peak FLOP/s of GPUs.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

BACKWARD = 3
"""Cost of a forward and a backward pass relative to a forward pass alone. The backward pass computes two matrix
products for each one of the forward pass."""

GATED = ("qwen3", "qwen3_moe", "llama", "qwen2", "mistral")
"""Values of `model_type` in HF configs whose FLOPs this module can count. Each layer of these models is a grouped-query
attention, then a gated MLP or experts."""

BF16_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Peak FLOP/s of dense bfloat16 matrix products, from NVIDIA's data sheets: CUDA device name -> FLOP/s."""


@dataclass(frozen=True, slots=True)
class FlopModel:
    """Counts the FLOPs of a decoder's matrix products. Norms, activations, softmaxes and the optimizer are left out, as
    usual.

    These are model FLOPs, which the model needs, not hardware FLOPs: recomputation and padding are not counted.
    """

    per_token: int
    """Number of multiply-adds per token in the weights of all layers. Only experts to which the token is routed count.

    With hidden size H, n_q query heads and n_kv key-value heads of width d, attention takes `H (n_q + 2 n_kv) d + n_q d
    H`. A gated MLP of width I takes `3 H I`. A layer with E experts of width I_e takes `H E + 3 k H I_e` when each
    token is routed to k of them.
    """
    per_pair: int
    """Number of multiply-adds per pair of query and key token, summed over all layers. Each layer takes `2 n_q d` for
    scores and values, with n_q query heads of width d."""
    per_logits: int
    """Number of multiply-adds that the logits of one token take: the hidden size times the size of the vocabulary."""
    frozen: bool = False
    """True if the weights are not trained, so that the backward pass needs no gradients of them. An adapter's own
    operations are left out."""

    def step(self, lengths: np.ndarray, predicted: int) -> float:
        """Return the FLOPs of a forward and backward pass over rows of `lengths` tokens (int64 `[N]`).

        `predicted` is the number of tokens whose logits are computed. A row of L tokens has `L (L + 1) / 2` causal
        (query, key) pairs.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
        products = self.per_token * tokens + self.per_logits * predicted
        return 2.0 * ((BACKWARD - self.frozen) * products + BACKWARD * self.per_pair * pairs)


def flop_model(config: Any, *, frozen: bool = False) -> FlopModel | None:
    """Return the `FlopModel` of the model with HF config `config`; None for a `model_type` that is not in GATED.
    frozen: as in `FlopModel`."""
    config = config.get_text_config()
    if config.model_type not in GATED:
        return None
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or hidden // heads)
    shared = width * config.num_key_value_heads // heads
    attention = hidden * (width + 2 * shared) + width * hidden
    blocks = sum(_block(config, layer) for layer in range(config.num_hidden_layers))
    layers = config.num_hidden_layers
    return FlopModel(layers * attention + blocks, layers * 2 * width, hidden * config.vocab_size, frozen)


def _block(config: Any, layer: int) -> int:
    """Return the number of multiply-adds per token in the MLP or the experts of decoder layer `layer`."""
    experts = getattr(config, "num_experts", 0)
    dense = layer in getattr(config, "mlp_only_layers", ()) or (layer + 1) % getattr(config, "decoder_sparse_step", 1)
    if not experts or dense:
        return 3 * config.hidden_size * config.intermediate_size
    active = 3 * config.num_experts_per_tok * config.hidden_size * config.moe_intermediate_size
    return config.hidden_size * experts + active


GIB = 2**30


class StepMeter:
    """Measures the duration of the open train step on one rank, and counts its tokens and FLOPs."""

    def __init__(
        self,
        flops: FlopModel | None,
        device: torch.device,
        world: int,
        group: dist.ProcessGroup | None,
        *,
        half: bool,
    ) -> None:
        """Prepare to measure the steps of a mesh of `world` ranks.

        `group` has the ranks over which tokens and FLOPs are summed, so that each row counts once; it is None for one
        rank alone. `half` is true when matrix products are in bfloat16. FLOP/s are reported only if `flops` is given.
        MFU is reported only if, in addition, `half` is true and the device's peak FLOP/s are known.
        """
        self._flops, self._device, self._world, self._group = flops, device, world, group
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = BF16_PEAKS.get(name) if half else None
        self.begin()

    def begin(self) -> None:
        """Start a step with all counts at 0."""
        self._seconds = self._tokens = self._work = 0.0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context that adds its duration, including waits for rows, to the seconds of the step. On a GPU it ends with a
        synchronization."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - start

    def add(self, lengths: np.ndarray, predicted: int) -> None:
        """Count the tokens and FLOPs of a microbatch of whole rows with `lengths` tokens (int64 `[N]`).

        `predicted` is the number of tokens whose logits were computed.
        """
        self._tokens += float(lengths.sum())
        if self._flops is not None:
            self._work += self._flops.step(lengths, predicted)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the whole mesh, the same on all ranks. Collective over all ranks.

        `train/tokens_per_s` is the number of tokens of all ranks, including prompts, divided by the seconds of the
        slowest rank. `train/tflops` is the model's TFLOP/s per rank, averaged over the ranks, and `train/mfu` is its
        share of the device's peak. `memory/peak_gib` is the largest peak memory of any rank: on a GPU the device memory
        during this step, on a CPU the host memory since the process started.
        """
        totals = torch.tensor([self._tokens, self._work], dtype=torch.float64, device=self._device)
        most = torch.tensor([self._seconds, self._peak_gib()], dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        if self._world > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        (tokens, work), (seconds, peak_gib) = totals.tolist(), most.tolist()
        seconds = max(seconds, 1e-9)
        metrics = {"train/tokens_per_s": tokens / seconds, "memory/peak_gib": peak_gib}
        if self._flops is not None:
            rate = work / seconds / self._world
            metrics["train/tflops"] = rate / 1e12
            if self._peak is not None:
                metrics["train/mfu"] = rate / self._peak
        return metrics

    def _peak_gib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
