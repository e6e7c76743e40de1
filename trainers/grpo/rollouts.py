"""Defines what a feed needs of a run's rollout actors, and what it tells of their groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...actors.rollout.results import RolloutReport
from ..cluster.calls import ActorFailed, Call
from ..cluster.handles import RolloutHandle
from ..observe.data_plane_watch import Busy


class Rollouts(Protocol):
    """The operations on a run's rollout actors and engines that the feed needs; `RolloutPool` implements them."""

    @property
    def active(self) -> Sequence[RolloutHandle]:
        """The rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        ...

    def ended(
        self, calls: Sequence[Call[RolloutReport]], timeout_s: float
    ) -> list[tuple[Call[RolloutReport], RolloutReport | ActorFailed]]:
        """Return those of `calls` that have ended, each with its report or its ActorFailed. Waits up to `timeout_s` for
        the first one to end."""
        ...

    def end_rollouts(self, actors: Iterable[RolloutHandle]) -> None:
        """Ask `actors` to end their rollout calls in flight. Each call then returns with its finished groups."""
        ...

    def begin_watch(self) -> None:
        """Reset the time without progress that `still_s` returns for each actor. Called when a new wait for rollouts
        begins."""
        ...

    def look(self, version: int) -> bool:
        """Query the progress of all actors, without waiting for their answers, and replace engines that died. New
        engines serve the weights of `version`. Returns whether any actor has made progress or all dead engines were
        replaced. Raises NoEngineLeft if no engine can get requests any more."""
        ...

    def still_s(self, actor: RolloutHandle) -> float:
        """Return the seconds since `actor` last made progress, counted from the last `begin_watch` at the earliest."""
        ...

    def end_stuck(self, handle: RolloutHandle, without: str) -> str:
        """Kill an actor that has made no progress, and return the sentence that its calls then fail with. without: what
        it has not shown for resources.stage_timeout_s."""
        ...

    def may_repeat(self, failure: ActorFailed, since_s: float, version: int) -> bool:
        """Return whether a call that failed can be sent again. It can if it found no engine and one was replaced.

        since_s: time (`time.monotonic()`) at which the call began. version: version that new engines serve.
        """
        ...

    def lost_nodes(self) -> Sequence[str]:
        """Return Ray's ids of the nodes that have left the Ray cluster."""
        ...

    def exclude(self, engine: str, reason: str, called_s: float) -> None:
        """Send no more requests to the engine named `engine`, unless its process was replaced after `called_s`.

        reason: text for the log and for error messages. called_s: time (`time.monotonic()`) at which the rollout call
        began that found the engine dead or failing.
        """
        ...

    def replace(self, actor: RolloutHandle, pid: int, failure: ActorFailed, version: int) -> None:
        """Replace the process `pid` of `actor`, which died, by a new one. An engine that it embeds then serves
        `version`. Does nothing if that process was replaced before. Raises `failure` if no more actors may be
        replaced."""
        ...


@dataclass(slots=True)
class FeedTally:
    """Counts what happened to the groups of one step."""

    reports: list[RolloutReport] = field(default_factory=list)
    """Reports of the rollout calls that ended in the step."""
    dropped: int = 0
    """Number of groups that were cleared from the data plane because they had no training signal (dynamic sampling)."""
    stale: int = 0
    """Number of groups that were cleared from the data plane because the policy version that generated them was too
    old."""
    reissued: int = 0
    """Number of groups whose prompts were issued again because their rollout actor died before it had stored the
    group."""
    surplus: int = 0
    """Number of groups in flight that were dropped because oversampling had issued more prompts than the step
    needed."""
    generated: list[Busy] = field(default_factory=list)
    """Periods in which rollout actors generated, one for each rollout call that ended in the step or is still in flight
    at its end."""
    since_s: float = 0.0
    """End of the last rollout call that was counted in an earlier step (`time.monotonic`)."""


class FeedObserver(Protocol):
    """Records which groups the feeds of this process have trained on, for tests that count rows."""

    def opened(self, plane_id: int, partition: str, step: int) -> None:
        """Called when a feed opens `partition` of a data plane, to continue after `step`."""
        ...

    def committed(self, plane_id: int, partition: str, step: int, positions: Sequence[int]) -> None:
        """Called when `step` has been trained on. positions: ascending positions of its groups in the prompt stream."""
        ...
