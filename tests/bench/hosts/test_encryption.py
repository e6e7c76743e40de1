"""The cost of authentication and of TLS is measured over real connections."""

from __future__ import annotations

import pytest

from headrace.bench.hosts.encryption import COSTS, measure_encryption


@pytest.mark.processes
def test_costs_are_measured_over_sockets() -> None:
    told: list[str] = []
    costs = measure_encryption(2, told.append)
    assert tuple(costs) == COSTS and all(0.05 < cost < 50 for cost in costs.values())
    assert told
