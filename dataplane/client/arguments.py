"""Checks the arguments of the operations of data-plane clients, and brings them into the form of requests."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...codecs.batch import Batch
from ...codecs.block_header import MAX_TOKENS
from ...codecs.gather import RowSource
from ...codecs.jagged import pack
from ...codecs.schema import Schema
from ..directory.samplers import TaskConfig
from ..errors import SchemaMismatch
from ..meta import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_MAX_VERSION = (1 << 63) - 1
"""Highest policy version, and highest position in the prompt stream."""

Fields: TypeAlias = "Batch | Mapping[str, Any] | TensorDictBase"
"""Type of the rows that `put` takes: anything that `codecs.jagged.pack` takes."""

Keys: TypeAlias = "Sequence[str] | np.ndarray"
"""Type of keys and names of groups: strings, including those of numpy, or an array `[N]` of strings."""


def task_configs(tasks: Sequence[str | TaskConfig]) -> tuple[TaskConfig, ...]:
    """Return the settings of tasks. A name alone stands for a task with default settings."""
    if isinstance(tasks, str):
        raise ValueError(f"tasks: got the string {tasks!r}, expected a sequence of names")
    return tuple(TaskConfig(task) if isinstance(task, str) else task for task in tasks)


def packed(partition: str, schema: Schema, fields: Fields, keys: Sequence[str]) -> Batch:
    """Return the fields of a put as a batch. Raises SchemaMismatch when they do not fit the schema, when there are no
    fields, and when a row has too many tokens."""
    try:
        batch = pack(schema, fields, len(keys))
    except ValueError as error:
        raise SchemaMismatch(str(error), op="put", partition=partition, keys=keys) from None
    if not len(batch):
        raise SchemaMismatch("put: got no fields", op="put", partition=partition, keys=keys)
    lengths = batch.lengths
    if lengths is not None and len(lengths) and lengths.max() > MAX_TOKENS:
        longest = int(lengths.argmax())
        message = f"row {keys[longest]!r} has {lengths[longest]} tokens, expected at most {MAX_TOKENS}"
        raise SchemaMismatch(message, op="put", partition=partition, keys=[keys[longest]])
    return batch


def as_integer(name: str, value: int) -> int:
    """Return `value` as an int. Raises ValueError naming the argument when `value` is not an integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: got {value!r}, expected an integer") from None


def as_positions(positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return positions in the prompt stream as int64 `[N]`. Raises ValueError for anything but one dimension of
    integers, and for integers of more than 63 bits."""
    array = np.asarray(positions)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.max() > _MAX_VERSION):
        raise ValueError(
            f"positions: got {array.dtype} {list(array.shape)}, expected one dimension of integers up to {_MAX_VERSION}"
        )
    return array.astype(np.int64)


def as_versions(versions: int | np.ndarray | None, num_rows: int) -> np.ndarray | None:
    """Return the policy versions of N rows as int64 `[N]`; None stays None. Raises ValueError for another shape, for
    non-integers, and for unsigned integers beyond 2^63 - 1."""
    if versions is None:
        return None
    array = np.asarray(versions)
    if array.dtype.kind == "u" and array.size and array.max() > _MAX_VERSION:
        raise ValueError(f"versions: got {array.max()}, expected at most {_MAX_VERSION}")
    if array.dtype.kind not in "iu" or array.shape not in ((), (num_rows,)):
        raise ValueError(
            f"versions: got {array.dtype} {list(array.shape)}, expected one integer or one for each of {num_rows} rows"
        )
    return np.broadcast_to(array, (num_rows,)).astype(np.int64)


def as_version(name: str, value: int) -> int:
    """Return `value` as an int. Raises ValueError naming the argument when it is not an integer, or is not between
    -(2^63 - 1) and 2^63 - 1."""
    version = as_integer(name, value)
    if not -_MAX_VERSION <= version <= _MAX_VERSION:
        raise ValueError(f"{name}: got {version}, expected -{_MAX_VERSION} to {_MAX_VERSION}")
    return version


def empty_receipt(partition: str, schema: Schema, fields: tuple[str, ...], plane_id: int) -> KVBatchMeta:
    """Return the receipt of a put without rows."""
    none, places = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    sources = (RowSource(fields, places, places, none),)
    return KVBatchMeta(partition, (), fields, none, none, none, {}, (), sources, schema=schema, plane_id=plane_id)
