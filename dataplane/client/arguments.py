"""Checks the arguments of the operations of data-plane clients, and brings them into the form of requests.

Each argument is checked where it enters, by the table CHECKS, so that a wrong value is named with its argument and
never reaches the code that encodes it.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from ...codecs.batch import Batch
from ...codecs.block_header import MAX_TOKENS
from ...codecs.columns import tensordict_types
from ...codecs.gather import RowSource
from ...codecs.jagged import pack
from ...codecs.objects import UnstorableObject
from ...codecs.schema import Schema
from ..compact import check_keys, plain_strings
from ..config import MAX_SECONDS, DataPlaneConfig
from ..directory.calls import Outcome
from ..directory.samplers import TaskConfig, check_arguments
from ..errors import DataPlaneError, InvalidArgument, SchemaMismatch
from ..handle import DataPlaneHandle, PlaneText
from ..listen_address import Listening, listen_address
from ..meta import KVBatchMeta, Tags

if TYPE_CHECKING:
    from tensordict import TensorDictBase

_SHOWN = 80
"""Largest number of letters of a wrong value that an error shows."""
_short = reprlib.Repr()
"""Writes values briefly, also those that are nested deeply or contain themselves."""
_short.maxstring = _short.maxother = _short.maxlong = 2 * _SHOWN
MAX_RUN_ID = 64
"""Largest number of letters of a run_id, which becomes a part of the names of sockets and folders."""
_MAX_INTEGER = (1 << 63) - 1
"""Highest integer of an argument, such as a policy version or a position in the prompt stream."""

Fields: TypeAlias = "Batch | Mapping[str, Any] | TensorDictBase"
"""Type of the rows that `put` takes: anything that `codecs.jagged.pack` takes."""

Keys: TypeAlias = "Sequence[str] | np.ndarray"
"""Type of keys and names of groups: strings, including those of numpy, or an array `[N]` of strings."""


def _refused(name: str, value: Any, expected: str) -> ValueError:
    """Return the error for an argument: its name, a short form of the value, and what was expected."""
    is_plain = value is None or isinstance(value, str | bytes | int | float | list | tuple | dict | type)
    try:
        got = _short.repr(value) if is_plain else f"a {type(value).__name__}"
    except ValueError:  # Python writes no integer of more than 4300 digits.
        got = f"a {type(value).__name__}"
    return ValueError(f"{name}: got {got if len(got) <= _SHOWN else got[:_SHOWN] + '...'}, expected {expected}")


def as_text(name: str, value: Any) -> str:
    """Return a non-empty string. Like all functions here, raises ValueError naming the argument for anything else."""
    if not isinstance(value, str) or not value:
        raise _refused(name, value, "a non-empty string")
    return str(value)


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _refused(name, value, "True or False")
    return bool(value)


def as_listening(name: str, value: Any) -> Listening:
    if not isinstance(value, Listening):
        raise _refused(name, value, "a Listening")
    return value


def as_count(name: str, value: Any) -> int:
    """Return an integer from 1."""
    count = as_integer(name, value)
    if count < 1:
        raise _refused(name, value, "an integer from 1")
    return count


def as_seconds(name: str, value: Any) -> float:
    """Return a number of seconds, which is finite and not negative; MAX_SECONDS for a larger one."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise _refused(name, value, "a finite number of seconds >= 0")
    return float(min(value, MAX_SECONDS))


def as_receipt(name: str, value: Any) -> KVBatchMeta:
    if not isinstance(value, KVBatchMeta):
        raise _refused(name, value, "a receipt (KVBatchMeta) from put, claim or lookup; get_keys reads rows by key")
    return value


def as_names(name: str, value: Any) -> tuple[str, ...]:
    """Return names of fields. One string is refused, as for keys, because it would be read as its letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _refused(name, value, "a sequence of names, such as ['reward']")
    names = tuple(plain_strings(list(value)))
    if not all(isinstance(item, str) for item in names):
        raise _refused(name, value, "a sequence of names, such as ['reward']")
    return names


def as_rows(name: str, value: Any) -> Fields:
    """Return the rows of a put, of any type that `pack` takes."""
    if not isinstance(value, (Mapping, Batch, *tensordict_types("TensorDictBase"))):
        raise _refused(name, value, "a mapping from field to rows, a Batch or a TensorDict")
    return value


def as_schema(name: str, value: Any) -> Schema:
    return value if isinstance(value, Schema) else Schema(value)


def as_tags(name: str, value: Any) -> Tags:
    if not isinstance(value, Mapping) or not all(isinstance(tag, str) for tag in value):
        raise _refused(name, value, "a mapping from tag to a value for each key")
    return value


def as_handle(name: str, value: Any) -> DataPlaneHandle | str:
    if not isinstance(value, DataPlaneHandle | str):
        raise _refused(name, value, "a DataPlaneHandle, such as plane.handle, or its text")
    if isinstance(value, str):
        PlaneText.parse(value)
    return value


def as_config(name: str, value: Any) -> DataPlaneConfig:
    if not isinstance(value, DataPlaneConfig):
        raise _refused(name, value, "a DataPlaneConfig, such as DataPlaneConfig(store=StoreConfig(kind='tcp'))")
    return value


def as_run_id(name: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]*\w[\w.-]*", value) or len(value) > MAX_RUN_ID:
        raise _refused(name, value, f"up to {MAX_RUN_ID} letters, digits, '-', '_', '.', with a letter or a digit")
    return value


def as_string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(name, value, "a string")
    return value


def as_outcome(name: str, value: Any) -> Outcome:
    if not isinstance(value, str) or value not in ("done", "retry"):
        raise _refused(name, value, "'done' or 'retry'")
    return "done" if value == "done" else "retry"


def as_path(name: str, value: Any) -> str | os.PathLike[str]:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise _refused(name, value, "a path")
    return value


def as_sampler_arguments(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(name, value, "a mapping from name to plain value")
    return check_arguments(value)


def task_configs(name: str, tasks: Any) -> tuple[TaskConfig, ...]:
    """Return the settings of tasks. A name alone stands for a task with default settings."""
    if isinstance(tasks, str) or not isinstance(tasks, Iterable):
        raise _refused(name, tasks, "a sequence of names or TaskConfigs")
    listed = tuple(tasks)
    wrong = [task for task in listed if not isinstance(task, str | TaskConfig)]
    if wrong:
        raise _refused(name, wrong[0], "a name or a TaskConfig")
    return tuple(TaskConfig(task) if isinstance(task, str) else task for task in listed)


def as_array(name: str, value: Any) -> np.ndarray:
    """Return an array that the operation checks further, because its shape depends on another argument."""
    try:
        return np.asarray(value)
    except RuntimeError as error:  # torch raises it for a tensor that requires a gradient.
        raise _refused(name, value, f"integers ({error})") from None


def _keys(name: str, value: Any) -> list[str]:
    if not isinstance(value, Iterable):
        raise _refused(name, value, "a sequence of strings")
    keys: Any = value
    return check_keys(keys, name)


def packed(partition: str, schema: Schema, fields: Fields, keys: Sequence[str]) -> Batch:
    """Return the fields of a put as a batch. Raises SchemaMismatch when they do not fit the schema, when there are no
    fields, and when a row has too many tokens."""
    with mismatch(partition, keys):
        batch = pack(schema, fields, len(keys))
    if not len(batch) and keys:
        raise SchemaMismatch("put: got no fields, expected at least one", op="put", partition=partition, keys=keys)
    lengths = batch.lengths
    if lengths is not None and len(lengths) and lengths.max() > MAX_TOKENS:
        longest = int(lengths.argmax())
        message = f"row {keys[longest]!r} has {lengths[longest]} tokens, expected at most {MAX_TOKENS}"
        raise SchemaMismatch(message, op="put", partition=partition, keys=[keys[longest]])
    return batch


def as_integer(name: str, value: int) -> int:
    """Return `value` as an int. Raises ValueError naming the argument when it is not an integer, or is not between
    -(2^63 - 1) and 2^63 - 1."""
    try:
        integer = operator.index(value)
    except TypeError:
        raise _refused(name, value, "an integer") from None
    if not -_MAX_INTEGER <= integer <= _MAX_INTEGER:
        raise _refused(name, integer, f"-{_MAX_INTEGER} to {_MAX_INTEGER}")
    return integer


def as_positions(name: str, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return positions in the prompt stream as int64 `[N]`. Raises ValueError for anything but one dimension of
    integers, and for integers of more than 63 bits."""
    array = as_array(name, positions)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.max() > _MAX_INTEGER):
        raise ValueError(
            f"{name}: got {array.dtype} {list(array.shape)}, expected one dimension of integers up to {_MAX_INTEGER}"
        )
    return array.astype(np.int64)


def as_versions(versions: int | np.ndarray | None, num_rows: int) -> np.ndarray | None:
    """Return the policy versions of N rows as int64 `[N]`; None stays None. Raises ValueError for another shape, for
    non-integers, and for unsigned integers beyond 2^63 - 1."""
    if versions is None:
        return None
    array = np.asarray(versions)
    if array.dtype.kind == "u" and array.size and array.max() > _MAX_INTEGER:
        raise ValueError(f"versions: got {array.max()}, expected at most {_MAX_INTEGER}")
    if array.dtype.kind not in "iu" or array.shape not in ((), (num_rows,)):
        raise ValueError(
            f"versions: got {array.dtype} {list(array.shape)}, expected one integer or one for each of {num_rows} rows"
        )
    return np.broadcast_to(array, (num_rows,)).astype(np.int64)


def empty_receipt(partition: str, schema: Schema, fields: tuple[str, ...], plane_id: int) -> KVBatchMeta:
    """Return the receipt of a put without rows."""
    none, places = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    sources = (RowSource(fields, places, places, none),)
    return KVBatchMeta(
        partition, (), fields, none, none, none, {}, (), sources, schema=schema, plane_id=plane_id, generations=none
    )


# ---------------- A table lists the checks, and a decorator applies them.

Check: TypeAlias = Callable[[str, Any], Any]
"""Type of a check: (name of the argument, value) -> the value in the form of requests. Raises ValueError."""


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _applied(check: Check, name: str, value: Any) -> Any:
    """Return what a check returns. Raises ValueError for an error that Python, numpy or torch raises when the value is
    looked at. Other errors may be those of a signal's handler, which leave the call as they are."""
    try:
        return check(name, value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise _refused(name, value, f"a value that can be read ({type(error).__name__}: {error})") from None


CHECKS: dict[str, Check] = {
    "arguments": _or_none(as_sampler_arguments), "at_least": _or_none(as_integer), "field": as_text,
    "fields": as_names,
    "group_size": as_count, "groups": _or_none(_keys), "keys": _keys, "max_version": _or_none(as_integer),
    "meta": as_receipt, "min_version": _or_none(as_integer), "n": as_integer, "outcome": as_outcome,
    "name": as_string, "partition": as_text, "parts": _or_none(as_names), "path": as_path,
    "positions": as_positions, "redefine": as_flag,
    "replace": as_flag,
    "schema": as_schema, "tags": as_tags, "task": as_text, "tasks": task_configs, "timeout_s": _or_none(as_seconds),
    "config": _or_none(as_config), "handle": as_handle, "in_process": as_flag, "listen": listen_address,
    "listening": _or_none(as_listening),
    "one_host": as_flag, "process": as_flag, "run_id": _or_none(as_run_id), "start_timeout_s": as_seconds,
    "batch_size": _or_none(as_count), "clear": as_flag, "on_timeout": as_string,
    "rank": _or_none(as_integer), "stop_after": _or_none(as_count), "with_receipts": as_flag,
    "units": as_names, "world": _or_none(as_count),
    "directory_node": as_string, "nodes": _or_none(as_names),
    "older_than_s": as_seconds, "versions": _or_none(as_array), "wait": as_flag, "whole_groups": as_flag,
}  # fmt: skip
"""Check of each argument of the public calls, by the argument's name."""
SPECIAL: dict[str, Check] = {
    "add_fields.fields": as_schema, "clear.keys": _or_none(_keys), "clear_stale.min_version": as_integer,
    "get.fields": _or_none(as_names),
    "load.partition": _or_none(as_text), "lookup.fields": _or_none(as_names), "put.fields": as_rows,
    "open_data_plane.listen": lambda name, value: value if value == "" else listen_address(name, value),
    "put.tags": _or_none(as_tags), "reset.keys": _or_none(_keys), "rows.keys": _or_none(_keys),
    "status.partition": _or_none(as_text), "task_status.fields": _or_none(as_names),
    "write.fields": as_rows, "write.tags": _or_none(as_tags),
}  # fmt: skip
"""Checks of arguments that differ from CHECKS in one call, as `call.argument`."""
_T = TypeVar("_T")
_P = ParamSpec("_P")
_Y = TypeVar("_Y")


def checked(operation: Callable[..., Generator[_Y, Any, _T]]) -> Callable[..., Generator[_Y, Any, _T]]:
    """Return an operation of the clients whose arguments are checked by CHECKS and SPECIAL before it begins. What is
    wrong with them, there or later, is raised as InvalidArgument. The first parameter is not checked."""
    op = operation.__name__
    names = list(inspect.signature(operation).parameters)[1:]
    checks = [(name, SPECIAL.get(f"{op}.{name}") or CHECKS[name]) for name in names]

    @functools.wraps(operation)
    def steps(owner: Any, *values: Any) -> Generator[_Y, Any, _T]:
        with invalid_arguments(op):
            found = [_applied(check, name, value) for (name, check), value in zip(checks, values, strict=True)]
            return (yield from operation(owner, *found))

    return steps


def checked_call(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function, or a method `__init__`, whose arguments are checked as those of operations are."""
    signature = inspect.signature(function)
    op = function.__qualname__.removesuffix(".__init__")
    names = [name for name in signature.parameters if name != "self"]
    checks = {name: SPECIAL.get(f"{op}.{name}") or CHECKS[name] for name in names}

    @functools.wraps(function)
    def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
        bound = signature.bind(*arguments, **named)
        with invalid_arguments(op):
            for name, check in checks.items():
                if name in bound.arguments:
                    bound.arguments[name] = _applied(check, name, bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


@contextmanager
def invalid_arguments(op: str) -> Iterator[None]:
    """Raise InvalidArgument for a plain ValueError of the context. op: the operation, for the error."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, DataPlaneError):
            raise
        raise InvalidArgument(str(error), op=op) from error.__cause__


@contextmanager
def mismatch(partition: str, keys: Sequence[str]) -> Iterator[None]:
    """Raise SchemaMismatch for an error of the codecs about the rows of a put. It names the row's key, if it is known
    which row is wrong."""
    try:
        yield
    except UnstorableObject as error:
        raise SchemaMismatch(str(error), op="put", partition=partition, keys=[keys[error.row]]) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, DataPlaneError):
            raise
        raise SchemaMismatch(str(error), op="put", partition=partition, keys=keys) from None
