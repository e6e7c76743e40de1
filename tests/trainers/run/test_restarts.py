"""Which failures send a run back to its last checkpoint, and which end it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ray.exceptions import RayActorError, RayTaskError

from headrace.dataplane.errors import ClaimTimeout, DirectoryLost, StoreLost
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.errors import UserError
from headrace.trainers.run import restarts
from headrace.trainers.run.restarts import lost_process

ALIVE = {"directory": os.getpid()}


@pytest.mark.parametrize(
    "error",
    [
        ActorFailed("train: train worker 1 (pid 7 on here) died", died=True),
        ActorFailed("train: no answer within 300 s from train worker 1"),
        ActorFailed("rollout 0 failed", DirectoryLost("gone", op="put")),
        DirectoryLost("gone", op="claim"),
        StoreLost("gone", op="get"),
        RayActorError(),
    ],
)
def test_a_lost_process_is_one(error: Exception) -> None:
    assert lost_process(error, ALIVE) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        ActorFailed("rollout 0 failed: TypeError: of a reward", TypeError("of a reward")),
        ActorFailed("train worker 0 failed", ValueError("not finite")),
        ClaimTimeout("16 of 64 rows", op="claim"),
        UserError("no such model"),
        RuntimeError("in the driver itself"),
        RayTaskError("train", "a traceback", ValueError("not finite")),
    ],
)
def test_an_error_of_its_own_is_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "DEATH_S", 0.0)  # nobody is dying here
    assert lost_process(error, ALIVE) is None


@pytest.mark.processes
def test_an_error_beside_a_dead_process_is_of_its_death() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    error = ActorFailed("train worker 0 failed: connection closed by peer", RuntimeError("connection closed by peer"))
    lost = lost_process(error, {**ALIVE, "train worker 1": dead.pid})
    assert lost == f"train worker 1 (pid {dead.pid}) died: {error}"
