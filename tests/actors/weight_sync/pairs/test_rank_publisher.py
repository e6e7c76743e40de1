"""Checks `RankPublisher`: several ranks send parts of the weights to several inboxes over TCP on one host."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.actors.adapters.spec import AdapterSpec
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.pairs import pair_receiver, rank_publisher
from headrace.actors.weight_sync.pairs.planned_receiver import (
    PlannedReceiver,
    PlannedStream,
    _WeightMemory,
    missing_part,
)
from headrace.actors.weight_sync.pairs.rank_publisher import RankPublisher
from headrace.actors.weight_sync.plan.regions import held, place
from headrace.actors.weight_sync.stream import SendReport
from headrace.actors.weight_sync.transports.protocol import (
    ReceiverConfig,
    ReceiverGroup,
    WeightTransferError,
    WeightUpdate,
)
from headrace.codecs.weights import conversion

Wire = dict[str, Any]
"""Arguments of `RankPublisher` that choose how buckets travel."""
KEY = b"k" * 32
SPECS = {
    "a": (torch.bfloat16, (37, 300)),
    "norm": (torch.float32, (5,)),
    "big": (torch.bfloat16, (700, 1024)),
    "scale": (torch.float32, ()),
}
BUCKET_BYTES = 1 << 20
GROUP: Wire = {"group": torch.device("cpu")}
WIRES = pytest.mark.parametrize("wire", [{}, GROUP, GROUP | {"shares_gpus": True}], ids=["tcp", "gloo", "shared gpus"])


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SPECS.items()}


class Ranks:
    """Ranks that hold shards of float32 weights, as fsdp does, and the engines' inboxes."""

    def __init__(
        self,
        num: int,
        engines: Sequence[str],
        timeout_s: float = 20.0,
        wire: Wire | None = None,
        **given: Any,
    ) -> None:
        """given: other settings of `sync`."""
        sync = SyncConfig(timeout_s=timeout_s, **given)
        self.regions = [
            [
                part
                for name, (_, shape) in SPECS.items()
                for part in held(name, shape, [(0, num, rank)] if shape else [])
            ]
            for rank in range(num)
        ]
        self.senders = [
            RankPublisher(rank, "127.0.0.1", KEY, sync, BUCKET_BYTES, SPECS, self.regions, **wire or {})
            for rank in range(num)
        ]
        addresses = [sender.addresses[0] for sender in self.senders]
        for sender in self.senders:
            sender.addresses = addresses
        self.groups = [ReceiverGroup(name, 1) for name in engines]
        self.inboxes = [WeightInbox(ReceiverConfig(name, sync, key=KEY), 0) for name in engines]
        self.pool = ThreadPoolExecutor(num + len(engines))

    def send(self, rank: int, update: WeightUpdate, source: dict[str, torch.Tensor]) -> Future[SendReport]:
        local = {
            region.tensor: source[region.weight][tuple(slice(a, b) for a, b in region.box)].float().contiguous()
            for region in self.regions[rank]
        }
        return self.pool.submit(self.senders[rank].send, update, local.__getitem__)

    def start(
        self, version: int, source: dict[str, torch.Tensor], base: int | None = None
    ) -> tuple[WeightUpdate, list[Future[SendReport]]]:
        update = self.senders[0].open(version, self.groups, base)
        return update, [self.send(rank, update, source) for rank in range(len(self.senders))]

    def prepare(self, update: WeightUpdate) -> list[Future[None]]:
        return [self.pool.submit(inbox.prepare, update) for inbox in self.inboxes]

    def sync(self, version: int, source: dict[str, torch.Tensor], base: int | None = None) -> list[SendReport]:
        """Bring all engines to a version, and return what the ranks report."""
        update, sends = self.start(version, source, base)
        for prepared in self.prepare(update):
            prepared.result(20)
        for inbox in self.inboxes:
            expect_equal(staged(inbox), source)
            inbox.committed(version)
        reports = [send.result(20) for send in sends]
        assert all(report.num_bytes == update.num_bytes for report in reports)
        return reports

    def close(self) -> None:
        for part in (*self.inboxes, *self.senders):
            part.close()
        self.pool.shutdown()


@contextmanager
def ranks(num: int, *engines: str, timeout_s: float = 20.0, wire: Wire | None = None, **given: Any) -> Iterator[Ranks]:
    made = Ranks(num, engines, timeout_s, wire, **given)
    try:
        yield made
    finally:
        made.close()


def staged(inbox: WeightInbox) -> dict[str, torch.Tensor]:
    assert inbox.staged is not None
    return inbox.staged.named


def expect_equal(got: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(source)
    for name, tensor in source.items():
        assert got[name].dtype == tensor.dtype and got[name].equal(tensor), name


@WIRES
@pytest.mark.parametrize("num", [1, 3])
def test_all_ranks_send_what_they_hold_and_versions_follow(num: int, wire: Wire) -> None:
    with ranks(num, "one", "two", wire=wire) as run:
        for version in (1, 2):
            reports = run.sync(version, source := weights(version))
            # Before the first version, the ranks do not know that the engines share memory.
            size = sum(tensor.nbytes for tensor in source.values()) * (2 if wire or version == 1 else 1)
            assert size <= sum(report.bytes_sent for report in reports) < size + 10_000


@WIRES
def test_without_staging_each_weight_comes_once_and_is_freed(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    """Weights that are not needed come, too, without memory of their own: loaders want all names."""
    held_bytes: list[int] = []
    original = _WeightMemory.drop

    def drop(self: _WeightMemory, names: Sequence[str]) -> None:
        held_bytes.append(sum(one.nbytes for one in self._taken.values()))
        original(self, names)

    monkeypatch.setattr(_WeightMemory, "drop", drop)
    needs = tuple(place(name, ((0, 30), (0, 300)), name, SPECS[name][1]) for name in ("a",))
    needs += (place("norm", ((0, 5),), "norm", (5,)), place("scale", (), "scale", ()))
    with ranks(2, "one", wire=wire, staging="none") as run:
        [inbox] = run.inboxes
        for version in (1, 2, 3, 4):
            source = weights(version)
            places = {
                "a": torch.zeros(37, 300).bfloat16(),
                "big": torch.zeros(3),
                "scale": torch.zeros((), device="meta"),
            }
            update, sends = run.start(version, source)
            run.prepare(update)[0].result(20)
            assert inbox.staged is None
            got: dict[str, torch.Tensor] = {}
            for whole in inbox.arriving(update, places):
                assert not got.keys() & {name for name, _ in whole}
                got |= {name: tensor.clone() for name, tensor in whole}
            assert got.keys() == SPECS.keys() and got["big"].shape == (700, 1024)
            assert got["a"].equal(places["a"]) and got["a"][:30].equal(source["a"][:30])
            assert got["norm"].equal(source["norm"]) and got["scale"].equal(source["scale"])
            assert got["big"].equal(source["big"]) == (version < 4) and places["a"].equal(source["a"]) == (version < 4)
            for send in sends:
                send.result(20)
            inbox.needs = needs if version == 2 else inbox.needs  # They are told with version 3.
            if version == 3:
                held_bytes.clear()
        assert max(held_bytes) < 1000, "weights at their places, and those that are not needed, take no memory"


@WIRES
def test_without_staging_a_slow_loader_is_waited_for(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    """Otherwise, all weights would come into memory of their own before the first is loaded."""
    specs = {f"layer {number}": (torch.float32, (1000,)) for number in range(64)}
    monkeypatch.setattr(sys.modules[__name__], "SPECS", specs)
    monkeypatch.setattr(sys.modules[__name__], "BUCKET_BYTES", 4 * 4096)
    with ranks(1, "one", wire=wire, staging="none") as run:
        [inbox], source, most = run.inboxes, weights(1), 0
        update, [send] = run.start(1, source)
        run.prepare(update)[0].result(20)
        assert inbox._arriving is not None
        stream, names = inbox._arriving[2], list[str]()
        assert isinstance(stream, PlannedStream)
        for whole in inbox.arriving(update):
            assert stream._by_weight is not None
            while not send.done() and not stream._arrived.full():
                pass  # The receiver goes on as far as it can.
            most = max(most, len(stream._by_weight._taken))
            assert all(tensor.equal(source[name]) for name, tensor in whole)
            names += [name for name, _ in whole]
        assert sorted(names) == sorted(specs) and most < len(specs) / 3
        send.result(20)


@WIRES
def test_a_worker_that_has_said_what_it_needs_is_sent_no_more(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    """As do the workers of a tensor-parallel engine. After an error, everything is sent, and then less again."""
    numbers = itertools.count()
    monkeypatch.setattr(pair_receiver, "host_name", lambda: f"host {next(numbers)}")
    needed = {
        name: tensor[: max(1, len(tensor) // 2)] if tensor.ndim else tensor for name, tensor in weights(0).items()
    }
    boxes = {name: tuple((0, size) for size in tensor.shape) for name, tensor in needed.items()}
    needs = tuple(place(name, boxes[name], name, shape) for name, (_, shape) in SPECS.items())
    size, part = (sum(tensor.nbytes for tensor in some.values()) for some in (weights(0), needed))
    with ranks(2, "one", "two", wire=wire) as run:
        run.inboxes[1].needs = needs

        def sync(version: int) -> int:
            source = weights(version)
            update, sends = run.start(version, source)
            for prepared in run.prepare(update):
                prepared.result(20)
            expect_equal(staged(run.inboxes[0]), source)
            for name, tensor in staged(run.inboxes[1]).items():
                box = tuple(slice(*one) for one in boxes[name])
                assert tensor.shape == source[name].shape and tensor[box].equal(source[name][box]), name
            left_out = missing_part(update, "two", 0, held_regions)
            assert not missing_part(update, "one", 0, held_regions) and not missing_part(update, "two", 0, needs)
            assert left_out in ("", "a[[0, 37], [0, 300]]")
            sent = sum(send.result(20).bytes_sent for send in sends)
            assert bool(left_out) == (sent < 2 * size)
            for inbox in run.inboxes:
                inbox.committed(version)
            return sent

        held_regions = [region for name, (_, shape) in SPECS.items() for region in held(name, shape)]
        assert 2 * size <= sync(1) < 2 * size + 10_000
        assert size + part <= sync(2) < size + part + 10_000
        update, sends = run.start(3, weights(3))
        for sender in run.senders:
            sender.abort("it failed", update)
        assert all(send.exception(20) for send in sends)
        assert 2 * size <= sync(4)
        assert sync(5) < size + part + 10_000


def test_what_engines_have_said_that_left_is_forgotten_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_publisher, "_MOST_WORKERS", 2)
    with ranks(1, "one", "two") as run:
        run.sync(1, weights(1))
        for name in ("three", "four"):
            for inbox in run.inboxes:
                inbox.close()
            run.groups = [ReceiverGroup(name, 1)]
            run.inboxes = [WeightInbox(ReceiverConfig(name, SyncConfig(), key=KEY), 0)]
            run.sync(2, weights(2))
        assert [*run.senders[0]._places] == ["three worker 0", "four worker 0"]


def test_nothing_but_the_declared_function_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            cut = source.float().contiguous().view(torch.int32) & -(1 << 16)
            target.copy_(source if source.dtype == target.dtype else cut.view(torch.float32))

    monkeypatch.setattr(conversion, "_copy_all", truncate)
    masters = {name: torch.randn(shape) for name, (_, shape) in SPECS.items()}
    expected = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in SPECS.items()}
    truncate([*expected.values()], [*masters.values()])
    assert not expected["big"].equal(masters["big"].bfloat16())
    with ranks(2, "one") as run:
        update, sends = run.start(1, masters)
        [prepared] = run.prepare(update)
        prepared.result(20)
        expect_equal(staged(run.inboxes[0]), expected)
        size = sum(one.nbytes for one in expected.values())
        assert size <= sum(send.result(20).bytes_sent for send in sends) < size + 10_000


def test_a_worker_that_cannot_read_the_memory_of_another_gets_a_copy_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("it must not be read")

    size = sum(tensor.nbytes for tensor in weights(0).values())
    with ranks(2, "one", "two") as run:

        def sync(version: int) -> int:
            return round(sum(report.bytes_sent for report in run.sync(version, weights(version))) / size)

        assert [sync(1), sync(2)] == [2, 1]
        with monkeypatch.context() as patched:
            patched.setattr(pair_receiver, "SlotReader", refuse)
            update, sends = run.start(3, weights(3))
            prepared = run.prepare(update)
            assert all(one.exception(20) for one in prepared)
            told = "".join(str(send.exception(20)) for send in sends)
        assert re.search(r"(one|two) worker 0, which takes buckets .*: its memory cannot be read: it must not", told)
        assert [sync(4), sync(5)] == [2, 2]


def test_a_worker_that_has_moved_to_another_host_refuses_a_plan_for_the_old_one() -> None:
    with ranks(1, "one") as run:
        for version in (1, 2):
            update, [send] = run.start(version, weights(version))
            [prepared] = run.prepare(update)
            if version == 1:
                prepared.result(20)
                run.inboxes[0]._receivers["pairs"]._pairs.place = "another"  # pyright: ignore[reportAttributeAccessIssue]
                send.result(20)
            else:
                with pytest.raises(WeightTransferError, match="another host than in the version before"):
                    prepared.result(20)
                run.senders[0].abort("an engine failed", update)


def test_rank_0_sends_an_adapter_that_it_has_gathered() -> None:
    """Its digests are all kept, and the other ranks take part without a byte."""
    spec = AdapterSpec(4, 8.0, "base")
    whole = [region for name, (_, shape) in SPECS.items() for region in held(name, shape)]
    sync, source = SyncConfig(timeout_s=20.0), weights(1)
    with ranks(2, "one", "two") as run:
        for sender in run.senders:
            sender.close()
        run.senders = [
            RankPublisher(rank, "127.0.0.1", KEY, sync, BUCKET_BYTES, SPECS, [whole, []], adapter=spec)
            for rank in range(2)
        ]
        for sender in run.senders:
            sender.addresses = [other._sender.address for other in run.senders]
        update = run.senders[0].open(1, run.groups)
        assert update.adapter == spec
        streams = iter(source.items()), iter((name, one.new_empty(0)) for name, one in source.items())
        pairs = zip(run.senders, streams, strict=True)
        sends = [run.pool.submit(sender.send_gathered, update, stream) for sender, stream in pairs]
        for prepared in run.prepare(update):
            prepared.result(20)
        first, second = (send.result(20) for send in sends)
        assert first.bytes_sent >= 2 * sum(one.nbytes for one in source.values()) and not second.bytes_sent
        for inbox in run.inboxes:
            expect_equal(staged(inbox), source)
        assert {one.name for one in run.senders[0].digests(1).weights} == set(source)


def test_a_damaged_bucket_is_refused_and_the_next_version_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.actors.weight_sync.pairs import pair_sender

    with ranks(2, "one", "two") as run:
        with monkeypatch.context() as patched:
            patched.setattr(pair_sender, "checksum", lambda payload: 1)
            update, sends = run.start(1, weights(1))
            for prepared in run.prepare(update):
                with pytest.raises(WeightTransferError, match=r"sender \d at .*: bucket \d+ is damaged"):
                    prepared.result(20)
            for send in sends:
                with pytest.raises(WeightTransferError, match="is damaged") as caught:
                    send.result(20)
                assert set(caught.value.engines) <= {"one", "two"}
        assert all(inbox.staged is None for inbox in run.inboxes)
        assert len(run.sync(2, weights(2))) == 2


def test_a_receiver_that_never_joins_is_named_by_every_rank() -> None:
    with ranks(2, "one", "two", timeout_s=1.0) as run:
        update, sends = run.start(1, weights(1))
        prepared = run.pool.submit(run.inboxes[0].prepare, update)
        for send in sends:
            with pytest.raises(WeightTransferError, match="not here: two worker 0 did not join") as caught:
                send.result(20)
            assert caught.value.engines == ("two",)
        with pytest.raises(WeightTransferError):
            prepared.result(20)


def test_an_abort_ends_senders_and_receivers() -> None:
    with ranks(2, "one", "two") as run:
        update, sends = run.start(1, weights(1))
        prepared = run.pool.submit(run.inboxes[0].prepare, update)
        for sender in run.senders:
            sender.abort("the user wants it", update)
        for send in sends:  # The second one may hear first that the receiver gave up.
            with pytest.raises(WeightTransferError, match="aborted: the user wants it|gave up waiting"):
                send.result(20)
        with pytest.raises(WeightTransferError):
            prepared.result(20)


def test_a_version_that_is_dropped_while_it_arrives_is_not_staged() -> None:
    with ranks(2, "one") as run:
        update = run.senders[0].open(1, run.groups)
        prepared = run.pool.submit(run.inboxes[0].prepare, update)
        send = run.send(0, update, weights(1))
        while not run.senders[0].sent:
            assert not prepared.done() and not send.done()
        run.inboxes[0].drop(1)
        with pytest.raises(WeightTransferError):
            prepared.result(20)
        with pytest.raises(WeightTransferError, match="one worker 0"):
            send.result(20)


@WIRES
def test_a_stream_that_is_closed_before_it_is_read_takes_nothing(wire: Wire) -> None:
    """Another thread may drop the version at that moment. The sender must not believe that the engine has it."""
    with ranks(1, "one", wire=wire) as run:
        update, [send] = run.start(1, weights(1))
        stream = run.inboxes[0]._receiver(update.kind).open(update)
        stream.close()
        with pytest.raises(WeightTransferError, match="the stream was closed"):
            next(iter(stream))
        run.senders[0].abort("nobody takes it", update)
        assert isinstance(send.exception(20), WeightTransferError)
        run.sync(2, weights(2))


@WIRES
def test_an_update_does_not_begin_while_the_one_before_is_received(wire: Wire) -> None:
    """One that was dropped can hang for a while, for example in a connection to a host that is gone."""
    with ranks(1, "one", timeout_s=2.0, wire=wire) as run:
        update, [send] = run.start(1, weights(1))
        receiver = run.inboxes[0]._receiver(update.kind)
        assert isinstance(receiver, PlannedReceiver)
        with receiver._turn:
            [prepared] = run.prepare(update)
            with pytest.raises(WeightTransferError, match="the update before it is still being received"):
                prepared.result(20)
            assert isinstance(send.exception(20), WeightTransferError)
        run.sync(2, weights(2))


def test_a_rank_that_fails_while_it_gathers_is_not_waited_for() -> None:
    with ranks(2, "one", timeout_s=60.0) as run:
        update = run.senders[0].open(1, run.groups)
        send, [prepared] = run.send(0, update, weights(1)), run.prepare(update)
        with pytest.raises(RuntimeError), run.senders[1].ending(update):
            raise RuntimeError("a shard is gone")
        with pytest.raises(WeightTransferError, match="RuntimeError: a shard is gone"):
            prepared.result(20)
        assert isinstance(send.exception(20), WeightTransferError)
        run.sync(2, weights(2))
