"""Tests a real vLLM on a GPU, whose weights another process changes in place; every byte and version is checked.

    pytest -m gpu tests/actors/engines/vllm/test_gpu.py

It does in small what `headrace bench weights --gpus N` does in large. Needs vLLM, no Ray.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engines.hf.quantized_layers import quantization_of
from headrace.actors.engines.protocol import EngineBroken, SamplingParams
from headrace.codecs.weights.quantization import Scheme
from headrace.tests.actors.engines.vllm.builder import build, save_model
from headrace.tests.actors.engines.vllm.test_quantized_engine import PARAMS, PROMPT, digests_of, distance
from headrace.tests.actors.weight_sync.weight_updates import Publisher, scaled

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("setup", ["none", "full", "moe"])
def test_weights_change_in_place_under_running_requests(setup: str, tmp_path: Path) -> None:
    """Exits with 1 when a byte, a version or a log-prob is wrong; says how it loaded."""
    gpus = min(2, torch.cuda.device_count())
    out = tmp_path / "out"
    options = ["--gpus", str(gpus), "--sizes", "tiny", "--setups", setup, "--updates", "5", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli", "bench", "weights", *options, "--out", str(out)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = (out / "gpu_weights.jsonl").read_text()
    assert '"way": "in place"' in found and '"way": "layerwise' not in found, found


def test_sleep_gives_memory_back_and_the_same_weights_give_the_same_logprobs(tmp_path: Path) -> None:
    """Weights come while the engine sleeps: keys and values stay away until it wakes."""
    kv_bytes = 1 << 30
    folder = save_model(tmp_path / "model", "untied")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    publisher, params = Publisher(tmp_path / "weights"), SamplingParams(n=4, max_new_tokens=16, seed=1)
    engine = build(folder, dtype=torch.bfloat16, kv_cache_bytes=kv_bytes)

    async def serve(version: int) -> None:
        await engine.prepare_weights(publisher.publish(version, named))
        await engine.commit_weights(version)

    async def main() -> None:
        before = await engine.generate("a", [5, 6, 7], params)
        awake = (await engine.memory()).device_bytes
        for version in (1, 2, 3):
            await engine.sleep(2)
            assert (await engine.memory()).device_bytes <= awake - 0.9 * kv_bytes
            await serve(version)
            assert (await engine.memory()).device_bytes <= awake - 0.9 * kv_bytes, "only its weights are awake"
            if version == 2:  # it has to sleep again before it woke, as when a trainer is lost
                await engine.sleep(2)
                await serve(version)
            await engine.wake()
            assert (await engine.memory()).device_bytes <= 1.05 * awake
            after = await engine.generate("a", [5, 6, 7], params)
            assert [one.logprobs.tolist() for one in after] == [one.logprobs.tolist() for one in before]
            assert {version} == {number for one in after for number in one.versions.tolist()}
        await engine.close()

    asyncio.run(main())
    publisher.close()


def damage_experts(worker: Any, name: str) -> bool:
    """Called in a worker: change one number of the first matrices in 8 bits, and return whether they are of experts."""
    for module in worker.model_runner.model.get_submodule(name).modules():
        for attribute in ("w13_weight", "weight"):
            if getattr(module, attribute + "_scale", None) is not None:
                getattr(module, attribute).data.view(torch.int8).view(-1)[7] ^= 1
                return attribute == "w13_weight"
    raise AssertionError(f"{name} has no matrices in 8 bits")


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_weights_in_8_bits_are_those_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scheme: Scheme
) -> None:
    """The kernels of the GPU keep them in their own form, also after sleep has dropped them."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    folder = save_model(tmp_path / "model", kind, size=256)
    plan, publisher = quantization_of(folder, scheme), Publisher(tmp_path / "weights")

    async def main() -> None:
        engine = build(folder, dtype=torch.bfloat16, quantization=scheme, kv_cache_bytes=1 << 30)
        sent = dict(plan.stream((name, one.bfloat16()) for name, one in scaled(folder, 0.8).items()))
        for version in (1, 2):
            if version == 2:
                await engine.sleep(2)
            await engine.prepare_weights(publisher.publish(version, sent))
            await engine.commit_weights(version)
            await engine.wake()
            digests = digests_of(version, sent)
            assert await engine.verify_weights(digests) >= len(sent) - 4, "all but tables of tokens and routers"
            answers = await engine.generate(f"{version}", PROMPT, PARAMS)
            assert distance(folder, plan, 0.8, answers) < 0.2
        assert await engine.call_workers(damage_experts, "model.layers.1.mlp") == [kind == "moe"]
        with pytest.raises(EngineBroken, match=r"version 2: 'model.layers.1.mlp\..*' has digest"):
            await engine.verify_weights(digests_of(2, sent))
        await engine.close()

    asyncio.run(main())
    publisher.close()
