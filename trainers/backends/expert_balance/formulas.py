"""Computes how evenly routers use their experts, the auxiliary loss that evens it out, and the steps of expert biases.

In the formulas a router sends each token to k of E experts. `n_i` is the number of tokens that it sends to expert i,
and `p_ti` the probability that it gives to expert i for token t.

    auxiliary loss of a row of T tokens     E / (k T^2) * sum over i of n_i * (sum over t of p_ti)
    step of the bias of expert i            rate * sign(mean of n - n_i)

The loss is that of the Switch Transformer (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6), divided by k so that
it is 1 for even use. As in GShard (Lepikhin et al. 2020, arXiv:2006.16668) it is computed in groups of tokens and then
averaged; a group is a row. The whole step as one group would need the counts of the step before its first backward
pass, and a microbatch as a group would make gradients depend on how rows are divided into microbatches. The step of the
biases is that of Wang et al. 2024 (arXiv:2408.15664, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

ScoreKind = Literal["softmax", "sigmoid"]
"""The ways in which routers turn logits into scores: over all experts together, or for each expert by itself."""


def probabilities(logits: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
    """Return the probabilities of all experts for each token, float32 `[T, E]`, with gradient.

    logits: the router's, `[T, E]`. Scores of sigmoids are divided by their sum (DeepSeek-V3, arXiv:2412.19437, equation
    19).
    """
    if kind == "softmax":
        return torch.softmax(logits, -1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def row_counts(used: torch.Tensor, owners: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return how many tokens of each row are sent to each expert, float32 `[N, E]`.

    used: bool `[T, E]`, true for the experts that a token is sent to. owners: row of each token, int64 `[T]`; -1 for
    tokens that do not count, such as padding. num_rows: N.
    """
    counts = torch.zeros(num_rows + 1, used.shape[1], dtype=torch.float32, device=used.device)
    return counts.index_add_(0, owners % (num_rows + 1), used.float())[:num_rows]  # -1 % (N + 1) is N


def loss_slopes(counts: torch.Tensor, tokens: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the derivative of each row's auxiliary loss by a token's expert probability, float32 `[N, E]`. The loss of
    a row is the sum of slope times probability over its tokens and the experts.

    counts: numbers of tokens `[N, E]` of whole rows. tokens: number of tokens of each row, `[N]`.
    """
    scale = counts.shape[1] / (top_k * tokens.float().clamp(min=1) ** 2)
    return counts * scale[:, None]


def bias_steps(loads: torch.Tensor, rate: float) -> torch.Tensor:
    """Return what is added to the bias of each expert, float32 `[layers, E]`. It is `rate` for experts with fewer
    tokens than the layer's mean, -`rate` for those with more.

    loads: number of tokens of each expert in a whole step, `[layers, E]`.
    """
    return (rate * torch.sign(loads.mean(-1, keepdim=True) - loads)).float()


def load_metrics(loads: torch.Tensor, layers: Sequence[int]) -> dict[str, float]:
    """Return the metrics of the experts' load. loads: number of tokens of each expert in a whole step, float64
    `[layers, E]`. layers: the numbers of the decoder layers.

    `moe/load_imbalance` is the load of the fullest expert divided by the mean load, 1.0 at best, as a mean over layers,
    `moe/load_imbalance_max` that of the worst layer, and `moe/load_imbalance_layer_N` that of decoder layer N.
    `moe/idle_experts` is the number of experts of all layers that got no token. {} for a step without tokens.
    """
    means = loads.mean(-1)
    if not bool((means > 0).all()):
        return {}
    imbalance = loads.amax(-1) / means
    return {
        "moe/load_imbalance": float(imbalance.mean()),
        "moe/load_imbalance_max": float(imbalance.max()),
        "moe/idle_experts": float((loads == 0).sum()),
        **{f"moe/load_imbalance_layer_{layer}": float(one) for layer, one in zip(layers, imbalance, strict=True)},
    }
