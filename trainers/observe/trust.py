"""Judges from log-probs of the same tokens whether engine and trainer compute the same policy, and says so."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.config import Config

SOUND_RATIO = 1.02
"""Largest mean factor between the trainer's and the engine's probability of a token, `logprob/ratio_error`, at which
the ratio of a policy update still says more about the policy than about numerics."""


def distrust(config: Config, metrics: Mapping[str, float], *, has_experts: bool) -> str | None:
    """Return a sentence that warns of log-probs that differ too much, or None if there is nothing to warn of.

    metrics: those of the first step of a run or of its continuation, in which both sides have the same weights. Rows of
    older versions, which a continuation may train on first, tell nothing. has_experts: whether the model has layers
    with experts.
    """
    ratio = metrics.get("logprob/ratio_error")
    if ratio is None or ratio <= SOUND_RATIO or metrics.get("staleness/max", 0.0) > 0:
        return None
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        why = (
            f"the engine's log-probs belong to a distribution that rollout.top_p={rollout.top_p:g} and "
            f"rollout.top_k={rollout.top_k} truncate, the trainer's to the whole one"
        )
    elif has_experts and not config.router_replay.enabled:
        why = "its routers may choose other experts, which router_replay.enabled=true would prevent"
    else:
        why = f"`headrace doctor --model {config.model.path}` compares both on 64 tokens"
    return (
        f"logprob/ratio_error is {ratio:.3f} in the first step, expected at most {SOUND_RATIO}: the trainer gives a "
        f"sampled token another probability than the engine, by this factor on average; {why}"
    )
