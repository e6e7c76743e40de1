"""Saves and loads a run's checkpoints: the train workers' sharded state and the driver's `State` (step, prompts)."""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from ..cluster.calls import ActorFailed, Call, gather_each
from ..config.config import RunConfig
from ..errors import CheckpointDamaged, UserError
from .rollout_pool import RolloutPool
from .train_workers import TrainWorkers

_log = logging.getLogger(__name__)
_DEFAULTS = RunConfig()
ATTEMPTS = 2
"""Maximum number of attempts to write the final checkpoint of a run."""


class NoCheckpoint(UserError):
    """Raised when a run has no complete checkpoint from which it could go on."""


@dataclass(slots=True)
class State:
    """The progress of a run. A resumed run needs only this state and the train workers' checkpoint."""

    step: int = 0
    """Number of finished steps."""
    version: int = 0
    """Policy version that the engines serve."""
    position: int = 0
    """Position in the prompt stream of the next new prompt to issue."""
    outstanding: list[int] = field(default_factory=list)
    """Positions of the prompts that were issued but not yet trained on; a resumed run issues them first."""
    objects: list[str] = field(default_factory=list)
    """Paths of the run's objects of a script or notebook, which contain the digests of their sources."""
    ahead: bool = False
    """True while the train workers' weights can be one step ahead of this state. No checkpoint may then be saved,
    because weights and state would not match."""
    figures: dict[str, float] = field(default_factory=dict)
    """Metrics of the last finished step that are known from its update on. They are not saved: a run that is
    interrupted before it logs the step logs these."""

    def go_back(self, earlier: State) -> None:
        """Overwrite all values with those of `earlier`."""
        self.step, self.version, self.position = earlier.step, earlier.version, earlier.position
        self.outstanding, self.ahead = list(earlier.outstanding), earlier.ahead


class Checkpoints:
    """Writes, loads and prunes the checkpoints in one folder. Once a checkpoint is complete, the groups that it covers
    are deleted from the journal, in which rollout actors keep finished groups on disk.

    The checkpoint of step 100 consists of `step_000100.json`, the driver's `State`, and `step_000100/`, the train
    workers' state. The workers write the folder in the background under another name and rename it once it is complete.
    A checkpoint without this folder is ignored.
    """

    def __init__(
        self, folder: Path, settings: RunConfig = _DEFAULTS, warn: Callable[[str], None] = _log.warning
    ) -> None:
        """settings: section `run` of the configuration; the default suffices for reading checkpoints. warn:
        function that is called with a sentence when a checkpoint could not be written."""
        self.folder = folder
        self._settings = settings
        self._warn = warn
        self._whole: State | None = None
        """State of the newest checkpoint that is known to be complete."""
        self.completed: list[int] = []
        """Steps of the checkpoints that have been completed here."""
        self._writing: State | None = None
        """State of the checkpoint that the train workers are writing; None when they write none."""
        self._failed = False
        """Whether writing the last checkpoint failed; another attempt then follows after the next step."""
        self._begun_s = time.monotonic()
        """`time.monotonic` time at which the last checkpoint was begun or loaded."""
        self._trims: list[Call[None]] = []
        """Pending calls that tell rollout actors to trim the journal. The next checkpoint, or `finish`, waits for their
        results."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`. It is due if the step is a multiple of
        `run.checkpoint_every`, if `run.checkpoint_minutes` minutes have passed since the last checkpoint began, or if
        the last one could not be written. Always False at step 0 and in runs without checkpoints."""
        run = self._settings
        if not run.saves_checkpoints or not step:
            return False
        by_step = run.checkpoint_every > 0 and step % run.checkpoint_every == 0
        minutes = (time.monotonic() - self._begun_s) / 60
        return self._failed or by_step or 0 < run.checkpoint_minutes <= minutes

    def save(self, workers: TrainWorkers, rollouts: RolloutPool, state: State) -> None:
        """Start writing a checkpoint of `state`. Returns once the train workers have copied their state, which they
        then write in the background while training continues. If engines and train workers take turns in memory,
        returns once the checkpoint is complete. A kill at any moment leaves the earlier checkpoints intact, and a
        checkpoint that cannot be written only causes a warning.

        Collective over the train workers. Raises ActorFailed when a train worker dies or makes no progress, or when a
        rollout actor could not trim its journal.
        """
        self.settle(workers, rollouts)
        with rollouts.trainer_at_work(state.version) as is_passed_on:
            self._begin_save(workers, state)
            if is_passed_on:  # Workers cannot offload a state that they are writing.
                self.settle(workers, rollouts)

    def _begin_save(self, workers: TrainWorkers, state: State) -> None:
        path = self.path_of(state.step)
        self._begun_s = time.monotonic()
        with workers.stages.timed("checkpoint"):
            try:
                draft = path.with_suffix(".json.tmp")
                draft.write_text(_encoded(state))
                draft.rename(path.with_suffix(".json"))
                calls = [worker.save(str(path)) for worker in workers.handles]
                workers.gather_slow(calls, "checkpoint", _draft_of(path))
            except (ActorFailed, OSError) as error:
                self._give_up(state, error)
                return
        self._failed = False
        self._writing = replace(state, outstanding=list(state.outstanding))

    def settle(self, workers: TrainWorkers, rollouts: RolloutPool) -> None:
        """Wait until the checkpoint that is being written is complete, then delete what it replaces. It replaces the
        groups that it covers in the journal, and old checkpoints. Returns at once if no checkpoint is being written.
        The wait has no time limit while the train workers make progress. Raises ActorFailed as `save` does."""
        state, self._writing = self._writing, None
        if state is None:
            return
        path = self.path_of(state.step)
        with workers.stages.timed("checkpoint"):
            try:
                workers.gather_slow([worker.wait_saved() for worker in workers.handles], "checkpoint", _draft_of(path))
            except ActorFailed as error:
                self._give_up(state, error)
                return
            self._whole = state
            self.completed.append(state.step)
            self._trim_journal(workers.timeout_s, rollouts)
            self._prune()

    def finish(self, workers: TrainWorkers, rollouts: RolloutPool, state: State) -> None:
        """Save a checkpoint of `state`, unless one exists already, and wait until it is complete. A failed attempt is
        repeated once. A run that writes no checkpoints (run.checkpoint_every and run.checkpoint_minutes are 0) gets
        none. Raises ActorFailed as `save` does."""
        for _ in range(ATTEMPTS if self._settings.saves_checkpoints and state.step else 0):
            newest = self._writing or self._whole
            if newest is None or newest.step != state.step:
                self.save(workers, rollouts, state)
            self.settle(workers, rollouts)
            if not self._failed:
                break
        self.settle(workers, rollouts)
        self._expect_trimmed(workers.timeout_s)

    def latest_state(self) -> State:
        """Return the state of the newest complete checkpoint. Raises NoCheckpoint when there is none, and UserError
        when its file is damaged."""
        steps = self._steps()
        if not steps:
            raise NoCheckpoint(
                f"--resume: {self.folder} holds no checkpoint, expected at least one (a run writes them every "
                "run.checkpoint_minutes, every run.checkpoint_every steps, and when it is interrupted after a step); "
                "start again in a new run.dir"
            )
        path = self.path_of(steps[-1]).with_suffix(".json")
        try:
            return _decoded(path.read_bytes())
        except (ValueError, TypeError) as error:
            raise self._set_aside(steps[-1], f"checkpoint {path} is damaged: {error}") from None

    def load(self, workers: TrainWorkers, rollouts: RolloutPool, state: State) -> None:
        """Load the checkpoint of `state` into all train workers, which must be newly built. For the state of the run's
        start (step 0) nothing is read.

        Collective over the train workers; their number may differ from when the checkpoint was saved. Raises
        ActorFailed if a worker fails, dies or makes no progress, and UserError if the checkpoint is damaged or does not
        belong to the model.
        """
        self._trims = []  # The actors of these calls can have been replaced.
        self._whole = self._writing = None
        self._begun_s = time.monotonic()
        if state.step:
            rollouts.roles.to_training()
            path = str(self.path_of(state.step))
            with workers.stages.timed("load checkpoint"):
                try:
                    workers.gather_slow([worker.load(path) for worker in workers.handles], "resume")
                except ActorFailed as error:
                    if isinstance(error.cause, CheckpointDamaged):
                        raise self._set_aside(state.step, str(error.cause)) from error
                    if isinstance(error.cause, UserError):
                        raise UserError(str(error.cause)) from error
                    raise
            self._whole = replace(state, outstanding=list(state.outstanding))

    def _set_aside(self, step: int, damage: str) -> UserError:
        """Rename the damaged checkpoint of `step`, and return the error to raise. The one before it is then the newest.

        damage: sentence that names the file.
        """
        path = self.path_of(step)
        aside = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        steps = self._steps()
        before = f"--resume now goes on from the one before it, of step {steps[-1]}" if steps else "there is no other"
        return UserError(f"{damage}; it is kept as {aside.name}, and {before}")

    def _trim_journal(self, timeout_s: float, rollouts: RolloutPool) -> None:
        """Tell the rollout actors to delete from their journal the groups that the newest complete checkpoint covers.
        Waits for the calls of the previous trim, but not for the new ones."""
        last = self._whole
        if last is None or not self._settings.keeps_journal:
            return
        self._expect_trimmed(timeout_s)
        self._trims = [rollout.trim_journal(last.position, last.outstanding) for rollout in rollouts.active]

    def _expect_trimmed(self, timeout_s: float) -> None:
        """Wait for the pending calls that trim the journal. Raises ActorFailed when a rollout actor could not trim its
        part. An actor that died is ignored, because the other actors trim its part."""
        trims, self._trims = self._trims, []
        for answer in gather_each(trims, "checkpoint", timeout_s):
            if isinstance(answer, ActorFailed) and not answer.died:
                raise answer

    def _give_up(self, state: State, error: ActorFailed | OSError) -> None:
        """Warn that the checkpoint of `state` could not be written, and delete its partial files. Raises `error`
        instead if it reports a worker that died or did not answer."""
        if isinstance(error, ActorFailed) and (error.died or error.cause is None):
            raise error
        self._failed = True
        path = self.path_of(state.step)
        shutil.rmtree(_draft_of(path), ignore_errors=True)
        if not path.exists():
            path.with_suffix(".json").unlink(missing_ok=True)
        self._warn(
            f"the checkpoint of step {state.step} could not be written and is tried again after the next step: {error}"
        )

    def _steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        names = {path.name for path in self.folder.iterdir()}
        found = (re.fullmatch(r"step_(\d+)", name) for name in names if f"{name}.json" in names)
        return sorted(int(match[1]) for match in found if match)

    def _prune(self) -> None:
        """Delete all complete checkpoints but the newest `keep`, and the unfinished files of older ones. Does nothing
        if all are kept (`keep` is 0)."""
        kept = self._steps()[-self._settings.keep_checkpoints :]
        if not self._settings.keep_checkpoints or not kept:
            return
        # In reverse order, a checkpoint's .json file is deleted before its folder. Without this file, the folder does
        # not count as a checkpoint.
        for path in sorted(self.folder.iterdir(), reverse=True):
            match = re.fullmatch(r"step_(\d+)(\.json|\.tmp|\.old|\.json\.tmp)?", path.name)
            if match is None or int(match[1]) in kept or int(match[1]) > kept[-1]:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.folder / f"step_{step:06d}"


def refuse_changed_objects(state: State, objects: Sequence[str]) -> None:
    """Raise UserError if a resumed run has other objects of a script or notebook than its checkpoint.

    state: state of the checkpoint. objects: paths of the objects of the resumed run.
    """
    old, new = set(state.objects), set(objects)
    if old == new:
        return
    names = sorted({path.rpartition(":")[2] for path in old ^ new})
    raise UserError(
        f"{', '.join(names)}: got another source or value than that of the checkpoint of step {state.step}, expected "
        "the same; allow_changed=True trains on with what is given now"
    )


def _digest(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def _encoded(state: State) -> str:
    not_saved = {"ahead", "figures", *([] if state.objects else ["objects"])}
    values = {key: value for key, value in asdict(state).items() if key not in not_saved}
    return json.dumps({**values, "xxh3": _digest(values)})


def _decoded(data: bytes) -> State:
    """Return the state that `_encoded` has written. An earlier version wrote no digest. Raises ValueError or TypeError
    if the data is damaged."""
    values = json.loads(data)
    if values.pop("xxh3", None) not in (None, _digest(values)):
        raise ValueError("its content does not fit its digest")
    return State(**values)


def _draft_of(path: Path) -> Path:
    """Return the folder that the train workers write before they rename it to `path`."""
    return path.with_name(f"{path.name}.tmp")
