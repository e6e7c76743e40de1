"""The journal's files: what a kill leaves, what damage does, who sees whose records, what trimming takes away."""

from __future__ import annotations

import itertools
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA
from headrace.actors.rollout.journal import JournaledGroup, encode_record
from headrace.actors.rollout.journal_segments import HEAD_BYTES, DamagedJournal, _remove_unless_written, read_heads
from headrace.actors.rollout.results import GroupFigures
from headrace.actors.rollout.rows import RolloutRows, join
from headrace.codecs.jagged import pack, unpack
from headrace.dataplane.meta import POSITION
from headrace.tests.actors.rollout.journal_runs import open_journal, segments
from headrace.tests.full_disk import file_size_limit


def group(position: int, mark: int = 0, lengths: tuple[int, ...] = (3, 0, 5)) -> JournaledGroup:
    """A group all of whose bytes follow from its arguments; one row has no tokens."""
    rng = np.random.default_rng([position, mark])
    data = {
        "input_ids": [torch.from_numpy(rng.integers(0, 99, n).astype(np.int32)) for n in lengths],
        "response_mask": [torch.ones(n, dtype=torch.uint8) for n in lengths],
        "rollout_logprobs": [torch.from_numpy(rng.normal(size=n).astype(np.float32)) for n in lengths],
        "version_spans": [torch.tensor([[0, mark]] * (n > 0), dtype=torch.int32).reshape(-1, 2) for n in lengths],
    }
    size = len(lengths)
    rows = RolloutRows(
        [f"{position}.{sample}" for sample in range(size)],
        np.full(size, mark, dtype=np.int64),
        {"reward": rng.normal(size=size).astype(np.float32), "valid": np.ones(size, dtype=np.float32)},
        pack(ROLLOUT_SCHEMA.subset(ROLLOUT_FIELDS), data),
    )
    return JournaledGroup(position, rows, GroupFigures(size, 0, 1, 4, sum(lengths), 5, 0.1 + 0.2, {"exact": 1 / 3}))


def assert_same(found: JournaledGroup | None, expected: JournaledGroup) -> None:
    assert found is not None
    assert (found.position, found.figures, found.rows.keys) == (expected.position, expected.figures, expected.rows.keys)
    assert found.rows.versions.dtype == np.int64 and (found.rows.versions == expected.rows.versions).all()
    # `expected` has no position among its tags, as records of earlier versions: the head's is filled in.
    assert found.rows.tags.keys() == {*expected.rows.tags, POSITION}
    assert found.rows.tags[POSITION].tolist() == [expected.position] * len(expected.rows.keys)
    for name, values in expected.rows.tags.items():
        assert found.rows.tags[name].dtype == values.dtype and (found.rows.tags[name] == values).all()
    assert found.rows.batch.schema == expected.rows.batch.schema
    for name, column in unpack(expected.rows.batch).items():
        for ours, theirs in zip(unpack(found.rows.batch)[name], column, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_a_group_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "deep" / "journal")
    groups = [group(position, mark=2) for position in (7, 3, 40)]
    journal.append(groups[:2])
    journal.append(groups[2:])
    [segment] = segments(tmp_path / "deep" / "journal")
    assert re.fullmatch(r"rollout-0-\d+\.journal", segment.name)
    assert [found.position for found in journal.find_all([40, 5, 3])] == [40, 3]
    for expected in groups:
        assert_same(journal.find(expected.position), expected)
    joined = join([found.rows for found in journal.find_all([7, 40])])
    assert joined.keys == [*groups[0].rows.keys, *groups[2].rows.keys] and joined.batch.num_rows == 6


def test_parts_of_rows_are_journaled_like_rows_of_their_own(tmp_path: Path) -> None:
    groups = [group(position) for position in range(3)]
    parts = join([one.rows for one in groups]).split([3, 3, 3])
    journal = open_journal(tmp_path)
    journal.append(JournaledGroup(one.position, part, one.figures) for one, part in zip(groups, parts, strict=True))
    for found, expected in zip(journal.find_all(range(3)), groups, strict=True):
        assert_same(found, expected)


# ---------------------------------------------------------------- what a kill leaves


def test_a_record_cut_anywhere_was_never_written(tmp_path: Path) -> None:
    records = [encode_record(group(position), 1, stamp=position) for position in range(2)]
    path = tmp_path / "rollout-0-1.journal"
    path.write_bytes(b"".join(records))
    ends = np.cumsum([len(record) for record in records]).tolist()
    for cut in range(ends[-1], -1, -1):
        os.truncate(path, cut)
        heads, end = read_heads(path, 0)
        complete = [end for end in ends if end <= cut]
        assert [head.position for _, head in heads] == list(range(len(complete)))
        assert end == (complete[-1] if complete else 0)


def test_the_next_writer_goes_on_behind_a_torn_tail(tmp_path: Path) -> None:
    for cut in (1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 200):
        first = open_journal(tmp_path / str(cut))
        first.append([group(0)])
        [torn] = segments(tmp_path / str(cut))
        end = torn.stat().st_size
        first.append([group(1)])
        first.close()
        os.truncate(torn, end + cut)
        second = open_journal(tmp_path / str(cut))
        assert [found.position for found in second.find_all([0, 1])] == [0]
        second.append([group(1, mark=cut)])
        found = second.find_all([0, 1])
        assert_same(found[0], group(0))
        assert_same(found[1], group(1, mark=cut))
        assert torn.stat().st_size == end + cut, "what is torn stays as it is"


def test_a_record_being_written_is_seen_once_it_is_whole(tmp_path: Path) -> None:
    reader = open_journal(tmp_path, "rollout 1")
    record = encode_record(group(4), reader._segments.fingerprint, 1)
    path = tmp_path / "rollout-0-1.journal"
    for size in (0, 10, HEAD_BYTES, len(record) - 1):
        path.write_bytes(record[:size])
        assert reader.find_all([4]) == []
    path.write_bytes(record)
    assert_same(reader.find_all([4])[0], group(4))


def test_a_full_disk_is_named_and_leaves_the_journal_whole(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append([group(0)])
    [path] = segments(tmp_path)
    with (
        file_size_limit(path.stat().st_size + 100),
        pytest.raises(OSError, match=rf"journal: {path} cannot be written: File too large"),
    ):
        journal.append([group(1)])
    journal.append([group(2)])
    assert len(segments(tmp_path)) == 2, "nothing is written behind a torn record"
    assert [found.position for found in open_journal(tmp_path, "rollout 1").find_all(range(3))] == [0, 2]


# ---------------------------------------------------------------- damage


def test_every_changed_byte_of_a_record_is_noticed(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append([group(0)])
    journal.close()
    [path] = segments(tmp_path)
    start = path.stat().st_size
    middle = encode_record(group(1), journal._segments.fingerprint, 1 << 62)
    whole = path.read_bytes() + middle + encode_record(group(2), journal._segments.fingerprint, (1 << 62) + 1)
    for at in range(start, start + len(middle)):
        changed = bytearray(whole)
        changed[at] ^= 0x40
        path.write_bytes(changed)
        reader = open_journal(tmp_path, "rollout 1")
        with pytest.raises(DamagedJournal, match=rf"^journal: {path}, record at byte {start}: "):
            reader.find_all([1])
    path.write_bytes(whole)
    assert len(open_journal(tmp_path, "rollout 1").find_all(range(3))) == 3


# ---------------------------------------------------------------- several writers, several records


def test_writers_see_one_another_and_read_only_what_is_new(tmp_path: Path) -> None:
    mine, other = open_journal(tmp_path, "rollout 0"), open_journal(tmp_path, "rollout 1")
    mine.append([group(0)])
    other.append([group(1)])
    assert [found.position for found in mine.find_all(range(4))] == [0, 1]
    theirs = next(path for path in segments(tmp_path) if path.name.startswith("rollout-1"))
    with open(theirs, "r+b") as file:  # a head that was read is not read again
        file.write(b"\0" * HEAD_BYTES)
    other.append([group(2)])
    mine.append([group(3)])
    assert [found.position for found in mine.find_all([0, 2, 3])] == [0, 2, 3]
    with pytest.raises(DamagedJournal, match="record at byte 0"):
        mine.find(1)


def test_a_position_s_latest_record_counts_whoever_wrote_it(tmp_path: Path) -> None:
    mine, other = open_journal(tmp_path, "rollout 0"), open_journal(tmp_path, "rollout 1")
    mine.append([group(5, mark=1)])
    other.append([group(5, mark=2)])
    assert_same(mine.find_all([5])[0], group(5, mark=2))
    mine.append([group(5, mark=3)])
    assert_same(other.find_all([5])[0], group(5, mark=3))
    assert_same(open_journal(tmp_path, "rollout 2").find_all([5])[0], group(5, mark=3))


def test_groups_made_with_other_settings_are_not_found(tmp_path: Path) -> None:
    open_journal(tmp_path, fingerprint="temperature 1").append([group(0)])
    other = open_journal(tmp_path, fingerprint="temperature 0.5")
    assert other.find_all([0]) == []
    other.append([group(0, mark=9)])
    assert_same(other.find_all([0])[0], group(0, mark=9))
    assert_same(open_journal(tmp_path, fingerprint="temperature 1").find_all([0])[0], group(0))


# ---------------------------------------------------------------- trimming


def test_trimming_removes_what_is_settled_and_nothing_else(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for positions in ((0, 1), (2, 5), (3, 6)):
        journal.append(map(group, positions))
        journal.trim(0, [])  # ends the segment
    assert len(segments(tmp_path)) == 3
    journal.trim(4, [1])
    assert len(segments(tmp_path)) == 3, "position 1 is outstanding, 5 and 6 are to come"
    journal.trim(4, [3])
    assert [found.position for found in journal.find_all(range(9))] == [2, 3, 5, 6]
    journal.trim(7, [2])
    assert [found.position for found in journal.find_all(range(9))] == [2, 5]
    journal.append([group(7)])
    journal.trim(8, [])
    assert segments(tmp_path) == [] and journal.find_all(range(9)) == []
    journal.append([group(8)])
    assert_same(journal.find_all([8])[0], group(8))


def test_a_segment_that_another_writes_stays_until_its_writer_is_gone(tmp_path: Path) -> None:
    mine, other = open_journal(tmp_path, "rollout 0"), open_journal(tmp_path, "rollout 1")
    other.append([group(0)])
    mine.trim(10, [])
    assert len(segments(tmp_path)) == 1
    other.append([group(10)])
    assert_same(mine.find_all([10])[0], group(10))
    other.close()
    mine.trim(11, [])
    assert segments(tmp_path) == [] and mine.find_all([10]) == []
    assert other.find(10) is None and other.find_all([10]) == [], "trimmed by another while it was known"


def test_writers_that_trim_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    positions, rounds = itertools.count(), 60
    firsts: list[int] = []

    def write(writer: str) -> None:
        journal = open_journal(tmp_path, writer)
        for _ in range(rounds):
            position = next(positions)
            journal.append([group(position)])
            firsts.append(position - 8)  # a position is appended before 8 later ones are
            journal.trim(position - 8, [])
        journal.close()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, f"rollout {number}") for number in range(4)]:
            done.result()
    reader = open_journal(tmp_path, "reader")
    expected = list(range(max(firsts), 4 * rounds))
    assert [found.position for found in reader.find_all(expected)] == expected
    reader.trim(4 * rounds, [])
    assert segments(tmp_path) == []


def test_a_segment_that_has_grown_since_it_was_looked_at_stays(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append([group(0)])
    [path] = segments(tmp_path)
    end = path.stat().st_size
    journal.append([group(9)])
    journal.close()
    _remove_unless_written(path, end)
    assert path.exists()
    _remove_unless_written(path, path.stat().st_size)
    assert not path.exists()


def test_what_a_kill_left_of_a_first_record_is_removed(tmp_path: Path) -> None:
    (tmp_path / "rollout-3-1.journal").write_bytes(encode_record(group(7), 0, 0)[:-1])
    journal = open_journal(tmp_path)
    journal.append([group(1)])
    journal.trim(0, [])
    assert [path.name.startswith("rollout-0") for path in segments(tmp_path)] == [True]


def test_files_of_many_lives_stay_bounded_by_what_is_not_covered(tmp_path: Path) -> None:
    sizes = []
    for life in range(6):
        journal = open_journal(tmp_path, f"rollout {life % 2}")
        for step in range(5):
            first = (5 * life + step) * 4
            journal.append(map(group, range(first, first + 4)))
            journal.trim(first - 4, [])
            sizes.append(sum(os.path.getsize(path) for path in segments(tmp_path)))
        journal._segments.end()
    record = len(encode_record(group(0), 0, 0))
    assert max(sizes) <= 9 * (record + 16)
