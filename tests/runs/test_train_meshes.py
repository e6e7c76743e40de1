"""The whole system over every train mesh: the first step is that of one rank, and a resume may change the mesh."""

import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_end_to_end import steps_of

pytestmark = pytest.mark.processes

PASSES = ("algorithm.prev_logprobs=recompute", "loss.kl_coef=0.01", "validation.every=0")
MEGATRON = ("trainer.backend=megatron", "trainer.packing=packed")
MESHES = {
    "fsdp dp2 x tp2, packed, simple": (
        "trainer.dp=2", "trainer.tp=2", "trainer.packing=packed", *runs.store("simple"),
    ),
    "fsdp tp2, each rank reads": ("trainer.tp=2", "trainer.fetch=independent"),
    "megatron dp2, simple": (*MEGATRON, "trainer.dp=2", *runs.store("simple")),
    "megatron tp2 sp, recompute": (
        *MEGATRON, "trainer.tp=2", "trainer.sequence_parallel=true", "trainer.recompute=full",
    ),
    "megatron pp2": (*MEGATRON, "trainer.pp=2"),
    "megatron cp2": (*MEGATRON, "trainer.cp=2"),
    "megatron tp2 x pp2": (*MEGATRON, "trainer.tp=2", "trainer.pp=2"),
}  # fmt: skip

SHORT = "megatron pp2"
"""The mesh that `make test` runs; other runs there have several FSDP ranks."""


def figures(line):
    return [line["reward/mean"], line["train/loss"], line["train/grad_norm"], line["train/reference_kl"]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The first step of one rank."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    code, output = runs.run(run_dir, *PASSES, "algorithm.steps=1")
    assert code == 0, output
    return figures(steps_of(run_dir)[0])


# Each mesh's backend by itself: tests/trainers/backends.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mesh", [mesh if mesh == SHORT else pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES]
)
def test_the_first_step_is_that_of_one_rank(tmp_path, alone, mesh):
    run_dir = tmp_path / "run"
    code, output = runs.run(run_dir, *PASSES, *MESHES[mesh], "algorithm.steps=2")
    assert code == 0, output
    first, second = steps_of(run_dir)
    assert figures(first) == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert second["train/grad_norm"] > 0 and second["train/reference_kl"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", [("trainer.tp=2",), (*MEGATRON, "trainer.pp=2")])
def test_a_resume_may_change_the_mesh(tmp_path, mesh):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, output = runs.run(whole, "validation.every=0", "trainer.dp=2", "algorithm.steps=3")
    assert code == 0, output
    code, output = runs.run(parts, "validation.every=0", "trainer.dp=2", "algorithm.steps=2", "run.checkpoint_every=2")
    assert code == 0, output
    code, output = runs.run(
        parts, "validation.every=0", *mesh, "algorithm.steps=3", "run.checkpoint_every=2", "--resume"
    )
    assert code == 0, output
    expected, found = steps_of(whole)[2], steps_of(parts)[2]
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
