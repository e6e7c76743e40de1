"""Sends plans and passes to a run's train workers, and waits for their reports.

This module never touches the content of a row: rollout actors put rows and train workers get them. Only receipts
(keys and locations of rows), plans, a few numbers for each row, and reports pass through the driver.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...actors.rollout.rows import PICTURE_TOKENS, TEACHER_SOURCE
from ...actors.sample_file import SampleFile
from ...actors.train.microbatch_plan import Budget, RowHosts, plan_shards
from ...actors.train.reader import FetchPolicy, holds_receipt
from ...actors.train.step_rows import TrainShard
from ...actors.train.teachers import TEACHER
from ...actors.train.topology import Topology
from ...actors.train.worker import REF
from ...actors.train.worker_setup import WorkerReport
from ...dataplane.meta import POSITION, KVBatchMeta
from ..advantages.estimators import AdvantageEstimator, build_advantages
from ..backends.config import TrainerConfig
from ..cluster.calls import Call, gather, gather_slow
from ..cluster.handles import TrainHandle
from ..cluster.rollout_specs import sample_file
from ..cluster.worker_specs import budget
from ..config.config import Config
from ..losses.config import LossConfig
from .row_tags import counted_rows, group_tokens, trained_tokens, with_advantages
from .stages import Stages

T = TypeVar("T")
HostsOf = Callable[[KVBatchMeta], np.ndarray]
STALL_S = 1800.0
"""Seconds without a written byte or any computation after which train workers that save, load or export a model count
as stuck. A shared file system that hangs may need as long to recover."""


@dataclass(frozen=True, slots=True)
class PlanRules:
    """Rules by which the rows of a step are assigned to ranks and microbatches."""

    topology: Topology
    fetch: FetchPolicy
    """Value of `trainer.fetch`: which ranks read rows themselves."""
    budget: Budget
    """Limit on the tokens of a microbatch, and the coefficients that give a row's compute cost from its length."""
    group_tokens: bool
    """True if each row carries the number of trained tokens of its whole group."""
    row_tokens: bool
    """True if each row carries the number of its trained tokens."""
    counted: bool
    """True if each row carries whether it counts in a mean over rows, because masked rows count, too."""

    @classmethod
    def of(cls, trainer: TrainerConfig, loss: LossConfig, budget: Budget, *, mask_truncated: bool) -> PlanRules:
        """Return the rules of a run with these sections. mask_truncated: that of section `algorithm`."""
        with_rows, by_prompt = bool(trainer.moe.aux_loss_coef), loss.aggregation == "prompt"
        counted = mask_truncated and loss.aggregation != "token"
        return cls(trainer.topology, trainer.fetch, budget, by_prompt, with_rows, counted)


@dataclass(frozen=True, slots=True)
class TrainWorkers:
    """The train workers of a run, and what the driver needs to plan their work."""

    handles: list[TrainHandle]
    """Handles of the workers, in rank order. A worker that replaces another has the same handle."""
    stages: Stages
    rules: PlanRules
    estimate: AdvantageEstimator
    frozen: tuple[str, ...]
    """Names of the columns with log-probs of models that do not change: of the reference model when loss.kl_coef is
    above 0, and of the teachers of a distillation."""
    samples: SampleFile | None
    """File of samples, which picks the rows to write; None for a run without samples."""
    timeout_s: float
    """Seconds within which a worker must answer, or make progress (resources.stage_timeout_s)."""
    hosts_of: HostsOf | None
    """Function that returns the host on which each row of a receipt is stored, `[N]`, in the form of `ActorInfo.space`;
    None for a run whose plans must not depend on it."""

    @classmethod
    def of(
        cls, config: Config, handles: list[TrainHandle], stages: Stages, hosts_of: HostsOf | None = None
    ) -> TrainWorkers:
        """Return the train workers of the run that `config` describes, where `trainer.packing` has been decided."""
        trainer, loss, prompts = config.trainer, config.loss, config.algorithm.prompts_per_step
        return cls(
            handles=handles,
            stages=stages,
            rules=PlanRules.of(
                trainer, loss, budget(trainer, config.model), mask_truncated=config.algorithm.mask_truncated
            ),
            estimate=build_advantages(config.advantage, config.reward.weights),
            frozen=((REF,) if loss.kl_coef else ()) + ((TEACHER,) if config.distillation.teachers else ()),
            samples=sample_file(config.logging.samples, config.run, prompts),
            timeout_s=config.resources.stage_timeout_s,
            # Which host makes a row depends on timing, and a deterministic run must not.
            hosts_of=None if config.run.deterministic else hosts_of,
        )

    def gather(self, calls: Sequence[Call[T]], stage: str) -> list[T]:
        """Wait for all `calls`, at most resources.stage_timeout_s, and return their results in order. Raises
        ActorFailed if an actor failed or did not answer in time."""
        return gather(calls, stage, self.timeout_s)

    def gather_slow(self, calls: Sequence[Call[T]], stage: str, draft: Path | None = None) -> list[T]:
        """Wait for calls of train workers that read or write whole models, and return their results in order. The wait
        has no time limit while the workers make progress. draft: folder that the workers write, whose growth counts as
        progress. Raises ActorFailed if a worker failed or makes no progress."""
        return gather_slow(
            calls,
            self.handles,
            stage,
            silence_s=self.timeout_s,
            stall_s=STALL_S,
            num_bytes=lambda: 0 if draft is None else size_of(draft),
            on_look=self.stages.report_progress,
        )

    def ship_plan(
        self, meta: KVBatchMeta, step: int, columns: tuple[str, ...] = (), *, write_samples: bool = False
    ) -> None:
        """Plan which rank reads which rows of the receipt `meta` in which microbatch, and send each rank its shard.
        columns: log-prob columns that the workers have written to these rows before. write_samples: whether the workers
        write the step's results for the picked rows to samples.jsonl."""
        picks, traced = self.samples if write_samples else None, self.stages.tracer.recording
        with self.stages.timed("plan"):
            hosts = self._row_hosts(meta)
            shards = plan_step(self.rules, meta, step, traced=traced, columns=columns, picks=picks, hosts=hosts)
            self.gather([worker.begin(shard) for worker, shard in zip(self.handles, shards, strict=True)], "plan")

    def _row_hosts(self, meta: KVBatchMeta) -> RowHosts | None:
        """Return the hosts of the rows of `meta` and of the ranks that read them; None if they do not matter."""
        if self.hosts_of is None:
            return None
        topology = self.rules.topology
        ranks = [self.handles[topology.leader(dp)].info.space for dp in range(topology.dp)]
        numbers = {space: number for number, space in enumerate(dict.fromkeys(ranks))}
        if len(numbers) == 1:
            return None
        rows = [numbers.get(space, -1) for space in self.hosts_of(meta).tolist()]
        return RowHosts(np.array(rows, np.int64), np.array([numbers[space] for space in ranks], np.int64))

    def write_logprobs(self, columns: Sequence[str]) -> list[WorkerReport]:
        """Compute log-probs of the rows of the last plan and write them back, for each of `columns`. These are
        `prev_logprobs` of the current policy, `ref_logprobs` of the reference model, and `teacher_logprobs`. Returns
        the reports."""
        reports = []
        for column in columns:
            with self.stages.timed("logprob"):
                reports += self.gather([worker.write_logprobs(column) for worker in self.handles], column)
        return self._traced(reports)

    def accumulate(self) -> list[WorkerReport]:
        """Add the gradients of the workers' shards to the current optimizer step, which the first such call opens.
        Returns the reports."""
        with self.stages.timed("train"):
            reports = self.gather([worker.accumulate() for worker in self.handles], "train")
        return self._traced(reports)

    def finish(self) -> list[WorkerReport]:
        """Take the optimizer update with all gradients accumulated so far. Returns the reports."""
        with self.stages.timed("train"):
            reports = self.gather([worker.finish() for worker in self.handles], "train")
        return self._traced(reports)

    def train_on(self, meta: KVBatchMeta, step: int) -> list[WorkerReport]:
        """Do the work of an optimizer update of `step`, up to the update itself, on some of its rows. It computes
        advantages, plans, computes log-probs of reference and teachers, and accumulates gradients. Returns the
        reports."""
        self.ship_plan(with_advantages(self.estimate, meta), step, write_samples=True)
        return self.write_logprobs(self.frozen) + self.accumulate()

    def export_model(self, folder: Path) -> None:
        """Write the trained policy as the Hugging Face model folder `folder`, which it replaces once it is whole. The
        wait has no time limit while the train workers make progress."""
        draft = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        with self.stages.timed("export"):
            calls = [worker.export_model(str(draft)) for worker in self.handles]
            self.gather_slow(calls, "export", Path(f"{draft}.tmp"))
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)

    def _traced(self, reports: list[WorkerReport]) -> list[WorkerReport]:
        """Add the spans of reports to the trace, and return the reports. The reports belong to one pass or several,
        each in rank order."""
        for number, report in enumerate(reports):
            self.stages.tracer.add(self.handles[number % len(self.handles)].info.name, report.spans.to_spans())
        return reports


def plan_step(
    rules: PlanRules,
    meta: KVBatchMeta,
    step: int,
    *,
    traced: bool,
    columns: tuple[str, ...] = (),
    picks: SampleFile | None = None,
    hosts: RowHosts | None = None,
) -> list[TrainShard]:
    """Assign rows to data-parallel replicas and microbatches; returns one shard for each rank.

    Only ranks that read or write rows get a receipt (the keys and locations of the rows) in their shard. The other
    ranks get their rows from the leader of their replica. traced: whether the workers record spans for the trace.
    columns: log-prob columns that the workers have written to these rows before. picks: file of samples, which picks
    the rows to write; None for no rows. hosts: hosts of rows and ranks, which `plan_shards` prefers to be equal.
    """
    topology = rules.topology
    shown = meta.tags.get(PICTURE_TOKENS)
    shown = None if shown is None or not shown.any() else shown
    plan = plan_shards(meta.lengths, topology, rules.budget, meta.groups, hosts, shown)
    tags = {"advantage": meta.tags["advantage"]}
    if rules.group_tokens:
        tags["group_tokens"] = group_tokens(meta)
    if rules.row_tokens:
        tags["row_tokens"] = trained_tokens(meta)
    if rules.counted:
        tags["counted"] = counted_rows(meta)
    lean = replace(meta, tags=tags)
    parts = [plan.shard(dp) for dp in range(topology.dp)]
    receipts = [lean.select(rows).to_bytes() for rows, _ in parts]
    picked = [_picked(meta, rows, picks) for rows, _ in parts]
    passes = max(map(len, picked))
    source = meta.tags.get(TEACHER_SOURCE, np.zeros(0)).astype(np.int64)
    sources = [source[rows] if len(source) else source for rows, _ in parts]
    picture = None if shown is None else _smallest(meta, shown)
    shards = []
    for rank in range(topology.world):
        dp = topology.place(rank).dp
        receipt = receipts[dp] if holds_receipt(topology, rules.fetch, rank) else None
        shard = TrainShard(
            step, receipt, parts[dp][1], plan.digest, traced, columns, picked[dp], sources[dp], passes, picture
        )
        shards.append(shard)
    return shards


def _smallest(meta: KVBatchMeta, picture_tokens: np.ndarray) -> bytes:
    """Return the receipt of the row with the smallest pictures. picture_tokens: those of each row, `[N]`, not all 0."""
    row = int(np.argmin(np.where(picture_tokens > 0, picture_tokens, np.inf)))
    return replace(meta, tags={}).select([row]).to_bytes()


def _picked(meta: KVBatchMeta, rows: np.ndarray, picks: SampleFile | None) -> np.ndarray:
    """Return the indices in `rows` of the rows that are written to the file of samples `picks`, int64 `[K]`."""
    if picks is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero([picks.picks(position) for position in meta.tags[POSITION][rows].tolist()])


def size_of(folder: Path) -> int:
    """Return the total bytes of the files below `folder`, or 0 when it does not exist. Files and folders, including
    `folder` itself, can be renamed meanwhile: the train worker that completes a checkpoint renames its draft."""
    total = 0
    for parent, _, names in os.walk(folder):  # Unlike `Path.rglob`, `os.walk` skips folders that no longer exist.
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
