"""With `sync.delta`, every rank sends only what has changed of its part, to receivers that have the version before."""

from __future__ import annotations

import pytest
import torch

from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.pairs.pair_sender import PairSender
from headrace.actors.weight_sync.pairs.sent_parts import SentParts
from headrace.actors.weight_sync.plan.regions import place
from headrace.actors.weight_sync.stream import SendReport
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, WeightTransferError
from headrace.tests.actors.weight_sync.pairs.test_rank_publisher import SPECS, Ranks, ranks, staged, weights

SIZE = sum(tensor.nbytes for tensor in weights(0).values())
Tensors = dict[str, torch.Tensor]


def changed(source: Tensors, num: int = 3) -> Tensors:
    """A next version in which a few elements of one weight are others."""
    made = {name: tensor.clone() for name, tensor in source.items()}
    made["big"].view(-1)[:num] += 1
    made["scale"] += 1
    return made


def sent(reports: list[SendReport]) -> int:
    return sum(report.bytes_sent for report in reports)


def kept(inbox: WeightInbox) -> torch.Tensor:
    assert inbox._base is not None
    return inbox._base.memory


def begun(run: Ranks) -> Tensors:
    """Bring all engines to version 1, by a plan that knows who is on which host, as later ones do."""
    run.sync(0, weights(0))
    run.sync(1, source := weights(1), 0)
    return source


def test_only_changes_are_sent_and_one_copy_of_a_part_is_kept() -> None:
    with ranks(2, "one", "two", delta=True) as run:
        assert sent(run.sync(0, weights(0))) >= 2 * SIZE, "each engine takes a copy"
        assert SIZE <= sent(run.sync(1, one := weights(1), 0)) < 2 * SIZE, "the host takes one, by another plan"
        two = changed(one)
        reports = run.sync(2, two, 1)
        assert 0 < sent(reports) < 1000, "a header and a few elements"
        assert all(report.num_same and not report.num_whole for report in reports)
        assert sum(report.num_sparse for report in reports) >= 1
        assert sent(run.sync(3, two, 2)) == 0
        assert sent(run.sync(4, weights(4), 3)) >= SIZE, "changes of everything would be longer"
        assert sent(run.sync(5, changed(weights(4)))) >= SIZE, "the engines serve different versions"


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_kept_is_as_large_as_two_versions(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each of two engines takes a copy of its own."""
    if alone:
        monkeypatch.setattr(PairSender, "hosts", property(lambda self: {}, lambda self, hosts: None), raising=False)
    with ranks(2, "one", "two", delta=True) as run:
        one = begun(run)
        assert sent(run.sync(2, changed(one), 1)) < 2000
        held = [sender._sent._cache._memories for sender in run.senders if sender._sent is not None]
        assert 2 * SIZE <= sum(memory.nbytes for memories in held for memory in memories) < 2.1 * SIZE


def test_a_receiver_without_the_base_is_sent_everything_beside_one_that_has_it() -> None:
    with ranks(2, "one", "two", delta=True) as run:
        one = begun(run)
        run.inboxes[1].close()
        run.inboxes[1] = WeightInbox(
            ReceiverConfig("two", run.inboxes[0]._config.sync, key=run.inboxes[0]._config.key), 0
        )
        assert SIZE // 3 < sent(run.sync(2, two := changed(one), 1)) < 2 * SIZE // 3
        assert sent(run.sync(3, changed(two), 2)) < 2000


def test_a_worker_that_needs_a_part_is_sent_changes_of_it_once_the_plan_is_its_own() -> None:
    needs = tuple(
        place(name, tuple((0, size) for size in shape)) for name, (_, shape) in SPECS.items() if name != "big"
    )
    with ranks(2, "one", delta=True) as run:
        run.inboxes[0].needs, one = needs, weights(1)
        sizes: list[int] = []
        for version in range(4):
            one["a"][0, 0] += 1
            update, sends = run.start(version, one, version - 1)
            [prepared] = run.prepare(update)
            prepared.result(20)
            assert staged(run.inboxes[0])["a"].equal(one["a"])
            run.inboxes[0].committed(version)
            sizes.append(sent([send.result(20) for send in sends]))
        whole, part, *changes = sizes
        assert whole >= SIZE > SIZE // 10 > part > one["a"].nbytes and 0 < max(changes) < 200


def test_a_damaged_base_is_found_and_the_version_is_sent_whole() -> None:
    with ranks(2, "one", "two", delta=True) as run:
        one = begun(run)
        kept(run.inboxes[1])[:] += 1
        update, sends = run.start(2, two := changed(one), 1)
        good, bad = run.prepare(update)
        told = "is damaged in the version that was kept here: .*: send it whole"
        with pytest.raises(WeightTransferError, match=told):
            bad.result(20)
        with pytest.raises(WeightTransferError, match="two worker 0"):
            good.result(20)
        blamed: set[str] = set()
        for send in sends:
            if error := send.exception(20):
                assert isinstance(error, WeightTransferError)
                blamed |= {*error.engines}
        assert blamed == {"two"}
        assert sent(run.sync(2, two)) >= SIZE
        run.sync(3, three := changed(two), 2)
        assert sent(run.sync(4, changed(three), 3)) < 2000


def test_after_a_version_that_failed_the_next_is_whole() -> None:
    with ranks(2, "one", delta=True) as run:
        one = begun(run)
        update, sends = run.start(2, weights(2), 1)
        for sender in run.senders:
            sender.abort("it failed", update)
        assert all(send.exception(20) for send in sends)
        assert sent(run.sync(3, one, 1)) >= SIZE


def test_a_rank_that_has_lost_what_it_sent_sends_its_part_whole() -> None:
    with ranks(2, "one", delta=True) as run:
        one = begun(run)
        run.senders[1]._sent = SentParts(20.0)
        first, second = run.sync(2, changed(one), 1)
        assert first.bytes_sent < 1000 and second.num_whole and not second.num_same


def test_a_rank_without_memory_for_what_it_sends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(2, "one", delta=True, timeout_s=60.0) as run:
        one = begun(run)
        # There is room for both versions of one rank's part, but not for those of both ranks.
        monkeypatch.setattr("headrace.actors.weight_sync.cache.available_memory", lambda: 2 * SIZE)
        run.senders[1]._sent = SentParts(20.0)
        update, sends = run.start(2, two := changed(one), 1)
        [prepared] = run.prepare(update)
        assert isinstance(sends[1].exception(20), ValueError)
        with pytest.raises(
            WeightTransferError,
            match="ended the update: ValueError: .* what 2 train workers of this host send .*; turn off sync.delta ",
        ):
            prepared.result(20)
        assert isinstance(sends[0].exception(20), WeightTransferError)
        monkeypatch.undo()
        run.sync(3, two)
        assert sent(run.sync(4, changed(two), 3)) >= SIZE


def test_a_failed_update_by_another_plan_does_not_make_its_parts_a_base() -> None:
    with ranks(1, "one", delta=True) as run:
        one = begun(run)
        run.groups = [ReceiverGroup("one", 1), ReceiverGroup("two", 1)]
        update, [send] = run.start(2, weights(2))
        run.senders[0].abort("it failed", update)
        assert send.exception(20)
        assert run.senders[0].open(3, run.groups, 1).base is None
        run.groups = run.groups[:1]
        assert sent(run.sync(3, changed(one), 1)) >= SIZE
