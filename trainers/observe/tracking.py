"""Sends metrics to several trackers, each from its own thread, so that no tracker can slow down or end the run.

log -> a queue for each tracker -> its thread: start, log, log_samples, finish
       full: the step is left out     an exception: reported; after MOST_FAILURES in a row the tracker is abandoned
                                      an exception in log: the metrics are halved until the one that fails is alone
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...actors.process.json_lines import LineTail
from ...actors.sample_file import EPISODE
from .trackers import SampleRow, TrackedRun, Tracker

MOST_FAILURES = 3
"""Number of consecutive failed calls after which a tracker is abandoned."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that trackers have at the end of the run to send the remaining calls."""
_MOST_WAITING = 1000
"""Largest number of calls in the queue of a tracker."""
_IDS = "trackers.json"
"""File in the run folder with each tracker's name of the run: kind of the tracker -> name."""

_log = logging.getLogger(__name__)


class Tracking:
    """The trackers of one run. `log` and `close` must be called by one thread."""

    def __init__(
        self,
        trackers: Mapping[str, Tracker],
        folder: Path,
        config: Mapping[str, Any],
        timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        """trackers: kind of each tracker -> the tracker. folder: the run folder. config: the resolved configuration, as
        nested dicts. timeout_s: seconds that `close` waits for the trackers."""
        self._folder = folder
        self._timeout_s = timeout_s
        self._samples = LineTail(folder / "samples.jsonl")
        """An earlier start of the run has sent the lines that are in the file now."""
        self._ids = _Ids(folder / _IDS)
        self._step = 0
        self._lines = [
            _Line(kind, tracker, TrackedRun(folder.name, folder, config, self._ids.find(kind)), self._ids.store)
            for kind, tracker in trackers.items()
        ]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step, and the new episodes in samples.jsonl, to all trackers."""
        self._step = step
        for line in self._lines:
            line.put(partial(line.log, step=step, metrics=metrics))
        self._log_samples()

    def _log_samples(self) -> None:
        lines, step = self._samples.read() if self._lines else [], self._step
        rows = [_row(line) for line in lines if line.get("kind") == EPISODE]
        if rows:
            for line in self._lines:
                line.put(lambda tracker: tracker.log_samples(step, rows))

    def close(self) -> None:
        """End all trackers, and wait at most `timeout_s` seconds for all of them together. Idempotent."""
        self._log_samples()
        lines, self._lines = self._lines, []
        for line in lines:
            line.end()
        deadline = time.monotonic() + self._timeout_s
        for line in lines:
            line.join(max(0.0, deadline - time.monotonic()))


class _Line:
    def __init__(self, kind: str, tracker: Tracker, run: TrackedRun, started: Callable[[str, str], None]) -> None:
        self._kind = kind
        self._tracker = tracker
        self._run = run
        self._started = started
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_WAITING)
        self._left_out = 0
        self._refused: set[str] = set()
        """Metrics that the tracker does not take; they are not sent again."""
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"headrace-tracker-{kind}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None]) -> None:
        """Queue `call` for the tracker's thread. A no-op if the tracker was abandoned."""
        if self._given_up.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._left_out += 1

    def log(self, tracker: Tracker, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics that the tracker takes. Raises the tracker's exception if it takes none of them.

        A tracker can refuse a whole step because of one name. The metrics are then sent in halves, which are halved
        again where they fail, until each metric that fails is alone. This can send a metric twice, with the same value.
        The search ends with the first two metrics if these fail, because then the tracker is down.
        """
        whole = {key: value for key, value in metrics.items() if key not in self._refused}
        parts, taken, alone = [whole], False, dict[str, Exception]()
        while parts:
            part = parts.pop()
            try:
                tracker.log(step, part)
                taken = True
            except Exception as error:  # A service can fail in many ways.
                if len(part) > 1:
                    items, half = list(part.items()), len(part) // 2
                    parts += [dict(items[half:]), dict(items[:half])]
                    continue
                alone.update(dict.fromkeys(part, error))
                if not taken and (len(alone) > 1 or not parts):
                    raise
        for key, error in alone.items():
            self._refused.add(key)
            _log.warning("tracker %s: %s is not sent: %s", self._kind, key, _said(error))

    def end(self) -> None:
        """Ask the thread to finish its queued calls and exit."""
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            self._given_up.set()  # The tracker hangs, or is far behind.

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, and report calls that the tracker did not receive."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("tracker %s: it has not finished in time, and what it had left to send is lost", self._kind)
        elif self._left_out:
            _log.warning("tracker %s: it was too slow for %d calls, which are left out", self._kind, self._left_out)

    def _work(self) -> None:
        failures = 0
        if not self._try(self._start):
            self._give_up()
            return
        while not self._given_up.is_set():
            call = self._calls.get()
            if call is None:
                self._try(self._tracker.finish)
                return
            failures = 0 if self._try(lambda call=call: call(self._tracker)) else failures + 1
            if failures >= MOST_FAILURES:
                self._give_up()

    def _start(self) -> None:
        self._started(self._kind, self._tracker.start(self._run))

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # A service can fail in many ways, none of which must end the run.
            _log.warning("tracker %s: %s", self._kind, _said(error))
            return False
        return True

    def _give_up(self) -> None:
        self._given_up.set()
        _log.warning("tracker %s: given up, the run goes on without it (metrics.jsonl has everything)", self._kind)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _Ids:
    """The trackers' names of this run, kept in a file so that a resumed run can continue the same tracker runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}

    def find(self, kind: str) -> str | None:
        return self._known.get(kind)

    def store(self, kind: str, name: str) -> None:
        if not name:
            return
        with self._lock:
            self._known[kind] = name
            draft = self._path.with_name(f"{self._path.name}.new")
            draft.write_text(json.dumps(self._known) + "\n")
            draft.replace(self._path)


def _row(line: Mapping[str, Any]) -> SampleRow:
    turns: Sequence[Mapping[str, Any]] = line.get("turns", ())
    response = "".join(turn.get("text", "") for turn in turns)
    return [
        line.get("set", ""),
        line.get("key", ""),
        line.get("version", -1),
        line.get("reward"),
        line.get("finish_reason", ""),
        line.get("prompt", ""),
        response,
        line.get("answer", ""),
        json.dumps(line.get("rewards", {})),
        line.get("error", ""),
    ]
