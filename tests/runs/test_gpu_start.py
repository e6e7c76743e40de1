"""The start of a run on one GPU against that of a bare AsyncLLM of the same model, in turns.

    pytest -m gpu -s tests/runs/test_gpu_start.py

Both are timed from the start of a process to the end of building. The first two turns are not counted: a bare engine
fills vLLM's caches in the first, and still compiles kernels of Triton in the second. The test prints when vLLM's own
parts of both starts ended, by vLLM's log.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.bench.gpu.train_run import run_keys
from headrace.bench.gpu.works import EXAMPLES, GRPO_WORKS
from headrace.bench.models import make_folder
from headrace.tests.runs import cli_runs as runs

BARE = """
import asyncio, os, sys

async def main():
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=sys.argv[1], dtype="bfloat16", max_num_seqs=256, max_model_len=1344, gpu_memory_utilization=0.4
    )
    llm = AsyncLLM.from_engine_args(arguments)
    print("READY", flush=True)
    llm.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)
"""
WARMUP, TURNS = 2, 5
PART = re.compile(
    r"Initializing a V1|took|finished in|seconds|Starting to load|Using .* backend|injected", re.IGNORECASE
)
"""Lines of vLLM's log that say what a part of its start is, or how long it took."""


def tell_parts(what: str, log: Iterable[str]) -> None:
    """Print the lines of vLLM's log that say how long a part of its start took, each with its time of day."""
    for line in log:
        if PART.search(line):
            print(f"    {what}: {line.strip()[:160]}", flush=True)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_run_starts_in_ten_seconds_more_than_a_bare_engine(
    tmp_path: Path, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    work, model, script = GRPO_WORKS["grpo-0.6b"], tmp_path / "model", tmp_path / "bare.py"
    make_folder(model, work.folder_task("bfloat16"), "cuda")
    torch.cuda.empty_cache()
    script.write_text(BARE)
    bare, ours = [], []
    for turn in range(TURNS):
        start = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, str(script), str(model)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("READY"):
                    break
            bare.append(time.perf_counter() - start)
            process.stdout.read()
        assert process.returncode == 0, "".join(lines)
        run_dir = tmp_path / f"run-{turn}"
        keys = run_keys(work, model, run_dir, steps=1, prompts=2, backend="fsdp", gpu=True)
        command = ["headrace.cli", "train", str(EXAMPLES / work.example), *keys, "resources.layout=colocated"]
        output = runs.succeed(runs.start_command(command, tmp_path), timeout_s=400)
        [parts] = [line for line in runs.metrics(run_dir) if line.get("event") == "start"]
        ours.append(parts["start/ready_s"])
        print(f"turn {turn}: a bare engine {bare[-1]:.1f} s, a run {ours[-1]:.1f} s: {parts}", flush=True)
        tell_parts("bare", lines)
        for log in (run_dir / "engines").iterdir():
            tell_parts("run", log.read_text().splitlines())
        assert "step 1/1" in output
    record_property("bare_s", bare)
    record_property("run_s", ours)
    assert statistics.median(ours[WARMUP:]) <= statistics.median(bare[WARMUP:]) + 10, (bare, ours)
