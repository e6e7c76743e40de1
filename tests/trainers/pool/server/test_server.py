"""Tests what `headrace pool status` prints about a pool."""

from __future__ import annotations

from headrace.trainers.pool.server.server import status_lines
from headrace.trainers.pool.state.status import PooledGpu, PoolStatus


def test_status_tells_where_each_gpu_is_unless_they_are_numbers_only() -> None:
    reserved = (PooledGpu("north", "n", 0, "GPU-a", 1), PooledGpu("south", "s", 0, "0", 0))
    status = PoolStatus("p", 5.0, ("a train", "idle"), (), (), (), 0, 77, reserved)
    assert status_lines(status)[1:] == ["  GPU 0    north 0: a train", "  GPU 1    south 0: idle"]
    numbers = PoolStatus("p", 5.0, ("a train", "idle"), (), (), (), 0, 77, ())
    assert status_lines(numbers)[1:] == ["  GPU 0    a train", "  GPU 1    idle"]
