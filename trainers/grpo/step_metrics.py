"""Computes the metrics of a step from what actors and the data-plane client report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ...actors.engines.engine_use import engine_metrics
from ...actors.failures import FAILURE_KINDS
from ...actors.images.prompt_pictures import PictureCounts
from ...actors.rewards.rubric import reward_tag
from ...actors.rollout.results import merge_reports
from ...actors.rollout.rows import KV_STALENESS, MaskCounts, RouteCounts
from ...actors.train.worker_setup import WorkerReport
from ...dataplane.meta import KVBatchMeta
from ..advantages.estimators import AdvantageEstimator
from ..observe.data_plane_watch import covered_s, mean_covered_s
from .rollouts import FeedTally
from .row_tags import episodes_of, with_advantages
from .run_parts import Run
from .weight_sync import SyncReport

MANY = 5
"""Smallest staleness, in policy versions, of the rows that `staleness/share_5_or_more` counts."""
MAX_SOURCES = 32
"""Largest number of data sources whose mean reward a step reports. They are those with the most rows."""


def step_metrics(
    run: Run,
    trained: Mapping[str, float],
    fed: FeedTally,
    passes: list[WorkerReport],
    meta: KVBatchMeta,
    step_s: float,
    sync: SyncReport,
    num_rollouts: int,
) -> dict[str, float]:
    """Return all metrics of a finished step, by name.

    trained: those of `trained_metrics`. fed: what happened to the step's groups. passes: every train worker's report of
    every pass. meta: receipt for the rows that were trained on. step_s: seconds that the step took. num_rollouts:
    number of rollout actors in the step. Metrics that only rollout actors know come from the rollout calls that ended
    in the step, and are absent if none did.
    """
    end_s = time.monotonic()
    rollouts, seconds = fed.reports, run.stages.seconds
    for report in (*rollouts, *passes):
        run.observers.watch.add(report.traffic)
    data_plane, client_bytes = run.observers.watch.end_step(run.config.rows_per_group)
    world = len(run.workers.handles)
    wait_s = max(sum(report.data_wait_s for report in passes[rank::world]) for rank in range(world))
    generating_s = mean_covered_s(fed.generated, num_rollouts, end_s - step_s, end_s)
    idle = idle_shares(generating_s, seconds, wait_s, step_s)
    return {
        **trained,
        **(rollout_metrics(fed) if rollouts else {}),
        "rollout/groups_dropped": float(fed.dropped),
        "rollout/groups_stale": float(fed.stale),
        "rollout/groups_surplus": float(fed.surplus),
        "rollout/groups_reissued": float(fed.reissued),
        "time/step_s": step_s,
        "time/rollout_s": seconds.get("rollout", 0.0) + seconds.get("claim", 0.0),
        "time/plan_s": seconds["plan"],
        "time/logprob_s": seconds.get("logprob", 0.0),
        "time/train_s": seconds["train"],
        "time/sync_s": seconds["sync"],
        "time/data_wait_s": wait_s,
        **idle,
        "time/trainer_idle_s": idle["idle/train"] * step_s,
        **sync_metrics(sync, seconds["sync"]),
        **run.roles.metrics(seconds),
        **data_plane,
        "dataplane/bytes_broadcast": float(sum(report.bytes_broadcast for report in passes)),
        "driver/bytes_per_row": (run.observers.meter.take() + client_bytes) / len(meta),
    }


def trained_metrics(run: Run, version: int, passes: list[WorkerReport], meta: KVBatchMeta) -> dict[str, float]:
    """Return the metrics that are known once a step's update is done, by name. version: that of the new policy. passes,
    meta: see `step_metrics`; the tags of `meta` (numbers for each row) give the metrics of rewards and lengths."""
    return {
        **row_metrics(meta, run.workers.estimate),
        **staleness_metrics(version - 1 - meta.versions, run.config.overlap.window),
        **kv_metrics(meta),
        **update_metrics([report.metrics for report in passes if report.metrics]),
        **distillation_metrics(passes),
        "policy/version": float(version),
        "rollout/actors_replaced": float(run.actors.replaced),
        "engine/count": float(len(run.actors.engines.engines)),
    }


BY_UPDATE = ("ratio_mean", "clip_fraction", "approx_kl", "reference_kl", "teacher_kl", "grad_norm")
"""Metrics that a step with several optimizer updates also reports for each of them, without their prefix `train/`."""
SUMMED = ("train/tokens", "train/sequences")
"""Metrics that a step reports as sums over its updates."""


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's optimizer updates, in order, to the metrics of the step; {} without an update.

    Metrics are means over the updates, except that SUMMED are sums. `logprob/` compares the policy before the step with
    the engine's, so it is taken from the first update. `train/lr` is taken from the last update. `train/skipped` is 1
    only if every update was skipped. A step with several updates also reports `train/updates`, and for each update the
    metrics BY_UPDATE as `update_{number}/{name}`, counted from 1.
    """
    if len(updates) <= 1:
        return dict(updates[0]) if updates else {}
    merged = {name: float(np.mean([update[name] for update in updates])) for name in updates[0]}
    merged |= {name: sum(update[name] for update in updates) for name in SUMMED}
    merged |= {name: value for name, value in updates[0].items() if name.startswith("logprob/")}
    merged |= {"train/lr": updates[-1]["train/lr"], "train/skipped": min(u["train/skipped"] for u in updates)}
    for number, update in enumerate(updates, start=1):
        merged |= {f"update_{number}/{n}": update[f"train/{n}"] for n in BY_UPDATE if f"train/{n}" in update}
    return {**merged, "train/updates": float(len(updates))}


def row_metrics(meta: KVBatchMeta, estimate: AdvantageEstimator) -> dict[str, float]:
    """Return the metrics of rewards, advantages and lengths, by episode, from the tags in the receipt `meta`. Tags are
    numbers for each row. Metrics of rewards and advantages are NaN if no row is valid. estimate: the run's estimator of
    advantages."""
    episodes = episodes_of(meta)
    valid, lengths = episodes.valid, episodes.sums(meta.tags["response_length"])
    rewards = meta.tags["reward"][episodes.first][valid].astype(np.float64)
    single = {
        tag: values[episodes.first][valid].astype(np.float64)
        for tag, values in meta.tags.items()
        if tag.startswith(reward_tag(""))
    }
    advantages = with_advantages(estimate, meta).tags["advantage"]
    _, group = np.unique(meta.groups, return_inverse=True)
    useful = np.bincount(group, weights=advantages != 0) > 0
    advantages = advantages[episodes.first][valid] if valid.any() else np.array([math.nan])
    rewards = rewards if valid.any() else np.array([math.nan])
    return {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "advantage/min": float(np.min(advantages)),
        "advantage/max": float(np.max(advantages)),
        "reward/flat_groups_share": 1.0 - float(np.mean(useful)),
        **{tag: float(np.mean(values)) if valid.any() else math.nan for tag, values in single.items()},
        "rollout/response_length_mean": float(np.mean(lengths, dtype=np.float64)),
        "rollout/response_length_max": float(np.max(lengths)),
        "rollout/failed_rows": float(np.sum(~valid)),
    }


def rollout_metrics(fed: FeedTally) -> dict[str, float]:
    """Return the metrics of the rollout calls that ended in the step.

    `rollout/tokens_per_s` is NaN if no call ended after those of earlier steps.
    """
    rollout = merge_reports(fed.reports)
    # Calls outlast steps, so the tokens are divided by the generating time since the last call of earlier steps.
    until_s = max((busy.end_s for busy in fed.generated if busy.end_s < math.inf), default=fed.since_s)
    generating_s = covered_s(fed.generated, fed.since_s, until_s)
    tokens = max(0, rollout.response_tokens - rollout.restored_tokens - rollout.recovered_tokens)
    return {
        **source_metrics(rollout.source_rows, rollout.source_rewards),
        "rollout/truncated_rows": float(rollout.truncated),
        "rollout/truncated_share": rollout.truncated / rollout.rows if rollout.rows else math.nan,
        "rollout/ended_length_mean": rollout.ended_tokens / rollout.ended if rollout.ended else math.nan,
        "rollout/restored_rows": float(rollout.restored),
        **{f"episodes/failed/{kind}": float(rollout.failures.get(kind, 0)) for kind in FAILURE_KINDS},
        "episodes/retried": float(rollout.retries),
        "episodes/recovered_turns": float(rollout.recovered_turns),
        "episodes/recovered_tokens": float(rollout.recovered_tokens),
        "episodes/unmatched_turns": float(rollout.unmatched_turns),
        "rollout/shareable_token_share": (
            rollout.shareable_tokens / rollout.trained_tokens if rollout.trained_tokens else math.nan
        ),
        **route_metrics(rollout.routes),
        **mask_metrics(rollout.masks),
        **engine_metrics(rollout.engines),
        **picture_metrics(rollout.pictures),
        "rollout/tokens_per_s": tokens / generating_s if generating_s > 0 else math.nan,
    }


def distillation_metrics(passes: Sequence[WorkerReport]) -> dict[str, float]:
    """Return the mean over tokens of `log p - log p_teacher`, for the teachers together and for each.

    It estimates the reverse KL divergence of the policy that sampled the tokens. It is NaN if no token was scored;
    without a teacher the result is {}."""
    sums: dict[str, tuple[float, int]] = {}
    for report in passes:
        for name, (excess, tokens) in report.divergences.items():
            before = sums.get(name, (0.0, 0))
            sums[name] = (before[0] + excess, before[1] + tokens)
    key = "distillation/reverse_kl"
    return {
        f"{key}/{name}" if name else key: excess / tokens if tokens else math.nan
        for name, (excess, tokens) in sorted(sums.items())
    }


def source_metrics(rows: Mapping[str, int], rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward by data source. rows, rewards: number of rows and sum of their rewards, by source."""
    largest = sorted(rows, key=lambda source: -rows[source])[:MAX_SOURCES]
    return {f"reward_by_source/{source}": rewards[source] / rows[source] for source in sorted(largest)}


def route_metrics(routes: RouteCounts) -> dict[str, float]:
    """Return the metrics of the routes in rows that rollout actors have written; {} if no row has routes."""
    if not routes.possible:
        return {}
    return {
        "routes/missing_share": routes.missing / routes.possible,
        "routes/rows_missing": float(routes.rows_missing),
        "routes/bytes_per_token": routes.num_bytes / max(routes.num_tokens, 1),
        "routes/mixed_context_share": routes.mixed_context / max(routes.sampled, 1),
        "time/routes_s": routes.seconds,
    }


def mask_metrics(masks: MaskCounts) -> dict[str, float]:
    """Return the metrics of the sampling masks in rows that rollout actors have written; {} if no row has masks."""
    if not masks.tokens:
        return {}
    return {
        "masks/cut_share": masks.cut / masks.tokens,
        "masks/single_share": masks.single / masks.tokens,
        "masks/ids_per_token": masks.ids / masks.tokens,
        "masks/bytes_per_token": masks.num_bytes / masks.tokens,
    }


def picture_metrics(pictures: PictureCounts) -> dict[str, float]:
    """Return the metrics of the pictures that rollout actors have prepared; {} if they prepared none."""
    found = pictures.processed + pictures.reused
    if not found:
        return {}
    return {
        "pictures/processed": float(pictures.processed),
        "pictures/reused_share": pictures.reused / found,
        "pictures/bytes": float(pictures.num_bytes),
        "time/pictures_s": pictures.seconds,
    }


def sync_metrics(sync: SyncReport, seconds: float) -> dict[str, float]:
    """Return the metrics of the step's weight sync. seconds: time that the sync stage took."""
    return {
        "sync/seconds": seconds,
        "sync/bytes": float(sync.bytes_sent),
        "sync/version": float(sync.version),
        "sync/gather_s": sync.gather_s,
        "sync/pause_s": sync.pause_s,
        "sync/load_s": sync.load_s,
        "sync/engines": float(sync.engines),
        "sync/verified_params": float(sync.verified),
        "sync/engines_left_out": float(sync.left_out),
    }


def staleness_metrics(staleness: np.ndarray, bound: int) -> dict[str, float]:
    """Return metrics of the rows' staleness, int64 `[N]` in versions: mean, maximum, and the share of each value.

    bound: largest expected staleness. Shares up to it are returned even when they are 0, so that every step
    has the same keys and plots show the zeros.
    """
    # A journal can hold groups of a later policy than the one from which a resumed run continues.
    staleness = np.maximum(staleness, 0)
    shares = np.bincount(staleness, minlength=bound + 1) / len(staleness)
    figures = {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(np.max(staleness))}
    figures |= {f"staleness/share_{versions}": float(share) for versions, share in enumerate(shares[:MANY])}
    if len(shares) > MANY:
        figures[f"staleness/share_{MANY}_or_more"] = float(shares[MANY:].sum())
    return figures


def kv_metrics(meta: KVBatchMeta) -> dict[str, float]:
    """Return the mean and the maximum over rows of the staleness of keys and values, in versions. Returns {} if no
    engine keeps keys and values over weight updates."""
    staleness = meta.tags.get(KV_STALENESS)
    if staleness is None:
        return {}
    return {"staleness/kv_mean": float(np.mean(staleness)), "staleness/kv_max": float(np.max(staleness))}


def idle_shares(generating_s: float, seconds: Mapping[str, float], wait_s: float, step_s: float) -> dict[str, float]:
    """Return the idle shares of a step. They are the average share of time in which rollout actors did not generate,
    and the share in which train workers did not compute. A worker that waits for rows counts as idle.

    generating_s: seconds for which a rollout actor generated, on average. seconds: name of a stage -> its seconds.
    wait_s: seconds that the train workers waited for rows. step_s: seconds that the step took.
    """
    computing_s = seconds.get("logprob", 0.0) + seconds.get("train", 0.0) - wait_s
    busy = {"rollout": generating_s, "train": computing_s}
    return {f"idle/{side}": min(1.0, max(0.0, 1.0 - busy_s / step_s)) for side, busy_s in busy.items()}
