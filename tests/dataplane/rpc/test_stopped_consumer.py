"""A consumer in another process keeps its rows while it is at work, and loses them when it is stopped."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import ClaimTimeout
from headrace.dataplane.factory import connect, open_data_plane
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.rpc.served import Served
from headrace.tests.process_pool import suspend
from headrace.tests.waiting import wait_until

LEASE_S = 1.0
CONSUMER = """
import base64, pickle, sys
from headrace.dataplane.errors import LeaseLost
from headrace.dataplane.factory import connect
with connect(pickle.loads(base64.b64decode(sys.argv[1]))) as client:
    held = client.claim("p", "a", ["y"], 2, timeout_s=60)
    print("claimed", flush=True)
    sys.stdin.readline()
    try:
        client.release(held, "a", "done")
    except LeaseLost as error:
        print("lost", len(error.keys), flush=True)
"""


@pytest.mark.processes
def test_rows_of_a_stopped_consumer_return_and_those_of_a_slow_one_do_not() -> None:
    served = Served(lease_s=LEASE_S)
    with contextlib.closing(served), connect(served.handle) as client:
        client.register("p", Schema([Field("y", Kind.PER_SAMPLE, torch.float32)]), ("a",))
        client.put("p", ["k.0", "k.1"], {"y": torch.zeros(2)})
        handle = base64.b64encode(pickle.dumps(served.handle)).decode()
        command = [sys.executable, "-c", CONSUMER, handle]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as consumer:
            assert consumer.stdin is not None and consumer.stdout is not None
            try:
                assert consumer.stdout.readline() == "claimed\n"
                while client.status().oldest_lease_s < 2 * LEASE_S:
                    assert client.status().leased_rows == 2, "it is slow, not dead"
                    time.sleep(0.05)
                with pytest.raises(ClaimTimeout, match="2 leased"):
                    client.claim("p", "a", ["y"], 1, timeout_s=0)
                os.kill(consumer.pid, signal.SIGSTOP)
                again = client.claim("p", "a", ["y"], 2, timeout_s=30)
                os.kill(consumer.pid, signal.SIGCONT)
                consumer.stdin.write("\n")
                consumer.stdin.flush()
                assert consumer.stdout.readline() == "lost 2\n"
                client.release(again, "a", "done")
            finally:
                consumer.kill()


@pytest.mark.slow
@pytest.mark.processes
def test_a_directory_that_was_stopped_for_longer_than_a_lease_ends_none(caplog: pytest.LogCaptureFixture) -> None:
    config = DataPlaneConfig(store=StoreConfig(kind="shm", capacity_mib=16), lease_s=LEASE_S)
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane, connect(plane.handle) as client:
        client.register("p", Schema([Field("y", Kind.PER_SAMPLE, torch.float32)]), ("a",))
        client.put("p", ["k.0"], {"y": torch.zeros(1)})
        held = client.claim("p", "a", ["y"], 1)
        suspend(plane.serving_pid())
        try:
            wait_until(lambda: "1 leases could not be renewed, and may have run out" in caplog.text, timeout_s=30)
        finally:
            os.kill(plane.serving_pid(), signal.SIGCONT)
        with pytest.raises(ClaimTimeout, match="1 leased"):
            client.claim("p", "a", ["y"], 1, timeout_s=3 * LEASE_S)
        client.release(held, "a", "done")
