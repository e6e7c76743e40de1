"""A real vLLM on a GPU: weights from another process in place, every byte and every token's version checked.

    pytest -m gpu tests/actors/engines/vllm/test_gpu.py

It does in small what `headrace bench gpu-weights` does in large. Needs vLLM, no Ray.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("setup", ["none", "full", "moe"])
def test_weights_change_in_place_under_running_requests(setup: str, tmp_path: Path) -> None:
    """Exits with 1 when a byte, a version or a log-prob is wrong; says how it loaded."""
    gpus = min(2, torch.cuda.device_count())
    out = tmp_path / "out"
    command = [sys.executable, "-m", "headrace.cli", "bench", "gpu-weights"]
    done = subprocess.run(
        [
            *command,
            "--gpus",
            str(gpus),
            "--size",
            "tiny",
            "--setups",
            setup,
            "--updates",
            "5",
            "--out",
            str(out),
            "--folder",
            str(tmp_path),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = (out / "gpu_weights.jsonl").read_text()
    assert '"way": "in place"' in found and '"way": "layerwise' not in found, found
