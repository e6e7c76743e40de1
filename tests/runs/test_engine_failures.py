"""A vLLM engine that does not start: the run's error and its folder hold the words of vLLM's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs import weight_sync_runs

pytestmark = [pytest.mark.processes, pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.timeout(400)
def test_an_engine_that_does_not_start_leaves_its_words_in_the_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = weight_sync_runs.model_folder(tmp_path / "model", "tied")
    code, output = runs.run(
        run_dir, f"model.path={model}", "warmup.corpus=none", "rollout.engine=vllm",
        "rollout.vllm={num_gpu_blocks_override: 1}",
    )  # fmt: skip
    assert code == 1, output
    words = "vLLM's engine process did not start: ValueError: "
    assert words in output and words in (run_dir / "error.txt").read_text()
    log = run_dir / "engines" / "engine-0.log"
    assert str(log) in output and "EngineCore failed to start" in log.read_text()


def test_arguments_that_vllm_does_not_have_are_refused_before_anything_starts(tmp_path: Path) -> None:
    code, output = runs.run(
        tmp_path / "run", "rollout.engine=vllm", "rollout.vllm={block_sice: 1, tensor_parallel_size: 2}"
    )
    assert code == 2, output
    assert "rollout.vllm.block_sice: vLLM's engine has no such argument; did you mean block_size?" in output
    assert "rollout.vllm.tensor_parallel_size: got 2, expected it unset, because rollout.tp sets it" in output
    assert not (tmp_path / "run").exists()
