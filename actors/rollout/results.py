"""Reports of rollout actors to the driver: counts, sums and times, but no rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ...codecs.shared_rows import repeated_tokens
from ...dataplane.traffic import Traffic
from ..engines.engine_use import EngineUse, added_uses
from ..engines.router import LeftOut
from ..environments.recovery import RecoveringEngine
from ..images.prompt_pictures import PictureCounts
from ..process.user_errors import storable
from ..protocols import Sample, Score, Span, SpanTable
from .prompts import SOURCE
from .rows import MaskCounts, RolloutRows, RouteCounts

MAX_ERRORS = 256
"""Largest number of errors in a report."""
MAX_ERROR_LENGTH = 500
"""Largest number of characters of an error in a report."""


def bounded(errors: Iterable[str]) -> tuple[str, ...]:
    """Return the first MAX_ERRORS of `errors`, each cut to MAX_ERROR_LENGTH characters."""
    return tuple(error[:MAX_ERROR_LENGTH] for error in islice(errors, MAX_ERRORS))


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """Counts and sums over a set of rows, such as the group of one prompt. They are totals rather than means, so that
    they can be added over several sets exactly."""

    rows: int = 0
    """Number of rows written to the data plane."""
    failed: int = 0
    """Number of rows whose reward or episode failed or whose generation was aborted. These rows are not trained on, and
    no reward statistic includes them."""
    truncated: int = 0
    """Number of rows whose response was cut off at max_new_tokens."""
    prompt_tokens: int = 0
    """Number of prompt tokens in all rows. A prompt is counted once for each of its rows."""
    response_tokens: int = 0
    """Number of response tokens of all rows."""
    response_length_max: int = 0
    """Number of tokens of the longest response."""
    reward_sum: float = 0.0
    """Sum of the total rewards of the rows that did not fail."""
    component_sums: dict[str, float] = field(default_factory=dict)
    """For each reward function, by name, the sum of its unweighted values over the rows that did not fail."""
    errors: tuple[str, ...] = ()
    """Errors of the episodes that failed: at most MAX_ERRORS of them, each with at most MAX_ERROR_LENGTH characters."""
    routes: RouteCounts = RouteCounts()
    """Counts of the rows' expert routes; all are 0 without router replay."""
    masks: MaskCounts = MaskCounts()
    """Counts of the rows' sampling masks; all are 0 in a run without masks."""
    ended: int = 0
    """Number of rows whose response ended by itself (finish reason `stop`)."""
    ended_tokens: int = 0
    """Number of response tokens of the rows whose response ended by itself."""
    source_rows: dict[str, int] = field(default_factory=dict)
    """For each data source (the prompts' field `data_source`), by name, the number of rows that did not fail."""
    source_rewards: dict[str, float] = field(default_factory=dict)
    """For each data source, by name, the sum of the total rewards of the rows that did not fail."""
    failures: dict[str, int] = field(default_factory=dict)
    """For each kind of failure, the number of episodes, those included that are trained on with the reward 0."""
    retries: int = 0
    """Number of times that episodes were played again."""
    trained_tokens: int = 0
    """Number of tokens of the rows that did not fail, prompts and further rows of episodes included."""
    shareable_tokens: int = 0
    """Number of these tokens that repeat the beginning of an earlier row of their group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport(GroupFigures):
    """Results of one `RolloutWorker.rollout` call, or of several calls merged."""

    generate_s: float
    """Wall-clock seconds from the start of the `rollout` call to the end of its last episode."""
    traffic: bytes
    """Statistics of this actor's data-plane calls since its last report, encoded by `Traffic.to_bytes`."""
    spans: SpanTable
    """Timed pieces of work, for the run's trace."""
    left_out: tuple[LeftOut, ...] = ()
    """Engines that were removed from routing because they failed since the last report. Their requests went to other
    engines."""
    restored: int = 0
    """Number of rows taken from the journal instead of generated. The other counts and sums include these rows."""
    restored_tokens: int = 0
    """Number of response tokens of the rows taken from the journal."""
    recovered_turns: int = 0
    """Number of turns of unfinished groups that were taken from the journal, in whole or in part."""
    recovered_tokens: int = 0
    """Number of tokens of these turns that were taken from the journal."""
    unmatched_turns: int = 0
    """Number of recorded turns that were not used, because the environment asked for something else."""
    engines: dict[str, EngineUse] = field(default_factory=dict)
    """Use of each engine since the last report, by the engine's name."""
    pictures: PictureCounts = PictureCounts()
    """Counts of the pictures that were prepared since the last report."""

    @property
    def first_error(self) -> str:
        """Error of the first failed row; "" when none failed."""
        return next(iter(self.errors), "")

    @property
    def valid(self) -> int:
        """Number of rows that did not fail."""
        return self.rows - self.failed


def added_figures(parts: Sequence[GroupFigures]) -> dict[str, Any]:
    """Return the values of the GroupFigures of all rows of `parts`, by field."""
    totals = (
        "rows", "failed", "truncated", "ended", "ended_tokens", "prompt_tokens", "response_tokens", "reward_sum",
        "retries", "trained_tokens", "shareable_tokens",
    )  # fmt: skip
    by_name = ("component_sums", "source_rows", "source_rewards", "failures")
    return {name: sum(getattr(part, name) for part in parts) for name in totals} | {
        "response_length_max": max((part.response_length_max for part in parts), default=0),
        **{name: _added([getattr(part, name) for part in parts]) for name in by_name},
        "errors": bounded(error for part in parts for error in part.errors),
        "routes": sum((part.routes for part in parts), RouteCounts()),
        "masks": sum((part.masks for part in parts), MaskCounts()),
    }


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _from_journal(parts: Sequence[RolloutReport | RolloutTally]) -> dict[str, Any]:
    """Return the sums of the counts that say what was taken from the journal, by field."""
    counts = ("restored", "restored_tokens", "recovered_turns", "recovered_tokens", "unmatched_turns")
    return {name: sum(getattr(part, name) for part in parts) for name in counts}


def merge_reports(reports: Sequence[RolloutReport]) -> RolloutReport:
    """Merge the reports of actors that worked at the same time. Counts, sums and traffic are added; for `generate_s`
    and `response_length_max` the largest value is taken."""
    return RolloutReport(
        **added_figures(reports),
        generate_s=max((r.generate_s for r in reports), default=0.0),
        traffic=Traffic.sum_of(r.traffic for r in reports).to_bytes(),
        spans=SpanTable.of([span for r in reports for span in r.spans.to_spans()]),
        left_out=tuple(dict.fromkeys(engine for r in reports for engine in r.left_out)),
        engines=added_uses(r.engines for r in reports),
        pictures=sum((r.pictures for r in reports), PictureCounts()),
        **_from_journal(reports),
    )


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Results of one `RolloutWorker.evaluate` call."""

    rows: int
    """Number of samples that were generated."""
    failed: int
    """Number of samples whose reward or episode failed or whose generation was aborted."""
    first_error: str
    """Error of the first failed sample; "" when none failed."""
    first_version: int
    """Lowest policy version that generated a token of a sample; -1 when no token was generated."""
    last_version: int
    """Highest policy version that generated a token of a sample; -1 when no token was generated."""
    sums: Mapping[str, float]
    """Sum of each metric, by metric key; see `FigureSums`."""
    counts: Mapping[str, int]
    """Number of samples or prompts over which each sum was taken, by metric key."""


def group_figures(
    samples: Sequence[Sample],
    scores: Sequence[Score],
    routes: Sequence[RouteCounts] = (),
    masks: Sequence[MaskCounts] = (),
) -> GroupFigures:
    """Return the counts and sums of scored samples. routes: counts of each sample's expert routes; empty without router
    replay. masks: counts of each sample's sampling masks; empty in a run without masks."""
    lengths = [int(np.count_nonzero(sample.response_mask)) for sample in samples]
    failed = [score for score in scores if not score.valid]
    ended = [length for length, sample in zip(lengths, samples, strict=True) if sample.finish_reason == "stop"]
    component_sums: dict[str, float] = {}
    source_rows: dict[str, int] = {}
    source_rewards: dict[str, float] = {}
    for sample, score in zip(samples, scores, strict=True):
        if not score.valid:
            continue
        for name, value in score.components.items():
            component_sums[name] = component_sums.get(name, 0.0) + value
        source = sample.prompt.fields.get(SOURCE)
        if isinstance(source, str):
            source = storable(source)
            source_rows[source] = source_rows.get(source, 0) + 1
            source_rewards[source] = source_rewards.get(source, 0.0) + score.reward
    return GroupFigures(
        rows=len(samples),
        failed=len(failed),
        errors=bounded(score.error for score in scores if not score.valid or score.failure),
        truncated=sum(sample.finish_reason == "length" for sample in samples),
        prompt_tokens=sum(len(sample.input_ids) for sample in samples) - sum(lengths),
        response_tokens=sum(lengths),
        response_length_max=max(lengths, default=0),
        reward_sum=sum(score.reward for score in scores if score.valid),
        component_sums=component_sums,
        routes=sum(routes, RouteCounts()),
        masks=sum(masks, MaskCounts()),
        ended=len(ended),
        ended_tokens=sum(ended),
        source_rows=source_rows,
        source_rewards=source_rewards,
        failures=dict(Counter(score.failure for score in scores if score.failure)),
        retries=sum(sample.retries for sample in samples),
    )


def token_figures(rows: RolloutRows) -> dict[str, int]:
    """Return the counts `trained_tokens` and `shareable_tokens` of the rows of a group."""
    used, column = rows.tags["valid"] > 0, rows.batch.jagged("input_ids")
    ids, lengths = column.values.numpy()[np.repeat(used, column.lengths)], column.lengths[used]
    repeated = repeated_tokens(ids, lengths)
    return {"trained_tokens": len(ids), "shareable_tokens": int(repeated.sum())}


@dataclass(slots=True)
class RolloutTally:
    """Collects the values of a RolloutReport while a `rollout` call runs."""

    groups: list[GroupFigures] = field(default_factory=list)
    generate_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    restored: int = 0
    restored_tokens: int = 0
    recovered_turns: int = 0
    recovered_tokens: int = 0
    unmatched_turns: int = 0

    def add(self, group: GroupFigures, *, restored: bool = False) -> None:
        """Add the counts and sums of a group. restored: True if the group comes from the journal."""
        self.groups.append(group)
        if restored:
            self.restored += group.rows
            self.restored_tokens += group.response_tokens

    def add_recovered(self, engine: RecoveringEngine) -> None:
        """Add the counts of a group whose recorded turns were taken from the journal."""
        self.recovered_turns += engine.recovered_turns
        self.recovered_tokens += engine.recovered_tokens
        self.unmatched_turns += engine.unmatched

    def report(self, traffic: Traffic, left_out: Sequence[LeftOut] = ()) -> RolloutReport:
        """Return the values collected so far as a RolloutReport."""
        return RolloutReport(
            **added_figures(self.groups),
            generate_s=self.generate_s,
            traffic=traffic.to_bytes(),
            spans=SpanTable.of(self.spans),
            left_out=tuple(left_out),
            **_from_journal([self]),
        )
