"""Tests of the publisher: weights arrive bit for bit, failures leave no rank waiting, and memory stays bounded."""

from __future__ import annotations

import multiprocessing
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.publisher import SendReport, WeightPublisher
from headrace.actors.weight_sync.transports.protocol import BucketFrame, ReceiverGroup, WeightTransferError
from headrace.codecs import messages
from headrace.codecs.weights.buckets import checksum
from headrace.tests.actors.weight_sync.memory_sender import MemorySender
from headrace.tests.actors.weight_sync.weight_streams import Gather, change, specs, weights

ENGINES = [ReceiverGroup("engine 0", 1), ReceiverGroup("engine 1", 2)]
NUM_BUCKETS = 11
FAILURES = [*(f"{call} {bucket}" for bucket in range(NUM_BUCKETS) for call in ("buffer", "send")), "finish"]
NUM_TENSORS, TENSOR_BYTES, BUCKET_BYTES = 11, 24 << 20, 16 << 20


def publisher(sender: MemorySender, *, delta: bool = False, cache: bool = False) -> WeightPublisher:
    return WeightPublisher(sender, SyncConfig(timeout_s=2.0, delta=delta, cache=cache), 256)


def publish(
    target: WeightPublisher, version: int, named: Mapping[str, torch.Tensor], base: int | None = None
) -> SendReport:
    update = target.open(version, specs(named), ENGINES, base=base)
    assert update.version == version and update.receivers == tuple(ENGINES)
    gather = Gather(named)
    report = target.publish(update, iter(gather))
    assert gather.exhausted
    return report


def publish_again(target: WeightPublisher, version: int) -> SendReport:
    return target.publish_cached(target.open(version, specs(weights()), ENGINES[:1], cached=True))


def assert_landed(sender: MemorySender, version: int, named: Mapping[str, torch.Tensor]) -> None:
    got = sender.named(version)
    assert list(got) == list(named)
    for name, tensor in named.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor.detach()), name


@pytest.mark.parametrize("bucket_bytes", [64, 256, 1 << 20])
@pytest.mark.parametrize("cache", [False, True])
def test_what_is_streamed_arrives(bucket_bytes: int, cache: bool) -> None:
    sender = MemorySender()
    target = WeightPublisher(sender, SyncConfig(timeout_s=2.0, cache=cache), bucket_bytes)
    for version in (1, 2, 5):
        report = publish(target, version, weights(version))
        assert_landed(sender, version, weights(version))
        assert report.num_bytes == report.bytes_sent == sender.plans[version].num_bytes
        assert (report.num_whole, report.num_same, report.num_sparse) == (len(sender.frames), 0, 0)
        assert min(report.gather_s, report.fill_s, report.send_s) > 0
    assert messages.decode(messages.encode(report), SendReport) == report
    target.close()
    assert sender.closed and not sender.aborts


def test_buckets_leave_while_later_tensors_are_gathered() -> None:
    """Each is sent once it is full, not when all are."""
    sender, named = MemorySender(), weights()
    target = publisher(sender)
    update = target.open(1, specs(named), ENGINES)
    sent_before = {}

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named.items():
            sent_before[name] = len(sender.frames)
            yield name, tensor

    target.publish(update, gather())
    assert list(sent_before.values()) == [0, 6, 9, 9, 10, 10]


@pytest.mark.parametrize("fails_at", FAILURES)
def test_a_sender_that_fails(fails_at: str) -> None:
    """Wherever it does, siblings are not left in a gather, receivers get the error, and the next version arrives."""
    sender = MemorySender(fails_at=fails_at)
    target, named = publisher(sender), weights()
    gather = Gather(named)
    update = target.open(1, specs(named), ENGINES)
    with pytest.raises(WeightTransferError, match=f"version 1, {fails_at}: engine 1 is gone"):
        target.publish(update, iter(gather))
    assert gather.exhausted and 1 not in sender.landed
    assert len(sender.aborts) == 1 and "engine 1 is gone" in sender.aborts[0]
    assert sender.calls[-1] == fails_at
    publish(target, 2, weights(2))
    assert_landed(sender, 2, weights(2))


@pytest.mark.parametrize("fails_at", FAILURES)
@pytest.mark.parametrize("delta", [False, True])
def test_a_sender_that_fails_costs_no_second_gather_with_a_cache(fails_at: str, delta: bool) -> None:
    sender = MemorySender()
    target = publisher(sender, delta=delta, cache=True)
    publish(target, 1, weights(1))
    sender.fails_at = fails_at
    gather = Gather(weights(2))
    update = target.open(2, specs(weights(2)), ENGINES, base=1)
    assert update.base == (1 if delta else None)
    with pytest.raises(WeightTransferError, match=f"version 2, {fails_at}: engine 1 is gone"):
        target.publish(update, iter(gather))
    assert gather.exhausted and 2 not in sender.landed and len(sender.aborts) == 1
    report = publish_again(target, 2)
    assert report.num_whole == NUM_BUCKETS and report.bytes_sent == report.num_bytes and report.gather_s == 0
    assert_landed(sender, 2, weights(2))


def test_weights_that_are_not_as_planned() -> None:
    planned = weights()
    swapped = dict(reversed(weights().items()))
    other_shape = {**weights(), "half": torch.zeros(334).bfloat16()}
    other_dtype = {**weights(), "half": torch.zeros(333)}
    missing = {name: tensor for name, tensor in weights().items() if name != "flags"}
    more = {**weights(), "more": torch.zeros(3)}
    for given, message in (
        (swapped, "weight 'flags' came after 0 others, expected 'embed'"),
        (other_shape, r"weight 'half': got torch.bfloat16 \[334\], expected bfloat16 \[333\] as planned"),
        (other_dtype, r"weight 'half': got torch.float32 \[333\], expected bfloat16 \[333\]"),
        (missing, "5 of 6 weights came; 'flags' is the first that is missing"),
        (more, "weight 'more' came after 6 others, expected 'no more'"),
    ):
        sender = MemorySender()
        target = publisher(sender, cache=True)
        publish(target, 1, weights(1))
        gather = Gather(given)
        update = target.open(2, specs(planned), ENGINES)
        with pytest.raises(ValueError, match=message):
            target.publish(update, iter(gather))
        assert gather.exhausted and len(sender.aborts) == 1 and 2 not in sender.landed
        with pytest.raises(ValueError, match="version 2 is not in the bucket cache, which holds: 1"):
            publish_again(target, 2)
        publish_again(target, 1)


def test_a_gather_that_fails() -> None:
    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", weights()["embed"]
        raise FloatingPointError("by chance")

    sender = MemorySender()
    target = publisher(sender)
    update = target.open(1, specs(weights()), ENGINES)
    with pytest.raises(FloatingPointError, match="by chance"):
        target.publish(update, gather())
    assert sender.aborts == ["FloatingPointError: by chance"]


def test_an_update_that_is_not_open() -> None:
    sender = MemorySender()
    target, named = publisher(sender, cache=True), weights()
    first = target.open(1, specs(named), ENGINES)
    second = target.open(2, specs(named), ENGINES)
    assert sender.aborts == ["begun again"]
    gather = Gather(named)
    with pytest.raises(ValueError, match="version 1, cached: False, is not open; the open update is version 2"):
        target.publish(first, iter(gather))
    assert gather.exhausted
    with pytest.raises(ValueError, match="2, cached: True, is not open; the open update is version 2, cached: False"):
        target.publish_cached(second)
    target.publish(second, iter(Gather(named)))
    with pytest.raises(ValueError, match="version 2, cached: False, is not open; the open update is none"):
        target.publish(second, iter(Gather(named)))
    with pytest.raises(ValueError, match="version 2 is to be sent again, but the trainer keeps no versions"):
        publish_again(publisher(MemorySender()), 2)


def test_ten_deltas_are_the_whole() -> None:
    sender = MemorySender()
    target = publisher(sender, delta=True)
    named: Mapping[str, torch.Tensor] = weights()
    publish(target, 1, named)
    kinds = set()
    for version in range(2, 12):
        named = change(named, version)
        report = publish(target, version, named, base=version - 1)
        assert sender.calls.count(f"begin {version} base {version - 1}") == 1
        kinds |= {frame.encoding for frame in sender.frames}
        assert report.num_whole + report.num_same + report.num_sparse == NUM_BUCKETS and report.num_same > 0
        assert report.bytes_sent == sum(frame.nbytes for frame in sender.frames) < report.num_bytes
        got = sender.named(version)
        for name, tensor in named.items():
            assert got[name].view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist(), name
    assert kinds == {"whole", "same", "sparse"}


def test_a_base_that_the_cache_has_not_is_not_used() -> None:
    sender = MemorySender()
    target = publisher(sender, delta=True)
    assert publish(target, 1, weights(1), base=None).num_whole == NUM_BUCKETS
    assert publish(target, 2, weights(1), base=0).num_whole == NUM_BUCKETS  # engines are not at what was sent last
    assert publish(target, 3, weights(1), base=2).num_same == NUM_BUCKETS
    assert publish(publisher(MemorySender(), cache=True), 4, weights(1), base=3).num_whole == NUM_BUCKETS
    sender.fails_at = "send 2"
    with pytest.raises(WeightTransferError):
        publish(target, 4, weights(4), base=3)
    assert publish(target, 5, weights(5), base=3).num_whole == NUM_BUCKETS  # the cache's newest is 4
    assert_landed(sender, 5, weights(5))


def test_a_lasting_sender_is_not_sent_to_again() -> None:
    sender = MemorySender(lasting=True)
    target = publisher(sender, cache=True)
    publish(target, 1, weights(1))
    sender.calls.clear()
    update = target.open(1, specs(weights()), ENGINES[1:], cached=True)
    assert update.receivers == tuple(ENGINES[1:]) and update.location == "here"
    report = target.publish_cached(update)
    assert report.bytes_sent == report.num_whole == 0 and report.num_bytes == sender.plans[1].num_bytes
    assert sender.calls == []
    with pytest.raises(ValueError, match="version 0 is to be sent again, but the trainer keeps no versions"):
        publish_again(target, 0)


def test_a_lasting_delta_is_sent_again_whole() -> None:
    """Who comes late has no base."""
    sender = MemorySender(lasting=True)
    target = publisher(sender, delta=True)
    publish(target, 1, weights(1))
    publish(target, 2, change(weights(1), 2), base=1)
    assert any(frame.encoding != "whole" for frame in sender.frames)
    assert publish_again(target, 2).num_whole == NUM_BUCKETS
    assert sender.calls.count("begin 2 base None") == 1
    publish_again(target, 2)
    assert sender.calls.count("begin 2 base None") == 1  # now it is there whole


def test_a_version_is_sent_again_while_training_goes_on() -> None:
    """From another thread; the next version waits for its turn, and is whole."""
    sender = MemorySender()
    target = publisher(sender, cache=True)
    publish(target, 1, weights(1))
    sender.gate = threading.Event()
    again: list[SendReport] = []
    thread = threading.Thread(target=lambda: again.append(publish_again(target, 1)))
    thread.start()
    assert sender.waiting.wait(30)
    model = torch.nn.Linear(4, 4)  # what the main thread does meanwhile
    model(torch.ones(2, 4)).sum().backward()
    assert not again
    sender.gate.set()
    publish(target, 2, weights(2))
    thread.join(30)
    assert again[0].num_whole == NUM_BUCKETS
    assert_landed(sender, 1, weights(1))
    assert_landed(sender, 2, weights(2))


def test_a_turn_is_waited_for_at_most_so_long() -> None:
    sender = MemorySender()
    target = WeightPublisher(sender, SyncConfig(timeout_s=0.2, cache=True), 256)
    publish(target, 1, weights(1))
    sender.gate = threading.Event()
    thread = threading.Thread(target=publish_again, args=(target, 1))
    thread.start()
    assert sender.waiting.wait(30)
    with pytest.raises(WeightTransferError, match=r"waited [\d.]+ s to open version 2: .* to publish version 1"):
        target.open(2, specs(weights()), ENGINES)
    sender.gate.set()
    thread.join(30)
    publish(target, 2, weights(2))


@pytest.mark.parametrize("cache", [False, True])
def test_abort_from_another_thread(cache: bool) -> None:
    sender = MemorySender()
    target, named = publisher(sender, cache=cache), weights()
    target.abort("nothing is open")
    sender.gate = threading.Event()
    update = target.open(1, specs(named), ENGINES)
    gather = Gather(named)
    errors: list[WeightTransferError] = []

    def send() -> None:
        with pytest.raises(WeightTransferError) as caught:
            target.publish(update, iter(gather))
        errors.append(caught.value)

    thread = threading.Thread(target=send)
    thread.start()
    assert sender.waiting.wait(30)
    target.abort("engine 1 is late")
    target.abort("engine 1 is late")
    sender.gate.set()
    thread.join(30)
    assert re.search("version 1, bucket 0: aborted: engine 1 is late", str(errors[0]))
    assert gather.exhausted and sender.aborts == ["engine 1 is late"] and 1 not in sender.landed
    if cache:
        publish_again(target, 1)
        assert_landed(sender, 1, named)


def test_memory_is_reserved_before_anything_is_announced() -> None:
    sender = MemorySender()
    target = WeightPublisher(sender, SyncConfig(timeout_s=2.0, delta=True), 1 << 40)
    huge = {"w": (torch.float32, (1 << 45,))}
    for call in (lambda: target.reserve(huge), lambda: target.open(1, huge, ENGINES)):
        with pytest.raises(ValueError, match=r"need \d+ bytes, more than 80% of the \d+ available"):
            call()
    assert sender.calls == []
    WeightPublisher(sender, SyncConfig(timeout_s=2.0), 1 << 40).reserve(huge)  # keeps nothing


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_weights(device: str) -> None:
    """Into buffers on the host and on the GPU: whole, as deltas, and again from the cache."""
    sender = MemorySender(device=device)
    target = publisher(sender, delta=True)
    named: Mapping[str, torch.Tensor] = weights()
    for version in range(1, 6):
        update = target.open(version, specs(named), ENGINES, base=version - 1)
        report = target.publish(update, iter(Gather({name: tensor.cuda() for name, tensor in named.items()})))
        assert (report.bytes_sent < report.num_bytes) == (version > 1)
        got = {name: tensor.cpu() for name, tensor in sender.named(version).items()}
        assert all(
            got[name].view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)) for name, tensor in named.items()
        )
        named = change(named, version)
    assert publish_again(target, 5).num_whole == NUM_BUCKETS


def test_a_version_that_was_only_cached_is_sent_later() -> None:
    sender = MemorySender()
    target = publisher(sender, cache=True)
    gather = Gather(weights(3))
    target.cache(3, specs(weights(3)), iter(gather))
    assert gather.exhausted and 3 not in sender.plans, "nothing was sent"
    publish_again(target, 3)
    assert_landed(sender, 3, weights(3))
    publish(target, 4, weights(4))
    assert_landed(sender, 4, weights(4))
    target.close()


def test_weights_that_cannot_be_cached_are_read_to_their_end() -> None:
    """The other ranks take part in gathering them."""
    uncached, gather = publisher(MemorySender()), Gather(weights())
    with pytest.raises(ValueError, match="version 1 is to be cached, but the trainer keeps no versions"):
        uncached.cache(1, specs(weights()), iter(gather))
    assert gather.exhausted
    target, gather = publisher(MemorySender(), cache=True), Gather(dict(reversed(weights().items())))
    with pytest.raises(ValueError, match="version 1: got weight .*, expected"):
        target.cache(1, specs(weights()), iter(gather))
    assert gather.exhausted
    with pytest.raises(ValueError, match="not in the bucket cache"):
        publish_again(target, 1)


class DiscardingSender(MemorySender):
    """Has the two buffers in flight, and forgets what was in them."""

    def send(self, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None = None) -> None:
        self._step(f"send {frame.bucket}", frame.bucket)
        memory = self._ring[frame.bucket % 2]
        assert memory is not None and checksum(memory[: frame.nbytes]) == frame.checksum
        self.frames.append(frame)
        self._buckets.append(memory[:0])


def _measure(queue: multiprocessing.Queue[int]) -> None:
    """Puts by how much publishing a model of 264 MiB raised this process's peak memory."""
    torch.set_num_threads(1)
    named = {f"w{index}": (torch.uint8, (TENSOR_BYTES,)) for index in range(NUM_TENSORS)}
    # One memory for all tensors: what malloc makes of frees and allocations by turns is not to be measured.
    lent = torch.zeros(TENSOR_BYTES, dtype=torch.uint8)
    sender = DiscardingSender()
    target = WeightPublisher(sender, SyncConfig(timeout_s=2.0), BUCKET_BYTES)
    update = target.open(1, named, [ReceiverGroup("engine 0", 1)])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is used now
    before = _status_bytes("VmRSS")
    target.publish(update, ((name, lent.fill_(index)) for index, name in enumerate(named)))
    assert len(sender.frames) == -(-NUM_TENSORS * TENSOR_BYTES // BUCKET_BYTES)
    queue.put(_status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) << 10


@pytest.mark.processes
def test_extra_memory_is_two_buckets() -> None:
    """Beside the tensor in hand."""
    context = multiprocessing.get_context("spawn")  # a forked process shares memory with its parent
    queue: multiprocessing.Queue[int] = context.Queue()
    process = context.Process(target=_measure, args=(queue,))
    process.start()
    extra = queue.get(timeout=120)
    process.join(60)
    assert 2 * BUCKET_BYTES <= extra <= 2 * BUCKET_BYTES + (4 << 20)
