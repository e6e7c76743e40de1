"""The rollout actors and engines of a run as its steps use them: those that die are replaced while the others go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...actors.rollout.report import RolloutReport
from ..cluster.calls import ActorFailed, Call, ended, gather_each
from ..cluster.handles import EngineHandle, RolloutHandle
from ..cluster.run_actors import START_TIMEOUT_S, RunActors
from .stages import Stages
from .weight_sync import WeightSync


class RolloutPool:
    """The rollout actors and engines of one run."""

    def __init__(self, actors: RunActors, weights: WeightSync, stages: Stages, timeout_s: float) -> None:
        """timeout_s: seconds within which an actor must answer."""
        self._actors = actors
        self._weights = weights
        self._stages = stages
        self._timeout_s = timeout_s

    @property
    def active(self) -> Sequence[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        return self._actors.active_rollouts

    def ended(
        self, calls: Sequence[Call[RolloutReport]], timeout_s: float
    ) -> list[tuple[Call[RolloutReport], RolloutReport | ActorFailed]]:
        """The rollout calls that have ended, with their outcomes; waits up to `timeout_s` for the first one."""
        return ended(calls, "rollout", timeout_s)

    def end_rollouts(self, actors: Iterable[RolloutHandle]) -> None:
        """Have the rollout calls in flight return with the groups that are finished by now."""
        gather_each([actor.end_rollouts() for actor in actors], "surplus", self._timeout_s)

    def leave_out(self, engine: str, reason: str) -> None:
        """Give the engine of this name no more requests."""
        self._actors.engines.leave_out(self._actors.engines.named(engine), reason)

    def replace(self, actor: EngineHandle, pid: int, failure: ActorFailed, version: int) -> None:
        """Replace a rollout actor or engine whose process `pid` died by another that serves `version`.

        Takes as long as starting one. Does nothing when that process was replaced before. Raises `failure` when
        run.max_restarts are used up.
        """
        if actor.info.pid != pid:
            return
        engines = self._actors.engines
        with self._stages.timed("replace", 3 * START_TIMEOUT_S):  # it waits for build, ping and set_engines
            engine = next((engine for engine in engines.engines if engine.handle is actor), None)
            if engine is not None:
                engines.leave_out(engine, str(failure))
            self._actors.replace(actor, failure)
            if engine is None:
                return
            engine.renew()
            if version:
                self._weights.sync(version, [engine])
            engines.take_back(engine)

    def mend(self, version: int) -> None:
        """Give the engines that a sync left without a whole version `version`, the train workers' present one.

        Their requests in flight go on with it. Where it is older than what made their first tokens, all rollouts are
        ended first: no row goes back to an older policy.
        """
        broken = [engine for engine in self._actors.engines.engines if engine.broken and not engine.dead]
        if not broken:
            return
        if any(engine.version > version for engine in broken):
            self.end_rollouts(self._actors.rollouts)
        with self._stages.timed("sync"):
            self._weights.sync(version, broken)

    def replace_dead(self, version: int) -> bool:
        """Replace the engines that died, as often as run.max_restarts allows; returns whether there were any and all
        were replaced. An engine that has not answered for as long as an actor may take is killed and replaced, too."""
        engines = self._actors.engines.engines
        gone = [engine for engine in engines if engine.dead or engine.silent_s >= self._timeout_s]
        for engine in gone:
            if not self._actors.may_replace:
                return False
            reason = engine.left_out
            if not engine.dead:
                reason = f"stuck: no answer within {self._timeout_s:g} s from {engine.handle.info}: it is killed"
                engine.handle.kill()
            self.replace(engine.handle, engine.handle.info.pid, ActorFailed(reason, died=True), version)
        return bool(gone)
