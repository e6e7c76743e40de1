"""Writes a run's report as one HTML file that works offline, and rebuilds it while the run is in progress.

A separate process of low priority rebuilds it, so that the run does not wait for plots.
"""

from __future__ import annotations

import contextlib
import html
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from ...actors.rollout.evaluation_metrics import EXACT_MATCH, REWARD, find_figure
from ..config.config import HELD_OUT_LOSS
from .metrics import (
    ELAPSED,
    FINISHED,
    HEALTH,
    Record,
    best_of,
    evaluation_figures,
    evaluation_title,
    judged_format,
    judged_label,
    read_run,
)
from .page import card, data_script, page, plot_html, script, short, table, write_page
from .samples import FILE, Row, read_samples

_log = logging.getLogger(__name__)
CLOSE_S = 10.0
"""Seconds within which a build must end after it is terminated; then it is killed."""
_PRIORITY = 15
"""Increment of the niceness of the process that builds the report."""


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


RELOAD_S = 30
"""Seconds after which the page of an unfinished run reloads."""

SUMMARY_KEYS = (
    "model.path",
    "data.train",
    "data.validation",
    "algorithm.mode",
    "algorithm.max_staleness",
    "algorithm.sampler",
    "algorithm.prompts_per_step",
    "algorithm.group_size",
    "advantage.kind",
    "loss.kind",
    "loss.kl_coef",
    "trainer.backend",
    "trainer.dp",
    "trainer.lr",
    "rollout.engine",
    "rollout.num_engines",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "dataplane.store.kind",
    "sync.transport",
    "run.seed",
)
"""Config keys that the report's settings table shows. The whole config.yaml is at the end of the page."""


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into the run folder from its metrics.jsonl, samples.jsonl and config.yaml; returns its path.

    Also works for a run that is in progress or has failed. Raises UserError if the folder has no metrics or a broken
    metrics file.
    """
    folder = Path(run_dir)
    config_path = folder / "config.yaml"
    records, events = read_run(folder)
    samples = read_samples(folder / FILE)
    config_text = config_path.read_text(encoding="utf-8") if config_path.is_file() else ""
    text = render(records, events, config_text, title=folder.resolve().name, samples=samples)
    return write_page(folder / "report.html", text)


def render(
    records: Sequence[Record], events: Sequence[Record], config_text: str, *, title: str, samples: Sequence[Row] = ()
) -> str:
    """Return the HTML of the report. config_text: content of the resolved config.yaml, "" if there is none. samples:
    episodes as `read_samples` returns them."""
    from .plots import all_plots  # matplotlib is slow to import, and belongs to an extra.

    config = yaml.safe_load(config_text) or {}
    num_steps = _at(config, "algorithm.steps")
    steps = max((record["step"] for record in records), default=0)
    finished = any(event["event"] == FINISHED and event["step"] == steps for event in events)
    of = f" of {num_steps}" if num_steps else ""
    judged = judged_key(config, records)
    state = f"finished, {steps} steps" if finished else f"not finished, {steps}{of} steps"
    cards = "".join(card(*entry) for entry in summary_cards(records, judged))
    plots = "".join(plot_html(plot) for plot in all_plots(records, judged))
    tables = _evaluations_html(records) + _settings_html(config) + _phases_html(events)
    body = (
        f'<div class="cards">{cards}</div>\n<div class="plots">{plots}</div>\n'
        f'<section class="samples" id="samples"></section>\n<div class="tables">{tables}</div>\n'
        f"<details><summary>config.yaml</summary><pre>{html.escape(config_text)}</pre></details>"
    )
    scripts = (
        data_script("samples-data", list(samples))
        + data_script("page-data", {"reload_s": 0 if finished else RELOAD_S})
        + script("samples.js")
    )
    return page(title, body, state=state, good=finished, scripts=scripts)


# ---------------- These functions make the cards of the report.


def summary_cards(records: Sequence[Record], judged: str = REWARD) -> list[tuple[str, str, str]]:
    """Return the cards at the top of the page, as (label, value, small print). There is no card for metrics that the
    records lack. judged: key of the metric that `validation.metric` names."""
    cards = []
    held_out = (judged_label(judged).capitalize(), judged, judged_format(judged))
    for label, key, form in (held_out, ("Reward", "reward/mean", ".3f")):
        values = _values(records, key)
        if values:
            cards.append(
                (label, f"{values[-1]:{form}}", f"first {values[0]:{form}}, best {best_of(key, values):{form}}")
            )
    for label, key, form in HEALTH:
        values = _values(records, key)
        if any(values) and not key.startswith(("advantage/", "rollout/ended_")):  # The plots have them.
            cards.append((label[0].upper() + label[1:], f"{values[-1]:{form}}", f"last step; first {values[0]:{form}}"))
    for label, key, show in (
        ("Time per step", "time/step_s", seconds_text),
        ("Tokens per second", "rollout/tokens_per_s", _count),
        ("Put per step", "dataplane/bytes_put", _bytes),
        ("Got per step", "dataplane/bytes_got", _bytes),
    ):
        values = _values(records, key)
        if values:
            cards.append((label, show(statistics.median(values)), f"median; largest {show(max(values))}"))
    per_row = _values(records, "driver/bytes_per_row")
    if per_row:
        cards.append(("Through the driver", f"{statistics.median(per_row):.0f} B per row", "metadata only; median"))
    waits = [_values(records, f"idle/{side}") for side in ("train", "rollout")]
    if all(waits):
        train, rollout = map(statistics.median, waits)
        cards.append(("Training idle", f"{train:.0%}", f"of a step, median; rollouts {rollout:.0%}"))
    stale = _values(records, "staleness/max")
    if any(stale):
        mean = statistics.fmean(_values(records, "staleness/mean"))
        cards.append(("Staleness", f"{mean:.2g}", f"versions, mean of rows; oldest {max(stale):.0f}"))
    cards += _losses(records)
    failed = sum(_values(records, "rollout/failed_rows"))
    if failed:
        cards.append(("Failed rows", _count(failed), "their reward raised; masked"))
    times = _values(records, "time/step_s")
    if times:
        validating = sum(_values(records, "time/validate_s"))
        cards.append(("All steps", seconds_text(sum(times)), f"and {seconds_text(validating)} of validation"))
    return cards


def _losses(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Return one card for each kind of failure that the run survived, such as dropped groups or restarts. A card is
    (label, value, small print)."""
    kinds = (
        ("Groups dropped", "rollout/groups_dropped", sum, "no signal; other prompts in their place"),
        ("Groups too old", "rollout/groups_stale", sum, "cleared, rolled out again or dropped"),
        ("Groups issued again", "rollout/groups_reissued", sum, "their actor died"),
        ("Rows from the journal", "rollout/restored_rows", sum, "not generated again"),
        ("Steps skipped", "train/skipped", sum, "no row to train on, or a gradient was not finite"),
        ("Actors replaced", "rollout/actors_replaced", max, "rollout actors and engines that died"),
        ("Restarts", "run/restarts", max, "from the last checkpoint"),
    )
    counts = ((label, merge(_values(records, key) or [0]), small) for label, key, merge, small in kinds)
    return [(label, _count(count), small) for label, count, small in counts if count]


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def seconds_text(value: float) -> str:
    """Format a duration in seconds as text with a suitable unit."""
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _at(config: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


# ---------------------------------------------------------------- HTML


def _phases_html(events: Sequence[Record]) -> str:
    """Return an HTML table of the run's events, one line each. Events are lines of metrics.jsonl about something other
    than a step, such as a warm-up or a resume."""
    lines = []
    for event in events:
        facts = [f"step {event['step']}", f"at {seconds_text(event[ELAPSED])}"]
        facts += [f"{key} {short(value)}" for key, value in event.items() if key not in ("event", "step", ELAPSED)]
        lines.append(f"<tr><th>{html.escape(str(event['event']))}</th><td>{html.escape(', '.join(facts))}</td></tr>")
    return table("Events", ("event", ""), lines)


def _evaluations_html(records: Sequence[Record]) -> str:
    """Return a table of all results for each evaluation set."""
    tables = ""
    for prefix, keys in evaluation_figures(dict.fromkeys(key for record in records for key in record)).items():
        lines = [
            f"<tr><td>{record.get(f'{prefix}/step', record['step'])}</td>"
            + "".join(f"<td>{short(record.get(key))}</td>" for key in keys)
            + "</tr>"
            for record in records
            if any(key in record for key in keys)
        ]
        heads = ("step", *(key.removeprefix(f"{prefix}/").replace("_", " ") for key in keys))
        tables += table(html.escape(evaluation_title(prefix).capitalize()), heads, lines)
    return tables


def judged_key(config: dict[str, Any], records: Sequence[Record]) -> str:
    """Return the key of the metric that `validation.metric` named in the run. For a run that is older than this config
    key, the metric is exact match. Falls back to the reward if the records lack the metric."""
    keys = {key for record in records for key in record}
    if "sft/loss" in keys:
        return HELD_OUT_LOSS
    return find_figure(_at(config, "validation.metric") or EXACT_MATCH, keys) or REWARD


def _settings_html(config: dict[str, Any]) -> str:
    lines = [
        f"<tr><td><code>{key}</code></td><td>{html.escape(short(_at(config, key)))}</td></tr>"
        for key in SUMMARY_KEYS
        if _at(config, key) is not None
    ]
    return table("Settings", ("key", "value"), lines)
