"""The directory: a random run of operations against a model of plain dicts, and each rule on its own."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_table import FreedBlock, Reservation
from headrace.dataplane.directory import ClaimRows, Directory, Outcome
from headrace.dataplane.errors import (
    AlreadyWritten,
    CapacityExceeded,
    DataPlaneTimeout,
    DuplicateKeys,
    FieldsNotReady,
    KeysNotFound,
    LeaseLost,
    SchemaMismatch,
)
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.partition import PutRows
from headrace.dataplane.rows import Grouping

SCHEMA = Schema(
    [
        Field(name="ids", kind=Kind.PER_TOKEN, dtype=torch.int32),
        Field(name="logp", kind=Kind.PER_TOKEN, dtype=torch.float32),
        Field(name="score", kind=Kind.PER_SAMPLE, dtype=torch.float32),
    ]
)
GROUP = 2


def make_put(keys: list[str], fields: tuple[str, ...], lengths: list[int] | None = None, **options: object) -> PutRows:
    """A put of blocks of at most 3 rows, 64 bytes a row."""
    sizes = [3] * (len(keys) // 3) + ([len(keys) % 3] if len(keys) % 3 else [])
    layouts = tuple(BlockLayout(fields, n, 0, (64 * n, *[0] * len(fields))) for n in sizes)
    tokens = any(SCHEMA[name].kind is Kind.PER_TOKEN for name in fields)
    given = np.array(lengths if lengths is not None else [5] * len(keys))
    base: dict = {"versions": None, "groups": None, "tags": {}, "replace": False, "writer": "w"} | options
    base["groups"] = Grouping.of(keys, base["groups"])
    return PutRows("p", keys, fields, lengths=given if tokens else None, layouts=layouts, **base)


def put(directory: Directory, *arguments: object, now: float = 0.0, **options: object) -> KVBatchMeta:
    made = make_put(*arguments, **options)  # type: ignore[arg-type]
    reservation = directory.reserve(made, now)
    assert reservation is not None
    return commit(directory, reservation, made)[0]


def commit(directory: Directory, reservation: Reservation, put: PutRows) -> tuple[KVBatchMeta, list[FreedBlock]]:
    committed, freed = directory.commit(reservation.reservation_id, put, lambda ids, _: [b"at"] * len(ids))
    return committed.receipt(put, SCHEMA), freed


@pytest.fixture
def directory() -> Directory:
    directory = Directory(capacity_bytes=1 << 20, lease_s=10.0, reserve_s=5.0)
    directory.register("p", SCHEMA, ("a", "b"), GROUP)
    return directory


def places(meta: KVBatchMeta) -> list[dict[str, tuple[int, int, int]]]:
    """Per row: field -> (block id, row, first token)."""
    found: list[dict[str, tuple[int, int, int]]] = [{} for _ in meta.keys]
    for source in meta.sources:
        for i, (block, row, start) in enumerate(zip(source.block, source.row, source.start, strict=True)):
            for name in source.fields:
                found[i][name] = (meta.blocks[block].block_id, int(row), int(start))
    return found


# ------------------------------------------------------------------ the model


@dataclass
class ModelRow:
    key: str
    arrival: int
    version: int
    length: int
    places: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})  # task -> 0, lease id, -1 done
    tag: float | None = None


@dataclass
class Model:
    rows: dict[str, ModelRow] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)  # id -> bytes
    arrived: int = 0

    def live_blocks(self) -> set[int]:
        return {place[0] for row in self.rows.values() for place in row.places.values()}

    def claimable(self, task: str, fields: tuple[str, ...], whole: bool) -> list[str]:
        free = [r for r in self.rows.values() if r.state[task] == 0 and set(fields) <= set(r.places)]
        if not whole:
            return [r.key for r in sorted(free, key=lambda r: (r.version, r.arrival))]
        groups: dict[str, list[ModelRow]] = {}
        for row in sorted(free, key=lambda r: r.arrival):
            groups.setdefault(row.key.rpartition(".")[0], []).append(row)
        full = [g for g in groups.values() if len(g) == GROUP]
        full.sort(key=lambda g: (min(r.version for r in g), min(r.arrival for r in g)))
        return [row.key for group in full for row in group]


class Run:
    """Applies the same random operations to the directory and to the model."""

    def __init__(self, directory: Directory, seed: int) -> None:
        self.directory = directory
        self.model = Model()
        self.random = random.Random(seed)
        self.leases: list[tuple[KVBatchMeta, str, float]] = []
        self.now = 0.0

    def freed(self, blocks) -> None:
        """What the directory frees is exactly what the model no longer refers to."""
        gone = set(self.model.blocks) - self.model.live_blocks()
        assert {block.block_id for block in blocks} == gone
        for block_id in gone:
            del self.model.blocks[block_id]

    def put(self) -> None:
        known = self.random.sample(sorted(self.model.rows), min(len(self.model.rows), self.random.randint(0, 5)))
        new = [f"g{self.random.randint(0, 40)}.{s}" for s in range(GROUP) if self.random.random() < 0.7]
        keys = list(dict.fromkeys(known + new))
        fields = tuple(self.random.sample(list(SCHEMA), self.random.randint(1, 3)))
        if not keys:
            return
        self.random.shuffle(keys)
        replace = self.random.random() < 0.4
        lengths = [self.random.choice([0, 5]) for _ in keys]
        version = self.random.randint(0, 3)
        tags = {"t": np.full(len(keys), version, np.float32)} if self.random.random() < 0.5 else {}
        versions = None if any(key in self.model.rows for key in keys) and not replace else np.full(len(keys), version)
        made = make_put(keys, fields, lengths, replace=replace, tags=tags, versions=versions)
        rows = [self.model.rows.get(key) for key in keys]
        tokens = {"ids", "logp"} & set(fields)
        written = any(row and set(row.places) & set(fields) for row in rows)
        kept = [row and set(row.places) & ({"ids", "logp"} - (tokens if replace else set())) for row in rows]
        clash = any(k and row and row.length != n for k, row, n in zip(kept, rows, lengths, strict=True)) and tokens
        if written and not replace or clash:
            with pytest.raises(AlreadyWritten if written and not replace else SchemaMismatch):
                self.directory.reserve(made, self.now)
            return
        reservation = self.directory.reserve(made, self.now)
        assert reservation is not None
        receipt, freed = commit(self.directory, reservation, made)
        assert receipt.keys == tuple(keys) and receipt.fields == fields
        for i, (key, n) in enumerate(zip(keys, lengths, strict=True)):
            row = self.model.rows.get(key)
            if row is None:
                row = self.model.rows[key] = ModelRow(key, self.model.arrived, -1, 0)
                self.model.arrived += 1
            block = reservation.block_ids[i // 3]
            start = sum(lengths[i // 3 * 3 : i]) if tokens else 0
            for name in fields:
                row.places[name] = (block, i % 3, start if SCHEMA[name].kind is Kind.PER_TOKEN else -1)
            row.length = n if tokens else row.length
            row.version = version if versions is not None else row.version
            row.tag = version if tags else row.tag
        for number, block_id in enumerate(reservation.block_ids):
            self.model.blocks[block_id] = 64 * made.layouts[number].num_rows
        self.freed(freed)
        self.check(receipt)

    def check(self, meta: KVBatchMeta) -> None:
        for i, (key, found) in enumerate(zip(meta.keys, places(meta), strict=True)):
            row = self.model.rows[key]
            assert set(found) == set(meta.fields)
            for name, (block, number, start) in found.items():
                wanted = row.places[name]
                assert (block, number) == wanted[:2]
                assert SCHEMA[name].kind is not Kind.PER_TOKEN or start == wanted[2]
            assert (meta.lengths[i], meta.versions[i]) == (row.length, row.version)
        tags = [self.model.rows[key].tag for key in meta.keys]
        assert ("t" in meta.tags) == (len(tags) > 0 and None not in tags)
        if "t" in meta.tags:
            assert meta.tags["t"].tolist() == tags

    def claim(self) -> None:
        task = self.random.choice("ab")
        fields = tuple(self.random.sample(list(SCHEMA), self.random.randint(1, 2)))
        whole = self.random.random() < 0.5
        count = self.random.randint(1, 3) * (GROUP if whole else 1)
        expected = self.model.claimable(task, fields, whole)
        meta = self.directory.claim(ClaimRows("p", task, fields, count, whole), self.now)
        if len(expected) < count:
            assert meta is None
            return
        assert meta is not None and list(meta.keys) == expected[:count]
        self.check(meta)
        for key in meta.keys:
            self.model.rows[key].state[task] = meta.lease_id
        self.leases.append((meta, task, self.now + 10.0))

    def release(self) -> None:
        if not self.leases:
            return
        meta, task, _ = self.random.choice(self.leases)
        meta = meta.select(self.random.sample(range(len(meta)), self.random.randint(1, len(meta))))
        outcome: Outcome = "done" if self.random.random() < 0.5 else "retry"
        rows = {key: self.model.rows.get(key) for key in meta.keys}
        held = [key for key, row in rows.items() if row and row.state[task] == meta.lease_id]
        if len(held) < len(meta):
            with pytest.raises(LeaseLost) as caught:
                self.directory.release("p", task, meta.lease_id, meta.keys, outcome)
            assert set(caught.value.keys) == set(meta.keys) - set(held)
        else:
            self.directory.release("p", task, meta.lease_id, meta.keys, outcome)
        for key in held:
            self.model.rows[key].state[task] = -1 if outcome == "done" else 0

    def clear(self) -> None:
        keys = self.random.sample(sorted(self.model.rows), min(len(self.model.rows), self.random.randint(0, 6)))
        everything = self.random.random() < 0.05
        count, freed = self.directory.clear("p", None if everything else keys)
        gone = list(self.model.rows) if everything else keys
        assert count == len(gone)
        for key in gone:
            del self.model.rows[key]
        self.freed(freed)

    def wait(self) -> None:
        self.now += self.random.choice([0.5, 3.0])
        returned = 0
        for meta, task, deadline in self.leases:
            if deadline <= self.now:
                for key in meta.keys:
                    row = self.model.rows.get(key)
                    if row and row.state[task] == meta.lease_id:
                        row.state[task] = 0
                        returned += 1
        self.leases = [lease for lease in self.leases if lease[2] > self.now]
        expired = self.directory.expire(self.now)
        assert (expired.num_rows, expired.reservations) == (returned, ())

    def agree(self) -> None:
        status = self.directory.status("p", self.now)
        rows = self.model.rows.values()
        assert status.rows == len(rows)
        assert status.ready == {name: sum(name in row.places for row in rows) for name in SCHEMA}
        assert status.bytes_used == sum(self.model.blocks.values())
        assert status.leased_rows == sum(state > 0 for row in rows for state in row.state.values())
        assert (status.blocks, status.bytes_reserved) == (len(self.model.blocks), 0)
        keys = [row.key for row in rows if "ids" in row.places]
        self.check(self.directory.lookup("p", keys, ("ids",)))


@pytest.mark.parametrize("seed", range(12))
def test_directory_agrees_with_the_model(directory: Directory, seed: int) -> None:
    run = Run(directory, seed)
    steps = [run.put] * 6 + [run.claim] * 6 + [run.release] * 3 + [run.clear] + [run.wait]
    for number in range(400):
        run.random.choice(steps)()
        if number % 10 == 0:
            run.agree()


# ------------------------------------------------------------------ rules


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


def test_capacity(directory: Directory) -> None:
    small = Directory(capacity_bytes=256, lease_s=1.0, reserve_s=1.0)
    small.register("p", SCHEMA, (), 1)
    with pytest.raises(CapacityExceeded, match="320 bytes, more than the capacity of 256"):
        small.reserve(make_put([f"k{i}" for i in range(5)], ("ids",)), 0.0)
    put(small, ["a", "b", "c"], ("ids",))
    assert small.reserve(make_put(["d", "e"], ("ids",)), 0.0) is None
    small.clear("p", ["a", "b"])
    assert small.reserve(make_put(["d", "e"], ("ids",)), 0.0) is None, "their block lives on with row c"
    assert small.clear("p", ["c"])[0] == 1
    assert small.reserve(make_put(["d", "e"], ("ids",)), 0.0) is not None


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
        ({"arguments": (["g.0", "g.0"], ("ids",))}, DuplicateKeys, "twice.*g.0"),
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
    return PutRows("p", made.keys, ("nope",), made.lengths, None, made.groups, {}, made.layouts, False, "w")


def test_row_without_tokens_gets_its_length_later(directory: Directory) -> None:
    assert put(directory, ["g.0"], ("score",)).lengths.tolist() == [0]
    assert put(directory, ["g.0"], ("ids",), [7]).lengths.tolist() == [7]
    assert directory.lookup("p", ["g.0"], None).lengths.tolist() == [7]
    put(directory, ["g.0"], ("ids",), [3], replace=True)
    assert directory.lookup("p", ["g.0"], ("score",)).lengths.tolist() == [3]


def test_missing_keys_and_fields_are_named(directory: Directory) -> None:
    put(directory, ["g.0", "g.1"], ("ids",))
    put(directory, ["g.1"], ("logp",))
    with pytest.raises(KeysNotFound, match=r"1 of 2 keys.*'nope'"):
        directory.lookup("p", ["g.0", "nope"], ("ids",))
    with pytest.raises(FieldsNotReady, match=r"'logp' is not written for 1 of 2.*'g.0'"):
        directory.lookup("p", ["g.0", "g.1"], ("ids", "logp"))
    assert directory.lookup("p", ["g.1", "g.0", "g.1"], None).fields == ("ids",)
    with pytest.raises(KeysNotFound):
        directory.clear("p", ["g.0", "nope"])
    assert directory.status("p", 0.0).rows == 2


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


def test_register_again(directory: Directory) -> None:
    directory.register("p", SCHEMA, ("b", "a"), GROUP)
    with pytest.raises(ValueError, match="group_size 4.*registered with 2"):
        directory.register("p", SCHEMA, ("a", "b"), 4)
    with pytest.raises(ValueError, match="tasks"):
        directory.register("p", SCHEMA, ("a",), GROUP)


def test_shortage_says_what_is_missing(directory: Directory) -> None:
    put(directory, ["g.0", "g.1", "h.0"], ("ids",))
    put(directory, ["g.0", "g.1"], ("logp",))
    meta = directory.claim(ClaimRows("p", "a", ("ids",), 1), 0.0)
    assert meta is not None and meta.keys == ("g.0",)
    text = directory.shortage(ClaimRows("p", "a", ("ids", "logp"), 2))
    assert "fields ['ids', 'logp'] of 2 rows; 1 of the partition's 3 rows are ready" in text
    assert "1 of the others lack field 'logp'" in text and "1 leased" in text


def test_group_numbers_are_never_used_again(directory: Directory) -> None:
    first = put(directory, ["g.0", "h.0", "g.1"], ("ids",))
    assert first.groups[0] == first.groups[2] != first.groups[1]
    directory.clear("p", ["g.0", "g.1"])
    again = put(directory, ["g.0"], ("ids",))
    assert again.groups[0] not in first.groups
    assert put(directory, ["h.1"], ("ids",)).groups[0] == first.groups[1]


def test_a_claim_does_not_look_at_rows_that_are_not_ready() -> None:
    """60 k rows done or waiting: a claim touches its own few only."""
    directory = Directory(capacity_bytes=1 << 40, lease_s=1e9, reserve_s=1.0)
    directory.register("p", SCHEMA, ("a",), 1)
    for start in range(0, 60_000, 20_000):
        put(directory, [f"k{i}" for i in range(start, start + 20_000)], ("ids",))
    done = directory.claim(ClaimRows("p", "a", ("ids",), 50_000), 0.0)
    assert done is not None
    directory.release("p", "a", done.lease_id, done.keys, "done")
    started = time.perf_counter()
    for _ in range(100):
        meta = directory.claim(ClaimRows("p", "a", ("ids",), 16), 0.0)
        assert meta is not None
    assert time.perf_counter() - started < 1.0, "about 0.1 ms each here; scanning all rows would take more"
