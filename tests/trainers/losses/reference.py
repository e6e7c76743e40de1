"""Computes the published formula of every loss row by row in float64 numpy, and makes random rows to test with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.terms import LossInputs

KINDS = ("ppo_clip", "gspo", "cispo", "reinforce")
AGGREGATIONS = ("token", "sequence", "sequence_sum", "prompt")
CORRECTIONS = ("none", "tis", "icepop", "sequence", "sequence_mask")
DUAL, LENGTH_NORM = 1.3, 11
BOUNDS = {"tis": (0.0, 1.2), "icepop": (0.8, 1.3), "sequence": (0.0, 1.4), "sequence_mask": (0.5, 2.0)}


def config_of(kind: str, aggregation: str = "token", correction: str = "none", **changes: object) -> LossConfig:
    low, high = BOUNDS.get(correction, (None, None))
    keys = {
        "kind": kind, "aggregation": aggregation,
        "length_norm": LENGTH_NORM if aggregation == "sequence_sum" else None, "clip_low": 0.15, "clip_high": 0.25,
        "clip_dual": DUAL if kind == "ppo_clip" else None, "correction": correction,
        "correction_low": low if correction in ("icepop", "sequence_mask") else None, "correction_high": high,
    }  # fmt: skip
    return LossConfig(**{**keys, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """The tokens of one row, as float64 arrays `[tokens]`."""

    now: np.ndarray
    prev: np.ndarray
    rollout: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray
    advantage: float
    group: int


def random_rows(seed: int, num_rows: int = 9) -> list[Row]:
    """Make random rows in three groups, one row without tokens, with ratios from about 0.5 to 2 per token."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation([0, 1, *rng.integers(1, 7, num_rows - 2)])
    rows = []
    for length in lengths:
        now, prev, rollout, ref = rng.normal(-1.0, 0.25, (4, length))
        group = int(rng.integers(0, 3))
        rows.append(Row(now, prev, rollout, ref, rng.random(length), float(rng.normal()), group))
    return rows


def group_tokens(rows: Sequence[Row]) -> dict[int, int]:
    """Count the response tokens of each group."""
    return {group: sum(len(row.now) for row in rows if row.group == group) for group in {row.group for row in rows}}


def loss_inputs(rows: Sequence[Row], groups: dict[int, int], dtype: torch.dtype = torch.float64) -> LossInputs:
    """Make one microbatch of the rows; `groups` has the token counts of the whole step's groups."""
    tokens = torch.tensor([len(row.now) for row in rows], dtype=torch.int64)
    ids = torch.repeat_interleave(torch.arange(len(rows)), tokens)

    def column(name: str) -> torch.Tensor:
        return torch.tensor(np.concatenate([np.zeros(0), *(getattr(row, name) for row in rows)]), dtype=dtype)

    return LossInputs(
        logprobs=column("now").requires_grad_(), prev_logprobs=column("prev"), rollout_logprobs=column("rollout"),
        ref_logprobs=column("ref"), advantages=torch.tensor([row.advantage for row in rows], dtype=dtype)[ids],
        row_ids=ids, row_tokens=tokens,
        group_tokens=torch.tensor([groups[row.group] for row in rows], dtype=torch.int64),
        entropy=column("entropy").requires_grad_(),
    )  # fmt: skip


# ---------------------------------------------------------------- formulas


def kl(kind: str, own: float, ref: float, bound: float | None = None) -> float:
    bound = math.inf if bound is None else bound
    ratio = math.exp(min(max(ref - own, -bound), bound))
    k3 = ratio - 1 - math.log(ratio)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": k3, "k3_is": k3}[kind]


def kl_in_loss(config: LossConfig, row: Row, now: np.ndarray, t: int) -> float:
    """Return the estimate at token t. `k3_is` multiplies it by the ratio of the token or, in GSPO, of the row."""
    moved = sum(now - row.prev) / len(now) if config.kind == "gspo" else now[t] - row.prev[t]
    weight = math.exp(moved) if config.kl_kind == "k3_is" else 1.0
    return weight * kl(config.kl_kind, now[t], row.ref[t], config.kl_max_log_ratio)


def clip(ratio: float, config: LossConfig) -> float:
    return min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)


def token_gain(config: LossConfig, row: Row, now: np.ndarray, t: int, advantage: float) -> tuple[float, bool]:
    """Return (the objective at token t, True when a bound acts there); stop-gradients use `row.now`."""
    ratio = math.exp(now[t] - row.prev[t])
    if config.kind == "reinforce":
        return advantage * now[t], False
    if config.kind == "cispo":
        frozen = math.exp(row.now[t] - row.prev[t])
        return clip(frozen, config) * advantage * now[t], clip(frozen, config) != frozen
    if config.kind == "gspo":
        ratio = math.exp(sum(now - row.prev) / len(now))
    gain = min(ratio * advantage, clip(ratio, config) * advantage)
    if config.clip_dual is not None and advantage < 0:
        gain = max(gain, config.clip_dual * advantage)
    return gain, gain != ratio * advantage


def correction_weight(config: LossConfig, row: Row, t: int) -> tuple[float, bool]:
    """Return (the correction's weight, True when a bound acts)."""
    if config.correction == "none":
        return 1.0, False
    low, high = BOUNDS[config.correction]
    if config.correction in ("sequence", "sequence_mask"):
        weight = math.exp(sum(row.prev - row.rollout))
    else:
        weight = math.exp(row.prev[t] - row.rollout[t])
    if config.correction in ("tis", "sequence"):
        return min(weight, high), weight > high
    return (weight, False) if low <= weight <= high else (0.0, True)


def divisor(config: LossConfig, row: Row, groups: dict[int, int]) -> float:
    sizes = {"token": 1, "sequence": len(row.now), "sequence_sum": config.length_norm, "prompt": groups[row.group]}
    return float(sizes[config.aggregation])  # type: ignore[arg-type]


def reference_loss(
    config: LossConfig, rows: Sequence[Row], now: Sequence[np.ndarray], entropy: Sequence[np.ndarray]
) -> float:
    """Compute the step's summed loss as a function of each row's log-probs `now` and `entropy`."""
    groups, total = group_tokens(rows), 0.0
    for row, own, spread in zip(rows, now, entropy, strict=True):
        for t in range(len(own)):
            advantage = row.advantage
            if config.kl_in == "reward":
                advantage -= config.kl_coef * kl(config.kl_kind, row.prev[t], row.ref[t], config.kl_max_log_ratio)
            value = -token_gain(config, row, own, t, advantage)[0] * correction_weight(config, row, t)[0]
            if config.kl_in == "loss":
                value += config.kl_coef * kl_in_loss(config, row, own, t)
            total += (value - config.entropy_coef * spread[t]) / divisor(config, row, groups)
    return total


def reference_metrics(config: LossConfig, rows: Sequence[Row]) -> dict[str, float]:
    """Sum every metric over the step's tokens; the caller leaves out those that a loss does not have."""
    sums = dict.fromkeys(("ratio_mean", "clip_fraction", "approx_kl", "rollout_kl", "reference_kl"), 0.0)
    sums |= {"correction_weight": 0.0, "correction_fraction": 0.0}
    for row in rows:
        for t in range(len(row.now)):
            advantage = row.advantage
            if config.kl_in == "reward":
                advantage -= config.kl_coef * kl(config.kl_kind, row.prev[t], row.ref[t], config.kl_max_log_ratio)
            moved = sum(row.now - row.prev) / len(row.now) if config.kind == "gspo" else row.now[t] - row.prev[t]
            weight, cut = correction_weight(config, row, t)
            sums["ratio_mean"] += math.exp(moved)
            sums["clip_fraction"] += token_gain(config, row, row.now, t, advantage)[1]
            sums["approx_kl"] += kl("k3", row.prev[t], row.now[t])
            sums["rollout_kl"] += kl("k3", row.rollout[t], row.now[t])
            in_reward = kl(config.kl_kind, row.prev[t], row.ref[t], config.kl_max_log_ratio)
            sums["reference_kl"] += in_reward if config.kl_in == "reward" else kl_in_loss(config, row, row.now, t)
            sums["correction_weight"] += weight
            sums["correction_fraction"] += cut
    return sums


def finite_differences(config: LossConfig, rows: Sequence[Row], step: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
    """Differentiate the reference with respect to every token's log-prob and entropy, row after row."""
    now, entropy = [row.now.copy() for row in rows], [row.entropy.copy() for row in rows]
    gradients = []
    for columns in (now, entropy):
        slopes = []
        for column in columns:
            for t in range(len(column)):
                middle, sides = column[t], []
                for moved in (middle + step, middle - step):
                    column[t] = moved
                    sides.append(reference_loss(config, rows, now, entropy))
                column[t] = middle
                slopes.append((sides[0] - sides[1]) / (2 * step))
        gradients.append(np.array(slopes))
    return gradients[0], gradients[1]
