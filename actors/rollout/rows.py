"""Turns samples and their scores into rows of the data plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...codecs.batch import Batch, Jagged, Ragged
from ...codecs.jagged import concat, slice_rows
from ...codecs.routes import ROUTES, RouteSpec
from ..protocols import Sample, Score, row_schema, written_fields
from ..rewards.rubric import reward_tag

TRAINED_TOKENS = "trained_tokens"
"""Name of the tag with the number of tokens of a row that are trained on. Rows have it only if truncated rows are
masked; otherwise all response tokens of valid rows are trained on."""

KV_STALENESS = "kv_staleness"
"""Name of the tag with a row's staleness of keys and values (see `kv_staleness`). Rows have it only if engines keep
keys and values over weight updates."""


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """N rows that are ready to be written to the data plane, with their keys, versions, tags and columns."""

    keys: list[str]
    """Keys of the rows, each `{prompt_uid}.{sample}`."""
    versions: np.ndarray
    """Policy version of each row's oldest token, int64 `[N]`."""
    tags: Mapping[str, np.ndarray]
    """Tags of the rows (metadata beside the fields): tag name -> array `[N]`. POSITION, the prompt's position in the
    prompt stream, is int64; all others are float32."""
    batch: Batch
    """Columns of the rows, one for each of `written_fields`."""

    def split(self, counts: Sequence[int]) -> list[RolloutRows]:
        """Split the rows into consecutive parts, which are views. counts: number of rows of each part; they must add up
        to N."""
        ends = np.cumsum(counts).tolist()
        assert ends[-1:] == [len(self.keys)], (counts, len(self.keys))
        return [self._part(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def _part(self, start: int, stop: int) -> RolloutRows:
        tags = {name: values[start:stop] for name, values in self.tags.items()}
        return RolloutRows(self.keys[start:stop], self.versions[start:stop], tags, slice_rows(self.batch, start, stop))


def join(parts: Sequence[RolloutRows]) -> RolloutRows:
    """Concatenate the rows of `parts` by copying them. There must be at least one part, and all must have the same
    tags."""
    return RolloutRows(
        [key for part in parts for key in part.keys],
        np.concatenate([part.versions for part in parts]),
        {name: np.concatenate([part.tags[name] for part in parts]) for name in parts[0].tags},
        concat([part.batch for part in parts]),
    )


def rollout_rows(
    samples: Sequence[Sample],
    scores: Sequence[Score],
    tagged: Sequence[str] = (),
    *,
    mask_truncated: bool = False,
    keeps_old_kv: bool = False,
    routes: Sequence[np.ndarray] = (),
    spec: RouteSpec | None = None,
) -> tuple[Batch, dict[str, np.ndarray]]:
    """Convert N samples and their scores to rows with the fields of `written_fields`, and to tags, the metadata of the
    rows (tag name -> float32 `[N]`). Failed rows are masked, which means that none of their tokens is trained on.

    tagged: names of the rewards whose unweighted values also become tags, named by `reward_tag`, with 0 for failed
    rows. mask_truncated: whether to mask the rows of samples that were cut off (finish reason `length`), too. They
    keep their rewards, so that the baselines of their groups contain them. The tag TRAINED_TOKENS then has the number
    of tokens of each row that are trained on. keeps_old_kv: whether tokens may have been generated from keys and values
    of older weights; the tag KV_STALENESS then says how old they were at most. routes: with router replay, the routes
    of each row, `[L, layers, k]`. spec: shape of the routes; None without router replay.
    """
    valid = np.array([score.valid for score in scores], dtype=bool)
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    used = valid
    if mask_truncated:
        used = valid & np.array([sample.finish_reason != "length" for sample in samples], dtype=bool)
    trained = np.repeat(used, lengths)
    columns = {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]),
        "response_mask": np.concatenate([sample.response_mask for sample in samples]) * trained,
        "rollout_logprobs": np.concatenate([sample.logprobs for sample in samples]) * trained,
        **({} if spec is None else {ROUTES: np.concatenate(routes)}),
    }
    versions = np.concatenate([sample.versions for sample in samples])
    batch = Batch(
        row_schema(spec).subset(written_fields(spec)),
        len(samples),
        {
            **{name: Jagged(torch.from_numpy(column), lengths) for name, column in columns.items()},
            "version_spans": version_spans(versions, lengths),
        },
    )
    tags = {
        "reward": np.array([score.reward if score.valid else 0.0 for score in scores], dtype=np.float32),
        "valid": valid.astype(np.float32),
        "response_length": np.array([np.count_nonzero(s.response_mask) for s in samples], dtype=np.float32),
    }
    if mask_truncated:
        tags[TRAINED_TOKENS] = tags["response_length"] * used
    if keeps_old_kv:
        tags[KV_STALENESS] = kv_staleness(versions, lengths).astype(np.float32)
    for name in tagged:
        values = [score.components[name] if score.valid else 0.0 for score in scores]
        tags[reward_tag(name)] = np.array(values, dtype=np.float32)
    return batch, tags


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
    """Return, for each row, by how many versions the oldest keys and values that one of its tokens may have been
    generated from were older than the weights that generated it, int64 `[N]`.

    A request computes all its keys and values itself, from its first token on, so the largest distance within a request
    is that from its first token to its last. Requests of one row, such as the turns of an episode, are told apart by
    the tokens between them that the policy did not choose.

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
