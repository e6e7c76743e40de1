"""Run folders for the tests of `headrace bench gpu`, as `headrace train` leaves them, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.bench.gpu.train_run import TrainTask
from headrace.bench.gpu.works import GRPO_WORKS, Layout


def record(step: int, elapsed_s: float, seconds: float, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, of a step with figures that are right."""
    return {
        "step": step, "time/step_s": seconds, "time/elapsed_s": elapsed_s, "time/rollout_s": 0.5 * seconds,
        "time/logprob_s": 0.0, "time/train_s": 0.3 * seconds, "time/data_wait_s": 0.02 * seconds,
        "time/sync_s": 0.05 * seconds, "time/plan_s": 0.01 * seconds, "dataplane/put/seconds": 0.01 * seconds,
        "train/tokens": 300.0, "train/sequences": 16.0, "rollout/failed_rows": 0.0, "train/skipped": 0.0,
        "rollout/tokens_per_s": 1000.0 * step,
        "train/tokens_per_s": 2000.0 * step, "logprob/mismatch_mean": 1e-4, "logprob/mismatch_max": 1e-3,
        "train/grad_norm": 0.4, "memory/peak_gib": 1.5, **changes,
    }  # fmt: skip


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    """The run folder with these steps; returns its metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    last = records[-1]
    lines = [*records, {"event": "finished", "step": last["step"], "time/elapsed_s": last["time/elapsed_s"] + 1}]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def task(folder: Path, layout: Layout, **changes: Any) -> TrainTask:
    """A run of the tiny work."""
    fields: dict[str, Any] = {"backend": "fsdp", "model": folder / "model", "steps": 3, "prompts": 4, "limit_s": 100.0}
    return TrainTask(GRPO_WORKS["grpo-tiny"], layout, folder=folder / layout.label, **(fields | changes))
