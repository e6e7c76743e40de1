"""A recorded run's groups, put again instead of generated: all of them, failed rows too, or an error that names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.actors.protocols import Prompt
from headrace.actors.rollout.journal import GroupJournal, JournalConfig, Purpose
from headrace.tests.actors.rollout.journal_runs import SAMPLES, Life, segments


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
    with pytest.raises(ValueError, match="run.replay: .*nowhere is no folder"):
        journal(tmp_path / "nowhere", "replay")
