"""One copy a host: the first receiver of a host passes the payloads on, and the next replaces it when it is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.actors.weight_sync.transports.control_link import (
    GroupPlace,
    Hello,
    Link,
    LinkListener,
    Note,
    ReceiverTracker,
)
from headrace.actors.weight_sync.transports.host_ring import HostRing, Landing, OwnRing
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup
from headrace.tests.actors.weight_sync.transports.conftest import KEY
from headrace.tests.actors.weight_sync.transports.test_faults import BUCKET_BYTES, ROWS, at_once, one_update
from headrace.tests.actors.weight_sync.transports.transport_peers import PeerGroup
from headrace.tests.waiting import wait_until

# ------------------------------------------------------------------ the ring


@pytest.fixture
def ring() -> Iterator[OwnRing]:
    ring = OwnRing(100, 2)
    yield ring
    ring.close()


def test_a_slot_is_free_again_when_all_readers_are_through(ring: OwnRing) -> None:
    reader = HostRing.open(ring.location)
    for number in (0, 1, 2, 3):
        assert ring.has_room(number) == (number < 2)
        if number < 2:
            ring.slot(number, 100).fill_(number + 7)
            assert not Landing(reader, number).ended(0.0)
            ring.publish(number)
            assert Landing(reader, number).ended(0.0) and set(reader.slot(number, 100).tolist()) == {number + 7}
    reader.through(0, 0)
    assert not ring.has_room(2)
    reader.through(1, 0)
    assert ring.has_room(2) and not ring.has_room(3)
    ring.gone.add(1)
    reader.through(0, 1)
    assert ring.has_room(3)


def test_a_ring_is_used_again_only_when_no_reader_can_still_use_it(ring: OwnRing) -> None:
    def end(*readers: int) -> None:
        ring.publish(4)
        for reader in readers:
            ring.through(reader, 4)
        ring.whole = True

    end(0, 1)
    assert not ring.begin_again(101, 2) and not ring.begin_again(100, 1)
    assert ring.begin_again(99, 2) and ring.num_landed == 0 and ring.has_room(1)
    end(0)
    assert not ring.begin_again(100, 2)
    ring.gone.add(1)
    assert not ring.begin_again(100, 2)
    other = OwnRing(1, 1)
    other.publish(0)
    other.through(0, 0)
    assert not other.begin_again(1, 1)  # The update was not completed.
    other.close()


@pytest.mark.processes
def test_a_ring_ends_with_its_process(ring: OwnRing) -> None:
    code = "import sys\nfrom headrace.actors.weight_sync.transports.host_ring import OwnRing\nr = OwnRing(8, 1)\n"
    code += "r.slot(0, 8).fill_(5)\nprint(r.location, flush=True)\nsys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with other:
        assert other.stdout is not None
        location = other.stdout.readline().strip()
        reader = HostRing.open(location)
        other.kill()
    assert reader.slot(0, 8).tolist() == [5] * 8
    with pytest.raises(OSError):
        HostRing.open(location)
    pid, number, token = ring.location.split()
    with pytest.raises(ValueError, match="belongs to another process"):
        HostRing.open(f"{pid} {number} {int(token) ^ 1}")
    ring.close()
    with pytest.raises(OSError):
        HostRing.open(ring.location)


# ------------------------------------------------------------------ places


def test_the_first_receiver_of_each_host_is_a_member_of_the_group() -> None:
    listener = LinkListener("127.0.0.1", KEY)
    tracker = ReceiverTracker(1, (ReceiverGroup("a", 2), ReceiverGroup("b", 3)), listener, 1.0)
    tracker.hosts = {1: "x", 2: "y", 3: "x", 4: "", 5: "y"}
    assert tracker.places(shared=True) == {
        1: GroupPlace(1, 4, (3,)),
        3: GroupPlace(0, 4, (3,)),
        2: GroupPlace(2, 4, (5,)),
        5: GroupPlace(0, 4, (5,)),
        4: GroupPlace(3, 4),
    }
    assert tracker.places(shared=False)[5] == GroupPlace(5, 6)
    listener.close()


@pytest.mark.parametrize("passed", [False, True])
def test_readers_of_a_receiver_that_failed_go_on_if_it_passed_everything_on(passed: bool) -> None:
    listener = LinkListener("127.0.0.1", KEY)
    tracker = ReceiverTracker(1, (ReceiverGroup("a", 2),), listener, 5.0)
    links: list[Link] = []
    for rank in (1, 2):
        links.append(Link.connect("127.0.0.1", listener.port, KEY, 5.0))
        links[-1].send(Hello(1, rank, "", "x"))
    wait_until(lambda: not tracker.poll() and len(tracker.hosts) == 2, "both receivers", 5)
    tracker.places(shared=True)
    links[0].send(Note("failed", "a bucket is damaged"))
    if passed:
        links[0].send(Note("passed"))
    links[0].close()
    wait_until(lambda: not tracker.poll() and 1 not in tracker._links, "the end of the first receiver", 5)
    assert (tracker.stranded, tracker.lost) == (not passed, not passed) and not tracker.over
    links[1].send(Note("done"))
    wait_until(lambda: not tracker.poll() and tracker.over, "the reader", 5)
    tracker.close()
    links[1].close()
    listener.close()


# ------------------------------------------------------------------ two engines on each of two hosts


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["engine-0", "engine-1"])
def test_a_lost_reader_harms_no_other_and_a_lost_first_receiver_is_replaced(
    group: Callable[..., PeerGroup], engine: str
) -> None:
    peers = group("collective", 30.0)
    peers.update(1, BUCKET_BYTES)
    victim, lost = (engine, 1), peers.workers[engine, 1]

    def strike(bucket: int, buffer: torch.Tensor) -> None:
        if bucket == 3:
            lost.kill()

    sent, got = one_update(peers, 2, tamper=strike)
    assert f"{engine} worker 1 is lost" in sent.error and at_once(sent), sent
    assert got.pop(victim) is None
    for who, answer in got.items():
        assert answer is not None and at_once(answer)
        if engine == "engine-0":
            assert "the sender has ended the update: " in answer.error and f"{engine} worker 1 is lost" in answer.error
        else:
            assert not answer.error and peers.workers[who].call("holds", 2, ROWS).expect(), answer
    lost.end()
    peers.update(3, BUCKET_BYTES, groups=[one for one in peers.groups if one.engine != engine])
    peers.start_worker(*victim)
    peers.update(4, BUCKET_BYTES)


@pytest.mark.processes
def test_who_cannot_read_the_memory_of_another_gets_a_copy_of_its_own(group: Callable[..., PeerGroup]) -> None:
    peers = group("collective", 30.0)
    peers.workers["engine-1", 1].call("forbid_rings").expect()
    sent, got = one_update(peers, 1)
    assert "engine-1 worker 1" in sent.error and "cannot be read: [Errno 13]" in sent.error
    for who, answer in got.items():
        assert answer is not None and bool(answer.error) == (who == ("engine-1", 1)), answer
    peers.update(2, BUCKET_BYTES)
    peers.workers["engine-1", 1].end()
