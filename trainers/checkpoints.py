"""Checkpoints of a run: the workers' sharded state and the driver's few numbers, published together or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from .errors import UserError
from .grpo import Run, State


class Checkpoints:
    """`step_000100.json` holds the driver's numbers; `step_000100/`, what the workers write behind the training, makes
    it count: the folder appears when it is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, run: Run, state: State) -> None:
        """Start one of `state`; training goes on once the workers have copied theirs. A kill leaves the earlier ones.

        Collective over the workers. Raises what the save before it failed with.
        """
        path = self._path(state.step)
        draft = path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(asdict(state)))
        draft.rename(path.with_suffix(".json"))
        with run.stage("checkpoint"):
            run.gather([peer.call("save", str(path)) for peer in run.workers], "checkpoint")

    def finish(self, run: Run) -> None:
        """Wait until the last one is written. Raises what it failed with."""
        run.gather([peer.call("wait_saved") for peer in run.workers], "checkpoint")

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
        """Bring all workers to `state`. Collective; any number of ranks."""
        path = str(self._path(state.step))
        run.gather([peer.call("load", path) for peer in run.workers], "resume")

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"
