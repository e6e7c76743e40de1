"""Shared by the data plane's tests: one Ray, a data plane per store, a check that no shared memory is left behind."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.testing.data_plane import SCHEMA, fresh_run_id
from headrace.tests import process_pool
from headrace.tests.dataplane.planes import OTHER_STORES, as_seen, num_directories, store_config
from headrace.tests.dataplane.stubborn import STUBBORN

os.environ.setdefault("OMP_NUM_THREADS", "1")

WITH_PROCESSES = ("tcp", *OTHER_STORES)
KINDS = ("local", "shm", *(pytest.param(kind, marks=pytest.mark.processes) for kind in WITH_PROCESSES))
NUMBER = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-all` what a test of the contract repeats needlessly over another store's code. Most of the
    contract is kept by the directory and the client, whatever the store."""
    for item in items:
        kind = item.callspec.params.get("kind") if isinstance(item, pytest.Function) and "[" in item.name else None
        if kind in OTHER_STORES:
            marker = item.get_closest_marker("also_over")
            if marker is None or kind not in marker.args:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package", autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """For data planes opened with `fresh_run_id`: other runs may be at work on this machine."""
    yield
    assert not list(Path("/dev/shm").glob(f"*headrace-test{os.getpid()}-*"))


@pytest.fixture(scope="package")
def ray_session(no_shared_memory_left: None) -> None:
    """The test process's Ray, for fixtures of the whole package."""
    process_pool.start_ray()


@pytest.fixture(scope="package")
def mooncake_library() -> None:
    """Skips where Mooncake cannot be loaded."""
    from headrace.dataplane.stores.mooncake_client import HOW_TO_GET_IT

    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"{error}; {HOW_TO_GET_IT}")


@pytest.fixture(scope="package", params=KINDS)
def kind(request: pytest.FixtureRequest, no_shared_memory_left: None) -> str:
    """Each store in turn."""
    if request.param in ("ray", "simple"):
        request.getfixturevalue("ray_session")
    if request.param == "mooncake":
        request.getfixturevalue("mooncake_library")
    return request.param


@pytest.fixture(scope="package")
def plane(kind: str) -> Iterator[DataPlane]:
    """A data plane in this process, with room and time."""
    store = store_config(kind, capacity_mib=64, num_units=2)
    config = DataPlaneConfig(
        store=store,
        directory_shards=num_directories(kind),
        trusted_network=True,
        timeout_s=20,
        block_rows=8,
        integrity="verify",
        samplers=(STUBBORN,),
    )
    with as_seen(kind, open_data_plane(config, run_id=fresh_run_id(), in_process=True)) as plane:
        yield plane


@pytest.fixture(scope="package")
def tight_plane(kind: str) -> Iterator[DataPlane]:
    """One with room for 1 MiB, and leases of 0.5 s."""
    config = DataPlaneConfig(store=store_config(kind, capacity_mib=1), trusted_network=True, timeout_s=20, lease_s=0.5)
    with as_seen(kind, open_data_plane(config, run_id=fresh_run_id(), in_process=True)) as plane:
        yield plane


@pytest.fixture
def partition() -> str:
    """A name no other test has."""
    return f"part{next(NUMBER)}"


@pytest.fixture
def client(plane: DataPlane, partition: str) -> Iterator[Any]:
    """A client, and `partition` registered: tasks `train` and `eval`, groups of 4."""
    client = connect(plane.handle, name="test")
    client.register(partition, SCHEMA, ("train", "eval"), group_size=4)
    yield client
    client.clear(partition)
    status = client.status()
    assert (status.bytes_used, status.bytes_reserved, status.store_bytes) == (0, 0, 0), "a test left bytes behind"
    client.close()
