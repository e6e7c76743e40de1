"""Defines the driver's handles of its actors: a class for each kind of actor, a typed method for each call.

    ActorHandle          every actor: `ping`
      TrainHandle        one train rank (`TrainActor` and the `TrainWorker` that it hosts)
      EngineHandle       an actor with a generation engine (`EngineHost`, and the `GenerationEngine` in it)
        RolloutHandle    a rollout actor (`RolloutActor` and the `RolloutWorker` that it hosts)

Every method sends its call and returns at once with a `Call`, whose result `gather` (calls.py) waits for. For what a
call does, see the method of the actor's class that is named in the body of the handle's method.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...actors.early_actors import EarlyEngineActor, EarlyTrainActor
from ...actors.engine_actor import EngineHost
from ...actors.engines.protocol import (
    CommitReport,
    GenerationEngine,
    KeysAndValues,
    PauseMode,
    Prepared,
    SamplingParams,
)
from ...actors.engines.router import Suspension
from ...actors.process.memory import ProcessMemory
from ...actors.process.own_process import ActorInfo
from ...actors.process.remote_methods import encode_arguments
from ...actors.protocols import OffloadReport
from ...actors.rollout.actor import RolloutActor
from ...actors.rollout.results import EvaluationReport, RolloutReport
from ...actors.rollout.worker import RolloutWorker
from ...actors.train.actor import MeetingPoint, TrainActor
from ...actors.train.step_rows import TrainShard
from ...actors.train.worker import TrainWorker, WorkerReport
from ...actors.weight_sync.stream import SendReport
from ...actors.weight_sync.transports.protocol import ReceiverGroup, WeightUpdate
from ...codecs.weights.parameter_digests import ParameterDigests
from .calls import ActorHandle, Call


class TrainHandle(ActorHandle):
    """Handle of one train rank. Its calls run one at a time in the order in which they were sent, except those of
    methods with the decorator `in_thread_of`, which run in threads of their own."""

    def configure(self) -> Call[ActorInfo]:
        """Send a new process its settings (`setup`), and ask for the actor's name, process id and host."""
        return self.send(EarlyTrainActor.configure, encode_arguments([]), [self.setup])

    def ping(self) -> Call[ActorInfo]:
        """Ask for the actor's name, process id and host. An answer also shows that the actor is responsive."""
        return self._call(TrainActor.info)

    def progress(self) -> Call[int]:
        return self._call(TrainActor.progress)

    def open_rendezvous(self) -> Call[MeetingPoint]:
        return self._call(TrainActor.open_rendezvous)

    def build(self, meeting_point: MeetingPoint | None) -> Call[None]:
        return self._call(TrainActor.build, meeting_point)

    def begin(self, shard: TrainShard) -> Call[None]:
        return self._call(TrainWorker.begin, shard)

    def write_logprobs(self, field: str) -> Call[WorkerReport]:
        return self._call(TrainWorker.write_logprobs, field)

    def accumulate(self) -> Call[WorkerReport]:
        return self._call(TrainWorker.accumulate)

    def finish(self) -> Call[WorkerReport]:
        return self._call(TrainWorker.finish)

    def abort(self) -> Call[None]:
        return self._call(TrainWorker.abort)

    def open_update(self, version: int, receivers: Sequence[ReceiverGroup], base: int | None) -> Call[WeightUpdate]:
        return self._call(TrainWorker.open_update, version, receivers, base)

    def open_cached(self, version: int, receivers: Sequence[ReceiverGroup]) -> Call[WeightUpdate]:
        return self._call(TrainWorker.open_cached, version, receivers)

    def send_weights(self, update: WeightUpdate | None) -> Call[SendReport | None]:
        return self._call(TrainWorker.send_weights, update)

    def send_cached(self, update: WeightUpdate) -> Call[SendReport]:
        return self._call(TrainWorker.send_cached, update)

    def weight_digests(self, version: int) -> Call[ParameterDigests]:
        return self._call(TrainWorker.weight_digests, version)

    def abort_update(self, reason: str) -> Call[None]:
        return self._call(TrainWorker.abort_update, reason)

    def sent(self) -> Call[int]:
        return self._call(TrainWorker.sent)

    def save(self, path: str) -> Call[None]:
        return self._call(TrainWorker.save, path)

    def wait_saved(self) -> Call[None]:
        return self._call(TrainWorker.wait_saved)

    def load(self, path: str) -> Call[None]:
        return self._call(TrainWorker.load, path)

    def export_model(self, path: str) -> Call[None]:
        return self._call(TrainWorker.export_model, path)

    def offload(self) -> Call[OffloadReport]:
        return self._call(TrainWorker.offload)

    def onload(self) -> Call[OffloadReport]:
        return self._call(TrainWorker.onload)

    def memory(self) -> Call[ProcessMemory]:
        return self._call(TrainWorker.memory)

    def cache_weights(self, version: int) -> Call[None]:
        return self._call(TrainWorker.cache_weights, version)


class EngineHandle(ActorHandle):
    """Handle of an actor with a generation engine. Its calls run concurrently."""

    def configure(self) -> Call[ActorInfo]:
        """Send a new process its settings (`setup`), and ask for the actor's name, process id and host."""
        return self.send(EarlyEngineActor.configure, encode_arguments([]), [self.setup])

    def ping(self) -> Call[ActorInfo]:
        """Ask for the actor's name, process id and host. An answer also shows that the actor is responsive."""
        return self._call(EngineHost.info)

    def progress(self) -> Call[int]:
        return self._call(EngineHost.progress)

    def build(self) -> Call[None]:
        return self._call(EngineHost.build)

    def num_workers(self) -> Call[int]:
        return self._call(EngineHost.num_workers)

    def version(self) -> Call[int]:
        return self._call(EngineHost.version)

    def pause(self, mode: PauseMode) -> Call[None]:
        return self._call(GenerationEngine.pause, mode)

    def resume(self) -> Call[None]:
        return self._call(GenerationEngine.resume)

    def sleep(self, level: int) -> Call[None]:
        return self._call(GenerationEngine.sleep, level)

    def wake(self) -> Call[None]:
        return self._call(GenerationEngine.wake)

    def memory(self) -> Call[ProcessMemory]:
        return self._call(GenerationEngine.memory)

    def prepare_weights(self, update: WeightUpdate) -> Call[Prepared]:
        return self._call(GenerationEngine.prepare_weights, update)

    def commit_weights(self, version: int, in_flight: PauseMode, kv: KeysAndValues) -> Call[CommitReport]:
        return self._call(GenerationEngine.commit_weights, version, in_flight, kv)

    def verify_weights(self, digests: ParameterDigests) -> Call[int]:
        return self._call(GenerationEngine.verify_weights, digests)

    def drop_weights(self, version: int) -> Call[None]:
        return self._call(GenerationEngine.drop_weights, version)


class RolloutHandle(EngineHandle):
    """Handle of a rollout actor. Its calls run concurrently."""

    def set_engines(self, engines: Sequence[EngineHandle]) -> Call[None]:
        names = encode_arguments([[engine.info.name for engine in engines]])
        return self.send(RolloutActor.set_engines, names, [[engine.ray_actor for engine in engines]])

    def add_engine(self, engine: EngineHandle) -> Call[None]:
        return self.send(RolloutActor.add_engine, encode_arguments([engine.info.name]), [engine.ray_actor])

    def remove_engine(self, engine: EngineHandle) -> Call[None]:
        return self._call(RolloutActor.remove_engine, engine.info.name, 0.0)

    def suspend_engine(self, engine: EngineHandle, cut: bool) -> Call[Suspension]:
        return self._call(RolloutActor.suspend_engine, engine.info.name, cut)

    def readmit_engine(self, engine: EngineHandle) -> Call[None]:
        return self.send(RolloutActor.readmit_engine, encode_arguments([engine.info.name]), [engine.ray_actor])

    def rollout(
        self, positions: list[int], partition: str, params: SamplingParams, fresh: bool, traced: bool
    ) -> Call[RolloutReport]:
        return self._call(RolloutWorker.rollout, positions, partition, params, fresh, traced)

    def data_notes(self) -> Call[tuple[str, ...]]:
        return self._call(RolloutActor.data_notes)

    def end_rollouts(self) -> Call[None]:
        return self._call(RolloutWorker.end_rollouts)

    def evaluate(
        self, name: str, part: int, parts: int, params: SamplingParams, in_flight: int
    ) -> Call[EvaluationReport]:
        return self._call(RolloutWorker.evaluate, name, part, parts, params, in_flight)

    def trim_journal(self, first: int, outstanding: list[int]) -> Call[None]:
        return self._call(RolloutWorker.trim_journal, first, outstanding)
