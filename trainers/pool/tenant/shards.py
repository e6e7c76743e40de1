"""Puts engines to sleep and wakes them by order of a pool of GPUs, without losing requests or tokens.

    shrink   no new requests -> those in flight end, or are cut off and continue elsewhere -> sleep -> memory has fallen
    expand   (a new process if the old one died) -> newest version from host memory -> wake -> requests

stage       waits for                          unblocked by
drain       all requests of the engine         their answers, which an abort cuts short
sleep       the engine, then its memory        the answer; an engine that fails or keeps its memory is killed
sync        train rank 0's host memory         every bucket verified, while the train workers do something else
wake        the engine                         the answer; an engine that fails is killed

An engine gets requests only after all of `expand` is done. A shard is an engine with its GPUs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ....actors.engines.router import Suspension
from ....dataplane.owned_folder import process_start
from ...cluster.calls import ActorFailed, Call, gather_each
from ...cluster.engine_pool import Engine
from ...cluster.run_actors import RunActors
from ...grpo.gpu_turns import residual_limit, wait_until_freed
from ...grpo.weight_sync import HEALTH_S, WeightSync
from ...supervision.cleanup import Family, is_alive
from ..server.far_processes import end_far_processes
from ..state.commands import Order, Outcome
from ..state.plan import Role, TenantMap
from ..state.status import Stage, StageNote

_log = logging.getLogger(__name__)
VERSION_S = 1.0
"""Seconds for which waking shards wait for a version of the weights when none is kept because the train workers
died."""

Note = Callable[[list[StageNote]], None]


@dataclass(slots=True)
class Resizes:
    """Counts of the effects of shrinks and expands since the start."""

    resizes: int = 0
    """Number of shards that fell asleep or woke."""
    moved: int = 0
    """Number of samples that were cut off by a shrink and continued elsewhere."""
    kept_tokens: int = 0
    """Number of tokens that these samples kept."""
    lost_tokens: int = 0
    """Upper bound on the number of tokens lost because an engine died while it was put to sleep."""
    asleep_bytes: int = 0
    """Largest memory in bytes of any engine after the last shrink."""


class Shards:
    """The engines of a run as shards of a pool. All of them are asleep at first."""

    def __init__(
        self,
        actors: RunActors,
        weights: WeightSync,
        own: TenantMap,
        note: Note,
        *,
        sleep_level: int,
        residual_bytes: int,
        timeout_s: float,
        cut: bool,
    ) -> None:
        """own: GPUs of each shard. note: receives the stages of each switch, for the pool's trace. sleep_level: see
        `Sleeper.sleep`. residual_bytes: GPU memory that a process of an engine may keep asleep. timeout_s: seconds that
        one stage may take. cut: true to abort requests in flight; otherwise shrinks wait until these end."""
        self._actors = actors
        self._weights = weights
        self._map = own
        self._note = note
        self._level = sleep_level
        self._residual_bytes = residual_bytes
        self._timeout_s = timeout_s
        self._cut = cut
        self.count = Resizes()
        self._changes = threading.Condition(threading.RLock())
        self._stages: list[StageNote] = []
        now = time.monotonic()
        # A tenant that uses the pool's engines has no shards.
        self._asleep_since = {engine.name: now for engine in actors.engines.engines if own.shards}
        self._asleep_s = 0.0
        self._unready: set[str] = set()
        """Engines that could not wake by the present order because no version is kept."""
        self._trainer_death: tuple[int, ActorFailed] | None = None
        """Process of train rank 0 that was found dead, and its failure, until it is reported to the driver."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager that keeps all shards asleep or awake inside its block. A thread may nest it; other threads
        wait."""
        with self._changes:
            yield
            self._changes.notify_all()

    def carry_out(self, order: Order) -> Outcome:
        """Carry out an order of the pool, and return its outcome. This method runs in another thread than the
        driver's."""
        engines = [self._actors.engines.engines[shard] for shard in order.shards]
        carry_out = self._shrink if order.kind == "shrink" else self._expand
        self._unready.clear()
        try:
            with self._changes:
                failed = carry_out(engines)
        except Exception as error:  # Any error must be reported to the pool.
            _log.exception("%s of shards %s", order.kind, order.shards)
            for engine in engines:
                self._end(engine, str(error))
            self._unready.clear()
            failed = {engine.name: f"{type(error).__name__}: {error}" for engine in engines}
        reasons = {
            shard: failed[engine.name]
            for shard, engine in zip(order.shards, engines, strict=True)
            if engine.name in failed
        }
        done = tuple(shard for shard in order.shards if shard not in reasons)
        self.count.resizes += len(done)
        stages, self._stages = self._stages, []
        self._note(stages)
        unready = tuple(shard for shard in reasons if self._actors.engines.engines[shard].name in self._unready)
        return Outcome(order.tenant, order.number, done, reasons, unready)

    def check(self) -> None:
        """Raise ActorFailed, once, if train rank 0 was dead when an engine had to wake, and was not replaced since.
        Without this check, the driver would wait for rollouts of engines that cannot wake."""
        found, self._trainer_death = self._trainer_death, None
        if found is not None and found[0] == self._actors.workers[0].info.pid:
            raise found[1]

    def take_asleep_s(self) -> float:
        """Return the engine seconds spent asleep since the last call."""
        with self._changes:
            now = time.monotonic()
            asleep_s, self._asleep_s = self._asleep_s, 0.0
            for name, since in self._asleep_since.items():
                asleep_s += now - since
                self._asleep_since[name] = now
            return asleep_s

    def timed(self, event: Stage, role: Role, gpus: Sequence[int], began: float) -> StageNote:
        """Return the note of a stage that has just ended and began at `time.monotonic` time `began`."""
        return StageNote(event, role, tuple(gpus), time.time(), time.monotonic() - began)

    # ---------------- These methods shrink the tenant: they put engines to sleep.

    def _shrink(self, engines: Sequence[Engine]) -> dict[str, str]:
        """Put engines to sleep. Returns the killed engines: name -> reason. Their GPUs are free, too."""
        awake = [engine for engine in engines if not engine.asleep]
        for engine in awake:
            engine.asleep = True  # From now on the engine takes part in no weight sync.
        failed: dict[str, str] = {}
        with self._stage("drain", awake):
            self._drain(awake)
            self._each("drain", awake, failed, lambda engine: engine.handle.pause("abort"))
        with self._stage("sleep", awake):
            self._each("sleep", awake, failed, lambda engine: engine.handle.sleep(self._level))
        with self._stage("memory", awake):
            sleeping = {engine.handle: engine for engine in awake if engine.name not in failed}
            held, wrong = wait_until_freed(
                list(sleeping),
                lambda handle, held: residual_limit(held, self._residual_bytes, sleeping[handle].num_workers),
                self._timeout_s,
            )
            failed |= {sleeping[handle].name: why for handle, why in wrong.items()}
            self.count.asleep_bytes = max((one.held_bytes for one in held), default=self.count.asleep_bytes)
        for engine in awake:
            engine.broken |= self._level == 2
            self._asleep_since.setdefault(engine.name, time.monotonic())
            if engine.name in failed:
                self._end(engine, failed[engine.name])
        return failed

    def _drain(self, engines: Sequence[Engine]) -> None:
        """Stop all rollout actors from sending requests to `engines`, and wait until none is in flight. Rollout actors
        that fail have no requests left."""
        rollouts = self._actors.rollouts
        calls = [rollout.suspend_engine(engine.handle, self._cut) for rollout in rollouts for engine in engines]
        for outcome in gather_each(calls, "drain", self._timeout_s):
            if isinstance(outcome, Suspension):
                self.count.moved += outcome.moved
                self.count.kept_tokens += outcome.kept_tokens
                self.count.lost_tokens += outcome.lost_tokens
            else:
                _log.warning("%s", outcome)

    # ---------------- These methods expand the tenant: they wake engines.

    def _expand(self, engines: Sequence[Engine]) -> dict[str, str]:
        """Wake engines with the newest version. Returns those that stay asleep: name -> reason."""
        failed: dict[str, str] = {}
        asleep = [engine for engine in engines if engine.asleep]
        self._replace_dead(asleep, failed)
        with self._stage("sync", asleep):
            self._changes.wait_for(lambda: self._weights.kept is not None, VERSION_S)
            for engine in asleep:
                if engine.name not in failed:
                    self._catch_up(engine, failed)
        with self._stage("wake", asleep):
            self._each("wake", asleep, failed, lambda engine: engine.handle.wake())
            self._each("wake", asleep, failed, lambda engine: engine.handle.resume())
        for engine in asleep:
            if engine.name not in failed:
                self._readmit(engine, failed)
        back = [engine for engine in asleep if engine.name in failed]
        for engine in back:
            _log.warning("expand: %s sleeps on: %s", engine.name, failed[engine.name])
            engine.asleep = False
        if back:
            for name in self._shrink(back):  # Engines that cannot sleep are killed.
                self._unready.discard(name)
        return failed

    def _replace_dead(self, engines: Sequence[Engine], failed: dict[str, str]) -> None:
        """Start a new process for each engine that has died asleep, or was killed."""
        answers = gather_each([engine.handle.ping() for engine in engines], "health", self._timeout_s)
        for engine, answer in zip(engines, answers, strict=True):
            if not engine.dead and not isinstance(answer, ActorFailed):
                continue
            why = str(answer) if isinstance(answer, ActorFailed) else "it was killed"
            gone = ActorFailed(f"{engine.handle.info} is replaced before it wakes: {why}", died=True)
            try:
                self._actors.replace(engine.handle, gone)
            except ActorFailed as error:
                failed[engine.name] = str(error)
                continue
            engine.renew()
            gather_each(
                [rollout.remove_engine(engine.handle) for rollout in self._actors.rollouts], "engines", HEALTH_S
            )

    def _catch_up(self, engine: Engine, failed: dict[str, str]) -> None:
        """Bring an engine to the newest kept version while the train workers do other work. If the train workers have
        died, the driver gets the error, and the engine counts as unready: meanwhile others, or the new train workers,
        can use its GPUs.
        """
        if self._weights.kept is not None:
            if engine.version == self._weights.kept and not engine.broken:
                return
            try:
                self._weights.catch_up(engine)
                return
            except (ActorFailed, ValueError) as error:
                pid, death = self._actors.workers[0].info.pid, self._death_of_trainer()
                if death is None:
                    failed[engine.name] = str(error)
                    return
                self._weights.forget()
                self._trainer_death = pid, death
        failed[engine.name] = "no version is kept since the train workers died; it wakes once new ones have one"
        self._unready.add(engine.name)

    def _death_of_trainer(self) -> ActorFailed | None:
        """Return the failure of train rank 0, which keeps the versions, if it is dead."""
        [answer] = gather_each([self._actors.workers[0].sent()], "health", self._timeout_s)
        return answer if isinstance(answer, ActorFailed) and answer.died else None

    def _readmit(self, engine: Engine, failed: dict[str, str]) -> None:
        rollouts = self._actors.rollouts
        outcomes = gather_each([rollout.readmit_engine(engine.handle) for rollout in rollouts], "engines", HEALTH_S)
        wrong = [outcome for outcome in outcomes if isinstance(outcome, ActorFailed) and outcome.cause is not None]
        if wrong:  # The driver replaces a dead rollout actor, and gives this engine to the new actor.
            failed[engine.name] = str(wrong[0])
            return
        engine.asleep = False
        self._asleep_s += time.monotonic() - self._asleep_since.pop(engine.name)

    def _each(
        self,
        stage: str,
        engines: Sequence[Engine],
        failed: dict[str, str],
        call: Callable[[Engine], Call[None]],
    ) -> None:
        """Call all engines that have not failed, and add those for which the call fails to `failed`."""
        sound = [engine for engine in engines if engine.name not in failed]
        outcomes = gather_each([call(engine) for engine in sound], stage, self._timeout_s)
        for engine, outcome in zip(sound, outcomes, strict=True):
            if isinstance(outcome, ActorFailed):
                failed[engine.name] = str(outcome)

    def _end(self, engine: Engine, reason: str) -> None:
        """Kill the processes of an engine, which always frees their memory, and wait until they are gone. New
        processes replace them when the shard wakes. Raises ActorFailed if nothing shows that they are gone: the pool
        must not hear that the GPUs are free then."""
        info = engine.handle.info
        _log.warning("%s is ended: %s", info, reason)
        engine.dead = engine.asleep = engine.broken = True
        self._asleep_since.setdefault(engine.name, time.monotonic())
        if not info.is_here:
            left = end_far_processes([(info.space, info.pid, info.start)], self._timeout_s)
            engine.handle.kill()
        else:
            family = Family(info.pid if process_start(info.pid) == info.start else 0)
            family.look()  # The engine's child processes hold the memory, and end after it.
            engine.handle.kill()
            family.kill()
            left = [process for process in (family.driver, *family.members) if process and is_alive(process)]
        if left:
            raise ActorFailed(f"shrink: {info} does not end, so its GPUs are not free: {reason}")

    @contextmanager
    def _stage(self, event: Stage, engines: Sequence[Engine]) -> Iterator[None]:
        began = time.monotonic()
        yield
        numbers = {engine.name: number for number, engine in enumerate(self._actors.engines.engines)}
        gpus = [gpu for engine in engines for gpu in self._map.shards[numbers[engine.name]]]
        self._stages.append(self.timed(event, "rollout", gpus, began))
