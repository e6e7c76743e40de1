"""Writes a run's report: metrics, plots and settings in one HTML file that needs no network."""

from __future__ import annotations

import contextlib
import html
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import yaml

from ...actors.rollout.evaluation_figures import EXACT_MATCH, REWARD, find_figure
from ..errors import UserError
from .metrics import ELAPSED, FINISHED, Record, judged_format, judged_label, read_metrics

if TYPE_CHECKING:
    from .plots import Plot

# ---------------- The report's HTML page as a string.Template, with a light and a dark theme.

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title - headrace</title>
<style>
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  --page: #f5f6f8; --card: #ffffff; --line: #e1e4e9; --text: #1b1f27; --ink: #5d6675; --grid: #e3e6eb;
  --blue: #2e6bd6; --orange: #d97a0b; --green: #2a9162; --red: #cc3f4d; --purple: #8452c8; --grey: #a3abb8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1b1f28; --line: #2c323e; --text: #e8ebf0; --ink: #9aa4b4; --grid: #2c323e;
    --blue: #74a5ff; --orange: #f2a04a; --green: #56c596; --red: #f27d88; --purple: #b48cf2; --grey: #6d7687;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 var(--font); }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; margin-bottom: 20px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 0 0 6px; }
header span { color: var(--ink); }
header .state { font-size: 13px; padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; }
.good { color: var(--green) !important; }
.open { color: var(--orange) !important; }
.cards { display: grid; gap: 14px; margin-bottom: 14px;
  grid-template-columns: repeat(auto-fill, minmax(max(160px, calc((100% - 42px) / 4)), 1fr)); }
.card, figure, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.card { padding: 12px 16px; display: flex; flex-direction: column; }
.card span { color: var(--ink); font-size: 13px; }
.card b { font-size: 24px; line-height: 1.35; font-variant-numeric: tabular-nums; }
.card small { color: var(--ink); font-size: 12px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 16px 18px 12px; min-width: 0; display: flex; flex-direction: column; }
figure.wide { grid-column: 1 / -1; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 6px; padding: 0; }
figure li { color: var(--ink); font-size: 13px; }
figure li::before { content: ""; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; background: var(--c); }
figure svg { display: block; width: 100%; height: auto; margin-top: auto; }
figure p { color: var(--ink); font-size: 12px; margin: 4px 0 0; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 14px;
  margin-top: 14px; align-items: start; }
section { padding: 16px 18px; overflow-x: auto; max-height: 460px; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--ink); font-weight: 500; white-space: nowrap; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin-top: 14px; }
summary { cursor: pointer; color: var(--ink); font-size: 13px; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
  overflow-x: auto; }
</style>
</head>
<body>
<main>
<header><h1>$title</h1><span class="state $state_class">$state</span></header>
<div class="cards">$cards</div>
<div class="plots">$plots</div>
<div class="tables">$validations$settings$phases</div>
<details><summary>config.yaml</summary><pre>$config</pre></details>
</main>
</body>
</html>
"""

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
    """Write `report.html` into the run folder from its metrics.jsonl and config.yaml, and return its path.

    Also works while a run is in progress and after it failed. Raises UserError if the folder has no metrics or a broken
    metrics file.
    """
    folder = Path(run_dir)
    metrics_path, config_path = folder / "metrics.jsonl", folder / "config.yaml"
    if not metrics_path.is_file():
        raise UserError(f"{folder}: no metrics.jsonl there, expected a run folder")
    try:
        records, events = read_metrics(metrics_path)
    except ValueError as error:
        raise UserError(str(error)) from error
    config_text = config_path.read_text(encoding="utf-8") if config_path.is_file() else ""
    page = render(records, events, config_text, title=folder.resolve().name)
    path = folder / "report.html"
    new = folder / "report.html.new"
    try:
        new.write_text(page, encoding="utf-8")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return path


def render(records: Sequence[Record], events: Sequence[Record], config_text: str, *, title: str) -> str:
    """Return the HTML of the report. config_text: content of the resolved config.yaml, "" if there is none."""
    from .plots import all_plots  # matplotlib is slow to import, and an extra

    config = yaml.safe_load(config_text) or {}
    num_steps = _at(config, "algorithm.steps")
    steps = max((record["step"] for record in records), default=0)
    finished = any(event["event"] == FINISHED and event["step"] == steps for event in events)
    of = f" of {num_steps}" if num_steps else ""
    judged = _judged(config, records)
    state = f"finished, {steps} steps" if finished else f"not finished, {steps}{of} steps"
    return Template(PAGE).substitute(
        title=html.escape(title),
        state=html.escape(state),
        state_class="good" if finished else "open",
        cards="".join(_card(*card) for card in summary_cards(records, judged)),
        plots="".join(_plot_html(plot) for plot in all_plots(records, judged)),
        phases=_phases_html(events),
        validations=_validations_html(records, judged),
        settings=_settings_html(config),
        config=html.escape(config_text),
    )


# ---------------------------------------------------------------- cards


def summary_cards(records: Sequence[Record], judged: str = REWARD) -> list[tuple[str, str, str]]:
    """Return the cards at the top of the page, as (label, value, small print). Metrics that the records lack get no
    card. judged: key of the metric that `validation.metric` names."""
    cards = []
    held_out = (judged_label(judged).capitalize(), judged, judged_format(judged))
    for label, key, form in (held_out, ("Reward", "reward/mean", ".3f")):
        values = _values(records, key)
        if values:
            cards.append((label, f"{values[-1]:{form}}", f"first {values[0]:{form}}, best {max(values):{form}}"))
    for label, key, show in (
        ("Time per step", "time/step_s", _seconds),
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
        cards.append(("All steps", _seconds(sum(times)), f"and {_seconds(validating)} of validation"))
    return cards


def _losses(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Return one card, as (label, value, small print), for each kind of failure that the run survived, such as dropped
    groups or restarts."""
    cards = []
    for label, key, small in (
        ("Groups dropped", "rollout/groups_dropped", "no signal; other prompts in their place"),
        ("Groups too old", "rollout/groups_stale", "cleared, rolled out again or dropped"),
        ("Groups issued again", "rollout/groups_reissued", "their actor died"),
        ("Rows from the journal", "rollout/restored_rows", "not generated again"),
        ("Steps skipped", "train/skipped", "no row to train on, or a gradient was not finite"),
    ):
        count = sum(_values(records, key))
        if count:
            cards.append((label, _count(count), small))
    for label, key, small in (
        ("Actors replaced", "rollout/actors_replaced", "rollout actors and engines that died"),
        ("Restarts", "run/restarts", "from the last checkpoint"),
    ):
        count = max(_values(records, key), default=0)
        if count:
            cards.append((label, _count(count), small))
    return cards


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _seconds(value: float) -> str:
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
    """Return the value of a dotted config key, or None if it is missing."""
    for key in dotted.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


# ---------------------------------------------------------------- HTML


def _card(label: str, value: str, small: str) -> str:
    return (
        f'<div class="card"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
        f"<small>{html.escape(small)}</small></div>"
    )


def _plot_html(plot: Plot) -> str:
    legend = "".join(f'<li style="--c: var(--{colour})">{html.escape(label)}</li>' for label, colour in plot.legend)
    note = f"<p>{html.escape(plot.note)}</p>" if plot.note else ""
    width = ' class="wide"' if plot.wide else ""
    listed = f"<ul>{legend}</ul>" if legend else ""
    return f"<figure{width}><h2>{html.escape(plot.title)}</h2>{listed}{plot.svg}{note}</figure>"


def _phases_html(events: Sequence[Record]) -> str:
    """Return an HTML table of the run's events, one line each. Events are everything but steps, such as a warm-up or a
    resume."""
    lines = []
    for event in events:
        facts = [f"step {event['step']}", f"at {_seconds(event[ELAPSED])}"]
        facts += [f"{key} {_short(value)}" for key, value in event.items() if key not in ("event", "step", ELAPSED)]
        lines.append(f"<tr><th>{html.escape(str(event['event']))}</th><td>{html.escape(', '.join(facts))}</td></tr>")
    return _table("Events", ("event", ""), lines)


def _validations_html(records: Sequence[Record], judged: str) -> str:
    keys = list(dict.fromkeys((judged, EXACT_MATCH, REWARD)))
    keys = [key for key in keys if any(key in record for record in records)]
    lines = [
        f"<tr><td>{record['step']}</td>" + "".join(f"<td>{_short(record.get(key))}</td>" for key in keys) + "</tr>"
        for record in records
        if any(key in record for key in keys)
    ]
    return _table("Validation", ("step", *(key.removeprefix("val/").replace("_", " ") for key in keys)), lines)


def _judged(config: dict[str, Any], records: Sequence[Record]) -> str:
    """Return the key of the metric that `validation.metric` named in the run; exact match for runs from before that
    config key existed. Falls back to the reward if the records lack that metric."""
    keys = {key for record in records for key in record}
    return find_figure(_at(config, "validation.metric") or EXACT_MATCH, keys) or REWARD


def _settings_html(config: dict[str, Any]) -> str:
    lines = [
        f"<tr><td><code>{key}</code></td><td>{html.escape(_short(_at(config, key)))}</td></tr>"
        for key in SUMMARY_KEYS
        if _at(config, key) is not None
    ]
    return _table("Settings", ("key", "value"), lines)


def _table(title: str, head: Sequence[str], lines: Sequence[str]) -> str:
    """Return an HTML table with a title, or "" if it has no lines."""
    if not lines:
        return ""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = f"<thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f"<section><h2>{title}</h2><table>{body}</table></section>"


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
