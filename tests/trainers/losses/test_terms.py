"""Tests the rules that a step's loss terms must obey together, and the errors for terms that break them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from headrace.tests.trainers.losses.reference import (
    AGGREGATIONS,
    CORRECTIONS,
    KINDS,
    config_of,
    group_tokens,
    loss_inputs,
    random_rows,
)
from headrace.trainers.losses.aggregation import Aggregation
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.kl import ReferenceKl
from headrace.trainers.losses.policy_objectives import PpoClip
from headrace.trainers.losses.step_loss import EntropyBonus, PolicyTerm, build_loss
from headrace.trainers.losses.terms import Denominator, LossInputs, PolicyLoss, TermSums


def inputs_of(seed: int) -> LossInputs:
    rows = random_rows(seed)
    return loss_inputs(rows, group_tokens(rows))


def test_a_step_adds_its_terms_with_their_coefficients() -> None:
    inputs, by_row = inputs_of(11), Aggregation("sequence")
    loss = build_loss(LossConfig(clip_low=0.1, clip_high=0.3, aggregation="sequence", kl_coef=0.7, entropy_coef=0.2))
    terms = (PolicyTerm(PpoClip(0.1, 0.3), by_row), ReferenceKl("k3", by_row), EntropyBonus(by_row))
    clip, kl, entropy = (term(inputs).loss.item() for term in terms)
    assert loss(inputs).loss.item() == pytest.approx(clip + 0.7 * kl + 0.2 * entropy, rel=1e-12)
    assert tuple(loss(inputs).metrics) == loss.metrics == (*PpoClip.metrics, "reference_kl")


def test_what_the_step_divides_by() -> None:
    got = {kind: build_loss(config_of("gspo", kind)).denominator for kind in AGGREGATIONS}
    assert got == {"token": "tokens", "sequence": "sequences", "sequence_sum": "sequences", "prompt": "groups"}


def test_no_rows_give_zero_that_can_go_backward() -> None:
    for kind in KINDS:
        for aggregation in AGGREGATIONS:
            for correction in CORRECTIONS:
                inputs = loss_inputs([], {})
                sums = build_loss(config_of(kind, aggregation, correction, kl_coef=0.1, entropy_coef=0.1))(inputs)
                sums.loss.backward()
                assert sums.loss.item() == 0 and not any(value.item() for value in sums.metrics.values())


def test_what_a_term_needs_and_does_not_get_is_named() -> None:
    inputs = inputs_of(0)
    for where in ("loss", "reward"):
        with pytest.raises(ValueError, match="loss.kl_coef is not 0, but the rows have no ref_logprobs"):
            build_loss(LossConfig(kl_coef=0.1, kl_in=where))(replace(inputs, ref_logprobs=None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss.entropy_coef is not 0, but the microbatch has no entropy"):
        build_loss(LossConfig(entropy_coef=0.1))(replace(inputs, entropy=None))
    with pytest.raises(AssertionError, match="without grad"):
        build_loss(LossConfig(entropy_coef=0.1))(replace(inputs, entropy=torch.ones(len(inputs.row_ids))))
    with pytest.raises(ValueError, match="loss.aggregation: got 'prompt', but the microbatch has no group_tokens"):
        build_loss(LossConfig(aggregation="prompt"))(replace(inputs, group_tokens=None))
    build_loss(LossConfig())(replace(inputs, ref_logprobs=None, entropy=None, group_tokens=None))


# ---------------------------------------------------------------- terms that are refused


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
    with pytest.raises(ValueError, match="odd is a mean over microbatches, expected a mean over tokens, sequences"):
        PolicyLoss([(1.0, NamedTerm("odd", "microbatches"))])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ppo_clip is a mean over tokens and reference_kl over sequences"):
        PolicyLoss([(1.0, PolicyTerm(PpoClip())), (0.1, ReferenceKl("k3", Aggregation("sequence")))])


class PositiveLikelihood:
    """Takes a mean over the *microbatch's* tokens of good rows, which the step would divide by N again."""

    name, denominator, metrics = "positive_likelihood", "tokens", ()

    def __call__(self, inputs: LossInputs) -> TermSums:
        return TermSums(-inputs.logprobs[inputs.advantages > 0].sum() / (inputs.advantages > 0).sum().clamp(min=1), {})


class WhitenedAdvantages:
    """Whitens within the microbatch, so that the value happens to be right and the gradient is wrong."""

    name, denominator, metrics = "whitened", "tokens", ()

    def __call__(self, inputs: LossInputs) -> TermSums:
        centred = inputs.advantages - inputs.advantages.mean() if len(inputs.advantages) else inputs.advantages
        return TermSums((centred * (inputs.logprobs - inputs.logprobs.detach())).sum(), {})


class MeanMetric:
    """Reports a metric that is a mean instead of a sum."""

    name, denominator, metrics = "mean_metric", "tokens", ("level",)

    def __call__(self, inputs: LossInputs) -> TermSums:
        return TermSums(inputs.logprobs.sum(), {"level": inputs.logprobs.detach().sum() / max(len(inputs.logprobs), 1)})


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (PositiveLikelihood(), "the loss of positive_likelihood depends on which rows share a microbatch"),
        (WhitenedAdvantages(), "the gradient of whitened depends on which rows share a microbatch"),
        (MeanMetric(), "the level of mean_metric depends on which rows share a microbatch"),
    ],
)
def test_a_term_that_is_not_linear_is_refused_by_name(term: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyLoss([(1.0, PolicyTerm(PpoClip())), (0.5, term)])  # type: ignore[list-item]


def test_building_a_loss_draws_no_random_number() -> None:
    """The probe must not shift a seeded run."""
    before = torch.random.get_rng_state()
    build_loss(LossConfig(kl_coef=0.1))
    assert torch.equal(torch.random.get_rng_state(), before)


# ---------------------------------------------------------------- mistakes in the config


def test_mistakes_that_only_the_factory_sees() -> None:
    with pytest.raises(ValueError, match="loss.length_norm: got None, expected 1 or more tokens"):
        build_loss(LossConfig(aggregation="sequence_sum"))
    for config in (LossConfig.model_construct(kind="other"), LossConfig.model_construct(correction="other")):
        with pytest.raises(ValueError, match="got 'other', expected the name of"):
            build_loss(config)


def test_the_default_is_ppo_clip_over_tokens() -> None:
    assert LossConfig(kind="ppo_clip", aggregation="token", correction="none") == LossConfig()
    assert build_loss(LossConfig()).metrics == PpoClip.metrics
