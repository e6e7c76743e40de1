"""Whole runs with router replay: tokens are trained on the experts that generated them, on each engine and backend."""

import pytest

from headrace.tests.runs import cli_runs as runs

pytestmark = pytest.mark.processes

REPLAYED = (
    "model.path=builtin:tiny-qwen3-moe", "router_replay.enabled=true", "router_replay.verify=forward",
    "router_replay.native_agreement_every=1", "validation.every=0", "algorithm.steps=2", "warmup.steps=20",
)  # fmt: skip
MEGATRON = ("trainer.backend=megatron", "trainer.packing=packed")
SHORT = "hf, megatron pp2, with a reference"
RUNS = {
    SHORT: (*MEGATRON, "trainer.pp=2", "loss.kl_coef=0.01", "algorithm.prev_logprobs=recompute"),
    "hf, fsdp tp2 recompute": ("trainer.tp=2", "trainer.recompute=full"),
    "hf, fsdp, streaming": ("algorithm.mode=streaming",),
    "hf, fsdp, async keep": ("algorithm.mode=async", "sync.in_flight=keep"),
    "hf, fsdp, async abort": ("algorithm.mode=async", "sync.in_flight=abort"),
    "hf, fsdp, tools": ("environment.kind=tool_use",),
    "hf, megatron cp2": (*MEGATRON, "trainer.cp=2"),
    "vllm, fsdp": ("rollout.engine=vllm",),
    "vllm, megatron ep2": ("rollout.engine=vllm", *MEGATRON, "trainer.dp=2", "trainer.ep=2"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name == SHORT else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_tokens_are_trained_on_the_experts_that_generated_them(tmp_path, name):
    runs.skip_without_packages(name)
    run_dir = tmp_path / "run"
    output = runs.finish(run_dir, *REPLAYED, *RUNS[name], timeout_s=500)
    first, second = runs.steps_of(run_dir)
    assert "warning: logprob/ratio_error" not in output
    counted = [step for step in (first, second) if "routes/missing_share" in step]  # steps in which a rollout ended
    assert counted and all(step["routes/missing_share"] == step["routes/rows_missing"] == 0 for step in counted)
    for step in (first, second):
        assert 0.9 < step["routes/native_agreement"] <= 1
        assert {"routes/native_agreement_layer_0", "routes/native_agreement_layer_1"} < set(step)
    assert first["logprob/mismatch_max"] < 1e-4, "same weights, same experts, float32"
    assert first["train/grad_norm"] > 0
