"""Tests of rollouts with a journal over a real data plane: every group is there once after a kill or in a replay.

A killed run's successor generates no group that was finished. A replay puts all groups of a recorded run again, failed
rows too, or an error names the one that it lacks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.environments.episode import Episode
from headrace.actors.protocols import Prompt
from headrace.actors.rollout.journal import GroupJournal, JournalConfig, Purpose
from headrace.actors.rollout.journal_segments import read_heads
from headrace.actors.rollout.results import RolloutReport
from headrace.dataplane.config import StoreKind
from headrace.tests.actors.rollout import journal_drill
from headrace.tests.actors.rollout.journal_runs import (
    SAMPLES,
    Killed,
    Life,
    keys_of,
    open_cut_journal,
    open_journal,
    segments,
    versions_of,
)

COUNTS = ("rows", "failed", "truncated", "prompt_tokens", "response_tokens", "response_length_max", "reward_sum")


def figures(report: RolloutReport) -> dict[str, float]:
    return {**{name: getattr(report, name) for name in COUNTS}, **report.component_sums}


def expect_resumed(tokenizer: Any, folder: Path, before: dict[str, dict], finished: set[int], store: StoreKind) -> None:
    """A second life over positions 0 to 5 takes the finished ones from the journal and generates the others."""
    life = Life(tokenizer, open_journal(folder), version=1, store=store)
    report = life.rollout(range(6))
    rows = life.rows()
    life.end()
    assert sorted(rows) == sorted(keys_of(range(6)))
    assert versions_of(rows) == {position: 0 if position in finished else 1 for position in range(6)}
    assert sorted(life.generated) == sorted(set(range(6)) - finished)
    assert report.restored == SAMPLES * len(finished) and report.rows == SAMPLES * 6
    for key in before.keys() & set(keys_of(sorted(finished))):
        assert rows[key] == before[key]


@pytest.mark.parametrize("store", ["local", "shm"])
@pytest.mark.parametrize(
    ("moment", "finished"),
    [
        ("before the append", {0, 1}),
        ("in mid-append", {0, 1, 2}),
        ("behind the append", {0, 1, 2, 3}),
        ("before the put", {0, 1, 2, 3}),
        ("behind the put", {0, 1, 2, 3}),
    ],
)
def test_killed_at_a_moment(tokenizer: Any, tmp_path: Path, moment: str, finished: set[int], store: StoreKind) -> None:
    first = Life(tokenizer, open_journal(tmp_path), store=store)
    first.rollout([0, 1])
    if "append" not in moment:
        first.cut_put = moment.split()[0]
        with pytest.raises(Killed):
            first.rollout([2, 3])
        before = first.rows()
        first.end()
    else:
        before = first.rows()
        first.end()
        cut = {"before the append": 0, "in mid-append": record_end(tokenizer, tmp_path) + 70, "behind the append": None}
        second = Life(tokenizer, open_cut_journal(tmp_path, cut[moment]), store=store)
        with pytest.raises(Killed):
            second.rollout([2, 3])
        assert second.rows() == {}, "nothing is put that is not journaled"
        second.end()
    expect_resumed(tokenizer, tmp_path, before, finished, store)


def record_end(tokenizer: Any, folder: Path) -> int:
    """Bytes of the record of position 2."""
    scratch = folder / "scratch"
    life = Life(tokenizer, open_journal(scratch))
    life.rollout([2])
    life.end()
    [path] = segments(scratch)
    return path.stat().st_size


@pytest.mark.long
def test_killed_at_every_byte_of_an_append(tokenizer: Any, tmp_path: Path) -> None:
    """All of a record's head, and every 16th byte behind it."""
    end = record_end(tokenizer, tmp_path)
    for cut in (*range(60), *range(60, end, 16), end - 1, end):
        folder = tmp_path / str(cut)
        first = Life(tokenizer, open_cut_journal(folder, cut))
        with pytest.raises(Killed):
            first.rollout([2])
        first.end()
        second = Life(tokenizer, open_journal(folder), version=1)
        second.rollout([2, 3])
        rows = second.rows()
        second.end()
        assert sorted(second.generated) == ([3] if cut == end else [2, 3])
        assert sorted(rows) == sorted(keys_of([2, 3]))


def test_a_restored_report_says_what_the_first_one_said(tokenizer: Any, tmp_path: Path) -> None:
    first = Life(tokenizer, open_journal(tmp_path))
    reports = [first.rollout(range(9)), first.rollout(range(9, 40))]
    before = first.rows()
    first.end()
    second = Life(tokenizer, open_journal(tmp_path), version=1)
    restored = [second.rollout(range(9)), second.rollout(range(9, 40))]
    assert second.rows() == before and second.generated == []
    second.end()
    for one, other in zip(reports, restored, strict=True):
        assert figures(other) == pytest.approx(figures(one), rel=1e-12)
        assert (one.restored, one.restored_tokens) == (0, 0)
        assert (other.restored, other.restored_tokens, other.generate_s) == (other.rows, other.response_tokens, 0.0)


def test_a_group_generated_afresh_takes_the_first_one_s_place(tokenizer: Any, tmp_path: Path) -> None:
    first = Life(tokenizer, open_journal(tmp_path))
    first.rollout(range(4))
    first.end()
    second = Life(tokenizer, open_journal(tmp_path), version=3)
    report = second.rollout([1, 2], fresh=True)
    assert (report.restored, sorted(second.generated)) == (0, [1, 2])
    assert versions_of(second.rows()) == {1: 3, 2: 3}
    second.end()
    third = Life(tokenizer, open_journal(tmp_path, "rollout 7"), version=4)
    third.rollout(range(4))
    assert versions_of(third.rows()) == {0: 0, 1: 3, 2: 3, 3: 0} and third.generated == []
    third.end()


def test_groups_with_failed_rows_are_generated_again(tokenizer: Any, tmp_path: Path) -> None:
    def broken(prompt: Prompt, response: str, finish_reason: str) -> float:
        if response == prompt.answer[::-1] or prompt.uid == "1":
            raise RuntimeError("not this one")
        return 1.0

    first = Life(tokenizer, open_journal(tmp_path), rewards=[("broken", broken, 1.0)])
    assert first.rollout(range(3)).failed > 0
    assert len(first.rows()) == SAMPLES * 3, "they are put nevertheless"
    first.end()
    second = Life(tokenizer, open_journal(tmp_path), version=1)
    report = second.rollout(range(3))
    assert (report.failed, len(second.rows())) == (0, SAMPLES * 3) and 1 in second.generated
    second.end()


def test_other_settings_make_other_groups(tokenizer: Any, tmp_path: Path) -> None:
    first = Life(tokenizer, open_journal(tmp_path, fingerprint="one"))
    first.rollout(range(3))
    first.end()
    second = Life(tokenizer, open_journal(tmp_path, fingerprint="two"), version=1)
    assert second.rollout(range(3)).restored == 0 and sorted(second.generated) == [0, 1, 2]
    second.end()


async def two_turns(episode: Episode) -> float:
    await episode.generate(max_new_tokens=3)
    episode.add_text("7")
    return float((await episode.generate(max_new_tokens=3)).num_tokens)


@pytest.mark.parametrize("piece_tokens", [0, 2])
def test_unfinished_groups_go_on_from_their_turns(tokenizer: Any, tmp_path: Path, piece_tokens: int) -> None:
    """The groups at positions 0 and 1 are finished; those at 2 and 3 are not, when the actor dies."""
    environment = two_turns if not piece_tokens else None
    options: dict[str, Any] = {"environment": environment, "piece_tokens": piece_tokens}
    lives = [Life(tokenizer, open_journal(tmp_path), **options)]
    lives[0].rollout([0, 1])
    made = [*lives[0].made]
    lives[0].end()
    for version in (1, 2):
        lives.append(Life(tokenizer, open_journal(tmp_path), version=version, answers=3, **options))
        with pytest.raises(Killed):
            lives[-1].rollout(range(4))
        made += lives[-1].made
        lives[-1].end()
    last = Life(tokenizer, open_journal(tmp_path), version=3, **options)
    report = last.rollout(range(4))
    made += last.made
    rows = last.rows()
    last.end()
    assert sorted(rows) == sorted(keys_of(range(4))) and report.restored == 2 * SAMPLES
    assert (report.recovered_turns > 0, report.recovered_tokens > 5, report.unmatched_turns) == (True, True, 0)
    tokens = sum(sum(row["response_mask"]) for row in rows.values())
    assert tokens == sum(len(answer) for _, answer in made), "each token of the rows was made once"
    assert {int(v) for row in rows.values() for v in np.reshape(row["version_spans"], (-1, 2))[:, 1]} == {
        -1,
        0,
        1,
        2,
        3,
    }
    assert not list(tmp_path.glob("*.turns")), "turns of finished groups are removed"
    again = Life(tokenizer, open_journal(tmp_path), version=4, answers=0, **options)
    assert again.rollout(range(4)).recovered_turns == 0 and again.rows() == rows
    again.end()


def test_a_group_generated_afresh_neither_reads_nor_writes_turns(tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"environment": two_turns, "piece_tokens": 0}
    first = Life(tokenizer, open_journal(tmp_path), answers=2, **options)
    with pytest.raises(Killed):
        first.rollout([0])
    first.end()
    [path] = tmp_path.glob("*.turns")
    size = path.stat().st_size
    second = Life(tokenizer, open_journal(tmp_path), answers=3, version=1, **options)
    with pytest.raises(Killed):
        second.rollout([0], fresh=True)
    second.end()
    assert [one.stat().st_size for one in tmp_path.glob("*.turns")] == [size] and len(second.made) == 3


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_kill_9_at_random_moments(model_folder: str, tmp_path: Path) -> None:
    """Real processes, killed while they append and put; see journal_drill.py."""
    command = [sys.executable, journal_drill.__file__, model_folder, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = [line for line in done.stdout.splitlines() if line.startswith("killed")]
    assert len(kills) >= 3 and "all groups once" in done.stdout
    finished = {head.position for path in segments(tmp_path) for _, head in read_heads(path, 0)[0]}
    assert finished == set(range(journal_drill.GROUPS))


def journal(folder: Path, purpose: Purpose) -> GroupJournal:
    return GroupJournal(JournalConfig(str(folder), "one", purpose), "rollout 0")


def broken(prompt: Prompt, response: str, finish_reason: str) -> float:
    if prompt.uid == "1":
        raise RuntimeError("not this one")
    return 1.0


def test_a_record_is_never_trimmed_and_comes_back_whole(tokenizer: Any, tmp_path: Path) -> None:
    kept = journal(tmp_path, "record")
    first = Life(tokenizer, kept, rewards=[("broken", broken, 1.0)])
    report = first.rollout(range(4))
    rows = first.rows()
    kept.trim(4, ())
    first.end()
    before = [path.read_bytes() for path in segments(tmp_path)]
    again = Life(tokenizer, journal(tmp_path, "replay"), version=9)
    replayed = again.rollout([3, 1, 0, 2])
    assert again.generated == [] and again.rows() == rows
    assert (replayed.rows, replayed.failed, replayed.restored) == (4 * SAMPLES, report.failed, 4 * SAMPLES)
    assert report.failed == SAMPLES
    again.end()
    assert [path.read_bytes() for path in segments(tmp_path)] == before, "a replay writes nothing"


def test_what_was_not_recorded_is_named(tokenizer: Any, tmp_path: Path) -> None:
    first = Life(tokenizer, journal(tmp_path, "record"))
    first.rollout(range(2))
    first.end()
    again = Life(tokenizer, journal(tmp_path, "replay"))
    with pytest.raises(
        ValueError, match=r"run.replay: .* holds no group of the prompt at position 2 \(and of 1 others"
    ):
        again.rollout([1, 2, 3])
    assert again.generated == []
    again.end()
    with pytest.raises(ValueError, match="run.replay: .*nowhere is not a folder"):
        journal(tmp_path / "nowhere", "replay")
