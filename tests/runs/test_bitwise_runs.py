"""Whole runs whose train workers give each sampled token the log-prob of the engine, bit for bit."""

import re
from pathlib import Path

import pytest

from headrace.cli.outcome import MISTAKE
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


OTHER_BIT = """
import torch
from headrace.trainers.backends.vocab.logprobs import ExactSoftmax

exact = ExactSoftmax.softmax_sums

def other(self, *given, **options):
    totals, logprobs, entropies = exact(self, *given, **options)
    logprobs[-1:] = logprobs[-1:].nextafter(torch.zeros(()))
    return totals, logprobs, entropies

ExactSoftmax.softmax_sums = other

def reinforce(inputs):
    return -inputs.logprobs * inputs.advantages
"""


@pytest.mark.timeout(200)
def test_a_run_with_another_log_prob_ends_and_names_the_token(tmp_path: Path) -> None:
    """The loss of a file is loaded in each train worker, where it changes the last bit of a log-prob."""
    (tmp_path / "other_bit.py").write_text(OTHER_BIT)
    code, output = runs.run(tmp_path / "run", *BITWISE, "trainer.dp=2", "loss.kind=other_bit:reinforce", timeout_s=150)
    assert code == MISTAKE, output
    assert re.search(
        r"logprob/mismatch_max: got \S+e-0\d in step 1 with run.bitwise=true, expected 0: the train workers give "
        r"trained token \d+ of a row of group \d+ the log-prob -\d+\.\d+, the engine -\d+\.\d+$",
        output,
        re.MULTILINE,
    ), output
    [step] = runs.steps_of(tmp_path / "run")
    assert step["logprob/mismatch_max"] > 0
