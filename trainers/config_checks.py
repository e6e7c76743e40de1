"""Checks across the configuration's sections: one sentence for each pair of keys that do not fit one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config


ROLLOUT_TOKEN_BYTES = 9
"""input_ids int32, response_mask uint8, rollout_logprobs float32."""
LOGPROB_BYTES = 4
"""Each column that the train workers write back."""


def step_bytes(config: Config) -> int:
    """Bytes that a step's rows take in the store when every row is as long as it may be."""
    columns = (config.algorithm.prev_logprobs == "recompute") + config.with_reference
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return config.rows_per_step * longest * (ROLLOUT_TOKEN_BYTES + LOGPROB_BYTES * columns)


def capacity_problems(config: Config) -> list[str]:
    """A sentence when a step of longest rows does not fit into the store, which would stop the run at its first put."""
    capacity = config.dataplane.store.capacity_mib
    needed = step_bytes(config)
    if needed <= capacity << 20:
        return []
    return [
        f"dataplane.store.capacity_mib: got {capacity}, expected at least {-(-needed >> 20)}: "
        f"{config.rows_per_step} rows of up to {config.data.max_prompt_tokens + config.rollout.max_new_tokens} tokens"
    ]


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
