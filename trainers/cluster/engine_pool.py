"""Tracks the engines of a run: the version of the weights that each serves, and the reason if it gets no requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...actors.process.own_process import ActorInfo
from ...actors.weight_sync.transports.protocol import ReceiverGroup
from .calls import Call
from .handles import EngineHandle

_log = logging.getLogger(__name__)
JOINS = "joins the run"
"""Reason for which an engine that is added to a run gets no requests before its first weights."""


class NoEngineLeft(RuntimeError):
    """All engines of the run are excluded from requests. The message gives the reason for each engine."""


@dataclass(slots=True)
class Engine:
    """One engine, as the driver sees it."""

    handle: EngineHandle
    """Handle of the actor that hosts the engine: an EngineActor, or the RolloutActor that embeds it."""
    num_workers: int
    """Number of the engine's processes that receive weights."""
    version: int = 0
    """Version of the weights that the engine serves."""
    first_version: int = 0
    """Version that the engine serves when its process starts."""
    left_out: str = ""
    """Reason why the engine gets no requests; "" while it gets requests."""
    dead: bool = False
    """True if the actor's process died, or the engine's own process inside the actor."""
    broken: bool = False
    """True if the engine does not hold a complete version of the weights. Either a weight update failed, and requests
    wait for the next update, or the engine has dropped its weights to sleep."""
    asleep: bool = False
    """True while the engine's GPUs are lent to other runs of a GPU pool. The engine is then also `broken`: its requests
    wait, and weight syncs leave it out."""
    joins: bool | None = None
    """True if the engine received its last update directly into its parameters, without staging; None before the first
    update."""
    renewed_s: float = 0.0
    """Time (`time.monotonic()`) at which a new process last replaced the engine's, or at which the engine joined a run
    under way; 0.0 for the first process of an engine that was there from the start."""
    ping: Call[ActorInfo] | None = None
    """Call of `ping` that the engine has not answered yet; None if none is outstanding."""

    def renew(self) -> None:
        """Record that a new process has replaced the engine's process. It serves its first version."""
        self.version, self.dead, self.broken, self.joins, self.ping = self.first_version, False, False, None, None
        self.renewed_s = time.monotonic()

    @property
    def name(self) -> str:
        return self.handle.info.name

    @property
    def silent_s(self) -> float:
        """Seconds for which a `ping` to the engine has been unanswered; 0.0 if no answer is outstanding."""
        return 0.0 if self.ping is None else time.monotonic() - self.ping.started

    @property
    def group(self) -> ReceiverGroup:
        """The engine as a receiver of weight updates."""
        return ReceiverGroup(self.name, self.num_workers)


@dataclass(slots=True)
class EnginePool:
    """All engines of a run, in a fixed order."""

    engines: list[Engine]
    embedded: bool
    """True if each engine is embedded in a rollout actor. An engine without requests then leaves its rollout actor
    idle, too."""
    on_change: list[Callable[[Engine], None]] = field(default_factory=list)
    """Callbacks that receive an engine after it was excluded from requests or readmitted."""

    @property
    def active(self) -> list[Engine]:
        """The engines that get requests, including sleeping ones, which get requests after they wake. Raises
        NoEngineLeft when there is none left of them; a supervised run never had one."""
        found = [engine for engine in self.engines if not engine.left_out]
        if not found and self.engines:
            reasons = "; ".join(f"{engine.name}: {engine.left_out}" for engine in self.engines)
            raise NoEngineLeft(f"none of the {len(self.engines)} engines can get requests: {reasons}")
        return found

    @property
    def all_asleep(self) -> bool:
        """True if all usable engines sleep, because the GPU pool has lent their GPUs to other runs."""
        asleep = [engine.asleep for engine in self.engines if not engine.left_out]
        return bool(asleep) and all(asleep)

    def ahead_of(self, version: int) -> bool:
        """Return whether an engine serves a later version than `version`. This happens after the train workers have
        returned to a checkpoint."""
        return any(engine.version > version for engine in self.engines)

    def named(self, name: str) -> Engine:
        """Return the engine called `name`. Raises KeyError when there is none."""
        return {engine.name: engine for engine in self.engines}[name]

    def exclude(self, engine: Engine, reason: str) -> None:
        """Exclude `engine` from requests until `readmit`. reason: stored in `engine.left_out`. If the engine is already
        excluded, this is a no-op and the first reason stays."""
        if engine.left_out:
            return
        engine.left_out = reason
        _log.warning("engine left out: %s: %s", engine.handle.info, reason)
        self._changed(engine)

    def readmit(self, engine: Engine) -> None:
        """Send requests to `engine` again. Idempotent."""
        if engine.left_out:
            if engine.left_out != JOINS:
                _log.warning("engine taken back: %s, version %d", engine.handle.info, engine.version)
            engine.left_out = ""
            self._changed(engine)

    def _changed(self, engine: Engine) -> None:
        for call in self.on_change:
            call(engine)
