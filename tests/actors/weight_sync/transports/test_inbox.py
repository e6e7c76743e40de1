"""Tests of the inbox of an engine's process: what it keeps, what it frees and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.ipc import IpcSender
from headrace.actors.weight_sync.transports.ipc_base import lease_holders
from headrace.actors.weight_sync.transports.protocol import (
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightTransferError,
    WeightUpdate,
)
from headrace.tests.actors.weight_sync.transports.sample_weights import equal, plan_of, publish, weights

GROUPS = (ReceiverGroup("e", 1),)


@pytest.fixture
def sender(sender_config: Callable[..., SenderConfig]) -> Iterator[IpcSender]:
    made = build_sender("ipc", sender_config("ipc", 5.0))
    assert isinstance(made, IpcSender)
    yield made
    made.close()


def sent(sender: IpcSender, version: int, base: int | None = None, bucket_bytes: int = 256) -> WeightUpdate:
    named = weights(version)
    plan = plan_of(named, bucket_bytes)
    update = sender.begin(version, plan, GROUPS, base)
    publish(sender, plan, named, None if base is None else weights(base))
    return update


def test_a_staged_version_is_the_sender_s_memory_and_read_only_in_effect(sender: IpcSender) -> None:
    inbox, other = (
        WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0),
        WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0),
    )
    update = sent(sender, 1)
    for box in (inbox, other):
        assert box.staging == "auto"
        box.prepare(update)
        assert box.staging == "full" and box.staged is not None and box.staged.stream is not None
    assert inbox.staged is not None and other.staged is not None
    inbox.staged.named["embed"].zero_()
    assert equal(other.staged.named, weights(1))
    inbox.close()
    other.close()


def test_leases_end_with_what_is_let_go_of(sender: IpcSender) -> None:
    for keep_base in (True, False):
        inbox = WeightInbox(ReceiverConfig("e", SyncConfig(delta=keep_base)), 0)
        first = 10 if keep_base else 20
        one = sent(sender, first)
        inbox.prepare(one)
        assert len(lease_holders(Path(one.location))) == 1
        assert f"e worker 0 (pid {os.getpid()})" in lease_holders(Path(one.location))
        inbox.committed(first)
        assert inbox.staged is None and len(lease_holders(Path(one.location))) == keep_base
        two = sent(sender, first + 1)
        inbox.prepare(two)
        inbox.drop(first)  # not the one that is prepared
        inbox.committed(first)
        assert inbox.staged is not None and inbox.staged.version == first + 1
        inbox.committed(first + 1)
        assert not lease_holders(Path(one.location))
        inbox.prepare(sent(sender, first + 2))
        inbox.drop(first + 2)
        assert inbox.staged is None
        inbox.close()
        assert not lease_holders(Path(two.location))


def test_a_delta_after_a_drop_refers_to_what_is_served(sender: IpcSender) -> None:
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0)
    inbox.prepare(sent(sender, 1))
    inbox.committed(1)
    inbox.prepare(sent(sender, 2, base=1))
    inbox.drop(2)
    inbox.prepare(sent(sender, 3, base=1))
    assert inbox.staged is not None and equal(inbox.staged.named, weights(3))
    inbox.committed(3)
    with pytest.raises(WeightTransferError, match="refers to version 1, but the engine keeps version 3: send it whole"):
        inbox.prepare(sent(sender, 4, base=1))
    inbox.prepare(sent(sender, 5, base=3))
    inbox.committed(5)
    with pytest.raises(WeightTransferError, match="refers to version 5, which has another layout in the engine"):
        inbox.prepare(sent(sender, 6, base=5, bucket_bytes=64))
    inbox.close()


def test_a_base_that_changed_since_it_came_is_found_and_sent_whole(sender: IpcSender) -> None:
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0)
    inbox.prepare(sent(sender, 1))
    inbox.committed(1)
    inbox.prepare(sent(sender, 2, base=1))  # its memory is the inbox's own
    inbox.committed(2)
    before, after = weights(2), weights(2)
    after["head"][49, 7] += 1
    for version, damaged in ((3, "embed"), (4, "head")):  # the first is sent as `same`, the second as `sparse`
        update = sender.begin(version, plan_of(after, 256), GROUPS, 2)
        assert set(publish(sender, plan_of(after, 256), after, before)) == {"same", "sparse"}
        assert inbox._base is not None
        kept = inbox._base.named[damaged][49, :1].view(torch.uint8)
        kept[0] ^= 1
        with pytest.raises(WeightTransferError, match="is damaged in version 2, which was kept here.*send it whole"):
            inbox.prepare(update)
        assert inbox.staged is None
        kept[0] ^= 1
    inbox.prepare(update)
    assert inbox.staged is not None and equal(inbox.staged.named, after)
    inbox.prepare(sent(sender, 5))
    assert inbox.staged is not None and equal(inbox.staged.named, weights(5))
    inbox.close()


def test_without_staging_there_is_no_base(sender: IpcSender) -> None:
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(staging="none", delta=True)), 0)
    update = sent(sender, 1)
    with pytest.raises(ValueError, match="version 1 was not joined"):
        next(inbox.arriving(update))
    inbox.prepare(update)
    assert inbox.staged is None
    names = [name for tensors in inbox.arriving(update) for name, _ in tensors]
    assert sorted(names) == sorted(weights(1))
    with pytest.raises(WeightTransferError, match="the update refers to version 1, but nothing is staged here"):
        inbox.prepare(sent(sender, 2, base=1))
    inbox.close()
    with pytest.raises(RuntimeError, match="the inbox is closed"):
        inbox.prepare(update)


def test_damage_in_shared_memory_is_named(sender: IpcSender) -> None:
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0)
    update = sent(sender, 1)
    slot = next(sender.folder.glob("slot-*"))
    damaged = bytearray(slot.read_bytes())
    damaged[256 + 3] ^= 1
    slot.write_bytes(damaged)
    with pytest.raises(WeightTransferError, match="version 1: e worker 0: bucket 1 of .* is damaged"):
        inbox.prepare(update)
    os.truncate(slot, 100)
    with pytest.raises(WeightTransferError, match="slot-.* has 100 bytes, expected"):
        inbox.prepare(update)
    Path(update.location).write_bytes(b"noise")
    with pytest.raises(WeightTransferError, match="these 5 bytes are not an update's status file"):
        inbox.prepare(update)
    inbox.close()


def test_a_version_withdrawn_while_it_is_read_is_refused(sender: IpcSender) -> None:
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(staging="none", delta=True)), 0)
    update = sent(sender, 1)
    inbox.prepare(update)
    arriving = inbox.arriving(update)
    next(arriving)
    sent(sender, 2)
    sent(sender, 3)
    with pytest.raises(WeightTransferError, match="the sender has withdrawn the update: version 3 takes its place"):
        list(arriving)
    inbox.close()


def test_files_on_disk_are_safetensors(sender_config: Callable[..., SenderConfig]) -> None:
    sender = build_sender("disk", sender_config("disk"))
    named = weights(1)
    plan = plan_of(named, 256)
    update = sender.begin(1, plan, GROUPS)
    publish(sender, plan, named)
    files = sorted(Path(update.location).glob("bucket-*.safetensors"))
    assert [safetensors.torch.load_file(file)["payload"].numel() for file in files] == list(plan.sizes)
    broken = bytearray(files[2].read_bytes())
    broken[-1] ^= 1
    files[2].write_bytes(broken)
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0)
    with pytest.raises(WeightTransferError, match="bucket 2 of .* is damaged"):
        inbox.prepare(update)
    files[2].write_bytes(b"noise")
    with pytest.raises(WeightTransferError, match="bucket 2 of .*: .*bucket-000002.safetensors cannot be read"):
        inbox.prepare(update)
    files[2].unlink()
    with pytest.raises(WeightTransferError, match="bucket 2 of .* never came, though the sender finished"):
        inbox.prepare(update)
    inbox.close()
    sender.close()


def test_two_senders_of_one_run(sender_config: Callable[..., SenderConfig]) -> None:
    for kind in ("ipc", "disk"):
        config = sender_config(kind)
        first = build_sender(kind, config)
        with pytest.raises(ValueError, match="a running run owns the folder .*-weights; choose another"):
            build_sender(kind, config)
        first.close()
        build_sender(kind, config).close()


def test_payloads_do_not_move_when_they_lie_in_place(sender: IpcSender) -> None:
    inbox = WeightInbox(ReceiverConfig("e", SyncConfig(delta=True)), 0)
    inbox.prepare(sent(sender, 1, bucket_bytes=64))
    staged = inbox.staged
    assert staged is not None
    begin, size = staged.memory.data_ptr(), staged.memory.nbytes
    assert all(begin <= t.data_ptr() < begin + size for t in staged.named.values() if t.numel())
    assert all(t.is_contiguous() for t in staged.named.values())
    torch.testing.assert_close(staged.named["strided"], weights(1)["strided"].detach())
    inbox.close()
