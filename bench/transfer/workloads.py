"""Builds the deterministic workloads of the benchmark by name. Their rows have the form of a user's TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from ...codecs.batch import Batch, Jagged, Ragged
from ...codecs.jagged import pack, select_rows
from ...codecs.schema import Field, Kind, Schema
from ...codecs.tokens.routes import ROUTES, RouteSpec

SEED = 20240
WRITE_BACK = "written_back"
"""Name of the column that consumers write back. It has one float32 per token, or per row if rows have no tokens."""
MOE = "moe"
"""Name of the workload with routes, in groups that share their prompts. The summary has additional figures for it."""
MOE_ROUTES = RouteSpec(tuple(range(48)), 8, 128, 48)
"""Shape of the routes of Qwen3-30B-A3B: 384 bytes per token."""
MOE_GROUP = 8
"""Number of rows of a prompt in the workload `moe`."""
STEP_ENDS = "step-ends"
"""Name of the workload whose columns are converted from padded tensors and back."""
STEP_FIRST = ("input_ids", "mask", "generation_logprobs")
"""Names of the fields of the first put of a GRPO step. The other fields are written back."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The name and size of a workload. Every process builds the same rows from them."""

    name: str
    share: float = 1.0
    """Share of the workload's rows, above 0 and at most 1. `--quick` and tests use a share below 1."""


@dataclass(frozen=True, slots=True)
class Load:
    """The rows of a workload in memory."""

    spec: LoadSpec
    batch: Batch
    """Rows with all fields, including those written back."""
    first: tuple[str, ...]
    """Names of the fields of the first put."""
    group_size: int
    """Number of rows of one prompt."""

    @property
    def schema(self) -> Schema:
        return self.batch.schema

    @property
    def num_rows(self) -> int:
        return self.batch.num_rows

    def formula_bytes(self) -> int:
        """Return the bytes of the first put's values if each group's prompt is written once; 0 without routes. This
        saves the repeated token ids and routes of prompts."""
        lengths = self.batch.lengths
        if self.spec.name != MOE or lengths is None:
            return 0
        shared = (MOE_GROUP - 1) * int(moe_prompts(self.num_rows // MOE_GROUP).sum())
        return self.nbytes() - shared * sum(self.schema[name].item_bytes for name in ("input_ids", ROUTES))

    def keys(self, run: str) -> list[str]:
        """Return the keys of all rows. The keys contain `run`, so that no other run has the same."""
        return [f"{run}p{row // self.group_size}.{row % self.group_size}" for row in range(self.num_rows)]

    def nbytes(self, fields: Iterable[str] | None = None) -> int:
        """Return the bytes of the fields' values, counting objects with `object_bytes`. `fields` None means the first
        put's fields."""
        return sum(column_bytes(self.batch[name]) for name in (self.first if fields is None else fields))

    def tensordict(self, fields: Iterable[str] | None = None, rows: np.ndarray | None = None) -> TensorDict:
        """Return rows in the form that users of TensorDict-based stores have; `rows` None means all rows.

        PER_TOKEN and two-dimensional RAGGED columns become nested tensors of layout torch.jagged, OBJECT columns a
        NonTensorStack. Tensors share the batch's memory.
        """
        batch = self.batch.subset(self.first if fields is None else fields)
        batch = batch if rows is None else select_rows(batch, rows)
        return TensorDict({name: _as_users_hold(column) for name, column in batch.items()}, [batch.num_rows])


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a workload, and the function that builds its rows."""

    text: str
    build: Callable[[np.random.Generator, float], tuple[Mapping[str, Any], list[Field], int]]


def build_load(spec: LoadSpec) -> Load:
    """Build the workload in memory. Raises ValueError for an unknown name or a share outside (0, 1]."""
    if spec.name not in WORKLOADS:
        raise ValueError(f"workload: got {spec.name!r}, expected one of {', '.join(WORKLOADS)}")
    if not 0 < spec.share <= 1:
        raise ValueError(f"share: got {spec.share}, expected a number above 0 and at most 1")
    values, fields, group_size = WORKLOADS[spec.name].build(np.random.default_rng(SEED), spec.share)
    batch = pack(Schema(fields), values)
    if spec.name == "step":
        return Load(spec, batch, STEP_FIRST, group_size)
    first = tuple(batch)
    lengths = batch.lengths
    extra: Any
    if lengths is None:
        field = Field(WRITE_BACK, Kind.PER_SAMPLE, torch.float32)
        extra = torch.arange(batch.num_rows, dtype=torch.float32)
    else:
        field = Field(WRITE_BACK, Kind.PER_TOKEN, torch.float32)
        extra = Jagged(torch.arange(int(lengths.sum()), dtype=torch.float32), lengths)
    return Load(spec, batch.merge(pack(Schema([field]), {WRITE_BACK: extra})), first, group_size)


def column_bytes(column: Any) -> int:
    """Return the number of bytes of one column's values, counting objects with `object_bytes`."""
    if isinstance(column, Jagged | Ragged):
        return column.values.nbytes
    return column.nbytes if isinstance(column, torch.Tensor) else sum(map(object_bytes, column))


def object_bytes(value: Any) -> int:
    """Return the number of bytes of an object's strings and bytes, plus 8 for each number."""
    if isinstance(value, Mapping):
        return sum(object_bytes(key) + object_bytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(object_bytes, value))
    if isinstance(value, str):
        return len(value.encode())
    return len(value) if isinstance(value, bytes) else 8


def _as_users_hold(column: Any) -> Any:
    if isinstance(column, Jagged):
        return _nested(column.values, column.lengths)
    if isinstance(column, Ragged):
        width = int(column.shapes[0, 1])
        assert column.shapes.shape[1] == 2 and (column.shapes[:, 1] == width).all(), "rows of one width"
        return _nested(column.values.view(-1, width), column.shapes[:, 0])
    return column if isinstance(column, torch.Tensor) else NonTensorStack(*column)


def _nested(values: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
    return torch.nested.nested_tensor_from_jagged(values, offsets)


# ---------------- These functions make the rows of the workloads.


def _rows(count: int, share: float, multiple: int) -> int:
    """Return `share` of `count` rows, rounded to whole groups of `multiple` rows, but at least one group."""
    return max(multiple, round(count * share / multiple) * multiple)


def _log_normal(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Draw response lengths that are typical of RL, int64 `[rows]`. Their mean is near 1000, and they are at most
    8192."""
    return np.clip(rng.lognormal(6.5, 0.9, rows), 1, 8192).astype(np.int64)


def _text_values(rng: np.random.Generator, lengths: np.ndarray) -> dict[str, Any]:
    tokens = int(lengths.sum())
    return {
        "input_ids": Jagged(torch.from_numpy(rng.integers(0, 151_936, tokens, dtype=np.int32)), lengths),
        "logprobs": Jagged(torch.from_numpy(-rng.random(tokens, dtype=np.float32)), lengths),
        "mask": Jagged(torch.from_numpy(rng.integers(0, 2, tokens, dtype=np.uint8)), lengths),
        "reward": torch.from_numpy(rng.random(len(lengths), dtype=np.float32)),
    }


_TEXT = [
    Field("input_ids", Kind.PER_TOKEN, torch.int32),
    Field("logprobs", Kind.PER_TOKEN, torch.float32),
    Field("mask", Kind.PER_TOKEN, torch.uint8),
    Field("reward", Kind.PER_SAMPLE, torch.float32),
]


def _rl(count: int) -> Callable[[np.random.Generator, float], Any]:
    return lambda rng, share: (_text_values(rng, _log_normal(rng, _rows(count, share, 8))), _TEXT, 8)


def _long(rng: np.random.Generator, share: float) -> Any:
    return _text_values(rng, np.full(_rows(64, share, 4), 32_768)), _TEXT, 4


def _moe(rng: np.random.Generator, share: float) -> Any:
    lengths = _log_normal(rng, _rows(256, share, 8))
    routes = rng.integers(0, 128, (int(lengths.sum()), 48, 8), dtype=np.uint8)
    values = _text_values(rng, lengths) | {"routed_experts": Jagged(torch.from_numpy(routes), lengths)}
    return values, [*_TEXT, Field("routed_experts", Kind.PER_TOKEN, torch.uint8, (48, 8))], 8


def moe_prompts(groups: int) -> np.ndarray:
    """Return the number of prompt tokens of each group of the workload `moe`, int64 `[groups]`, from 256 to 992."""
    return 256 + 32 * (np.arange(groups) % 24)


def _moe_groups(rng: np.random.Generator, share: float) -> Any:
    """Build rows in groups, as rollouts put them. The rows of a group have the same prompt tokens with the same
    routes."""
    lengths = rng.integers(1024, 4097, _rows(256, share, MOE_GROUP))
    routes = rng.integers(0, MOE_ROUTES.num_experts, (int(lengths.sum()), *MOE_ROUTES.trailing), dtype=np.uint8)
    values = _text_values(rng, lengths) | {ROUTES: Jagged(torch.from_numpy(routes), lengths)}
    ids, starts = values["input_ids"].values, np.cumsum(lengths) - lengths
    for group, prompt in enumerate(moe_prompts(len(lengths) // MOE_GROUP).tolist()):
        first, *others = starts[group * MOE_GROUP : (group + 1) * MOE_GROUP].tolist()
        for start in others:
            ids[start : start + prompt] = ids[first : first + prompt]
            routes[start : start + prompt] = routes[first : first + prompt]
    return values, [replace(_TEXT[0], shared=True), *_TEXT[1:], MOE_ROUTES.field], MOE_GROUP


def _wide(rng: np.random.Generator, share: float) -> Any:
    lengths = _even_lengths(rng, share)
    fields = [Field(f"column{number}", Kind.PER_TOKEN, torch.float32) for number in range(32)]
    tokens = int(lengths.sum())
    return {f.name: Jagged(torch.from_numpy(rng.random(tokens, dtype=np.float32)), lengths) for f in fields}, fields, 8


def _narrow(rng: np.random.Generator, share: float) -> Any:
    lengths = _even_lengths(rng, share)
    values = torch.from_numpy(rng.random((int(lengths.sum()), 32), dtype=np.float32))
    return {"columns": Jagged(values, lengths)}, [Field("columns", Kind.PER_TOKEN, torch.float32, (32,))], 8


def _even_lengths(rng: np.random.Generator, share: float) -> np.ndarray:
    """Draw lengths of 4k to 12k tokens, int64 `[rows]`. The whole workload of 256 rows has 2 Mi tokens, which makes 256
    MiB with 32 float32 per token."""
    rows = _rows(256, share, 8)
    lengths = rng.integers(4096, 12_289, rows)
    lengths[-1] += max(rows * 8192 - int(lengths.sum()), 1 - lengths[-1])
    return lengths


def _dense(rng: np.random.Generator, share: float) -> Any:
    values = torch.from_numpy(rng.random((_rows(64, share, 4), 1024, 1024), dtype=np.float32))
    return {"values": values}, [Field("values", Kind.PER_SAMPLE, torch.float32, (1024, 1024))], 4


def _tiny(rng: np.random.Generator, share: float) -> Any:
    rows = _rows(4096, share, 8)
    values = {
        "uid": torch.from_numpy(rng.integers(0, 1 << 60, rows)),
        "reward": torch.from_numpy(rng.random(rows, dtype=np.float32)),
        "length": torch.from_numpy(rng.integers(0, 8192, rows, dtype=np.int32)),
    }
    dtypes = {"uid": torch.int64, "reward": torch.float32, "length": torch.int32}
    return values, [Field(name, Kind.PER_SAMPLE, dtype) for name, dtype in dtypes.items()], 8


def _vision(rng: np.random.Generator, share: float) -> Any:
    rows = _rows(64, share, 4)
    lengths = rng.integers(128, 1024, rows)
    images = rng.integers(1, 4, rows)
    grids = [np.stack([np.ones(n, np.int32), *rng.integers(4, 12, (2, n), dtype=np.int32)], axis=1) for n in images]
    patches = np.array([int(grid.prod(axis=1).sum()) for grid in grids])
    values = _text_values(rng, lengths) | {
        "pixel_values": Ragged(
            torch.from_numpy(rng.random(int(patches.sum()) * 1176, dtype=np.float32)),
            np.stack([patches, np.full(rows, 1176)], axis=1),
        ),
        "image_grid": Ragged(
            torch.from_numpy(np.concatenate([grid.ravel() for grid in grids])),
            np.stack([images, np.full(rows, 3)], axis=1),
        ),
        "messages": [
            [{"role": "user", "content": f"image {row}: what is shown?"}, {"role": "assistant", "content": "ä" * row}]
            for row in range(rows)
        ],
    }
    ragged = [
        Field("pixel_values", Kind.RAGGED, torch.float32, ndim=2),
        Field("image_grid", Kind.RAGGED, torch.int32, ndim=2),
    ]
    return values, [*_TEXT, *ragged, Field("messages", Kind.OBJECT)], 4


def _step(rng: np.random.Generator, share: float) -> Any:
    """Build the columns of one GRPO step, 21 bytes per token. The reward has no column, because it is written as a tag
    (a number in each row's metadata)."""
    lengths = rng.integers(1024, 4097, _rows(256, share, 16))
    tokens = int(lengths.sum())
    floats = ("generation_logprobs", "previous_logprobs", "reference_logprobs", "advantages")
    values: dict[str, Any] = {
        "input_ids": Jagged(torch.from_numpy(rng.integers(0, 151_936, tokens, dtype=np.int32)), lengths),
        "mask": Jagged(torch.from_numpy(rng.integers(0, 2, tokens, dtype=np.uint8)), lengths),
        **{name: Jagged(torch.from_numpy(-rng.random(tokens, dtype=np.float32)), lengths) for name in floats},
    }
    fields = [*_TEXT[:1], _TEXT[2], *[Field(name, Kind.PER_TOKEN, torch.float32) for name in floats]]
    return values, fields, 16


def _step_ends(rng: np.random.Generator, share: float) -> Any:
    """Build the eight columns that a step has at its ends, 29 bytes per token. They are the columns of the workload
    `step`, and the policy version and the entropy of each token."""
    values, fields, group_size = _step(rng, share)
    lengths = values["input_ids"].lengths
    tokens = int(lengths.sum())
    values |= {
        "versions": Jagged(torch.from_numpy(rng.integers(0, 4, tokens, dtype=np.int32)), lengths),
        "entropies": Jagged(torch.from_numpy(rng.random(tokens, dtype=np.float32)), lengths),
    }
    more = [Field("versions", Kind.PER_TOKEN, torch.int32), Field("entropies", Kind.PER_TOKEN, torch.float32)]
    return values, [*fields, *more], group_size


WORKLOADS = {
    "rl-256": Description("256 rows, log-normal, mean 1k tokens: ids, log-probs, mask, reward", _rl(256)),
    "rl-1024": Description("1024 rows like those of rl-256", _rl(1024)),
    "long-64": Description("64 rows of 32k tokens", _long),
    "moe-256": Description("rl-256 with routed experts [T, 48, 8] uint8", _moe),
    MOE: Description("256 rows of 1k to 4k tokens in groups of 8 with routed experts [T, 48, 8] uint8", _moe_groups),
    "wide-32": Description("256 MiB over 32 float32 columns", _wide),
    "narrow-1": Description("256 MiB in one column of 32 float32 per token", _narrow),
    "dense": Description("64 rows of 4 MiB float32", _dense),
    "tiny": Description("4096 rows of 3 scalars", _tiny),
    "vision": Description("64 rows with ragged pixels and messages", _vision),
    "step": Description("a GRPO step's columns: 256 rows of 1k to 4k tokens, 21 bytes per token", _step),
    STEP_ENDS: Description("a GRPO step's ends: 256 rows of 1k to 4k tokens in 8 columns, padded", _step_ends),
}
