"""The quickstart as shipped, whole: it learns its task in every mode, over any ranks, and from other seeds.

Stores give the same figures to the last digit (`test_end_to_end.py`), so one of them is enough here.
"""

import subprocess
import sys

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = pytest.mark.processes

SHORTER = "algorithm.steps=300"
"""For variants whose 500 steps take eight minutes on two cores."""
VARIANTS = {
    "sync": (),
    "dp2": ("trainer.dp=2",),
    "tp2": ("trainer.tp=2", "trainer.packing=packed", SHORTER),
    "megatron-tp2": ("trainer.backend=megatron", "trainer.tp=2"),
    "vllm": ("rollout.engine=vllm", SHORTER),
    "router": ("rollout.num_engines=2", "rollout.num_actors=1", "sync.transport=collective", SHORTER),
    "streaming": ("algorithm.mode=streaming",),
    "async": ("algorithm.mode=async",),
    "async_streaming": ("algorithm.mode=async_streaming",),
    "minibatches": ("algorithm.minibatches=4",),
    "seed1": ("run.seed=1",),
    "seed2": ("run.seed=2",),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_held_out_exact_match_rises_from_under_060_to_over_095(tmp_path, variant):
    run_dir = tmp_path / variant
    command = [sys.executable, "-m", "headrace.cli", "train", str(runs.ROOT / "examples" / "quickstart.yaml")]
    done = subprocess.run([*command, f"run.dir={run_dir}", *VARIANTS[variant]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = runs.metrics(run_dir)
    matches = [line["val/exact_match"] for line in lines if "val/exact_match" in line]
    assert matches[0] < 0.6 and matches[-1] > 0.95, matches
    assert lines[-1]["event"] == "finished"
