"""Describes a run without starting it: placement, memory, and the rows and microbatches of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.engines.config import engine_dtype
from ...codecs.integers import ceil_div, round_up
from ...dataplane.topology import Topology
from ..base_model.prepare import check_model, model_config
from ..config.checks import cautions, step_bytes
from ..config.config import Config
from ..errors import UserError
from .gpu_table import gpu_lines, plan_here

TRAINING_COPIES = 4
"""Number of float32 values that training keeps for each parameter: weight, gradient and two Adam moments."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process that a run would start."""

    name: str
    """Name of the process."""
    cpus: int
    """Number of logical CPUs that it requests from Ray."""
    what: str
    """What the process does, in a few words."""


def placements(config: Config) -> list[PlannedProcess]:
    """Return every process that the run would start, except Ray's own."""
    store = config.dataplane.store
    listed = [
        PlannedProcess("driver", 0, "controller: receipts, plans, metrics"),
        PlannedProcess("directory", 0, "row metadata"),
    ]
    if store.kind in ("simple", "tcp"):
        units = range(store.num_units or 1)
        listed += [PlannedProcess(f"storage unit {unit}", 0, "blocks of rows") for unit in units]
    rollout = config.rollout
    engine = f"engine {rollout.engine}" + f", tp {rollout.tp}" * (rollout.tp > 1)
    if rollout.num_actors is None:
        listed += [PlannedProcess(f"rollout {index}", rollout.tp, engine) for index in range(rollout.num_engines)]
    else:
        listed += [PlannedProcess(f"engine {index}", rollout.tp, engine) for index in range(rollout.num_engines)]
        listed += [
            PlannedProcess(f"rollout {index}", 1, "environments, rewards") for index in range(rollout.num_actors)
        ]
    topology = config.trainer.topology
    return listed + [
        PlannedProcess(f"train worker {rank}", 1, f"backend {config.trainer.backend}{_role(topology, rank)}")
        for rank in range(topology.world)
    ]


def _role(topology: Topology, rank: int) -> str:
    """Return, in words, a rank's coordinates in the train mesh and whether it leads its data-parallel replica; "" if
    each replica consists of one rank."""
    if topology.replica_size == 1:
        return ""
    place = topology.place(rank)
    coordinates = [f"dp {place.dp}"]
    for name in ("tp", "cp", "pp"):
        coordinates += [f"{name} {getattr(place, name)}"] if getattr(topology, name) > 1 else []
    return ", " + " ".join(coordinates) + (", leader" if rank == topology.leader(place.dp) else "")


def describe(config: Config) -> str:
    """Return the description of the run that `--dry-run` prints after the resolved configuration. Raises UserError if
    the model cannot be used, as the run itself would."""
    check_model(config)
    algorithm, trainer = config.algorithm, config.trainer
    topology = trainer.topology
    rows, longest = config.rows_per_step, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    per_replica = rows // topology.dp
    padded = round_up(longest, topology.pad_multiple)
    microbatches = ceil_div(per_replica, trainer.tokens_per_microbatch // padded)
    lines = ["placement"]
    lines += [f"  {place.name:<16} {place.cpus} CPU   {place.what}" for place in placements(config)]
    lines += ["GPUs", *_gpu_lines(config), "memory"]
    params = parameters(config)
    if params is None:
        lines += [f"  model            {config.model.path}: read when the run starts"]
    else:
        trained = trained_bytes(config, params)
        lines += [
            f"  model            {params:,} parameters",
            f"  train worker     {_size(trained)} weights, gradients, Adam"
            + (" and reference" * config.with_reference),
            f"  engine           {_size(engine_bytes(config, params))} weights"
            + f" in each of {config.rollout.tp} processes" * (config.rollout.tp > 1),
        ]
    if params is not None:
        lines += [
            f"  host memory      {_size(host_bytes(config, params, gpus=False))} in each train worker without GPUs, "
            f"{_size(host_bytes(config, params, gpus=True))} with GPUs"
        ]
    store = config.dataplane.store
    lines += [
        f"  store ({store.kind})".ljust(19)
        + f"at most {_size(step_bytes(config))} a step; {store.capacity_mib} MiB in all",
        "plan of a step",
        f"  {algorithm.prompts_per_step} prompts x {algorithm.group_size} samples = {rows} rows of up to {longest} "
        "tokens",
        f"  {trainer.dp} replica(s) of {topology.replica_size} rank(s) x {per_replica} rows, at most {microbatches} "
        f"microbatch(es) of {trainer.tokens_per_microbatch} tokens each",
        f"  {algorithm.steps} steps, validation every {config.validation.every}"
        if config.validation.every
        else f"  {algorithm.steps} steps, no validation",
    ]
    lines += [f"note: {line}" for line in cautions(config)]
    return "\n".join(lines)


def _gpu_lines(config: Config) -> list[str]:
    placement = plan_here(config)
    if placement is None:
        return [f"  those of the Ray cluster at {config.resources.ray_address}, which the run sees when it joins"]
    return gpu_lines(placement)


def trained_bytes(config: Config, params: int) -> int:
    """Return the number of bytes that one train worker holds: float32 weights, gradients, Adam moments and, if the run
    needs it, reference model.

    The result takes into account how the train backend shards them over ranks.
    """
    trainer = config.trainer
    topology = trainer.topology
    if trainer.backend == "fsdp":
        return params * 4 * (TRAINING_COPIES + config.with_reference) // topology.world
    moments = 2 / (topology.dp * topology.cp if trainer.distributed_optimizer else 1)
    copies = TRAINING_COPIES - 2 + moments + config.with_reference
    return int(params * 4 * copies) // (topology.tp * topology.pp)


def engine_bytes(config: Config, params: int) -> float:
    """Return the number of bytes of the weights in one process of an engine."""
    return params * value_bytes(config) / config.rollout.tp


def value_bytes(config: Config) -> int:
    """Return the number of bytes of one number in the engines on this machine."""
    return {"float32": 4, "bfloat16": 2}[engine_dtype(config.model, gpu=_has_gpus())]


def _has_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def host_bytes(config: Config, params: int, *, gpus: bool) -> int:
    """Return the number of bytes of host memory that one train worker needs for weights, gradients, optimizer state and
    reference model. No extra memory is needed at the start, because every rank reads only its own shards of the model's
    files."""
    trainer, topology = config.trainer, config.trainer.topology
    if trainer.backend == "scripted":
        return 0
    if not gpus or trainer.offload:
        return trained_bytes(config, params)
    if not config.with_reference or (trainer.backend == "fsdp" and topology.world == 1):
        return 0
    # On GPUs the backends keep the reference in host memory between uses; one FSDP rank keeps it on its GPU.
    return params * 4 // (topology.world if trainer.backend == "fsdp" else topology.tp * topology.pp)


def check_host_memory(config: Config, params: int, total: int) -> None:
    """Raise UserError if the train workers together need more host memory than `total` bytes. A no-op for a run that
    joins a Ray cluster, and on a machine without GPUs."""
    if config.resources.ray_address is not None or not _has_gpus():
        return
    world = config.trainer.topology.world
    needed = host_bytes(config, params, gpus=True)
    if needed * world > total:
        raise UserError(
            f"model.path: got {config.model.path!r} with {params:,} parameters, expected at most {_size(total)} of "
            f"host memory, which this machine has, for {world} train worker(s) of {_size(needed)}"
        )


def parameters(config: Config) -> int | None:
    """Return the number of parameters of a dense Llama-like model, computed from the model's config. Returns None if
    that config is not on this machine or the model is of another kind."""
    return _dense_parameters(model_config(config))


def _dense_parameters(model: dict[str, Any]) -> int | None:
    if "num_experts" in model or not {"hidden_size", "num_hidden_layers", "intermediate_size"} <= set(model):
        return None
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim") or hidden // heads
    kv_heads = model.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * model["intermediate_size"] + 2 * hidden
    tables = 1 if model.get("tie_word_embeddings") else 2
    return model["num_hidden_layers"] * layer + tables * model["vocab_size"] * hidden + hidden


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
