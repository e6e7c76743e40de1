"""Runs that learn from a teacher, without rewards: in an engine or in the train workers, the figures are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tests import process_pool
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.weight_sync_runs import model_folder

pytestmark = pytest.mark.processes

COMMON = (
    "run.deterministic=true", "warmup.corpus=none", "algorithm.steps=3", "algorithm.group_size=1", "trainer.lr=0.01",
    "validation.every=0", "reward.functions=[]", "run.trace_step=0", "run.checkpoint_every=2",
)  # fmt: skip


@pytest.mark.timeout(400)
def test_a_teacher_gives_the_same_steps_wherever_it_runs(tmp_path: Path) -> None:
    """Also after a resume, which scores the same rows with the same teacher."""
    process_pool.start_ray()
    teacher = model_folder(tmp_path / "teacher", "tied")
    variants = {
        where: (*COMMON, f"distillation.teachers=[{{model: {teacher}, where: {where}}}]")
        for where in ("train", "engine")
    }
    runs.run_each(tmp_path, variants)
    train, engine = (runs.steps_of(tmp_path / where) for where in variants)
    assert len(train) == len(engine) == 3
    for one, other in zip(train, engine, strict=True):
        for key in ("distillation/reverse_kl", "train/grad_norm", "train/loss"):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    assert train[-1]["distillation/reverse_kl"] != train[0]["distillation/reverse_kl"] > 0
    runs.finish(tmp_path / "train", "--resume", "algorithm.steps=4")
    assert [line["step"] for line in runs.steps_of(tmp_path / "train")] == [1, 2, 3, 4]
