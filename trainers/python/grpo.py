"""`GRPO` trains from a script or notebook: with functions, classes and rows of that script, callbacks, or its own loop.

arguments -> sections, with paths of shipped objects and rows -> the checked Config of a run -> `training`
events of `training` -> callbacks -> the loop -> the reason to stop, if there is one -> `training`
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ..cluster.start_times import StartTimes
from ..config.config import Config
from ..errors import UserError
from ..observe.metrics import Record, end_of, evaluation_figures, read_run
from ..observe.run_folder import has_figures
from ..observe.samples import FILE, Row, read_samples
from ..run.launch import RunEvent, RunOfEvents, training
from ..run.requested import requested_run
from .given import GivenRows, Rows, Settings, folder_of_run, given_sections, reward_sections

LEFT = "the loop was left"
"""Reason for the early end of a run whose `with` statement ended before its last step."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The metrics, samples and model that a run has left in its folder."""

    folder: Path
    """Run folder, with report.html, checkpoints, metrics and samples."""
    model: Path | None
    """Folder of the trained model, which transformers loads; None if the run did not get that far."""
    steps: int
    """Number of finished steps."""
    stopped: str | None
    """Reason why the run ended before `algorithm.steps`, from a callback or the loop; None if it did not."""
    metrics: list[Record] = field(repr=False)
    """Metrics of each step, as a list of dicts; pandas.DataFrame takes it."""
    samples: list[Row] = field(repr=False)
    """Episodes of samples.jsonl, as a list of dicts."""

    @classmethod
    def of(cls, folder: Path) -> TrainResult:
        """Read the results of the run in `folder`."""
        metrics, events = read_run(folder)
        stopped = (end_of(events) or {}).get("stopped")
        model = folder / "model"
        steps = int(metrics[-1]["step"]) if metrics else 0
        return cls(folder, model if model.is_dir() else None, steps, stopped, metrics, read_samples(folder / FILE))


class Callback:
    """Base of callbacks, which a run calls in the process of the script or notebook. A method that returns text ends
    the run after the present step, with this text as the reason. An error that a method raises ends the run, too."""

    def on_step(self, event: RunEvent) -> str | None:
        """Called after each step, with its number and metrics."""

    def on_validation(self, event: RunEvent) -> str | None:
        """Called after each step with results of evaluations, and at step 0 with those of the initial model."""

    def on_checkpoint(self, event: RunEvent) -> str | None:
        """Called when a checkpoint is complete, with its step and folder."""

    def on_end(self, result: TrainResult) -> None:
        """Called when the run has ended in good order."""


AnyCallback = Callback | Callable[[RunEvent], str | None]
"""A callback, or a function that is called after each step."""


def _names_validation(sections: Mapping[str, Any]) -> bool:
    """Return whether a user says what validation reads, or how often it runs."""
    both = (sections.get(name) for name in ("data", "validation"))
    data, validation = (one if isinstance(one, Mapping) else {} for one in both)
    named = "data.validation" in sections or bool({"validation", "validation_split"} & data.keys())
    return named or "every" in validation


class _OnStep(Callback):
    """Calls a function after each step."""

    def __init__(self, function: Callable[[RunEvent], str | None]) -> None:
        if not callable(function) or isinstance(function, type):
            raise UserError(f"callbacks: got {function!r}, expected a Callback, such as `Mine()`, or a function")
        self._function = function

    def on_step(self, event: RunEvent) -> str | None:
        return self._function(event)


class GRPO:
    """One run, trained from Python as `headrace train` trains it.

    `train()` does it all; `with GRPO(...) as run: for step in run:` gives a loop of one's own.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        rewards: Any = None,
        train: Rows | None = None,
        *,
        validation: Rows | None = None,
        environment: Any = None,
        loss: Any = None,
        sampler: Any = None,
        config: Settings | None = None,
        overrides: Mapping[str, Any] | None = None,
        callbacks: AnyCallback | Sequence[AnyCallback] = (),
        resume: bool = False,
        allow_changed: bool = False,
    ) -> None:
        """Describe a run; nothing is checked or started yet.

        model: model folder or hub id (`model.path`). rewards: one or a list of functions, classes, kinds by name, and
        sections such as `{"kind": f, "weight": 0.5}` (`reward.functions`). train, validation: rows, or what
        `data.train` takes; with rows for training and nothing said of validation, `validation.every` is 0.
        environment, loss, sampler: function, class or kind (`environment.kind`, `loss.kind`, `algorithm.sampler`).

        config: all other keys, as nested dicts, the path of a YAML file, or a Config; keys that are not set have the
        defaults of the command line. overrides: dotted key -> value; they win over `config`, and the arguments above
        win over both. callbacks: `Callback` objects, or functions that are called after each step. resume: continue
        the run in `run.dir` from its newest checkpoint. allow_changed: whether a resumed run may have other functions
        and classes than its checkpoint.
        """
        self._given: dict[str, Any] = {
            "model.path": None if model is None else os.fspath(model),
            "reward.functions": None if rewards is None else reward_sections(rewards),
            "environment.kind": environment,
            "loss.kind": loss,
            "algorithm.sampler": sampler,
        }
        self._rows = {"train": train, "validation": validation}
        self._settings, self._overrides = config, {str(key): value for key, value in (overrides or {}).items()}
        listed = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        self._callbacks = [one if isinstance(one, Callback) else _OnStep(one) for one in listed]
        self._resume, self._allow_changed = resume, allow_changed
        self._events: RunOfEvents | None = None
        self._written: GivenRows | None = None
        self._reason: str | None = None
        """Reason to end the run early, which the next request for an event sends."""
        self._folder: Path | None = None
        self._result: TrainResult | None = None

    @property
    def result(self) -> TrainResult:
        """Results of the run. Raises UserError before its end."""
        if self._result is None:
            raise UserError("GRPO.result: the run has not ended, expected `train()` or the end of the `with` statement")
        return self._result

    def train(self) -> TrainResult:
        """Train to the end, or until a callback ends the run, and return the results.

        Raises UserError for a mistake of the user, before anything starts if that is possible, and otherwise what
        `run_training` raises. All processes of the run have ended when it returns or raises, also after
        KeyboardInterrupt, which saves a checkpoint first.
        """
        with self:
            for _ in self:
                pass
        return self.result

    def __enter__(self) -> GRPO:
        if self._events is not None:
            raise UserError("GRPO: this run was started already, expected a new GRPO object for another run")
        config = self._configured()
        self._events = training(
            config, resume=self._resume, cluster=None, times=StartTimes(), allow_changed=self._allow_changed
        )
        return self

    def __iter__(self) -> GRPO:
        if self._events is None:
            raise UserError("GRPO: the run is not open, expected `with GRPO(...) as run: for step in run:`")
        return self

    def __next__(self) -> RunEvent:
        """Train one step, and return its number and metrics."""
        while True:
            event = self._next_event()
            if event.kind == "step" and event.step:
                return event

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        events = self._events
        if events is None or self._written is None or self._result is not None:
            return
        try:
            if inspect.getgeneratorstate(events) == inspect.GEN_CREATED:
                assert self._written is not None
                self._written.remove()
                return  # No step was asked for, so nothing has started.
            if error is None:
                self._reason = self._reason or LEFT
                for _ in self:
                    pass
            else:
                events.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            events.close()

    def _configured(self) -> Config:
        """Return the checked configuration of the run, and write the rows that were given."""
        given = {key: value for key, value in self._given.items() if value is not None}
        sections = given_sections(self._settings, {**self._overrides, **given})
        self._folder = folder_of_run(sections)
        self._written = GivenRows(self._folder)
        try:
            paths: dict[str, Any] = {}
            for key, rows in self._rows.items():
                if rows is not None:
                    paths[f"data.{key}"] = self._written.write(rows, key)
            if self._written.holds("train") and not _names_validation(sections | paths):
                paths["validation.every"] = 0  # Rows have no held-out part of their own.
            # The folder's default name has the time, which must not be taken twice.
            sections = given_sections(sections, paths if self._resume else {**paths, "run.dir": str(self._folder)})
            return requested_run(sections, self._overrides, self._folder, resume=self._resume)
        except BaseException:
            self._written.remove()
            raise

    def _next_event(self) -> RunEvent:
        """Return the next event of the run, which the callbacks have got. Raises StopIteration at the end."""
        assert self._events is not None and self._folder is not None and self._written is not None
        reason, self._reason = self._reason, None
        try:
            event = next(self._events) if reason is None else self._events.send(reason)
        except StopIteration as end:
            if end.value is not None:  # Else the run has ended before, maybe with an error.
                self._result = TrainResult.of(self._folder)
                for callback in self._callbacks:
                    callback.on_end(self._result)
            raise
        except UserError:
            if not has_figures(self._folder):
                self._written.remove()
            raise
        self._reason = self._told(event)
        return event

    def _told(self, event: RunEvent) -> str | None:
        """Call the callbacks with an event. Returns the first reason to stop among their answers."""
        answers: list[Any] = []
        for callback in self._callbacks:
            if event.kind == "checkpoint":
                answers.append(callback.on_checkpoint(event))
            if evaluation_figures(event.metrics):
                answers.append(callback.on_validation(event))
            if event.kind == "step" and event.step:
                answers.append(callback.on_step(event))
        return next((answer for answer in answers if isinstance(answer, str) and answer), None)
