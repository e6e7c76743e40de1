"""Checks that a run which borrows its GPUs from a pool can do so, and describes each obstacle in one sentence."""

from __future__ import annotations

from .config import Config


def pool_problems(config: Config) -> list[str]:
    """Return one sentence for each setting with which a run cannot borrow its GPUs from a pool; [] without a pool."""
    if config.pool.address is None:
        return []
    because = "with pool.address set"
    return _map_problems(config, because) + _mode_problems(config, because)


def _map_problems(config: Config, because: str) -> list[str]:
    resources = config.resources
    if resources.trainer_gpus is None or resources.rollout_gpus is None:
        return [f"resources.trainer_gpus: not set {because}, expected it and resources.rollout_gpus: GPUs of the pool"]
    problems = []
    train, rollout = set(resources.trainer_gpus), resources.rollout_gpus
    if beyond := sorted(train.difference(rollout)):
        problems.append(
            f"resources.trainer_gpus: got GPU {beyond[0]} {because}, expected GPUs of resources.rollout_gpus, because "
            "engines use the GPUs of training in the meantime"
        )
    shards = config.engine_gpus
    if len(shards) < 2:
        problems.append(
            f"rollout.num_engines: got {config.rollout.num_engines} {because}, expected at least 2, because one engine "
            "alone would have to sleep whenever the run trains"
        )
    elif all(train.intersection(shard) for shard in shards):
        problems.append(
            f"resources.trainer_gpus: got {sorted(train)} {because}, expected that one engine of "
            "resources.rollout_gpus has none of them, because it goes on generating while the run trains"
        )
    for shard in shards:
        if list(shard) != list(range(shard[0], shard[0] + len(shard))):
            problems.append(
                f"resources.rollout_gpus: got {list(shard)} for one engine {because}, expected neighbouring GPUs"
            )
    return problems


def _mode_problems(config: Config, because: str) -> list[str]:
    problems = []
    if not config.overlap.window:
        problems.append(
            f"algorithm.mode: got {config.algorithm.mode!r} {because}, expected 'async' or 'async_streaming' with "
            "algorithm.max_staleness above 0, because in other modes no engine generates while the run trains"
        )
    if config.rollout.num_actors is None:
        problems.append(
            f"rollout.num_actors: not set {because}, expected a number, because an engine inside a rollout actor "
            "cannot sleep while the actor goes on"
        )
    given = config.resources.ray_address
    if given not in (None, config.pool.address):
        problems.append(
            f"resources.ray_address: got {given!r} {because}, expected it unset, because a run joins the cluster "
            "of its pool"
        )
    if config.resources.switch_roles == "always":
        problems.append(
            f"resources.switch_roles: got 'always' {because}, expected 'auto', because the pool decides who has a GPU"
        )
    if config.sync.in_flight == "wait":
        problems.append(
            f"sync.in_flight: got 'wait' {because}, expected 'keep' or 'abort', because training would keep its GPUs "
            "until the longest request of the engines that are awake has ended"
        )
    if config.sync.delta:
        problems.append(
            f"sync.delta: got true {because}, expected false, because a sleeping engine keeps no version that a delta "
            "could refer to"
        )
    if config.run.replay is not None:
        problems.append(f"run.replay: got a folder {because}, expected it unset, because a replay has no engine")
    background = [("validation", config.validation.every and config.validation.background)]
    background += [(f"evaluation.{name}", one.every and one.background) for name, one in config.evaluation.items()]
    problems += [
        f"{key}.background: got true {because}, expected false, because training waits for it with GPUs in its hands"
        for key, is_background in background
        if is_background
    ]
    return problems
