"""Weight sync in the whole system: after every step each engine's log-probs are those of the trainer's own export."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace.actors.engines.hf.quantized_layers import quantization_of
from headrace.actors.weight_sync.plan.arguments import read_arguments
from headrace.actors.weight_sync.plan.regions import lengths
from headrace.tests.runs import weight_sync_runs as runs
from headrace.trainers.grpo.checkpoints import State

pytestmark = pytest.mark.processes

HF, VLLM = ("rollout.engine=hf",), ("rollout.engine=vllm", "rollout.kv_cache=32")
MEGATRON = ("trainer.backend=megatron", "trainer.packing=packed")
LORA = ("trainer.lora.rank=4",)
INT8 = ("rollout.quantization=int8", "sync.verify=full")
SHORT = 3
"""Number of steps of the cases that `make test` runs; the others are slow."""
CASES = {
    # name: (model, overrides, steps)
    "fsdp dp2 -> 2 hf, ipc": ("tied", (*HF, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=ipc"), 6),
    "fsdp -> 2 hf, collective delta": (
        "untied", (*HF, "rollout.num_engines=2", "sync.transport=collective", "sync.delta=true"), SHORT,
    ),
    "fsdp tp2 in fp8 -> hf, store": (
        "tied", (*HF, "trainer.tp=2", "trainer.fp8=rowwise", "sync.transport=store", "sync.verify=full"), SHORT,
    ),
    "fsdp dp2 -> hf, disk delta": ("untied", (*HF, "trainer.dp=2", "sync.transport=disk", "sync.delta=true"), 20),
    "fsdp -> hf, ipc delta": ("tied", (*HF, "sync.transport=ipc", "sync.delta=true"), 20),
    "fsdp -> hf, store delta": ("tied", (*HF, "sync.transport=store", "sync.delta=true"), 20),
    "megatron tp2 -> hf, collective": ("tied", (*HF, *MEGATRON, "trainer.tp=2", "sync.transport=collective"), 20),
    "megatron pp2 -> hf, ipc": ("untied", (*HF, *MEGATRON, "trainer.pp=2", "sync.transport=ipc"), 20),
    "megatron ep2 moe -> hf, ipc": (
        "moe", (*HF, *MEGATRON, "trainer.dp=2", "trainer.ep=2", "sync.transport=ipc"), 20,
    ),
    "fsdp dp2 -> 2 hf, pairs": (
        "untied", (*HF, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=pairs", "sync.verify=full"), SHORT,
    ),
    "fsdp tp2 -> hf, pairs": ("tied", (*HF, "trainer.tp=2", "sync.transport=pairs", "sync.verify=full"), 20),
    "megatron dp2 -> hf, pairs": (
        "untied", (*HF, *MEGATRON, "trainer.dp=2", "sync.transport=pairs", "sync.verify=full"), 20,
    ),
    "fsdp dp2 ep2 moe -> hf, pairs": (
        "moe", (*HF, "trainer.dp=2", "trainer.ep=2", "sync.transport=pairs", "sync.verify=full"), 20,
    ),
    "megatron tp2 -> vllm tp2, pairs": (
        "tied", (*VLLM, *MEGATRON, "trainer.tp=2", "rollout.tp=2", "sync.transport=pairs", "sync.verify=full"), 20,
    ),
    "fsdp tp2 -> vllm tp2, pairs without staging": (
        "untied", (*VLLM, "trainer.tp=2", "rollout.tp=2", "sync.transport=pairs", "sync.staging=none"), 5,
    ),
    "fsdp dp2 -> 2 hf in bfloat16, pairs delta": (
        "untied",
        (*HF, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=pairs", "sync.delta=true", "sync.verify=full",
         "model.dtype=bfloat16"), 20,
    ),
    "megatron tp2 -> vllm tp2, pairs delta": (
        "tied", (*VLLM, *MEGATRON, "trainer.tp=2", "rollout.tp=2", "sync.transport=pairs", "sync.delta=true"), 20,
    ),
    "fsdp dp2 lora -> 2 hf, pairs delta": (
        "tied",
        (*HF, *LORA, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=pairs", "sync.delta=true"),
        20,
    ),
    "fsdp tp2 lora -> vllm tp2, pairs": (
        "untied", (*VLLM, *LORA, "trainer.tp=2", "rollout.tp=2", "sync.transport=pairs"), 20,
    ),
    "fsdp -> vllm, ipc": ("tied", (*VLLM, "sync.transport=ipc"), SHORT),
    "fsdp dp2 -> vllm tp2, collective": (
        "untied", (*VLLM, "trainer.dp=2", "rollout.tp=2", "sync.transport=collective"), 20,
    ),
    "fsdp tp2 -> vllm, store": ("tied", (*VLLM, "trainer.tp=2", "sync.transport=store"), 20),
    "megatron tp2 -> vllm tp2, ipc delta": (
        "tied", (*VLLM, *MEGATRON, "trainer.tp=2", "rollout.tp=2", "sync.transport=ipc", "sync.delta=true"), 20,
    ),
    "megatron pp2 -> vllm, disk": ("untied", (*VLLM, *MEGATRON, "trainer.pp=2", "sync.transport=disk"), 20),
    "megatron ep2 moe -> vllm, collective": (
        "moe", (*VLLM, *MEGATRON, "trainer.dp=2", "trainer.ep=2", "sync.transport=collective"), 20,
    ),
    "fsdp dp2 lora -> 2 hf, collective delta": (
        "tied",
        (*HF, *LORA, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=collective", "sync.delta=true"),
        SHORT,
    ),
    "fsdp dp2 ep2 lora of experts -> hf, disk": (
        "moe", (*HF, *LORA, "trainer.lora.experts=true", "trainer.dp=2", "trainer.ep=2", "sync.transport=disk"), 20,
    ),
    "fsdp tp2 lora merged -> hf, ipc": (
        "untied", (*HF, *LORA, "trainer.tp=2", "sync.adapter=merged", "sync.transport=ipc"), 20,
    ),
    "fsdp lora -> hf, store": ("tied", (*HF, *LORA, "sync.transport=store"), 20),
    "megatron tp2 lora -> hf, ipc": ("tied", (*HF, *LORA, *MEGATRON, "trainer.tp=2", "sync.transport=ipc"), 20),
    "fsdp lora -> vllm, ipc": ("tied", (*VLLM, *LORA, "sync.transport=ipc"), 20),
    "fsdp moe lora -> vllm, ipc": ("moe", (*VLLM, *LORA, "sync.transport=ipc"), 20),
    "fsdp tp2 lora -> vllm tp2, collective": (
        "untied", (*VLLM, *LORA, "trainer.tp=2", "rollout.tp=2", "sync.transport=collective"), 20,
    ),
    "fsdp dp2 -> 2 hf in int8, ipc delta": (
        "untied",
        (*HF, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=ipc", "sync.delta=true", *INT8), 6,
    ),
    "fsdp tp2 -> 2 hf in int8, collective": (
        "tied", (*HF, "trainer.tp=2", "rollout.num_engines=2", "sync.transport=collective", *INT8), 20,
    ),
    "fsdp lora merged -> hf in int8, store": (
        "tied", (*HF, *LORA, "sync.adapter=merged", "sync.transport=store", *INT8), 20,
    ),
    "megatron tp2 -> hf in int8, disk": ("tied", (*HF, *MEGATRON, "trainer.tp=2", "sync.transport=disk", *INT8), 20),
    "fsdp dp2 -> vllm in int8, ipc": ("tied", (*VLLM, "trainer.dp=2", "sync.transport=ipc", *INT8), 20),
    "fsdp lora -> hf in int8, ipc": ("tied", (*HF, *LORA, "sync.transport=ipc", *INT8), 6),
    "fsdp lora -> vllm in int8, ipc": ("untied", (*VLLM, *LORA, "sync.transport=ipc", *INT8), 6),
    "fsdp -> vllm tp2 in fp8, collective": (
        "untied",
        (*VLLM, "rollout.tp=2", "sync.transport=collective", "rollout.quantization=fp8", "sync.verify=full"), 20,
    ),
    "fsdp tp2 -> vllm tp2 in int8, ipc": (
        "untied", (*VLLM, "trainer.tp=2", "rollout.tp=2", "sync.transport=ipc", "sync.staging=none", *INT8), 6,
    ),
    "fsdp dp2 ep2 moe -> hf in int8, ipc": (
        "moe", (*HF, "trainer.dp=2", "trainer.ep=2", "sync.transport=ipc", *INT8), 6,
    ),
    "fsdp dp2 -> 2 hf in int8, pairs delta": (
        "untied",
        (*HF, "trainer.dp=2", "rollout.num_engines=2", "sync.transport=pairs", "sync.delta=true", *INT8), 6,
    ),
    "megatron ep2 moe -> hf in int8, pairs": (
        "moe",
        (*HF, *MEGATRON, "trainer.dp=2", "trainer.ep=2", "sync.transport=pairs", *INT8), 6,
    ),
    "fsdp dp2 -> vllm tp2 in int8, pairs": (
        "tied", (*VLLM, "trainer.dp=2", "rollout.tp=2", "sync.transport=pairs", *INT8), 6,
    ),
    "megatron ep2 moe -> hf in int8, collective": (
        "moe", (*HF, *MEGATRON, "trainer.dp=2", "trainer.ep=2", "sync.transport=collective", *INT8), 6,
    ),
    "fsdp moe -> vllm tp2, ipc": ("moe", (*VLLM, "rollout.tp=2", "sync.transport=ipc"), 20),
}  # fmt: skip


def _marked(name):
    marks = [] if CASES[name][2] == SHORT else [pytest.mark.slow]
    marks += [pytest.mark.vllm] if "vllm" in name else []
    return pytest.param(name, marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [_marked(name) for name in CASES])
def test_every_engine_has_the_trainers_weights_after_every_sync(tmp_path: Path, name: str) -> None:
    kind, overrides, steps = CASES[name]
    folder = runs.model_folder(tmp_path / "model", kind)
    state = State()
    with runs.run(tmp_path / "run", folder, *overrides) as run:
        before = runs.trainer_model(run, tmp_path / "export")
        for number in range(1, steps + 1):
            report = runs.step(run, state)
            assert (report.version, report.engines, report.left_out) == (number, len(run.actors.engines.engines), 0)
            assert report.gathers == 1, "one gather serves all engines"
            if name == "megatron tp2 -> vllm tp2, pairs" and number > 2:
                assert run.weights._last is not None
                arguments, _ = read_arguments(run.weights._last.plan)
                for worker in arguments.receivers:
                    needed = sum(math.prod(lengths(one.box)) for one in worker.regions)
                    whole = sum(math.prod(shape) for _, _, shape in arguments.weights)
                    assert needed < 0.55 * whole, "each worker is sent its slices only"
                assert report.bytes_sent < 1.05 * report.num_bytes
            if name == "fsdp dp2 -> 2 hf in bfloat16, pairs delta" and number > 1:
                assert report.bytes_sent < report.num_bytes * report.engines
            if run.config.trainer.fp8 != "none":
                assert report.num_bytes == sum(4 * one.numel() for one in before.parameters()), "as without fp8"
                assert any("trainer.fp8=rowwise: 14 linear layers with" in note for note in run.actors.notes)
            if run.config.rollout.scheme and not run.config.sends_adapter:
                weights = [*before.parameters()]
                assert report.num_bytes < sum(2.5 * one.numel() for one in weights), "most are sent in one byte"
                if name != "fsdp dp2 -> vllm tp2 in int8, pairs":  # Of the parts that it sends, there are no digests.
                    scales = len(quantization_of(str(folder), run.config.rollout.scheme).names)
                    assert report.verified >= report.engines * (len(weights) + scales - 2 * ("vllm" in name))
            if run.config.sends_adapter:
                size, count = runs.adapter_size(tmp_path / "export")
                assert report.num_bytes == size, "nothing but the adapter is sent"
                assert report.verified == count * report.engines, "every matrix is compared in every engine"
            model = runs.trainer_model(run, tmp_path / "export")
            for engine in run.actors.engines.engines:
                answers = runs.engine_logprobs(engine, f"{number}")
                assert all(set(versions) == {number} for _, _, versions in answers)
                if run.config.rollout.scheme and "vllm" in name:  # It rounds activations, too.
                    assert runs.difference(model, answers) < (0.2 if "in int8" in name else 0.6)
                elif "model.dtype=bfloat16" not in overrides:
                    assert runs.difference(model, answers) < 1e-3
                    assert runs.difference(before, answers) > 1e-3, "the step moved the weights"
                else:  # Log-probs in bfloat16 are too rough, but the weights' bytes are compared.
                    assert report.num_bytes == sum(2 * one.numel() for one in model.parameters())
                    assert report.verified == 2 * len([*model.parameters()])
            before = model


@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_subset_is_synced_and_the_others_catch_up_without_the_trainer(tmp_path: Path, quantization: str) -> None:
    folder = runs.model_folder(tmp_path / "model", "tied")
    overrides = (*HF, "rollout.num_engines=2", "sync.transport=ipc", "sync.verify=full",
                 f"rollout.quantization={quantization}")  # fmt: skip
    state = State()
    with runs.run(tmp_path / "run", folder, *overrides) as run:
        runs.step(run, state)
        first, second = run.actors.engines.engines
        old = runs.trainer_model(run, tmp_path / "old")
        run.actors.engines.exclude(second, "set aside by the test")
        state.version += 1
        report = run.weights.sync(state.version, [first])
        assert (report.engines, report.left_out) == (1, 1)
        num_weights = report.verified
        scales = 0 if quantization == "none" else len(quantization_of(str(folder), "int8").names)
        assert num_weights == len(old.state_dict()) - 1 + scales, "the tied one is sent under one of its names"
        assert (first.version, second.version) == (2, 1)
        assert runs.difference(old, runs.engine_logprobs(second, "old")) < 1e-3, "the one set aside still serves 1"
        run.weights.catch_up(second)
        assert (second.version, second.left_out) == (2, "")
        assert run.weights.sync(state.version).verified == num_weights, "those of the engine that caught up"
        model = runs.trainer_model(run, tmp_path / "new")
        answers = runs.engine_logprobs(second, "new")
        assert runs.difference(model, answers) < 1e-3
        assert all(set(versions) == {2} for _, _, versions in answers)
