"""The words of every failed row reach a file, and the terminal once for each kind."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.trainers.config.load import build_config
from headrace.trainers.grpo import training_modes
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.feed import TooManyFailedRows
from headrace.trainers.observe.reward_errors import MAX_TOLD, RewardErrors, kind_of


def test_each_kind_is_told_once_and_every_call_is_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    errors = RewardErrors(tmp_path)
    errors.note(1, 0, 16, ())
    assert not list(tmp_path.iterdir())
    said = [f"reward 'digits' raised ValueError: no number in 'row {row}'" for row in range(3)]
    with caplog.at_level(logging.WARNING):
        for step, error in enumerate(
            [*said, "reward 'digits' raised KeyError: 'x'", "prompt 'a1': generation aborted"]
        ):
            errors.note(step, 2, 16, (error, error))
        errors.note(9, 2, 16, ("prompt 'b7': generation aborted", "no answer"))
    lines = [json.loads(line) for line in (tmp_path / "reward_errors.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 9]
    assert lines[0] == {"step": 0, "failed_rows": 2, "rows": 16, "errors": [said[0]] * 2}
    assert [record.getMessage().split(" with a new error: ")[1].split(" (told")[0] for record in caplog.records] == [
        said[0],
        "reward 'digits' raised KeyError: 'x'",
        "prompt 'a1': generation aborted",
        "no answer",
    ]


def test_the_terminal_is_not_flooded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    errors = RewardErrors(tmp_path)
    for number in range(3 * MAX_TOLD):
        errors.note(1, 1, 8, [f"reward 'f' raised Error{chr(65 + number)}: no"])
    assert len(caplog.records) == MAX_TOLD
    assert kind_of("reward 'f' raised ValueError: 'a' 1") == "reward 'f' raised ValueError"


def test_the_file_is_written_also_when_the_run_ends_in_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = SimpleNamespace(config=build_config({}), observers=SimpleNamespace(reward_errors=RewardErrors(tmp_path)))
    errors = ("the episode failed: KeyError: 'room' (my.py line 3)",)
    failed = SimpleNamespace(failures={"environment": 2}, rows=16, errors=errors)
    feed: Any = SimpleNamespace(reports=(failed,))

    def ends(*_: Any) -> None:
        raise TooManyFailedRows("16 of 16 rows")

    monkeypatch.setattr(training_modes, "_run_steps", ends)
    monkeypatch.setattr(training_modes, "Steps", lambda *_: SimpleNamespace(first={}))
    with pytest.raises(TooManyFailedRows):
        next(training_modes.run_steps(run, State(), feed, lambda state, metrics: None))
    [line] = (tmp_path / "reward_errors.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "failed_rows": 2, "rows": 16, "errors": list(failed.errors)}
