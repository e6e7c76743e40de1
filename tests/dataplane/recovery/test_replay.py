"""The log of a directory: what a new process makes of it, cut at any byte."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.codecs import messages
from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.samplers import Candidates, TaskConfig
from headrace.dataplane.errors import SamplerError
from headrace.dataplane.recovery import recorded_directory
from headrace.dataplane.recovery.effect_log import EffectLog, memory_files
from headrace.dataplane.recovery.recorded_directory import RecordedDirectory
from headrace.dataplane.recovery.saved_state import SavedState, saved
from headrace.tests.dataplane.directory.directory_rows import (
    FIELDS,
    GROUP,
    SCHEMA,
    keys_of,
    make_put,
    put,
    put_prompt,
)
from headrace.tests.dataplane.directory.test_directory_model import Run

Files = tuple[int, int]


@pytest.fixture
def files() -> Iterator[Files]:
    found = memory_files()
    yield found
    for file in found:
        os.close(file)


def opened(files: Files, now: float = 0.0) -> RecordedDirectory:
    settings = {"capacity_bytes": 1 << 20, "lease_s": 10.0, "reserve_s": 5.0}
    directory = RecordedDirectory(EffectLog(files), lambda payload: None, **settings)
    directory.replay(now)
    return directory


def state(directory: RecordedDirectory) -> bytes:
    parts = directory._partitions, directory.blocks, directory._leases, directory._puts_elsewhere
    found: SavedState = saved(*parts)
    return messages.encode(found)


class MortalRun(Run):
    """Operations of a directory that dies now and then. The model knows nothing of it."""

    def __init__(self, files: Files, seed: int) -> None:
        super().__init__(opened(files), seed)
        self.directory.register("p", SCHEMA, ("a", "b"), GROUP)
        self.files = files

    def die(self) -> None:
        self.directory.flush()
        assert isinstance(self.directory, RecordedDirectory)
        before = state(self.directory)
        self.directory = opened(self.files, self.now)
        assert state(self.directory) == before
        self.leases = [(meta, task, self.now + 10.0) for meta, task, _ in self.leases]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("compact_bytes", [0, 20_000])
def test_a_new_process_goes_on_where_the_dead_one_stopped(
    files: Files, seed: int, compact_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_directory, "COMPACT_BYTES", compact_bytes)
    run = MortalRun(files, seed)
    steps = [run.put] * 6 + [run.claim] * 6 + [run.release] * 3 + [run.reset, run.free, run.clear, run.tag, run.die]
    for number in range(200):
        run.random.choice(steps)()
        if number % 20 == 0:
            run.agree()


def test_a_log_that_is_cut_at_any_byte_gives_the_state_after_some_frame(files: Files) -> None:
    run = MortalRun(files, 3)
    states = {state(opened_copy(files, 0)): 0}
    for number in range(12):
        run.random.choice([run.put, run.put, run.claim, run.release, run.clear])()
        run.directory.flush()
        assert isinstance(run.directory, RecordedDirectory)
        states.setdefault(state(run.directory), number)
    size = max(os.fstat(file).st_size for file in files)
    seen = {state(opened_copy(files, cut)) for cut in range(0, size + 1, 7)} | {state(opened_copy(files, size))}
    assert seen <= set(states) and state(run.directory) in seen


def opened_copy(files: Files, cut: int) -> RecordedDirectory:
    """A directory from the first `cut` bytes of the log."""
    copies = memory_files()
    for file, copy in zip(files, copies, strict=True):
        os.write(copy, os.pread(file, cut, 0))
    directory = opened(copies)
    for copy in copies:
        os.close(copy)
    return directory


def test_a_beginning_that_is_cut_leaves_the_earlier_log_in_use(files: Files) -> None:
    directory = opened(files)
    directory.register("p", SCHEMA, ("a",), GROUP)
    put_prompt(directory, 1)
    directory.flush()
    before = state(directory)
    unused = next(file for file in files if not os.fstat(file).st_size)
    used = next(file for file in files if file != unused)
    os.pwrite(unused, os.pread(used, 20, 0), 0)  # The process died while it copied the state.
    assert state(opened(files)) == before


def test_replies_ids_and_notes_outlive_the_process(files: Files) -> None:
    directory = opened(files)
    directory.register("p", SCHEMA, (TaskConfig("a", "length_balanced", {"num_ranks": 2}),), GROUP)
    for number in range(4):
        put_prompt(directory, number)
    claim = ClaimRows("p", "a", FIELDS, GROUP, whole_groups=True, arguments={"rank": 1})
    assert directory.claim(claim, 0.0) is not None
    directory.answered(b"client 1 002", b"the receipt")
    late = directory.reserve(make_put(keys_of(8), FIELDS), 0.0)
    assert late is not None
    directory.flush()
    after = opened(files)
    assert after.earlier_reply(b"client 1 002") == b"the receipt" and after.earlier_reply(b"client 1 003") is None
    assert late.reservation_id < after.first_space and late.reservation_id not in after.blocks.reservations
    assert after.blocks.next_block > late.block_ids.stop
    assert state(after) == state(directory)
    assert put(after, keys_of(9), FIELDS).blocks[0].block_id >= after.blocks.next_block - 1


def test_numbers_that_a_sampler_noted_before_it_failed_outlive_the_process(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(files)
    directory.register("p", SCHEMA, (TaskConfig("a", "length_balanced", {"num_ranks": 2}),), GROUP)
    for number in range(4):
        put_prompt(directory, number)
    original = Candidates.note

    def note(candidates: Candidates, positions: np.ndarray, numbers: np.ndarray) -> None:
        original(candidates, positions, numbers)
        raise ValueError("the sampler has failed")

    monkeypatch.setattr(Candidates, "note", note)
    with pytest.raises(SamplerError, match="has failed"):
        directory.claim(ClaimRows("p", "a", FIELDS, GROUP, whole_groups=True, arguments={"rank": 0}), 0.0)
    directory.flush()
    part = directory._partitions["p"]
    assert part.tasks["a"].notes.of(part.rows.live()).any()
    assert state(opened(files)) == state(directory)


def test_a_log_without_room_says_so_and_is_empty(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EffectLog(files)
    log.append([("a", b"1")])

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    log.append([("a", b"2")])
    assert not log.is_whole and not list(EffectLog(files).take())


def random_items(generator: random.Random) -> list[tuple[str, bytes]]:
    return [("x", generator.randbytes(generator.randrange(50))) for _ in range(generator.randrange(1, 4))]


def test_records_come_back_in_order_over_new_beginnings(files: Files) -> None:
    generator, expected = random.Random(0), []
    log = EffectLog(files)
    for _ in range(60):
        items = random_items(generator)
        if generator.random() < 0.1:
            expected = items
            log.begin(items)
        else:
            expected = expected + items
            log.append(items)
        if generator.random() < 0.2:
            log = EffectLog(files)
            assert list(log.take()) == expected
