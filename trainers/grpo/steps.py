"""Implements the steps of GRPO (DeepSeekMath, arXiv:2402.03300) as functions on metadata, which the controllers call.

Nothing here touches the content of a row: rollout actors put rows and train workers get them. Only receipts
(keys and locations of rows), plans, a few numbers for each row, and reports pass through the driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...actors.engines.protocol import SamplingParams
from ...actors.rewards.rubric import reward_tag
from ...actors.rollout.rows import TRAINED_TOKENS
from ...actors.samples import SampleFile
from ...actors.train.reader import holds_receipt
from ...actors.train.shard_plans import Budget, plan_shards
from ...actors.train.step_rows import TrainShard
from ...actors.train.worker import REF, WorkerReport
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.meta import POSITION, KVBatchMeta
from ..advantages.estimators import AdvantageEstimator, RewardRows
from ..cluster.calls import Call, DriverMeter, gather, gather_slow
from ..cluster.engine_pool import EnginePool, NoEngineLeft
from ..cluster.handles import TrainHandle
from ..cluster.rollout_specs import EvaluationPlan, sample_file
from ..cluster.run_actors import RunActors
from ..config.config import Config
from ..observe.data_plane_watch import DataPlaneWatch
from ..observe.reward_errors import RewardErrors
from .roles import Roles
from .rollout_pool import RolloutPool
from .row_tags import episodes_of
from .stages import Stages
from .weight_sync import SyncReport, WeightSync

T = TypeVar("T")

STALL_S = 1800.0
"""Seconds without a written byte or any computation after which train workers that save, load or export a model count
as stuck. A shared file system that hangs may need as long to recover."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the steps of a run work with: actors, clients and settings, but no rows."""

    config: Config
    client: DataPlaneClient
    actors: RunActors
    rollouts: RolloutPool
    weights: WeightSync
    roles: Roles
    """Decides who holds the memory of GPUs that engines and train workers share."""
    roles_note: str
    """Sentence for the user about whether both sides take turns; "" if there was nothing to decide."""
    stages: Stages
    meter: DriverMeter
    watch: DataPlaneWatch
    reward_errors: RewardErrors
    estimate: AdvantageEstimator
    sampling: SamplingParams
    """Sampling parameters of training rollouts."""
    evaluations: tuple[EvaluationPlan, ...]
    """Evaluations that the run makes, validation first."""
    budget: Budget
    """Limit on the tokens of a microbatch, and the coefficients that give a row's compute cost from its length."""

    @property
    def workers(self) -> list[TrainHandle]:
        """The train workers, in rank order."""
        return self.actors.workers

    @property
    def engines(self) -> EnginePool:
        """All engines of the run."""
        return self.actors.engines

    def gather(self, calls: Sequence[Call[T]], stage: str) -> list[T]:
        """Wait for all `calls`, at most resources.stage_timeout_s, and return their results in order. Raises
        ActorFailed if an actor failed or did not answer in time."""
        return gather(calls, stage, self.config.resources.stage_timeout_s)

    def gather_slow(self, calls: Sequence[Call[T]], stage: str, draft: Path | None = None) -> list[T]:
        """Wait for calls of train workers that read or write whole models, and return their results in order. The wait
        has no time limit while the workers make progress. draft: folder that the workers write, whose growth counts as
        progress. Raises ActorFailed if a worker failed or makes no progress."""
        return gather_slow(
            calls,
            self.workers,
            stage,
            silence_s=self.config.resources.stage_timeout_s,
            stall_s=STALL_S,
            num_bytes=lambda: 0 if draft is None else size_of(draft),
            on_look=self.stages.gets_on,
        )


@dataclass(slots=True)
class State:
    """The progress of a run. Together with the train workers' checkpoint it is all that a resumed run needs."""

    step: int = 0
    """Number of finished steps."""
    version: int = 0
    """Policy version that the engines serve."""
    position: int = 0
    """Position in the prompt stream of the next new prompt to issue."""
    outstanding: list[int] = field(default_factory=list)
    """Positions of the prompts that were issued but not yet trained on; a resumed run issues them first."""
    ahead: bool = False
    """Whether the train workers' weights may be one step ahead of this state. No checkpoint may then be saved, because
    weights and state would not match."""

    def go_back(self, earlier: State) -> None:
        """Overwrite all values with those of `earlier`."""
        self.step, self.version, self.position = earlier.step, earlier.version, earlier.position
        self.outstanding, self.ahead = list(earlier.outstanding), earlier.ahead


def with_advantages(estimate: AdvantageEstimator, meta: KVBatchMeta) -> KVBatchMeta:
    """Return the receipt `meta` with an added tag `advantage`; a tag is a number for each row. Advantages are estimated
    from the tags `reward` and `valid`, and from the tags of single rewards if the estimator needs them. An episode of
    several rows counts once, and all its rows get its advantage."""
    episodes = episodes_of(meta)
    first = episodes.first
    components = {name: meta.tags[reward_tag(name)][first] for name in estimate.components}
    advantage = estimate(RewardRows(meta.tags["reward"][first], episodes.valid, meta.groups[first], components))
    return meta.with_tags(advantage=advantage[episodes.of_row] * (meta.tags["valid"] > 0))


def ship_plan(
    run: Run, meta: KVBatchMeta, step: int, columns: tuple[str, ...] = (), *, write_samples: bool = False
) -> None:
    """Plan which rank reads which rows of the receipt `meta` in which microbatch, and send each rank its shard.
    columns: log-prob columns that the workers have written to these rows before. write_samples: whether the workers
    write what the step makes of the picked rows to samples.jsonl."""
    config = run.config
    picks = (
        sample_file(config.logging.samples, config.run, config.algorithm.prompts_per_step) if write_samples else None
    )
    traced = run.stages.tracer.recording
    with run.stages.timed("plan"):
        shards = plan_step(run.config, run.budget, meta, step, traced=traced, columns=columns, picks=picks)
        run.gather([worker.begin(shard) for worker, shard in zip(run.workers, shards, strict=True)], "plan")


def plan_step(
    config: Config,
    budget: Budget,
    meta: KVBatchMeta,
    step: int,
    *,
    traced: bool,
    columns: tuple[str, ...] = (),
    picks: SampleFile | None = None,
) -> list[TrainShard]:
    """Assign rows to data-parallel replicas and microbatches; returns one shard for each rank.

    Only ranks that read or write rows get a receipt (the keys and locations of the rows) in their shard; the other
    ranks learn of their rows from the leader of their replica. traced: whether the workers record spans for the trace.
    columns: log-prob columns that the workers have written to these rows before. picks: the file of samples, which
    picks the rows that are written to it; None for no row.
    """
    trainer = config.trainer
    topology = trainer.topology
    plan = plan_shards(meta.lengths, topology, budget, meta.groups)
    tags = {"advantage": meta.tags["advantage"]}
    if config.loss.aggregation == "prompt":
        tags["group_tokens"] = group_tokens(meta)
    if config.trainer.moe.aux_loss_coef:
        tags["row_tokens"] = trained_tokens(meta)
    lean = replace(meta, tags=tags)
    parts = [plan.shard(dp) for dp in range(topology.dp)]
    receipts = [lean.select(rows).to_bytes() for rows, _ in parts]
    picked = [_picked(meta, rows, picks) for rows, _ in parts]
    passes = max(map(len, picked))
    shards = []
    for rank in range(topology.world):
        dp = topology.place(rank).dp
        receipt = receipts[dp] if holds_receipt(topology, trainer.fetch, rank) else None
        shards.append(TrainShard(step, receipt, parts[dp][1], plan.digest, traced, columns, picked[dp], passes))
    return shards


def _picked(meta: KVBatchMeta, rows: np.ndarray, picks: SampleFile | None) -> np.ndarray:
    """Return which of `rows`, by their places there, are written to the file of samples `picks`, int64 `[K]`."""
    if picks is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero([picks.picks(position) for position in meta.tags[POSITION][rows].tolist()])


def group_tokens(meta: KVBatchMeta) -> np.ndarray:
    """Return, for each row, the number of response tokens that its whole group trains on, float32 `[N]`. Failed and
    masked rows contribute no tokens."""
    _, group = np.unique(meta.groups, return_inverse=True)
    return np.bincount(group, weights=trained_tokens(meta))[group].astype(np.float32)


def trained_tokens(meta: KVBatchMeta) -> np.ndarray:
    """Return the trained response tokens of each row, float32 `[N]`: 0 for failed and masked rows."""
    trained = meta.tags.get(TRAINED_TOKENS)
    return meta.tags["response_length"] * (meta.tags["valid"] > 0) if trained is None else trained


def reference_columns(config: Config) -> tuple[str, ...]:
    """Return the name of the reference model's log-prob column, or () when loss.kl_coef is 0, which needs none."""
    return (REF,) if config.loss.kl_coef else ()


def write_logprobs(run: Run, columns: Sequence[str]) -> list[WorkerReport]:
    """Let the train workers compute log-probs of the rows of the last plan and write them back. `columns` names them:
    `prev_logprobs` of the current policy or `ref_logprobs` of the reference model. Returns their reports."""
    reports = []
    for column in columns:
        with run.stages.timed("logprob"):
            reports += run.gather([worker.write_logprobs(column) for worker in run.workers], column)
    return _traced(run, reports)


def accumulate(run: Run) -> list[WorkerReport]:
    """Let the train workers add the gradients of their shards to the optimizer step, which the first call opens.
    Returns their reports."""
    with run.stages.timed("train"):
        reports = run.gather([worker.accumulate() for worker in run.workers], "train")
    return _traced(run, reports)


def finish(run: Run) -> list[WorkerReport]:
    """Have the train workers take the optimizer update with all gradients accumulated so far. Returns their
    reports."""
    with run.stages.timed("train"):
        reports = run.gather([worker.finish() for worker in run.workers], "train")
    return _traced(run, reports)


def train_on(run: Run, meta: KVBatchMeta, step: int) -> list[WorkerReport]:
    """Do the work of an optimizer update of `step` on some of its rows, up to the update itself. Compute advantages,
    plan, compute the reference's log-probs, and accumulate gradients. Returns the train workers' reports."""
    ship_plan(run, with_advantages(run.estimate, meta), step, write_samples=True)
    return write_logprobs(run, reference_columns(run.config)) + accumulate(run)


def _traced(run: Run, reports: list[WorkerReport]) -> list[WorkerReport]:
    """Add the spans of the reports of one pass or several, each in rank order, to the trace; returns the reports."""
    for number, report in enumerate(reports):
        run.stages.tracer.add(run.workers[number % len(run.workers)].info.name, report.spans.to_spans())
    return reports


def sync_weights(run: Run, state: State) -> SyncReport:
    """Bring all engines to the weights of `state.version`, and let them generate. Engines with a later version keep it
    (see `WeightSync.sync`). Engines that died or hang are replaced. Raises NoEngineLeft when none is left and none
    could be replaced."""
    with run.stages.timed("sync"):
        try:
            report = run.roles.sync(state.version)
        except NoEngineLeft:
            if not run.rollouts.replace_dead(state.version):
                raise
            return run.roles.sync(state.version)
        run.rollouts.replace_dead(state.version)
        return report


@contextmanager
def trainer_at_work(run: Run, state: State) -> Iterator[bool]:
    """Context manager in whose block the train workers can be used, between two steps, for a checkpoint or an export.
    Yields whether the workers are offloaded at the end of the block, because the engines had the memory before it. The
    engines then serve `state.version` again, unless the block raises an exception."""
    training = run.roles.training
    run.roles.to_training()
    yield not training
    if not training:
        sync_weights(run, state)


def export_model(run: Run, path: str) -> None:
    """Write the trained policy to `path` as a Hugging Face model folder. The wait has no time limit while the train
    workers make progress."""
    with run.stages.timed("export"):
        run.gather_slow([worker.export_model(path) for worker in run.workers], "export", Path(f"{path}.tmp"))


def size_of(folder: Path) -> int:
    """Return the total bytes of the files below `folder`, or 0 when it does not exist. Files and folders, `folder`
    itself included, may be renamed meanwhile: a checkpoint's draft is renamed by the train worker that ends it."""
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that are gone, unlike `Path.rglob`
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def give_back(run: Run, meta: KVBatchMeta) -> None:
    """Give the bytes of the rows of `meta`, which no train worker reads again, back to the data plane. Rollouts that
    wait for room then continue. The rows themselves stay, leased, until `retire`."""
    with run.stages.timed("clear"):
        run.client.free(meta.partition, meta.keys)


def retire(run: Run, meta: KVBatchMeta) -> None:
    """Clear the rows of `meta`, which have been trained on, from the data plane. This also ends their leases."""
    with run.stages.timed("clear"):
        run.client.clear(meta.partition, meta.keys)
