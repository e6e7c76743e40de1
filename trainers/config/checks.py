"""Checks across the configuration's sections: one sentence for each pair of keys that do not fit one another."""

from __future__ import annotations

import math

from ...codecs.integers import ceil_div, round_up
from ...dataplane.topology import Topology
from .config import Config

ROLLOUT_TOKEN_BYTES = 9
"""input_ids int32, response_mask uint8, rollout_logprobs float32."""
WHOLE_STEP_ADVANTAGES = ("gdpo", "reinforce_pp")
"""Estimators with `whole_step`."""
ROLLOUT_ROW_BYTES = 64
"""version_spans: a few (first token, version), int32."""
LOGPROB_BYTES = 4
"""Each column that the train workers write back."""


def contradictions(config: Config) -> list[str]:
    """A sentence for each choice that contradicts another."""
    return size_problems(config) + mesh_problems(config) + capacity_problems(config) + meaning_problems(config)


def step_bytes(config: Config) -> int:
    """Bytes that a step's rows take in the store when every row is as long as it may be."""
    columns = (config.algorithm.prev_logprobs == "recompute") + config.with_reference
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    row = longest * (ROLLOUT_TOKEN_BYTES + LOGPROB_BYTES * columns) + ROLLOUT_ROW_BYTES
    return config.rows_per_step * row


def steps_in_store(config: Config) -> float:
    """Steps' rows that may be in the store at a time: rollouts run ahead, or more are rolled out than needed."""
    algorithm = config.algorithm
    return 1 + algorithm.max_staleness if algorithm.mode == "async" else algorithm.dynamic_sampling.oversample


def capacity_problems(config: Config) -> list[str]:
    """A sentence when a step of longest rows does not fit into the store, which would stop the run at its first put."""
    capacity = config.dataplane.store.capacity_mib
    needed = math.ceil(step_bytes(config) * steps_in_store(config))
    if needed <= capacity << 20:
        return []
    return [
        f"dataplane.store.capacity_mib: got {capacity}, expected at least {ceil_div(needed, 1 << 20)}: "
        f"{math.ceil(config.rows_per_step * steps_in_store(config))} rows of up to "
        f"{config.data.max_prompt_tokens + config.rollout.max_new_tokens} tokens"
    ]


def size_problems(config: Config) -> list[str]:
    """Sentences on numbers that do not fit one another."""
    problems = []
    prompts, dp = config.algorithm.prompts_per_step, config.trainer.dp
    if prompts % dp:
        problems.append(
            f"algorithm.prompts_per_step: got {prompts}, expected a multiple of trainer.dp={dp}, "
            "so that every replica trains on as many whole groups"
        )
    actors = config.rollout.num_actors or config.rollout.num_engines
    key = "num_engines" if config.rollout.num_actors is None else "num_actors"
    if prompts < actors:
        problems.append(
            f"algorithm.prompts_per_step: got {prompts}, expected at least rollout.{key}={actors}, so that every "
            "rollout actor has a group to generate"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    multiple = Topology(dp=1, tp=config.trainer.tp, cp=config.trainer.cp).pad_multiple
    padded = round_up(longest, multiple)
    if config.trainer.tokens_per_microbatch < padded:
        rounded = f", rounded up to a multiple of {multiple}" if padded > longest else ""
        problems.append(
            f"trainer.tokens_per_microbatch: got {config.trainer.tokens_per_microbatch}, expected at least {padded}, "
            f"the longest row (data.max_prompt_tokens + rollout.max_new_tokens{rounded})"
        )
    return problems


def mesh_problems(config: Config) -> list[str]:
    """Sentences on a train mesh that cannot be."""
    problems = []
    trainer = config.trainer
    shared = trainer.dp * trainer.tp * trainer.cp
    if shared % trainer.ep:
        problems.append(f"trainer.ep: got {trainer.ep}, expected a divisor of trainer.dp x tp x cp = {shared}")
    if trainer.offload and shared * trainer.pp == 1:
        problems.append("trainer.offload: got true with one train worker, expected false, as it needs several")
    if trainer.sequence_parallel and trainer.backend == "megatron" and trainer.tp == 1:
        problems.append(
            "trainer.sequence_parallel: got true with trainer.tp=1, expected false, as there are no ranks to split over"
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
    if config.validation.every and data.validation is None and not data.generated:
        problems.append(
            f"data.validation: not set, expected a file or dataset, as data.train={data.train!r} is no generated task "
            "with a held-out part (or set validation.every=0)"
        )
    if config.trainer.backend == "scripted" and rollout.engine != "scripted":
        problems.append(
            f"trainer.backend: got 'scripted' with rollout.engine={rollout.engine!r}, expected 'scripted' there, too, "
            "as other engines have no use for its weights"
        )
    sync = config.sync
    if sync.timeout_s >= config.resources.stage_timeout_s:
        problems.append(
            f"sync.timeout_s: got {sync.timeout_s:g}, expected less than resources.stage_timeout_s="
            f"{config.resources.stage_timeout_s:g}, as train workers wait for one another while an engine is waited for"
        )
    if sync.delta and sync.staging == "none":
        problems.append(
            "sync.delta: got true with sync.staging='none', expected false, as a delta needs the last version's bytes"
        )
    if config.algorithm.mode == "streaming" and config.advantage.kind in WHOLE_STEP_ADVANTAGES:
        problems.append(
            f"algorithm.mode: got 'streaming' with advantage.kind={config.advantage.kind!r}, expected 'sync' or "
            "'async', as that estimator normalises over all rows of a step"
        )
    labels = [function.label for function in config.reward.functions]
    for label in sorted({label for label in labels if labels.count(label) > 1 or label == "mean"}):
        problems.append(
            f"reward.functions: the name {label!r} is taken, expected a `name` of its own for each function"
        )
    return problems + admission_problems(config) + replay_problems(config) + objective_problems(config)


def admission_problems(config: Config) -> list[str]:
    """Sentences on where a step's groups come from."""
    problems = []
    algorithm = config.algorithm
    over, in_order = algorithm.dynamic_sampling.oversample > 1, algorithm.sampler in ("in_order", "windowed")
    key = "algorithm.dynamic_sampling.oversample"
    if over and (in_order or config.run.deterministic):
        what = "run.deterministic=true" if config.run.deterministic else f"algorithm.sampler={algorithm.sampler!r}"
        problems.append(
            f"{key}: got {algorithm.dynamic_sampling.oversample:g} with {what}, expected 1, as a step then "
            "takes the groups that are ready first"
        )
    if config.run.deterministic and algorithm.sampler not in ("auto", "in_order"):
        problems.append(
            f"algorithm.sampler: got {algorithm.sampler!r} with run.deterministic=true, expected 'in_order', as others "
            "take groups in the order in which they happen to be ready"
        )
    return problems


def replay_problems(config: Config) -> list[str]:
    """Sentences on a run that trains on another's groups."""
    run, algorithm = config.run, config.algorithm
    if run.replay is None:
        return []
    problems = []
    if run.record:
        problems.append("run.record: got true with run.replay, expected false, as nothing new is rolled out")
    if config.validation.every:
        problems.append(
            f"validation.every: got {config.validation.every} with run.replay, expected 0, as there is no engine that "
            "answers"
        )
    if algorithm.dynamic_sampling.oversample > 1 or (
        algorithm.mode == "async" and algorithm.sampler not in ("auto", "in_order")
    ):
        problems.append(
            f"algorithm.sampler: got {algorithm.sampler!r} with run.replay, expected 'in_order' and no oversampling, "
            "as a step's groups are then those of the run that is replayed"
        )
    return problems


def objective_problems(config: Config) -> list[str]:
    """Sentences on choices of loss and advantages that contradict one another."""
    problems = []
    loss, advantage = config.loss, config.advantage
    if loss.correction != "none":
        low, high = loss.correction_bounds
        if low >= high:
            problems.append(f"loss.correction_high: got {high}, expected a number above loss.correction_low={low}")
    if loss.correction != "none" and config.algorithm.prev_logprobs == "rollout":
        problems.append(
            f"loss.correction: got {loss.correction!r} with algorithm.prev_logprobs='rollout', expected 'recompute' "
            "there, as the engine's log-probs corrected by themselves are weights of 1"
        )
    counting = [function.label for function in config.reward.functions if function.weight]
    if advantage.kind == "gdpo" and len(counting) < 2:
        problems.append(
            f"advantage.kind: got 'gdpo' with {len(counting)} reward functions whose weight is not 0, expected two or "
            "more, as it normalises each on its own"
        )
    return problems
