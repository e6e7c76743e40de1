"""Receipts: pure row operations, and few bytes on the wire."""

from __future__ import annotations

import dataclasses
import pickle

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.gather import RowSource
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.compact import check_keys, pack_ints, pack_keys, unpack_ints, unpack_keys
from headrace.dataplane.meta import BlockRef, KVBatchMeta

SCHEMA = Schema(
    [Field(name=name, kind=Kind.PER_TOKEN, dtype=torch.int32) for name in ("ids", "mask", "logp")]
    + [Field(name="score", kind=Kind.PER_SAMPLE, dtype=torch.float32)]
)

PLANE = (1 << 63) - 1


def receipt(num_rows: int, rows_per_block: int = 16, first_block: int = 1, prefix: str = "reverse") -> KVBatchMeta:
    """Rows in two field sets: three fields in blocks of `rows_per_block`, one in a block of its own."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 900, num_rows)
    numbers = np.arange(num_rows)
    block, row = numbers // rows_per_block, numbers % rows_per_block
    ends = np.cumsum(lengths)
    starts = ends - lengths - (ends - lengths)[block * rows_per_block] if num_rows else numbers
    num_blocks = -(-num_rows // rows_per_block)
    names = ("ids", "mask", "logp")
    refs = [
        BlockRef(
            first_block + i, b"segment, offset!", BlockLayout(names, rows_per_block, 7000, (190, 28000, 7000, 28000))
        )
        for i in range(num_blocks)
    ]
    refs.append(BlockRef(first_block + num_blocks, b"there", BlockLayout(("score",), num_rows, 0, (99, 4 * num_rows))))
    return KVBatchMeta(
        "train",
        tuple(f"{prefix}-{i // 8:06d}.{i % 8}" for i in range(num_rows)),
        ("ids", "score", "mask", "logp"),
        lengths,
        np.full(num_rows, 17),
        numbers // 8 + 400,
        {name: random.random(num_rows).astype(np.float32) for name in ("reward", "valid", "response_length")},
        tuple(refs),
        (
            RowSource(names, block.astype(np.int32), row.astype(np.int32), starts),
            RowSource(
                ("score",), np.full(num_rows, num_blocks, np.int32), numbers.astype(np.int32), np.zeros_like(numbers)
            ),
        ),
        5,
        schema=SCHEMA,
        plane_id=PLANE,
        generations=numbers + 1000,
    )


def rows_of(meta: KVBatchMeta) -> list[tuple]:
    """Everything the receipt says about each row."""
    rows = []
    for i, key in enumerate(meta.keys):
        places = {
            name: (meta.blocks[s.block[i]], int(s.row[i]), int(s.start[i])) for s in meta.sources for name in s.fields
        }
        tags = {name: float(values[i]) for name, values in meta.tags.items()}
        rows.append((key, int(meta.lengths[i]), int(meta.versions[i]), int(meta.groups[i]), tags, places))
    return rows


def test_bytes_per_row() -> None:
    """256 rows in 16-row blocks, 3 fields (and one written back), 3 float32 tags."""
    assert len(receipt(256).to_bytes()) / 256 < 25
    shuffled = receipt(256).select(np.random.default_rng(1).permutation(256))
    assert len(shuffled.to_bytes()) / 256 < 35


@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 256])
def test_bytes_round_trip(num_rows: int) -> None:
    meta = receipt(num_rows)
    for made in (meta, meta.select(np.random.default_rng(2).integers(0, num_rows or 1, num_rows))):
        again = KVBatchMeta.from_bytes(made.to_bytes())
        assert rows_of(again) == rows_of(made)
        assert (again.partition, again.fields, again.lease_id, again.schema) == ("train", made.fields, 5, SCHEMA)
        assert again.plane_id == PLANE
        assert again.lengths.dtype == again.groups.dtype == np.int64
        assert again.sources[0].block.dtype == np.int32 and again.sources[0].start.dtype == np.int64
        assert rows_of(pickle.loads(pickle.dumps(made))) == rows_of(made)


def test_foreign_bytes_are_refused() -> None:
    for data in (b"", b"nonsense", pack_ints(np.arange(3)), receipt(4).to_bytes()[:-3]):
        with pytest.raises(ValueError, match="receipt"):
            KVBatchMeta.from_bytes(data)


def test_damaged_receipts_are_refused_whatever_the_damage() -> None:
    random = np.random.default_rng(5)
    data = receipt(40).to_bytes()
    for _ in range(3000):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), random.integers(1, 4)).tolist():
            damaged[at] ^= int(random.integers(1, 256))
        with pytest.raises(ValueError, match="receipt"):
            KVBatchMeta.from_bytes(bytes(damaged))
    for body in (b"", b"\x90", b"\xc1", msgspec.msgpack.encode(["receipt6"] * 12), msgspec.msgpack.encode({"a": 1})):
        with pytest.raises(ValueError, match="receipt"):
            KVBatchMeta.from_bytes(xxhash.xxh3_64_digest(body) + body)


def test_receipts_of_two_data_planes_are_not_joined() -> None:
    other = dataclasses.replace(receipt(8), plane_id=PLANE - 1)
    with pytest.raises(ValueError, match="plane"):
        receipt(8).concat(other)
    with pytest.raises(ValueError, match="data plane"):
        receipt(8).merge_fields(other)


def test_select_where_split() -> None:
    meta = receipt(40)
    rows = rows_of(meta)
    picked = meta.select([33, 2, 2, -1])
    assert rows_of(picked) == [rows[33], rows[2], rows[2], rows[39]]
    assert len(picked.blocks) == 3, "blocks 0 and 2 of the three fields, and the scores'"
    assert rows_of(meta.where(meta.lengths > 450)) == [row for row in rows if row[1] > 450]
    assert [len(part) for part in meta.split(3)] == [14, 13, 13]
    assert [row for part in meta.split([0, 39, 1]) for row in rows_of(part)] == rows
    assert rows_of(meta) == rows
    for call in (
        lambda: meta.select(np.ones(40, bool)),
        lambda: meta.where(np.ones(39, bool)),
        lambda: meta.split([39]),
        lambda: meta.split(0),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(IndexError):
        meta.select([40])


def test_concat_joins_what_split_parted_and_other_blocks() -> None:
    meta = receipt(40)
    parts = meta.split(3)
    joined = parts[0].concat(*parts[1:])
    assert rows_of(joined) == rows_of(meta) and len(joined.blocks) == len(meta.blocks) and joined.lease_id == 5
    other = receipt(8, first_block=100, prefix="other")
    assert rows_of(meta.concat(other)) == rows_of(meta) + rows_of(other)
    with pytest.raises(ValueError, match="tags"):
        meta.concat(other.with_tags(new=np.zeros(8)))


def test_concat_of_receipts_whose_fields_were_written_together_differently() -> None:
    meta = receipt(8)
    apart = receipt(8, first_block=50, prefix="apart")
    first, second = apart.sources
    moved = RowSource(("ids",), first.block, first.row, first.start)
    rest = RowSource(("mask", "logp"), first.block, first.row, first.start)
    apart = KVBatchMeta(
        apart.partition, apart.keys, apart.fields, apart.lengths, apart.versions, apart.groups, apart.tags,
        apart.blocks, (rest, moved, second), 6, schema=SCHEMA, plane_id=PLANE,
        generations=apart.generations,
    )  # fmt: skip
    joined = meta.concat(apart)
    assert rows_of(joined) == rows_of(meta) + rows_of(apart)
    assert sorted(name for source in joined.sources for name in source.fields) == sorted(meta.fields)
    assert joined.lease_id == 0


def test_merge_fields_adds_and_replaces() -> None:
    meta = receipt(20)
    written = receipt(20, rows_per_block=8, first_block=70)
    late = KVBatchMeta(
        "train", meta.keys, ("mask", "score"), meta.lengths, meta.versions, meta.groups, {"new": np.arange(20)},
        written.blocks,
        (RowSource(("mask",), *_places(written, 0)), RowSource(("score",), *_places(written, 1))),
        schema=SCHEMA, plane_id=PLANE, generations=meta.generations,
    )  # fmt: skip
    merged = meta.merge_fields(late)
    assert set(merged.fields) == set(meta.fields) and set(merged.tags) == {*meta.tags, "new"} and merged.lease_id == 5
    for row, before, after in zip(rows_of(merged), rows_of(meta), rows_of(late), strict=True):
        assert row[5] == before[5] | after[5]
    with pytest.raises(ValueError, match="differ in data plane, keys"):
        meta.merge_fields(late.select([1, 0, *range(2, 20)]))


def test_receipts_carry_texts() -> None:
    meta = receipt(20).with_tags(source=[("math", "code", "")[number % 3] for number in range(20)])
    read = KVBatchMeta.from_bytes(meta.to_bytes())
    assert read.tags["source"].dtype == object and read.tags["source"].tolist() == meta.tags["source"].tolist()
    assert len(meta.to_bytes()) < len(receipt(20).to_bytes()) + 60
    maths = read.where(read.tags["source"] == "math")
    assert maths.keys == meta.keys[::3] and set(maths.tags["source"]) == {"math"}
    joined = maths.concat(read.where(read.tags["source"] != "math"))
    assert joined.tags["source"].tolist() == ["math"] * 7 + ["code", ""] * 6 + ["code"]
    assert meta.merge_fields(read.with_tags(source=["x"] * 20)).tags["source"].tolist() == ["x"] * 20
    assert pickle.loads(pickle.dumps(meta)).tags["source"].tolist() == meta.tags["source"].tolist()


def test_receipts_from_before_and_after_a_field_was_added_join() -> None:
    meta = receipt(8)
    wide = Schema([*SCHEMA.values(), Field("later", Kind.PER_SAMPLE, torch.float32)])
    newer = dataclasses.replace(receipt(8, first_block=100, prefix="other"), schema=wide)
    for joined in (meta.concat(newer), newer.concat(meta)):
        assert joined.schema == wide and len(joined) == 16
    assert meta.merge_fields(dataclasses.replace(meta, schema=wide)).schema == wide
    other = Schema([Field("ids", Kind.PER_TOKEN, torch.int64), *list(SCHEMA.values())[1:]])
    with pytest.raises(ValueError, match="differ in schema"):
        meta.concat(dataclasses.replace(newer, schema=other))


def _places(meta: KVBatchMeta, source: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return meta.sources[source].block, meta.sources[source].row, meta.sources[source].start


def test_with_tags() -> None:
    meta = receipt(4)
    assert meta.with_tags(advantage=np.arange(4.0)).tags["advantage"].tolist() == [0, 1, 2, 3]
    assert "advantage" not in meta.tags
    for texts in (["a", "", "a", "\0"], np.array(["a", "", "a", "\0"], object), np.array(["a", "", "b", "c"])):
        tagged = meta.with_tags(source=texts).tags["source"]
        assert tagged.dtype == object and tagged.tolist() == list(texts)
    for wrong in (["a", 1, "b", "c"], ["a"], "abcd", [b"a"] * 4, ["\ud800"] * 4, np.array([1, 2, 3, 4], object)):
        with pytest.raises(ValueError, match="tag 'source': got"):
            meta.with_tags(source=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="advantage"):
        meta.with_tags(advantage=np.arange(3))


@settings(max_examples=60)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=80))
def test_ints_round_trip(values: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    assert unpack_ints(pack_ints(array)).tolist() == values


def test_ints_are_small() -> None:
    assert len(pack_ints(np.full(1000, 10**12))) < 30
    assert len(pack_ints(np.arange(1000) % 256 + 10**12)) < 1020


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1), max_size=30))
def test_keys_round_trip(keys: list[str]) -> None:
    assert unpack_keys(pack_keys(check_keys(keys))) == keys


@pytest.mark.parametrize("dtype", ["U4", object])
def test_strings_of_numpy_are_keys(dtype: str) -> None:
    for keys in (np.array(["a.0", "b.0"], dtype), [np.str_("a.0"), "b.0"], (np.str_("a.0"), np.str_("b.0"))):
        checked = check_keys(keys)
        assert checked == ["a.0", "b.0"] and set(map(type, checked)) == {str}


@pytest.mark.parametrize(
    "keys", ["abc", np.str_("abc"), [""], ["a\0b"], [1], [b"a"], np.array("a"), np.array([["a"]]), np.array([b"a"])]
)
def test_keys_that_are_not_keys(keys: object) -> None:
    with pytest.raises(ValueError, match="keys"):
        check_keys(keys)  # type: ignore[arg-type]
