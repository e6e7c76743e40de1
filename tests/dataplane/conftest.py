"""Shared by the data plane's tests: one Ray, a data plane per store, a check that no shared memory is left behind."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.tests.dataplane.rows import SCHEMA

if TYPE_CHECKING:
    from headrace.dataplane.factory import DataPlane

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns about its coming default otherwise

KINDS = ("local", "shm", "ray", "simple")
NUMBER = itertools.count()


def shared_memory_folders() -> set[str]:
    """Names of the folders that runs have in /dev/shm."""
    return {path.name for path in Path("/dev/shm").glob("*headrace-*")}


@pytest.fixture(scope="session", autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    before = shared_memory_folders()
    yield
    left = shared_memory_folders() - before
    assert not left, left


@pytest.fixture(scope="session")
def ray_session(no_shared_memory_left: None) -> Iterator[None]:
    """Ray of this test run, ended with it. Logical CPUs only: the tests' actors ask for none."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest, no_shared_memory_left: None) -> str:
    """Each store in turn."""
    if request.param in ("ray", "simple"):
        request.getfixturevalue("ray_session")
    return request.param


@pytest.fixture(scope="session")
def plane(kind: str) -> Iterator[DataPlane]:
    """A data plane in this process, with room and time."""
    from headrace.dataplane.factory import open_data_plane

    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 64, "num_units": 2})
    with open_data_plane(
        DataPlaneConfig(store=store, timeout_s=20, block_rows=8, integrity="verify"), in_process=True
    ) as plane:
        yield plane


@pytest.fixture(scope="session")
def tight_plane(kind: str) -> Iterator[DataPlane]:
    """One with room for 1 MiB, and leases of 0.5 s."""
    from headrace.dataplane.factory import open_data_plane

    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 1})
    with open_data_plane(DataPlaneConfig(store=store, timeout_s=20, lease_s=0.5), in_process=True) as plane:
        yield plane


@pytest.fixture
def partition() -> str:
    """A name no other test has."""
    return f"part{next(NUMBER)}"


@pytest.fixture
def client(plane: DataPlane, partition: str) -> Iterator[Any]:
    """A client, and `partition` registered: tasks `train` and `eval`, groups of 4."""
    from headrace.dataplane.factory import connect

    client = connect(plane.handle, name="test")
    client.register(partition, SCHEMA, ("train", "eval"), group_size=4)
    yield client
    client.clear(partition)
    status = client.status()
    assert (status.bytes_used, status.bytes_reserved, status.store_bytes) == (0, 0, 0), "a test left bytes behind"
    client.close()
