"""Whole runs with top-p and top-k: tokens are trained on the sets from which they were drawn."""

import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.trainers.observe.samples import mismatch, read_samples

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # test_trust_probe compares an engine with a backend

CUT = (
    "rollout.top_p=0.9", "rollout.top_k=10", "validation.every=0", "algorithm.steps=2", "warmup.steps=20",
    "trainer.entropy_metric=true",
)  # fmt: skip
MEGATRON = ("trainer.backend=megatron", "trainer.packing=packed")
RUNS = {
    "hf, fsdp tp2, with a reference": ("trainer.tp=2", "loss.kl_coef=0.01", "algorithm.prev_logprobs=recompute"),
    "hf, megatron pp2, with a reference": (*MEGATRON, "trainer.pp=2", "loss.kl_coef=0.01"),
    "hf, megatron cp2": (*MEGATRON, "trainer.cp=2"),
    "hf, fsdp dp2, samples are of one rank": ("trainer.dp=2", "logging.samples.groups=1"),
    "hf, fsdp, streaming": ("algorithm.mode=streaming",),
    "hf, fsdp, async keep": ("algorithm.mode=async", "sync.in_flight=keep"),
    "hf, fsdp, async abort": ("algorithm.mode=async", "sync.in_flight=abort"),
    "hf, fsdp, tools": ("environment.kind=tool_use", "rollout.min_p=0.01"),
    "hf, fsdp, async streaming keep": (
        "algorithm.mode=async_streaming",
        "algorithm.max_staleness=2",
        "sync.in_flight=keep",
    ),
    "hf int8, fsdp": ("rollout.quantization=int8", "sync.verify=full"),
    "vllm int8, fsdp": ("rollout.engine=vllm", "rollout.quantization=int8", "sync.verify=full", "trainer.fp8=rowwise"),
    "vllm tp2, fsdp tp2": ("rollout.engine=vllm", "rollout.tp=2", "trainer.tp=2"),
    "vllm, fsdp, tools, async streaming": (
        "rollout.engine=vllm",
        "environment.kind=tool_use",
        "algorithm.mode=async_streaming",
        "sync.in_flight=abort",
    ),
    "vllm, fsdp": ("rollout.engine=vllm", "rollout.mask_limit=12"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_trained_on_the_sets_from_which_they_were_drawn(tmp_path, name):
    runs.skip_without_packages(name)
    run_dir = tmp_path / "run"
    output = runs.finish(run_dir, *CUT, *RUNS[name], timeout_s=500)
    first, second = runs.steps_of(run_dir)
    assert "warning: logprob/ratio_error" not in output
    counted = [step for step in (first, second) if "masks/ids_per_token" in step]  # steps in which a rollout ended
    assert counted and all(1 <= step["masks/ids_per_token"] <= 10 and not step["masks/cut_share"] for step in counted)
    assert all(1 <= step["masks/bytes_per_token"] < 8 for step in counted)
    assert all(0 <= step["train/entropy"] < 2.31 for step in (first, second)), "at most the logarithm of 10, in nats"
    assert first["logprob/mismatch_max"] < (1.0 if "int8" in name else 1e-4), "same weights, same sets, float32"
    assert first["train/grad_norm"] > 0
    distances = [distance for row in read_samples(run_dir / "samples.jsonl") if (distance := mismatch(row)) is not None]
    assert distances and ("int8" in name or "async" in name or max(distances) < 1e-3), "both are over the same sets"
