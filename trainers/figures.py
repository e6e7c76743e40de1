"""One step's metrics, from what actors and client report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..actors.rollout_report import RolloutReport, merge_reports
from ..actors.train_worker import WorkerReport
from ..dataplane.meta import KVBatchMeta
from .grpo import Run, State
from .weight_sync import SyncReport


def step_metrics(
    run: Run,
    state: State,
    rollouts: list[RolloutReport],
    passes: list[WorkerReport],
    meta: KVBatchMeta,
    step_s: float,
    sync: SyncReport,
) -> dict[str, float]:
    """Flat metrics of a finished step. `passes`: every worker's report of every pass; training ones carry metrics."""
    rollout = merge_reports(rollouts)
    seconds = run.seconds
    trained = next((report.metrics for report in reversed(passes) if report.metrics), {})
    for report in (*rollouts, *passes):
        run.watch.add(report.traffic)
    data_plane, client_bytes = run.watch.end_step()
    wait_s = max((report.data_wait_s for report in passes), default=0.0)
    staleness = state.version - 1 - meta.versions
    idle = idle_shares([report.generate_s for report in rollouts], seconds, wait_s, step_s)
    return {
        "reward/mean": rollout.reward_mean,
        **{f"reward/{name}": value for name, value in rollout.component_means().items()},
        "rollout/response_length_mean": rollout.response_length_mean,
        "rollout/response_length_max": float(rollout.response_length_max),
        "rollout/truncated_rows": float(rollout.truncated),
        "rollout/failed_rows": float(rollout.failed),
        "rollout/tokens_per_s": rollout.response_tokens / max(rollout.generate_s, 1e-9),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(np.max(staleness)),
        **trained,
        "policy/version": float(state.version),
        "time/step_s": step_s,
        "time/rollout_s": seconds["rollout"],
        "time/logprob_s": seconds.get("logprob", 0.0),
        "time/train_s": seconds["train"],
        "time/sync_s": seconds["sync"],
        "time/data_wait_s": wait_s,
        **idle,
        "time/trainer_idle_s": idle["idle/train"] * step_s,
        "sync/seconds": seconds["sync"],
        "sync/bytes": float(sync.bytes_sent),
        "sync/version": float(sync.version),
        "sync/gather_s": sync.gather_s,
        "sync/pause_s": sync.pause_s,
        "sync/load_s": sync.load_s,
        "sync/engines": float(sync.engines),
        "sync/engines_left_out": float(sync.left_out),
        **data_plane,
        "dataplane/bytes_broadcast": float(sum(report.bytes_broadcast for report in passes)),
        "driver/bytes_per_row": (run.meter.take() + client_bytes) / len(meta),
    }


def idle_shares(
    generate_s: Sequence[float], seconds: Mapping[str, float], wait_s: float, step_s: float
) -> dict[str, float]:
    """Share of a step in which the rollout actors (their mean) generated nothing, and in which the train workers
    computed nothing: waiting for rows is idle too.

    generate_s: of each rollout actor; seconds: of the step's stages; wait_s: the train workers' wait for rows.
    """
    generating = sum(generate_s) / max(1, len(generate_s))
    computing = seconds.get("logprob", 0.0) + seconds.get("train", 0.0) - wait_s
    busy = {"rollout": generating, "train": computing}
    return {f"idle/{side}": min(1.0, max(0.0, 1.0 - busy_s / step_s)) for side, busy_s in busy.items()}
