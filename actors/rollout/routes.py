"""Makes the column `routed_experts` of finished rows from what the engine reported, checks it and counts its gaps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...codecs.tokens.routes import RoutesDamaged, RouteSpec, align_routes, check_routes, join_routes, missing_tokens
from ..engines.config import RouterReplayConfig
from ..protocols import Sample, Score
from .prompts import row_key


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """Counts of the routes of a set of rows. Rows whose episode or reward failed are not counted."""

    possible: int = 0
    """Number of tokens that can have a route: all but the last of each row."""
    missing: int = 0
    """Number of these tokens without a route."""
    rows_missing: int = 0
    """Number of rows in which a token that can have a route has none."""
    sampled: int = 0
    """Number of tokens that the policy chose."""
    mixed_context: int = 0
    """Number of these tokens that a newer policy version sampled than the first one of their row. The tokens before
    them were then computed again, with routes of the newer version that no row carries."""
    seconds: float = 0.0
    """Time in seconds that joining and checking the routes took."""
    num_tokens: int = 0
    """Number of tokens of the rows."""
    num_bytes: int = 0
    """Number of bytes of the routes of these tokens, before rows share those of their prompt."""

    def __add__(self, other: RouteCounts) -> RouteCounts:
        return RouteCounts(
            self.possible + other.possible,
            self.missing + other.missing,
            self.rows_missing + other.rows_missing,
            self.sampled + other.sampled,
            self.mixed_context + other.mixed_context,
            self.seconds + other.seconds,
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class CheckedRoutes:
    """Routes of N samples, ready for the column, with the samples' scores after the checks."""

    columns: list[np.ndarray]
    """Routes of each sample's row, `[L, layers, k]`; all missing for a failed row."""
    scores: list[Score]
    """Scores of the samples. Those whose routes are damaged have failed, as have those with too many missing ones under
    `missing=mask`."""
    counts: list[RouteCounts]
    """Counts of each sample's routes; `seconds` is 0, except for the first sample, which has those of all."""


@dataclass(frozen=True, slots=True)
class RouteRules:
    """Shape of a run's routes, and what is done about missing ones."""

    spec: RouteSpec
    config: RouterReplayConfig
    """Section `router_replay` of the configuration, of which `missing` and `max_missing_share` are read here."""


def checked_routes(samples: Sequence[Sample], scores: Sequence[Score], rules: RouteRules) -> CheckedRoutes:
    """Join the pieces of routes that the engine reported for each sample, check them, and count the missing ones."""
    spec, config = rules.spec, rules.config
    started = time.perf_counter()
    columns, checked, counts = [], [], []
    for sample, score in zip(samples, scores, strict=True):
        routes, error = spec.missing(len(sample.input_ids)), ""
        if score.valid:
            key = row_key(sample.prompt.uid, sample.index)
            try:
                routes = _routes_of(sample, spec, key)
            except RoutesDamaged as damage:
                error = str(damage)
        count = _count(sample, routes, spec) if score.valid and not error else RouteCounts()
        if config.missing == "mask" and count.missing > config.max_missing_share * count.possible:
            error = (
                f"{row_key(sample.prompt.uid, sample.index)}: {count.missing} of {count.possible} tokens have no "
                f"route, more than router_replay.max_missing_share={config.max_missing_share:g} allows"
            )
        if error:
            score = Score(reward=0.0, components={}, valid=False, error=error)
            routes = spec.missing(len(sample.input_ids))
        columns.append(routes)
        checked.append(score)
        counts.append(count)
    if counts:
        counts[0] = replace(counts[0], seconds=time.perf_counter() - started)
    return CheckedRoutes(columns, checked, counts)


def _routes_of(sample: Sample, spec: RouteSpec, key: str) -> np.ndarray:
    """Return the routes of one row, `[L, layers, k]`. Raises RoutesDamaged, which names `key`, the row's key."""
    for _, piece in sample.routes:
        check_routes(piece, spec, key)
    pieces, starts = [piece for _, piece in sample.routes], [start for start, _ in sample.routes]
    return align_routes(join_routes(pieces, starts, spec), len(sample.input_ids), spec)


def _count(sample: Sample, routes: np.ndarray, spec: RouteSpec) -> RouteCounts:
    chosen = sample.versions[sample.response_mask > 0]
    missing = int(np.count_nonzero(missing_tokens(routes[:-1], spec)))
    return RouteCounts(
        possible=max(len(routes) - 1, 0),
        missing=missing,
        rows_missing=int(missing > 0),
        sampled=len(chosen),
        mixed_context=int(np.count_nonzero(chosen > chosen[0])) if len(chosen) else 0,
        num_tokens=len(routes),
        num_bytes=routes.nbytes,
    )
