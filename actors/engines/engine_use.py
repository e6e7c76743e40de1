"""Reports how much a rollout actor's engines had to do, and how many prompt tokens they had cached."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...codecs.counts import Counts
from .protocol import EngineStats, ServingEngine
from .router import Router


@dataclass(frozen=True, slots=True)
class EngineUse(Counts):
    """Use of one engine between two reports of a rollout actor. Reports of several actors about the same engine can be
    added, because only ratios of the sums are used."""

    seconds: float = 0.0
    """Seconds between the reports."""
    busy_s: float = 0.0
    """Seconds during which the engine was generating."""
    prompt_tokens: int = 0
    """Number of prompt tokens of the engine's samples; 0 for engines that reuse no keys and values."""
    cached_tokens: int = 0
    """Number of these tokens whose keys and values the engine already had."""
    drafts: int = 0
    """Number of steps that could check drafted tokens; 0 without speculative decoding."""
    accepted_tokens: int = 0
    """Number of drafted tokens that were accepted."""

    def since(self, before: EngineUse, seconds: float) -> EngineUse:
        """Return the use after `before`, an earlier use of the same engine, in `seconds`."""
        return replace(self - before, seconds=seconds)


class EngineMeter:
    """Reads the counters of a rollout actor's engine, or of all engines behind its router."""

    def __init__(self, name: str, engine: ServingEngine) -> None:
        """name: name of an engine that has no router in front of it."""
        self._name, self._engine = name, engine
        self._since, self._before = time.monotonic(), self._stats()

    def _stats(self) -> dict[str, EngineUse]:
        engine = self._engine
        found = engine.engine_stats() if isinstance(engine, Router) else {self._name: engine.stats}
        return {name: _use(stats) for name, stats in found.items()}

    def take(self) -> dict[str, EngineUse]:
        """Return the use of each engine since the last call, by its name."""
        now, found, used = time.monotonic(), self._stats(), dict[str, EngineUse]()
        for name, new in found.items():
            old = self._before.get(name, EngineUse())
            if new.busy_s < old.busy_s:  # Another engine has taken the place of this one.
                old = EngineUse()
            used[name] = new.since(old, now - self._since)
        self._since, self._before = now, found
        return used


def _use(stats: EngineStats) -> EngineUse:
    return EngineUse(0.0, stats.busy_s, stats.prompt_tokens, stats.cached_tokens, stats.drafts, stats.accepted_tokens)


def added_uses(parts: Iterable[Mapping[str, EngineUse]]) -> dict[str, EngineUse]:
    """Return the sums of several reports, by the engine's name."""
    total: dict[str, EngineUse] = {}
    for part in parts:
        for name, use in part.items():
            total[name] = total.get(name, EngineUse()) + use
    return total


def engine_metrics(engines: Mapping[str, EngineUse]) -> dict[str, float]:
    """Return the shares of cached prompt tokens and of idle time, and the drafted tokens that a step accepted.

    The idle shares are the mean over the engines and the largest one. Metrics without a value are left out."""
    prompts = sum(use.prompt_tokens for use in engines.values())
    idle = [min(1.0, max(0.0, 1.0 - use.busy_s / use.seconds)) for use in engines.values() if use.seconds > 0]
    metrics = {} if not idle else {"engine/idle_share": math.fsum(idle) / len(idle), "engine/idle_share_max": max(idle)}
    if prompts:
        metrics["engine/prefix_hit_share"] = sum(use.cached_tokens for use in engines.values()) / prompts
    if drafts := sum(use.drafts for use in engines.values()):
        metrics["engine/accepted_tokens"] = sum(use.accepted_tokens for use in engines.values()) / drafts
    return metrics
