"""Samples one token per row from logits, with random numbers that depend only on the row and not on its batch."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def row_keys(seed: int, request_id: str, num_samples: int) -> np.ndarray:
    """Return the key of each sample's stream of random numbers (see `uniforms`), uint64 `[num_samples]`."""
    return np.array(
        [xxhash.xxh3_64_intdigest(f"{seed}/{request_id}/{sample}".encode()) for sample in range(num_samples)],
        dtype=np.uint64,
    )


def uniforms(keys: np.ndarray, step: int) -> np.ndarray:
    """Return random number `step` of each row's stream, uniform in [0, 1), float64 `[B]` (SplitMix64, Steele et al.
    2014).

    Each number depends only on the row's key and the step, so a row gets the same tokens in whatever batch it is
    decoded. The process's global generators are neither read nor advanced.
    """
    state = keys + _GOLDEN * np.full(1, step + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state ^= state >> np.uint64(31)
    # Only 32 bits, so that `u * total` in float64 stays strictly below `total` (see `draw`).
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def log_distribution(logits: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> torch.Tensor:
    """Return the log-probs of the distribution that tokens are drawn from, float32 `[B, V]`.

    logits: `[B, V]` of any float dtype. Temperature is applied first, then top-k (0 is off), then top-p (1.0 is off).
    What remains is renormalised, and tokens that are cut off get -inf. Temperature 0 means greedy decoding: the
    log-probs are then those of temperature 1, and nothing is cut off.
    """
    scores = logits.float()
    if temperature == 0.0:
        return torch.log_softmax(scores, dim=-1)
    if temperature != 1.0:
        scores = scores / temperature
    if 0 < top_k < scores.shape[-1]:
        smallest_kept = torch.topk(scores, top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if top_p < 1.0:
        ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        cut = mass_before >= top_p
        cut[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return torch.log_softmax(scores, dim=-1)


def draw(log_probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverse transform sampling, int64 `[B]`. It is the first token whose cumulative
    probability exceeds `uniform`.

    uniform: random numbers in [0, 1), float64 `[B]`. A token of probability 0 is never drawn. A row with NaN log-probs
    gets an arbitrary valid token, whose log-prob is NaN.
    """
    cumulated = log_probs.double().exp_().cumsum_(dim=-1)
    threshold = uniform[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, threshold, right=True)[:, 0]
    return tokens.clamp_(max=log_probs.shape[-1] - 1)
