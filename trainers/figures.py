"""One step's metrics, from what actors and client report."""

from __future__ import annotations

import numpy as np

from ..actors.rollout_report import RolloutReport, merge_reports
from ..actors.train_worker import WorkerReport
from ..dataplane.meta import KVBatchMeta
from .grpo import Run, State


def step_metrics(
    run: Run,
    state: State,
    rollouts: list[RolloutReport],
    passes: list[WorkerReport],
    meta: KVBatchMeta,
    step_s: float,
    sync_bytes: int,
) -> dict[str, float]:
    """Flat metrics of a finished step. `passes`: every worker's report of every pass; training ones carry metrics."""
    rollout = merge_reports(rollouts)
    seconds = run.seconds
    trained = next((report.metrics for report in reversed(passes) if report.metrics), {})
    client_bytes, client_calls = run.client_traffic()
    return {
        "reward/mean": rollout.reward_mean,
        **{f"reward/{name}": value for name, value in rollout.component_means().items()},
        "rollout/response_length_mean": rollout.response_length_mean,
        "rollout/response_length_max": float(rollout.response_length_max),
        "rollout/truncated_rows": float(rollout.truncated),
        "rollout/failed_rows": float(rollout.failed),
        "rollout/tokens_per_s": rollout.response_tokens / max(seconds["rollout"], 1e-9),
        "rollout/version_lag": float(state.version - 1 - np.min(meta.versions)),
        **trained,
        "policy/version": float(state.version),
        "time/step_s": step_s,
        "time/rollout_s": seconds["rollout"],
        "time/logprob_s": seconds.get("logprob", 0.0),
        "time/train_s": seconds["train"],
        "time/sync_s": seconds["sync"],
        "time/data_wait_s": max((report.data_wait_s for report in passes), default=0.0),
        "sync/seconds": seconds["sync"],
        "sync/bytes": float(sync_bytes),
        "dataplane/bytes_put": float(rollout.bytes_put + sum(report.bytes_put for report in passes)),
        "dataplane/bytes_got": float(sum(report.bytes_got for report in passes)),
        "dataplane/calls": float(rollout.calls + sum(report.calls for report in passes) + client_calls),
        "driver/bytes_per_row": (run.meter.take() + client_bytes) / len(meta),
    }
