"""Opens and locks the folder of one run, which holds its configuration, metrics, timeline, checkpoints and report."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import shutil
import traceback
from pathlib import Path
from types import TracebackType

from ...actors.process.json_lines import append
from ...dataplane.owned_folder import try_lock
from ..config.config import Config, resolved_yaml
from ..config.object_files import write_objects
from ..errors import UserError
from .metrics import REPLACED, RESUMED, MetricsWriter
from .trackers import build_tracker, wanted_trackers
from .tracking import Tracking

_log = logging.getLogger(__name__)

BEST = "best"
"""Name of the best model's folder in the run folder; `best.json` beside it says how good that model is. As long as the
file says step 0, no validation has exceeded the first one, and there is no model folder."""
_DRAFTS = ("checkpoints/*.tmp", "*.new", "*.tmp")
"""Glob patterns of drafts. A draft is a file or folder with a temporary name, which is renamed when it is complete."""


def has_figures(folder: str | os.PathLike[str]) -> bool:
    """Return whether the folder has a metrics.jsonl with at least one line."""
    path = Path(folder) / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


class RunFolder:
    """An open run folder, locked for this process; as a context manager it saves the traceback of a run's failure.

    config.yaml     the resolved configuration
    metrics.jsonl   one JSON object per line; the last one of a finished run has "event": "finished"
    tensorboard/    the same metrics as TensorBoard events
    wandb/, mlruns/ the same metrics as Weights & Biases and MLflow keep them; trackers.json has the names of their runs
    trace.json      the timeline of some steps (Perfetto, chrome://tracing)
    checkpoints/    one folder per checkpoint
    journal/        finished groups that no checkpoint covers yet
    engines/        output of vLLM's processes: engine-N.log for each engine
    report.html     metrics and plots in one page that works offline
    objects/        functions and classes of the script or notebook that began the run, which only its user can read
    given/          rows that a script or notebook gave, as JSON lines
    data.json       rows of the files and datasets of training prompts, which a resumed run compares
    samples.jsonl   episodes of some steps and of validations, for `headrace samples` and the report
    reward_errors.jsonl  errors of failed rows, a line per rollout call with failed rows; only if any row failed
    stuck.txt       the stacks of actors that were ended because they hung
    incidents.txt   deaths and failures that the run survived, one sentence per line; only if there were any
    error.txt       the traceback, when the run failed
    watchdog.txt    the stage and the processes' stacks, when the watchdog ended the run
    """

    def __init__(self, config: Config, *, resume: bool) -> None:
        """Create `config.run.dir`, or with `resume` open the run in it. Raises UserError if run.dir is not set or
        cannot be created, or if another process has a run open there. Also raises it if the folder contains a run (any
        metrics) without `resume`, or does not contain one with `resume`.
        """
        if config.run.dir is None:
            raise UserError("run.dir: not set, expected a folder (`with_run_dir` fills in the default)")
        self.path = Path(config.run.dir)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.trace_path = self.path / "trace.json"
        self.checkpoints_dir = self.path / "checkpoints"
        self.report_path = self.path / "report.html"
        self.error_path = self.path / "error.txt"
        self.watchdog_path = self.path / "watchdog.txt"
        self.incidents_path = self.path / "incidents.txt"
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        """Folders that did not exist before and are created for this run, the deepest first."""
        if resume and not self.holds_run:
            raise UserError(f"run.dir: {self.path} holds no run to resume, expected the folder of an earlier run")
        self._lock = self._acquire()
        self._before = set() if self._made else {path.name for path in self.path.iterdir()}
        """Names of the files and folders that were in the run folder when it was opened."""
        try:
            if not resume and self.holds_run:
                raise UserError(
                    f"run.dir: {self.path} already holds a run, expected a new folder (or --resume to continue it)"
                )
            self.checkpoints_dir.mkdir(exist_ok=True)
            if not resume:
                # A run without metrics can have left a journal.
                shutil.rmtree(self.path / "journal", ignore_errors=True)
                (self.path / "samples.jsonl").unlink(missing_ok=True)
                (self.path / "data.json").unlink(missing_ok=True)
            write_objects(config.objects, self.path)
            self._write_config(resolved_yaml(config))
            self.error_path.unlink(missing_ok=True)
            self.watchdog_path.unlink(missing_ok=True)
            trackers = {tracker.kind: build_tracker(tracker) for tracker in wanted_trackers(config.logging)}
            tracking = Tracking(trackers, self.path, config.model_dump(mode="json"))
            self.metrics = MetricsWriter(self.metrics_path, tracking)
        except BaseException as error:
            if isinstance(error, UserError | OSError):
                self._remove_what_was_made()
            os.close(self._lock)
            raise

    @property
    def holds_run(self) -> bool:
        """Whether the folder has metrics of a run. A run that failed before its first metrics can be overwritten."""
        return has_figures(self.path)

    def _acquire(self) -> int:
        """Lock the folder and return the lock file's descriptor. The operating system releases the lock when the
        process ends, even if it is killed. Raises UserError if another process holds the lock or the folder cannot be
        created."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = self.path / "run.lock"
            lock.touch()
            descriptor = try_lock(lock)
        except OSError as error:
            raise UserError(
                f"run.dir: {self.path} cannot be created ({error.strerror}), expected a folder to write in"
            ) from error
        if descriptor is None:
            holder = lock.read_text().strip() or "unknown"
            raise UserError(
                f"run.dir: a run is under way in {self.path} (pid {holder}), expected a separate folder for each run"
            )
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def _write_config(self, text: str) -> None:
        """Write `text` to config.yaml atomically. If a resumed run changes it, the earlier version is kept as
        config.before-resume-N.yaml."""
        if self.holds_run and self.config_path.exists():
            before = self.config_path.read_text(encoding="utf-8")
            if before == text:
                return
            number = 1 + len(list(self.path.glob("config.before-resume-*.yaml")))
            (self.path / f"config.before-resume-{number}.yaml").write_text(before, encoding="utf-8")
        new = self.path / "config.yaml.new"
        new.write_text(text, encoding="utf-8")
        new.replace(self.config_path)

    def resumed(self, step: int, *, died: str = "") -> None:
        """Record in the metrics that training continues after `step`; earlier records of later steps no longer count.

        died: sentence about the loss that caused an automatic restart; "" if the user resumed the run in a new process.
        """
        self.metrics.event(RESUMED, step, **({"died": died} if died else {}))

    def replaced(self, step: int, died: str) -> None:
        """Record in the metrics and in incidents.txt that another process replaced one that died in `step`. died:
        sentence about the death."""
        self.metrics.event(REPLACED, step, died=died)
        self.incident(step, f"{died} (replaced)")

    def incident(self, step: int, sentence: str) -> None:
        """Append a sentence about something that died or failed in `step`, with the time, to incidents.txt."""
        now = datetime.datetime.now().isoformat(" ", "seconds")
        try:
            append(self.incidents_path, f"{now} step {step}: {' '.join(sentence.split())}\n".encode())
        except OSError as error:  # The run continues without the sentence.
            _log.warning("an incident is not written: %s", error.strerror)

    def close(self) -> None:
        """Close the files and release the lock. Idempotent."""
        try:
            self.metrics.close()
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not self.path.is_dir():
            self.close()
            gone = f"run.dir: {self.path} is gone: it was removed or renamed while the run was under way"
            raise FileNotFoundError(errno.ENOENT, f"{gone} ({type(error).__name__}: {error})") from error
        if error is not None:
            for draft in (draft for pattern in _DRAFTS for draft in self.path.glob(pattern)):
                _remove(draft)  # The processes that wrote the drafts have ended by now.
        if isinstance(error, Exception) and not isinstance(error, UserError):
            self._write_traceback(error)
        try:
            self.metrics.close()
        except OSError:
            if error is None:
                self.close()
                raise  # If the run itself failed, its error has the same cause, such as a full disk.
        if isinstance(error, UserError) and not self.metrics.begun:
            self._remove_what_was_made()
        self.close()

    def _write_traceback(self, error: Exception) -> None:
        """Write the traceback to error.txt, and add a note to `error`. The note has the path of the file, or the reason
        why it could not be written."""
        try:
            self.error_path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError as full:
            with contextlib.suppress(OSError):
                self.error_path.unlink(missing_ok=True)
            error.add_note(f"The traceback could not be written to {self.error_path}: {full.strerror}")
        else:
            error.add_note(f"The traceback is in {self.error_path}")

    def _remove_what_was_made(self) -> None:
        """Delete everything that was created in the run folder since it was opened. Called when a user's mistake ends
        the run, so that the next start finds the folder unchanged. The lock must still be held."""
        for path in list(self.path.iterdir()):
            if path.name not in self._before:
                _remove(path)
        for folder in self._made:
            with contextlib.suppress(OSError):  # The folder is kept if it contains other files by now.
                folder.rmdir()


def _remove(path: Path) -> None:
    """Delete a file, or a folder with everything in it. Items that cannot be deleted remain, without an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
