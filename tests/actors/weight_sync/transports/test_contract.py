"""The contract suite of weight transports between real processes: weights arrive bit for bit, or an error is raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.transports.factory import build_receiver, build_sender
from headrace.actors.weight_sync.transports.protocol import (
    BucketFrame,
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightTransferError,
)
from headrace.tests.actors.train.replica_ranks import data_plane
from headrace.tests.actors.weight_sync.transports.sample_weights import plan_of, publish, weights
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerGroup, outcome

pytestmark = pytest.mark.processes

LASTING = ("ipc", "store", "disk")


@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 20])
def test_versions_arrive_whole_in_all_workers(group: Callable[..., PeerGroup], kind: str, bucket_bytes: int) -> None:
    peers = group(kind)
    for version in (1, 2, 5, 6):
        assert set(peers.update(version, bucket_bytes)) == {"whole"}


def test_many_megabytes(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    for version in (1, 2, 3):
        peers.update(version, 1 << 20, rows=150_000)  # 9.6 MB in tensors of 4.8


def test_any_subset_of_engines(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    peers.update(1, 256)
    peers.update(2, 256, groups=peers.groups[1:])
    peers.update(3, 256, groups=peers.groups[:1])
    peers.update(4, 256)


def test_the_same_version_again(group: Callable[..., PeerGroup], kind: str) -> None:
    """After an update that failed in the middle, and after one that went well."""
    peers = group(kind)
    peers.update(1, 256)
    named = weights(2)
    plan = plan_of(named, 256)
    update = peers.sender.begin(2, plan, peers.groups)
    for peer in peers.of(peers.groups):
        peer.start("prepare", update)
    peers.sender.buffer(0, plan.sizes[0])
    peers.sender.abort("the gather failed")
    for peer in peers.of(peers.groups):
        error = peer.answer().error
        assert error.startswith("WeightTransferError: weights: version 2: engine-")
        # Who comes only after the abort finds nothing in the store, and no reason either.
        assert "the gather failed" in error or kind == "store" and "is not in the store" in error
    with pytest.raises(WeightTransferError, match="aborted: the gather failed"):
        peers.sender.send(BucketFrame(0, "whole", plan.sizes[0], 0))
    peers.update(2, 256)
    peers.update(2, 256)
    peers.update(3, 256)


def test_deltas(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    peers.update(1, 1024)
    # rows=50 of two seeds differ nearly everywhere, so versions of one seed are made to differ in a few places.
    old = weights(1)
    for version in (2, 3):
        named = {name: tensor.detach().clone() for name, tensor in old.items()}
        named["count"][3] += 1
        plan = plan_of(named, 1024)
        update = peers.sender.begin(version, plan, peers.groups, version - 1)
        for peer in peers.of(peers.groups):
            peer.start("prepare", update)
        used = publish(peers.sender, plan, named, old)
        assert set(used) == {"same", "sparse"}
        for peer in peers.of(peers.groups):
            peer.answer().expect()
            assert peer.call("holds_changed", 1, version - 1).expect()
            peer.call("commit", version).expect()
        old = named
    assert set(peers.update(4, 1024, base=None)) == {"whole"}


def test_a_delta_without_its_base_is_refused(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind, 5.0)
    peers.update(1, 256)
    peers.update(2, 256, groups=peers.groups[:1])
    named = weights(3)
    plan = plan_of(named, 256)
    update = peers.sender.begin(3, plan, peers.groups, 2)
    for peer in peers.of(peers.groups):
        peer.start("prepare", update)
    outcome(lambda: publish(peers.sender, plan, named, weights(2)))
    late = peers.of(peers.groups[1:])
    for peer in late:
        assert "refers to version 2, but the engine keeps version 1: send it whole" in peer.answer().error
    for peer in peers.of(peers.groups[:1]):
        peer.answer()
        peer.call("drop", 3).expect()
    peers.update(3, 256)


@pytest.mark.parametrize("kind", LASTING)
def test_who_comes_late_reads_the_last_two_versions(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    updates = []
    for version in (1, 2, 3):
        named = weights(version)
        plan = plan_of(named, 256)
        updates.append(peers.sender.begin(version, plan, peers.groups))
        publish(peers.sender, plan, named)
    late = peers.start_worker("engine-1", 1)
    for update in updates[1:]:
        late.call("prepare", update).expect()
        assert late.call("holds", update.version, 50).expect()
    assert "(any more)" in late.call("prepare", updates[0]).error
    peers.sender.close()
    assert "(any more)" in late.call("prepare", updates[2]).error


def test_without_staging_tensors_come_as_they_are_whole(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    for worker in (0, 1):
        peers.workers["engine-1", worker].call("choose", "none").expect()
    for version, ahead, bucket_bytes in ((1, False, 128), (2, True, 128), (3, True, 1 << 20)):
        named = weights(version)
        plan = plan_of(named, bucket_bytes)
        update = peers.sender.begin(version, plan, peers.groups)
        for peer in peers.of(peers.groups[:1]):
            peer.start("prepare", update)
        for peer in peers.of(peers.groups[1:]):
            peer.start("arrive" if not ahead else "arrive_ahead", update, version, 50)
        publish(peers.sender, plan, named)
        for peer in peers.of(peers.groups[:1]):
            peer.answer().expect()
        for peer in peers.of(peers.groups[1:]):
            assert peer.answer().expect()
        peers.commit(version, peers.groups[:1])


def test_what_goes_wrong_ahead_of_the_reader_is_raised_to_it(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    for worker in (0, 1):
        peers.workers["engine-1", worker].call("choose", "none").expect()
    named = weights(1)
    plan = plan_of(named, 128)
    update = peers.sender.begin(1, plan, peers.groups)
    readers = peers.of(peers.groups[1:])
    for peer in peers.of(peers.groups):
        peer.start("arrive_ahead" if peer in readers else "prepare", update, *((1, 50) if peer in readers else ()))

    def abort(bucket: int, buffer: torch.Tensor) -> None:
        if bucket == 2:
            peers.sender.abort("changed its mind")

    assert "changed its mind" in outcome(lambda: publish(peers.sender, plan, named, tamper=abort)).error
    for peer in peers.of(peers.groups):
        assert "changed its mind" in peer.answer().error


def test_a_drop_ends_a_reception(group: Callable[..., PeerGroup], kind: str) -> None:
    """Before the sender has begun to send, and in the middle."""
    peers = group(kind)
    peers.update(1, 256)
    named = weights(2)
    plan = plan_of(named, 256)
    for sent in (False, True):
        update = peers.sender.begin(2, plan, peers.groups)
        for peer in peers.of(peers.groups):
            peer.start("prepare_and_drop", update, 0.3)
        if sent:
            outcome(lambda: peers.sender.buffer(0, plan.sizes[0]))
        for peer in peers.of(peers.groups):
            answer = peer.answer()
            assert answer.error.startswith("WeightTransferError") and answer.seconds < 5
        peers.sender.abort("dropped")
    peers.update(2, 256)


def test_calls_out_of_order(sender_config: Callable[..., SenderConfig], kind: str) -> None:
    sender = build_sender(kind, sender_config(kind))
    try:
        plan = plan_of(weights(1), 256)
        with pytest.raises(ValueError, match="no update is open"):
            sender.buffer(0, 1)
        update = sender.begin(3, plan, ())
        assert (update.version, update.base, update.kind, update.num_bytes) == (3, None, kind, sum(plan.sizes))
        assert len(repr(update)) < 400
        publish(sender, plan, weights(1))
        with pytest.raises(ValueError, match="got version 2, expected 3, the newest, or one above it"):
            sender.begin(2, plan, ())
        with pytest.raises(ValueError, match="got base 4 of version 4"):
            sender.begin(4, plan, (), 4)
        sender.begin(4, plan, ())
        with pytest.raises(WeightTransferError, match="got bucket 1, but bucket 0 was never sent"):
            sender.send(BucketFrame(1, "same", 0, 0))
        sender.begin(4, plan, ())
        with pytest.raises(
            WeightTransferError, match="sender: the version is incomplete: buckets .0, 1, 2, 3, 4. of .* are missing"
        ):
            sender.finish()
    finally:
        sender.close()
        sender.close()


def test_an_engine_that_takes_no_part(group: Callable[..., PeerGroup], kind: str) -> None:
    peers = group(kind)
    update = peers.sender.begin(1, plan_of(weights(1), 256), (ReceiverGroup("engine-1", 1),))
    for number, (engine, worker) in enumerate((("engine-0", 0), ("engine-1", 1))):
        error = peers.workers[engine, worker].call("prepare", update).error
        text = f"{engine} worker {worker}: this receiver has no part in the update, which is for engine-1 (1)"
        assert text in error, number


def test_unknown_kinds(sender_config: Callable[..., SenderConfig]) -> None:
    with pytest.raises(ValueError, match="sync.transport: got 'nccl', expected one of collective, ipc, store, disk"):
        build_sender("nccl", sender_config("ipc"))
    with pytest.raises(ValueError, match="sync.transport: got 'nccl'"):
        build_receiver("nccl", ReceiverConfig("e", SyncConfig()), 0)
    for kind, what in (("store", "a data plane"), ("disk", "a folder"), ("collective", "the run's key")):
        with pytest.raises(ValueError, match=f"'{kind}' needs {what}, but the sender got none"):
            build_sender(kind, SenderConfig("run"))


def test_more_than_there_is_room_for(sender_config: Callable[..., SenderConfig], kind: str) -> None:
    if kind == "collective":
        return  # holds two buckets, whatever the model's size
    huge = plan_of({f"w{n}": torch.empty((1 << 40,), device="meta") for n in range(40)}, 1 << 42)
    sender = build_sender(kind, sender_config(kind))
    try:
        with pytest.raises(OSError, match=str(sum(huge.sizes))):
            sender.begin(1, huge, ())
        publish_small = plan_of(weights(1), 256)
        sender.begin(1, publish_small, ())
        publish(sender, publish_small, weights(1))
    finally:
        sender.close()


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
