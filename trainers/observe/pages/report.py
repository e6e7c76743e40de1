"""Writes a run's report as one HTML file that works offline, and rebuilds it while the run is in progress.

A separate process of low priority rebuilds it, so that the run does not wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from ....actors.rollout.evaluation_metrics import EXACT_MATCH, REWARD, find_figure
from ...config.config import HELD_OUT_LOSS, Config
from ...config.load import read_sections
from ...errors import UserError
from ...fetch.gguf_folder import rounding_note
from ..metrics import ELAPSED, Record, evaluation_figures, evaluation_title, read_run
from ..samples import FILE, read_samples
from .cards import card_keys, cards, further_figures, seconds_text
from .page import page, short, table, write_page
from .plots import Columns, page_columns, plot_keys, run_plots
from .run_state import run_state

_log = logging.getLogger(__name__)
CLOSE_S = 10.0
"""Seconds within which a build must end after it is terminated; then it is killed."""
_PRIORITY = 15
"""Increment of the niceness of the process that builds the report."""
RELOAD_S = 30
"""Seconds after which the page of an unfinished run reloads."""
BASELINES = "baselines.json"
"""Optional file of a run folder with values to compare the held-out curve with, as {"label": value}."""
UNTOLD = ("run.dir", "run.name")
"""Config keys that are left out of tables of settings, because every run has its own."""


class LiveReport:
    """Starts builds of a run's report in child processes, one at a time."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """folder: the run folder. every_s: seconds between the starts of two builds, and before the first build; 0 for
        no builds."""
        self._command = [sys.executable, "-m", "headrace.cli", "report", str(folder)]
        self._every_s = every_s
        self._last_s = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def tick(self) -> None:
        """Start a build if one is due and none is running. Called after each step."""
        if not self._every_s or time.monotonic() - self._last_s < self._every_s:
            return
        if self._process is not None and self._process.poll() is None:
            return
        self._last_s = time.monotonic()
        quiet = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, stderr=quiet)
        except OSError as error:  # The run goes on, and the next build is tried in its turn.
            _log.warning("the report is not built: %s", error)
            return
        with contextlib.suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(os.getpriority(os.PRIO_PROCESS, 0) + _PRIORITY)

    def close(self) -> None:
        """End a running build, and wait until its process has exited. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run folder from its metrics.jsonl, samples.jsonl and config.yaml; returns its path.

    Also works for a run that is in progress or has failed. Raises UserError if the folder has no metrics or a broken
    metrics file.
    """
    folder = Path(run_dir)
    records, events = read_run(folder)
    data = report_data(folder, records, events)
    data["reload_s"] = 0 if data["state"]["kind"] == "finished" else RELOAD_S
    text = page(folder.resolve().name, data, read_samples(folder / FILE))
    return write_page(folder / "report.html", text)


def report_data(
    folder: Path, records: Sequence[Record], events: Sequence[Record], only: Container[int] | None = None
) -> dict[str, Any]:
    """Return everything on a run's page but its samples, for `page.js`.

    records, events: as `read_metrics` returns them. only: steps whose points the curves have; None for all steps, in
    thinned curves.
    """
    text, config = _read_config(folder)
    judged = judged_key(config, records)
    columns = Columns(records)
    plots = run_plots(columns, judged, _lines(folder, columns, judged))
    keys = [("", key) for key in (*card_keys(judged), *plot_keys(plots))]
    changed = columns if only is None else Columns([record for record in records if record["step"] in only])
    curves, size = page_columns({"": changed}, keys, thin=only is None)
    return {
        "state": report_state(folder, records, events),
        "cards": [asdict(card) for card in cards(columns, judged)],
        "plots": [asdict(plot) for plot in plots],
        "tables": [
            *_changed_settings(config),
            *table("Further figures", ("figure", "", ""), further_figures(columns)),
            *_evaluations(records),
            *_events(events),
        ],
        "columns": curves,
        "steps_per_point": size,
        "config": text,
    }


def report_state(folder: Path, records: Sequence[Record], events: Sequence[Record]) -> dict[str, Any]:
    """Return the state of a run for its page. The arguments are those of `report_data`."""
    config = _read_config(folder)[1]
    last = records[-1]["step"] if records else 0
    state = asdict(run_state(folder, last, _at(config, "algorithm.steps"), events))
    rounded = rounding_note(str(_at(config, "model.path")))
    return {**state, "detail": " ".join(filter(None, (state["detail"], rounded)))}


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the run's config.yaml as text and read; both are empty if the folder has none. Raises UserError if it is
    not YAML with keys."""
    path = folder / "config.yaml"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text, _parsed(path, text) if text else {}


@lru_cache(maxsize=2)
def _parsed(path: Path, text: str) -> dict[str, Any]:
    return read_sections(path)  # This takes a tenth of a second, and a live page asks every few seconds.


def _lines(folder: Path, columns: Columns, judged: str) -> list[tuple[str, float]]:
    """Return the horizontal lines of the held-out curve, as (label, value).

    They are the value before the first step, and those of `baselines.json`. Raises UserError for a file without
    numbers."""
    steps, values = columns[judged]
    lines = [(f"before step 1: {values[0]:.3g}", values[0])] if steps[:1] == [0] and len(steps) > 1 else []
    path = folder / BASELINES
    if not path.is_file():
        return lines
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        found = {str(label): float(value) for label, value in given.items()}
        if not all(map(math.isfinite, found.values())):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        expected = 'a JSON object of labels and numbers, such as {"fixed prompt": 0.31}'
        raise UserError(f"{path}: got something else, expected {expected}") from None
    return [*lines, *((f"{label}: {value:.3g}", value) for label, value in found.items())]


def _at(config: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def judged_key(config: dict[str, Any], records: Sequence[Record]) -> str:
    """Return the key of the metric that `validation.metric` named in the run. For a run that is older than this config
    key, the metric is exact match. Falls back to the reward if the records lack the metric."""
    keys = {key for record in records for key in record}
    if "sft/loss" in keys:
        return HELD_OUT_LOSS
    return find_figure(_at(config, "validation.metric") or EXACT_MATCH, keys) or REWARD


# ---------------- These functions make the tables.


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration by dotted key. The entries of lists of sections are numbered."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            value = {str(place): entry for place, entry in enumerate(value)}
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def config_text(value: Any) -> str:
    """Return a value of a configuration as a reader would write it."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _changed_settings(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table of the settings that differ from their defaults."""
    defaults, nothing = flat(Config().model_dump(mode="json")), object()
    rows = []
    for key, value in flat(config).items():
        # Further entries of a list have the defaults of its first one.
        default = defaults.get(key, defaults.get(re.sub(r"\.\d+\.", ".0.", key), nothing))
        if key in UNTOLD or value == default or (default is nothing and value in (None, {}, [], ())):
            continue
        rows.append((key, config_text(value), "-" if default is nothing else config_text(default)))
    return table("Settings that differ from the defaults", ("key", "value", "default"), rows)


def _evaluations(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a table of all results for each evaluation set."""
    tables = []
    for prefix, keys in evaluation_figures(dict.fromkeys(key for record in records for key in record)).items():
        rows = [
            [short(record.get(f"{prefix}/step", record["step"])), *(short(record.get(key)) for key in keys)]
            for record in records
            if any(key in record for key in keys)
        ]
        heads = ("step", *(key.removeprefix(f"{prefix}/").replace("_", " ") for key in keys))
        tables += table(evaluation_title(prefix).capitalize(), heads, rows)
    return tables


def _events(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a table of the run's events, one line each. Events are lines of metrics.jsonl about something other than a
    step, such as a warm-up or a resume."""
    rows = []
    for event in events:
        facts = [f"step {event['step']}"] + ([f"at {seconds_text(event[ELAPSED])}"] if ELAPSED in event else [])
        facts += [f"{key} {short(value)}" for key, value in event.items() if key not in ("event", "step", ELAPSED)]
        rows.append((str(event["event"]), ", ".join(facts)))
    return table("Events", ("event", ""), rows)
