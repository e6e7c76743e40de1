"""A Ray that is started here does not wait for a port that another Ray on this host may have."""

from __future__ import annotations

import pytest
import ray
from ray._private import ray_constants, services

from headrace.tests.process_pool import start_ray


@pytest.mark.processes
def test_the_agent_takes_any_free_port() -> None:
    start_ray()
    context = ray.get_runtime_context()
    node = services.get_node(context.gcs_address, context.get_node_id())
    assert node["dashboard_agent_listen_port"] not in (0, ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)
