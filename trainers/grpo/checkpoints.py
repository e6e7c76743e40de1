"""Checkpoints of a run: the workers' sharded state and the driver's few numbers, published together or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

from ..cluster import actor_specs
from ..cluster.handles import Call, PeerFailed, gather_each
from ..errors import UserError
from .steps import Run, State


class Checkpoints:
    """`step_000100.json` holds the driver's numbers; `step_000100/`, what the workers write behind the training, makes
    it count: the folder appears when it is whole. The rollout actors' journal keeps what a whole one does not cover."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: State | None = None
        """Of the newest one, as it was saved or loaded; maybe still being written."""
        self._trims: list[Call] = []
        """Of the journal; nobody waits for them before the next."""

    def save(self, run: Run, state: State) -> None:
        """Start one of `state`; training goes on once the workers have copied theirs. A kill leaves the earlier ones.

        Collective over the workers. Raises what the save before it failed with, and a rollout actor that could not trim
        its journal.
        """
        path = self._path(state.step)
        draft = path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(asdict(state)))
        draft.rename(path.with_suffix(".json"))
        with run.stage("checkpoint"):
            run.gather([peer.call("save", str(path)) for peer in run.workers], "checkpoint")
            # Each rank has waited for the one before, which is whole now.
            self._trim_journal(run)
        self._last = replace(state, outstanding=list(state.outstanding))

    def finish(self, run: Run) -> None:
        """Wait until the last one is written. Raises what it failed with."""
        run.gather([peer.call("wait_saved") for peer in run.workers], "checkpoint")
        self._trim_journal(run)
        self._expect_trimmed(run)

    def latest_state(self) -> State:
        """Of the newest whole checkpoint. Raises UserError when there is none."""
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
        """Bring all workers, just built, to `state`: that of a whole checkpoint, or of the run's start, at which they
        are. Collective; any number of ranks."""
        self._trims = []  # calls of actors that may be gone with all others
        self._last = None
        if state.step:
            path = str(self._path(state.step))
            run.gather([peer.call("load", path) for peer in run.workers], "resume")
            self._last = replace(state, outstanding=list(state.outstanding))

    def _trim_journal(self, run: Run) -> None:
        """Have the rollout actors forget the groups that the last checkpoint covers."""
        last = self._last
        if last is None or actor_specs.journal(run.config) is None:
            return
        self._expect_trimmed(run)
        self._trims = [
            peer.call("trim_journal", last.position, last.outstanding) for peer in run.active_rollouts
        ]  # fmt: skip

    def _expect_trimmed(self, run: Run) -> None:
        """Raises PeerFailed for a rollout actor that could not trim. One that died is no matter: others see to its
        segments."""
        trims, self._trims = self._trims, []
        for answer in gather_each(trims, "checkpoint", run.config.resources.stage_timeout_s):
            if isinstance(answer, PeerFailed) and not answer.died:
                raise answer

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"
