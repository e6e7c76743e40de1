"""Fixtures of senders and receivers for every transport, with a check that they leave nothing behind."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.factory import TRANSPORT_KINDS
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, SenderConfig
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.train.replica_ranks import data_plane
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerGroup, end_resting

_NUMBER = itertools.count()
KEY = new_key()
BUCKET_BYTES = 1 << 20


@pytest.fixture(params=TRANSPORT_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each transport in turn."""
    return request.param


@pytest.fixture(scope="package", autouse=True)
def resting_workers() -> Iterator[None]:
    yield
    end_resting()


@pytest.fixture(scope="package")
def plane() -> Iterator[DataPlaneHandle]:
    """A data plane over shared memory that other processes can join."""
    with data_plane("shm") as handle:
        yield handle


@pytest.fixture
def sender_config(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., SenderConfig]:
    """Makes the configuration of a sender of a kind, of its own run."""

    def build(kind: str, timeout_s: float = 30.0) -> SenderConfig:
        return SenderConfig(
            run_id=f"test{os.getpid()}-w{next(_NUMBER)}",
            sync=SyncConfig(timeout_s=timeout_s),
            folder=str(tmp_path / "weights"),
            data_plane=request.getfixturevalue("plane") if kind == "store" else None,
            key=KEY,
        )

    return build


@pytest.fixture
def group(tmp_path: Path, sender_config: Callable[..., SenderConfig]) -> Iterator[Callable[..., PeerGroup]]:
    """Makes groups; afterwards nothing of them is left."""
    with ExitStack() as stack:

        def build(kind: str, timeout_s: float = 30.0) -> PeerGroup:
            config = sender_config(kind, timeout_s)
            sync = SyncConfig(staging="full", delta=True)
            made = PeerGroup(kind, config, ReceiverConfig("", sync, "cpu", config.data_plane, KEY))
            stack.callback(made.close)
            return made

        yield build
    assert not list(Path("/dev/shm").glob(f"*headrace-test{os.getpid()}-w*"))
    assert not list(tmp_path.glob("weights/*"))
