"""Checkpoints of the driver's numbers, and whose groups the journal gives back."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from headrace.testing import FakeActor, FakeCluster
from headrace.trainers.cluster import rollout_specs
from headrace.trainers.cluster.calls import ActorFailed, gather
from headrace.trainers.cluster.rollout_specs import journal
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import CheckpointDamaged, UserError
from headrace.trainers.grpo import checkpoints
from headrace.trainers.grpo.checkpoints import Checkpoints, NoCheckpoint, State
from headrace.trainers.grpo.gpu_turns import BothResident
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.grpo.train_workers import size_of
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat


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


@pytest.mark.parametrize("damage", [b'{"step": 4, "version": 4, "position": 99', b'{"stop": 4}', None])
def test_damaged_numbers_are_named_and_the_checkpoint_before_is_offered(tmp_path: Path, damage: bytes | None) -> None:
    for step in (2, 4):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / f"step_{step:06d}.json").write_text(checkpoints._encoded(State(step, step, 8 * step, [3])))
    file = tmp_path / "step_000004.json"
    file.write_bytes(file.read_bytes().replace(b"32", b"33") if damage is None else damage)
    with pytest.raises(
        UserError, match="step_000004.json is damaged: .*; it is kept as step_000004.damaged, and --resume"
    ):
        Checkpoints(tmp_path).latest_state()
    assert Checkpoints(tmp_path).latest_state() == State(2, 2, 16, [3]) and (tmp_path / "step_000004.damaged").is_dir()


class Workers:
    """A run of two train workers that write at once, unless a call is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **run: Any) -> None:
        self.config = build_config(
            {"run": {"dir": str(folder), "journal": not run.get("checkpoint_minutes", 1), **run}}
        )
        self.stages = Stages(Tracer(0), Heartbeat())
        self.handles = [FakeCluster().trainer(self.answer, rank) for rank in range(2)]
        self.roles = BothResident(None)  # pyright: ignore[reportArgumentType]
        self.timeout_s, self.active = 1.0, ()
        self.folder = folder
        self.refused: list[str] = []
        """Methods whose next call fails on all workers."""
        self.error: Exception = OSError(28, "No space left on device")
        self.calls: list[str] = []
        self.warnings: list[str] = []
        self.checkpoints = Checkpoints(folder, self.config.run, warn=self.warnings.append)

    def answer(self, method: str) -> Any:
        if method in self.refused:
            return RayTaskError(method, "a traceback", self.error)
        return 1 if method == "progress" else None

    def gather_slow(self, calls: Any, stage: str, draft: Path | None = None) -> list[Any]:
        [method] = {call.method.__name__ for call in calls}
        self.calls.append(method)
        refused = method in self.refused
        try:
            found = gather(calls, stage, 1.0)
        finally:
            if refused:
                self.refused.remove(method)
        if method == "wait_saved":
            assert draft is not None
            draft.with_suffix("").mkdir()
        return found

    def save(self, *steps: int) -> None:
        for step in steps:
            self.checkpoints.save(self, self, State(step))  # pyright: ignore[reportArgumentType]

    def finish(self, step: int) -> None:
        self.checkpoints.finish(self, self, State(step))  # pyright: ignore[reportArgumentType]

    def trainer_at_work(self, version: int) -> AbstractContextManager[bool]:
        return nullcontext(False)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workers(monkeypatch, tmp_path, keep_checkpoints=2)
    for leftover in ("step_000001.tmp", "step_000002"):
        (tmp_path / leftover).mkdir()
    (tmp_path / "step_000002.json.tmp").write_text("")
    (tmp_path / "notes.txt").write_text("of the user")
    run.save(3, 4, 5)
    assert [name for name in run.names if "." not in name] == ["step_000003", "step_000004"], "5 is being written"
    run.finish(6)
    assert run.names == ["notes.txt", "step_000005", "step_000005.json", "step_000006", "step_000006.json"]
    assert run.checkpoints.latest_state().step == 6 and not run.warnings


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Workers(monkeypatch, tmp_path)
    run.finish(3)
    run.finish(4)
    for step, offer in ((4, "--resume now goes on from the one before it, of step 3"), (3, "there is no other")):
        run.refused, run.error = ["load"], CheckpointDamaged("checkpoint X is damaged: __0_0.distcp has other bytes")
        expected = f"__0_0.distcp has other bytes; it is kept as step_00000{step}.damaged, and {offer}"
        with pytest.raises(UserError, match=expected):
            run.checkpoints.load(run, run, run.checkpoints.latest_state())  # pyright: ignore[reportArgumentType]
    assert [name for name in run.names if not name.endswith(".json")] == ["step_000003.damaged", "step_000004.damaged"]
    with pytest.raises(NoCheckpoint):
        run.checkpoints.latest_state()


def test_a_checkpoint_of_another_model_is_refused_in_its_own_words_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Workers(monkeypatch, tmp_path)
    run.finish(3)
    run.refused, run.error = ["load"], UserError("model.path: another digest")
    with pytest.raises(UserError, match="^model.path: another digest$"):
        run.checkpoints.load(run, run, run.checkpoints.latest_state())  # pyright: ignore[reportArgumentType]
    assert run.names == ["step_000003", "step_000003.json"]


def test_all_checkpoints_are_kept_where_the_user_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workers(monkeypatch, tmp_path, keep_checkpoints=0)
    run.save(1, 2, 3, 4)
    run.finish(4)
    assert len(run.names) == 8


@pytest.mark.parametrize("method", ["save", "wait_saved"])
def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    run = Workers(monkeypatch, tmp_path, checkpoint_every=10)
    run.save(10)
    run.refused.append(method)
    run.save(20)
    assert len(run.warnings) == 1 and "No space left on device" in run.warnings[0]
    assert "the checkpoint of step " in run.warnings[0] and "tried again after the next step" in run.warnings[0]
    if method == "wait_saved":  # of the checkpoint before; this one has begun
        run.checkpoints.settle(run, run)  # pyright: ignore[reportArgumentType]
        assert run.checkpoints.latest_state().step == 20
        return
    assert run.checkpoints.latest_state().step == 10
    assert run.checkpoints.is_due(21)
    run.save(21)
    assert not run.checkpoints.is_due(22)
    run.finish(21)
    assert run.checkpoints.latest_state().step == 21


def test_the_last_checkpoint_is_tried_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workers(monkeypatch, tmp_path)
    run.refused.append("wait_saved")
    run.finish(7)
    assert run.checkpoints.latest_state().step == 7 and len(run.warnings) == 1
    assert run.calls == ["save", "wait_saved", "save", "wait_saved"]


def test_a_death_while_a_checkpoint_is_written_is_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workers(monkeypatch, tmp_path)
    run.save(1)
    run.handles[1].ray_actor = FakeActor(lambda method: RayActorError())
    with pytest.raises(ActorFailed, match="train worker 1 .* died"):
        run.save(2)
    assert not run.warnings


def test_checkpoints_are_due_by_time_and_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    defaults = Checkpoints(tmp_path, build_config({}).run)
    assert not defaults.is_due(1)
    now[0] = 15 * 60
    assert defaults.is_due(1) and not defaults.is_due(0)
    assert not Checkpoints(tmp_path, build_config({"run": {"checkpoint_minutes": 0}}).run).is_due(1)
    by_step = Checkpoints(tmp_path, build_config({"run": {"checkpoint_minutes": 0, "checkpoint_every": 3}}).run)
    assert [by_step.is_due(step) for step in (1, 2, 3)] == [False, False, True]


def test_a_run_without_checkpoints_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Workers(monkeypatch, tmp_path, checkpoint_minutes=0)
    run.finish(5)
    assert run.names == [] and run.calls == []


def fingerprint(**sections: Any) -> str:
    sections["run"] = {"dir": "/somewhere", "checkpoint_every": 5, **sections.get("run", {})}
    config = build_config(sections)
    found = journal(config.run, rollout_specs.fingerprint(config))
    assert found is not None and found.folder == "/somewhere/journal"
    return found.fingerprint


def test_a_run_that_cannot_be_resumed_has_no_journal() -> None:
    assert journal(build_config({"run": {"checkpoint_minutes": 0}}).run, "") is None
    assert journal(build_config({"run": {"checkpoint_every": 5, "journal": False}}).run, "") is None


def test_the_journal_s_groups_are_for_the_same_settings_only(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("")
    file = {"train": str(prompts), "validation": str(prompts)}
    same = fingerprint()
    assert same == fingerprint(trainer={"lr": 1e-5, "dp": 2}, run={"checkpoint_every": 7}, algorithm={"steps": 7})
    assert same == fingerprint(rollout={"num_engines": 2, "num_actors": 3})
    assert same == fingerprint(data={"max_prompt_tokens": 256})
    others = [
        fingerprint(run={"seed": 1}), fingerprint(rollout={"temperature": 0.5}),
        fingerprint(rollout={"max_new_tokens": 99}), fingerprint(environment={"kind": "tool_use"}),
        fingerprint(algorithm={"group_size": 4}), fingerprint(data={"train": "task:arithmetic"}),
        fingerprint(data=file), fingerprint(data={**file, "template": "{prompt} "}),
        fingerprint(data={**file, "chat_template": "all"}),
        fingerprint(data={**file, "chat_template": "all", "system_prompt": "be brief"}),
        fingerprint(data={**file, "overlong_prompts": "drop"}),
        fingerprint(data={**file, "overlong_prompts": "drop", "max_prompt_tokens": 100}),
        fingerprint(data={"train": "a/b", "validation": "a/b"}),
        fingerprint(data={"train": "a/b", "validation": "a/b", "subset": "main"}),
        fingerprint(rollout={"stop": ["\n"]}), fingerprint(model={"dtype": "bfloat16"}),
        fingerprint(reward={"functions": [{"kind": "exact_match", "weight": 0.5}]}),
        fingerprint(reward={"functions": [{"kind": "format", "options": {"pattern": "x"}}]}),
    ]  # fmt: skip
    assert len({same, *others}) == 1 + len(others)


def test_draft_that_is_renamed_while_its_size_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, scandir = tmp_path / "step_000090.tmp", os.scandir
    (draft / "rank_0").mkdir(parents=True)
    (draft / "rank_0" / "model.bin").write_bytes(bytes(100))
    assert size_of(draft) == 100 and size_of(tmp_path / "none") == 0

    def rename_first(path: str | Path) -> object:
        if draft.exists():
            draft.rename(draft.with_suffix(""))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", rename_first)
    assert size_of(draft) == 0
