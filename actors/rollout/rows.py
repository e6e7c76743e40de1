"""Turns samples and their scores into rows of the data plane, with routes and users' own columns among their fields.

The column `routed_experts` holds the expert routes that the engine reported. The routes are checked, and missing ones
are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ...codecs.batch import Batch, Column, Jagged, Ragged
from ...codecs.blobs import Blob
from ...codecs.counts import Counts
from ...codecs.integers import exclusive_cumsum
from ...codecs.jagged import concat, slice_rows
from ...codecs.schema import Schema
from ...codecs.tokens.masks import MASK_FIELD, MASKS, MasksDamaged, decode_sets, sealed, without_sets
from ...codecs.tokens.routes import (
    ROUTES,
    RoutesDamaged,
    RouteSpec,
    align_routes,
    check_routes,
    join_routes,
    missing_tokens,
)
from ..columns import ColumnConfig
from ..engines.config import RouterReplayConfig
from ..protocols import Prompt, PromptSource, RowTokens, Sample, Score, row_schema, written_fields
from ..rewards.rubric import reward_tag
from .prompts import SOURCE, place_of, row_key

_CHECKED = 1000
"""Number of prompts whose columns are checked before a run."""
TRAINED_TOKENS = "trained_tokens"
"""Name of the tag with the number of tokens of a row that are trained on. Rows have it only if truncated rows are
masked; otherwise all response tokens of valid rows are trained on."""
EPISODE = "episode"
"""Name of the tag with the index of a row's episode in its group. Rows have it only if episodes may have several rows;
otherwise each row is an episode."""
TEACHER_SOURCE = "teacher_source"
"""Name of the tag with the number of a row's data source among those that have teachers of their own, or -1. Rows have
it only if teachers differ by data source."""
PICTURE_TOKENS = "picture_tokens"
"""Name of the tag with the number of tokens of a row that are placeholders of its pictures. Rows have it only if the
run shows pictures."""
KV_STALENESS = "kv_staleness"
"""Name of the tag with a row's staleness of keys and values (see `kv_staleness`). Rows have it only if engines keep
keys and values over weight updates."""


def check_columns(source: PromptSource, columns: Sequence[ColumnConfig]) -> None:
    """Check that the first prompts of a source have the `per_sample` columns, if the environment sets no columns.

    Raises ValueError, naming the prompt and the column, if a prompt lacks a column without a default.
    """
    wanted = [column for column in columns if column.kind == "per_sample"]
    if not wanted:
        return
    for index in range(_CHECKED if source.size is None else min(source.size, _CHECKED)):
        fields = source.row(index).fields
        for column in wanted:
            if column.name not in fields and column.default is None:
                raise ValueError(
                    f"data.columns: {place_of(source, index)} has no column {column.name!r}, which has no "
                    f"default; the row has {', '.join(fields) or 'no other columns'}"
                )
            if column.name in fields:
                try:
                    _number(column, fields[column.name])
                except ValueError as error:
                    raise ValueError(f"{error} ({place_of(source, index)})") from None


def checked_scores(columns: Sequence[ColumnConfig], samples: Sequence[Sample], scores: Sequence[Score]) -> list[Score]:
    """Return the scores, with samples marked as failed that lack a valid number for a `per_sample` column."""
    checked = []
    for sample, score in zip(samples, scores, strict=True):
        if score.valid:
            try:
                for column in columns:
                    sample_number(column, sample)
            except ValueError as error:
                text = f"prompt {sample.prompt.uid!r}: {error}"
                score = replace(score, reward=0.0, components={}, valid=False, error=text, failure="environment")
        checked.append(score)
    return checked


def sample_number(column: ColumnConfig, sample: Sample) -> float:
    """Return a sample's number for a `per_sample` column: the environment's, else the prompt's, else the default.
    Raises ValueError if there is no number. For a `per_token` column, the result is the default, or 0."""
    if column.kind == "per_token":
        return column.default or 0.0
    for place in (sample.columns, sample.prompt.fields):
        if column.name in place:
            return _number(column, place[column.name])
    if column.default is None:
        raise ValueError(
            f"data.columns: column {column.name!r} has no default, and neither the prompt nor the environment gave a "
            "number"
        )
    return column.default


def own_columns(
    columns: Sequence[ColumnConfig],
    samples: Sequence[Sample],
    scores: Sequence[Score],
    lengths: np.ndarray,
    max_rows: int,
) -> dict[str, Column]:
    """Return the user's columns by name, with `max_rows` rows for each sample. Rows of failed samples have 0.

    scores: result of `checked_scores`. lengths: number of tokens of each row, int64 `[N]`.
    """
    starts = exclusive_cumsum(lengths)
    made: dict[str, Column] = {}
    for column in columns:
        numbers = [sample_number(column, s) if score.valid else 0 for s, score in zip(samples, scores, strict=True)]
        values = np.repeat(np.array(numbers).astype(column.dtype), max_rows)
        if column.kind == "per_sample":
            made[column.name] = torch.from_numpy(values)
            continue
        tokens = np.repeat(values, lengths)
        for index, sample in enumerate(samples):
            for part in sample.token_values:
                if part.name == column.name and part.row < len(sample.rows):
                    start = starts[index * max_rows + part.row] + part.start
                    tokens[start : start + len(part.values)] = part.values
        made[column.name] = Jagged(torch.from_numpy(tokens), lengths)
    return made


def _number(column: ColumnConfig, value: Any) -> float:
    numbers = column.numbers(value)
    if numbers.ndim:
        raise ValueError(f"data.columns: column {column.name!r} got {value!r}, expected one number")
    return numbers.item()


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """N rows that are ready to be written to the data plane, with their keys, versions, tags and columns."""

    keys: list[str]
    """Keys of the rows, each `{prompt_uid}.{sample}`."""
    versions: np.ndarray
    """Policy version of each row's oldest token, int64 `[N]`."""
    tags: Mapping[str, np.ndarray]
    """Tags of the rows (metadata in addition to the fields): tag name -> array `[N]`. POSITION, the prompt's position
    in the prompt stream, is int64; all others are float32."""
    batch: Batch
    """Columns of the rows, one for each of `written_fields`, and those of masks and pictures."""
    pictures: Mapping[str, Blob] = field(default_factory=dict)
    """Pictures to which the rows refer, by their digests, and possibly more."""

    def split(self, counts: Sequence[int]) -> list[RolloutRows]:
        """Split the rows into consecutive parts, which are views. counts: number of rows of each part; they must add up
        to N."""
        ends = np.cumsum(counts).tolist()
        assert ends[-1:] == [len(self.keys)], (counts, len(self.keys))
        return [self._part(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def _part(self, start: int, stop: int) -> RolloutRows:
        tags = {name: values[start:stop] for name, values in self.tags.items()}
        batch = slice_rows(self.batch, start, stop)
        return RolloutRows(self.keys[start:stop], self.versions[start:stop], tags, batch, self.pictures)


def join(parts: Sequence[RolloutRows]) -> RolloutRows:
    """Concatenate the rows of `parts` by copying them. There must be at least one part, and all must have the same
    tags."""
    return RolloutRows(
        [key for part in parts for key in part.keys],
        np.concatenate([part.versions for part in parts]),
        {name: np.concatenate([part.tags[name] for part in parts]) for name in parts[0].tags},
        concat([part.batch for part in parts]),
        {name: picture for part in parts for name, picture in part.pictures.items()},
    )


@dataclass(frozen=True, slots=True)
class TeacherSources:
    """Data sources of prompts that have teachers of their own."""

    names: tuple[str, ...]
    """The sources; rows have a source's index here as their tag TEACHER_SOURCE."""
    covers_all: bool
    """True if there is also a teacher for prompts of all sources."""

    def number(self, prompt: Prompt) -> int:
        """Return the index of the prompt's source, or -1 if it has no teacher of its own. Raises ValueError, naming
        the source, if it then has no teacher at all."""
        source = prompt.fields.get(SOURCE)
        if source in self.names:
            return self.names.index(source)
        if not self.covers_all:
            raise ValueError(
                f"distillation.teachers: got prompt {prompt.uid!r} with {SOURCE}={source!r}, expected one of "
                f"{', '.join(self.names)}, which have teachers (or a teacher without data_source)"
            )
        return -1


def rollout_rows(
    samples: Sequence[Sample],
    scores: Sequence[Score],
    tagged: Sequence[str] = (),
    *,
    mask_truncated: bool = False,
    keeps_old_kv: bool = False,
    routes: Sequence[np.ndarray] = (),
    spec: RouteSpec | None = None,
    max_rows: int = 1,
    columns: Sequence[ColumnConfig] = (),
    teachers: TeacherSources | None = None,
) -> tuple[Batch, dict[str, np.ndarray]]:
    """Convert samples and their scores to N rows with the fields of `written_fields`, and to tags. Tags are the
    metadata of the rows (tag name -> float32 `[N]`). Failed rows are masked, which means that none of their tokens is
    trained on.

    max_rows: number of rows of each sample, so that N is `max_rows` times the number of samples. A sample that has
    fewer gets masked rows of one token each, whose tag `valid` is 0. Above 1, the tag EPISODE has the sample's index in
    its group, which all rows of the sample share; they also share its reward.

    tagged: names of the rewards whose unweighted values also become tags, named by `reward_tag`, with 0 for failed
    rows. mask_truncated: whether to mask the rows of samples that were cut off (finish reason `length`), too. They
    keep their rewards, so that the baselines of their groups contain them. The tag TRAINED_TOKENS then has the number
    of tokens of each row that are trained on. keeps_old_kv: whether tokens may have been generated from keys and values
    of older weights; the tag KV_STALENESS then says how old they were at most. routes: with router replay, the routes
    of each row, `[L, layers, k]`. spec: shape of the routes; None without router replay. columns: the user's columns.
    teachers: data sources that have teachers of their own, for the tag TEACHER_SOURCE; None if no source has.
    """
    rows = [row for sample in samples for row in rows_of(sample, max_rows)]
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    valid, used = _masks(samples, scores, max_rows, mask_truncated)
    trained = np.repeat(used, lengths)
    response_mask = np.concatenate([row.response_mask for row in rows])
    values = {
        "input_ids": np.concatenate([row.input_ids for row in rows]),
        "response_mask": response_mask * trained,
        "rollout_logprobs": np.concatenate([row.logprobs for row in rows]) * trained,
    }
    if spec is not None:
        values[ROUTES] = np.concatenate(routes)
    versions = np.concatenate([row.versions for row in rows])
    fields = {
        **{name: Jagged(torch.from_numpy(column), lengths) for name, column in values.items()},
        "version_spans": version_spans(versions, lengths),
        **own_columns(columns, samples, scores, lengths, max_rows),
    }
    batch = Batch(row_schema(spec, columns).subset(written_fields(spec, columns)), len(rows), fields)
    tags = {
        "reward": _per_row([score.reward if score.valid else 0.0 for score in scores], max_rows),
        "valid": valid.astype(np.float32),
        "response_length": _row_sums(response_mask != 0, lengths).astype(np.float32),
    }
    if max_rows > 1:
        tags[EPISODE] = _per_row([sample.index for sample in samples], max_rows)
    if mask_truncated:
        tags[TRAINED_TOKENS] = tags["response_length"] * used
    if keeps_old_kv:
        tags[KV_STALENESS] = kv_staleness(versions, lengths).astype(np.float32)
    return batch, {**tags, **_source_tag(samples, teachers, max_rows), **_reward_tags(scores, tagged, max_rows)}


def _source_tag(samples: Sequence[Sample], teachers: TeacherSources | None, max_rows: int) -> dict[str, np.ndarray]:
    if teachers is None:
        return {}
    return {TEACHER_SOURCE: _per_row([teachers.number(sample.prompt) for sample in samples], max_rows)}


def _reward_tags(scores: Sequence[Score], names: Sequence[str], max_rows: int) -> dict[str, np.ndarray]:
    return {
        reward_tag(name): _per_row([one.components.get(name, 0.0) if one.valid else 0.0 for one in scores], max_rows)
        for name in names
    }


def _masks(
    samples: Sequence[Sample], scores: Sequence[Score], max_rows: int, mask_truncated: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows are valid, and which of these are trained on, each bool `[N]`."""
    filled = np.concatenate([np.arange(max_rows) < len(sample.rows) for sample in samples])
    valid = np.repeat([score.valid for score in scores], max_rows) & filled
    if not mask_truncated:
        return valid, valid
    return valid, valid & np.repeat([sample.finish_reason != "length" for sample in samples], max_rows)


def _per_row(values: Sequence[float], max_rows: int) -> np.ndarray:
    """Return one number per sample as a tag of its `max_rows` rows, float32 `[N]`."""
    return np.repeat(np.array(values, dtype=np.float32), max_rows)


def sample_keys(sample: Sample, max_rows: int) -> list[str]:
    """Return the keys of a sample's rows: first `{prompt_uid}.{sample}`, then `{prompt_uid}.{sample}+{row}`. The part
    before the dot names the group in the data plane."""
    key = row_key(sample.prompt.uid, sample.index)
    return [key, *(f"{key}+{number}" for number in range(1, max_rows))]


def rows_of(sample: Sample, max_rows: int) -> list[RowTokens]:
    """Return the sample's rows, filled up to `max_rows` with rows of one masked token."""
    rows = list(sample.rows)
    assert len(rows) <= max_rows, (len(rows), max_rows)
    if len(rows) == max_rows:
        return rows
    first = rows[0]
    token = np.zeros_like(first.input_ids[:1]) if first.pictures else first.input_ids[:1]  # No picture's placeholder.
    empty = RowTokens(
        token, np.zeros_like(first.response_mask[:1]), np.zeros_like(first.logprobs[:1]),
        np.full_like(first.versions[:1], -1),
    )  # fmt: skip
    return rows + [empty] * (max_rows - len(rows))


def _row_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths)
    until = np.concatenate([[0], np.cumsum(values)])
    return until[ends] - until[ends - lengths]


def version_spans(versions: np.ndarray, lengths: np.ndarray) -> Ragged:
    """Compress one policy version per token to spans of tokens with equal versions. Each row gets int32 `[S, 2]`, where
    S is its number of spans: the index of each span's first token in the row, and the version.

    versions: versions of the tokens of all rows in order, int32 `[sum(lengths)]`. Rows without tokens have no spans.
    """
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    begins = np.ones(len(versions), dtype=bool)
    begins[1:] = (versions[1:] != versions[:-1]) | (row[1:] != row[:-1])
    first = np.flatnonzero(begins)
    spans = np.stack([first - starts[row[first]], versions[first]], axis=1).astype(np.int32)
    counts = np.bincount(row[first], minlength=len(lengths))
    shapes = np.stack([counts, np.full(len(lengths), 2)], axis=1).astype(np.int64)
    return Ragged(torch.from_numpy(spans.reshape(-1)), shapes)


def kv_staleness(versions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the staleness of each row's keys and values, int64 `[N]`. A token is generated by one version of the
    weights, but its keys and values may come from older versions. The staleness is the largest such difference in
    versions.

    A request computes all its keys and values itself, from its first token on, so the largest difference within a
    request is that between its first token and its last. Requests of one row, such as the turns of an episode, are
    separated by tokens that the policy did not choose.

    versions: versions of the tokens of all rows in order, -1 where the policy did not choose the token, int32
    `[sum(lengths)]`.
    """
    row = np.repeat(np.arange(len(lengths)), lengths)
    chosen = np.flatnonzero(versions >= 0)
    begins = np.ones(len(chosen), dtype=bool)
    begins[1:] = (np.diff(chosen) > 1) | (row[chosen[1:]] != row[chosen[:-1]])
    first = versions[chosen[begins]][np.cumsum(begins) - 1]
    staleness = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(staleness, row[chosen], versions[chosen] - first)
    return staleness


@dataclass(frozen=True, slots=True)
class RouteCounts(Counts):
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
    """Number of these tokens that were sampled by a newer policy version than the first token that the policy chose in
    their row. The tokens before them were then computed again, with routes of the newer version that no row carries."""
    seconds: float = 0.0
    """Time in seconds that joining and checking the routes took."""
    num_tokens: int = 0
    """Number of tokens of the rows."""
    num_bytes: int = 0
    """Number of bytes of the routes of these tokens, counting the prompt's routes once for each row."""


@dataclass(frozen=True, slots=True)
class CheckedRoutes:
    """Routes of N samples, ready for the column, with the samples' scores after the checks."""

    columns: list[np.ndarray]
    """Routes of each sample's row, `[L, layers, k]`; all missing for a failed row."""
    scores: list[Score]
    """Scores of the samples. Samples with damaged routes have failed, as have samples with too many missing routes
    under `missing=mask`."""
    counts: list[RouteCounts]
    """Counts of each sample's routes. The first sample has the `seconds` of all samples, the others have 0."""


@dataclass(frozen=True, slots=True)
class RouteRules:
    """Shape of a run's expert routes, and the treatment of missing routes."""

    spec: RouteSpec
    config: RouterReplayConfig
    """Section `router_replay` of the configuration; only `missing` and `max_missing_share` are read here."""


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
            score = Score(reward=0.0, components={}, valid=False, error=error, failure="engine")
            routes = spec.missing(len(sample.input_ids))
        columns.append(routes)
        checked.append(score)
        counts.append(count)
    if counts:
        counts[0] = replace(counts[0], seconds=time.perf_counter() - started)
    return CheckedRoutes(columns, checked, counts)


def _routes_of(sample: Sample, spec: RouteSpec, key: str) -> np.ndarray:
    """Return the routes of one row, `[L, layers, k]`. Raises RoutesDamaged, naming the row's `key`."""
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


@dataclass(frozen=True, slots=True)
class MaskCounts(Counts):
    """Counts of the sampling masks of a set of rows. Rows whose episode or reward failed are not counted."""

    tokens: int = 0
    """Number of tokens that the policy chose."""
    ids: int = 0
    """Number of ids in the sets from which these tokens were drawn."""
    cut: int = 0
    """Number of these tokens whose sets have as many ids as `rollout.mask_limit` allows, where sampling was cut."""
    num_bytes: int = 0
    """Number of bytes of the masks."""
    single: int = 0
    """Number of these tokens whose sets have no other token. Their log-prob is 0 under each policy."""


@dataclass(frozen=True, slots=True)
class MaskRules:
    """Conditions that the sampling masks of a run's rows must meet."""

    limit: int
    """Largest number of ids of a set (`rollout.mask_limit`)."""
    required: bool
    """True if each token that the policy chose must have a set; False if requests can ask for all tokens."""
    top_k: int = 0
    """Largest number of tokens that sampling leaves even without the limit (`rollout.top_k`); 0 for no such number."""


@dataclass(frozen=True, slots=True)
class CheckedMasks:
    """Sampling masks of N samples, ready for the column, with the samples' scores after the checks."""

    column: Ragged
    """Streams of the rows' masks (see `codecs.tokens.masks`); those of rows that are not trained on have no sets."""
    scores: list[Score]
    """Scores of the samples. Samples have failed of which a token lacks its set."""
    counts: list[MaskCounts]
    """Counts of each sample's masks."""

    def added_to(self, batch: Batch) -> Batch:
        """Return the batch of these rows with their masks as a further column."""
        schema = Schema([*batch.schema.values(), MASK_FIELD])
        return Batch(schema, batch.num_rows, {**dict(batch.items()), MASKS: self.column})


def checked_masks(
    samples: Sequence[Sample], scores: Sequence[Score], rules: MaskRules, max_rows: int = 1
) -> CheckedMasks:
    """Check that each token that the policy chose has the set of tokens from which it was drawn, and count the sets.
    max_rows: number of rows of each sample, see `rollout_rows`."""
    streams, checked, counts = [], [], []
    for sample, score in zip(samples, scores, strict=True):
        own, count = rows_of(sample, max_rows), MaskCounts()
        if score.valid:
            key = row_key(sample.prompt.uid, sample.index)
            try:
                count = sum((_mask_count(row, rules, key) for row in own), count)
            except MasksDamaged as damage:
                score = Score(reward=0.0, components={}, valid=False, error=str(damage), failure="engine")
        for row in own:
            stream, length = row.masks if score.valid else None, len(row.input_ids)
            streams.append(sealed(without_sets(length) if stream is None else stream, length))
        checked.append(score)
        counts.append(replace(count, num_bytes=sum(map(len, streams[-len(own) :]))) if score.valid else count)
    shapes = np.array([[len(one)] for one in streams], np.int64)
    return CheckedMasks(Ragged(torch.from_numpy(np.concatenate(streams)), shapes), checked, counts)


def _mask_count(row: RowTokens, rules: MaskRules, key: str) -> MaskCounts:
    """Return the counts of a row's masks, without their bytes. Raises MasksDamaged, naming the row's `key`."""
    stream = without_sets(len(row.input_ids)) if row.masks is None else row.masks
    sets = decode_sets(stream, len(row.input_ids), key)
    chosen = np.flatnonzero(row.response_mask)
    sizes = sets.counts[chosen] + 1
    limit, least = rules.limit, int(rules.required)
    if len(lacking := chosen[(sizes < least) | (sizes > limit)]):
        raise MasksDamaged(
            f"{key}: token {lacking[0]} has a sampling mask of {sizes[chosen == lacking[0]][0]} ids, expected {least} "
            f"to rollout.mask_limit={limit}; an environment that makes completions itself must not lose their masks"
        )
    owners = np.repeat(np.arange(len(row.input_ids)), np.maximum(sets.counts, 0))
    if len(twice := owners[sets.ids == row.input_ids[owners]]):
        raise MasksDamaged(f"{key}: the sampling mask of token {twice[0]} is that of another token")
    cut = np.count_nonzero(sizes == limit) if limit != rules.top_k else 0
    return MaskCounts(len(chosen), int(sizes.sum()), int(cut), single=int(np.count_nonzero(sizes == 1)))
