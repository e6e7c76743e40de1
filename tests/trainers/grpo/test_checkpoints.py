"""Checkpoints of the driver's numbers, and whose groups the journal gives back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.trainers.cluster import actor_specs
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.grpo.checkpoints import Checkpoints
from headrace.trainers.grpo.steps import State


def test_the_newest_whole_one_counts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoints.latest_state()
    for step in (2, 4, 6):
        state = {"step": step, "version": step, "position": 8 * step, "outstanding": [3, 8 * step - 1]}
        (tmp_path / f"step_{step:06d}.json").write_text(json.dumps(state))
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "step_000004").mkdir()
    assert checkpoints.latest_state() == State(4, 4, 32, [3, 31])


def test_one_from_before_prompts_could_be_outstanding_still_counts(tmp_path: Path) -> None:
    (tmp_path / "step_000003").mkdir()
    (tmp_path / "step_000003.json").write_text('{"step": 3, "version": 3, "position": 24}')
    assert Checkpoints(tmp_path).latest_state() == State(3, 3, 24, [])


def fingerprint(**sections: Any) -> str:
    sections["run"] = {"dir": "/somewhere", "checkpoint_every": 5, **sections.get("run", {})}
    found = actor_specs.journal(build_config(sections))
    assert found is not None and found.folder == "/somewhere/journal"
    return found.fingerprint


def test_a_run_that_cannot_be_resumed_has_no_journal() -> None:
    assert actor_specs.journal(build_config({})) is None
    assert actor_specs.journal(build_config({"run": {"checkpoint_every": 5, "journal": False}})) is None


def test_the_journal_s_groups_are_for_the_same_settings_only(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("")
    file = {"train": str(prompts), "validation": str(prompts)}
    same = fingerprint()
    assert same == fingerprint(trainer={"lr": 1e-5, "dp": 2}, run={"checkpoint_every": 7}, algorithm={"steps": 7})
    assert same == fingerprint(rollout={"num_engines": 2, "num_actors": 3})
    assert same == fingerprint(data={"max_prompt_tokens": 256})
    others = [
        fingerprint(run={"seed": 1}),
        fingerprint(rollout={"temperature": 0.5}),
        fingerprint(rollout={"max_new_tokens": 99}),
        fingerprint(rollout={"environment": "tool_use"}),
        fingerprint(algorithm={"group_size": 4}),
        fingerprint(data={"train": "task:arithmetic"}),
        fingerprint(data=file),
        fingerprint(data={**file, "template": "{prompt} "}),
        fingerprint(data={**file, "chat_template": "all"}),
        fingerprint(data={**file, "chat_template": "all", "system_prompt": "be brief"}),
        fingerprint(data={**file, "overlong_prompts": "drop"}),
        fingerprint(data={**file, "overlong_prompts": "drop", "max_prompt_tokens": 100}),
        fingerprint(data={"train": "a/b", "validation": "a/b"}),
        fingerprint(data={"train": "a/b", "validation": "a/b", "subset": "main"}),
        fingerprint(rollout={"stop": ["\n"]}),
        fingerprint(model={"dtype": "bfloat16"}),
        fingerprint(reward={"functions": [{"kind": "exact_match", "weight": 0.5}]}),
        fingerprint(reward={"functions": [{"kind": "format", "options": {"pattern": "x"}}]}),
    ]
    assert len({same, *others}) == 1 + len(others)
