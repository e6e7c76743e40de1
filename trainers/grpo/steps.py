"""The steps of GRPO (DeepSeekMath, arXiv:2402.03300): functions over metadata that controllers string together.

Nothing here touches a row: rollout actors put them, train workers get them, and what passes through are receipts,
plans, per-row scalars and figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...actors.engines.protocol import SamplingParams
from ...actors.rewards.rubric import reward_tag
from ...actors.train.reader import holds_receipt
from ...actors.train.step_rows import TrainShard
from ...actors.train.worker import PREV, REF, WorkerReport
from ...codecs import messages
from ...dataplane.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from ...dataplane.plans import Budget, ShardPlan, plan_shards
from ..advantages.estimator import AdvantageEstimator, RewardRows
from ..cluster.engine_pool import EnginePool, NoEngineLeft
from ..cluster.handles import Call, DriverMeter, Peer, PeerFailed, gather
from ..cluster.run_actors import START_TIMEOUT_S, RunActors
from ..config.config import Config
from ..observe.data_plane_watch import DataPlaneWatch
from ..observe.trace import Tracer
from ..supervision.heartbeat import Heartbeat
from .weight_sync import SyncReport, WeightSync


@dataclass(slots=True)
class Run:
    """What the steps work with: handles and settings, no rows."""

    config: Config
    client: DataPlaneClient
    actors: RunActors
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
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Tells the watchdog where the run stands."""

    @contextmanager
    def stage(self, name: str, bound_s: float | None = None) -> Iterator[None]:
        """Time a stage of the step, for metrics and trace. bound_s: longer than which the watchdog takes it for stuck;
        None: a stage's."""
        self.heartbeat.enter(name, bound_s)
        with self.tracer.span(name) as span:
            yield
        self.heartbeat.leave()
        self.seconds[name] = self.seconds.get(name, 0.0) + span.dur_s

    def begin_step(self, step: int) -> None:
        """Start timing and tracing `step`."""
        self.seconds = {}
        self.heartbeat.step(step)
        self.tracer.begin_step(step)

    @property
    def workers(self) -> list[Peer]:
        """Train workers by rank."""
        return self.actors.workers

    @property
    def engines(self) -> EnginePool:
        return self.actors.engines

    @property
    def active_rollouts(self) -> list[Peer]:
        """Rollout actors that have an engine to generate with. Raises NoEngineLeft when there is none."""
        active = self.engines.active
        return [engine.peer for engine in active] if self.engines.embedded else self.actors.rollouts

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
    """Of the stream's next prompt that was never issued."""
    outstanding: list[int] = field(default_factory=list)
    """Positions issued and not yet trained on: they are issued first when the run is resumed."""

    def go_back(self, earlier: State) -> None:
        """Become what `earlier` is."""
        self.step, self.version, self.position = earlier.step, earlier.version, earlier.position
        self.outstanding = list(earlier.outstanding)


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
    """Bring all engines to `state.version`, but for those that are ahead of it (WeightSync.sync); those that died are
    replaced. Raises NoEngineLeft when none could be."""
    with run.stage("sync"):
        try:
            report = run.weights.sync(state.version)
        except NoEngineLeft:
            if not _replace_dead(run, state.version):
                raise
            return run.weights.sync(state.version)
        _replace_dead(run, state.version)
        return report


def _replace_dead(run: Run, version: int) -> bool:
    """Put others in the place of engines that died, as often as run.max_restarts allows. Whether all were."""
    dead = [engine for engine in run.engines.engines if engine.dead]
    for engine in dead:
        if not run.actors.may_replace:
            return False
        replace_actor(run, engine.peer, engine.peer.info.pid, PeerFailed(engine.left_out, died=True), version)
    return bool(dead)


def replace_actor(run: Run, peer: Peer, pid: int, failure: PeerFailed, version: int) -> None:
    """Put another actor in the place of a rollout actor or engine whose process `pid` died, serving `version`.

    Takes as long as starting one, while the others go on; nothing when it was done before. Raises `failure` when
    run.max_restarts are used up.
    """
    if peer.info.pid != pid:
        return
    with run.stage("replace", 3 * START_TIMEOUT_S):  # build, info, engines
        engine = next((engine for engine in run.engines.engines if engine.peer is peer), None)
        if engine is not None:
            run.engines.leave_out(engine, str(failure))
        run.actors.replace(peer, failure)
        if engine is None:
            return
        engine.version, engine.dead = 0, False
        if version:
            run.weights.sync(version, [engine])
        run.engines.take_back(engine)


def export_model(run: Run, path: str) -> None:
    """Write the trained policy as a HF model folder."""
    run.gather([peer.call("export_model", path) for peer in run.workers], "export")


def retire(run: Run, meta: KVBatchMeta) -> None:
    """The rows are done with: clear them, which ends their leases."""
    with run.stage("clear"):
        run.client.clear(meta.partition, meta.keys)
