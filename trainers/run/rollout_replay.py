"""A recorded run's rollouts made again, without a trainer: do engine, environment and rewards still give the same?

    journal of the run -> positions of the groups that one policy version made -> roll out again -> compare, row by row

How a prompt's group comes out depends on the weights, the prompt, the seed and the sampling, not on when it is made:
`hf` in a deterministic run repeats it bit by bit, other engines up to the rounding of what else is in a batch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ...actors.protocols import ROLLOUT_SCHEMA
from ...actors.rollout.actor import RolloutActor
from ...actors.rollout.journal import GroupJournal, JournalConfig
from ...actors.rollout.journal_records import JournaledGroup
from ...codecs.batch import Batch, Jagged, Ragged
from ...dataplane.config import DataPlaneConfig
from ...dataplane.factory import connect, open_data_plane
from ..cluster import actor_specs
from ..config.config import Config
from ..config.load import load_config
from ..errors import UserError
from ..grpo.validation import BEST

_PARTITION = "replay"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """How what was rolled out now compares with the record."""

    model: str
    version: int
    """Policy version whose groups were made again."""
    groups: int
    rows: int
    rows_alike: int
    """With the same tokens, from the first to the last."""
    tokens: int
    """Of the rows as they are now, prompts among them."""
    tokens_alike: int
    """Of the record, up to each row's first difference."""
    logprob_diff_max: float
    """The largest difference of a log-prob up to each row's first different token."""
    reward_diff_max: float
    """The largest difference of a reward between rows with the same tokens."""
    reward_recorded: float
    """Mean over rows."""
    reward: float
    """Mean over rows, now."""
    seconds: float


def replay_rollouts(
    run_dir: Path, model: str | None, version: int | None, tell: Callable[[str], None] = lambda _: None
) -> ReplayReport:
    """Roll out again what the run in `run_dir` has in its journal (`run.record=true`): the groups that `version` made.

    model: folder or hub id of that version's weights; None: what the run started from, which is version 0. `best`: the
    run's best model, whose version is known. Raises UserError.
    """
    config = load_config(run_dir / "config.yaml")
    model, version = _policy(config, run_dir, model, version)
    recorded = _recorded(config, run_dir, version)
    return asyncio.run(_replay(config, model, version, recorded, tell))


def _policy(config: Config, run_dir: Path, model: str | None, version: int | None) -> tuple[str, int]:
    """The model's path, and its version."""
    if model is None:
        if version:
            raise UserError(f"--version: got {version} without --model, expected the folder of that version's weights")
        return (str(run_dir / "base_model") if config.model.builtin else config.model.path), 0
    if model == BEST:
        figures = run_dir / f"{BEST}.json"
        if not figures.exists():
            raise UserError(f"--model best: {run_dir} has no best model, expected a run with run.keep_best=true")
        return str(run_dir / BEST), json.loads(figures.read_text())["version"]
    if version is None:
        raise UserError(f"--model: got {model} without --version, expected the policy version that it is")
    return model, version


def _recorded(config: Config, run_dir: Path, version: int) -> dict[int, JournaledGroup]:
    """Groups by position, of which every token is of `version`."""
    if config.run.replay is not None:
        raise UserError(f"{run_dir} is itself a replay of {config.run.replay}, expected that one")
    kept = actor_specs.journal(config)
    if kept is None:
        raise UserError(f"{run_dir} has no journal, expected a run with run.record=true")
    try:
        journal = GroupJournal(JournalConfig(str(run_dir / "journal"), kept.fingerprint, "replay"), "replay")
    except ValueError as error:
        raise UserError(f"{run_dir} has no journal, expected a run with run.record=true") from error
    journal.refresh()
    found, there = dict[int, JournaledGroup](), set[int]()
    for position in journal.positions:  # one by one: those of other versions are not kept in memory
        group = journal.find(position)
        if group is not None:
            made_by = _versions(group)
            there |= made_by
            if made_by == {version}:
                found[position] = group
    if not found:
        versions = f"versions {min(there)} to {max(there)}" if there else "none"
        raise UserError(f"{run_dir} holds no group of version {version}, only of {versions}")
    return found


def _versions(group: JournaledGroup) -> set[int]:
    """Of all its tokens that the policy chose; of its rows where there is none."""
    spans = group.rows.batch["version_spans"]
    assert isinstance(spans, Ragged)
    return {*spans.values.reshape(-1, 2)[:, 1].tolist(), *group.rows.versions.tolist()} - {-1}


async def _replay(
    config: Config, model: str, version: int, recorded: dict[int, JournaledGroup], tell: Callable[[str], None]
) -> ReplayReport:
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    together = config.algorithm.prompts_per_step
    positions = sorted(recorded)
    local = DataPlaneConfig.model_validate({**config.dataplane.model_dump(), "store": {"kind": "local"}})
    with open_data_plane(local, in_process=True) as plane, connect(plane.handle, name="replay") as client:
        client.register(_PARTITION, ROLLOUT_SCHEMA, group_size=config.algorithm.group_size)
        setup = actor_specs.rollout_setup(config, 0, model, plane.handle, device)
        assert setup.engine is not None
        actor = RolloutActor(replace(setup, engine=replace(setup.engine, version=version), journal=None))
        tally, seconds = _Tally(), 0.0
        try:
            await actor.build()
            for first in range(0, len(positions), together):
                chunk = positions[first : first + together]
                tell(f"rolling out group {first + len(chunk)} of {len(positions)}")
                started = time.perf_counter()
                await actor.worker.rollout(chunk, _PARTITION, actor_specs.sampling(config), fresh=True)
                seconds += time.perf_counter() - started
                for position in chunk:
                    rows = recorded[position].rows
                    meta = client.lookup(_PARTITION, rows.keys)
                    tally.add(rows.batch, client.get(meta), rows.tags["reward"], meta.tags["reward"])
                client.clear(_PARTITION)
        except ValueError as error:  # a model or data that is not there any more
            raise UserError(str(error)) from error
        finally:
            await actor.close()
    return tally.report(model, version, len(positions), seconds)


class _Tally:
    """A ReplayReport in the making."""

    def __init__(self) -> None:
        self.rows = self.rows_alike = self.tokens = self.tokens_alike = 0
        self.logprob_diff = self.reward_diff = self.reward_recorded = self.reward = 0.0

    def add(self, recorded: Batch, now: Batch, rewards_recorded: np.ndarray, rewards: np.ndarray) -> None:
        """One group, its rows in the same order."""
        columns = [_split(batch[name]) for name in ("input_ids", "rollout_logprobs") for batch in (recorded, now)]
        for row, (ids_before, ids, logprobs_before, logprobs) in enumerate(zip(*columns, strict=True)):
            shorter = min(len(ids_before), len(ids))
            different = np.flatnonzero(ids_before[:shorter] != ids[:shorter])
            alike = int(different[0]) if len(different) else shorter
            self.rows += 1
            self.tokens += len(ids)
            self.tokens_alike += alike
            if alike:
                gap = np.abs(logprobs_before[:alike] - logprobs[:alike]).max()
                self.logprob_diff = max(self.logprob_diff, float(gap))
            if alike == len(ids_before) == len(ids):
                self.rows_alike += 1
                self.reward_diff = max(self.reward_diff, abs(float(rewards_recorded[row] - rewards[row])))
        self.reward_recorded += float(rewards_recorded.sum())
        self.reward += float(rewards.sum())

    def report(self, model: str, version: int, groups: int, seconds: float) -> ReplayReport:
        return ReplayReport(
            model, version, groups, self.rows, self.rows_alike, self.tokens, self.tokens_alike, self.logprob_diff,
            self.reward_diff, self.reward_recorded / self.rows, self.reward / self.rows, seconds,
        )  # fmt: skip


def _split(column: object) -> list[np.ndarray]:
    """The rows of a per-token column."""
    assert isinstance(column, Jagged)
    return np.split(column.values.numpy(), np.cumsum(column.lengths)[:-1])


def write_replay(report: ReplayReport, path: Path) -> None:
    """As JSON, by field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
