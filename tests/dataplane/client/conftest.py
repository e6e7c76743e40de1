"""A data plane over the store `local` for each test of the client, and a client of it with the partition `p`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.factory import DataPlane, connect
from headrace.tests.dataplane.client.local_plane import SCHEMA, small_plane


@pytest.fixture
def plane() -> Iterator[DataPlane]:
    with small_plane() as plane:
        yield plane


@pytest.fixture
def client(plane: DataPlane) -> DataPlaneClient:
    client = connect(plane.handle)
    client.register("p", SCHEMA, ("a",), group_size=2)
    return client
