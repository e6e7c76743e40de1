"""The whole system over every train mesh: the first step is that of one rank, and a resume may change the mesh."""

import pytest

from headrace.tests.runs import cli_runs as runs

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
    return figures(runs.trained(tmp_path_factory.mktemp("alone") / "run", *PASSES, "algorithm.steps=1")[0])


# Each mesh's backend by itself: tests/trainers/backends.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mesh", [mesh if mesh == SHORT else pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES]
)
def test_the_first_step_is_that_of_one_rank(tmp_path, alone, mesh):
    first, second = runs.trained(tmp_path / "run", *PASSES, *MESHES[mesh], "algorithm.steps=2")
    assert figures(first) == pytest.approx(alone, rel=1e-5, abs=1e-6)
    assert second["train/grad_norm"] > 0 and second["train/reference_kl"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", [("trainer.tp=2",), (*MEGATRON, "trainer.pp=2")])
def test_a_resume_may_change_the_mesh(tmp_path, mesh):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("validation.every=0", "algorithm.steps=3", "run.checkpoint_every=2")
    expected = runs.trained(whole, *options, "trainer.dp=2")[2]
    runs.finish(parts, *options, "trainer.dp=2", "algorithm.steps=2")
    found = runs.trained(parts, *options, *mesh, "--resume")[2]
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
