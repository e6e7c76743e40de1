"""Compares runs by their curves, results, times, memory and settings."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ....actors.rewards.config import TOTALS
from ....actors.rollout.evaluation_metrics import REWARD
from ...config.load import read_sections
from ...errors import UserError
from ..metrics import (
    HEALTH,
    RESUMED,
    Record,
    best_of,
    end_of,
    evaluation_figures,
    evaluation_title,
    judged_label,
    read_run,
    time_split,
)
from .cards import seconds_text
from .page import page, short, table, write_page
from .plots import Columns, compared_plots, page_columns, plot_keys
from .report import UNTOLD, config_text, flat, judged_key

MAX_RUNS = 12
"""Largest number of runs on one page. With more runs, the lines of a plot would be hard to distinguish."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of a comparison."""

    name: str
    """Name of the run's folder, made unique among the compared runs."""
    records: list[Record]
    """Metrics, one record per step."""
    finished: bool
    restarts: int
    """Number of times that the run returned to a checkpoint or was resumed."""
    config: dict[str, Any]
    """Resolved configuration by dotted key; empty if the folder has none."""
    judged: str
    """Key of the metric that `validation.metric` names."""

    def values(self, key: str) -> list[float]:
        """Return the values of a metric, leaving out steps without it."""
        return [record[key] for record in self.records if record.get(key) is not None]


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[Compared]:
    """Read the runs in `folders`. Raises UserError if there are fewer than two or more than MAX_RUNS, if one is given
    twice, or if a folder has no metrics."""
    paths = [Path(folder) for folder in folders]
    if not 2 <= len(paths) <= MAX_RUNS:
        raise UserError(f"RUN: got {len(paths)} run folders, expected 2 to {MAX_RUNS}")
    whole = [path.resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise UserError(
            f"RUN: got {next(str(p) for p in paths if whole.count(p.resolve()) > 1)} twice, expected it once"
        )
    short = [path.name for path in whole]
    names = [path.name if short.count(path.name) == 1 else str(given) for path, given in zip(whole, paths, strict=True)]
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(folder: Path, name: str) -> Compared:
    records, events = read_run(folder)
    path = folder / "config.yaml"
    config = read_sections(path) if path.is_file() else {}
    restarts = sum(event["event"] == RESUMED for event in events)
    return Compared(name, records, end_of(events) is not None, restarts, flat(config), judged_key(config, records))


# ---------------- These functions compute the figures of a run.

_MISSING = "-"


def figures(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Return the compared numbers as (label, text for each run). A number that no run has is left out."""
    lines: list[tuple[str, Callable[[Compared], str]]] = [
        ("steps", lambda run: f"{len(run.values('time/step_s'))}{'' if run.finished else ', not finished'}"),
        ("restarts", lambda run: str(run.restarts)),
        ("reward, last tenth", lambda run: _of(run, "reward/mean", _last_tenth, short)),
    ]
    for key in dict.fromkeys(run.judged for run in runs):
        lines.append((f"{judged_label(key)}, last", lambda run, key=key: _of(run, key, lambda v: v[-1], short)))
        lines.append((f"{judged_label(key)}, best", lambda run, key=key: _of(run, key, partial(best_of, key), short)))
    for title, key in _evaluations(runs):
        lines.append((f"{title}, last", lambda run, key=key: _of(run, key, lambda v: v[-1], short)))
    lines += [
        (f"{label}, last tenth", lambda run, key=key, form=form: _of(run, key, _last_tenth, f"{{:{form}}}".format))
        for label, key, form in HEALTH
    ]
    lines += [
        (label, lambda run, key=key, merge=merge, show=show: _of(run, key, merge, show))
        for label, key, merge, show in (
            ("time of all steps", "time/step_s", sum, seconds_text),
            ("time per step, median", "time/step_s", statistics.median, seconds_text),
            ("tokens per second, median", "rollout/tokens_per_s", statistics.median, "{:,.0f}".format),
            ("response tokens, last tenth", "rollout/response_length_mean", _last_tenth, short),
            ("peak memory of a rank", "memory/peak_gib", max, "{:.2f} GiB".format),
            ("memory of an engine", "switch/engine_gib_awake", max, "{:.2f} GiB".format),
            ("failed rows", "rollout/failed_rows", sum, "{:.0f}".format),
            ("staleness, mean", "staleness/mean", statistics.fmean, short),
            ("log-prob mismatch, largest", "logprob/mismatch_max", max, short),
        )
    ]
    for stage in dict.fromkeys(stage for run in runs for record in run.records for stage in time_split(record)):
        lines.append((f"share of {stage}", lambda run, stage=stage: _share(run, stage)))
    made = [(label, [text(run) for run in runs]) for label, text in lines]
    return [(label, texts) for label, texts in made if set(texts) != {_MISSING}]


def _of(run: Compared, key: str, merge: Callable[[Sequence[float]], float], show: Callable[[float], str]) -> str:
    values = run.values(key)
    return show(merge(values)) if values else _MISSING


def _last_tenth(values: Sequence[float]) -> float:
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def _share(run: Compared, stage: str) -> str:
    splits = [time_split(record) for record in run.records]
    total = sum(sum(split.values()) for split in splits)
    return f"{sum(split.get(stage, 0.0) for split in splits) / total:.0%}" if total else _MISSING


def differences(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Return the config keys whose values differ, as (dotted key, value in each run). A run without config.yaml does
    not count as different; its values are shown as `-`."""
    known = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in known for key in run.config)
    return [
        (key, [config_text(run.config[key]) if key in run.config else _MISSING for run in runs])
        for key in keys
        if key not in UNTOLD and len({repr(run.config.get(key, _MISSING)) for run in known}) > 1
    ]


# ---------------- These functions write the page and the tables.


def write_comparison(runs: Sequence[Compared], path: Path) -> Path:
    """Write the page that compares `runs` to `path`, and return `path`. Raises UserError if the page cannot be
    written."""
    head = ("", *(run.name for run in runs))
    columns = {run.name: Columns(run.records) for run in runs}
    plots = compared_plots(columns, _panels(runs))
    numbered = {f"{at}:": column for at, column in enumerate(columns.values())}
    keys = [(f"{number}:", key) for number, _, key in (key.partition(":") for key in plot_keys(plots))]
    curves, size = page_columns(numbered, keys)
    data = {
        "tables_first": True,
        "tables": [
            *table("Figures", head, [(label, *texts) for label, texts in figures(runs)]),
            *table("Settings that differ", ("key", *head[1:]), [(key, *texts) for key, texts in differences(runs)]),
        ],
        "plots": [asdict(plot) for plot in plots],
        "columns": curves,
        "steps_per_point": size,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_page(path, page(" and ".join(columns), data))
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}), expected a file name") from error


def _evaluations(runs: Sequence[Compared]) -> list[tuple[str, str]]:
    """Return (title, key) of each figure of each evaluation set that a run has."""
    keys = dict.fromkeys(key for run in runs for record in run.records for key in record)
    return [
        (f"{evaluation_title(prefix)} {key.removeprefix(f'{prefix}/')}", key)
        for prefix, figures in evaluation_figures(keys).items()
        for key in figures
    ]


def _panels(runs: Sequence[Compared]) -> list[tuple[str, str]]:
    judged = dict.fromkeys(run.judged for run in runs if run.judged != REWARD)
    names = dict.fromkeys(key for run in runs for record in run.records for key in record if key.startswith("reward/"))
    rewards = [key for key in names if key.removeprefix("reward/") not in TOTALS]
    return [
        ("training reward", "reward/mean"),
        *((judged_label(key), key) for key in (*judged, REWARD)),
        *((title, key) for title, key in _evaluations(runs) if key not in (*judged, REWARD)),
        *((f"reward {key.removeprefix('reward/')}", key) for key in (rewards if len(rewards) > 1 else ())),
        *((label, key) for label, key, _ in HEALTH),
        ("response tokens", "rollout/response_length_mean"),
        ("seconds per step", "time/step_s"),
        ("tokens per second", "rollout/tokens_per_s"),
        ("gradient norm", "train/grad_norm"),
        ("KL to the engine's policy", "logprob/mismatch_kl"),
        ("staleness, mean", "staleness/mean"),
        ("peak memory of a rank, GiB", "memory/peak_gib"),
    ]


def tables(runs: Sequence[Compared]) -> list[Table]:
    """Return the comparison as tables for the terminal: compared numbers, and differing settings."""
    drawn = []
    for title, what, lines in (("figures", "", figures(runs)), ("settings that differ", "key", differences(runs))):
        if not lines:
            continue
        drawn.append(made := Table(title=title, title_justify="left", title_style="bold", expand=False))
        for column in (what, *(run.name for run in runs)):
            made.add_column(column, overflow="fold")
        for label, texts in lines:
            made.add_row(Text(label), *map(Text, texts))
    return drawn
