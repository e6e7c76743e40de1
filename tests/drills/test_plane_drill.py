"""The data plane under signals at random moments, and under processes that are killed and stopped at random."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import open_data_plane
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.interrupted_calls import OPERATIONS, Interrupter, OwnError
from headrace.tests.drills.plane_model import run_model

pytestmark = pytest.mark.drill
SIGNALS = 1000


@pytest.mark.parametrize("error", [KeyboardInterrupt, OwnError])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_thousand_signals_leave_nothing(kind: str, error: type[BaseException]) -> None:
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": 32})
    config = DataPlaneConfig(store=store, timeout_s=5.0, lease_s=600.0, reserve_s=60.0)
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane:
        handle = plane.handle.over_sockets() if kind == "tcp" else plane.handle
        with contextlib.closing(Interrupter(handle, seed=len(kind))) as interrupter:
            for operation in OPERATIONS:
                tally = interrupter.run(operation, error, SIGNALS)
                assert tally.interrupted == SIGNALS and tally.others == [], operation
                assert interrupter.leftovers() == {}, operation


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "operations"), [("shm", 20_000), ("tcp", 20_000)])
def test_random_operations_of_processes_that_are_killed_and_stopped(kind: str, operations: int, tmp_path: Path) -> None:
    print(run_model(kind, operations, 1, tmp_path))
