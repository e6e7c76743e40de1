"""Tests that references to groups are replaced wherever a backend keeps them."""

from __future__ import annotations

import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.actors.train.process_groups import replace_groups

OLD, NEW = object(), object()
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # the plain kind


@dataclass(frozen=True, slots=True)
class Frozen:
    group: Any
    other: int = 1


def closure(group: Any) -> Any:
    unset: Any

    def call() -> Any:
        return group

    def never() -> Any:
        return unset

    call.never = never  # type: ignore[attr-defined]
    if group is None:
        unset = 1
    return call


def test_every_kind_of_place() -> None:
    inner: Any = nn.Linear(2, 2)
    module = nn.Sequential(inner)
    inner.group = OLD
    inner.forward = functools.partial(inner.forward, OLD, key=OLD)
    kept = functools.partial(print, 1)
    call = closure(OLD)
    holder: dict[str, Any] = {
        "plain": OLD,
        "list": [1, [OLD]],
        "tuple": (OLD, 2),
        "named": Pair(1, OLD),
        "module": module,
        "nested": functools.partial(functools.partial(print, (OLD,)), 3),
        "kept": kept,
        "call": call,
        "never": call.never,
        "method": module.add_module,
        "tensor": torch.ones(1),
    }
    holder["self"] = holder
    replace_groups([holder], {id(OLD): NEW})
    assert holder["plain"] is NEW and holder["list"][1] == [NEW] and holder["tuple"] == (NEW, 2)
    assert holder["named"] == Pair(1, NEW)
    assert inner.group is NEW
    assert inner.forward.args == (NEW,) and inner.forward.keywords == {"key": NEW}
    assert holder["nested"].args == ((NEW,), 3)
    assert holder["kept"] is kept
    assert call() is NEW


def test_a_shared_object_stays_shared() -> None:
    shared = (OLD,)
    holder = [shared, [shared]]
    replace_groups([holder], {id(OLD): NEW})
    assert holder[0] is holder[1][0] and holder[0] == (NEW,)


def test_a_frozen_dataclass() -> None:
    frozen = Frozen(OLD)
    type(frozen).__module__ = "headrace.test"
    replace_groups([frozen], {id(OLD): NEW})
    assert frozen.group is NEW and frozen.other == 1
