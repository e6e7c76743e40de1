"""The actors of a run: started, built at the same time, told of one another, ended by the stack that started them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from ...actors.engine_actor import CONCURRENCY, EngineActor
from ...actors.protocols import ActorInfo
from ...actors.rollout.actor import RolloutActor
from ...actors.train.worker import CONCURRENCY_GROUPS, TrainWorker
from ...dataplane.errors import DataPlaneError
from ...dataplane.factory import DataPlane
from ..config.config import Config
from ..errors import UserError
from . import actor_specs
from .engine_pool import Engine, EnginePool
from .handles import DriverMeter, Peer, PeerFailed, gather
from .ray_cluster import Cluster, Demand

_log = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0
"""Bound of starting all actors: imports and model loading on a cold disk."""


@dataclass(slots=True)
class RunActors:
    """All actors of a run."""

    engines: EnginePool
    rollouts: list[Peer]
    """Those of `engines` when they are embedded."""
    workers: list[Peer]
    """By rank."""
    starter: ActorStarter
    max_replaced: int
    replaced: int = 0
    """Rollout actors and engines that died and have a successor."""
    on_replaced: list[Callable[[], None]] = field(default_factory=list)
    """Called when a peer is another process than before."""

    @property
    def peers(self) -> list[Peer]:
        """Every actor once."""
        hosts = [] if self.engines.embedded else [engine.peer for engine in self.engines.engines]
        return [*hosts, *self.rollouts, *self.workers]

    @property
    def may_replace(self) -> bool:
        return self.replaced < self.max_replaced

    def replace(self, peer: Peer, failure: PeerFailed) -> None:
        """Start and build another process for a rollout actor or engine that died: `peer` is it from then on.

        Its engine, if it has one, serves version 0. Raises `failure` when no more may be replaced, PeerFailed when the
        new one does not come up.
        """
        if not self.may_replace:
            raise failure
        if not any(node["Alive"] for node in ray.nodes()):
            raise failure  # all of Ray went with it: another would wait for a place until its time is up
        self.replaced += 1
        _log.warning("replaced: %s", failure)
        peer.handle = self.starter.again(peer)
        gather([peer.call("build")], "replace", START_TIMEOUT_S)
        [peer.info] = gather([peer.call("info")], "replace", START_TIMEOUT_S)
        if not self.engines.embedded and peer in self.rollouts:
            handles = [(engine.name, engine.peer.handle) for engine in self.engines.active]
            ray.get(peer.handle.set_engines.remote(handles), timeout=START_TIMEOUT_S)
        for call in self.on_replaced:
            call()

    def end(self, peer: Peer) -> None:
        """Kill its process, whatever it does; returns at once."""
        ray.kill(cast(ActorHandle, peer.handle), no_restart=True)

    def restart_workers(self) -> None:
        """End all train workers and build others, from the run's first weights: the peers are they from then on.

        Raises PeerFailed when they do not come up.
        """
        for peer in self.workers:
            self.end(peer)
            peer.handle = self.starter.again(peer)
        for peer, info in zip(self.workers, _all(self.workers, "info"), strict=True):
            peer.info = info
        _build(self.starter.host, [], self.workers)
        for call in self.on_replaced:
            call()


def demand(config: Config) -> Demand:
    """What the actors ask of Ray."""
    rollout = config.rollout
    return Demand(rollout.num_actors or 0, rollout.num_engines * rollout.tp, config.trainer.topology.world)


def start_actors(
    config: Config, model: str, plane: DataPlane, cluster: Cluster, meter: DriverMeter, stack: ExitStack
) -> RunActors:
    """Start and build all of them. `model`: a local folder or hub id.

    Raises UserError for what shows only where it is opened (a path, a dataset, a reward), PeerFailed.
    """
    starter = ActorStarter(config, model, plane, cluster, meter, stack)
    embedded = config.rollout.num_actors is None
    hosts = [starter.engine(index) for index in range(config.rollout.num_engines)]
    rollouts = hosts if embedded else [starter.rollout(index) for index in range(config.rollout.num_actors or 0)]
    workers = [starter.worker(rank) for rank in range(config.trainer.topology.world)]
    peers = [*hosts, *([] if embedded else rollouts), *workers]
    for peer, info in zip(peers, _all(peers, "info"), strict=True):
        peer.info = info
    _build(starter.host, [peer for peer in peers if peer not in workers], workers)
    engines = EnginePool(
        [Engine(peer, num) for peer, num in zip(hosts, _all(hosts, "num_workers"), strict=True)], embedded
    )
    if not embedded:
        _introduce(engines, rollouts)
    return RunActors(engines, rollouts, workers, starter, config.run.max_restarts)


class ActorStarter:
    """Starts actors, one at a call."""

    def __init__(
        self, config: Config, model: str, plane: DataPlane, cluster: Cluster, meter: DriverMeter, stack: ExitStack
    ) -> None:
        self._config = config
        self._model = model
        self._plane = plane
        self._meter = meter
        self._stack = stack
        needed = config.rollout.num_engines * config.rollout.tp + config.trainer.topology.world
        self._gpus = min(1.0, cluster.num_gpus / needed)
        self._one_host = cluster.num_nodes == 1
        self.host = host_address(cluster)
        """Where the run's processes reach this host's."""
        self._starts: dict[Peer, Callable[[], Any]] = {}

    def engine(self, index: int) -> Peer:
        """The host of engine `index`: an actor of its own, or a rollout actor that embeds it."""
        config, tp = self._config, self._config.rollout.tp
        device = "cuda:0" if self._gpus else "cpu"
        if config.rollout.num_actors is None:
            setup = actor_specs.rollout_setup(config, index, self._model, self._plane.handle, device)
            return self._start(RolloutActor, setup, tp, self._gpus * tp)
        setup = actor_specs.engine_setup(config, index, self._model, self._plane.handle, device)
        return self._start(EngineActor, setup, tp, self._gpus * tp, max_concurrency=CONCURRENCY)

    def rollout(self, index: int) -> Peer:
        """Rollout actor `index`, without an engine."""
        setup = actor_specs.rollout_setup(self._config, index, self._model, self._plane.handle, None)
        return self._start(RolloutActor, setup, 1, 0.0)

    def worker(self, rank: int) -> Peer:
        setup = actor_specs.worker_setup(
            self._config,
            rank,
            self._model,
            self._plane.handle,
            host=self.host,
            one_host=self._one_host,
            device="cuda:0" if self._gpus else "cpu",
        )
        return self._start(TrainWorker, setup, 1, self._gpus, concurrency_groups=CONCURRENCY_GROUPS)

    def _start(self, kind: type, setup: Any, cpus: int, gpus: float, **options: Any) -> Peer:
        def start() -> Any:
            handle = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, **options)(kind).remote(setup)
            self._stack.callback(ray.kill, cast(ActorHandle, handle), no_restart=True)
            return handle

        peer = Peer(start(), ActorInfo(setup.name, 0, "not up yet"), self._meter)
        self._starts[peer] = start
        return peer

    def again(self, peer: Peer) -> Any:
        """The handle of another process like `peer`'s, not built yet."""
        return self._starts[peer]()


def host_address(cluster: Cluster) -> str:
    """The address at which the run's processes reach this host's."""
    return ray.util.get_node_ip_address() if cluster.num_nodes > 1 else "127.0.0.1"


def _build(host: str, others: list[Peer], workers: list[Peer]) -> None:
    port = 0
    if len(workers) > 1:
        [port] = gather([workers[0].call("open_rendezvous", host)], "start", START_TIMEOUT_S)
    builds = [peer.call("build") for peer in others] + [peer.call("build", host, port) for peer in workers]
    try:
        gather(builds, "start", START_TIMEOUT_S)
    except PeerFailed as error:
        if isinstance(error.cause, ValueError) and not isinstance(error.cause, DataPlaneError):
            raise UserError(str(error.cause)) from error
        raise


def _introduce(engines: EnginePool, rollouts: list[Peer]) -> None:
    """Give every rollout actor's router the engines, and tell it of those that are left out or taken back."""
    handles = [(engine.name, engine.peer.handle) for engine in engines.engines]
    ray.get([peer.handle.set_engines.remote(handles) for peer in rollouts], timeout=START_TIMEOUT_S)

    def tell(engine: Engine) -> None:
        if engine.left_out:
            calls = [peer.handle.remove_engine.remote(engine.name) for peer in rollouts]
        else:
            calls = [peer.handle.add_engine.remote(engine.name, engine.peer.handle) for peer in rollouts]
        try:
            ray.get(calls, timeout=START_TIMEOUT_S)
        except RayTaskError as error:  # it died again before a router could reach it
            engines.leave_out(engine, str(error.cause))

    engines.on_change.append(tell)


def _all(peers: list[Peer], method: str) -> list[Any]:
    return gather([peer.call(method) for peer in peers], "start", START_TIMEOUT_S)
