"""Checkpoints of a run: the train workers' sharded state and the driver's few numbers, whole or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

from ..cluster import actor_specs
from ..cluster.calls import ActorFailed, Call, gather_each
from ..errors import UserError
from .steps import Run, State


class Checkpoints:
    """Writes and reads checkpoints in one folder, and trims the rollout actors' journal to what they do not cover.

    `step_000100.json` holds the driver's numbers. `step_000100/`, which the train workers write behind the training,
    makes the checkpoint count: the folder appears when it is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: State | None = None
        """State of the newest checkpoint that was saved or loaded; it may still be being written."""
        self._trims: list[Call[None]] = []
        """Calls that trim the journal; nobody waits for them before the next checkpoint."""

    def save(self, run: Run, state: State) -> None:
        """Start a checkpoint of `state`. Training goes on once the workers have copied their part; a kill leaves the
        earlier checkpoints.

        Collective over the workers. Raises ActorFailed for a failure of the checkpoint before, or of a rollout actor
        that could not trim its journal.
        """
        path = self._path(state.step)
        draft = path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(asdict(state)))
        draft.rename(path.with_suffix(".json"))
        with run.stages.timed("checkpoint"):
            run.gather([worker.save(str(path)) for worker in run.workers], "checkpoint")
            # Each rank has waited for the one before, which is whole now.
            self._trim_journal(run)
        self._last = replace(state, outstanding=list(state.outstanding))

    def finish(self, run: Run) -> None:
        """Wait until the last checkpoint is written. Raises ActorFailed when writing it failed."""
        run.gather([worker.wait_saved() for worker in run.workers], "checkpoint")
        self._trim_journal(run)
        self._expect_trimmed(run)

    def latest_state(self) -> State:
        """The state of the newest whole checkpoint. Raises UserError when there is none."""
        names = {path.name for path in self.folder.iterdir()}
        steps = [
            int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d+)", name)) and f"{name}.json" in names
        ]
        if not steps:
            raise UserError(
                f"--resume: {self.folder} holds no checkpoint, expected at least one (run.checkpoint_every was not "
                "reached); start again in a new run.dir"
            )
        return State(**json.loads(self._path(max(steps)).with_suffix(".json").read_text()))

    def load(self, run: Run, state: State) -> None:
        """Bring all workers, which are newly built, to `state`: that of a whole checkpoint, or of the run's start.

        Collective; the number of ranks may be another than when it was saved.
        """
        self._trims = []  # the actors that were called may be gone with all others
        self._last = None
        if state.step:
            path = str(self._path(state.step))
            run.gather([worker.load(path) for worker in run.workers], "resume")
            self._last = replace(state, outstanding=list(state.outstanding))

    def _trim_journal(self, run: Run) -> None:
        """Have the rollout actors forget the groups that the last checkpoint covers."""
        last = self._last
        if last is None or actor_specs.journal(run.config) is None:
            return
        self._expect_trimmed(run)
        self._trims = [rollout.trim_journal(last.position, last.outstanding) for rollout in run.rollouts.active]

    def _expect_trimmed(self, run: Run) -> None:
        """Raises ActorFailed for a rollout actor that could not trim. An actor that died does not matter, as others
        trim its part of the journal."""
        trims, self._trims = self._trims, []
        for answer in gather_each(trims, "checkpoint", run.config.resources.stage_timeout_s):
            if isinstance(answer, ActorFailed) and not answer.died:
                raise answer

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"
