"""Checks the rows of one field (tensors, arrays or lists) and converts them into one contiguous column.

The schema decides what a value means; nothing is guessed from its shape. Integers are converted if every value fits,
and float64, the dtype of numpy's floats, is rounded as Python's floats are; other tensors are not cast. Every error is
a ValueError that names the field, the row, the given value and the expected one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor

from .batch import Column, Jagged, Ragged
from .memory import fresh
from .schema import Field, Kind


def tensordict_types(*names: str) -> tuple[type, ...]:
    """Return the named classes of the package tensordict, or () when nothing in this process has imported it.

    The package is not imported here, because that would take a second in every process of a run. A caller that passes a
    tensordict object has already imported it.
    """
    module = sys.modules.get("tensordict")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def to_column(field: Field, value: Any) -> Column:
    """Return `value` as a column of `field`: contiguous, on the CPU, without grad, sharing its memory where possible.

    Accepted values for each kind, besides a finished column:
    PER_TOKEN   N rows `[L, *trailing]` (list of tensors, arrays or lists; nested tensor), dense `[N, L, *trailing]`
    PER_SAMPLE  N rows `[*trailing]`, or dense `[N, *trailing]`
    RAGGED      N rows of `ndim` dimensions, or dense `[N, *shape]`
    OBJECT      a list of N objects (or NonTensorStack, or an array of objects or strings)
    Numbers of Python, and tensors and arrays of integers, are converted to the field's dtype if every value fits.
    Floats of Python, and tensors and arrays of float64, are rounded for a field of floats, whose range they must not
    exceed.
    Raises ValueError for any other value.
    """
    if isinstance(value, tensordict_types("NonTensorData", "NonTensorStack")):
        value = _unstacked(value)
    if field.kind is Kind.OBJECT:
        return _objects(field, value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = list(value)
    if isinstance(value, NestedTensor) or (isinstance(value, torch.Tensor) and value.is_nested):
        column = _jagged_from_nested(field, value)
        if column is not None:
            return column
        value = list(value.unbind())
    if field.kind is Kind.PER_TOKEN:
        return _per_token(field, value)
    if field.kind is Kind.PER_SAMPLE:
        return _per_sample(field, value)
    return _ragged(field, value)


def _unstacked(value: Any) -> Any:
    """Return the rows of a column that tensordict holds as data without tensors. A TensorDict repeats a whole array of
    objects or strings for each of its N rows; such an array `[N]` is taken as the column that it was given as."""
    array = getattr(value, "data", None)
    if isinstance(array, np.ndarray) and array.dtype.kind in "OUS" and array.shape == tuple(value.batch_size):
        return array
    return value.tolist()


def num_rows(column: Column) -> int:
    """Return the number of rows of a finished column."""
    if isinstance(column, Jagged):
        return len(column.lengths)
    return len(column.shapes) if isinstance(column, Ragged) else len(column)


def _per_token(field: Field, value: Any) -> Jagged:
    if isinstance(value, Jagged):
        lengths = _extents(field, value.lengths, ndim=1)
        values = _tensor(field, value.values, "values", _row_finder(lengths))
        _expect_shape(field, "values", values.shape, (int(lengths.sum()), *field.trailing))
        return Jagged(values, lengths)
    if isinstance(value, torch.Tensor | np.ndarray):
        dense = _tensor(field, value, "the dense tensor", int)
        _expect_shape(field, "the dense tensor", dense.shape, ("N", "L", *field.trailing))
        count, length = dense.shape[:2]
        return Jagged(dense.reshape(count * length, *field.trailing), np.full(count, length, dtype=np.int64))
    rows = _rows(field, value)
    values = _concat(field, rows, ("L", *field.trailing))
    lengths = [row.shape[0] if isinstance(row, torch.Tensor) else len(row) for row in rows]
    return Jagged(values, np.array(lengths, dtype=np.int64))


def _per_sample(field: Field, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor | np.ndarray):
        dense = _tensor(field, value, "the dense tensor", int)
        _expect_shape(field, "the dense tensor", dense.shape, ("N", *field.trailing))
        return dense
    rows = _rows(field, value)
    kinds = set(map(type, rows))
    try:
        if any(issubclass(kind, torch.Tensor | np.ndarray) for kind in kinds) or not rows:
            tensors = [_row(field, row, index, field.trailing) for index, row in enumerate(rows)]
            return torch.stack(tensors) if tensors else torch.empty((0, *field.trailing), dtype=field.dtype)
        dense = _from_python(field, rows, "the list")
        _expect_shape(field, "the list", dense.shape, (len(rows), *field.trailing))
        return dense
    except ValueError:
        _name_the_row(field, rows, field.trailing)
        raise


def _ragged(field: Field, value: Any) -> Ragged:
    if isinstance(value, Ragged):
        shapes = _extents(field, value.shapes, ndim=2)
        _expect_shape(field, "shapes", shapes.shape, ("N", field.ndim))
        values = _tensor(field, value.values, "values", _row_finder(shapes.prod(axis=1)))
        _expect_shape(field, "values", values.shape, (int(shapes.prod(axis=1).sum()),))
        return Ragged(values, shapes)
    if isinstance(value, torch.Tensor | np.ndarray):
        dense = _tensor(field, value, "the dense tensor", int)
        _expect_shape(field, "the dense tensor", dense.shape, ("N", *["*"] * field.ndim))
        shapes = np.tile(np.array(dense.shape[1:], dtype=np.int64), (len(dense), 1))
        return Ragged(dense.reshape(-1), shapes)
    rows = [_row(field, row, index, ("*",) * field.ndim) for index, row in enumerate(_rows(field, value))]
    shapes = np.array([row.shape for row in rows], dtype=np.int64).reshape(len(rows), field.ndim)
    values = torch.cat([row.reshape(-1) for row in rows]) if rows else torch.empty(0, dtype=field.dtype)
    return Ragged(values, shapes)


def _objects(field: Field, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUS" and value.ndim == 1:
        return value.tolist()
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(f"field {field.name!r}: got {_what(value)}, expected a list of objects, one per row")


def _jagged_from_nested(field: Field, value: Any) -> Jagged | None:
    """Convert a nested tensor of layout torch.jagged to a column, without a copy if it is on the CPU. Returns None when
    the field is not PER_TOKEN, or when the rows do not follow one another in memory."""
    if field.kind is not Kind.PER_TOKEN or not isinstance(value, NestedTensor):
        return None
    # Private attributes are read here, because each method call on a tensor subclass takes 0.1 ms. `_ragged_idx` is 1
    # if the jagged dimension is that of the tokens; `_lengths` is set if there are gaps between the rows.
    if value._ragged_idx != 1 or value._lengths is not None:
        return None
    offsets = value._offsets.cpu().numpy()
    values = value._values[int(offsets[0]) : int(offsets[-1])]
    return _per_token(field, Jagged(values, np.diff(offsets)))


def _rows(field: Field, value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise ValueError(
        f"field {field.name!r}: got {_what(value)}, expected a list of rows, a tensor or an array ({field.kind.value})"
    )


def _concat(field: Field, rows: Sequence[Any], shape: tuple[int | str, ...]) -> torch.Tensor:
    """Concatenate rows along their first dimension. shape: expected shape of each row, where a string matches any size.
    Raises ValueError naming the first row that does not fit."""
    assert field.dtype is not None
    kinds = set(map(type, rows))
    if not rows:
        return torch.empty((0, *field.trailing), dtype=field.dtype)
    try:
        # All rows of lists and arrays are converted together; the row is looked up only for an error.
        if kinds <= {list, tuple} and not field.trailing:
            flat = _from_python(field, list(itertools.chain.from_iterable(rows)), "the rows")
            _expect_shape(field, "the rows", flat.shape, ("L",))
            return flat
        if kinds == {np.ndarray} and len({(row.dtype, row.shape[1:]) for row in rows}) == 1:
            values = _tensor(field, np.concatenate(rows), "the rows")
            _expect_shape(field, "the rows", values.shape, shape)
            return values
    except ValueError:
        _name_the_row(field, rows, shape)
        raise
    dtype = _common_dtype(field, rows, shape) if kinds == {torch.Tensor} else None
    if dtype is None:
        dtype, rows = field.dtype, [_row(field, row, index, shape) for index, row in enumerate(rows)]
    if not all([row.is_cpu for row in rows]):
        rows = [row.cpu() for row in rows]
    # Without torch.no_grad: an interrupt at its beginning would leave gradients switched off in the user's thread.
    if any([row.requires_grad for row in rows]):
        rows = [row.detach() for row in rows]
    lengths = [row.shape[0] for row in rows]
    out = fresh(dtype, (sum(lengths), *field.trailing))
    joined = torch.cat(tuple(rows), out=out)
    return joined if dtype == field.dtype else _tensor(field, joined, "the rows", _row_finder(lengths))


def _common_dtype(field: Field, rows: Sequence[torch.Tensor], shape: tuple[int | str, ...]) -> torch.dtype | None:
    """Return the dtype of the rows if all are plain tensors that fit the field, else None. Plain rows are strided and
    all have the given shape and one dtype. This is the field's dtype or one that converts to it. The function is
    optimised for speed, because there can be thousands of rows."""
    dtype = rows[0].dtype
    plain = {(row.dtype, row.ndim, row.layout) for row in rows} == {(dtype, len(shape), torch.strided)}
    if not plain or (field.trailing and not all([row.shape[1:] == field.trailing for row in rows])):
        return None
    return dtype if dtype == field.dtype or _converts(field, dtype) else None


def _name_the_row(field: Field, rows: Sequence[Any], shape: tuple[int | str, ...]) -> None:
    for index, row in enumerate(rows):
        _row(field, row, index, shape)


def _row(field: Field, row: Any, index: int, shape: tuple[int | str, ...]) -> torch.Tensor:
    where = f"row {index}"
    if isinstance(row, torch.Tensor | np.ndarray):
        tensor = _tensor(field, row, where)
    else:
        tensor = _from_python(field, row, where)
        if not tensor.numel() and tensor.shape == (0,) and shape[:1] == ("L",):
            # An empty list is a row without tokens, for any trailing shape.
            tensor = tensor.reshape(0, *field.trailing)
    _expect_shape(field, where, tensor.shape, shape)
    return tensor


def _tensor(field: Field, value: Any, where: str, row_of: Callable[[int], int] | None = None) -> torch.Tensor:
    """Return `value` as a contiguous CPU tensor without grad. Raises ValueError when it is not a strided tensor or an
    array of the field's dtype, or of one that is converted (see `to_column`).

    row_of: function that maps an index along the first dimension of `value` to its row, for errors; None when `where`
    already names the row.
    """
    if isinstance(value, np.ndarray):
        return _from_numpy(field, value, where, row_of)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"field {field.name!r}: {where} is {_what(value)}, expected a tensor")
    if value.dtype != field.dtype and not _converts(field, value.dtype):
        raise ValueError(
            f"field {field.name!r}: {where} has dtype {value.dtype}, expected {field.dtype}; "
            f"cast it where it is made, because only integers and float64 are converted"
        )
    if value.is_meta:
        raise ValueError(f"field {field.name!r}: {where} is on the device meta, which has no values, expected a tensor")
    if value.is_nested or value.layout is not torch.strided:
        raise ValueError(f"field {field.name!r}: {where} has layout {value.layout}, expected a plain (strided) tensor")
    plain = value.detach().cpu()
    if plain.dtype != field.dtype:
        return _from_numpy(field, plain.resolve_neg().numpy(), where, row_of)
    return plain.contiguous().resolve_neg()


def _converts(field: Field, dtype: torch.dtype) -> bool:
    """Return whether values of `dtype` that fit are converted to the field's dtype."""
    assert field.dtype is not None
    if field.dtype.is_floating_point:
        return dtype == torch.float64 or _is_integer(dtype)
    return _is_integer(dtype) and _is_integer(field.dtype)


def _row_finder(items: Sequence[int] | np.ndarray) -> Callable[[int], int]:
    """Return a function that finds the row of the item with a given index, when rows follow one another. items: number
    of items of each row, `[N]`."""
    return lambda index: int(np.searchsorted(np.cumsum(items), index, side="right"))


def _from_numpy(field: Field, array: np.ndarray, where: str, row_of: Callable[[int], int] | None) -> torch.Tensor:
    assert field.dtype is not None
    name, target = array.dtype.name, field.dtype
    if name == field.dtype_name:
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
        # torch warns about read-only arrays, so these are copied.
        return torch.from_numpy(native if native.flags.writeable else native.copy())
    if target.is_floating_point and (array.dtype.kind in "iu" or name == "float64"):
        return _rounded(field, array, where, row_of)
    if array.dtype.kind not in "iu" or not _is_integer(target):
        raise ValueError(f"field {field.name!r}: {where} is a numpy array of dtype {name}, expected {field.dtype_name}")
    _expect_range(field, array, where, row_of)
    return torch.from_numpy(array.astype(np.dtype(field.dtype_name), order="C"))


def _from_python(field: Field, value: Any, where: str) -> torch.Tensor:
    """Convert a Python number, or nested lists of them, to a tensor of the field's dtype. Raises ValueError for
    anything else, and for values that the dtype cannot hold."""
    assert field.dtype is not None
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, torch.Tensor):
        raise ValueError(f"field {field.name!r}: {where} is a list of tensors, expected one tensor (torch.stack them)")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"field {field.name!r}: {where} is not an array of numbers: {error}") from None
    kind, target = array.dtype.kind, field.dtype
    if not array.size and kind in "biuf":
        return torch.empty(array.shape, dtype=target)
    if target == torch.bool and kind == "b":
        return torch.from_numpy(array)
    if _is_integer(target) and kind in "biu":
        _expect_range(field, array, where)
        return torch.from_numpy(array.astype(np.dtype(field.dtype_name)))
    if target.is_floating_point and kind in "iuf":
        return _rounded(field, array, where)
    raise ValueError(
        f"field {field.name!r}: {where} is {_what(value)} with values of type {array.dtype.name}, "
        f"expected {field.dtype_name}"
    )


def _rounded(field: Field, array: np.ndarray, where: str, row_of: Callable[[int], int] | None = None) -> torch.Tensor:
    """Convert an array of integers or float64 to the field's dtype, a type of floats. Raises ValueError for an integer
    that the dtype cannot hold exactly, and for a float beyond its range. row_of: as in `_tensor`."""
    assert field.dtype is not None
    wide = np.ascontiguousarray(array, dtype=np.float64).reshape(array.shape)
    tensor = torch.from_numpy(wide).to(field.dtype)
    back = tensor.to(torch.float64).numpy()
    if array.dtype.kind == "f":
        wrong = np.isfinite(wide) & ~np.isfinite(back)
    else:  # float64 itself holds only integers up to 2^53 exactly.
        inside = np.abs(back) < 2.0**63
        wrong = ~inside | (np.where(inside, back, 0).astype(np.int64) != array)
    if wrong.any():
        if row_of is not None:
            where = f"row {row_of(int(np.argwhere(wrong)[0, 0]))}"
        what = array[wrong].flat[0]
        raise ValueError(f"field {field.name!r}: {where} holds {what}, which {field.dtype_name} cannot hold")
    return tensor


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype != torch.bool and not dtype.is_floating_point


def _expect_range(field: Field, array: np.ndarray, where: str, row_of: Callable[[int], int] | None = None) -> None:
    """Raise ValueError for an integer that the field's dtype cannot hold. row_of: as in `_tensor`."""
    assert field.dtype is not None
    limits = torch.iinfo(field.dtype)
    for value in (int(array.min()), int(array.max())) if array.size else ():
        if not limits.min <= value <= limits.max:
            if row_of is not None:
                where = f"row {row_of(int(np.argwhere(array == value)[0, 0]))}"
            raise ValueError(
                f"field {field.name!r}: {where} holds {value}, expected {limits.min} to {limits.max} "
                f"({field.dtype_name})"
            )


def _extents(field: Field, value: Any, *, ndim: int) -> np.ndarray:
    """Return row lengths `[N]` (`ndim=1`) or row shapes `[N, dimensions of a row]` (`ndim=2`) as int64. Raises
    ValueError for another number of dimensions, for non-integers, and for negative values."""
    array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.ndim != ndim or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"field {field.name!r}: lengths are {array.dtype.name} of shape {array.shape}, expected {ndim}-D integers"
        )
    array = array.astype(np.int64, copy=False)
    if array.size and array.min() < 0:
        raise ValueError(f"field {field.name!r}: lengths hold {array.min()}, expected 0 or more")
    return array


def _expect_shape(field: Field, where: str, shape: Sequence[int], expected: tuple[int | str, ...]) -> None:
    """Raise ValueError unless `shape` equals `expected`, where a string matches any size."""
    fits = len(shape) == len(expected) and all(
        isinstance(want, str) or got == want for got, want in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, expected))
        raise ValueError(f"field {field.name!r}: {where} has shape {list(shape)}, expected [{wanted}]")


def _what(value: Any) -> str:
    return f"a {type(value).__name__}"
