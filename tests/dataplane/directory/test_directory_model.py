"""The directory against a model of plain dicts, over random operations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace.codecs.schema import Kind
from headrace.dataplane.directory.calls import ClaimRows, Outcome
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.errors import AlreadyWritten, LeaseLost, SchemaMismatch
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.status import PartitionRows, TaskReset
from headrace.tests.dataplane.directory.directory_rows import GROUP, SCHEMA, commit, make_put


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

    def claimable(
        self, task: str, fields: tuple[str, ...], whole: bool, low: int | None, high: int | None
    ) -> list[str]:
        def is_within(rows: list[ModelRow]) -> bool:
            versions = [row.version for row in rows]
            return (low is None or min(versions) >= low) and (high is None or max(versions) <= high)

        free = [r for r in self.rows.values() if r.state[task] == 0 and set(fields) <= set(r.places)]
        if not whole:
            return [r.key for r in sorted(free, key=lambda r: (r.version, r.arrival)) if is_within([r])]
        groups: dict[str, list[ModelRow]] = {}
        for row in sorted(free, key=lambda r: r.arrival):
            groups.setdefault(row.key.rpartition(".")[0], []).append(row)
        full = [g for g in groups.values() if len(g) == GROUP and is_within(g)]
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
        unit = GROUP if whole else 1
        count = self.random.randint(1, 3) * unit
        least = self.random.choice([None, *range(unit, count + 1, unit)])
        low, high = sorted(self.random.choices(range(-1, 4), k=2))
        bounds = (self.random.choice([None, low]), self.random.choice([None, high]))
        expected = self.model.claimable(task, fields, whole, *bounds)
        meta = self.directory.claim(ClaimRows("p", task, fields, count, whole, *bounds, least), self.now)
        if len(expected) < (least or count):
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

    def tag(self) -> None:
        keys = self.random.sample(sorted(self.model.rows), min(len(self.model.rows), self.random.randint(0, 3)))
        self.directory.tag("p", keys, {"t": np.full(len(keys), 9, np.float32)})
        for key in keys:
            self.model.rows[key].tag = 9

    def reset(self) -> None:
        task = self.random.choice("ab")
        keys = self.random.sample(sorted(self.model.rows), min(len(self.model.rows), self.random.randint(0, 6)))
        everything = self.random.random() < 0.1
        states = [self.model.rows[key].state for key in (self.model.rows if everything else keys)]
        expected = TaskReset(sum(state[task] < 0 for state in states), sum(state[task] > 0 for state in states))
        assert self.directory.reset("p", task, None if everything else keys) == expected
        for state in states:
            state[task] = max(0, state[task])

    def clear(self) -> None:
        keys = self.random.sample(sorted(self.model.rows), min(len(self.model.rows), self.random.randint(0, 6)))
        everything = self.random.random() < 0.05
        count, freed = self.directory.clear("p", None if everything else keys)
        gone = list(self.model.rows) if everything else keys
        assert count == len(gone)
        for key in gone:
            del self.model.rows[key]
        self.freed(freed)

    def free(self) -> None:
        keys = self.random.sample(sorted(self.model.rows), min(len(self.model.rows), self.random.randint(0, 6)))
        count, freed = self.directory.free("p", keys)
        assert count == len(keys)
        for key in keys:
            row = self.model.rows[key]
            row.places, row.length = {}, 0
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
        for task, cursor in self.directory._partitions["p"].tasks.items():
            states = [row.state[task] for row in rows]
            assert cursor.num_leased == sum(state > 0 for state in states)
            assert cursor.num_done == sum(state < 0 for state in states)
            fields = tuple(self.random.sample(list(SCHEMA), self.random.randint(1, 3)))
            ready = sum(row.state[task] == 0 and set(fields) <= set(row.places) for row in rows)
            found = self.directory.task_status("p", task, fields)
            counts = (found.ready, found.leased, found.done, found.not_ready)
            assert counts[:3] == (ready, cursor.num_leased, cursor.num_done) and sum(counts) == found.rows == len(rows)
        assert (status.blocks, status.bytes_reserved) == (len(self.model.blocks), 0)
        keys = [row.key for row in rows if "ids" in row.places]
        self.check(self.directory.lookup("p", keys, ("ids",)))
        self.check_listing(self.directory.rows("p", None))

    def check_listing(self, listed: PartitionRows) -> None:
        rows = sorted(self.model.rows.values(), key=lambda row: row.arrival)
        assert listed.keys.tolist() == [row.key for row in rows]
        assert listed.group_names.tolist() == [row.key.rpartition(".")[0] for row in rows]
        assert listed.versions.tolist() == [row.version for row in rows]
        assert listed.lengths.tolist() == [row.length for row in rows]
        for name, flags in listed.written.items():
            assert flags.tolist() == [name in row.places for row in rows]
        tagged = listed.tagged.get("t", np.zeros(len(rows), dtype=bool))
        assert tagged.tolist() == [row.tag is not None for row in rows]
        assert not rows or listed.tags.get("t", np.zeros(len(rows))).tolist() == [row.tag or 0 for row in rows]


@pytest.mark.parametrize("seed", range(12))
def test_directory_agrees_with_the_model(directory: Directory, seed: int) -> None:
    run = Run(directory, seed)
    steps = [run.put] * 6 + [run.claim] * 6 + [run.release] * 3 + [run.reset, run.free, run.clear, run.tag, run.wait]
    for number in range(400):
        run.random.choice(steps)()
        if number % 10 == 0:
            run.agree()


# ------------------------------------------------------------------ rules
