"""Pickles functions and classes of the running script or notebook, so that a run's own processes can load them.

object -> what it holds, by name -> digest of sources and values
       -> pickle, by value for a script's and a notebook's own -> `ship_objects` of this process -> its actors
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import xxhash

from ...actors.process.user_errors import is_users
from ...dataplane.imports import OBJECT, ship_objects
from ..errors import ConfigError

MAX_BYTES = 64 << 20
"""Largest size of an object's pickle. A larger one holds data, which belongs into files or is loaded by the object."""
_PLAIN = str | bytes | int | float | complex | bool | None
_NAMELESS = {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__", "__firstlineno__"}
_NAMELESS |= {
    "__static_attributes__",
    "__annotate__",
    "__annotate_func__",
    "__annotations_cache__",
    "__slots__",
    "__slotnames__",
}
"""Entries of a class that say nothing about what it does."""


def ship(value: Any, where: str) -> str:
    """Ship a function, class or callable object, and return its path, `object@DIGEST:NAME`.

    This process, and every actor of a run whose configuration has the path, can then load the object. The digest is
    that of its source and of what it holds.

    where: key of the configuration, for errors. Raises ConfigError that names what cannot be sent to another process.
    """
    from ray.cloudpickle.cloudpickle import dumps  # This import takes a second.

    name = name_of(value)
    held = list(_held(name, value, {}))
    for inner, one, _ in held:
        if _is_on_gpu(one):
            raise _refusal(where, name, inner, one, "which is in the memory of this process's GPU")
    try:
        data = dumps(value)
    except Exception as error:  # Methods of users' objects can raise any error.
        for inner, one, leaf in held:
            if leaf and _pickled(one) is None:
                raise _refusal(where, name, inner, one, str(error)) from error
        raise _refusal(where, name, name, value, str(error)) from error
    if len(data) > MAX_BYTES:
        why = f"of {len(data) >> 20} MiB as a pickle, more than {MAX_BYTES >> 20} MiB"
        raise _refusal(where, name, name, value, why)
    digest = xxhash.xxh3_64_hexdigest("\n".join(f"{inner} {text}" for inner, one, text in _texts(held)).encode())
    path = f"{OBJECT}{digest}:{name}"
    ship_objects({path: data})
    return path


def name_of(value: Any) -> str:
    """Return a name for an object: that of its function or class, or `function` for a lambda."""
    inner = value.func if isinstance(value, functools.partial) else value
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if name.isidentifier() else "function"


def _refusal(where: str, name: str, inner: str, value: Any, why: str) -> ConfigError:
    kind = type(value)
    return ConfigError(
        [
            f"{where}: {name!r} cannot be sent to the run's processes, because {inner} is a "
            f"{kind.__module__}.{kind.__qualname__} ({why}), expected functions, classes and plain data; what belongs "
            "to one process is made in the function itself, or in the __init__ of a class"
        ]
    )


def _is_on_gpu(value: Any) -> bool:
    """Return whether an object is a tensor in GPU memory, as its attribute `is_cuda` says."""
    if isinstance(value, _PLAIN | type | ModuleType):
        return False
    try:
        return getattr(value, "is_cuda", False) is True
    except Exception:  # A user's __getattr__ can raise any error.
        return False


def _pickled(value: Any) -> bytes | None:
    """Return the pickle of an object; None if it has none."""
    from ray.cloudpickle.cloudpickle import dumps

    try:
        return dumps(value)
    except Exception:  # Methods of users' objects can raise any error.
        return None


def _held(name: str, value: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield `value` and everything that a pickle of it would hold, as (name, value, whether it holds nothing else).

    seen: objects that were yielded before, by id, which keeps them alive; they are not yielded again.
    """
    if isinstance(value, _PLAIN):
        yield name, value, True
        return
    if id(value) in seen:
        return
    seen[id(value)] = value
    inner = [] if _is_importable(value) else list(_parts(value))
    yield name, value, not inner
    for part, one in inner:
        yield from _held(f"{name}.{part}", one, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object of a script or notebook holds, by name."""
    if _is_plain_table(value):
        return
    if isinstance(value, FunctionType):
        names = _global_names(value.__code__)
        yield from ((one, value.__globals__[one]) for one in sorted(names & value.__globals__.keys()))
        for cell, one in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # The cell is empty, because its variable is not set yet.
                yield cell, one.cell_contents
        for position, default in enumerate(value.__defaults__ or ()):
            yield f"default {position}", default
        yield from sorted((value.__kwdefaults__ or {}).items())
    elif isinstance(value, MethodType):
        yield from (("__self__", value.__self__), ("__func__", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, property):
        yield from (("fget", value.fget), ("fset", value.fset))
    elif isinstance(value, staticmethod | classmethod):
        yield "__func__", value.__func__
    elif isinstance(value, type):
        yield "bases", value.__bases__
        own = ((key, one) for key, one in vars(value).items() if not inspect.ismemberdescriptor(one))
        yield from sorted((key, one) for key, one in own if key not in _NAMELESS)
    elif isinstance(value, dict):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        value = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        yield from ((str(position), one) for position, one in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, ModuleType | BuiltinFunctionType):
        yield from (("class", type(value)), *sorted(vars(value).items()))
        if not vars(value) and _is_importable(type(value)):  # Its content stands elsewhere, as that of a tensor.
            yield "content", _content(value)
    elif hasattr(type(value), "__slots__") and not _is_importable(type(value)):  # Its pickle would have line numbers.
        slots = (name for name, _ in inspect.getmembers(type(value), inspect.ismemberdescriptor))
        yield from (("class", type(value)), *((name, getattr(value, name)) for name in slots if hasattr(value, name)))


def _is_plain_table(value: Any) -> bool:
    """Return whether a list, tuple or dict has plain data alone. Its million words are then not walked."""
    if type(value) is dict:
        return all(isinstance(one, _PLAIN) for item in value.items() for one in item)
    return type(value) in (list, tuple) and all(isinstance(one, _PLAIN) for one in value)


def _content(value: Any) -> bytes | None:
    """Return bytes for the content of an object: of a tensor those of its numbers, because its pickle has addresses."""
    to_list = getattr(value, "tolist", None)
    return _pickled(value if to_list is None else to_list())


def _global_names(code: CodeType) -> set[str]:
    """Return the names of the global variables that a function reads, also in the functions inside it."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _is_importable(value: Any) -> bool:
    """Return whether a function, class or module can be imported by name in another process."""
    if isinstance(value, ModuleType):
        return True
    if not isinstance(value, FunctionType | type | BuiltinFunctionType):
        return False
    found: Any = sys.modules.get(value.__module__ or "")
    if found is None or value.__module__ == "__main__":
        return False
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _texts(held: list[tuple[str, Any, bool]]) -> Iterator[tuple[str, Any, str]]:
    """Yield what an object holds with a text for its digest.

    The text is the source of users' functions and classes, the value of plain data, and the type and pickle of other
    objects.
    """
    for name, value, leaf in held:
        if isinstance(value, FunctionType):
            yield name, value, _source(value)
        elif isinstance(value, type | ModuleType) or _is_importable(value):
            named = f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', value.__name__)}"
            yield name, value, named + (_source(value) if isinstance(value, type) and leaf else "")
        elif isinstance(value, _PLAIN):
            yield name, value, repr(value)
        elif leaf and _is_plain_table(value):
            yield name, value, repr(list(value.items() if isinstance(value, dict) else value))
        else:
            data = _pickled(value) if leaf else _numbers(value)
            yield name, value, type(value).__qualname__ + (xxhash.xxh3_64_hexdigest(data) if data else "")


def _numbers(value: Any) -> bytes | None:
    """Return the numbers in a tensor, whose pickle differs from process to process, as text; None for other objects."""
    if not hasattr(type(value), "tolist"):
        return None
    try:
        return repr(value.tolist()).encode()
    except Exception:  # Some tensors have no list, and methods of users' objects can raise any error.
        return None


def _source(value: Any) -> str:
    """Return the source of a user's function or class, or the name of a library's.

    It is the code if there is no source, and for a lambda, which shares its lines with other statements.
    """
    named = f"{value.__module__} {value.__qualname__}"
    code = getattr(value, "__code__", None)
    try:
        file = inspect.getfile(value)
        if not is_users(file):
            return named
        if code is None or code.co_name != "<lambda>":
            return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):  # There is no file, as for what was typed at a prompt.
        pass
    return named if code is None else _code(code)


def _repr(value: Any) -> str:
    """Return the text of a constant, which is the same in each process: the order of a set is not."""
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _code(code: CodeType) -> str:
    constants = [_code(one) if isinstance(one, CodeType) else _repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"
