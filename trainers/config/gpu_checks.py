"""Checks which GPUs a run uses: its own maps, hosts that join later, roles that take turns, and GPUs of a pool."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ...actors.engines.config import ModelConfig
from ...actors.rollout.config import RolloutConfig
from ...actors.weight_sync.config import SyncConfig
from ..backends.config import TrainerConfig
from .config import Config, ResourcesConfig
from .evaluation_sets import EvaluationConfig, ValidationConfig
from .staleness import Mode


def gpu_map_problems(
    resources: ResourcesConfig, rollout: RolloutConfig, trainer: TrainerConfig, teachers: int
) -> Iterator[str]:
    """Yield one sentence for each mistake in `resources.trainer_gpus` and `resources.rollout_gpus`. They must give
    each train worker one GPU and each engine as many as it has processes. teachers: number of teachers in engines."""
    engines, tp = rollout.num_engines + teachers, rollout.tp
    each = f"rollout.num_engines={rollout.num_engines}" + f" and {teachers} teacher(s)" * (teachers > 0)
    maps = {"trainer_gpus": resources.trainer_gpus, "rollout_gpus": resources.rollout_gpus}
    if None in maps.values():
        missing = [name for name, gpus in maps.items() if gpus is None]
        if len(missing) == len(maps):
            return
        yield f"resources.{missing[0]}: not set, expected GPU numbers, because the other map of GPUs is set"
        return
    wanted = {
        "trainer_gpus": (trainer.topology.world, "one for each train worker of the mesh in section trainer"),
        "rollout_gpus": (engines * tp, f"rollout.tp={tp} for each of {each}"),
    }
    for name, gpus in maps.items():
        assert gpus is not None
        count, what = wanted[name]
        if len(gpus) != count:
            yield f"resources.{name}: got {len(gpus)} GPU(s), expected {count}, {what}"
        elif len(set(gpus)) != count:
            yield (
                f"resources.{name}: got {list(gpus)}, expected each GPU once, because two processes of one role cannot "
                "share a GPU"
            )


def elastic_problems(resources: ResourcesConfig, sync: SyncConfig, store: str) -> Iterator[str]:
    """Yield one sentence for each setting that prevents a run from using hosts that join later. store: kind of the
    store."""
    if not resources.elastic:
        return
    because = "with resources.elastic=true"
    if resources.ray_address is None:
        yield f"resources.ray_address: not set {because}, expected the address of a Ray cluster that hosts can join"
    if sync.transport == "ipc" or store == "shm":
        key = "sync.transport: got 'ipc'" if sync.transport == "ipc" else "dataplane.store.kind: got 'shm'"
        yield f"{key} {because}, expected 'auto', because that is shared memory of one host"


def switch_obstacles(
    mode: Mode,
    sync: SyncConfig,
    validation: ValidationConfig,
    evaluation: Mapping[str, EvaluationConfig],
    replay: str | None,
    teachers: Collection[str] = (),
) -> Iterator[str]:
    """Yield one clause for each setting that prevents engines and train workers from taking turns on their GPUs. The
    clause names the setting, the necessary value and the reason. replay: the folder in `run.replay`. teachers: names of
    the teachers in engines."""
    if mode != "sync":
        yield (
            f"algorithm.mode={mode!r}, expected algorithm.mode='sync', because in other modes both roles are busy at "
            "the same time"
        )
    if validation.every and validation.background:
        yield (
            "validation.background=true, expected false, because the engines would answer while the trainer computes"
        )
    for name, one in evaluation.items():
        if one.every and one.background:
            yield (
                f"evaluation.{name}.background=true, expected false, because the engines would answer while the "
                "trainer computes"
            )
    if sync.delta:
        yield (
            "sync.delta=true, expected false, because a sleeping engine keeps no version that a delta could refer to"
        )
    if sync.staging == "full":
        yield "sync.staging='full', expected 'auto', because the engine's second copy would take the trainer's place"
    if replay is not None:
        yield "run.replay set, expected it unset, because a replay has no engine"
    if teachers:
        yield (
            f"distillation.teachers with where='engine' ({', '.join(teachers)}), expected where='train', because a "
            "teacher in an engine answers while the trainer holds the GPUs"
        )


# ---------------- These functions check a run that borrows its GPUs from a pool.


def pool_problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each setting that prevents a run from borrowing its GPUs. Without a pool, yield none."""
    if config.pool.address is None:
        return
    because = "with pool.address set"
    if config.shares_engines:
        base = "model" if config.trainer.lora.rank == 0 else config.trainer.lora.base
        yield from _shared_engine_problems(config.resources, config.model, base, sends_adapter=config.sends_adapter)
    else:
        yield from _map_problems(config.resources, config.rollout.num_engines, config.engine_gpus, because)
    if not config.overlap.window:
        yield (
            f"algorithm.mode: got {config.algorithm.mode!r} {because}, expected 'async' or 'async_streaming' with "
            "algorithm.max_staleness above 0, because in other modes no engine generates while the run trains"
        )
    if config.rollout.num_actors is None:
        yield (
            f"rollout.num_actors: not set {because}, expected a number, because an engine inside a rollout actor "
            "cannot sleep while the actor goes on"
        )
    given = config.resources.ray_address
    if given not in (None, config.pool.address):
        yield (
            f"resources.ray_address: got {given!r} {because}, expected it unset, because a run joins the cluster "
            "of its pool"
        )
    if config.resources.switch_roles == "always":
        yield f"resources.switch_roles: got 'always' {because}, expected 'auto', because the pool grants the GPUs"
    if config.sync.in_flight == "wait":
        yield (
            f"sync.in_flight: got 'wait' {because}, expected 'keep' or 'abort', because training would keep its GPUs "
            "until the longest request of the engines that are awake has ended"
        )
    if config.sync.delta and not config.shares_engines:
        yield (
            f"sync.delta: got true {because}, expected false, because a sleeping engine keeps no version that a delta "
            "could refer to"
        )
    if config.run.replay is not None:
        yield f"run.replay: got a folder {because}, expected it unset, because a replay has no engine"
    background = [("validation", config.validation.every and config.validation.background)]
    background += [(f"evaluation.{name}", one.every and one.background) for name, one in config.evaluation.items()]
    yield from [
        f"{key}.background: got true {because}, expected false, because training waits for it with GPUs in its hands"
        for key, is_background in background
        if is_background
    ]


def _shared_engine_problems(
    resources: ResourcesConfig, model: ModelConfig, base: str, *, sends_adapter: bool
) -> Iterator[str]:
    because = "with pool.engines=shared"
    if not sends_adapter:
        yield (
            f"trainer.lora.rank: got 0 {because}, expected an adapter and sync.adapter=only, because the engines keep "
            "the base model for all their runs"
        )
    if base != "model":
        yield f"trainer.lora.base: got {base!r} {because}, expected 'model', because each run rounds its base by itself"
    if model.builtin:
        yield (
            f"model.path: got {model.path!r} {because}, expected a folder or hub id, because all runs need the same "
            "weights"
        )
    train, rollout = resources.trainer_gpus, resources.rollout_gpus
    if train is None or rollout is None:
        yield (
            f"resources.trainer_gpus: not set {because}, expected it and resources.rollout_gpus: GPUs of the pool, and "
            "those of its engines"
        )
    elif both := sorted(set(train).intersection(rollout)):
        yield (
            f"resources.trainer_gpus: got GPU {both[0]} {because}, expected none of resources.rollout_gpus, because "
            "the engines of the pool never sleep"
        )


def _map_problems(
    resources: ResourcesConfig, engines: int, shards: Sequence[Sequence[int]], because: str
) -> Iterator[str]:
    if resources.trainer_gpus is None or resources.rollout_gpus is None:
        yield f"resources.trainer_gpus: not set {because}, expected it and resources.rollout_gpus: GPUs of the pool"
        return
    train, rollout = set(resources.trainer_gpus), resources.rollout_gpus
    if beyond := sorted(train.difference(rollout)):
        yield (
            f"resources.trainer_gpus: got GPU {beyond[0]} {because}, expected GPUs of resources.rollout_gpus, because "
            "engines use the GPUs of training in the meantime"
        )
    if engines < 2:
        yield (
            f"rollout.num_engines: got {engines} {because}, expected at least 2, because one engine "
            "alone would have to sleep whenever the run trains"
        )
    elif all(train.intersection(shard) for shard in shards):
        yield (
            f"resources.trainer_gpus: got {sorted(train)} {because}, expected that one engine of "
            "resources.rollout_gpus has none of them, because it goes on generating while the run trains"
        )
    for shard in shards:
        if list(shard) != list(range(shard[0], shard[0] + len(shard))):
            yield f"resources.rollout_gpus: got {list(shard)} for one engine {because}, expected neighbouring GPUs"
