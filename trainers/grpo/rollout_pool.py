"""Manages a run's rollout actors and engines, and replaces dead ones while the others continue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ...actors.engines.router import NoEngineAvailable
from ...actors.rollout.results import RolloutReport
from ..cluster.calls import ActorFailed, Call, ProgressWatch, ended, gather_each
from ..cluster.engine_pool import Engine, NoEngineLeft
from ..cluster.gpu_bundles import BY_START_TIMEOUT
from ..cluster.handles import EngineHandle, RolloutHandle
from ..cluster.lost_hosts import LOOK_S, HostGone, NoRoom, lost_nodes
from ..cluster.run_actors import RunActors
from ..supervision.stuck_report import STUCK, record_stuck
from .gpu_turns import Roles
from .stages import Stages
from .weight_sync import HEALTH_S, SyncReport

_log = logging.getLogger(__name__)


class Scaler(Protocol):
    """The operations that add engines to a run and remove them; `Scaling` implements them."""

    def look(self, version: int) -> None:
        """Carry on during a wait for rollouts. New engines serve `version`."""
        ...

    def end_step(self, withdraw: Callable[[RolloutHandle], None]) -> None:
        """Carry on between the last update of a step and its weight sync. withdraw: ends the calls of a rollout actor
        that leaves the run, and has their work done by others."""
        ...


class RolloutPool:
    """Watches and replaces the rollout actors and engines of one run."""

    def __init__(
        self, actors: RunActors, roles: Roles, stages: Stages, timeout_s: float, folder: str | None = None
    ) -> None:
        """timeout_s: seconds within which an actor must make progress (resources.stage_timeout_s). folder: the run's
        folder, which gets the stacks of actors that are ended because they hang; None for none."""
        self._actors = actors
        self.roles = roles
        self.stages = stages
        self.timeout_s = timeout_s
        self._folder = folder
        self._watch = ProgressWatch(())
        self.scaler: Scaler | None = None
        """Changes the number of engines; None while it is fixed."""

    def ahead_of(self, version: int) -> bool:
        """Return whether an engine serves a later version than `version`. This happens after the train workers returned
        to a checkpoint."""
        return self._actors.engines.ahead_of(version)

    def sync_weights(self, version: int) -> SyncReport:
        """Bring all engines to the weights of `version`, and let them generate. Engines with a later version keep it
        (see `WeightSync.sync`). Engines that died or hang are replaced. Raises NoEngineLeft when no engine is left and
        none could be replaced."""
        with self.stages.timed("sync"):
            try:
                report = self.roles.sync(version)
            except NoEngineLeft:
                if not self.replace_dead(version) and not self._actors.can_generate:
                    raise  # If there is room for some of the engines, the run goes on with these.
                return self.roles.sync(version)
            self.replace_dead(version)
            return report

    @contextmanager
    def trainer_at_work(self, version: int) -> Iterator[bool]:
        """Context manager in whose block the train workers can be used, between two steps, for a checkpoint or export.
        Yields True if the workers are offloaded at the end of the block, because the engines had the memory before.
        Afterwards the engines serve `version` as before, unless the block raises an exception."""
        training = self.roles.training
        self.roles.to_training()
        yield not training
        if not training:
            self.sync_weights(version)

    @property
    def active(self) -> Sequence[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        return self._actors.active_rollouts

    def ended(
        self, calls: Sequence[Call[RolloutReport]], timeout_s: float
    ) -> list[tuple[Call[RolloutReport], RolloutReport | ActorFailed]]:
        """Return those of `calls` that have ended, each with its report or its ActorFailed. Waits up to `timeout_s` for
        the first one to end."""
        return ended(calls, "rollout", timeout_s)

    def end_rollouts(self, actors: Iterable[RolloutHandle]) -> None:
        """Ask `actors` to end their rollout calls in flight. Each call then returns with its finished groups. Waits up
        to HEALTH_S seconds for the answers. Failures are ignored here, because the rollout calls report them."""
        gather_each([actor.end_rollouts() for actor in actors], "surplus", HEALTH_S)

    def begin_watch(self) -> None:
        """Reset the time without progress that `still_s` returns for each actor. Called when a new wait for rollouts
        begins."""
        separate = [engine.handle for engine in self._separate]
        self._watch = ProgressWatch([*self._actors.rollouts, *separate])

    def look(self, version: int) -> bool:
        """Query the progress of all actors, without waiting for their answers. Returns whether any has made progress or
        all failed engines were replaced.

        An engine in a separate actor that died or does not answer in time is replaced by an engine that serves
        `version`, as often as run.max_restarts allows. The calls of a rollout actor report its failure, so it is not
        handled here. Raises NoEngineLeft if no engine can get requests any more.
        """
        self.roles.check()
        if self.scaler is not None:
            self.scaler.look(version)
        if self._actors.engines.all_asleep:  # No engine can make progress until the pool returns GPUs.
            self.begin_watch()
            return True
        moved, failed = self._watch.look()
        gone = dict[str, str]()
        for engine in self._separate:
            failure = failed.get(engine.handle)
            if engine.asleep:
                engine.dead |= failure is not None and failure.died  # A dead engine is replaced when it must wake.
                continue
            if failure is not None and failure.died:
                gone[engine.name] = str(failure)
            elif self._watch.silent_s(engine.handle) >= self.timeout_s:
                gone[engine.name] = self.end_stuck(engine.handle, "without an answer")
        if gone:
            with self.roles.engines_kept():
                for engine in [one for one in self._separate if one.name in gone and not one.asleep]:
                    engine.dead = True
                    self._actors.engines.exclude(engine, gone[engine.name])
                if self.replace_dead(version):
                    return True
        assert self._actors.engines.active or not self._actors.engines.engines
        return moved

    def still_s(self, actor: RolloutHandle) -> float:
        """Return for how many seconds `actor` has been stuck. This is the longer of two times: since the actor last
        answered, and since the actor or any engine that can work for it last made progress. Both times count from the
        last `begin_watch` at the earliest."""
        others = [self._watch.still_s(engine.handle) for engine in self._separate if not engine.left_out]
        return max(self._watch.silent_s(actor), min([self._watch.still_s(actor), *others]))

    def end_stuck(self, handle: EngineHandle, without: str) -> str:
        """Kill an actor that has made no progress, and return the sentence that its calls then fail with. The sentence
        names the place at which the actor was stuck, if its process is on this host and can still tell it.

        without: what the actor has not shown for resources.stage_timeout_s, such as "without an answer".
        """
        info, place = handle.info, ""
        if self._folder is not None and info.is_here:
            place = record_stuck(self._folder, str(info), info.pid)
        where = f" in {place}" if place else ""
        why = f"was stuck{where} for {self.timeout_s:g} s {without}, and was ended"
        if place:
            why += f" (stacks in {STUCK})"
        _log.warning("%s %s", info, why)
        handle.kill(why)
        return f"{info} {why}"

    @property
    def _separate(self) -> list[Engine]:
        """The engines that run in separate actors; empty when each engine is embedded in a rollout actor."""
        return [] if self._actors.engines.embedded else self._actors.engines.engines

    def exclude(self, engine: str, reason: str, called_s: float) -> None:
        """Send no more requests to the engine named `engine`, which a rollout call found dead or failing.

        reason: text for the log and for error messages. called_s: time (`time.monotonic()`) at which that call began.
        An engine whose process was replaced since then stays in use, because the call may have met the old process. So
        does an engine that has joined since then under the name of one that left the run.
        """
        with self.roles.engines_kept():
            for found in self._actors.engines.engines:
                if found.name == engine and found.renewed_s < called_s and not found.asleep:
                    self._actors.engines.exclude(found, reason)

    def replace(self, actor: EngineHandle, pid: int, failure: ActorFailed, version: int) -> None:
        """Replace a rollout actor or engine whose process `pid` died, and wait until the new one has started. The new
        process serves `version`. Does nothing if that process was replaced before.

        If its host is gone and no other has room, the run goes on with the other actors, and `replace_dead` tries again
        after each step. Without others, the call waits for room. Raises `failure` if run.max_restarts allows no more
        replacements, and NoRoom if there was no room for resources.start_timeout_s.
        """
        if actor.info.pid != pid:
            return
        engines = self._actors.engines
        with (
            self.roles.engines_kept(),
            # The limit covers the wait for room, build, ping and set_engines.
            self.stages.timed("replace", 4 * self._actors.start_timeout_s),
        ):
            engine = next((engine for engine in engines.engines if engine.handle is actor), None)
            if engine is not None:
                engine.dead = True
                engines.exclude(engine, str(failure))
            if not self._start_again(actor, failure):
                return
            if engine is not None:
                engine.renew()
                if self.roles.sync_engine(engine, version):
                    engines.readmit(engine)
        self.begin_watch()  # The progress of other actors was not watched meanwhile.

    def _start_again(self, actor: EngineHandle, failure: ActorFailed) -> bool:
        """Start a new process of an actor that died. Returns False if no host has room, and others can generate."""
        until_s = time.monotonic() + self._actors.start_timeout_s
        while True:
            try:
                self._actors.replace(actor, failure)
                return True
            except HostGone as error:
                if self._actors.can_generate:
                    return False
                if time.monotonic() >= until_s:
                    waited = f"waited for room for {self._actors.start_timeout_s:g} s"
                    raise NoRoom(
                        f"{BY_START_TIMEOUT}: {waited} in vain, and nothing else can generate: {error}"
                    ) from error
                time.sleep(LOOK_S)

    def may_repeat(self, failure: ActorFailed, since_s: float, version: int) -> bool:
        """Return whether a call that failed can be sent again. It can if it found no engine and one was replaced.

        The call can know of an engine's death before the driver, which was busy. The driver therefore asks all engines,
        and replaces those that have died by engines that serve `version`. since_s: time (`time.monotonic()`) at which
        the call began.
        """
        if not isinstance(failure.cause, NoEngineAvailable):
            return False
        asked = [engine for engine in self._separate if not engine.dead and not engine.asleep]
        answers = gather_each([engine.handle.progress() for engine in asked], "health", HEALTH_S)
        for engine, answer in zip(asked, answers, strict=True):
            if isinstance(answer, ActorFailed) and answer.died:
                engine.dead = True
                with self.roles.engines_kept():
                    self._actors.engines.exclude(engine, str(answer))
        self.replace_dead(version)
        return any(engine.renewed_s > since_s for engine in self._separate)

    def lost_nodes(self) -> list[str]:
        """Return Ray's ids of the nodes that have left the Ray cluster."""
        return lost_nodes()

    def sync_broken(self, version: int) -> None:
        """Sync the train workers' weights of `version` to the engines that a failed sync left without complete weights.

        Their requests in flight continue with these weights. If such an engine had generated with a later version, all
        rollouts are ended first, so that no row continues with an older policy.
        """
        broken = [engine for engine in self._actors.engines.engines if engine.broken and not engine.dead]
        if not broken and not self.roles.lends:
            return
        if any(engine.version > version for engine in broken):
            self.end_rollouts(self._actors.rollouts)
        with self.stages.timed("sync"):
            self.roles.sync(version, broken)

    def replace_dead(self, version: int) -> bool:
        """Replace the engines that died, as often as run.max_restarts allows. An engine that has not answered for
        resources.stage_timeout_s is killed and replaced, too. So is a rollout actor whose host is gone, once there is
        room. Returns whether at least one engine had to be replaced and all of them were."""
        engines = self._actors.engines.engines
        gone = [
            engine for engine in engines if (engine.dead or engine.silent_s >= self.timeout_s) and not engine.asleep
        ]
        for engine in gone:
            if not self._actors.may_replace:
                return False
            reason = engine.left_out
            if not engine.dead:
                reason = self.end_stuck(engine.handle, "without an answer")
            self.replace(engine.handle, engine.handle.info.pid, ActorFailed(reason, died=True), version)
        for actor in [] if self._actors.engines.embedded else [*self._actors.away]:
            if actor in self._actors.rollouts and self._actors.may_replace:
                self.replace(actor, actor.info.pid, ActorFailed(f"{actor.info}: its host was gone", died=True), version)
        return bool(gone) and not any(engine.dead for engine in gone)
