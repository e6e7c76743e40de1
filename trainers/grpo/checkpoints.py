"""Checkpoints of a run: the train workers' sharded state and the driver's few numbers, whole or not at all."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ..cluster import actor_specs
from ..cluster.calls import ActorFailed, Call, gather_each
from ..config.config import RunConfig
from ..errors import UserError
from .steps import Run, State

_log = logging.getLogger(__name__)
ATTEMPTS = 2
"""Number of times that the last checkpoint of a run is tried."""


class Checkpoints:
    """Writes and reads checkpoints in one folder, and trims the rollout actors' journal to what they do not cover.

    `step_000100.json` holds the driver's numbers. `step_000100/`, which the train workers write behind the training,
    makes the checkpoint count: the folder appears when it is whole.
    """

    def __init__(self, folder: Path, *, keep: int = 0, warn: Callable[[str], None] = _log.warning) -> None:
        """keep: number of whole checkpoints that are kept, 0 for all. warn: is called with a sentence when a checkpoint
        could not be written."""
        self.folder = folder
        self._keep = keep
        self._warn = warn
        self._whole: State | None = None
        """State of the newest checkpoint that is known to be whole."""
        self._writing: State | None = None
        """State of the checkpoint that is being written."""
        self._failed = False
        """Whether the last checkpoint could not be written, so that the next step tries again."""
        self._begun_s = time.monotonic()
        """Time at which the last checkpoint was begun or loaded."""
        self._trims: list[Call[None]] = []
        """Calls that trim the journal; nobody waits for them before the next checkpoint."""

    def is_due(self, run: RunConfig, step: int) -> bool:
        """Whether a checkpoint follows `step`: by the number of steps, by the time, or as the last one failed."""
        if not run.saves_checkpoints or not step:
            return False
        by_step = run.checkpoint_every > 0 and step % run.checkpoint_every == 0
        minutes = (time.monotonic() - self._begun_s) / 60
        return self._failed or by_step or 0 < run.checkpoint_minutes <= minutes

    def save(self, run: Run, state: State) -> None:
        """Start a checkpoint of `state`. Training goes on once the workers have copied their part; a kill leaves the
        earlier checkpoints. A checkpoint that cannot be written is a warning.

        Collective over the workers. Raises ActorFailed for a worker that died or does not get on, and for a rollout
        actor that could not trim its journal.
        """
        self.settle(run)
        path = self._path(state.step)
        self._begun_s = time.monotonic()
        with run.stages.timed("checkpoint"):
            try:
                draft = path.with_suffix(".json.tmp")
                draft.write_text(json.dumps({key: value for key, value in asdict(state).items() if key != "ahead"}))
                draft.rename(path.with_suffix(".json"))
                calls = [worker.save(str(path)) for worker in run.workers]
                run.gather_slow(calls, "checkpoint", _draft_of(path))
            except (ActorFailed, OSError) as error:
                self._give_up(state, error)
                return
        self._failed = False
        self._writing = replace(state, outstanding=list(state.outstanding))

    def settle(self, run: Run) -> None:
        """Wait until the checkpoint that was begun last is written, as long as the workers get on with it; then older
        ones, which are not to be kept, are removed. Raises ActorFailed as `save` does."""
        state, self._writing = self._writing, None
        if state is None:
            return
        path = self._path(state.step)
        with run.stages.timed("checkpoint"):
            try:
                run.gather_slow([worker.wait_saved() for worker in run.workers], "checkpoint", _draft_of(path))
            except ActorFailed as error:
                self._give_up(state, error)
                return
            self._whole = state
            self._trim_journal(run)
            self._prune()

    def finish(self, run: Run, state: State) -> None:
        """Leave a whole checkpoint of `state`, unless run.checkpoint_every and run.checkpoint_minutes are 0; it is
        tried twice. Raises ActorFailed as `save` does."""
        for _ in range(ATTEMPTS if run.config.run.saves_checkpoints and state.step else 0):
            newest = self._writing or self._whole
            if newest is None or newest.step != state.step:
                self.save(run, state)
            self.settle(run)
            if not self._failed:
                break
        self.settle(run)
        self._expect_trimmed(run)

    def latest_state(self) -> State:
        """The state of the newest whole checkpoint. Raises UserError when there is none."""
        steps = self._steps()
        if not steps:
            raise UserError(
                f"--resume: {self.folder} holds no checkpoint, expected at least one (a run writes them every "
                "run.checkpoint_minutes, every run.checkpoint_every steps, and when it is interrupted after a step); "
                "start again in a new run.dir"
            )
        return State(**json.loads(self._path(steps[-1]).with_suffix(".json").read_text()))

    def load(self, run: Run, state: State) -> None:
        """Bring all workers, which are newly built, to `state`: that of a whole checkpoint, or of the run's start.

        Collective; the number of ranks may be another than when it was saved.
        """
        self._trims = []  # the actors that were called may be gone with all others
        self._whole = self._writing = None
        self._begun_s = time.monotonic()
        if state.step:
            path = str(self._path(state.step))
            with run.stages.timed("load checkpoint"):
                run.gather_slow([worker.load(path) for worker in run.workers], "resume")
            self._whole = replace(state, outstanding=list(state.outstanding))

    def _trim_journal(self, run: Run) -> None:
        """Have the rollout actors forget the groups that the newest whole checkpoint covers."""
        last = self._whole
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

    def _give_up(self, state: State, error: ActorFailed | OSError) -> None:
        """Warn that the checkpoint of `state` could not be written, and remove what there is of it. Raises `error` when
        it is no worker's own but its death, or its silence."""
        if isinstance(error, ActorFailed) and (error.died or error.cause is None):
            raise error
        self._failed = True
        path = self._path(state.step)
        shutil.rmtree(_draft_of(path), ignore_errors=True)
        if not path.exists():
            path.with_suffix(".json").unlink(missing_ok=True)
        self._warn(
            f"the checkpoint of step {state.step} could not be written and is tried again after the next step: {error}"
        )

    def _steps(self) -> list[int]:
        """The steps of the whole checkpoints, ascending."""
        names = {path.name for path in self.folder.iterdir()}
        found = (re.fullmatch(r"step_(\d+)", name) for name in names if f"{name}.json" in names)
        return sorted(int(match[1]) for match in found if match)

    def _prune(self) -> None:
        """Remove all checkpoints but the newest ones, and what is left of older drafts."""
        kept = self._steps()[-self._keep :]
        if not self._keep or not kept:
            return
        for path in sorted(
            self.folder.iterdir(), reverse=True
        ):  # `step_1.json`, without which it does not count, first
            match = re.fullmatch(r"step_(\d+)(\.json|\.tmp|\.old|\.json\.tmp)?", path.name)
            if match is None or int(match[1]) in kept or int(match[1]) > kept[-1]:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"


def _draft_of(path: Path) -> Path:
    """The folder that the train workers write before they rename it to `path`."""
    return path.with_name(f"{path.name}.tmp")
