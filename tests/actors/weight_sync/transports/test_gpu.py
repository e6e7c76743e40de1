"""Tests of transports between GPUs; run `pytest -m gpu tests/actors/weights/transports` on a host with two (no Ray)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, SenderConfig
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.weight_sync.transports.sample_weights import plan_of, publish, weights
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerGroup, outcome

pytestmark = pytest.mark.gpu
OWN = {("engine-0", 0): "cuda:0"}
OTHER = {("engine-0", 0): "cuda:1"}
ALL = {("engine-0", 0): "cuda:0", ("engine-0", 1): "cuda:1", ("engine-1", 0): "cuda:1"}
ROWS = 2_000_000
"""128 MB."""
CASES = [
    pytest.param("ipc", OWN, id="ipc-same-gpu"),
    pytest.param("ipc", OTHER, id="ipc-other-gpu"),
    pytest.param("ipc", ALL, id="ipc-several"),
    pytest.param("collective", OTHER, id="nccl"),
]


@pytest.fixture
def gpu_group() -> Iterator[Callable[..., PeerGroup]]:
    made: list[PeerGroup] = []

    def build(
        kind: str, devices: dict[tuple[str, int], str], timeout_s: float = 30.0, staging: str = "full"
    ) -> PeerGroup:
        if torch.cuda.device_count() < len(set(devices.values()) | {"cuda:0"}):
            pytest.skip("needs two GPUs")
        key = new_key()
        sync = SyncConfig(timeout_s=timeout_s)
        config = SenderConfig(f"gpu{os.getpid()}-{len(made)}", sync, device="cuda:0", key=key)
        keeping = SyncConfig(staging=staging, delta=True)  # pyright: ignore[reportArgumentType]
        receiver = ReceiverConfig("", keeping, "cuda:0", key=key)
        made.append(PeerGroup(kind, config, receiver, devices))
        return made[-1]

    yield build
    for group in made:
        group.close()


@pytest.mark.parametrize(("kind", "devices"), CASES)
def test_versions_arrive_whole(
    gpu_group: Callable[..., PeerGroup], kind: str, devices: dict[tuple[str, int], str]
) -> None:
    peers = gpu_group(kind, devices)
    for version, bucket_bytes, rows in ((1, 64, 50), (2, 1 << 26, ROWS), (3, 1 << 22, ROWS), (4, 256, 50)):
        peers.update(version, bucket_bytes, rows=rows)
    peers.update(5, 256, base=4)


@pytest.mark.parametrize(("kind", "devices"), CASES)
def test_without_staging(gpu_group: Callable[..., PeerGroup], kind: str, devices: dict[tuple[str, int], str]) -> None:
    peers = gpu_group(kind, devices, staging="none")
    for version in (1, 2, 3):
        named = weights(version, ROWS)
        plan = plan_of(named, 1 << 24)
        update = peers.sender.begin(version, plan, peers.groups)
        for peer in peers.workers.values():
            peer.start("arrive", update, version, ROWS)
        publish(peers.sender, plan, named)
        for peer in peers.workers.values():
            assert peer.answer().expect()


@pytest.mark.parametrize(("kind", "devices"), CASES)
def test_a_flipped_byte_is_seen(
    gpu_group: Callable[..., PeerGroup], kind: str, devices: dict[tuple[str, int], str]
) -> None:
    peers = gpu_group(kind, devices, 10.0)
    named = weights(1, ROWS)
    plan = plan_of(named, 1 << 24)

    def flip(bucket: int, buffer: torch.Tensor) -> None:
        if bucket == 3:
            buffer[1000:1001] ^= 4

    update = peers.sender.begin(1, plan, peers.groups)
    for peer in peers.workers.values():
        peer.start("prepare", update)
    sent = outcome(lambda: publish(peers.sender, plan, named, tamper=flip))
    assert sent.error
    peers.sender.abort(sent.error)
    for peer in peers.workers.values():
        assert "bucket 3 of" in peer.answer().error
    peers.update(1, 1 << 24, rows=ROWS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("kind", "devices"), CASES[:2] + CASES[3:])
def test_a_lost_receiver_is_named(
    gpu_group: Callable[..., PeerGroup], kind: str, devices: dict[tuple[str, int], str], how: signal.Signals
) -> None:
    peers = gpu_group(kind, devices, 5.0)
    peers.update(1, 1 << 22, rows=ROWS)
    lost = peers.workers["engine-0", 0]
    named = weights(2, ROWS)
    plan = plan_of(named, 1 << 22)
    lost.start("prepare", peers.sender.begin(2, plan, peers.groups))

    def strike(bucket: int, buffer: torch.Tensor) -> None:
        if bucket == 5:
            os.kill(lost.pid, how)

    sent = outcome(lambda: publish(peers.sender, plan, named, tamper=strike))
    assert "engine-0 worker 0" in sent.error and sent.seconds < 10, sent
    peers.sender.abort(sent.error)
    lost.kill()
    lost.end()
    peers.start_worker("engine-0", 0)
    peers.update(3, 1 << 22, rows=ROWS)
