"""Pulls the policy towards teachers on its own samples, by the reverse KL divergence from the policy to the teacher.

The policy samples the answers that it learns from, so it sees the states that it will be in itself (Agarwal et al.
2023, "On-Policy Distillation of Language Models", GKD, arXiv:2306.13649; Gu et al. 2023, "MiniLLM", arXiv:2306.08543).
The log-ratio of each sampled token as its advantage is the form of Lu and Thinking Machines 2025, "On-Policy
Distillation" (thinkingmachines.ai/blog/on-policy-distillation).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .aggregation import Aggregation
from .terms import Denominator, LossInputs, TermSums

REST_FLOOR = 1e-6
"""Least probability of all tokens outside the teacher's top k together, so that its logarithm is finite."""


@dataclass(frozen=True, slots=True)
class TeacherAdvantage:
    """Adds `coefficient * (log p_teacher - log p_prev)` to each token's advantage, without a gradient.

    Its policy gradient on samples of the policy is that of the reverse KL divergence at each token, given the tokens
    before it. Divergences of later tokens are not credited to earlier ones.
    """

    coefficient: float
    max_log_ratio: float | None = None
    """Bound of the difference in nats; None means no bound."""

    metrics = ("teacher_kl",)

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, torch.Tensor]]:
        """Return `inputs` with changed advantages, and the summed divergences as the metric `teacher_kl`.

        Raises ValueError when `inputs` has no `teacher_logprobs`.
        """
        delta, bound = _teacher(inputs) - inputs.prev_logprobs, self.max_log_ratio
        gain = delta if bound is None else delta.clamp(-bound, bound)
        return replace(inputs, advantages=inputs.advantages + self.coefficient * gain), {"teacher_kl": -delta.sum()}


@dataclass(frozen=True, slots=True)
class TeacherKl:
    """Loss term `d^2 / 2` of each sampled token with `d = log p_teacher - log p`, which grows linearly beyond a bound.

    Its gradient, `-d` times that of log p, is on samples of the policy that of the reverse KL divergence itself (k2 of
    John Schulman, joschu.net/blog/kl-approx.html). Its value is not; the metric `teacher_kl` is the mean of -d.
    """

    aggregation: Aggregation = Aggregation()
    max_log_ratio: float | None = None
    """Largest factor of the gradient of log p, in nats; None means no bound."""

    name = "teacher_kl"
    metrics = ("teacher_kl",)

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Return the losses of a microbatch. Raises ValueError when `inputs` has no `teacher_logprobs`."""
        delta, bound = _teacher(inputs) - inputs.logprobs, self.max_log_ratio
        values = delta.square() / 2
        if bound is not None:
            values = values.where(delta.abs() <= bound, bound * (delta.abs() - bound / 2))
        return TermSums(self.aggregation(values, inputs), {"teacher_kl": -delta.detach().sum()})


@dataclass(frozen=True, slots=True)
class TopKl:
    """Loss term of the reverse KL divergence over the teacher's k most likely tokens and the rest as one more token.

    With p the policy's and q the teacher's probabilities at a position, and c the teacher's k tokens, it is
    `sum over c of p (log p - log q) + p_rest (log p_rest - log q_rest)`. Nothing is renormalised: the rest of the
    vocabulary is one outcome with the probability that the k tokens leave. So the term is at least 0, at most the
    divergence over the whole vocabulary (by the data-processing inequality), and exact if the k tokens are the
    vocabulary. Unlike a divergence that is renormalised over the k tokens, it also pulls probability back to them.
    Its gradient is exact, without the noise of the sampled token.
    """

    aggregation: Aggregation = Aggregation()

    name = "top_kl"
    metrics = ("teacher_kl",)

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Return the losses of a microbatch. Raises ValueError when `inputs` has no candidates of the teacher."""
        if inputs.candidate_logprobs is None or inputs.teacher_candidates is None:
            raise ValueError(
                "distillation.kind is topk, but the rows have no teacher_top_logprobs; write these before the step"
            )
        own, teacher = inputs.candidate_logprobs, inputs.teacher_candidates
        own_rest, teacher_rest = _rest(own), _rest(teacher)
        values = (own.exp() * (own - teacher)).sum(-1) + own_rest.exp() * (own_rest - teacher_rest)
        return TermSums(self.aggregation(values, inputs), {"teacher_kl": values.detach().sum()})


def _rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of all tokens but those with these log-probs `[T, k]`, `[T]`, at least log REST_FLOOR."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=REST_FLOOR).log()


def _teacher(inputs: LossInputs) -> torch.Tensor:
    if inputs.teacher_logprobs is None:
        raise ValueError(
            "distillation.teachers is not empty, but the rows have no teacher_logprobs; write these before the step"
        )
    return inputs.teacher_logprobs
