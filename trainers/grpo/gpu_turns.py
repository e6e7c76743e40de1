"""Passes the memory of shared GPUs between engines and train workers: both hold theirs at once, or one side at a time.

`TakeTurns` is used with `resources.switch_roles`, `BothResident` without:

    engines awake, workers offloaded       rollouts, validation
        |  to_training     engines sleep and drop weights, keys and values -> their memory has fallen -> workers onload
        v
    engines asleep, workers onloaded       log-probs, train, checkpoint, export
        |  sync            each engine takes back its weights alone and loads the version -> workers offload -> their
        v                  memory has fallen -> engines take back keys and values
    engines awake, workers offloaded

stage       waits for                                     unblocked by
sleep       all engines, then their memory to fall        the last answer; one that holds on to its memory is killed
onload      all train workers                             their last answer
offload     all train workers, then their memory to fall  the last answer, or an error that names the worker
wake        all engines that hold the version             the last answer; one that fails is killed

Both sides are measured after each switch: an actor must really have given its memory back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, TypeVar

from ...actors.process.memory import ProcessMemory
from ...actors.train_backend import OffloadReport
from ...dataplane.client.client import DataPlaneClient
from ..cluster.calls import ActorFailed, Call, gather, gather_each
from ..cluster.engine_pool import Engine, NoEngineLeft
from ..cluster.handles import EngineHandle, TrainHandle
from ..cluster.run_actors import RunActors
from .pool_demand import Demand
from .stages import Stages
from .weight_sync import HEALTH_S, SyncReport, WeightSync

LOOK_S = 0.05
"""Seconds between two measurements of memory that has not fallen yet."""

H = TypeVar("H", bound=EngineHandle | TrainHandle)


def wait_until_freed(
    handles: Sequence[H], limit: Callable[[H, ProcessMemory], int | None], timeout_s: float
) -> tuple[list[ProcessMemory], dict[H, str]]:
    """Measure actors until each is within its limit, for FALL_S seconds at most. Returns what was measured last, and
    for each actor that is above its limit or could not be measured: handle -> what is wrong, as a clause.

    limit: function that returns the largest number of bytes that an actor may hold on GPUs, or None if that is not
    known. timeout_s: seconds within which an actor must answer.
    """
    deadline = time.monotonic() + FALL_S
    found, failed, above = dict[H, ProcessMemory](), dict[H, str](), dict[H, str]()
    left = list(handles)
    while left:
        above = {}
        for handle, answer in zip(left, measured(left, timeout_s), strict=True):
            if isinstance(answer, ActorFailed):
                failed[handle] = f"could not be measured: {answer}"
                continue
            found[handle] = answer
            most = limit(handle, answer)
            if most is not None and answer.device_bytes > most:
                above[handle] = (
                    f"still holds {answer.device_bytes / 2**20:.0f} MiB of GPU memory after {FALL_S:g} s, expected "
                    f"at most {most / 2**20:.0f} ({KEY})"
                )
        left = list(above)
        if time.monotonic() >= deadline:
            break
        if left:
            time.sleep(LOOK_S)
    return list(found.values()), failed | above


def residual_limit(held: ProcessMemory, residual_bytes: int, processes: int) -> int | None:
    """Return the largest number of bytes that an actor may hold on a pool's GPUs while it sleeps. It grows with the
    actor's processes. Returns None if its processes cannot be distinguished from those of other runs there.
    residual_bytes: limit of one process."""
    return None if held.whole_device else residual_bytes * processes


class TrainerMemory:
    """Moves the memory of a run's train workers to host memory and back."""

    def __init__(self, actors: RunActors, *, timeout_s: float, most_bytes: int) -> None:
        """timeout_s: seconds that a worker may take. most_bytes: GPU memory that a worker may keep after `offload`."""
        self._actors = actors
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._figures: dict[str, float] = {}

    @property
    def figures(self) -> dict[str, float]:
        """Figures of the last `offload` and `onload`, each for the slowest or fullest worker. They are `offload_gib`,
        `offload_copy_s`, `offload_memory_s` (giving GPU memory back) and `offload_groups_s` (destroying the process
        groups), the same of `onload`, `trainer_gib_offloaded` and `trainer_gib_onloaded`. Empty before the first
        call."""
        return dict(self._figures)

    def onload(self) -> list[ProcessMemory]:
        """Make all train workers onload; returns how much memory each then holds. Raises ActorFailed if one
        fails."""
        workers = self._actors.workers
        reports = gather([worker.onload() for worker in workers], "onload", self._timeout_s)
        held = gather([worker.memory() for worker in workers], "onload", self._timeout_s)
        self._note("onload", reports, held)
        return held

    def offload(self) -> list[ProcessMemory]:
        """Make all train workers offload, and wait until their GPU memory has fallen; returns how much each then holds.
        Raises ActorFailed, naming the worker, if its memory does not fall within FALL_S seconds."""
        workers = self._actors.workers
        reports = gather([worker.offload() for worker in workers], "offload", self._timeout_s)
        held, wrong = wait_until_freed(workers, lambda worker, held: self._most_bytes, self._timeout_s)
        for worker, why in wrong.items():
            raise ActorFailed(f"offload: {worker.info} {why}")
        self._note("offload", reports, held)
        return held

    def _note(
        self, what: Literal["offload", "onload"], reports: Sequence[OffloadReport], held: list[ProcessMemory]
    ) -> None:
        self._figures |= {
            f"{what}_gib": max(report.bytes_moved for report in reports) / 2**30,
            f"{what}_copy_s": max(report.copy_s for report in reports),
            f"{what}_memory_s": max(report.memory_s for report in reports),
            f"{what}_groups_s": max(report.groups_s for report in reports),
            f"trainer_gib_{what}ed": max(one.held_bytes for one in held) / 2**30,
        }


def measured(handles: Sequence[EngineHandle | TrainHandle], timeout_s: float) -> list[ProcessMemory | ActorFailed]:
    """Return, in order, the memory that each actor holds now, or its failure."""
    return gather_each([handle.memory() for handle in handles], "memory", timeout_s)


_log = logging.getLogger(__name__)
LEVEL = 2
"""Level at which engines sleep. They drop their weights, which takes no host memory. The train workers send the next
version, which is faster than a copy in host memory."""
FALL_S = 10.0
"""Seconds within which the memory of an engine that sleeps, or of a worker that has offloaded, must have fallen."""
KEY = "resources.residual_mib"
"""Configuration key that limits the memory that an actor may keep."""
SWITCH_STAGES = ("sleep", "wake", "offload", "onload")
"""Stages in which a run passes the memory of its GPUs from one side to the other."""


class HasDemand(Protocol):
    """The operation of a feed that a pool of GPUs needs."""

    def demand(self, client: DataPlaneClient) -> Demand:
        """Return how many groups the run wants now, and how many of them are finished; see `Feed.demand`."""
        ...


class Roles(Protocol):
    """The operations on the memory that engines and train workers share."""

    @property
    def training(self) -> bool:
        """True if the train workers can work now."""
        ...

    def to_training(self) -> None:
        """Give the train workers the memory that they need. Waits for running requests to end. Idempotent. Raises
        ActorFailed if a worker fails."""
        ...

    def end_generation(self) -> None:
        """End all rollouts and put the engines to sleep, at any moment of a run. Afterwards the train workers can be
        used or replaced."""
        ...

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        """Bring `engines` (None: all) to the train workers' `version`, and let them generate. Raises as
        `WeightSync.sync` does; engines that failed are left out."""
        ...

    def sync_engine(self, engine: Engine, version: int) -> bool:
        """Bring `engine`, whose process is new, to `version` while other engines may generate. Returns False if it has
        to wait for the next `sync`. Raises as `WeightSync.sync` does."""
        ...

    @property
    def lends(self) -> bool:
        """True if train workers lend their GPUs to other runs while they do not compute. They must then not wait for
        rollouts while they hold GPUs, because two such runs could wait for each other's GPUs."""
        ...

    def open_rollouts(self, feed: Callable[[], HasDemand]) -> None:
        """Begin to carry out orders from outside the run, once rollouts can be issued. feed: function that returns the
        feed in use."""
        ...

    def engines_kept(self) -> AbstractContextManager[object]:
        """Context manager in whose block no engine falls asleep or wakes by an order from outside the run."""
        ...

    def check(self) -> None:
        """Raise the error, if any, with which a thread that serves orders from outside the run has ended."""
        ...

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step's switches. seconds: name of each stage of the step -> its seconds."""
        ...


class _OwnGpus:
    """Answers of a run with its own GPUs. Such a run gets no orders from outside."""

    lends = False

    def open_rollouts(self, feed: Callable[[], HasDemand]) -> None:
        """Do nothing, because no orders come from outside the run."""

    def engines_kept(self) -> AbstractContextManager[object]:
        """Return an empty context, because engines are put to sleep from inside the run only."""
        return nullcontext()

    def check(self) -> None:
        """Do nothing, because no thread serves orders from outside the run."""


class BothResident(_OwnGpus):
    """Lets engines and train workers keep their memory, so that nothing is switched."""

    training = True

    def __init__(self, weights: WeightSync) -> None:
        self._weights = weights

    def to_training(self) -> None:
        """Do nothing, because the train workers are always ready."""

    def end_generation(self) -> None:
        """Do nothing, because the train workers are always ready."""

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        return self._weights.sync(version, engines)

    def sync_engine(self, engine: Engine, version: int) -> bool:
        if version:
            self._weights.sync(version, [engine])
        return True

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        return {}


class TakeTurns(_OwnGpus):
    """Lets one side at a time hold the GPUs' memory. The run begins with engines awake and train workers offloaded."""

    def __init__(
        self,
        actors: RunActors,
        weights: WeightSync,
        stages: Stages,
        *,
        timeout_s: float,
        residual_bytes: int,
        bucket_bytes: int,
    ) -> None:
        """timeout_s: largest number of seconds that an actor may take to sleep, wake, offload or onload.
        residual_bytes: GPU memory that one process may keep while the other side works, such as its CUDA context.
        bucket_bytes: GPU memory that a train worker may keep in addition, for the buffers from which it sends."""
        self._actors = actors
        self._weights = weights
        self._stages = stages
        self._timeout_s = timeout_s
        self._residual_bytes = residual_bytes
        self._trainer = TrainerMemory(actors, timeout_s=timeout_s, most_bytes=residual_bytes + bucket_bytes)
        self._turn: str | None = "generating"
        """Side that holds the memory, `generating` or `training`; None while it is passed on, or if that failed."""
        self._held: dict[str, int] = {}
        """Most memory in bytes that an engine or a worker held after its last switch, by name of the metric."""
        self._awake: dict[str, int] = {}
        """GPU memory in bytes that each engine held when it was last awake, by engine name."""

    @property
    def training(self) -> bool:
        return self._turn == "training"

    def to_training(self) -> None:
        if self._turn == "training":
            return
        self._turn = None
        with self._timed("sleep"):
            self._sleep()
        with self._timed("onload"):
            self._note("trainer_gib_onloaded", self._trainer.onload())
        self._turn = "training"

    def end_generation(self) -> None:
        gather_each([rollout.end_rollouts() for rollout in self._actors.rollouts], "surplus", HEALTH_S)
        self._turn = None
        with self._timed("sleep"):
            self._sleep()

    def sync(self, version: int, engines: Sequence[Engine] | None = None) -> SyncReport:
        self.to_training()
        self._turn = None
        self._find_dead()
        report, none_left = None, None
        try:
            report = self._weights.sync(version, engines)
        except NoEngineLeft as error:  # The workers must free their memory before new engines can start.
            none_left = error
        with self._timed("offload"):
            self._note("trainer_gib_offloaded", self._trainer.offload())
        with self._timed("wake"):
            self._wake()
        self._turn = "generating"
        if report is None:
            assert none_left is not None
            raise none_left
        return report

    def sync_engine(self, engine: Engine, version: int) -> bool:
        if not version:
            return True  # The engine has loaded version 0 from the model's folder.
        if self._weights.kept == version:
            try:
                self._weights.catch_up(engine)
                return True
            except ActorFailed as error:
                _log.warning("catch up: %s", error)
        if any(other is not engine and not other.left_out for other in self._actors.engines.engines):
            _log.warning("%s waits for the next weight sync, as the others generate meanwhile", engine.handle.info)
            return False
        self.to_training()
        self.sync(version)
        return not engine.left_out

    def metrics(self, seconds: Mapping[str, float]) -> dict[str, float]:
        figures = {f"switch/{stage}_s": seconds.get(stage, 0.0) for stage in SWITCH_STAGES}
        held = {f"switch/{name}": num_bytes / 2**30 for name, num_bytes in self._held.items()}
        return {**figures, **held, "time/switch_s": sum(figures.values())}

    # ---------------- These methods put engines to sleep and wake them.

    def _sleep(self) -> None:
        """Put all living engines to sleep and wait until their GPU memory has fallen. An engine that fails or keeps its
        memory is killed; another one replaces it once the train workers have offloaded."""
        asleep = self._each("sleep", self._living(), lambda handle: handle.sleep(LEVEL))
        for engine in asleep.values():
            engine.broken = True  # The engine has dropped its weights.
        held, wrong = wait_until_freed(
            list(asleep), lambda handle, held: self._limit(asleep[handle], held), self._timeout_s
        )
        for handle, why in wrong.items():
            self._end(asleep[handle], f"sleep: {handle.info} {why}")
        self._note("engine_gib_asleep", held)

    def _wake(self) -> None:
        """Wake all engines that hold a complete version. An engine that fails is killed, without delaying the
        others."""
        whole = [engine for engine in self._living() if not engine.broken]
        handles = list(self._each("wake", whole, lambda handle: handle.wake()))
        held = zip(handles, measured(handles, self._timeout_s), strict=True)
        found = {handle.info.name: answer for handle, answer in held if not isinstance(answer, ActorFailed)}
        self._awake = {name: one.device_bytes for name, one in found.items()}
        self._note("engine_gib_awake", list(found.values()))

    def _each(
        self, stage: str, engines: Sequence[Engine], call: Callable[[EngineHandle], Call[None]]
    ) -> dict[EngineHandle, Engine]:
        """Call all `engines`, end the engines for which the call fails, and return the others."""
        outcomes = gather_each([call(engine.handle) for engine in engines], stage, self._timeout_s)
        sound = dict[EngineHandle, Engine]()
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, ActorFailed):
                self._end(engine, str(outcome))
            else:
                sound[engine.handle] = engine
        return sound

    def _living(self) -> list[Engine]:
        return [engine for engine in self._actors.engines.engines if not engine.dead]

    def _find_dead(self) -> None:
        """Mark engines that died asleep as dead, so that the weight sync does not wait for them."""
        engines = self._living()
        answers = gather_each([engine.handle.ping() for engine in engines], "health", HEALTH_S)
        for engine, answer in zip(engines, answers, strict=True):
            if isinstance(answer, ActorFailed) and answer.died:
                self._end(engine, str(answer))

    def _end(self, engine: Engine, reason: str) -> None:
        """Kill the process of an engine, which always frees its memory, and mark it as dead. See
        `RolloutPool.replace_dead`."""
        engine.handle.kill(f"was ended: {reason}")
        engine.dead = True
        self._actors.engines.exclude(engine, reason)

    # ---------------- These methods measure memory.

    def _limit(self, engine: Engine, held: ProcessMemory) -> int | None:
        """Return the largest number of bytes that a sleeping engine may hold on its GPUs, as `held` counts them. Where
        processes cannot be distinguished, the memory of other processes is counted, too, and the sum must be less than
        when the engine was awake. Returns None if no limit is known."""
        if not held.whole_device:
            return self._residual_bytes * engine.num_workers
        awake = self._awake.get(engine.name)
        return None if awake is None else awake - 1

    def _note(self, name: str, held: Sequence[ProcessMemory]) -> None:
        self._held[name] = max((one.held_bytes for one in held), default=0)

    def _timed(self, stage: str) -> AbstractContextManager[None]:
        """Time a stage of a switch, which consists of a call to all actors and of measurements."""
        return self._stages.timed(stage, 2 * self._timeout_s + FALL_S, apart=True)
