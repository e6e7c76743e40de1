"""Derives the settings from which each process of a run builds itself: its config sections, name, device and sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...actors.engine_actor import EngineSetup
from ...actors.engines.config import ModelConfig
from ...actors.engines.factory import MODULES as ENGINE_MODULES
from ...actors.engines.factory import EngineConfig
from ...actors.engines.protocol import SamplingParams
from ...actors.environments.config import EnvironmentConfig
from ...actors.rewards.config import RewardFunctionConfig
from ...actors.rollout.actor import RolloutSetup
from ...actors.rollout.config import DataConfig
from ...actors.rollout.journal import JournalConfig
from ...actors.rollout.routes import RouteRules
from ...actors.samples import SampleFile
from ...actors.train.shard_plans import Budget
from ...actors.train.worker import WorkerSetup
from ...actors.weight_sync.transports.factory import LASTING_KINDS, build_sender, resolve_kind
from ...actors.weight_sync.transports.protocol import ReceiverConfig, SenderConfig, WeightSender
from ...dataplane.config import DataPlaneConfig
from ...dataplane.directory.samplers import TaskConfig
from ...dataplane.handle import DataPlaneHandle
from ..advantages.estimators import build_advantages
from ..backends.config import BackendConfig, PrevSource
from ..backends.factory import MODULES as BACKEND_MODULES
from ..backends.factory import build_backend
from ..backends.model_split import resolved_packing
from ..base_model.prepare import model_config, route_spec
from ..config.config import Config
from ..errors import UserError
from .evaluation_plans import evaluation_plans
from .placement import Placement

POOL_BUCKET_MIB = 64
"""Size in MiB of the buckets of a run that shares a pool's GPUs. Trainer and engines keep two each in GPU memory, also
while others use the GPU."""


def transport(config: Config, placement: Placement) -> str:
    """Return the kind of weight transport that the run uses; `auto` is resolved by where its actors are. Raises
    UserError if the transport cannot work between the actors of `placement`."""
    kind = config.sync.transport
    if placement.shared and kind == "collective":
        raise UserError(
            f"sync.transport: got 'collective' with GPU {placement.shared_gpus[0]} shared by an engine and a train "
            "worker, expected 'auto' or 'ipc' (on several hosts 'store'), because NCCL takes no two processes of one "
            "group on a GPU"
        )
    if kind == "ipc" and placement.layout != "cpu" and not placement.one_host:
        raise UserError(
            "sync.transport: got 'ipc' with engines and train workers on several hosts, expected 'auto', because ipc "
            "shares the memory of one host"
        )
    return resolve_kind(kind, one_host=placement.one_host, shared_gpus=placement.shared)


def is_lasting(config: Config, placement: Placement) -> bool:
    """Return whether engines can read a version of the weights long after it was sent, without the trainer.

    They cannot with `ipc` between GPUs, where the next version overwrites the memory. In a run that shares a pool's
    GPUs, train rank 0 keeps the versions instead, because some are sent to no engine at first.
    """
    if config.pool.address is not None:
        return False
    kind = transport(config, placement)
    return kind in LASTING_KINDS and not (placement.layout != "cpu" and kind == "ipc")


def keeps_in_host(config: Config, placement: Placement) -> bool:
    """Return whether train rank 0 keeps the last versions of the weights in its host memory."""
    sync = config.sync
    return sync.delta or config.pool.address is not None or (sync.cache and not is_lasting(config, placement))


TASK = "train"
"""Name of the data plane's task (a named consumer of rows) through which the driver claims rows for training."""


def sampler(config: Config) -> str:
    """Return the name of the run's sampler, which decides in what order groups that are ready are trained on."""
    if config.algorithm.sampler != "auto":
        return config.algorithm.sampler
    if config.run.deterministic or config.overlap.window:
        return "in_order"
    return "ready_first" if config.overlap.by_chunk else "oldest_version_first"


def data_plane(config: Config) -> DataPlaneConfig:
    """Return the settings of the run's data plane, which may import the run's own sampler."""
    name, listed = sampler(config), config.dataplane.samplers
    if ":" not in name or name in listed:
        return config.dataplane
    return config.dataplane.model_copy(update={"samplers": (*listed, name)})


def task(config: Config, next_prompt: int, outstanding: Sequence[int]) -> TaskConfig:
    """Return the settings of the train task, the data plane's consumer through which the driver claims rows.

    next_prompt: position in the prompt stream of the first prompt that was never issued. outstanding: earlier positions
    whose groups were not trained on yet.
    """
    first = min(outstanding, default=next_prompt)
    settled = tuple(sorted(set(range(first, next_prompt)) - set(outstanding)))
    return TaskConfig(TASK, sampler(config), config.algorithm.sampler_options, first, settled)


def signal_terms(config: Config) -> list[tuple[str, float]]:
    """Return the rewards whose weighted sum decides whether a group has a training signal, as (name, weight).

    These are all rewards with a weight other than 0, except `overlong`, which only shapes the others.
    """
    return [(f.label, f.weight) for f in config.reward.functions if f.weight and f.kind != "overlong"]


GPU_WORKER_THREADS = 4
"""Largest number of compute threads that a worker with a GPU gets by default. What it computes on the host are many
small operations, such as laying out a microbatch, and waking the threads of a large host for each takes longer than
they do: on a host of 32 cores, 0.1 s for a microbatch of 16k tokens."""


def threads(config: Config, device: str | None) -> int:
    """Return the number of compute threads of each worker that computes on `device`; None for none of its own.

    Rollout actors and train workers take turns, so each side may use all cores.
    """
    side = max(config.rollout.num_engines * config.rollout.tp, config.trainer.topology.world)
    most = max(1, (os.cpu_count() or 1) // side)
    return config.resources.threads or (min(most, GPU_WORKER_THREADS) if (device or "").startswith("cuda") else most)


def sampling(config: Config) -> SamplingParams:
    """Return the sampling parameters of training rollouts."""
    rollout = config.rollout
    return SamplingParams(
        n=config.algorithm.group_size,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=config.run.seed,
        stop=rollout.stop,
    )


def engine_config(
    config: Config, name: str, model: str, handle: DataPlaneHandle, device: str, *, shared_gpu: bool = False
) -> EngineConfig:
    """Return the configuration of the engine that runs in actor `name`. model: local folder or hub id. shared_gpu:
    whether train workers use the engine's GPUs at the same time."""
    changes: dict[str, Any] = {}
    if config.run.replay:
        changes["engine"] = "scripted"  # asked for nothing
    if config.run.deterministic:
        # What else is in a batch rounds log-probs in the last bit: alone, a group comes out alike whenever it is made.
        changes["max_batch"] = config.algorithm.group_size
    sync = config.sync
    in_turns = config.resources.switch_roles == "always" or config.pool.address is not None
    if in_turns and device != "cpu" and sync.staging == "auto":
        # A sleeping engine finds much memory free, but a second copy of the weights would stand in the trainer's place.
        sync = sync.model_copy(update={"staging": "none"})
    return EngineConfig(
        config.rollout.model_copy(update=changes),
        config.model.model_copy(update={"path": model}),
        config.scripted,
        device=device,
        shared_gpu=shared_gpu,
        kept_free_bytes=0 if device == "cpu" else neighbour_bytes(config),
        max_model_len=config.engine_length,
        log=engine_log(config, name),
        seed=config.run.seed,
        receiver=ReceiverConfig(name, sync, device, handle, handle.store.key),
        routes=route_spec(config),
    )


def neighbour_bytes(config: Config) -> int:
    """Return how much of each GPU's memory an engine leaves free for processes that sleep there. They are those of the
    run's own trainer, and of an engine and a trainer of each of `pool.other_runs` runs. It is 0 for a run without a
    pool, or whose engines' memory is set by `rollout.kv_cache`."""
    if config.pool.address is None or config.rollout.kv_cache != "auto":
        return 0
    engine = config.pool.residual_mib
    trainer = engine + 2 * bucket_mib(config, "ipc", "cuda")
    return trainer + config.pool.other_runs * (engine + trainer) << 20


def engine_ahead(config: Config, device: str) -> tuple[tuple[str, ...], bool]:
    """Return what an actor with an engine can do before it knows its settings. It can import the modules of these
    names, which takes seconds, and start vLLM's engine process or not. On a CPU it does not, because vLLM then preloads
    libraries into that process, which it can only do once it knows its settings."""
    kind = "scripted" if config.run.replay else config.rollout.engine
    return (ENGINE_MODULES[kind], *_model_modules(config, needed=kind == "hf")), kind == "vllm" and device != "cpu"


def worker_modules(config: Config) -> tuple[str, ...]:
    """Return the names of the modules that a train worker needs and that take seconds to import."""
    kind = config.trainer.backend
    return (BACKEND_MODULES[kind], *_model_modules(config, needed=kind == "fsdp"))


def _model_modules(config: Config, *, needed: bool) -> tuple[str, ...]:
    """Return the name of transformers' module with the model's code if it is needed and the model's type is known."""
    kind = model_config(config).get("model_type", "qwen3" if config.model.builtin else None)
    return (f"transformers.models.{kind}.modeling_{kind}",) if needed and kind else ()


def engine_log(config: Config, name: str) -> str:
    """Return the path of the file in the run folder that receives the output of an engine's processes. The engine is
    that in actor `name`. Returns "" for a run without a folder."""
    index = name.rpartition(" ")[2]
    return os.path.join(config.run.dir, "engines", f"engine-{index}.log") if config.run.dir else ""


def engine_setup(
    config: Config, index: int, model: str, handle: DataPlaneHandle, device: str, *, shared_gpu: bool = False
) -> EngineSetup:
    """Return the settings from which engine actor `index` builds itself. shared_gpu: see `engine_config`."""
    name = f"engine {index}"
    engine = engine_config(config, name, model, handle, device, shared_gpu=shared_gpu)
    return EngineSetup(name, threads(config, device), engine)


def rollout_setup(
    config: Config, index: int, model: str, handle: DataPlaneHandle, device: str | None, *, shared_gpu: bool = False
) -> RolloutSetup:
    """Return the settings from which rollout actor `index` builds itself.

    device: device of the engine that it embeds; None if engines run in actors of their own. shared_gpu: see
    `engine_config`.
    """
    name, spec = f"rollout {index}", route_spec(config)
    return RolloutSetup(
        name=name,
        threads=threads(config, device),
        seed=config.run.seed,
        engine=None if device is None else engine_config(config, name, model, handle, device, shared_gpu=shared_gpu),
        rollout=config.rollout,
        environment=config.environment,
        model=config.model,
        tokenizer=model,
        reward=config.reward,
        tagged_rewards=tagged_rewards(config),
        data=config.data,
        evaluations=tuple(plan.setup for plan in evaluation_plans(config)),
        check_prompts=index == 0,
        data_plane=handle,
        mask_truncated=config.algorithm.mask_truncated,
        keeps_old_kv=config.sync.keeps_old_kv,
        engine_timeout_s=config.resources.stage_timeout_s,
        samples=sample_file(config),
        journal=journal(config),
        routes=None if spec is None else RouteRules(spec, config.router_replay),
    )


def sample_file(config: Config) -> SampleFile | None:
    """Return the run's file of episodes for people to read. None for a run that writes none, because it has no folder,
    because its settings say so, or because it trains on recorded groups, whose texts are not recorded."""
    samples = config.logging.samples
    if not samples.every or config.run.dir is None or config.run.replay:
        return None
    return SampleFile(os.path.join(config.run.dir, "samples.jsonl"), samples, config.algorithm.prompts_per_step)


def journal(config: Config) -> JournalConfig | None:
    """Return the settings of the journal, whose files rollout actors write finished groups to or read them from. None
    for a run without a journal."""
    run = config.run
    if not (run.record or run.replay or (run.journal and run.saves_checkpoints)):
        return None
    folder = os.path.join(run.replay or run.dir or ".", "journal")
    purpose = "replay" if run.replay else "record" if run.record else "resume"
    return JournalConfig(folder, _fingerprint(config), purpose=purpose)


def _fingerprint(config: Config) -> str:
    """Return a JSON text with all settings that determine what the rollouts generate.

    The text is stored in the journals of earlier runs, so it must never change for a given configuration.
    """
    rollout, data, seed = config.rollout, config.data, config.run.seed
    read = data.model_dump(include={"split", "prompt_field", "answer_field", "template", "options"})
    for name in (
        "subset", "answer_pattern", "chat_template", "chat_template_kwargs", "system_prompt", "overlong_prompts",
    ):  # fmt: skip
        if getattr(data, name) != getattr(DataConfig(), name):  # these came later
            read[name] = getattr(data, name)
    if data.overlong_prompts == "drop":
        read["max_prompt_tokens"] = data.max_prompt_tokens
    tagged = tagged_rewards(config)
    model = config.model.model_dump()
    if config.model.dtype == "auto":
        model["dtype"] = "float32"  # the default when the first journals were written
    sampled = asdict(sampling(config))
    del sampled["routes_from"], sampled["continues"]  # came later; they decide nothing
    for name in ("renderer", "renderer_options"):
        if model[name] == getattr(ModelConfig(), name):
            del model[name]  # these came later
    decisive = {
        "seed": seed,
        "model": model,
        "warmup": config.warmup.model_dump(),
        "data": {**read, "source": data.train, "seed": seed, "held_out": False},
        "sampling": sampled,
        "environment": [rollout.environment, rollout.tools, rollout.max_turns],
        "rewards": [
            {**_known_from_the_start(term), "name": term.label, "tagged": term.label in tagged}
            for term in config.reward.functions
        ],
    }
    if data.mixture:  # came later, as did the columns
        decisive["data"]["mixture"] = [part.model_dump() for part in data.mixture]
    if data.columns:
        decisive["data"]["columns"] = [column.model_dump() for column in data.columns]
    if config.reward.scale != 1.0 or config.reward.clip is not None:  # these came later
        decisive["reward"] = [config.reward.scale, config.reward.clip]
    if config.router_replay.enabled:
        decisive["routes"] = config.router_replay.model_dump(include={"missing", "max_missing_share"})
    if config.environment != EnvironmentConfig():
        decisive["own_environment"] = config.environment.model_dump()
    if config.algorithm.mask_truncated:
        decisive["mask_truncated"] = True
    if config.sync.keeps_old_kv:
        decisive["keeps_old_kv"] = True
    return json.dumps(decisive, sort_keys=True, default=str)


def _known_from_the_start(term: RewardFunctionConfig) -> dict[str, Any]:
    """Return the keys of a reward function, without those that came later if they have their defaults."""
    keys = term.model_dump()
    for name in ("per", "runs", "timeout_s", "retries"):
        if keys[name] == RewardFunctionConfig.model_fields[name].default:
            del keys[name]
    return keys


def reward_weights(config: Config) -> dict[str, float]:
    """Return the weight of each reward in the rubric, which is the weighted sum of all rewards: name -> weight."""
    return {function.label: function.weight for function in config.reward.functions}


def tagged_rewards(config: Config) -> frozenset[str]:
    """Return the names of the rewards that the advantage estimator or dynamic sampling needs one by one. Each row then
    carries each of them as a tag (a number that can be read without the row's content)."""
    one_by_one = set(build_advantages(config.advantage, reward_weights(config)).components)
    if config.algorithm.dynamic_sampling.enabled:
        one_by_one |= {name for name, _ in signal_terms(config)}
    return frozenset(one_by_one)


def worker_setup(
    config: Config, rank: int, model: str, handle: DataPlaneHandle, *, one_host: bool, placement: Placement, device: str
) -> WorkerSetup:
    """Return the settings from which train worker `rank` builds itself. one_host: whether all processes of the run are
    on one host."""
    sync, kind = config.sync, transport(config, placement)
    folder = sync.dir or os.path.join(config.run.dir or ".", "weights")
    sender = SenderConfig(handle.run_id, sync, folder=folder, data_plane=handle, device=device, key=handle.store.key)
    return WorkerSetup(
        rank=rank,
        topology=config.trainer.topology,
        fetch=config.trainer.fetch,
        threads=threads(config, device),
        temperature=config.rollout.temperature,
        timeout_s=config.resources.stage_timeout_s,
        collective_timeout_s=config.resources.collective_timeout_s,
        data_plane=handle,
        backend=partial(build_backend, backend_config(config, model)),
        sender=partial(_sender_at, kind, sender),
        sync=sync,
        bucket_bytes=bucket_mib(config, kind, device) << 20,
        keep_versions=config.pool.address is not None,
        samples=sample_file(config),
        one_host=one_host,
        single_rank_groups=config.trainer.backend == "megatron",
        routes=route_spec(config),
        columns=config.data.columns,
    )


def _sender_at(kind: str, config: SenderConfig, host: str) -> WeightSender:
    """Build the sender of weight transport `kind`, which engines reach at the IP address `host`."""
    return build_sender(kind, replace(config, host=host))


def bucket_mib(config: Config, kind: str, device: str) -> int:
    """Return the size in MiB of the buckets in which a trainer on `device` sends weights by transport `kind`. A bucket
    is one message."""
    if config.sync.bucket_mib is not None:
        return config.sync.bucket_mib
    if config.pool.address is not None:
        return POOL_BUCKET_MIB
    return 512 if device.startswith("cuda") and kind in ("ipc", "collective") else 64


def backend_config(config: Config, model: str) -> BackendConfig:
    """Return the configuration of the train backend, the same for every rank. model: local folder or hub id."""
    loss = config.loss
    if loss.aggregation == "sequence_sum" and loss.length_norm is None:
        loss = loss.model_copy(update={"length_norm": config.rollout.max_new_tokens})
    return BackendConfig(
        model,
        config.trainer,
        loss,
        config.scripted,
        config.router_replay,
        total_steps=config.algorithm.steps,
        updates_per_step=config.algorithm.updates_per_step,
        prev=_prev_source(config),
        columns=config.data.columns,
        with_reference=config.with_reference,
    )


def _prev_source(config: Config) -> PrevSource:
    """Return where the log-probs of the policy before the step come from, see `BackendConfig.prev`."""
    if config.algorithm.prev_logprobs == "rollout":
        return "rollout"
    return "train_pass" if config.algorithm.updates_per_step == 1 else "fixed"


def with_packing(config: Config, placement: Placement) -> Config:
    """Return `config` with what `trainer.packing: auto` means for its model and the places of its train workers."""
    model = SimpleNamespace(**model_config(config))
    packing = resolved_packing(config.trainer, model, gpu=placement.layout != "cpu")
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"packing": packing})})


def budget(config: Config) -> Budget:
    """Return the limit on a microbatch's tokens, and the coefficients that give a row's compute cost from its length.

    For a row of L tokens, attention takes 4·h·L FLOPs per token and layer, and the matrix products 24·h², where h is
    the hidden size; so attention costs L / (6·h) of what the matrix products cost.
    """
    hidden, packing = model_config(config).get("hidden_size"), config.trainer.packing
    assert packing != "auto", "a run begins by deciding what it means"
    return Budget(
        config.trainer.tokens_per_microbatch,
        linear_cost=1.0,
        quadratic_cost=1.0 / (6 * hidden) if hidden else 0.0,
        packing=packing,
    )
