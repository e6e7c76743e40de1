"""Chooses the plots of a page from the metrics that runs have, and thins long curves. The page's script draws them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ....actors.rewards.config import TOTALS
from ....actors.rollout.evaluation_metrics import RESPONSE_LENGTH
from ...config.config import HELD_OUT_LOSS
from ..metrics import Record, evaluation_figures, evaluation_title, judged_label, time_split

MAX_POINTS = 2000
"""Largest number of points of a curve in a page. The steps of a longer curve are averaged into this many points."""

STAGE_COLOURS = {
    "rollout": "blue",
    "data wait": "red",
    "log-probs": "purple",
    "train": "green",
    "sync": "orange",
    "switch": "ink",
    "other": "grey",
}

RUN_COLOURS = ("blue", "orange", "green", "red", "purple", "grey")
"""Colours of the lines for runs or reward functions in one plot. Further lines repeat the colours with dashes."""

SPLIT = "split/"
"""Prefix of the keys of the seconds of a step by stage, which are not in metrics.jsonl."""
MINUTES = "minutes/"
"""Prefix of the keys of metrics over minutes instead of steps."""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a panel."""

    label: str
    key: str
    """Key of the curve's column in the page's data."""
    colour: str
    """Name of a colour that the page defines."""
    dashed: bool = False
    sparse: bool = False
    """True if the curve has few points, such as those of an evaluation. They are marked and never smoothed."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one pair of axes."""

    title: str
    series: Sequence[Series]
    scale: str = "auto"
    """Range of the y-axis: `auto`, `zero` (from 0 on) or `share` (from 0 to 1)."""
    x: str = "step"
    """Unit of the x-axis: `step` or `min`."""
    stacked: bool = False
    """True if each curve begins where the one before it ends."""
    lines: Sequence[tuple[str, float]] = ()
    """Horizontal lines, as (label, value)."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of a page."""

    title: str
    panels: Sequence[Panel]
    note: str = ""
    """Explanation of the plot for readers; "" if the title is enough."""
    wide: bool = False
    """True if the plot takes the page's whole width."""


class Columns:
    """The curves of one run by key: the values of a metric with their steps."""

    def __init__(self, records: Sequence[Record]) -> None:
        """records: one per step, ascending, as `read_metrics` returns them."""
        self.records = records
        self.keys = dict.fromkeys(key for record in records for key in record)
        """Keys of all metrics, in the order of their first record."""
        self._found: dict[str, tuple[list[float], list[float]]] = {}
        self._splits = list[dict[str, float]]()
        """Seconds of each record's step by stage, once they were asked for."""

    def __getitem__(self, key: str) -> tuple[list[float], list[float]]:
        """Return (steps or minutes, values) of a metric; both are empty if no record has it."""
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def _find(self, key: str) -> tuple[list[float], list[float]]:
        if key.startswith(MINUTES):
            spent = dict(zip((record["step"] for record in self.records), minutes(self.records), strict=True))
            steps, values = self[key.removeprefix(MINUTES)]
            return [spent[int(step)] for step in steps], values
        if key.startswith(SPLIT) and not self._splits:
            self._splits = [time_split(record) for record in self.records]
        source = self._splits if key.startswith(SPLIT) else self.records
        values = [one.get(key.removeprefix(SPLIT)) for one in source]
        kept = {at: value for at, value in enumerate(values) if value is not None and math.isfinite(value)}
        # Background evaluations end in a later step than the one that they evaluate.
        place = f"eval/{key.split('/')[1]}/step" if key.startswith("eval/") else "step"
        records = [self.records[at] for at in kept]
        return [record.get(place, record["step"]) for record in records], list(kept.values())


def minutes(records: Sequence[Record]) -> list[float]:
    """Return the minutes of work until the end of each record's step, including validations but not restarts."""
    spent = ((record.get("time/step_s") or 0.0) + (record.get("time/validate_s") or 0.0) for record in records)
    return [total / 60 for total in itertools.accumulate(spent)]


def thinned(column: tuple[list[float], list[float]]) -> tuple[list[float], list[float], int]:
    """Return at most MAX_POINTS points of a curve as (steps, values, steps per point). A point is the mean of
    consecutive points, at the place of the middle one."""
    steps, values = column
    size = math.ceil(len(steps) / MAX_POINTS)
    if size <= 1:
        return steps, values, 1
    parts = [values[at : at + size] for at in range(0, len(values), size)]
    middles = [steps[at : at + size] for at in range(0, len(steps), size)]
    return [part[len(part) // 2] for part in middles], [sum(part) / len(part) for part in parts], size


def page_columns(
    columns: Mapping[str, Columns], keys: Iterable[tuple[str, str]], *, thin: bool = True
) -> tuple[dict[str, tuple[list[float], list[float]]], int]:
    """Return the curves for a page's data, and the largest number of steps of one point.

    The curves are key -> (steps, values). columns: the runs by prefix. keys: pairs of a run's prefix and a key; the
    name of the curve is both together. Curves without a point are left out. thin: whether long curves are thinned.
    """
    made, largest = dict[str, tuple[list[float], list[float]]](), 1
    for prefix, key in dict.fromkeys(keys):
        column = columns[prefix][key]
        if column[0]:
            steps, values, size = thinned(column) if thin else (*column, 1)
            made[prefix + key], largest = (steps, values), max(largest, size)
    return made, largest


def plot_keys(plots: Iterable[Plot]) -> list[str]:
    """Return the keys of all curves of the plots."""
    return [series.key for plot in plots for panel in plot.panels for series in panel.series]


# ---------------- These functions choose the plots of one run.


def run_plots(columns: Columns, judged: str, lines: Sequence[tuple[str, float]] = ()) -> list[Plot]:
    """Return every plot for which the run has metrics. judged: key of the metric that `validation.metric` names. lines:
    horizontal lines in the plot of learning, as (label, value)."""
    makers = (
        partial(_learning, judged, lines),
        *(partial(_evaluation, prefix, keys) for prefix, keys in evaluation_figures(columns.keys).items()),
        partial(_rewards, "Rewards by function, unweighted", "reward/", 2),
        partial(_rewards, "Rewards by data source", "reward_by_source/", 1),
        *(partial(_curves, title, curves) for title, curves in CURVES.items() if title != "Data plane"),
        _times,
        _overlap,
        partial(_curves, "Data plane", CURVES["Data plane"]),
    )
    return [plot for plot in (make(columns) for make in makers) if plot is not None]


def _learning(judged: str, lines: Sequence[tuple[str, float]], columns: Columns) -> Plot | None:
    curve, label = ("sft/loss", "training loss") if judged == HELD_OUT_LOSS else ("reward/mean", "training reward")
    series = [Series(label, curve, "blue"), Series(judged_label(judged), judged, "orange", sparse=True)]
    series = [one for one in series if columns[one.key][0]]
    values = [value for one in series for value in columns[one.key][1]] + [value for _, value in lines]
    if not series:
        return None
    scale = "share" if min(values) >= 0 and max(values) <= 1 else "auto"
    return Plot("Learning", [Panel("", series, scale, lines=lines)], wide=True)


def _rewards(title: str, prefix: str, least: int, columns: Columns) -> Plot | None:
    """Plot each metric whose key begins with `prefix`. Returns None if there are fewer than `least`; a single reward
    function shows what the total shows."""
    names = {key: key.removeprefix(prefix) for key in columns.keys if key.startswith(prefix)}
    names = {key: name for key, name in names.items() if key.removeprefix("reward/") not in TOTALS}
    return Plot(title, [Panel("", _coloured(names))], wide=True) if len(names) >= least else None


def _coloured(names: Mapping[str, str], *, first: int = 0, sparse: bool = False) -> list[Series]:
    """Return a curve of its own colour for each key. names: key -> label. first: number of the first colour."""
    count = len(RUN_COLOURS)
    return [
        Series(label, key, RUN_COLOURS[place % count], dashed=place >= count, sparse=sparse)
        for place, (key, label) in enumerate(names.items(), start=first)
    ]


def _evaluation(prefix: str, keys: Sequence[str], columns: Columns) -> Plot | None:
    """Plot all figures of one evaluation set: rewards at the left, shares of right answers at the right."""
    names = {key: key.removeprefix(f"{prefix}/") for key in keys}
    names = {key: name for key, name in names.items() if name not in ("failed_rows", RESPONSE_LENGTH)}
    panels, first = list[Panel](), 0
    for title, rewards in (("reward", True), ("share of right answers", False)):
        having = {key: name for key, name in names.items() if name.startswith(("reward", "best@")) == rewards}
        if having:
            panels.append(Panel(title, _coloured(having, first=first, sparse=True), "auto" if rewards else "share"))
            first += len(having)
    return Plot(evaluation_title(prefix).capitalize(), panels, wide=len(panels) > 1) if panels else None


def _times(columns: Columns) -> Plot | None:
    totals = {stage: sum(columns[SPLIT + stage][1]) for stage in STAGE_COLOURS}
    total = sum(totals.values())
    series = [
        Series(f"{stage} {seconds / total:.0%}", SPLIT + stage, STAGE_COLOURS[stage])
        for stage, seconds in totals.items()
        if seconds
    ]
    if not series:
        return None
    return Plot("Where a step's time goes, seconds", [Panel("", series, "zero", stacked=True)], wide=True)


def _overlap(columns: Columns) -> Plot | None:
    """Plot the groups in the queue, the staleness of rows, and the idle shares of rollouts and training. Returns None
    for a run in which rollouts and training take turns, because nothing is then queued or stale."""
    sides = [Series("rollouts idle", "idle/rollout", "blue"), Series("training idle", "idle/train", "green")]
    together = any((one.get("idle/rollout") or 0) + (one.get("idle/train") or 0) < 1 for one in columns.records)
    ahead = any(columns["queue/groups_in_flight"][1]) or any(columns["staleness/max"][1])
    if not (all(columns[side.key][0] for side in sides) and (ahead or together)):
        return None
    panels = [Panel("idle share of a step", sides, "share")]
    if ahead:
        queue = [("groups in flight", "queue/groups_in_flight", "orange"), ("ready", "queue/groups_ready", "purple")]
        behind = [("versions behind, mean", "staleness/mean", "red"), ("oldest row", "staleness/max", "grey")]
        titled = (("groups at a step's end", queue), ("versions that rows are behind", behind))
        panels = [*(Panel(title, [Series(*one) for one in curves], "zero") for title, curves in titled), *panels]
    return Plot("Rollouts beside the training", panels, wide=True)


CURVES = {
    "Signal": (
        ("standard deviation of rewards", "reward/std", "blue"),
        ("groups without signal", "reward/flat_groups_share", "red"),
        ("largest advantage", "advantage/max", "green"),
        ("smallest advantage", "advantage/min", "purple"),
        ("truncated answers", "rollout/truncated_share", "orange"),
        ("tokens of ended answers", "rollout/ended_length_mean", "grey"),
    ),
    "Optimisation": (
        ("loss", "train/loss", "blue"),
        ("gradient norm", "train/grad_norm", "orange"),
        ("learning rate", "train/lr", "grey"),
        ("KL to the reference", "train/reference_kl", "red"),
        ("KL to the teachers", "distillation/reverse_kl", "purple"),
        ("clipped share of tokens", "train/clip_fraction", "green"),
    ),
    "Policy and engine": (
        ("sampled entropy", "train/sampled_entropy", "blue"),
        ("entropy", "train/entropy", "purple"),
        ("ratio of engine and trainer", "logprob/ratio_error", "red"),
        ("KL to the engine's policy", "logprob/mismatch_kl", "orange"),
        ("largest token's gradient", "train/token_gradient_share", "green"),
    ),
    "Responses": (
        ("tokens per response", "rollout/response_length_mean", "blue"),
        ("tokens of the longest response", "rollout/response_length_max", "grey"),
        ("tokens generated a second", "rollout/tokens_per_s", "green"),
    ),
    "Data plane": (
        ("bytes put per step", "dataplane/bytes_put", "blue"),
        ("bytes got per step", "dataplane/bytes_got", "green"),
        ("calls per step", "dataplane/calls", "purple"),
    ),
}
"""Title of a plot -> its curves, as (title, key, colour). A curve that is 0 in all steps is left out."""
_FROM_ZERO = ("Responses", "Data plane")


def _curves(name: str, curves: Sequence[tuple[str, str, str]], columns: Columns) -> Plot | None:
    scale = "zero" if name in _FROM_ZERO else "auto"
    panels = [Panel("", [Series(*curve)], scale) for curve in curves if any(columns[curve[1]][1])]
    return Plot(name, panels, wide=True) if panels else None


# ---------------- This function chooses the plots of several runs together.


def compared_plots(runs: Mapping[str, Columns], panels: Sequence[tuple[str, str]]) -> list[Plot]:
    """Return plots with the curves of several runs over each other. runs: name -> columns; the key of a curve begins
    with the number of its run. panels: title and key of each metric; a metric that no run has is left out. The first
    metric is also drawn over time."""
    drawn = []
    for number, (title, key) in enumerate(panels):
        for x in ("step", "min") if number == 0 else ("step",):
            names = {f"{at}:{MINUTES if x == 'min' else ''}{key}": name for at, name in enumerate(runs)}
            curves = _coloured(names, sparse=key == HELD_OUT_LOSS or bool(evaluation_figures([key])))
            having = [series for series, run in zip(curves, runs.values(), strict=True) if run[key][0]]
            if not having:
                continue
            over = "steps" if x == "step" else "time"
            drawn.append(Plot(f"{title[:1].upper()}{title[1:]} over {over}", [Panel("", having, x=x)]))
    return drawn
