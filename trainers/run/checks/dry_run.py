"""Describes a run without starting it: placement, memory, and the rows and microbatches of a step.

`headrace train --dry-run` prints the lines of `gpu_lines`; `headrace doctor` prints them for the default configuration.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ....actors.engines.config import ModelConfig, engine_batch
from ....actors.engines.vllm.options import default_on_cpu, token_bytes
from ....actors.process.memory import assumed_machine, available_memory, gpu_sizes
from ....actors.rollout.config import RolloutConfig
from ....actors.train.topology import Topology
from ....actors.weight_sync.config import SyncConfig
from ....codecs.integers import ceil_div, round_up
from ....codecs.tokens.routes import RouteSpec
from ....dataplane.config import StoreConfig
from ...backends.config import TrainerConfig
from ...base_model.prepare import check_model, model_config, route_spec, sizes_in_store
from ...cluster.gpu_memory import (
    cached_bytes,
    decide_roles,
    engine_bytes,
    estimate,
    has_gpus,
    host_bytes,
    parameters,
    teacher_bytes,
    trained_bytes,
)
from ...cluster.places.placement import Host, Placement
from ...cluster.places.placement_plan import PlacementRequest, plan_placement
from ...cluster.transport_choice import WeightRoute
from ...config.checks import cautions
from ...config.config import Config, PoolConfig, ResourcesConfig
from ...config.store_demand import ROLLOUT_TOKEN_BYTES, StoreDemand
from ...errors import UserError


def plan_here(request: PlacementRequest, resources: ResourcesConfig, sync: SyncConfig) -> Placement | None:
    """Return the placement of a run with `request` on this machine, or on the assumed one. Returns None for a run that
    joins a Ray cluster, because its hosts are not known yet. Raises UserError if the run does not fit on the machine's
    GPUs, or if its weight transport cannot work between them."""
    assumed = assumed_machine()
    if resources.ray_address is not None and assumed is None:
        return None
    here = local_host(resources.num_cpus or max(os.cpu_count() or 1, request.num_cpus))
    hosts = [replace(here, name=f"host {index}") for index in range(assumed.num_hosts)] if assumed else [here]
    placement = plan_placement(request, hosts)
    WeightRoute.of(sync, placement, pooled=request.pooled)
    return placement


def local_host(num_cpus: int) -> Host:
    """Return this machine as the run's own Ray will see it. The host has all GPUs that this process can use, and as
    many logical CPUs as Ray gets."""
    gpus = count_gpus()
    return Host(socket.gethostname(), gpus, tuple(range(gpus)), num_cpus)


def count_gpus() -> int:
    """Return the number of GPUs that this process can use, or the number of GPUs of an assumed host.
    CUDA_VISIBLE_DEVICES limits the GPUs if it is set."""
    assumed = assumed_machine()
    if assumed is not None:
        return assumed.gpus
    present = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return present
    return min(present, len([name for name in shown.split(",") if name not in ("", "NoDevFiles")]))


def gpu_lines(placement: Placement, more: Mapping[int, str] | None = None) -> list[str]:
    """Return a line with the layout and its reason, then a line for each GPU that the run uses. The line of a GPU has
    its number over all hosts, its host, and the actors on it. more: number of a GPU -> text to append to its line.
    """
    on_gpu: dict[int, list[str]] = {}
    host_of: dict[int, str] = {}
    for seat in (*placement.ranks, *placement.engines, *placement.teachers):
        for number in placement.numbers(seat):
            assert seat.host is not None, "an actor with GPUs has a host"
            on_gpu.setdefault(number, []).append(seat.name)
            host_of[number] = placement.hosts[seat.host].name
    lines = [f"  {placement.sentence}"]
    for number, names in sorted(on_gpu.items()):
        line = f"  GPU {number:<12} {host_of[number]:<12} {', '.join(names)}"
        lines.append(line + (f"   {more[number]}" if more and number in more else ""))
    unused = placement.num_gpus - len(on_gpu)
    if on_gpu and unused:
        lines.append(f"  not used         {unused} GPU(s)")
    return lines


VLLM_BYTE_EXPERTS = 256
"""Largest number of experts for which vLLM stores an expert's id in one byte."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process that a run would start."""

    name: str
    """Name of the process."""
    cpus: int
    """Number of logical CPUs that the process requests from Ray."""
    what: str
    """Purpose of the process, in a few words."""


def placements(request: PlacementRequest, store: StoreConfig, engine: str, backend: str) -> list[PlannedProcess]:
    """Return every process that the run would start, except Ray's own processes. engine, backend: kinds of the engine
    and the train backend."""
    listed = [
        PlannedProcess("driver", 0, "controller: receipts, plans, metrics"),
        PlannedProcess("directory", 0, "row metadata"),
    ]
    if store.kind in ("simple", "tcp"):
        units = range(store.num_units or 1)
        listed += [PlannedProcess(f"storage unit {unit}", 0, "blocks of rows") for unit in units]
    tp, what = request.tp, f"engine {engine}" + f", tp {request.tp}" * (request.tp > 1)
    kind = "rollout" if request.num_actors is None else "engine"
    listed += [PlannedProcess(f"{kind} {index}", tp, what) for index in range(request.num_engines)]
    listed += [PlannedProcess(name, tp, what) for name in request.teachers]
    listed += [
        PlannedProcess(f"rollout {index}", 1, "environments, rewards" if request.num_engines else "rows of sft.train")
        for index in range(request.num_actors or 0)
    ]
    topology = request.topology
    return listed + [
        PlannedProcess(f"train worker {rank}", 1, f"backend {backend}{_role(topology, rank)}")
        for rank in range(topology.world)
    ]


def _role(topology: Topology, rank: int) -> str:
    """Return, in words, a rank's coordinates in the train mesh and whether it leads its data-parallel replica. Returns
    "" if each replica consists of one rank."""
    if topology.replica_size == 1:
        return ""
    place = topology.place(rank)
    coordinates = [f"dp {place.dp}"]
    for name in ("tp", "cp", "pp"):
        coordinates += [f"{name} {getattr(place, name)}"] if getattr(topology, name) > 1 else []
    return ", " + " ".join(coordinates) + (", leader" if rank == topology.leader(place.dp) else "")


def describe(config: Config, plan: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Return the description of the run that `--dry-run` prints before the resolved configuration. plan, notes: lines
    about the prompts, see `PromptsRead`. Raises UserError like the run itself if the model cannot be used."""
    check_model(config)
    request, kinds = PlacementRequest.of(config), (config.rollout.engine, config.trainer.backend)
    lines = ["placement"]
    lines += [
        f"  {place.name:<16} {place.cpus} CPU   {place.what}"
        for place in placements(request, config.dataplane.store, *kinds)
    ]
    described = _Description(config)
    lines += ["GPUs", *described.gpus(), "memory", *described.model(), *described.store()]
    lines += ["plan of a step", *described.plan(), *plan]
    risks = cautions(config.algorithm, config.loss, config.trainer, config.rollout, window=config.overlap.window)
    lines += [f"note: {line}" for line in (*risks, *notes)]
    return "\n".join(lines)


class _Description:
    def __init__(self, config: Config) -> None:
        self._config = config

    def gpus(self) -> list[str]:
        config = self._config
        if config.pool.address is not None:
            return _pool_lines(config.pool, config.resources.trainer_gpus or (), config.engine_gpus)
        placement = plan_here(PlacementRequest.of(config), config.resources, config.sync)
        if placement is None:
            return [f"  those of the Ray cluster at {config.resources.ray_address}, which the run sees when it joins"]
        return gpu_lines(placement)

    def model(self) -> list[str]:
        """Return lines about the memory that the model takes in engines and train workers."""
        config = self._config
        trainer, rollout, model = config.trainer, config.rollout, config.model
        params, reference = parameters(model), config.with_reference
        if params is None:
            return [f"  model            {model.path}: read when the run starts"]
        trained = trained_bytes(trainer, params, with_reference=reference)
        teachers = teacher_bytes(trainer, config.distillation)
        on_cpus = host_bytes(trainer, params, with_reference=reference, gpus=False)
        on_gpus = host_bytes(trainer, params, with_reference=reference, gpus=True)
        return [
            f"  model            {params:,} parameters",
            f"  train worker     {_size(trained)} weights, gradients, Adam" + (" and reference" * reference),
            *([f"  teachers         {_size(teachers)} weights in each train worker"] if teachers else []),
            *[
                f"  engine           {_size(engine_bytes(rollout, model, params))} weights"
                + f" in each of {rollout.tp} processes" * (rollout.tp > 1)
            ][: rollout.num_engines],
            f"  host memory      {_size(on_cpus)} in each train worker without GPUs, {_size(on_gpus)} with GPUs",
            *self._memory(),
        ]

    def _memory(self) -> list[str]:
        """Return the estimated memory of a GPU that holds an engine and a train worker, part by part. The last line
        says whether the roles take turns on this machine's GPUs (`resources.switch_roles`). Returns [] if the model's
        size is not known, or if no GPU can be shared here."""
        config = self._config
        sizes = gpu_sizes()
        memory = estimate(config, min(sizes, default=None))
        if memory is None or (not sizes and config.resources.switch_roles != "always"):
            return []
        parts: list[tuple[str, Mapping[str, int]]] = [
            ("trainer", memory.trainer),
            ("engine", memory.engine),
            ("shared", {"weight buckets": memory.buckets, "contexts": memory.contexts}),
            ("host, in turns", memory.host),
        ]
        lines = ["memory of a GPU with both roles (an estimate)"]
        for side, of in parts:
            listed = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in of.items() if num_bytes)
            lines += [f"  {side:<16} {listed}"] if listed else []
        lines += [
            f"  {'at the peak':<16} {_size(memory.resident)} both resident, {_size(memory.taking_turns)} in turns"
        ]
        if sizes and (placement := plan_here(PlacementRequest.of(config), config.resources, config.sync)) is not None:
            why = decide_roles(config, placement, min(sizes)).why
            lines += [f"  {why}"] if why else []
        return lines

    def store(self) -> list[str]:
        config = self._config
        store, routes = config.dataplane.store, route_spec(config.router_replay, config.model)
        sizes = sizes_in_store(config.router_replay, config.data.images, config.model)
        demand, pictures = StoreDemand.of(config, *sizes), ""
        if config.data.images.enabled:
            unknown = "without pictures, whose size the model's config.json does not give"
            pictures = f", {'with pictures' if demand.pictures else unknown}"
        lines = [] if routes is None else _route_lines(config.rollout, config.model, config.engine_length, routes)
        return [
            *lines,
            f"  store ({store.kind})".ljust(19)
            + f"at most {_size(demand.step_bytes)} a step{pictures}; {store.capacity_mib} MiB in all",
        ]

    def plan(self) -> list[str]:
        """Return lines about the rows and microbatches of a step, and the steps of the run."""
        config = self._config
        algorithm, trainer = config.algorithm, config.trainer
        topology = trainer.topology
        rows, (_, longest) = config.rows_per_step, config.longest_row
        per_replica = rows // topology.dp
        padded = round_up(longest, topology.pad_multiple)
        microbatches = ceil_div(per_replica, trainer.tokens_per_microbatch // padded)
        every = config.validation.every
        return [
            f"  {algorithm.prompts_per_step} prompts x {algorithm.group_size} samples = {rows} rows of up to {longest} "
            "tokens",
            f"  {trainer.dp} replica(s) of {topology.replica_size} rank(s) x {per_replica} rows, at most "
            f"{microbatches} microbatch(es) of {trainer.tokens_per_microbatch} tokens each",
            f"  {algorithm.steps} steps, " + (f"validation every {every}" if every else "no validation"),
        ]


def _pool_lines(pool: PoolConfig, trainer_gpus: Sequence[int], engine_gpus: Sequence[Sequence[int]]) -> list[str]:
    """Return lines with the tenant's map: the pool's GPUs for training, and the GPUs of each engine. An engine wakes
    and sleeps as a whole."""
    lines = [
        f"  of pool {pool.name} at {pool.address}, with weight {pool.weight:g}",
        f"  training         GPUs {', '.join(map(str, trainer_gpus))}",
    ]
    for shard, gpus in enumerate(engine_gpus):
        shared = ", asleep while this run trains" * bool(set(gpus) & set(trainer_gpus))
        lines.append(f"  shard {shard:<10} GPUs {', '.join(map(str, gpus))}: engine {shard}{shared}")
    return lines


def _route_lines(rollout: RolloutConfig, model: ModelConfig, longest: int, routes: RouteSpec) -> list[str]:
    """Return lines about the memory of routes: bytes per token in the store, and host memory of a vLLM engine. The
    engine keeps a route over all layers for each token of its key-value cache. longest: number of tokens of the longest
    sequence."""
    lines = [f"  routes           {routes.token_bytes} bytes per token, beside {ROLLOUT_TOKEN_BYTES} without them"]
    if rollout.engine != "vllm":
        return lines
    per_token = token_bytes(model_config(model), value_bytes=cached_bytes(rollout, model), tp=rollout.tp)
    slot = routes.hidden_layers * routes.top_k * (1 if routes.num_experts <= VLLM_BYTE_EXPERTS else 2)
    if per_token is None:
        return lines
    if rollout.kv_cache != "auto" or not has_gpus():
        size = (
            rollout.kv_cache << 20
            if rollout.kv_cache != "auto"
            else default_on_cpu(per_token, longest, engine_batch(rollout, gpu=False), available_memory())
        )
        return [*lines, f"  route buffer     {_size(size / per_token * slot)} of host memory in each engine"]
    return [*lines, f"  route buffer     {slot / per_token:.2%} of the size of a GPU's key-value cache, in host memory"]


def check_host_memory(trainer: TrainerConfig, params: int, total: int, *, model: str, with_reference: bool) -> None:
    """Raise UserError if the train workers need more host memory than there is. `total` is that memory in bytes, in
    addition to GPU memory. model: path of the model, which has `params` parameters."""
    world = trainer.topology.world
    needed = host_bytes(trainer, params, with_reference=with_reference, gpus=True)
    if needed * world > total:
        raise UserError(
            f"model.path: got {model!r} with {params:,} parameters, expected at most {_size(total)} of "
            f"host memory, which this machine has, for {world} train worker(s) of {_size(needed)}"
        )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
