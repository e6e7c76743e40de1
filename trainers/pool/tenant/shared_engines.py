"""Starts the engines of a pool that several of its runs share, and gives up the seats of runs that have ended.

The engines are those of a run's configuration. They hold their GPUs for as long as the pool exists, as a tenant of the
pool that never gives any back. If the process of an engine dies, Ray starts it again, and the runs take new seats in it
and send it their newest versions, as they do after the death of an engine of their own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ....actors.engine_actor import CONCURRENCY, EngineSetup
from ....actors.engines.factory import EngineConfig
from ....actors.process.remote_methods import decode_result, encode_arguments, submit
from ....actors.shared_engine import EarlySharedEngine, SeatOf, SharedEngineActor, SharedSetup
from ....dataplane.owned_folder import process_start
from ...base_model.prepare import route_spec
from ...cluster.calls import ActorFailed
from ...cluster.engine_specs import adapter_slots, engine_ahead, engine_log, threads
from ...cluster.gpu_bundles import Reservation
from ...cluster.places.placement import Placement
from ...cluster.places.placement_plan import PlacementRequest
from ...config.config import Config
from ...errors import UserError
from ...supervision.stuck_report import write_actors
from ..server.bundles import places_in_pool
from ..server.client import NAMESPACE, PoolClient, actor_name
from ..state.commands import Processes
from ..state.plan import Priority, TenantMap
from ..state.status import PoolStatus
from .tenant import Tenant

ENGINES = "shared engines, pid "
"""Beginning of the name of the tenant that holds the GPUs of shared engines."""
LOOK_S = 5.0
"""Seconds between two looks for runs that have ended."""
AGAIN_S = 0.5
"""Seconds between two attempts to reach an engine that is being started again."""
ORDER_S = 600.0
"""Largest number of seconds for an order of the pool. Shared engines never get one."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedEngines:
    """The engines that a run's configuration describes, as those of a pool."""

    pool: str
    """Name of the pool, whose Ray cluster this process has joined."""
    folder: Path
    """Folder of the pool, which gets the engines' logs."""
    config: Config

    @contextmanager
    def running(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Context manager that starts the engines, and yields the GPUs of each once all are built. Raises UserError if
        the configuration has no adapters, has a model that a run would make, or does not fit the pool."""
        self.check()
        client = PoolClient(self.pool)
        own = TenantMap(f"{ENGINES}{os.getpid()}", 1.0, (), self.config.engine_gpus)
        start = process_start(os.getpid())
        assert start is not None, "this process runs"
        processes = Processes(socket.gethostname(), os.getpid(), start, str(self.folder.absolute()), own.name)
        listed = _Listed(self.folder, own.name)
        tenant = Tenant(client, own, processes, ORDER_S)
        engines: list[Any] = []
        stopping = threading.Event()
        watching = threading.Thread(
            target=_watch, args=(client, engines, listed, stopping), name="shared engines", daemon=True
        )
        try:
            tenant.join()
            tenant.hold("rollout", Priority.INITIALIZATION)
            tenant.step_finished()  # Runs may begin.
            reservation = self._places(client)
            for index in range(self.config.rollout.num_engines):
                engines.append(self._start(index, reservation))
            listed.add(engines, self.config.resources.start_timeout_s)
            for index, engine in enumerate(engines):
                _built(engine, index, self.config.resources.start_timeout_s)
            watching.start()
            yield own.shards
        finally:
            stopping.set()
            for engine in engines:
                ray.kill(engine, no_restart=True)
            if watching.is_alive():
                watching.join()
            tenant.leave()

    def check(self) -> None:
        """Raise UserError if engines of this configuration cannot be shared. Needs no Ray cluster."""
        config = self.config
        if not config.sends_adapter:
            raise UserError(
                "--engines: got a configuration with trainer.lora.rank=0, expected at least 1 with sync.adapter=only, "
                "because runs share engines by their adapters"
            )
        if config.trainer.lora.base != "model":
            raise UserError(
                f"--engines: got trainer.lora.base={config.trainer.lora.base!r}, expected 'model', because each run "
                "rounds its base by itself"
            )
        if config.model.builtin:
            raise UserError(
                f"--engines: got model.path={config.model.path!r}, expected a folder or hub id, because all runs need "
                "the same weights"
            )
        if config.rollout.engine == "scripted":
            raise UserError("--engines: got rollout.engine='scripted', expected hf or vllm, which serve adapters")
        if len(config.engine_gpus) != config.rollout.num_engines:
            raise UserError(
                "--engines: got a configuration without resources.rollout_gpus, expected the GPUs of the pool that the "
                "engines are to keep"
            )

    def _places(self, client: PoolClient) -> Reservation:
        request, reserved = PlacementRequest.of(self.config), client.status().reserved
        if reserved:
            return places_in_pool(self.pool, request, reserved)
        seats = tuple(request.engine_seat(index, 1, None) for index in range(request.num_engines))
        return Reservation(Placement("cpu", "on CPUs", engines=seats))

    def _start(self, index: int, reservation: Reservation) -> Any:
        """Start the actor of an engine, which Ray starts again if its process dies. Returns Ray's handle of it."""
        config, seat = self.config, reservation.placement.engines[index]
        device = "cuda:0" if seat.gpus else "cpu"
        name, rollout = f"engine {index}", config.rollout
        engine = EngineConfig(
            rollout,
            config.model,
            config.scripted,
            device=device,
            max_model_len=config.engine_length,
            log=engine_log(str(self.folder.absolute()), name),
            seed=config.run.seed,
            adapters=adapter_slots(config.trainer.lora, rollout),
            routes=route_spec(config.router_replay, config.model),
            schemas=rollout.endpoint.enabled,
        )
        setup = EngineSetup(name, threads(config.resources.threads, rollout.num_engines * rollout.tp, device), engine)
        shared = SharedSetup(setup, rollout.max_adapters, config.engine_gpus)
        path = f"{SharedEngineActor.__module__}:{SharedEngineActor.__name__}"
        host = (path, *engine_ahead(rollout.engine, config.model, device), reservation.devices(seat), os.getcwd())
        options = {
            "name": engine_name(self.pool, index),
            "namespace": NAMESPACE,
            "max_concurrency": CONCURRENCY,
            "max_restarts": -1,
            **reservation.options(seat),
        }
        return ray.remote(EarlySharedEngine).options(**options).remote(*host, shared)


def engine_name(pool: str, index: int) -> str:
    """Return the name in Ray of an engine of a pool."""
    return f"{actor_name(pool)}-engine-{index}"


def _built(engine: Any, index: int, timeout_s: float) -> None:
    try:
        ray.get(submit(engine, SharedEngineActor.build, encode_arguments([])), timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise UserError(f"--engines: {error.cause}") from error
        raise
    except (GetTimeoutError, RayActorError) as error:
        raise ActorFailed(f"start: engine {index} was not built within {timeout_s:g} s: {error}", died=True) from error


class _Listed:
    """The list of the engines' processes, in actors.json of the pool's folder.

    By this list, a pool that is started again after the death of this process knows that they have ended.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        write_actors(folder, run_id, [])

    def add(self, engines: Sequence[Any], timeout_s: float) -> None:
        """Add the present processes of the engines. Raises a RayError if one does not answer."""
        method = SharedEngineActor.identity
        replies: Any = ray.get([submit(one, method, encode_arguments([])) for one in engines], timeout=timeout_s)
        infos = [decode_result(method, reply) for reply in replies]
        write_actors(
            self._folder, self._run_id, [(info.name, info.pid, info.host, info.space, info.start) for info in infos]
        )


def _watch(client: PoolClient, engines: Sequence[Any], listed: _Listed, stopping: threading.Event) -> None:
    """Tell the engines which runs there are, so that they give the seats of others up.

    Engines that were started again are listed.
    """
    while not stopping.wait(LOOK_S):
        try:
            names = [tenant.name for tenant in client.status().tenants]
            for engine in engines:
                submit(engine, SharedEngineActor.keep, encode_arguments([names]))
            listed.add(engines, LOOK_S)
        except Exception as error:  # The pool or an engine is away.
            _log.warning("shared engines: %s", error)


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine of a pool that answers."""

    actor: Any
    """Ray handle of its actor."""
    gpus: tuple[tuple[int, ...], ...]
    """GPUs of all engines of the pool, by engine."""

    def seat(self, run: str) -> SeatOf:
        """Return the seat of a run in this engine."""
        return SeatOf(self.actor, run)


def find_engine(pool: str, index: int, timeout_s: float) -> FoundEngine:
    """Wait until an engine of a pool answers, which may be starting again. Raises UserError if the pool was started
    without that engine, and ActorFailed after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    method = SharedEngineActor.gpus
    while True:
        left_s = deadline - time.monotonic()
        try:
            actor = ray.get_actor(engine_name(pool, index), namespace=NAMESPACE)
            reply: Any = ray.get(submit(actor, method, encode_arguments([])), timeout=max(left_s, AGAIN_S))
            return FoundEngine(actor, tuple(map(tuple, decode_result(method, reply))))
        except ValueError as error:
            raise UserError(
                f"pool.engines: got shared, expected own, because pool {pool!r} has no engine {index}: it was started "
                "without `--engines CONFIG`, or with fewer engines"
            ) from error
        except (RayActorError, GetTimeoutError) as error:
            if left_s <= 0:
                raise ActorFailed(
                    f"start: engine {index} of pool {pool!r} did not answer for {timeout_s:g} s: {error}", died=True
                ) from error
            time.sleep(AGAIN_S)


def shared_gpus(status: PoolStatus) -> frozenset[int]:
    """Return the GPUs that shared engines hold."""
    shards = [tenant.shards for tenant in status.tenants if tenant.name.startswith(ENGINES)]
    return frozenset(gpu for engines in shards for engine in engines for gpu in engine)


def seats_of(pool: str, run: str, timeout_s: float) -> Callable[[int], SeatOf]:
    """Return a function that waits for an engine of a pool, by its number, and returns the seat of a run in it."""
    return lambda index: find_engine(pool, index, timeout_s).seat(run)
