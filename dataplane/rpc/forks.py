"""Renews, in a forked process, what belongs to its parent: connections, space in the store, and held locks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def renew_in_forks(owner: Owner, renew: Callable[[Owner], None]) -> None:
    """Have forked processes call `renew(owner)` first of all. renew: function without a reference to `owner`, such as a
    method of its class. It makes new locks, because other threads of the parent may have had them."""
    _owners[owner] = renew


def _renew_all() -> None:
    for owner, renew in list(_owners.items()):
        renew(owner)


os.register_at_fork(after_in_child=_renew_all)
