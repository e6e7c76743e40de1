"""Repeats the rollouts of a recorded run without a trainer, to check that they still give the same rows.

    journal of the run -> positions of the groups of one policy version -> repeat their rollouts -> compare row by row

The result of a rollout depends on the weights, the prompt, the seed and the sampling, not on when it runs. The `hf`
engine repeats a deterministic run bit by bit. Other engines repeat it up to rounding, because rounding depends on the
other rows in a batch.
"""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ...actors.engines.config import ModelConfig
from ...actors.protocols import row_schema
from ...actors.rollout.actor import RolloutActor
from ...actors.rollout.journal import GroupJournal, JournalConfig, JournaledGroup
from ...codecs.batch import Batch, Jagged, Ragged
from ...codecs.integers import cut_up
from ...dataplane.config import DataPlaneConfig
from ...dataplane.factory import connect, open_data_plane
from ..base_model.prepare import ROUNDED, route_spec
from ..cluster.rollout_specs import fingerprint, rollout_setup, sampling
from ..config.config import Config, RunConfig
from ..config.load import load_config
from ..errors import UserError
from ..observe.run_folder import BEST

_PARTITION = "replay"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of comparing repeated rollouts with the recorded ones."""

    model: str
    """Folder or hub id of the weights of the repeated rollouts."""
    version: int
    """Policy version that generated the repeated groups."""
    groups: int
    """Number of compared groups."""
    rows: int
    """Number of compared rows."""
    rows_alike: int
    """Number of rows that have exactly the recorded tokens."""
    tokens: int
    """Number of tokens in the repeated rows, including prompts."""
    tokens_alike: int
    """Number of tokens before the first difference to the recorded row, summed over rows."""
    logprob_diff_max: float
    """Largest absolute difference between a repeated and a recorded log-prob, over the tokens before each row's first
    difference."""
    reward_diff_max: float
    """Largest absolute difference between a repeated and a recorded reward, over rows with the same tokens."""
    reward_recorded: float
    """Mean reward of the recorded rows."""
    reward: float
    """Mean reward of the repeated rows."""
    seconds: float
    """Duration of the repeated rollouts in seconds."""


def replay_rollouts(
    run_dir: Path, model: str | None, version: int | None, tell: Callable[[str], None] = lambda _: None
) -> ReplayReport:
    """Repeat the rollouts of policy version `version` in a recorded run, and compare them. The run was recorded with
    `run.record=true`.

    run_dir: folder of the recorded run. model: folder or hub id of that version's weights. None stands for the weights
    that the run started from, which are version 0; `best` stands for the run's best model, whose version the run folder
    states. tell: callback that receives progress messages. Raises UserError if the run has no recording of that
    version, or if `model` and `version` do not belong together.
    """
    with warnings.catch_warnings():
        # The warnings are about keys without effect, which do not matter for a finished run.
        warnings.simplefilter("ignore", FutureWarning)
        config = load_config(run_dir / "config.yaml", of_old_run=True)
    model, version = _policy(config.model, run_dir, model, version)
    recorded = _recorded(config.run, fingerprint(config), run_dir, version)
    return asyncio.run(_replay(config, model, version, recorded, tell))


def _policy(first: ModelConfig, run_dir: Path, model: str | None, version: int | None) -> tuple[str, int]:
    """Return the path or hub id of the model and its policy version. Raises UserError if `model` and `version` do not
    belong together."""
    if model is None:
        if version:
            raise UserError(
                f"--version: got {version} without --model, expected --model with the folder of that version's weights"
            )
        if (run_dir / ROUNDED).is_dir():
            return str(run_dir / ROUNDED), 0
        return (str(run_dir / "base_model") if first.builtin else first.path), 0
    if model == BEST:
        figures = run_dir / f"{BEST}.json"
        if not figures.exists() or not (run_dir / BEST).is_dir():
            raise UserError(
                f"--model best: {run_dir} has no best model, expected a run with run.keep_best=true that had a better "
                "validation than its first"
            )
        return str(run_dir / BEST), json.loads(figures.read_text())["version"]
    if version is None:
        raise UserError(f"--model: got {model} without --version, expected --version with its policy version")
    return model, version


def _recorded(run: RunConfig, settings: str, run_dir: Path, version: int) -> dict[int, JournaledGroup]:
    """Return the recorded groups whose tokens were all generated by `version`: position in the prompt stream -> group.
    settings: the run's `fingerprint`. Raises UserError if there are no such groups, or if the run is itself a
    replay."""
    if run.replay is not None:
        raise UserError(f"{run_dir} is itself a replay of {run.replay}, expected the run that it replays")
    if not run.keeps_journal:
        raise UserError(f"{run_dir} has no journal, expected a run with run.record=true")
    try:
        journal = GroupJournal(JournalConfig(str(run_dir / "journal"), settings, "replay"), "replay")
    except ValueError as error:
        raise UserError(f"{run_dir} has no journal, expected a run with run.record=true") from error
    journal.refresh()
    found, there = dict[int, JournaledGroup](), set[int]()
    for position in journal.positions:  # Reading groups one by one keeps groups of other versions out of memory.
        group = journal.find(position)
        if group is not None:
            spans = group.rows.batch["version_spans"]
            assert isinstance(spans, Ragged)
            # The recorded versions of rows count for rows without generated tokens.
            made_by = {*spans.values.reshape(-1, 2)[:, 1].tolist(), *group.rows.versions.tolist()} - {-1}
            there |= made_by
            if made_by == {version}:
                found[position] = group
    if not found:
        versions = f"versions {min(there)} to {max(there)}" if there else "none"
        raise UserError(f"{run_dir} holds no group of version {version}, only of {versions}")
    return found


async def _replay(
    config: Config, model: str, version: int, recorded: dict[int, JournaledGroup], tell: Callable[[str], None]
) -> ReplayReport:
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    together = config.algorithm.prompts_per_step
    positions = sorted(recorded)
    params = sampling(config.rollout, n=config.algorithm.group_size, seed=config.run.seed)
    local = DataPlaneConfig.model_validate({**config.dataplane.model_dump(), "store": {"kind": "local"}})
    with open_data_plane(local, in_process=True) as plane, connect(plane.handle, name="replay") as client:
        setup = rollout_setup(config, 0, model, plane.handle, device)
        assert setup.engine is not None
        actor = RolloutActor(replace(setup, engine=replace(setup.engine, version=version), journal=None))
        tally, seconds = _Tally(), 0.0
        try:
            await actor.build()
            images = next(iter(actor.worker.picture_schema().values()), None)
            routes = route_spec(config.router_replay, config.model)
            schema = row_schema(routes, config.data.columns, images=images, masks=config.rollout.masked)
            client.register(_PARTITION, schema, group_size=config.rows_per_group)
            for first in range(0, len(positions), together):
                chunk = positions[first : first + together]
                tell(f"rolling out group {first + len(chunk)} of {len(positions)}")
                started = time.perf_counter()
                await actor.worker.rollout(chunk, _PARTITION, params, fresh=True)
                seconds += time.perf_counter() - started
                for position in chunk:
                    rows = recorded[position].rows
                    meta = client.lookup(_PARTITION, rows.keys)
                    tally.add(rows.batch, client.get(meta), rows.tags["reward"], meta.tags["reward"])
                client.clear(_PARTITION)
        except ValueError as error:  # The model or the data no longer exists.
            raise UserError(str(error)) from error
        finally:
            await actor.close()
    return tally.report(model, version, len(positions), seconds)


class _Tally:
    def __init__(self) -> None:
        self.rows = self.rows_alike = self.tokens = self.tokens_alike = 0
        self.logprob_diff = self.reward_diff = self.reward_recorded = self.reward = 0.0

    def add(self, recorded: Batch, now: Batch, rewards_recorded: np.ndarray, rewards: np.ndarray) -> None:
        """Compare one recorded group with its repetition and add the result. Both batches must contain the group's rows
        in the same order."""
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
    assert isinstance(column, Jagged)
    return cut_up(column.values.numpy(), column.lengths)


def write_replay(report: ReplayReport, path: Path) -> None:
    """Write the report to `path` as a JSON object with one entry per field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
