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

from headrace.actors.engines.protocol import SamplingParams
from headrace.tests.actors.engines.vllm.builder import build, save_model
from headrace.tests.actors.weight_sync.weight_updates import Publisher

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
