"""Whole runs whose train workers give each sampled token the log-prob of the engine, bit for bit."""

from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # test_equal_logprobs compares an engine with a backend

BITWISE = ("run.bitwise=true", "validation.every=0", "algorithm.steps=4", "warmup.steps=20")
HALF = ("model.dtype=bfloat16", "trainer.mixed_precision=true", "trainer.packing=packed")
RUNS = {
    "float32": (),
    "bfloat16, packed, two replicas": (*HALF, "trainer.dp=2", "trainer.tokens_per_microbatch=512"),
    "streaming, temperature": ("algorithm.mode=streaming", "rollout.temperature=0.7"),
    "several updates": ("algorithm.minibatches=2", "algorithm.prev_logprobs=recompute", "trainer.lr=0.01"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RUNS)
def test_every_log_prob_is_the_engines(tmp_path: Path, name: str) -> None:
    run_dir = tmp_path / "run"
    runs.finish(run_dir, *BITWISE, *RUNS[name], timeout_s=200)
    steps = runs.steps_of(run_dir)
    assert len(steps) == 4
    for step in steps:
        assert step["logprob/mismatch_max"] == 0.0 and step["logprob/ratio_error"] == 1.0
        assert step["train/grad_norm"] > 0
