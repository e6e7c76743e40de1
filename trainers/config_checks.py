"""Checks across the configuration's sections: one sentence for each pair of keys that do not fit one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config


def size_problems(config: Config) -> list[str]:
    """Sentences on numbers that do not fit one another."""
    problems = []
    prompts, dp, engines = config.algorithm.prompts_per_step, config.trainer.dp, config.rollout.num_engines
    if prompts % dp:
        problems.append(
            f"algorithm.prompts_per_step: got {prompts}, expected a multiple of trainer.dp={dp}, "
            "so that every rank trains on as many whole groups"
        )
    if prompts % engines:
        problems.append(
            f"algorithm.prompts_per_step: got {prompts}, expected a multiple of rollout.num_engines={engines}, "
            "so that every engine generates as many groups"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if config.trainer.tokens_per_microbatch < longest:
        problems.append(
            f"trainer.tokens_per_microbatch: got {config.trainer.tokens_per_microbatch}, expected at least {longest}, "
            "the longest row (data.max_prompt_tokens + rollout.max_new_tokens)"
        )
    return problems


def meaning_problems(config: Config) -> list[str]:
    """Sentences on choices that contradict one another."""
    problems = []
    rollout, data = config.rollout, config.data
    if config.algorithm.prev_logprobs == "rollout" and (rollout.top_p < 1 or rollout.top_k > 0):
        problems.append(
            f"algorithm.prev_logprobs: got 'rollout' with rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}"
            ", expected 'recompute', as the engine's log-probs are then of a cut-off distribution"
        )
    if config.warmup.corpus != "none" and not config.model.builtin:
        problems.append(
            f"warmup.corpus: got {config.warmup.corpus!r} with model.path={config.model.path!r}, "
            "expected 'none', as only the built-in model is warmed up"
        )
    if config.validation.every and data.validation is None and not data.generated:
        problems.append(
            f"data.validation: not set, expected a file or dataset, as data.train={data.train!r} is no generated task "
            "with a held-out part (or set validation.every=0)"
        )
    labels = [function.label for function in config.reward.functions]
    for label in sorted({label for label in labels if labels.count(label) > 1 or label == "mean"}):
        problems.append(
            f"reward.functions: the name {label!r} is taken, expected a `name` of its own for each function"
        )
    return problems
