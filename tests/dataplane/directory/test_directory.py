"""The directory keeps its rules one by one, and groups rows by their keys or the names given."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataplane.directory.calls import ClaimRows, Grouping, PutRows
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.directory.rows import RowTable
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import (
    AlreadyWritten,
    DataPlaneTimeout,
    DuplicateKeys,
    KeysNotFound,
    SchemaMismatch,
    StoreLost,
)
from headrace.dataplane.status import PartitionRows
from headrace.tests.dataplane.directory.directory_rows import (
    FIELDS,
    GROUP,
    SCHEMA,
    claim,
    commit,
    make_put,
    opened,
    put,
)


@pytest.fixture
def directory() -> Directory:
    directory = Directory(capacity_bytes=1 << 20, lease_s=10.0, reserve_s=5.0)
    directory.register("p", SCHEMA, ("a", "b"), GROUP)
    return directory


def test_nothing_is_visible_before_commit_and_nothing_stays_after_abort(directory: Directory) -> None:
    reservation = directory.reserve(make_put(["g.0", "g.1"], ("ids",)), 0.0)
    assert reservation is not None
    with pytest.raises(KeysNotFound):
        directory.lookup("p", ["g.0"], ("ids",))
    assert directory.status(None, 0.0).bytes_reserved == 128
    assert directory.abort(reservation.reservation_id) is reservation
    assert directory.abort(reservation.reservation_id) is None
    assert directory.status(None, 0.0).bytes_reserved == 0


def test_reservation_of_a_dead_writer_expires(directory: Directory) -> None:
    made = make_put(["g.0"], ("ids",), writer="w pid=7")
    reservation = directory.reserve(made, 1.0)
    assert reservation is not None and directory.next_deadline() == 6.0
    assert directory.expire(5.9).writers == ()
    expired = directory.expire(6.0)
    assert expired.writers == ("w pid=7",) and expired.reservations == (reservation,)
    with pytest.raises(DataPlaneTimeout, match="reserve_s"):
        commit(directory, reservation, made)


def test_the_second_of_two_writers_of_a_key_is_refused_at_commit(directory: Directory) -> None:
    made = make_put(["g.0"], ("ids",))
    first, second = directory.reserve(made, 0.0), directory.reserve(made, 0.0)
    assert first is not None and second is not None
    commit(directory, first, made)
    with pytest.raises(AlreadyWritten, match="'ids'.*g.0"):
        commit(directory, second, made)
    assert directory.abort(second.reservation_id) is second


def test_rows_of_a_dead_holder_are_passed_over_counted_named_and_cleared(directory: Directory) -> None:
    made = make_put(["g.0", "g.1", "h.0", "h.1"], ("ids", "score"), lengths=[3, 4, 5, 6])
    reservation = directory.reserve(made, 0.0)
    assert reservation is not None
    holders = [(number).to_bytes(2) + b"at" for number in (7, 2)]  # Blocks of 3 rows and of 1.
    directory.commit(reservation.reservation_id, made, lambda ids, _: holders)
    claimed = directory.claim(ClaimRows("p", "b", ("ids",), 4), 0.0)
    assert claimed is not None
    number, blocks = directory.lose({7: "unit-7 pid=1"})
    assert number == 3 and [block.location for block in blocks] == holders[:1]
    status = directory.status("p", 0.0)
    assert (status.lost_rows, status.ready, status.bytes_used) == (3, {"ids": 1, "logp": 0, "score": 1}, 64)
    found = directory.claim(ClaimRows("p", "a", ("ids",), 4, at_least=1), 0.0)
    assert found is not None and found.keys == ("h.1",)
    assert "3 lost" in directory.shortage(ClaimRows("p", "a", ("ids",), 4))
    with pytest.raises(StoreLost, match="3 of 4 rows were lost.*peer=unit-7 pid=1") as lost:
        directory.lookup("p", ["h.1", "g.0", "g.1", "h.0"], None)
    assert lost.value.keys == ("g.0", "g.1", "h.0")
    directory.release("p", "b", claimed.lease_id, ["g.0"], "retry")
    listing = directory.rows("p", None)
    assert listing.keys[listing.lost].tolist() == ["g.0", "g.1", "h.0"] and not listing.written["ids"][0]
    assert PartitionRows.from_bytes(listing.to_bytes()).lost.tolist() == listing.lost.tolist()
    put(directory, ["g.0"], ("ids", "score"), lengths=[9])  # The row is put again, even with another length.
    assert directory.lookup("p", ["g.0"], ("score",)).lengths.tolist() == [9]
    assert directory.clear("p", ["g.1", "h.0"]) == (2, [])
    assert directory.status("p", 0.0).lost_rows == 0
    assert directory.lose({7: "unit-7 pid=1"}) == (0, [])


def test_credit_is_counted_bounded_and_taken_back_first() -> None:
    directory = Directory(capacity_bytes=1024, lease_s=1.0, reserve_s=5.0)
    directory.register("p", SCHEMA, (), 1)
    first, second = directory.grant("w1", 300, 2, 0.0), directory.grant("w2", 300, 2, 1.0)
    assert first is not None and second is not None
    assert directory.grant("w3", 400, 1, 1.0) is None, "an eighth stays free"
    status = directory.status(None, 1.0)
    assert (status.bytes_credit, status.bytes_reserved) == (600, 0)
    large = make_put([f"k{i}" for i in range(9)], ("ids",))
    assert large.nbytes == 576 and directory.reserve(large, 1.0) is None
    assert directory.revoke(large.nbytes) == [first], "the oldest, and no more than is needed"
    assert directory.reserve(large, 1.0) is not None
    with pytest.raises(DataPlaneTimeout):
        commit(directory, first, make_put(["a"], ("ids",)))
    with pytest.raises(ValueError, match="3 blocks of 576 bytes, expected at most 2 of 300"):
        commit(directory, second, large)
    small = make_put(["a", "b"], ("ids",))
    commit(directory, second, small)
    status = directory.status(None, 1.0)
    assert (status.bytes_credit, status.bytes_reserved, status.bytes_used) == (0, 576, 128), (
        "what it did not use is free"
    )
    assert directory.grant("w1", 64, 1, 1.0) is not None and directory.next_deadline() == 6.0
    expired = directory.expire(6.0)
    assert len(expired.reservations) == 2 and expired.writers == ("w",), "an idle writer is not called late"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"arguments": (["g.0", "g.0"], ("ids",))}, DuplicateKeys, "more than once.*g.0"),
        ({"arguments": (["g.0"], ("nope",))}, SchemaMismatch, "nope"),
        ({"arguments": (["old.0"], ("logp",), [4])}, SchemaMismatch, "4 tokens for 'old.0', expected 5"),
        ({"arguments": (["old.0"], ("logp",)), "versions": np.array([9])}, SchemaMismatch, "version 9"),
        ({"arguments": (["old.0"], ("logp",)), "groups": ["new"]}, SchemaMismatch, "group 'new'"),
        ({"arguments": (["old.1", "old.2"], ("ids",))}, SchemaMismatch, "group 'old' would hold more"),
        ({"arguments": (["g.0"], ("ids",)), "tags": {"t": np.zeros(1, np.int64)}}, SchemaMismatch, "float32 as before"),
    ],
)
def test_refused_puts_change_nothing(directory: Directory, options: dict, error: type, words: str) -> None:
    put(directory, ["old.0"], ("ids",), tags={"t": np.zeros(1, np.float32)})
    before = directory.status(None, 0.0)
    arguments = options.pop("arguments", ())
    with pytest.raises(error, match=words) as caught:
        directory.reserve(make_put(*arguments, **options) if arguments[1] != ("nope",) else _unknown_field(), 0.0)
    assert caught.value.partition == "p"
    assert directory.status(None, 0.0) == before


def _unknown_field() -> PutRows:
    made = make_put(["g.0"], ("ids",))
    return PutRows(
        "p", made.keys, ("nope",), made.lengths, None, made.groups, {}, made.layouts, False, "w", made.schema_id
    )


def test_unknown_names_are_value_errors(directory: Directory) -> None:
    with pytest.raises(ValueError, match=r"partition 'q'.*\['p'\]"):
        directory.lookup("q", ["k"], None)
    with pytest.raises(ValueError, match="task 'c'"):
        directory.claim(ClaimRows("p", "c", ("ids",), 1), 0.0)
    with pytest.raises(ValueError, match="multiple of 2"):
        directory.claim(ClaimRows("p", "a", ("ids",), 3, True), 0.0)
    with pytest.raises(SchemaMismatch, match="nope"):
        directory.claim(ClaimRows("p", "a", ("nope",), 1), 0.0)
    with pytest.raises(ValueError, match="has no lease"):
        directory.release("p", "a", 0, ["k"], "done")


def test_a_renewed_lease_lasts_until_its_last_renewal_runs_out(directory: Directory) -> None:
    put(directory, ["g.0", "g.1", "h.0"], ("ids",))
    kept = directory.claim(ClaimRows("p", "a", ("ids",), 1), 0.0)
    lost = directory.claim(ClaimRows("p", "a", ("ids",), 1), 0.0)
    done = directory.claim(ClaimRows("p", "a", ("ids",), 1), 0.0)
    assert kept is not None and lost is not None and done is not None
    directory.release("p", "a", done.lease_id, done.keys, "done")
    for now in (4.0, 8.0, 9.5):
        assert directory.renew([kept.lease_id, done.lease_id, 99], now) == [kept.lease_id]
    assert directory.next_deadline() == 10.0
    assert directory.expire(10.0).num_rows == 1, "the lease that was not renewed"
    assert directory.renew([lost.lease_id], 10.0) == []
    assert directory.next_deadline() == 19.5
    assert directory.expire(19.4).num_rows == 0
    assert directory.expire(19.5).num_rows == 1
    assert directory.next_deadline() is None


def test_register_again(directory: Directory) -> None:
    directory.register("p", SCHEMA, ("b", "a"), GROUP)
    with pytest.raises(ValueError, match="group_size 4.*registered with 2"):
        directory.register("p", SCHEMA, ("a", "b"), 4)
    with pytest.raises(ValueError, match="tasks"):
        directory.register("p", SCHEMA, ("a",), GROUP)


def test_group_numbers_are_never_used_again(directory: Directory) -> None:
    first = put(directory, ["g.0", "h.0", "g.1"], ("ids",))
    assert first.groups[0] == first.groups[2] != first.groups[1]
    directory.clear("p", ["g.0", "g.1"])
    again = put(directory, ["g.0"], ("ids",))
    assert again.groups[0] not in first.groups
    assert put(directory, ["h.1"], ("ids",)).groups[0] == first.groups[1]


def test_a_shortage_is_told_without_looking_at_the_rows(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    put(directory, ["g.0", "g.1", "h.0"], ("ids",))
    put(directory, ["g.0"], ("logp",))
    claim = ClaimRows("p", "a", ("ids", "logp"), 2)
    assert directory.claim(claim, 0.0) is None
    monkeypatch.setattr(RowTable, "live", None)
    monkeypatch.setattr(RowTable, "written", None)
    assert "1 of the partition's 3 rows are ready, 2 lack field 'logp'" in directory.shortage(claim)


def test_a_claim_does_not_look_at_rows_that_are_not_ready() -> None:
    """60 k rows done or waiting: a claim touches its own few only."""
    directory = Directory(capacity_bytes=1 << 40, lease_s=1e9, reserve_s=1.0)
    directory.register("p", SCHEMA, ("a",), 1)
    for start in range(0, 60_000, 20_000):
        put(directory, [f"k{i}" for i in range(start, start + 20_000)], ("ids",))
    done = directory.claim(ClaimRows("p", "a", ("ids",), 50_000), 0.0)
    assert done is not None
    directory.release("p", "a", done.lease_id, done.keys, "done")
    started = time.thread_time()  # of this thread only, as other processes may have the cores
    for _ in range(100):
        meta = directory.claim(ClaimRows("p", "a", ("ids",), 16), 0.0)
        assert meta is not None
    assert time.thread_time() - started < 1.0, "about 0.1 ms each here; scanning all rows would take more"


KEYS = st.lists(st.text(st.sampled_from("ab.é…0"), min_size=1, max_size=6), max_size=12)


@given(KEYS)
@example([".3", "..3", "3", "a.b.c", "a.b.d", "a.b", "a", "a.b.e"])
def test_groups_of_keys(keys: list[str]) -> None:
    expected = [key.rpartition(".")[0] or key for key in keys]
    found = Grouping.of(keys, None)
    assert not found.given and list(found.names) == list(dict.fromkeys(expected))
    assert [found.names[i] for i in found.index.tolist()] == expected


@given(st.lists(st.sampled_from(["x", "y", "é"])))
def test_given_groups(groups: list[str]) -> None:
    found = Grouping.of([f"k{i}" for i in range(len(groups))], groups)
    assert found.given and list(found.names) == list(dict.fromkeys(groups))
    assert [found.names[i] for i in found.index.tolist()] == groups
    assert found.index.dtype == np.int64


def test_a_claim_that_waits_for_groups_of_one_row_says_so() -> None:
    directory, wanted = opened("ready_first"), ClaimRows("p", "a", FIELDS, GROUP, True)
    put(directory, ["u_g0"], FIELDS)
    assert "groups of 1 row" not in directory.shortage(wanted), "the group's other row may still come"
    put(directory, ["u_g1"], FIELDS)
    assert claim(directory) is None
    words = "; the rows are in 2 groups of 1 row each; name groups by put(groups=...) or by keys `{prompt}.{sample}`"
    assert directory.shortage(wanted).endswith(words)
    put(directory, ["v_g0", "v_g1"], FIELDS, groups=["v", "v"])
    assert claim(directory) is not None
    assert "groups of 1 row" not in directory.shortage(wanted)


def test_leases_are_revoked_by_their_age_and_bounded_though_renewed() -> None:
    directory = Directory(capacity_bytes=1000, lease_s=10.0, reserve_s=10.0)
    directory.register("p", SCHEMA, [TaskConfig("a", max_hold_s=25.0)], 1)
    put(directory, ["k0", "k1", "k2"], FIELDS)
    old = directory.claim(ClaimRows("p", "a", ("ids",), 1), 0.0, "old one")
    new = directory.claim(ClaimRows("p", "a", ("ids",), 1), 5.0)
    assert old is not None and new is not None
    listed = directory.leases("p", 6.0)
    assert [(one.keys, one.holder, one.held_s, one.expires_s) for one in listed] == [
        (("k0",), "old one", 6.0, 4.0),
        (("k1",), "", 1.0, 9.0),
    ]
    assert directory.revoke_leases("p", "a", 4.0, 6.0) == 1
    assert directory.renew([old.lease_id, new.lease_id], 24.0) == [new.lease_id]
    directory.forgive(2.0)  # as much as its process did not run
    directory.renew([new.lease_id], 24.0)
    assert directory.next_deadline() == 32.0 and directory.expire(32.0).num_rows == 1
