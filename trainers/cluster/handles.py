"""Defines the driver's handles of its actors: a class for each kind of actor, a typed method for each call.

    ActorHandle          every actor: `ping`
      TrainHandle        one train rank (`TrainActor` and the `TrainWorker` that it hosts)
      EngineHandle       an actor with a generation engine (`EngineHost`, and the `GenerationEngine` in it)
        SeatHandle       a seat in an engine that several runs share (`SeatActor`)
        RolloutHandle    a rollout actor (`RolloutActor` and the `RolloutWorker` that it hosts)

Every method sends its call and returns a `Call` at once; `gather` (calls.py) waits for the result. The method of the
same name in the actor's class documents what the call does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from ...actors.early_actors import EarlyEngineActor, EarlyTrainActor
from ...actors.engine_actor import EngineHost
from ...actors.engines.protocol import GenerationEngine
from ...actors.engines.router import Suspension
from ...actors.process.own_process import ActorInfo
from ...actors.process.remote_methods import encode_arguments
from ...actors.rollout.actor import RolloutActor
from ...actors.rollout.worker import RolloutWorker
from ...actors.train.actor import TrainActor
from ...actors.train.worker import TrainWorker
from .calls import ActorHandle, Call, calling
from .places.placement import TEACHER_ACTOR

P = ParamSpec("P")


class TrainHandle(ActorHandle):
    """Handle of one train rank. Its calls run one at a time in the order in which they were sent, except that methods
    with the decorator `in_thread_of` run in separate threads."""

    def configure(self) -> Call[ActorInfo]:
        """Send a new process its settings (`setup`), and ask for the actor's name, process id and host."""
        return self.send(EarlyTrainActor.configure, encode_arguments([]), [self.setup])

    ping = calling(TrainActor.info)
    """Ask for the actor's name, process id and host. An answer also shows that the actor is responsive."""
    progress = calling(TrainActor.progress)
    open_rendezvous = calling(TrainActor.open_rendezvous)
    build = calling(TrainActor.build)
    notes = calling(TrainActor.notes)
    begin = calling(TrainWorker.begin)
    write_logprobs = calling(TrainWorker.write_logprobs)
    sum_logprobs = calling(TrainWorker.sum_logprobs)
    accumulate = calling(TrainWorker.accumulate)
    finish = calling(TrainWorker.finish)
    abort = calling(TrainWorker.abort)
    open_update = calling(TrainWorker.open_update)
    open_cached = calling(TrainWorker.open_cached)
    send_weights = calling(TrainWorker.send_weights)
    send_cached = calling(TrainWorker.send_cached)
    weight_digests = calling(TrainWorker.weight_digests)
    abort_update = calling(TrainWorker.abort_update)
    sent = calling(TrainWorker.sent)
    save = calling(TrainWorker.save)
    wait_saved = calling(TrainWorker.wait_saved)
    load = calling(TrainWorker.load)
    export_model = calling(TrainWorker.export_model)
    offload = calling(TrainWorker.offload)
    onload = calling(TrainWorker.onload)
    memory = calling(TrainWorker.memory)
    cache_weights = calling(TrainWorker.cache_weights)

    def set_teachers(self, teachers: Sequence[EngineHandle]) -> Call[None]:
        names = [teacher.info.name.removeprefix(TEACHER_ACTOR) for teacher in teachers]
        told = encode_arguments([names, [str(teacher.info) for teacher in teachers]])
        return self.send(TrainWorker.set_teachers, told, [[teacher.ray_actor for teacher in teachers]])


class EngineHandle(ActorHandle):
    """Handle of an actor with a generation engine. Its calls run concurrently."""

    def configure(self) -> Call[ActorInfo]:
        """Send a new process its settings (`setup`), and ask for the actor's name, process id and host."""
        return self.send(EarlyEngineActor.configure, encode_arguments([]), [self.setup])

    ping = calling(EngineHost.info)
    """Ask for the actor's name, process id and host. An answer also shows that the actor is responsive."""
    progress = calling(EngineHost.progress)
    build = calling(EngineHost.build)
    num_workers = calling(EngineHost.num_workers)
    version = calling(EngineHost.version)
    offer_base = calling(EngineHost.offer_base)
    end_offer = calling(EngineHost.end_offer)
    pause = calling(GenerationEngine.pause)
    resume = calling(GenerationEngine.resume)
    sleep = calling(GenerationEngine.sleep)
    wake = calling(GenerationEngine.wake)
    memory = calling(GenerationEngine.memory)
    prepare_weights = calling(GenerationEngine.prepare_weights)
    commit_weights = calling(GenerationEngine.commit_weights)
    verify_weights = calling(GenerationEngine.verify_weights)
    drop_weights = calling(GenerationEngine.drop_weights)


class SeatHandle(EngineHandle):
    """Handle of this run's seat in an engine that other runs use, too. The engine's process belongs to the pool."""

    is_own = False

    def kill(self, why: str = "was left by this run") -> None:
        """Leave the engine. Its process goes on for other runs, unless the engine in it has died."""
        self._kills.append((time.monotonic(), why))
        self.ray_actor.leave()

    def run(self, function: Callable[Concatenate[Any, P], Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do nothing, because the process is not the run's."""


class RolloutHandle(EngineHandle):
    """Handle of a rollout actor. Its calls run concurrently."""

    def set_engines(self, engines: Sequence[EngineHandle]) -> Call[None]:
        names = encode_arguments([[engine.info.name for engine in engines]])
        return self.send(RolloutActor.set_engines, names, [[engine.ray_actor for engine in engines]])

    def add_engine(self, engine: EngineHandle) -> Call[None]:
        return self.send(RolloutActor.add_engine, encode_arguments([engine.info.name]), [engine.ray_actor])

    def remove_engine(self, engine: EngineHandle) -> Call[None]:
        return self.send(RolloutActor.remove_engine, encode_arguments([engine.info.name, 0.0]))

    def retire_engine(self, engine: EngineHandle) -> Call[None]:
        return self.send(RolloutActor.retire_engine, encode_arguments([engine.info.name]))

    def suspend_engine(self, engine: EngineHandle, cut: bool) -> Call[Suspension]:
        return self.send(RolloutActor.suspend_engine, encode_arguments([engine.info.name, cut]))

    def readmit_engine(self, engine: EngineHandle) -> Call[None]:
        return self.send(RolloutActor.readmit_engine, encode_arguments([engine.info.name]), [engine.ray_actor])

    rollout = calling(RolloutWorker.rollout)
    data_notes = calling(RolloutActor.data_notes)
    picture_schema = calling(RolloutWorker.picture_schema)
    end_rollouts = calling(RolloutWorker.end_rollouts)
    evaluate = calling(RolloutWorker.evaluate)
    trim_journal = calling(RolloutWorker.trim_journal)
