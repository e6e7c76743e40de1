"""Adds engines to a run and removes them while it goes on: `Scaling` is the driver's part of it.

    order -> place -> process starts, builds -> weights (a normal sync) -> routers told, requests come
    order -> no new requests -> running ones go on elsewhere -> process ends, place is free

stage       waits for                                  unblocked by
start       nothing: steps go on meanwhile             the engine is built, or resources.start_timeout_s is over
join        one engine                                 the weights of the present version
leave       the engine's requests, and rollout calls   their moving to other engines; prompts are issued again

An engine joins during a wait for rollouts or at the end of a step. It leaves at the end of a step, before the weight
sync. Prompts that its rollout actor has not finished are issued again, and continue from their journaled turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...actors.rollout.config import RolloutConfig
from ...dataplane.errors import DataPlaneError
from ..cluster.calls import ActorFailed, Call, ended, gather_each
from ..cluster.engine_pool import JOINS, Engine
from ..cluster.gpu_bundles import SETTLE_S, read_hosts
from ..cluster.handles import EngineHandle, RolloutHandle
from ..cluster.places.placement import Host, Seat
from ..grpo.run_parts import Run
from .scale_order import ScaleOrders

LOOK_S = 0.5
"""Seconds between two looks for hosts with room."""


@dataclass(slots=True)
class _Joining:
    """An engine whose process is starting."""

    handle: EngineHandle
    host: Host
    call: Call[Any]
    """Call that its process works on."""
    deadline_s: float
    stage: Literal["configure", "build", "count"] = "configure"
    """Purpose of the call: to send its settings, to build it, or to count the processes that receive weights."""
    num_workers: int = 0
    """Number of its processes that receive weights; 0 until it is built."""


class ScaledEngines:
    """The number of engines that a run was ordered to have, over all its launches."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        """Forget the orders to earlier processes of the run in `folder`. tell: receives sentences for the user."""
        self._orders, self._tell = ScaleOrders(folder), tell

    def at_start(self, rollout: RolloutConfig) -> RolloutConfig:
        """Return `rollout` with as many engines as a launch begins with. More are started while the run goes on,
        because there may be no room for them any more."""
        wanted = self._orders.wanted
        fewer = rollout.num_engines if wanted is None else min(rollout.num_engines, wanted)
        return rollout.model_copy(update={"num_engines": fewer})

    def begin(self, run: Run) -> None:
        """Carry out orders in a run that was launched."""
        run.rollouts.scaler = Scaling(run, self._orders, tell=self._tell)


class Scaling:
    """Brings one launch of a run to the number of engines that orders, or `resources.elastic`, ask for."""

    def __init__(
        self,
        run: Run,
        orders: ScaleOrders,
        *,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """tell: receives sentences for the user."""
        starter = run.actors.starter
        assert starter is not None, "actors with processes were started"
        self._run, self._orders, self._starter = run, orders, starter
        self._tell = tell
        self._pool = run.actors.engines
        self._elastic = run.config.resources.elastic
        config_says = run.config.rollout.num_engines if self._elastic else None
        self._wanted: int | None = config_says if orders.wanted is None else orders.wanted
        """Number of engines to reach; None to keep those that there are."""
        self._joining: list[_Joining] = []
        self._look_s = 0.0
        """Time (`time.monotonic`) of the next look for hosts with room."""
        self._since_s = time.monotonic()
        """Time since when engines have been missing for lack of room."""
        self._why = ""

    # ---------------- Called by the run.

    def look(self, version: int) -> None:
        """Carry on while the driver waits for rollouts. A new engine that is built gets the weights of `version`, and
        then requests."""
        self._carry_on()
        for joining in self._built():
            engine = self._add(joining)
            stages, bound_s = self._run.stages, self._run.config.sync.timeout_s + self._run.actors.start_timeout_s
            with self._run.roles.engines_kept(), stages.timed("scale", bound_s):
                self._run.roles.sync_engine(engine, version)
                if engine.version >= version and not (engine.dead or engine.broken):
                    self._pool.readmit(engine)
            self._run.rollouts.begin_watch()
        self._answer()

    def end_step(self, withdraw: Callable[[RolloutHandle], None]) -> None:
        """Carry on at the end of a step, before its weight sync, which brings new engines to the new version.

        withdraw: ends the calls of a rollout actor that leaves the run, and has their work done by others."""
        self._answer()
        self._carry_on()
        for joining in self._built():
            self._add(joining)
        if self._wanted is None or len(self._pool.engines) <= self._wanted:
            return
        ranked = sorted(self._pool.engines, key=lambda engine: (not engine.left_out, -_number(engine.name)))
        self._remove(ranked[: len(ranked) - self._wanted], withdraw)
        self._run.rollouts.begin_watch()

    # ---------------- These methods add engines.

    def _carry_on(self) -> None:
        asked = self._orders.read(len(self._pool.engines))
        if asked is not None:
            self._take(asked)
        while self._joining and self._wanted is not None and self._num_engines > self._wanted:
            self._give_up(self._joining[-1])
        missing = 0 if self._wanted is None else self._wanted - self._num_engines
        if missing > 0 and time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + LOOK_S
            self._start(missing)

    def _take(self, asked: int) -> None:
        """Take an order for `asked` engines, or refuse it."""
        self._why, self._since_s = "", time.monotonic()
        if obstacle := self._why_fixed(asked):
            self._orders.answer("refused", self._listed, obstacle)
            return
        self._orders.wanted = self._wanted = asked
        self._tell(f"engines: {len(self._pool.engines)} now, {asked} ordered by headrace scale")

    def _start(self, missing: int) -> None:
        """Start the processes of up to `missing` engines, on hosts with room. If there is too little room, the order is
        refused, or with `resources.elastic` engines wait for hosts that join."""
        rooms = self._rooms()
        places = [host for host, room in rooms for _ in range(room)][:missing]
        self._why = ""
        if len(places) < missing:
            need = (
                f"an engine needs {self._run.config.rollout.tp} free {'GPU' if self._on_gpus else 'CPU'}(s) on a host"
            )
            free = ", ".join(f"{host.name} has room for {room}" for host, room in rooms) or "no host can be used"
            self._why = f"{missing - len(places)} engine(s) wait for room: {need}; {free}"
            if not self._elastic:
                if time.monotonic() >= self._since_s + SETTLE_S:  # Ray notices late that actors have ended.
                    most = self._num_engines + len(places)
                    self._refuse(f"--engines: got {self._wanted}, expected at most {most}, because {need}; {free}")
                return
        for host in places:
            try:
                self._start_on(host)
            except (ValueError, ActorFailed, DataPlaneError) as error:
                self._has_failed(host, str(error))
                return

    def _start_on(self, host: Host) -> None:
        timeout_s, tp = self._run.actors.start_timeout_s, self._run.config.rollout.tp
        kind = "rollout" if self._pool.embedded else "engine"
        names = {seat.name for seat in self._starter.placement.engines}
        name = next(name for name in (f"{kind} {index}" for index in range(len(names) + 1)) if name not in names)
        deadline_s = time.monotonic() + timeout_s
        with self._run.stages.timed("scale", timeout_s):
            if self._pool.embedded:  # It writes rows.
                self._run.actors.ensure_unit(host.node)
            reservation, index = self._starter.reservation.with_host(host)
            seat = Seat(name, tp, index, tuple(range(tp)) if self._on_gpus else ())
            handle = self._starter.one_more(reservation.with_engines([seat], deadline_s))
        self._run.actors.placement = self._starter.placement
        self._joining.append(_Joining(handle, host, handle.configure(), deadline_s))

    def _built(self) -> list[_Joining]:
        """Follow the starts of processes, without waiting, and return the engines that are built by now."""
        built = []
        for joining in list(self._joining):
            for _, outcome in ended([joining.call], "scale", 0.0):
                if isinstance(outcome, ActorFailed):
                    self._give_up(joining, str(outcome.cause or outcome))
                elif joining.stage == "configure":
                    joining.handle.info = outcome
                    self._run.actors.on_started([outcome])
                    joining.stage, joining.call = "build", joining.handle.build()
                elif joining.stage == "build":
                    joining.stage, joining.call = "count", joining.handle.num_workers()
                else:
                    joining.num_workers = outcome
                    self._joining.remove(joining)
                    built.append(joining)
            if joining in self._joining and time.monotonic() >= joining.deadline_s:
                limit = f"resources.start_timeout_s={self._run.actors.start_timeout_s:g}"
                self._give_up(joining, f"{joining.handle.info} has not started in time ({limit})")
        return built

    def _add(self, joining: _Joining) -> Engine:
        """Make a built engine part of the run. It gets no requests yet."""
        first = self._run.config.first_version
        engine = Engine(joining.handle, joining.num_workers, first, first, left_out=JOINS)
        engine.renewed_s = time.monotonic()  # Late news can be of an engine that had its name before.
        self._run.actors.add_engine(engine)
        self._tell(f"engines: {engine.name} joins on {joining.host.name}, the run has {len(self._pool.engines)} now")
        return engine

    def _give_up(self, joining: _Joining, why: str = "") -> None:
        """End an engine that has not joined yet. why: what went wrong; "" if it is not wanted any more."""
        self._joining.remove(joining)
        joining.handle.kill("has left the run before it was built")
        self._run.actors.on_left(joining.handle.info.name)
        self._starter.free(joining.handle.info.name)
        self._run.actors.placement = self._starter.placement
        if why:
            self._has_failed(joining.host, why)

    def _has_failed(self, host: Host, why: str) -> None:
        """Refuse the open order, because an engine did not start on `host`. An elastic run keeps the order if the host
        has left the Ray cluster, and waits for another one."""
        if self._elastic and host.node not in [one.node for one in read_hosts()]:
            self._tell(f"engines: host {host.name} is gone, on which an engine was starting; another host takes it")
            return
        self._refuse(f"a new engine could not start: {why}")

    def _refuse(self, why: str) -> None:
        """Refuse the open order, and stay with the engines that are there or are starting until the next one."""
        self._tell(f"engines: {why}")
        self._orders.answer("refused", self._listed, why)
        self._orders.wanted = self._wanted = self._num_engines

    # ---------------- These methods remove engines.

    def _remove(self, leaving: Sequence[Engine], withdraw: Callable[[RolloutHandle], None]) -> None:
        """Take engines out of the run, after their work has gone to those that stay."""
        actors, timeout_s = self._run.actors, self._run.actors.start_timeout_s
        for engine in leaving:
            engine.left_out = engine.left_out or "leaves the run"
        with self._run.stages.timed("scale", 2 * timeout_s + self._run.config.resources.stage_timeout_s):
            if not self._pool.embedded:
                asked = [rollout.retire_engine(one.handle) for rollout in actors.rollouts for one in leaving]
                gather_each(asked, "scale", timeout_s)  # A router that has died is replaced without these engines.
            for engine in leaving:
                if isinstance(engine.handle, RolloutHandle):
                    withdraw(engine.handle)
                    self._run.stages.report_progress()
                actors.remove_engine(engine)
        names = ", ".join(engine.name for engine in leaving)
        self._tell(f"engines: {names} left the run, which has {len(self._pool.engines)} now")

    # ---------------- These methods look at the run.

    def _why_fixed(self, asked: int) -> str:
        """Return the sentence why the number of the run's engines cannot change to `asked`; "" if it can."""
        config, got = self._run.config, f"--engines: got {asked}, "
        if config.sft.train or config.run.replay:
            return got + "but this run generates nothing, expected a run with engines of its own"
        if config.pool.address is not None:
            return got + "but this run borrows its GPUs from a pool (pool.address), which decides how many engines work"
        if config.resources.rollout_gpus is not None:
            return got + "but resources.rollout_gpus gives each engine its GPUs, expected it unset"
        if self._starter.placement.shared or config.resources.switch_roles == "always":
            return got + "but engines and train workers share GPUs, expected resources.layout=separate"
        most = config.algorithm.prompts_per_step
        if self._pool.embedded and asked > most:
            return got + f"expected at most algorithm.prompts_per_step={most}, because each rollout actor needs a group"
        return ""

    @property
    def _num_engines(self) -> int:
        """Number of engines, with those that are starting."""
        return len(self._pool.engines) + len(self._joining)

    @property
    def _on_gpus(self) -> bool:
        return self._starter.placement.layout != "cpu"

    @property
    def _listed(self) -> tuple[str, ...]:
        return tuple(
            f"{engine.name} on {engine.handle.info.host}, version {engine.version}"
            + (f" ({engine.left_out})" if engine.left_out else "")
            for engine in self._pool.engines
        )

    def _answer(self) -> None:
        """Tell the command how far its order is."""
        if not self._orders.is_open:
            return
        joining = any(engine.left_out == JOINS for engine in self._pool.engines)
        if not self._joining and not joining and len(self._pool.engines) == self._wanted:
            self._orders.answer("done", self._listed)
        else:
            starting = [f"{one.handle.info.name} starts on {one.host.name}" for one in self._joining]
            self._orders.answer("under way", self._listed, "; ".join([*starting, *filter(None, [self._why])]))

    def _rooms(self) -> list[tuple[Host, int]]:
        """Return the hosts that new engines can use, each with the number of engines that it has room for. Hosts of the
        run come first. Other hosts of the cluster count only with `resources.elastic`."""
        placement, tp = self._starter.placement, self._run.config.rollout.tp
        known = {host.node for host in placement.hosts}
        near = {placement.hosts[seat.host].node for seat in placement.ranks if seat.host is not None}
        one_host = self._starter.route.kind == "ipc" or self._run.config.dataplane.store.kind == "shm"
        # Ray notices late that an actor takes a CPU.
        taken = [one.host.node for one in self._joining if one.stage == "configure"]
        found = []
        for host in read_hosts():
            if (host.node in known or self._elastic) and (host.node in near or not one_host or not near):
                free = min(host.free_cpus, len(host.free_gpus)) if self._on_gpus else host.free_cpus
                room = max(0, int(free // tp) - taken.count(host.node))
                if host.node in known or (room and self._fits(host)):
                    found.append((host, room))
        return sorted(found, key=lambda pair: (pair[0].node not in known, -pair[1]))

    def _fits(self, host: Host) -> bool:
        """Compare a host that has joined with the others of the run."""
        with self._run.stages.timed("scale", 2 * self._run.actors.start_timeout_s):
            return self._starter.fits(host.node)


def _number(name: str) -> int:
    return int(name.rpartition(" ")[2])
