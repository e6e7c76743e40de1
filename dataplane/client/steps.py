"""Defines the steps of which operations of data-plane clients consist, and what an operation returns."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..rpc.links import Link, Undo


@dataclass(frozen=True, slots=True)
class Ask:
    """Step of an operation: a request to the directory (the metadata service). The client sends it, and passes the
    reply to the operation."""

    link: Link
    """Link to the directory that carries the request out."""
    op: str
    payload: bytes
    timeout_s: float
    undo: Undo | None = None
    """Function that builds a request to undo this one, when its reply comes after its time limit or after its task was
    cancelled; None when there is nothing to undo."""
    undoes: bool = False
    """True if the request undoes an earlier one. It is then sent even if the caller has been interrupted."""


@dataclass(frozen=True, slots=True)
class Work:
    """Step of an operation: a function for the client to run. It can move bytes and block. Once it has begun, the
    client must wait for it."""

    op: str
    run: Callable[[], Any]
    deadline: float | None = None
    """Latest time for the function to begin in a free thread, by the clock `time.monotonic()`; None sets no limit."""
    undoes: bool = False
    """As in `Ask`."""


@dataclass(frozen=True, slots=True)
class Shield:
    """Step of an operation after which it has effects or uses connections. A blocking client runs the following steps
    in a thread that no signal interrupts."""


SHIELD = Shield()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moved(Generic[T]):
    """Result of an operation that moves bytes or takes a lease, with further values that the client needs."""

    result: T
    nbytes: int
    """Number of bytes in the committed blocks, or in the columns that were read."""
    undo: Callable[[], Steps[Any]] | None = None
    """Operation that takes the result back when its caller was interrupted before it got it; None when there is nothing
    to take back."""


Steps = Generator[Ask | Work | Shield, Any, T]
"""Type of an operation: a generator that yields steps, is sent their results (or thrown their errors), and returns the
operation's result."""
