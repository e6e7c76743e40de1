"""Defines the steps of which the operations of data-plane clients consist: requests to the directory, and work."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..rpc.links import Undo


@dataclass(frozen=True, slots=True)
class Ask:
    """Step of an operation: a request to the directory (the metadata service). The client sends it, and passes the
    reply to the operation."""

    op: str
    payload: bytes
    timeout_s: float
    undo: Undo | None = None
    """Function that builds the request that undoes this one if its caller was interrupted; None when there is nothing
    to undo."""


@dataclass(frozen=True, slots=True)
class Work:
    """Step of an operation: a function that the client must run, which may move bytes and block. Once begun it must be
    waited for."""

    op: str
    run: Callable[[], Any]
    deadline: float | None = None
    """Time by the clock `time.monotonic()` until which the function may wait for a free thread; None sets no limit."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moved(Generic[T]):
    """Result of an operation that moves bytes, together with the number of bytes moved."""

    result: T
    nbytes: int
    """Number of bytes in the committed blocks, or in the columns that were read."""


Steps = Generator[Ask | Work, Any, T]
"""Type of an operation: a generator that yields steps, is sent their results (or thrown their errors), and returns the
operation's result."""
