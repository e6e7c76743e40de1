"""The steps of GRPO (DeepSeekMath, arXiv:2402.03300): functions over metadata that controllers string together.

Nothing here touches a row: rollout actors put them, train workers get them, and what passes through are receipts,
plans, per-row scalars and figures.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..actors.engines.protocol import SamplingParams
from ..actors.protocols import TRAIN_FIELDS
from ..actors.replica_reader import holds_receipt
from ..actors.rewards.rubric import reward_tag
from ..actors.rollout_report import RolloutReport, ValidationReport
from ..actors.step_rows import TrainShard
from ..actors.train_worker import PREV, REF, WorkerReport
from ..codecs import messages
from ..dataplane.client import DataPlaneClient
from ..dataplane.errors import ClaimTimeout
from ..dataplane.meta import KVBatchMeta
from ..dataplane.plans import Budget, ShardPlan, plan_shards
from .advantages.estimator import AdvantageEstimator, RewardRows
from .config import Config
from .data_plane_watch import DataPlaneWatch
from .engine_set import EngineSet
from .peers import Call, DriverMeter, Peer, expect_none_failed, gather
from .setups import TASK
from .trace import Tracer
from .weight_sync import SyncReport, WeightSync

PARTITION = "train"


LOOK_AFTER_S = 1.0
"""While groups are waited for, how often the rollouts that bring them are looked after."""


class TooManyFailedRows(RuntimeError):
    """More rewards raised in one step than `reward.max_error_share` allows."""


@dataclass(slots=True)
class Run:
    """What the steps work with: handles and settings, no rows."""

    config: Config
    client: DataPlaneClient
    rollouts: list[Peer]
    workers: list[Peer]
    engines: EngineSet
    weights: WeightSync
    meter: DriverMeter
    tracer: Tracer
    estimate: AdvantageEstimator
    sampling: SamplingParams
    greedy: SamplingParams
    budget: Budget
    watch: DataPlaneWatch
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall seconds of each stage of the current step."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the step, for metrics and trace."""
        with self.tracer.span(name) as span:
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + span.dur_s

    def begin_step(self, step: int) -> None:
        """Start timing and tracing `step`."""
        self.seconds = {}
        self.tracer.begin_step(step)

    @property
    def active_rollouts(self) -> list[Peer]:
        """Rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        active = self.engines.active
        return [engine.peer for engine in active] if self.engines.embedded else self.rollouts

    def gather(self, calls: list[Call], stage: str) -> list[Any]:
        return gather(calls, stage, self.config.resources.stage_timeout_s)


@dataclass(slots=True)
class State:
    """Where the run stands; with the workers' checkpoint it is all that a resume needs."""

    step: int = 0
    """Steps finished."""
    version: int = 0
    """Policy version that the engines serve."""
    position: int = 0
    """Prompts of the stream whose groups have been trained on."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Prompts on their way: the calls that roll them out, group by group into the data plane."""

    peers: list[Peer]
    calls: list[Call]
    count: int
    """Groups."""


def start_rollouts(run: Run, position: int, count: int) -> Rollouts:
    """Have `count` prompts from `position` on rolled out, dealt evenly to the rollout actors."""
    peers = run.active_rollouts[:count]
    calls = [
        peer.call("rollout", list(range(position + start, position + stop)), PARTITION, run.sampling)
        for peer, (start, stop) in zip(peers, _dealt(count, len(peers)), strict=True)
    ]
    return Rollouts(peers, calls, count)


def finish_rollouts(run: Run, rollouts: Rollouts) -> list[RolloutReport]:
    """Wait until all groups are put. Raises TooManyFailedRows."""
    with run.stage("rollout"):
        reports = run.gather(rollouts.calls, "rollout")
    for peer, report in zip(rollouts.peers, reports, strict=True):
        run.tracer.add(peer.info.name, report.spans)
        for left in report.left_out:
            run.engines.leave_out(run.engines.named(left.name), left.reason)
    failed, rows = sum(report.failed for report in reports), sum(report.rows for report in reports)
    if failed > run.config.reward.max_error_share * rows:
        error = next(report.first_error for report in reports if report.first_error)
        raise TooManyFailedRows(
            f"rewards failed for {failed} of {rows} rows of {rollouts.count} groups, more than "
            f"reward.max_error_share={run.config.reward.max_error_share:g} allows; the first error was: {error}"
        )
    return reports


def _dealt(count: int, hands: int) -> list[tuple[int, int]]:
    """(first, behind the last) of each hand's share of `count`; the shares differ by one at most."""
    bounds = [count * hand // hands for hand in range(hands + 1)]
    return list(itertools.pairwise(bounds))


def claim_groups(run: Run, count: int, under_way: Sequence[Rollouts]) -> KVBatchMeta:
    """Lease `count` whole groups, their rows in the order of their prompts (so that a step does not depend on which
    actor put first). Waits for them up to resources.stage_timeout_s.

    Raises PeerFailed when one of the rollouts that are to bring them failed, ClaimTimeout.
    """
    deadline = time.monotonic() + run.config.resources.stage_timeout_s
    rows = count * run.config.algorithm.group_size
    with run.stage("claim"):
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                meta = run.client.claim(
                    PARTITION, TASK, TRAIN_FIELDS, rows, whole_groups=True, timeout_s=min(left, LOOK_AFTER_S)
                )
                break
            except ClaimTimeout:
                for rollouts in under_way:
                    expect_none_failed(rollouts.calls, "rollout")
                if left <= LOOK_AFTER_S:
                    raise
    return meta.select(np.array(sorted(range(len(meta)), key=lambda row: prompt_order(meta.keys[row]))))


def prompt_order(key: str) -> tuple[int, str, int]:
    """Sort key of `{prompt_uid}.{sample}`: uids are base-36 counters, so shorter ones are earlier."""
    uid, _, sample = key.rpartition(".")
    return len(uid), uid, int(sample)


def with_advantages(run: Run, meta: KVBatchMeta) -> KVBatchMeta:
    """The receipt with tag `advantage`, from the tags `reward`, `valid` and, if the estimator asks for them, those of
    single rewards."""
    components = {name: meta.tags[reward_tag(name)] for name in run.estimate.components}
    advantage = run.estimate(RewardRows(meta.tags["reward"], meta.tags["valid"] > 0, meta.groups, components))
    return meta.with_tags(advantage=advantage)


def ship_plan(run: Run, meta: KVBatchMeta, step: int) -> ShardPlan:
    """Deal rows to replicas and microbatches and send each rank its part; the one time that their receipt is shipped.

    Only ranks that read or write get one: the others learn of their rows from their leader.
    """
    trainer = run.config.trainer
    topology = trainer.topology
    with run.stage("plan"):
        plan = plan_shards(meta.lengths, topology, run.budget, meta.groups)
        tags = {"advantage": meta.tags["advantage"]}
        if run.config.loss.aggregation == "prompt":
            tags["group_tokens"] = group_tokens(meta)
        lean = replace(meta, tags=tags)
        shards = [plan.shard(dp) for dp in range(topology.dp)]
        receipts = [lean.select(rows).to_bytes() for rows, _ in shards]
        calls = []
        for rank, peer in enumerate(run.workers):
            dp = topology.place(rank).dp
            receipt = receipts[dp] if holds_receipt(topology, trainer.fetch, rank) else None
            shard = TrainShard(step, receipt, shards[dp][1], plan.digest, run.tracer.recording)
            calls.append(peer.call("begin", messages.encode(shard)))
        run.gather(calls, "plan")
    return plan


def group_tokens(meta: KVBatchMeta) -> np.ndarray:
    """float32 `[N]`: response tokens of each row's whole group; those of failed rows are not trained on."""
    _, group = np.unique(meta.groups, return_inverse=True)
    trained = meta.tags["response_length"] * (meta.tags["valid"] > 0)
    return np.bincount(group, weights=trained)[group].astype(np.float32)


def write_logprobs(run: Run) -> list[WorkerReport]:
    """Have the workers write the columns that the loss needs: previous and reference log-probs."""
    fields = [PREV] if run.config.algorithm.prev_logprobs == "recompute" else []
    fields += [REF] if run.config.loss.kl_coef > 0 else []
    reports = []
    for name in fields:
        with run.stage("logprob"):
            replies = run.gather([peer.call("write_logprobs", name) for peer in run.workers], name)
        reports += collect(run, replies)
    return reports


def accumulate(run: Run) -> list[WorkerReport]:
    """Gradients of the shards that the workers hold, into the step that is open; opens one if none is."""
    with run.stage("train"):
        replies = run.gather([peer.call("accumulate") for peer in run.workers], "train")
    return collect(run, replies)


def finish(run: Run) -> list[WorkerReport]:
    """The optimizer step over all that was accumulated."""
    with run.stage("train"):
        replies = run.gather([peer.call("finish") for peer in run.workers], "train")
    return collect(run, replies)


def train_on(run: Run, meta: KVBatchMeta, step: int) -> list[WorkerReport]:
    """Rows of `step`, all of them or a chunk: advantages, plan, log-probs, gradients."""
    ship_plan(run, with_advantages(run, meta), step)
    return write_logprobs(run) + accumulate(run)


def collect(run: Run, replies: list[bytes]) -> list[WorkerReport]:
    """Workers' reports, rank by rank; their spans go into the trace."""
    reports = [messages.decode(reply, WorkerReport) for reply in replies]
    for peer, report in zip(run.workers, reports, strict=True):
        run.tracer.add(peer.info.name, report.spans.to_spans())
    return reports


def sync_weights(run: Run, state: State) -> SyncReport:
    """Bring all engines to `state.version`. Raises NoEngineLeft when none could be."""
    with run.stage("sync"):
        return run.weights.sync(state.version)


def export_model(run: Run, path: str) -> None:
    """Write the trained policy as a HF model folder."""
    run.gather([peer.call("export_model", path) for peer in run.workers], "export")


def retire(run: Run, meta: KVBatchMeta) -> None:
    """The rows are trained on: release the lease and clear them."""
    with run.stage("clear"):
        run.client.release(meta, TASK, "done")
        run.client.clear(PARTITION, meta.keys)


def validate(run: Run) -> dict[str, float]:
    """Greedy answers to the held-out prompts; exact match and reward, no rows put."""
    total = run.config.validation.num_prompts
    rollouts = run.active_rollouts
    with run.stage("validate"):
        calls = [
            peer.call("validate", start, stop - start, run.greedy)
            for peer, (start, stop) in zip(rollouts, _dealt(total, len(rollouts)), strict=True)
            if stop > start
        ]
        reports: list[ValidationReport] = run.gather(calls, "validate")
    rows = sum(report.rows for report in reports)
    return {
        "val/exact_match": sum(report.exact_match * report.rows for report in reports) / rows,
        "val/reward": sum(report.reward * report.rows for report in reports) / rows,
        "time/validate_s": run.seconds["validate"],
    }
