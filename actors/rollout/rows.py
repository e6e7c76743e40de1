"""Rollouts as rows: what samples and scores become in the data plane, group by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...codecs.batch import Batch, Jagged, Ragged
from ...codecs.jagged import concat, slice_rows
from ..protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, Sample, Score
from ..rewards.rubric import reward_tag


@dataclass(frozen=True, slots=True)
class RolloutRows:
    """N rows, all that one put takes."""

    keys: list[str]
    """`{prompt_uid}.{sample}`."""
    versions: np.ndarray
    """int64 `[N]`: of each row's oldest token."""
    tags: Mapping[str, np.ndarray]
    """Tags of the rows, `[N]` each: POSITION is int64, all others are float32."""
    batch: Batch
    """ROLLOUT_FIELDS."""

    def split(self, counts: Sequence[int]) -> list[RolloutRows]:
        """Parts of so many rows each, one after another, as views. `counts` adds up to N."""
        ends = np.cumsum(counts).tolist()
        assert ends[-1:] == [len(self.keys)], (counts, len(self.keys))
        return [self._part(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def _part(self, start: int, stop: int) -> RolloutRows:
        tags = {name: values[start:stop] for name, values in self.tags.items()}
        return RolloutRows(self.keys[start:stop], self.versions[start:stop], tags, slice_rows(self.batch, start, stop))


def join(parts: Sequence[RolloutRows]) -> RolloutRows:
    """The rows of `parts` (one or more, with the same tags), copied, one after another."""
    return RolloutRows(
        [key for part in parts for key in part.keys],
        np.concatenate([part.versions for part in parts]),
        {name: np.concatenate([part.tags[name] for part in parts]) for name in parts[0].tags},
        concat([part.batch for part in parts]),
    )


def rollout_rows(
    samples: Sequence[Sample], scores: Sequence[Score], tagged: Sequence[str] = ()
) -> tuple[Batch, dict[str, np.ndarray]]:
    """The samples as rows of ROLLOUT_FIELDS, and their tags (float32 `[N]` each); failed rows are masked.

    tagged: rewards whose own values are tags, too (`reward_tag`), 0 for failed rows.
    """
    valid = np.array([score.valid for score in scores], dtype=bool)
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    trained = np.repeat(valid, lengths)
    columns = {
        "input_ids": np.concatenate([sample.input_ids for sample in samples]),
        "response_mask": np.concatenate([sample.response_mask for sample in samples]) * trained,
        "rollout_logprobs": np.concatenate([sample.logprobs for sample in samples]) * trained,
    }
    batch = Batch(
        ROLLOUT_SCHEMA.subset(ROLLOUT_FIELDS),
        len(samples),
        {
            **{name: Jagged(torch.from_numpy(column), lengths) for name, column in columns.items()},
            "version_spans": version_spans(np.concatenate([sample.versions for sample in samples]), lengths),
        },
    )
    tags = {
        "reward": np.array([score.reward if score.valid else 0.0 for score in scores], dtype=np.float32),
        "valid": valid.astype(np.float32),
        "response_length": np.array([np.count_nonzero(s.response_mask) for s in samples], dtype=np.float32),
    }
    for name in tagged:
        values = [score.components[name] if score.valid else 0.0 for score in scores]
        tags[reward_tag(name)] = np.array(values, dtype=np.float32)
    return batch, tags


def version_spans(versions: np.ndarray, lengths: np.ndarray) -> Ragged:
    """int32 `[S, 2]` a row: (first token, version of it and those after it), from one version a token.

    versions: int32 `[sum(lengths)]`, the rows one after another. Rows without tokens have no spans.
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
