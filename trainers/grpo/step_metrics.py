"""One step's metrics, from what actors and client report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from ...actors.rollout.report import merge_reports
from ...actors.train.worker import WorkerReport
from ...dataplane.meta import KVBatchMeta
from ..observe.data_plane_watch import covered_s, mean_covered_s
from .feed import FeedTally
from .steps import Run, State
from .weight_sync import SyncReport

MANY = 5
"""Versions from which on rows are counted together in the staleness shares."""


def step_metrics(
    run: Run,
    state: State,
    fed: FeedTally,
    passes: list[WorkerReport],
    meta: KVBatchMeta,
    step_s: float,
    sync: SyncReport,
) -> dict[str, float]:
    """Flat metrics of a finished step.

    fed: what happened to its groups. passes: every worker's report of every pass; training ones carry metrics.
    meta: its rows. Figures of rewards and lengths are of the rows that were trained on; what only rollout actors know
    is of the rollout calls that ended in the step, and absent when none did.
    """
    end_s = time.monotonic()
    rollouts, seconds = fed.reports, run.stages.seconds
    trained = next((report.metrics for report in reversed(passes) if report.metrics), {})
    for report in (*rollouts, *passes):
        run.watch.add(report.traffic)
    data_plane, client_bytes = run.watch.end_step(run.config.algorithm.group_size)
    world = len(run.workers)
    wait_s = max(sum(report.data_wait_s for report in passes[rank::world]) for rank in range(world))
    generating_s = mean_covered_s(fed.generated, len(run.actors.rollouts), end_s - step_s, end_s)
    idle = idle_shares(generating_s, seconds, wait_s, step_s)
    algorithm = run.config.algorithm
    bound = algorithm.max_staleness if algorithm.mode == "async" else 0
    return {
        **row_figures(meta),
        **(rollout_figures(fed) if rollouts else {}),
        "rollout/groups_dropped": float(fed.dropped),
        "rollout/groups_stale": float(fed.stale),
        "rollout/groups_surplus": float(fed.surplus),
        "rollout/groups_reissued": float(fed.reissued),
        "rollout/actors_replaced": float(run.actors.replaced),
        **staleness_figures(state.version - 1 - meta.versions, bound),
        **trained,
        "policy/version": float(state.version),
        "time/step_s": step_s,
        "time/rollout_s": seconds.get("rollout", 0.0) + seconds.get("claim", 0.0),
        "time/plan_s": seconds["plan"],
        "time/logprob_s": seconds.get("logprob", 0.0),
        "time/train_s": seconds["train"],
        "time/sync_s": seconds["sync"],
        "time/data_wait_s": wait_s,
        **idle,
        "time/trainer_idle_s": idle["idle/train"] * step_s,
        **sync_figures(sync, seconds["sync"]),
        **data_plane,
        "dataplane/bytes_broadcast": float(sum(report.bytes_broadcast for report in passes)),
        "driver/bytes_per_row": (run.meter.take() + client_bytes) / len(meta),
    }


def row_figures(meta: KVBatchMeta) -> dict[str, float]:
    """Of rows by their tags; NaN for the mean reward of none that is valid."""
    valid, lengths = meta.tags["valid"] > 0, meta.tags["response_length"]
    rewards = meta.tags["reward"][valid]
    return {
        "reward/mean": float(np.mean(rewards, dtype=np.float64)) if len(rewards) else float("nan"),
        "rollout/response_length_mean": float(np.mean(lengths, dtype=np.float64)),
        "rollout/response_length_max": float(np.max(lengths)),
        "rollout/failed_rows": float(np.sum(~valid)),
    }


def rollout_figures(fed: FeedTally) -> dict[str, float]:
    """Of the rollout calls that ended in the step; NaN tokens a second when they ended no later than those before."""
    rollout = merge_reports(fed.reports)
    # Calls run over the ends of steps: their tokens are of the time since the calls that were counted before.
    until_s = max((busy.end_s for busy in fed.generated if busy.end_s < math.inf), default=fed.since_s)
    generating_s = covered_s(fed.generated, fed.since_s, until_s)
    tokens = rollout.response_tokens - rollout.restored_tokens
    return {
        **{f"reward/{name}": value for name, value in rollout.component_means().items()},
        "rollout/truncated_rows": float(rollout.truncated),
        "rollout/restored_rows": float(rollout.restored),
        "rollout/tokens_per_s": tokens / generating_s if generating_s > 0 else math.nan,
    }


def sync_figures(sync: SyncReport, seconds: float) -> dict[str, float]:
    """Of the step's weight sync."""
    return {
        "sync/seconds": seconds,
        "sync/bytes": float(sync.bytes_sent),
        "sync/version": float(sync.version),
        "sync/gather_s": sync.gather_s,
        "sync/pause_s": sync.pause_s,
        "sync/load_s": sync.load_s,
        "sync/engines": float(sync.engines),
        "sync/engines_left_out": float(sync.left_out),
    }


def staleness_figures(staleness: np.ndarray, bound: int) -> dict[str, float]:
    """Of rows' staleness in versions, int64 `[N]`: mean, largest, and the share of rows with each, in few keys.

    bound: the largest that is expected; the same keys are there at every step, so that a share of 0 is a point, too.
    """
    # Groups of a journal may be of a later policy than the one that their resumed run trains again.
    staleness = np.maximum(staleness, 0)
    shares = np.bincount(staleness, minlength=bound + 1) / len(staleness)
    figures = {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(np.max(staleness))}
    figures |= {f"staleness/share_{versions}": float(share) for versions, share in enumerate(shares[:MANY])}
    if len(shares) > MANY:
        figures[f"staleness/share_{MANY}_or_more"] = float(shares[MANY:].sum())
    return figures


def idle_shares(generating_s: float, seconds: Mapping[str, float], wait_s: float, step_s: float) -> dict[str, float]:
    """Share of a step in which the rollout actors (their mean) generated nothing, and in which the train workers
    computed nothing: waiting for rows is idle too.

    generating_s: of the mean rollout actor; seconds: of the step's stages; wait_s: the train workers' wait for rows.
    """
    computing_s = seconds.get("logprob", 0.0) + seconds.get("train", 0.0) - wait_s
    busy = {"rollout": generating_s, "train": computing_s}
    return {f"idle/{side}": min(1.0, max(0.0, 1.0 - busy_s / step_s)) for side, busy_s in busy.items()}
