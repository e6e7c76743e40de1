"""Finds signs in the metrics of steps that a run learns nothing, and limits how often each warning is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FLAT_STEPS = 3
"""Number of consecutive steps without any group that has a signal after which the run warns."""
REPEAT_EVERY = 100
"""Smallest number of steps between two warnings of the same kind."""
LARGEST_TOKEN_SHARE = 0.5
"""Share of one token in a step's gradient above which the run warns."""
FEW_TOKENS = 100
"""Smallest number of trained tokens of a step in which the share of one token is judged."""
FAR_RATIO = 1.1
"""Value of `logprob/ratio_error` above which the run warns. Below about 1.02 a run is sound."""

Metrics = Mapping[str, float | None]
"""Metrics of one step, by name."""


def step_warnings(recent: Sequence[Metrics]) -> dict[str, str]:
    """Return the warnings about the last of the consecutive steps `recent`, as kind -> sentence.

    `logprob/ratio_error` is judged from the second step on, because `trust_probe.distrust` judges the first one.
    """
    last, found = recent[-1], dict[str, str]()
    if last.get("rollout/truncated_share") == 1.0:
        found["truncated"] = (
            "rollout/truncated_share is 1: every answer was cut off at rollout.max_new_tokens, none ended by itself; "
            "the token that ends an answer may be missing (rollout.stop_token_ids), or the limit is too low"
        )
    flat = [step for step in recent[-FLAT_STEPS:] if step.get("reward/flat_groups_share") == 1.0]
    if len(flat) == FLAT_STEPS and "distillation/reverse_kl" not in last:
        rewards = last.get("reward/mean")
        found["no signal"] = (
            f"reward/flat_groups_share has been 1 for {FLAT_STEPS} steps: all advantages are 0, because the rewards of "
            f"each group are equal (reward/mean is {'unknown' if rewards is None else f'{rewards:.4g}'}); the policy "
            "learns nothing from them, while weight decay and the optimizer's momentum still move the weights"
        )
    if last.get("masks/single_share") == 1.0:
        found["single"] = (
            "masks/single_share is 1: each token was the only one that rollout.top_p, rollout.top_k and rollout.min_p "
            "left, so all log-probs are 0 and the policy learns nothing; a weaker cut leaves more tokens"
        )
    share = last.get("train/token_gradient_share") or 0.0
    if share > LARGEST_TOKEN_SHARE and (last.get("train/tokens") or 0.0) >= FEW_TOKENS:
        found["one token"] = (
            f"train/token_gradient_share is {share:.2f}: a single token makes up most of the step's gradient; "
            "loss.kl_max_log_ratio, a smaller trainer.lr or loss.clip_dual bound such a token"
        )
    ratio = last.get("logprob/ratio_error") or 0.0
    if len(recent) > 1 and ratio > FAR_RATIO:
        age = last.get("staleness/mean") or 0.0
        why = f"or the rows are too old (staleness/mean is {age:.2g})" if age else "so the update is off-policy"
        found["mismatch"] = (
            f"logprob/ratio_error is {ratio:.3f}, expected about 1: trainer and engine give a sampled token other "
            f"probabilities, {why}"
        )
    return found


class StepWarnings:
    """Judges the steps of a run one after the other. Each kind of warning is given once, and then again at the earliest
    after REPEAT_EVERY steps."""

    def __init__(self) -> None:
        self._recent: list[Metrics] = []
        self._said: dict[str, int] = {}
        """Kind of warning -> step of the last one."""

    def of(self, step: int, metrics: Metrics) -> dict[str, str]:
        """Return the warnings that are due after `step`, as kind -> sentence."""
        self._recent = [*self._recent, metrics][-FLAT_STEPS:]
        due = {
            kind: text
            for kind, text in step_warnings(self._recent).items()
            if kind not in self._said or step - self._said[kind] >= REPEAT_EVERY
        }
        self._said.update(dict.fromkeys(due, step))
        return due
