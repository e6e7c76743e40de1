"""Finds the places in a graph of objects that refer to process groups, and puts other objects there.

Modules, optimizers and meshes keep the process groups that they were built with: torch has no other way to give a
module of Megatron or FSDP2 a new group than to write it into the attributes that hold the old one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_PACKAGES = ("headrace", "megatron", "torch.distributed", "torch.nn", "torch.optim")
"""Packages whose objects are searched. Others, such as tokenizers and model configs, refer to no group."""


def replace_groups(holders: Iterable[object], new: Mapping[int, object]) -> None:
    """Replace, in all objects that can be reached from `holders`, each reference to one of the groups in `new`.

    new: the object to put in a group's place, by the `id` of the group. Attributes, lists, dict values, tuples,
    `functools.partial` objects and the variables of closures are searched; keys of dicts, sets and tensors are not.
    """
    search = _Search(new)
    for holder in holders:
        search.visit(holder)


class _Search:
    """One walk over the objects. Each is visited once."""

    def __init__(self, new: Mapping[int, object]) -> None:
        self._new = new
        self._visited: dict[int, tuple[object, object]] = {}
        """Each visited object and what takes its place, by id. It is kept because its id could be used again."""

    def visit(self, value: Any) -> Any:
        """Replace groups inside `value`, and return what has to stand in its place: usually `value` itself."""
        if id(value) in self._new:
            return self._new[id(value)]
        if id(value) in self._visited:
            return self._visited[id(value)][1]
        if not _is_searched(value):
            return value
        self._visited[id(value)] = (value, value)
        result = self._inside(value)
        self._visited[id(value)] = (value, result)
        return result

    def _inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            self._items(value, list(value.items()))
        elif isinstance(value, list):
            self._items(value, list(enumerate(value)))
        elif isinstance(value, tuple):
            return self._tuple(value)
        elif isinstance(value, functools.partial):
            return self._partial(value)
        elif isinstance(value, MethodType):
            self.visit(value.__self__)
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._cell(cell)
        else:
            self._attributes(value)
        return value

    def _items(self, container: Any, items: list[tuple[Any, Any]]) -> None:
        for key, item in items:
            found = self.visit(item)
            if found is not item:
                container[key] = found

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        found = [self.visit(item) for item in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        function, arguments = self.visit(value.func), self._tuple(value.args)
        keywords = {name: self.visit(argument) for name, argument in value.keywords.items()}
        kept = function is value.func and arguments is value.args
        if kept and all(keywords[name] is argument for name, argument in value.keywords.items()):
            return value
        return functools.partial(function, *arguments, **keywords)

    def _cell(self, cell: Any) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            return
        found = self.visit(content)
        if found is not content:
            cell.cell_contents = found

    def _attributes(self, value: Any) -> None:
        attributes = dict(getattr(value, "__dict__", {}))
        if dataclasses.is_dataclass(value):
            attributes |= {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        for name, attribute in attributes.items():
            found = self.visit(attribute)
            if found is not attribute:
                object.__setattr__(value, name, found)  # frozen dataclasses and modules refuse an ordinary assignment


def _is_searched(value: object) -> bool:
    if isinstance(value, type):
        return False
    if isinstance(value, dict | list | tuple | functools.partial | MethodType | FunctionType | nn.Module):
        return True
    kind = type(value).__module__
    return any(kind == package or kind.startswith(f"{package}.") for package in _PACKAGES)
