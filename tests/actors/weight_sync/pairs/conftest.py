"""Closes the trainer ranks and engine workers of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headrace.tests.actors.weight_sync.pairs.group_members import Members


@pytest.fixture
def members(request: pytest.FixtureRequest) -> Iterator[Callable[..., Members]]:
    """Function that builds members of the kind that the test's module names."""
    with ExitStack() as stack:

        def build(*args: Any, **kwargs: Any) -> Members:
            made = request.module.KIND(*args, **kwargs)
            stack.callback(made.close)
            return made

        yield build
