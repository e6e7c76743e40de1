"""Checks config keys of different sections against each other, and describes each contradiction in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...actors.engines.config import precision_lines, precision_problems
from ...actors.environments.config import EnvironmentConfig
from ...actors.images.image_checks import image_problems
from ...actors.rewards.config import RewardConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.rollout.data_config import DataConfig
from ...actors.rollout.evaluation_metrics import find_figure, needs_answers
from ...actors.train.topology import Topology
from ...actors.weight_sync.config import SyncConfig
from ...codecs.integers import round_up
from ..advantages.config import AdvantageConfig
from ..backends.config import ROUNDED_MESH, TrainerConfig
from ..backends.fsdp.bitwise.conditions import bitwise_problems
from ..backends.model_split import mesh_problems
from ..losses.config import SUPERVISED, LossConfig
from .config import AlgorithmConfig, Config, ResourcesConfig, RunConfig
from .distillation_checks import reward_problems, teacher_problems
from .evaluation_sets import EvaluationConfig, ValidationConfig
from .gpu_checks import elastic_problems, gpu_map_problems, pool_problems, switch_obstacles
from .staleness import Overlap
from .store_demand import StoreDemand
from .supervised_runs import supervised_problems, warmup_problems

VLLM_TEMPERATURE = 2.0
"""Highest temperature that vLLM takes."""
WHOLE_STEP_ADVANTAGES = ("gdpo", "reinforce_pp")
"""Values of `advantage.kind` that need all rows of a step at once, because a row's advantage depends on those of other
groups. With the others, groups may be passed one at a time."""


def contradictions(config: Config) -> list[str]:
    """Return one sentence for each contradiction between the keys of `config`; [] when there is none."""
    return [
        *size_problems(config.algorithm, config.trainer, config.rollout, config.longest_row, config.longest_sequence),
        *mesh_problems(config.trainer),
        *gpu_map_problems(config.resources, config.rollout, config.trainer, len(config.distillation.in_engines)),
        *pool_problems(config),
        *elastic_problems(config.resources, config.sync, config.dataplane.store.kind),
        *StoreDemand.of(config).problems(config.dataplane.store.capacity_mib),
        *shard_problems(config.dataplane.directory_shards),
        *precision_problems(config.rollout, config.sync.transport, config.trainer.tp),
        *meaning_problems(config),
        *bitwise_problems(
            config.rollout,
            config.trainer,
            config.model,
            on=config.run.bitwise,
            threads=config.resources.threads,
            window=config.overlap.window,
            updates=config.algorithm.updates_per_step if config.algorithm.prev_logprobs == "rollout" else 1,
            foreign={
                "pool.address": config.pool.address,
                "run.replay": config.run.replay,
                "sft.train": config.sft.train,
            },
        ),
        *image_problems(
            enabled=config.data.images.enabled,
            engine=config.rollout.engine,
            backend=config.trainer.backend,
            cp=config.trainer.cp,
            replays_routes=config.router_replay.enabled,
            engine_teachers=list(config.distillation.in_engines),
        ),
    ]


def cautions(
    algorithm: AlgorithmConfig, loss: LossConfig, trainer: TrainerConfig, rollout: RolloutConfig, *, window: int
) -> list[str]:
    """Return one line for each allowed setting with an effect on training that users may not expect. window: largest
    number of versions by which a row can be older than the policy being trained."""
    lines = _adapter_lines(trainer)
    if loss.kind == SUPERVISED:  # No engine gives probabilities to the tokens.
        return lines
    lines += precision_lines(rollout, loss.correction, trainer.fp8)
    if trainer.backend == "scripted" or loss.kind != "reinforce" or loss.correction != "none":
        return lines
    if window:
        lines.append(
            f"algorithm.mode={algorithm.mode} with loss.kind=reinforce trains on rows of up to {window} older "
            "policies without correcting for it; algorithm.prev_logprobs=recompute with loss.correction=tis does"
        )
    if algorithm.updates_per_step > 1:
        lines.append(
            f"loss.kind=reinforce has no ratio, so it does not see that the {algorithm.updates_per_step} updates of a "
            "step move the policy away from its rows; loss.kind=ppo_clip does"
        )
    return lines


def _adapter_lines(trainer: TrainerConfig) -> list[str]:
    """Return a line about the learning rate of an adapter in a list; [] without one."""
    lora = trainer.lora
    if not lora.rank:
        return []
    return [
        f"an adapter of rank {lora.rank} (alpha {lora.chosen_alpha:g}) is trained at a learning rate of "
        f"{lora.lr_factor * trainer.lr:g}, trainer.lora.lr_factor={lora.lr_factor:g} times trainer.lr={trainer.lr:g}"
    ]


def size_problems(
    algorithm: AlgorithmConfig, trainer: TrainerConfig, rollout: RolloutConfig, row: tuple[str, int], needed: int
) -> Iterator[str]:
    """Yield one sentence for each mismatch of sizes. Groups and replicas, groups and rollout actors, and rows and
    microbatches are compared. row: see `Config.longest_row`. needed: number of tokens that an engine must hold for a
    sequence."""
    prompts, dp = algorithm.prompts_per_step, trainer.dp
    if prompts % dp:
        yield (
            f"algorithm.prompts_per_step: got {prompts}, expected a multiple of trainer.dp={dp}, "
            "because every replica trains on the same number of whole groups"
        )
    actors = rollout.num_actors or rollout.num_engines
    key = "num_engines" if rollout.num_actors is None else "num_actors"
    if prompts < actors:
        yield (
            f"algorithm.prompts_per_step: got {prompts}, expected at least rollout.{key}={actors}, because every "
            "rollout actor needs a group to generate"
        )
    given = rollout.max_model_len
    if given is not None and given < needed:
        yield (
            f"rollout.max_model_len: got {given}, expected at least {needed}, the length of the longest prompt and "
            "answer (data.max_prompt_tokens + rollout.max_new_tokens or that of an evaluation)"
        )
    keys, longest = row
    multiple = Topology(dp=1, tp=trainer.tp, cp=trainer.cp).pad_multiple
    padded = round_up(longest, multiple)
    if trainer.tokens_per_microbatch < padded:
        rounded = f", rounded up to a multiple of {multiple}" if padded > longest else ""
        yield (
            f"trainer.tokens_per_microbatch: got {trainer.tokens_per_microbatch}, expected at least {padded}, "
            f"the length of the longest row ({keys}{rounded})"
        )


def meaning_problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each senseless combination of settings, such as delta updates without staging."""
    rollout, data = config.rollout, config.data
    takes_logprobs = config.algorithm.prev_logprobs == "rollout"
    yield from rollout.mask_problems(takes_logprobs=takes_logprobs, distils=bool(config.distillation.teachers))
    if config.validation.every and not data.has_held_out:
        yield (
            "data.validation: not set, expected a file or dataset, data.validation_split, or validation.every=0, "
            f"because data.train={data.train!r} has no held-out part of its own"
        )
    if config.reward.functions:
        yield from metric_problems(config.validation, config.figures, config.data)
    yield from reward_problems(
        config.reward, config.distillation, config.algorithm, config.validation, config.evaluation
    )
    yield from teacher_problems(config.distillation, rollout, config.trainer, pooled=config.pool.address is not None)
    yield from evaluation_problems(config.evaluation, config.reward, config.run)
    yield from _temperature_problems(rollout, config.validation, config.evaluation)
    yield from optimizer_problems(config.trainer)
    if config.trainer.backend == "scripted" and rollout.engine != "scripted":
        yield (
            f"trainer.backend: got 'scripted' with rollout.engine={rollout.engine!r}, expected "
            "rollout.engine='scripted', because other engines cannot use this backend's weights"
        )
    if rollout.logprobs == "arrays" and "speculative_config" in rollout.vllm:
        yield (
            "rollout.logprobs: got 'arrays' with rollout.vllm.speculative_config, expected 'auto' or 'vllm', because "
            "speculative decoding samples several tokens at once"
        )
    yield from sync_problems(config.sync, config.resources, config.trainer.lora.rank)
    if config.overlap.by_chunk and config.advantage.kind in WHOLE_STEP_ADVANTAGES:
        yield (
            f"algorithm.mode: got {config.algorithm.mode!r} with advantage.kind={config.advantage.kind!r}, expected "
            "'sync' or 'async', because this estimator normalises over all rows of a step"
        )
    yield from update_problems(config.algorithm, config.trainer, config.overlap)
    yield from _label_problems(config.reward)
    yield from admission_problems(config.algorithm, config.run, config.environment)
    if config.run.replay is not None:
        yield from replay_problems(config.run, config.validation, config.algorithm, window=config.overlap.window)
    if not config.sft.train:
        yield from group_problems(config.algorithm, config.advantage, distils=bool(config.distillation.teachers))
    yield from supervised_problems(config.sft, config.loss, config.rollout, config.run, config.pool)
    yield from warmup_problems(config.warmup, config.sft, config.trainer.lora.base, config.model.adapter)
    yield from lora_problems(config.trainer, config.model.adapter, config.loss.reference_every)
    if config.sends_adapter:
        yield from _endpoint_problems(config.rollout)
    yield from objective_problems(
        config.loss, config.advantage, config.reward, config.algorithm.prev_logprobs, config.trainer
    )
    if config.router_replay.enabled:
        yield from route_problems(config.environment, config.rollout)
    if config.resources.switch_roles == "always":
        obstacles = switch_obstacles(
            config.algorithm.mode, config.sync, config.validation, config.evaluation, config.run.replay,
            config.distillation.in_engines,
        )  # fmt: skip
        yield from [f"resources.switch_roles: got 'always' with {obstacle}" for obstacle in obstacles]


def _label_problems(reward: RewardConfig) -> Iterator[str]:
    labels = [function.label for function in reward.functions]
    for label in sorted({label for label in labels if labels.count(label) > 1 or label == "mean"}):
        yield (
            f"reward.functions: got the name {label!r}, which is taken, expected a different `name` for each function"
        )


def optimizer_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Yield one sentence for each contradiction between the settings of the optimizer and its learning rate."""
    if trainer.min_lr > trainer.lr:
        yield f"trainer.min_lr: got {trainer.min_lr:g}, expected at most trainer.lr={trainer.lr:g}"
    if trainer.warmup_ratio and trainer.warmup_steps:
        yield (
            f"trainer.warmup_ratio: got {trainer.warmup_ratio:g} beside trainer.warmup_steps={trainer.warmup_steps}, "
            "expected one of the two, because both set the length of the warm-up"
        )
    if trainer.offload_optimizer and trainer.optimizer == "muon":
        yield (
            "trainer.offload_optimizer: got true with trainer.optimizer='muon', expected false, because only the "
            "moments of AdamW can be in host memory"
        )
    if trainer.offload_optimizer and trainer.offload:
        yield (
            "trainer.offload_optimizer: got true with trainer.offload=true, expected false, because weights, gradients "
            "and moments are in host memory already"
        )
    if trainer.freeze and trainer.lora.rank:
        yield (
            f"trainer.freeze: got {list(trainer.freeze)} with trainer.lora.rank={trainer.lora.rank}, expected [], "
            "because all weights of the base are frozen; trainer.lora.targets chooses the layers with an adapter"
        )


def shard_problems(count: int) -> Iterator[str]:
    """Yield a sentence for a data plane of more than one directory. count: number of its directories."""
    if count > 1:
        yield (
            f"dataplane.directory_shards: got {count}, expected 1 in a run, because a run's rows are in one partition, "
            "which one directory serves; more are for programs that open a data plane themselves"
        )


def sync_problems(sync: SyncConfig, resources: ResourcesConfig, lora_rank: int) -> Iterator[str]:
    """Yield one sentence for each setting of the weight sync that contradicts another setting or a time limit."""
    if sync.transport == "pairs" and lora_rank and sync.adapter == "merged":
        yield (
            "sync.adapter: got 'merged' with sync.transport='pairs', expected 'only', because each train worker sends "
            "the weights that it holds, to which the adapter is not added"
        )
    bound_s, key = min(
        (resources.stage_timeout_s, "stage_timeout_s"),
        (resources.collective_timeout_s, "collective_timeout_s"),
        key=lambda bound: bound[0],
    )
    if sync.timeout_s >= bound_s:
        yield (
            f"sync.timeout_s: got {sync.timeout_s:g}, expected less than resources.{key}={bound_s:g}, because train "
            "workers wait for each other while the sync waits for an engine"
        )
    if sync.delta and sync.staging == "none":
        yield (
            "sync.delta: got true with sync.staging='none', expected false, because an engine applies a delta to a "
            "copy of the last version"
        )


def update_problems(algorithm: AlgorithmConfig, trainer: TrainerConfig, overlap: Overlap) -> Iterator[str]:
    """Yield one sentence for each setting of mini-batches and epochs that does not fit the mode or the mesh."""
    dp = trainer.dp
    if algorithm.minibatches > 1 and algorithm.prompts_per_step % (algorithm.minibatches * dp):
        yield (
            f"algorithm.minibatches: got {algorithm.minibatches}, expected a number whose product with "
            f"trainer.dp={dp} divides algorithm.prompts_per_step={algorithm.prompts_per_step}, because every replica "
            "trains on the same number of whole groups of each mini-batch"
        )
    if not overlap.by_chunk:
        return
    why = f"because algorithm.mode={algorithm.mode!r} trains on groups as they become ready"
    if algorithm.epochs > 1:
        yield f"algorithm.epochs: got {algorithm.epochs}, expected 1 (or mode 'sync' or 'async'), {why}"
    if algorithm.minibatches > 1 and algorithm.prev_logprobs == "recompute":
        yield (
            f"algorithm.prev_logprobs: got 'recompute' with algorithm.minibatches={algorithm.minibatches}, expected "
            f"'rollout' (or mode 'sync' or 'async'), {why}, when earlier updates have changed the policy"
        )


def metric_problems(validation: ValidationConfig, known: Sequence[str], data: DataConfig) -> list[str]:
    """Return one sentence in a list if `validation.metric` is unknown. It also returns one if the metric needs
    reference answers that the data lacks; else an empty list."""
    metric = validation.metric
    key = find_figure(metric, known)
    if key is None:
        return [f"validation.metric: got {metric!r}, expected one of {', '.join(known)}"]
    if validation.every and needs_answers(key) and not data.answer_field and not data.generated:
        return [f"validation.metric: got {metric!r} with data.answer_field='', expected a figure that needs no answers"]
    return []


def evaluation_problems(sets: Mapping[str, EvaluationConfig], reward: RewardConfig, run: RunConfig) -> Iterator[str]:
    """Yield one sentence for each contradiction within a named evaluation set, or between such a set and the run."""
    for name, one in sets.items():
        key = f"evaluation.{name}"
        labels = [function.label for function in (one.reward or reward).functions]
        if one.correct is not None and one.correct not in labels:
            yield f"{key}.correct: got {one.correct!r}, expected one of its rewards, {', '.join(labels)}"
        if one.num_prompts is None and one.data.source.startswith("task:"):
            yield f"{key}.num_prompts: not set, expected a number, because {one.data.source} has no end"
        for sampled, plain in (("n", 1), ("top_p", 1.0), ("top_k", 0)):
            if one.temperature == 0 and getattr(one, sampled) != plain:
                yield (
                    f"{key}.{sampled}: got {getattr(one, sampled)} with {key}.temperature=0, expected {plain:g}, "
                    "because greedy samples are all the same"
                )
        if one.every and one.background and run.deterministic:
            yield (
                f"{key}.background: got true with run.deterministic=true, expected false, because the weights change "
                "during an evaluation in the background"
            )
        if one.every and run.replay is not None:
            yield f"{key}.every: got {one.every} with run.replay set, expected 0, because a replay has no engine"


def _temperature_problems(
    rollout: RolloutConfig, validation: ValidationConfig, sets: Mapping[str, EvaluationConfig]
) -> Iterator[str]:
    """Yield one sentence for each temperature that vLLM refuses."""
    sections = {"rollout": rollout, "validation": validation, **{f"evaluation.{key}": one for key, one in sets.items()}}
    for key, one in sections.items():
        if rollout.engine == "vllm" and one.temperature > VLLM_TEMPERATURE:
            yield (
                f"{key}.temperature: got {one.temperature:g} with rollout.engine='vllm', expected at most "
                f"{VLLM_TEMPERATURE:g}, which is vLLM's limit"
            )


def admission_problems(algorithm: AlgorithmConfig, run: RunConfig, environment: EnvironmentConfig) -> Iterator[str]:
    """Yield one sentence for each setting that conflicts with the order of a step's groups, or with exact repetition.
    The settings are samplers, oversampling and pieces of turns."""
    over, in_order = algorithm.dynamic_sampling.oversample > 1, algorithm.sampler in ("in_order", "windowed")
    key = "algorithm.dynamic_sampling.oversample"
    if over and (in_order or run.deterministic):
        what = "run.deterministic=true" if run.deterministic else f"algorithm.sampler={algorithm.sampler!r}"
        yield (
            f"{key}: got {algorithm.dynamic_sampling.oversample:g} with {what}, expected 1, because a step "
            "with more prompts takes the groups that are ready first"
        )
    if run.deterministic and environment.recover == "prefix":
        yield (
            "environment.recover: got 'prefix' with run.deterministic=true, expected 'turn', because the log-probs of "
            "a piece depend on the pieces that are generated at the same time"
        )
    if run.deterministic and algorithm.sampler not in ("auto", "in_order"):
        yield (
            f"algorithm.sampler: got {algorithm.sampler!r} with run.deterministic=true, expected 'in_order', because "
            "other samplers take groups in the order in which they become ready"
        )


def replay_problems(
    run: RunConfig, validation: ValidationConfig, algorithm: AlgorithmConfig, *, window: int
) -> Iterator[str]:
    """Yield one sentence for each key that cannot be combined with `run.replay`. It trains on the recorded groups of
    another run. window: number of versions by which rollouts run ahead."""
    if run.record:
        yield "run.record: got true with run.replay set, expected false, because a replay generates no groups"
    if validation.every:
        yield (
            f"validation.every: got {validation.every} with run.replay set, expected 0, because a replay has no engine"
        )
    if algorithm.dynamic_sampling.oversample > 1:
        yield (
            f"algorithm.dynamic_sampling.oversample: got {algorithm.dynamic_sampling.oversample:g} with run.replay "
            "set, expected 1, because a step has the groups that it had in the recorded run"
        )
    if window and algorithm.sampler not in ("auto", "in_order"):
        yield (
            f"algorithm.sampler: got {algorithm.sampler!r} with run.replay set, expected 'in_order', because a step "
            "has the groups that it had in the recorded run"
        )


NO_ROUTES_WITH = {
    "decode_context_parallel_size": (None, 1),
    "kv_transfer_config": (None,),
    "enable_eplb": (None, False),
}
"""Argument of vLLM 0.26 to 0.32 that can disable the report of routes -> the values that leave it enabled."""


def route_problems(environment: EnvironmentConfig, rollout: RolloutConfig) -> list[str]:
    """Return one sentence for each setting that keeps rows from carrying the engine's choice of experts."""
    several = [
        f"environment.max_rows: got {environment.max_rows} with router_replay.enabled=true, expected 1, because "
        "routes are recorded for the first row of an episode only"
    ]
    return several[: environment.max_rows > 1] + [
        f"rollout.vllm.{name}: got {rollout.vllm[name]!r} with router_replay.enabled=true, expected it unset, "
        "because vLLM reports no experts with it"
        for name, fine in NO_ROUTES_WITH.items()
        if name in rollout.vllm and rollout.vllm[name] not in fine
    ]


def _endpoint_problems(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.endpoint.enabled and rollout.endpoint.model == "base":
        yield (
            "rollout.endpoint.model: got 'base' with trainer.lora.rank above 0, expected another name, because this is "
            "the name of the model without the adapter"
        )


def lora_problems(trainer: TrainerConfig, adapter: str | None, reference_every: int) -> Iterator[str]:
    """Yield one sentence for each setting that does not go together with an adapter, or that needs one. adapter: value
    of `model.adapter`. reference_every: that of `loss.reference_every`."""
    lora = trainer.lora
    if not lora.rank:
        if adapter is not None:
            yield (
                f"model.adapter: got {adapter!r} with trainer.lora.rank=0, expected trainer.lora.rank to "
                "be the rank of that adapter"
            )
        return
    if reference_every:
        yield (
            f"loss.reference_every: got {reference_every} with trainer.lora.rank={lora.rank}, expected 0, because the "
            "reference model is the adapter's base, which does not change"
        )
    if trainer.moe.bias_update_rate:
        yield (
            f"trainer.moe.bias_update_rate: got {trainer.moe.bias_update_rate:g} with trainer.lora.rank={lora.rank}, "
            "expected 0, because the biases of experts belong to the base, which does not change"
        )
    if lora.base != "model" and (trainer.backend != "fsdp" or trainer.topology.world != trainer.dp):
        yield (f"trainer.lora.base: got {lora.base!r}, expected 'model', or {ROUNDED_MESH}")


def group_problems(algorithm: AlgorithmConfig, advantage: AdvantageConfig, *, distils: bool) -> Iterator[str]:
    """Yield one sentence for each setting that compares the rows of a group with each other, if a group is one row.
    distils: whether teachers give a signal, so that advantages from rewards may be 0."""
    if algorithm.group_size > 1:
        return
    if advantage.compares_group and not distils:
        yield (
            f"algorithm.group_size: got 1 with advantage.kind={advantage.kind!r}, expected at least 2 (or "
            "advantage.kind='reinforce_pp' with advantage.baseline='step'), because a group of one sample has no "
            "baseline of its own"
        )
    if algorithm.dynamic_sampling.enabled:
        yield (
            "algorithm.dynamic_sampling.enabled: got true with algorithm.group_size=1, expected false, because the "
            "rewards of a group of one sample are always equal"
        )


def objective_problems(
    loss: LossConfig, advantage: AdvantageConfig, reward: RewardConfig, prev_logprobs: str, trainer: TrainerConfig
) -> Iterator[str]:
    """Yield one sentence for each contradiction between the keys of losses, advantages, rewards and the trainer.
    prev_logprobs: value of `algorithm.prev_logprobs`."""
    if loss.correction != "none":
        low, high = loss.correction_bounds
        if low >= high:
            yield f"loss.correction_high: got {high}, expected a number above loss.correction_low={low}"
    if loss.correction != "none" and prev_logprobs == "rollout":
        yield (
            f"loss.correction: got {loss.correction!r} with algorithm.prev_logprobs='rollout', expected "
            "algorithm.prev_logprobs='recompute', because without it all importance weights are 1"
        )
    if loss.reference_model is not None and loss.reference_every:
        yield (
            f"loss.reference_every: got {loss.reference_every} with loss.reference_model={loss.reference_model!r}, "
            "expected 0, because only a reference model with the policy's initial weights can move towards the policy"
        )
    if loss.reference_model is not None and trainer.topology.pp > 1:
        yield (
            f"loss.reference_model: got {loss.reference_model!r} with trainer.pp={trainer.pp}, expected trainer.pp=1, "
            "because the train workers run other models than the policy with the backend fsdp, which has no pipeline"
        )
    counting = [function.label for function in reward.functions if function.weight]
    if advantage.kind == "gdpo" and len(counting) < 2:
        yield (
            f"advantage.kind: got 'gdpo' with {len(counting)} reward functions whose weight is not 0, expected at "
            "least two, because it normalises each of them separately"
        )
