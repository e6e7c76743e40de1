"""Tests of the `store` transport over the reference store and TransferQueue's storage units."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, SenderConfig
from headrace.tests.actors.train.replica_ranks import data_plane
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerGroup

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("store", [pytest.param("local", marks=pytest.mark.slow), "simple"])
def test_versions_arrive_whole(store: str, tmp_path: Path) -> None:
    with data_plane(store) as handle:
        config = SenderConfig(f"test{os.getpid()}-w-{store}", SyncConfig(timeout_s=30.0), data_plane=handle)
        peers = PeerGroup("store", config, ReceiverConfig("", SyncConfig(staging="full", delta=True), "cpu", handle))
        try:
            for version in (1, 2, 3):
                peers.update(version, 1 << 18, rows=10_000)
            peers.update(4, 1 << 18, rows=10_000, base=3)
        finally:
            peers.close()
