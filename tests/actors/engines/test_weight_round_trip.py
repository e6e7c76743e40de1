"""Tests of weights on the whole way from a publisher to inboxes: whole, as deltas, late, and after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.factory import TRANSPORT_KINDS, build_sender
from headrace.actors.weight_sync.transports.protocol import (
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightTransferError,
    WeightUpdate,
)
from headrace.dataplane.handle import DataPlaneHandle
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.actors.weight_sync.weight_streams import change, specs, weights

BUCKET_BYTES, TIMEOUT_S = 256, 10.0
ENGINES = [ReceiverGroup("engine 0", 1), ReceiverGroup("engine 1", 2)]


class Ends:
    """A publisher and the inboxes of ENGINES."""

    def __init__(self, kind: str, handle: DataPlaneHandle, folder: Path, *, delta: bool) -> None:
        self.handle = handle
        sync = SyncConfig(timeout_s=TIMEOUT_S, delta=delta, cache=True)
        config = SenderConfig(fresh_run_id(), sync, folder=str(folder), data_plane=handle, key=handle.store.key)
        self.publisher = WeightPublisher(build_sender(kind, config), sync, BUCKET_BYTES)
        self.inboxes = {group: [self.inbox(group, n) for n in range(group.num_workers)] for group in ENGINES}

    def inbox(self, group: ReceiverGroup, worker: int) -> WeightInbox:
        config = ReceiverConfig(group.engine, SyncConfig(delta=True), data_plane=self.handle, key=self.handle.store.key)
        return WeightInbox(config, worker)

    def sync(self, version: int, named: Mapping[str, torch.Tensor], base: int | None = None) -> WeightUpdate:
        """Publish, receive in all inboxes, compare, commit."""
        update = self.publisher.open(version, specs(named), ENGINES, base=base)
        inboxes = [inbox for group in self.inboxes.values() for inbox in group]
        with ThreadPoolExecutor(len(inboxes)) as threads:
            prepared = [threads.submit(inbox.prepare, update) for inbox in inboxes]
            report = self.publisher.publish(update, iter(named.items()))
            for done in prepared:
                done.result(TIMEOUT_S)
        assert report.num_bytes == update.num_bytes
        for inbox in inboxes:
            assert_staged(inbox, version, named)
            inbox.committed(version)
        return update

    def sync_late(self, version: int, named: Mapping[str, torch.Tensor], group: ReceiverGroup) -> WeightInbox:
        """The first worker of an engine that has nothing gets a version that was sent before."""
        late = self.inbox(group, 0)
        update = self.publisher.open(version, specs(named), [group], cached=True)
        assert update.base is None
        with ThreadPoolExecutor(1) as threads:
            prepared = threads.submit(late.prepare, update)
            self.publisher.publish_cached(update)
            prepared.result(TIMEOUT_S)
        assert_staged(late, version, named)
        return late

    def close(self) -> None:
        for group in self.inboxes.values():
            for inbox in group:
                inbox.close()
        self.publisher.close()


def assert_staged(inbox: WeightInbox, version: int, named: Mapping[str, torch.Tensor]) -> None:
    staged = inbox.staged
    assert staged is not None and staged.version == version and list(staged.named) == list(named)
    for name, tensor in named.items():
        got = staged.named[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
        assert got.contiguous().view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist(), name


@pytest.fixture(params=TRANSPORT_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.long
@pytest.mark.parametrize("delta", [False, True])
def test_versions_deltas_and_late_engines(kind: str, delta: bool, handle: DataPlaneHandle, tmp_path: Path) -> None:
    ends = Ends(kind, handle, tmp_path, delta=delta)
    named: Mapping[str, torch.Tensor] = weights()
    for version in range(1, 8):
        update = ends.sync(version, named, base=version - 1)
        assert update.base == (version - 1 if delta and version > 1 else None)
        if version == 4:
            ends.sync_late(4, named, ReceiverGroup("late", 1)).close()
        named = change(named, version)
    ends.close()


def test_a_receiver_that_never_comes_costs_no_gather(kind: str, handle: DataPlaneHandle, tmp_path: Path) -> None:
    """Where the sender needs receivers: the version is sent to the one that came, from the cache."""
    ends = Ends(kind, handle, tmp_path, delta=False)
    ends.sync(1, weights(1))
    named = weights(2)
    update = ends.publisher.open(2, specs(named), [*ENGINES, ReceiverGroup("absent", 1)])
    ends.publisher.abort("an engine is gone")
    gathered = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named.items():
            gathered.append(name)
            yield name, tensor

    with pytest.raises(WeightTransferError, match="version 2, bucket 0: aborted: an engine is gone"):
        ends.publisher.publish(update, gather())
    assert gathered == list(named)
    if kind == "collective":
        ends.sync_late(2, named, ENGINES[0]).close()
    ends.sync(3, weights(3))
    ends.close()
