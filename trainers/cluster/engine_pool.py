"""The engines of a run: who serves which version, who is left out and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ...actors.weights.transports.protocol import ReceiverGroup
from .handles import Peer

_log = logging.getLogger(__name__)


class NoEngineLeft(RuntimeError):
    """Every engine of the run is left out: says what became of each."""


@dataclass(slots=True)
class Engine:
    """One engine and what the driver knows of it."""

    peer: Peer
    """Its host: an EngineActor, or the RolloutActor that embeds it."""
    num_workers: int
    """Its processes that receive weights."""
    version: int = 0
    """Of the weights it serves."""
    left_out: str = ""
    """Why it gets no requests; "" while it does."""
    dead: bool = False
    """Whether its process is gone."""

    @property
    def name(self) -> str:
        return self.peer.info.name

    @property
    def group(self) -> ReceiverGroup:
        """Its part in an update."""
        return ReceiverGroup(self.name, self.num_workers)


@dataclass(slots=True)
class EnginePool:
    """All engines of a run, in a fixed order."""

    engines: list[Engine]
    embedded: bool
    """Whether each lives in a rollout actor of its own, so that leaving it out leaves that actor out."""
    on_change: list[Callable[[Engine], None]] = field(default_factory=list)
    """Called with an engine that was left out or taken back."""

    @property
    def active(self) -> list[Engine]:
        """Those that get requests. Raises NoEngineLeft when there is none."""
        found = [engine for engine in self.engines if not engine.left_out]
        if not found:
            reasons = "; ".join(f"{engine.name}: {engine.left_out}" for engine in self.engines)
            raise NoEngineLeft(f"no engine is left of {len(self.engines)}: {reasons}")
        return found

    def ahead_of(self, version: int) -> bool:
        """Whether one serves a later version: after train workers went back to a checkpoint, until they catch up."""
        return any(engine.version > version for engine in self.engines)

    def named(self, name: str) -> Engine:
        """The engine called `name`. Raises KeyError."""
        return next(engine for engine in self.engines if engine.name == name)

    def leave_out(self, engine: Engine, reason: str) -> None:
        """No more requests for `engine`, until `take_back`. The first reason stays."""
        if engine.left_out:
            return
        engine.left_out = reason
        _log.warning("engine left out: %s: %s", engine.peer.info, reason)
        self._changed(engine)

    def take_back(self, engine: Engine) -> None:
        """Requests for `engine` again. Idempotent."""
        if engine.left_out:
            engine.left_out = ""
            _log.warning("engine taken back: %s, version %d", engine.peer.info, engine.version)
            self._changed(engine)

    def _changed(self, engine: Engine) -> None:
        for call in self.on_change:
            call(engine)
