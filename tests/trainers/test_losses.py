"""Loss terms against float64 formulas written down here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace.trainers.losses.factory import LossConfig, build_loss
from headrace.trainers.losses.kl import ReferenceKl
from headrace.trainers.losses.ppo_clip import PpoClip
from headrace.trainers.losses.terms import Denominator, LossInputs, PolicyLoss, TermSums, aggregate


def random_inputs(seed: int, dtype: torch.dtype = torch.float32, ref: bool = True) -> LossInputs:
    """Five rows, one of them without tokens; ratios from about 0.5 to 2."""
    rng = np.random.default_rng(seed)
    row_tokens = torch.tensor([13, 1, 0, 27, 9])
    num = int(row_tokens.sum())
    rows = torch.repeat_interleave(torch.arange(5), row_tokens)

    def column() -> torch.Tensor:
        return torch.tensor(rng.normal(-1.0, 0.3, num), dtype=dtype)

    return LossInputs(
        logprobs=column().requires_grad_(),
        prev_logprobs=column(),
        rollout_logprobs=column(),
        ref_logprobs=column() if ref else None,
        advantages=torch.tensor(rng.normal(size=5), dtype=dtype)[rows],
        row_ids=rows,
        row_tokens=row_tokens,
    )


def as_float64(inputs: LossInputs) -> tuple[np.ndarray, ...]:
    names = ("logprobs", "prev_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
    return tuple(getattr(inputs, name).detach().double().numpy() for name in names)


def reference_sum(values: np.ndarray, inputs: LossInputs, denominator: Denominator) -> float:
    if denominator == "tokens":
        return float(sum(values))
    rows = inputs.row_ids.numpy()
    return float(sum(values[rows == row].mean() for row in np.unique(rows)))


@pytest.mark.parametrize("denominator", ["tokens", "sequences"])
@pytest.mark.parametrize("seed", range(5))
def test_ppo_clip_is_the_published_surrogate(seed: int, denominator: Denominator) -> None:
    inputs = random_inputs(seed)
    now, prev, rollout, _, advantage = as_float64(inputs)
    low, high = 0.2, 0.28
    ratio = np.exp(now - prev)
    values = np.array([-min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in zip(ratio, advantage, strict=True)])
    cut = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    sums = PpoClip(low, high, denominator)(inputs)
    assert sums.loss.item() == pytest.approx(reference_sum(values, inputs, denominator), rel=1e-5)
    assert tuple(sums.metrics) == PpoClip.metrics
    expected = {
        "ratio_mean": ratio.sum(),
        "clip_fraction": cut.sum(),
        "approx_kl": (ratio - 1 - np.log(ratio)).sum(),
        "rollout_kl": (np.exp(now - rollout) - 1 - (now - rollout)).sum(),
    }
    assert {name: value.item() for name, value in sums.metrics.items()} == pytest.approx(expected, rel=1e-5)
    assert 0 < cut.sum() < len(cut)

    sums.loss.backward()
    weight = 1.0 if denominator == "tokens" else 1 / inputs.row_tokens[inputs.row_ids].numpy()
    assert inputs.logprobs.grad is not None
    np.testing.assert_allclose(inputs.logprobs.grad, np.where(cut, 0.0, -ratio * advantage) * weight, rtol=1e-5)


@pytest.mark.parametrize("denominator", ["tokens", "sequences"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_are_schulmans(kind: str, denominator: Denominator) -> None:
    inputs = random_inputs(7)
    now, _, _, ref, _ = as_float64(inputs)
    ratio = np.exp(ref - now)
    values = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[kind]
    slope = {"k1": np.ones_like(ratio), "k2": -np.log(ratio), "k3": 1 - ratio}[kind]
    sums = ReferenceKl(kind, denominator)(inputs)  # type: ignore[arg-type]
    assert sums.loss.item() == pytest.approx(reference_sum(values, inputs, denominator), rel=1e-5)
    assert sums.metrics["reference_kl"].item() == pytest.approx(values.sum(), rel=1e-5)
    sums.loss.backward()
    weight = 1.0 if denominator == "tokens" else 1 / inputs.row_tokens[inputs.row_ids].numpy()
    np.testing.assert_allclose(inputs.logprobs.grad, slope * weight, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_a_step_adds_its_terms_with_their_coefficients() -> None:
    inputs = random_inputs(11)
    loss = build_loss(LossConfig(clip_low=0.1, clip_high=0.3, aggregation="sequence", kl_coef=0.7, kl_kind="k2"))
    clip, kl = PpoClip(0.1, 0.3, "sequences")(inputs), ReferenceKl("k2", "sequences")(inputs)
    sums = loss(inputs)
    assert loss.denominator == "sequences"
    assert sums.loss.item() == pytest.approx((clip.loss + 0.7 * kl.loss).item())
    assert tuple(sums.metrics) == loss.metrics == (*PpoClip.metrics, "reference_kl")
    assert not any(value.requires_grad for value in sums.metrics.values())


def test_no_rows_give_zero_that_can_go_backward() -> None:
    empty = torch.zeros(0)
    logprobs = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    inputs = LossInputs(logprobs, empty, empty, empty, empty, none, none)
    for aggregation in ("token", "sequence"):
        sums = build_loss(LossConfig(kl_coef=0.1, aggregation=aggregation))(inputs)
        sums.loss.backward()
        assert sums.loss.item() == 0 and not any(value.item() for value in sums.metrics.values())


def test_kl_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="loss.kl_coef is not 0, but the rows have no ref_logprobs"):
        build_loss(LossConfig(kl_coef=0.1))(random_inputs(0, ref=False))
    build_loss(LossConfig())(random_inputs(0, ref=False))


@dataclass(frozen=True)
class NamedTerm:
    name: str
    denominator: Denominator
    metrics: tuple[str, ...] = ()

    def __call__(self, inputs: LossInputs) -> TermSums:
        return TermSums(inputs.logprobs.sum(), {})


def test_terms_must_agree() -> None:
    with pytest.raises(ValueError, match="first is a mean over tokens and second over groups"):
        PolicyLoss([(1.0, NamedTerm("first", "tokens")), (1.0, NamedTerm("second", "groups"))])
    with pytest.raises(ValueError, match="first and second both report a metric 'kl'"):
        PolicyLoss([(1.0, NamedTerm("first", "tokens", ("kl",))), (1.0, NamedTerm("second", "tokens", ("kl",)))])
    with pytest.raises(ValueError, match="no terms"):
        PolicyLoss([])
    with pytest.raises(ValueError, match="got 'groups', expected 'tokens' or 'sequences'"):
        aggregate(torch.zeros(50), random_inputs(0), "groups")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "ppo"}, "loss.kind: got 'ppo', expected 'ppo_clip'"),
        ({"aggregation": "tokens"}, "loss.aggregation: got 'tokens', expected 'token' or 'sequence'"),
        ({"clip_low": 1.5}, r"loss.clip_low: got 1.5, expected a number in \(0, 1\]"),
        ({"clip_high": 0.0}, "loss.clip_high: got 0.0, expected a number above 0"),
        ({"kl_coef": -1.0}, "loss.kl_coef: got -1.0, expected 0 or more"),
        ({"kl_coef": 1.0, "kl_kind": "k4"}, "loss.kl_kind: got 'k4', expected k1, k2 or k3"),
    ],
)
def test_mistakes_are_told_by_the_config(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**changes)
