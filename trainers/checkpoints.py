"""Checkpoints of a run: the workers' sharded state and the driver's few numbers, published together or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from .errors import UserError
from .grpo import Run, State


class Checkpoints:
    """`step_000100/` holds what the workers wrote; `step_000100.json`, written last, makes it count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, run: Run, state: State) -> None:
        """Write one at `state.step`. Collective over the workers; a kill in between leaves the earlier ones whole."""
        path = self._path(state.step)
        with run.stage("checkpoint"):
            run.gather([peer.call("save", str(path)) for peer in run.workers], "checkpoint")
        draft = path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(asdict(state)))
        draft.rename(path.with_suffix(".json"))

    def latest_state(self) -> State:
        """Of the newest whole checkpoint. Raises UserError when there is none."""
        steps = [
            int(match[1]) for path in self.folder.iterdir() if (match := re.fullmatch(r"step_(\d+)\.json", path.name))
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
