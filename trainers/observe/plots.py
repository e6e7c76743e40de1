"""Draws the report's plots from metrics records, as SVG with the colours and font of the surrounding page."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ...actors.rewards.config import TOTALS
from ...actors.rollout.evaluation_metrics import RESPONSE_LENGTH, REWARD
from ...dataplane.imports import MissingExtra

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ModuleNotFoundError:
    raise MissingExtra("matplotlib", "report.html", "report") from None

from ..config.config import HELD_OUT_LOSS
from .metrics import Record, evaluation_figures, evaluation_title, judged_label, time_split

# matplotlib draws with these placeholder colours. In the SVG they become CSS variables, so that a plot follows the
# page's theme.
_STAND_INS = {
    "ink": "#010203",
    "grid": "#010204",
    "blue": "#010205",
    "orange": "#010206",
    "green": "#010207",
    "red": "#010208",
    "purple": "#010209",
    "grey": "#01020a",
}

STAGE_COLOURS = {
    "rollout": "blue",
    "data wait": "red",
    "log-probs": "purple",
    "train": "green",
    "sync": "orange",
    "switch": "ink",
    "other": "grey",
}

MAX_BARS = 80
"""Largest number of bars in a stacked bar plot; the steps of a longer run are averaged into this many bars."""

SMOOTH_SHARE = 1 / 30
"""Half-width of the averaging window of a smoothed line, as a share of all steps."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of the report."""

    title: str
    note: str
    """Explanation of the plot for readers; "" if the title is enough."""
    legend: tuple[tuple[str, str], ...]
    """Entries of the legend, as (label, colour name defined by the page)."""
    svg: str
    """The `<svg>` element, which has a viewBox but no width or height."""
    wide: bool = False
    """Whether the plot takes the page's whole width."""


def all_plots(records: Sequence[Record], judged: str = REWARD) -> list[Plot]:
    """Draw every plot for which the records have metrics.

    records: one per step, ascending, as `read_metrics` returns them. judged: key of the metric that `validation.metric`
    names.
    """
    by_function = partial(_rewards, "Rewards by function, unweighted", "reward/", 2)
    by_source = partial(_rewards, "Rewards by data source", "reward_by_source/", 1)
    sets = evaluation_figures(dict.fromkeys(key for record in records for key in record))
    evaluations = [partial(_evaluation, prefix, keys) for prefix, keys in sets.items()]
    curves = [partial(_curves, title, panels) for title, panels in CURVES.items()]
    makers = (
        partial(_learning, judged), *evaluations, by_function, by_source, _responses, _times, _data_plane, _overlap,
        *curves,
    )  # fmt: skip
    return [plot for plot in (make(records) for make in makers) if plot is not None]


# ---------------- These functions draw the plots of one run.


def _learning(judged: str, records: Sequence[Record]) -> Plot | None:
    curve, label = ("sft/loss", "training loss") if judged == HELD_OUT_LOSS else ("reward/mean", "training reward")
    rewards, matches = _series(records, curve), _series(records, judged)
    if not rewards[0] and not matches[0]:
        return None
    figure, axes = _figure()
    legend = []
    if rewards[0]:
        axes.plot(*rewards, color=_STAND_INS["blue"], alpha=0.3, linewidth=1)
        axes.plot(rewards[0], _smooth(rewards[1]), color=_STAND_INS["blue"], linewidth=2)
        legend.append((label, "blue"))
    if matches[0]:
        axes.plot(*matches, color=_STAND_INS["orange"], linewidth=2, marker="o", markersize=4)
        legend.append((judged_label(judged), "orange"))
    values = rewards[1] + matches[1]
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)
    return _plot("Learning", "Thin: each step; thick: averaged over neighbouring steps.", legend, figure)


def _rewards(title: str, prefix: str, least: int, records: Sequence[Record]) -> Plot | None:
    """Plot each metric whose key begins with `prefix`. Returns None if there are fewer than `least`; a single reward
    function shows what the total shows."""
    keys = dict.fromkeys(key for record in records for key in record)
    names = [key for key in keys if key.startswith(prefix) and key.removeprefix("reward/") not in TOTALS]
    if len(names) < least:
        return None
    figure, axes = _figure()
    legend = []
    for (key, colour), dashes in zip(zip(names, itertools.cycle(RUN_COLOURS)), _dashes(len(names)), strict=False):
        steps, values = _series(records, key)
        axes.plot(steps, _smooth(values), color=_STAND_INS[colour], linewidth=1.8, linestyle=dashes)
        legend.append((key.removeprefix(prefix), colour))
    return _plot(title, "Averaged over neighbouring steps.", legend, figure)


def _evaluation(prefix: str, keys: Sequence[str], records: Sequence[Record]) -> Plot | None:
    """Plot all figures of one evaluation set: rewards at the left, shares of right answers at the right."""
    names = {key: key.removeprefix(f"{prefix}/") for key in keys}
    names = {key: name for key, name in names.items() if name not in ("failed_rows", RESPONSE_LENGTH)}
    sides = [
        (title, [key for key in names if names[key].startswith(("reward", "best@")) == rewards])
        for title, rewards in (("reward", True), ("share of right answers", False))
    ]
    sides = [(title, having) for title, having in sides if having]
    if not sides:
        return None
    figure, places = _figures(len(sides))
    legend = []
    colours = itertools.cycle(RUN_COLOURS)
    for axes, (title, having) in zip(places, sides, strict=True):
        for key in having:
            colour = next(colours)
            dashes = "-" if len(legend) < len(RUN_COLOURS) else "--"
            series = _series(records, key)
            axes.plot(*series, color=_STAND_INS[colour], linewidth=1.8, linestyle=dashes, marker="o", markersize=3)
            legend.append((names[key] + (" (dashed)" if dashes == "--" else ""), colour))
        _finish(axes, title)
    return _plot(evaluation_title(prefix).capitalize(), "", legend, figure)


def _responses(records: Sequence[Record]) -> Plot | None:
    mean, longest = _series(records, "rollout/response_length_mean"), _series(records, "rollout/response_length_max")
    speed = _series(records, "rollout/tokens_per_s")
    if not mean[0]:
        return None
    figure, (length, rate) = _figures(2)
    length.plot(*longest, color=_STAND_INS["grey"], linewidth=1)
    length.plot(*mean, color=_STAND_INS["blue"], linewidth=2)
    _finish(length, "tokens per response", mean[1] + longest[1])
    rate.plot(*speed, color=_STAND_INS["green"], linewidth=1.5)
    _finish(rate, "tokens generated a second", speed[1])
    legend = [("mean of the step", "blue"), ("longest of the step", "grey"), ("tokens per second", "green")]
    return _plot("Responses", "", legend, figure)


def _times(records: Sequence[Record]) -> Plot | None:
    timed = [(record["step"], split) for record in records if (split := time_split(record))]
    if not timed:
        return None
    size = math.ceil(len(timed) / MAX_BARS)
    bins = [timed[at : at + size] for at in range(0, len(timed), size)]
    starts = [part[0][0] for part in bins]
    figure, axes = _figure()
    legend, base = [], [0.0] * len(bins)
    for stage, colour in STAGE_COLOURS.items():
        heights = [sum(split.get(stage, 0.0) for _, split in part) / len(part) for part in bins]
        if not any(heights):
            continue
        axes.bar(starts, heights, size * 0.86, base, align="edge", color=_STAND_INS[colour], linewidth=0)
        base = [low + height for low, height in zip(base, heights, strict=True)]
        share = sum(split.get(stage, 0.0) for _, split in timed) / sum(sum(split.values()) for _, split in timed)
        legend.append((f"{stage} {share:.0%}", colour))
    notes = [f"Each bar is the mean of {size} steps."] if size > 1 else []
    # A long first step with loading and compiling would flatten all other bars.
    typical = sorted(base)[int(0.9 * (len(base) - 1))]
    if max(base) > 2.5 * typical > 0:
        axes.set_ylim(0, 1.6 * typical)
        notes.append(f"The tallest bar, {max(base):.1f} s, is cut off.")
    return _plot("Where a step's time goes, seconds", " ".join(notes), legend, figure)


def _data_plane(records: Sequence[Record]) -> Plot | None:
    put, got = _series(records, "dataplane/bytes_put"), _series(records, "dataplane/bytes_got")
    calls = _series(records, "dataplane/calls")
    if not put[0] and not got[0]:
        return None
    unit, factor = ("MB", 1e6) if max(put[1] + got[1]) >= 1e6 else ("kB", 1e3)
    figure, (volume, count) = _figures(2)
    for (steps, values), colour in ((put, "blue"), (got, "green")):
        volume.plot(steps, [value / factor for value in values], color=_STAND_INS[colour], linewidth=2)
    _finish(volume, f"{unit} per step", [value / factor for value in put[1] + got[1]])
    count.plot(*calls, color=_STAND_INS["purple"], linewidth=2)
    _finish(count, "calls per step", calls[1])
    legend = [(f"{unit} put", "blue"), (f"{unit} got", "green"), ("calls", "purple")]
    return _plot("Data plane", "", legend, figure)


def _overlap(records: Sequence[Record]) -> Plot | None:
    """Plot the groups in the queue, the staleness of rows, and the idle shares of rollouts and training. Returns None
    for a run in which rollouts and training take turns, because nothing is then queued or stale."""
    flight, ready = _series(records, "queue/groups_in_flight"), _series(records, "queue/groups_ready")
    mean, most = _series(records, "staleness/mean"), _series(records, "staleness/max")
    rollout, train = _series(records, "idle/rollout"), _series(records, "idle/train")
    together = any((record.get("idle/rollout") or 0) + (record.get("idle/train") or 0) < 1 for record in records)
    ahead = any(flight[1]) or any(most[1])
    if not (rollout[0] and train[0] and (ahead or together)):
        return None
    figure, places = _figures(3 if ahead else 1, wide=True)
    legend = [("rollouts idle", "blue"), ("training idle", "green")]
    idle = places[-1]
    for (steps, values), colour in ((rollout, "blue"), (train, "green")):
        idle.plot(steps, values, color=_STAND_INS[colour], alpha=0.3, linewidth=1)
        idle.plot(steps, _smooth(values), color=_STAND_INS[colour], linewidth=1.8)
    _finish(idle, "idle share of a step")
    idle.set_ylim(-0.03, 1.03)
    if ahead:
        queue, staleness = places[:2]
        queue.plot(*flight, color=_STAND_INS["orange"], linewidth=1.8)
        queue.plot(*ready, color=_STAND_INS["purple"], linewidth=1.8)
        _finish(queue, "groups at a step's end", flight[1] + ready[1])
        staleness.plot(*most, color=_STAND_INS["grey"], linewidth=1, drawstyle="steps-mid")
        staleness.plot(*mean, color=_STAND_INS["red"], linewidth=1.8)
        _finish(staleness, "versions that rows are behind", most[1])
        behind = [("versions behind, mean", "red"), ("oldest row", "grey")]
        legend = [("groups in flight", "orange"), ("ready", "purple"), *behind, *legend]
    note = "Idle shares: thin, each step; thick, averaged over neighbouring steps."
    return _plot("Rollouts beside the training", note, legend, figure, wide=True)


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
}
"""Title of a plot -> its curves, as (title, key, colour). A curve that is 0 in all steps is left out."""


def _curves(name: str, curves: Sequence[tuple[str, str, str]], records: Sequence[Record]) -> Plot | None:
    panels = [(title, colour, series) for title, key, colour in curves if any((series := _series(records, key))[1])]
    if not panels:
        return None
    figure, places = _figures(len(panels), wide=True)
    for axes, (title, colour, (steps, values)) in zip(places, panels, strict=True):
        axes.plot(steps, values, color=_STAND_INS[colour], alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(values), color=_STAND_INS[colour], linewidth=1.8)
        _finish(axes, title)
    return _plot(name, "Thin: each step; thick: averaged over neighbouring steps.", [], figure, wide=True)


# ---------------- These functions plot several runs together.

RUN_COLOURS = ("blue", "orange", "green", "red", "purple", "grey")
"""Colours of the lines for runs or reward functions in one plot. Further lines repeat the colours with dashes."""


def _dashes(count: int) -> list[str]:
    """Return the line styles of `count` lines. Their colours cycle through RUN_COLOURS."""
    return ["-" if at < len(RUN_COLOURS) else "--" for at in range(count)]


def compared_plots(runs: Sequence[tuple[str, Sequence[Record]]], panels: Sequence[tuple[str, str]]) -> list[Plot]:
    """Draw the curves of several runs over each other. runs: name and records of each. panels: title and key of each
    metric; a metric that no run has is left out. The first metric is also drawn over time."""
    colours = [colour for _, colour in zip(runs, itertools.cycle(RUN_COLOURS), strict=False)]
    drawn = []
    for number, (title, key) in enumerate(panels):
        for over_time in (False, True) if number == 0 else (False,):
            figure, axes = _figure()
            legend, everything = [], list[float]()
            for (name, records), colour, style in zip(runs, colours, _dashes(len(runs)), strict=True):
                steps, values = _series(records, key)
                if not values:
                    continue
                spent = dict(zip((record["step"] for record in records), minutes(records), strict=True))
                places = [spent[step] for step in steps] if over_time else steps
                axes.plot(places, values, color=_STAND_INS[colour], alpha=0.25, linewidth=1, linestyle=style)
                axes.plot(places, _smooth(values), color=_STAND_INS[colour], linewidth=2, linestyle=style)
                legend.append((name + (" (dashed)" if style == "--" else ""), colour))
                everything += values
            if not everything:
                continue
            if over_time:
                axes.set_xlabel("minutes", fontsize=9, color=_STAND_INS["ink"])
                axes.xaxis.set_major_locator(MaxNLocator(6))
            if min(everything) >= 0 and max(everything) > 1:
                _finish(axes, "", everything)
            drawn.append(
                _plot(f"{title[:1].upper()}{title[1:]} over {'time' if over_time else 'steps'}", "", legend, figure)
            )
    return drawn


def minutes(records: Sequence[Record]) -> list[float]:
    """Return the minutes of work until the end of each record's step, including validations but not restarts."""
    spent = ((record.get("time/step_s") or 0.0) + (record.get("time/validate_s") or 0.0) for record in records)
    return [total / 60 for total in itertools.accumulate(spent)]


# ---------------- These functions draw the parts of plots.


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    having = [record for record in records if record.get(key) is not None]
    return [record["step"] for record in having], [record[key] for record in having]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average of `values`. Near both ends, the window is cut off at the end."""
    reach = round(len(values) * SMOOTH_SHARE)
    windows = (values[max(0, at - reach) : at + reach + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _figure() -> tuple[Figure, Axes]:
    figure, axes = _figures(1)
    return figure, axes[0]


def _figures(count: int, *, wide: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes side by side, all with steps on the x-axis."""
    # The sizes in inches fit half or all of the page's width, and make 9 pt text as large as the page's small print.
    figure = Figure(figsize=(12.0, 2.4) if wide else (5.8, 2.9), layout="constrained")
    places = [figure.add_subplot(1, count, index + 1) for index in range(count)]
    for axes in places:
        axes.set_facecolor("none")
        axes.grid(axis="y", color=_STAND_INS["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_STAND_INS["ink"], labelsize=9, length=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_STAND_INS["grid"])
        axes.set_xlabel("step", fontsize=9, color=_STAND_INS["ink"])
    figure.patch.set_alpha(0)
    return figure, places


def _finish(axes: Axes, title: str, values: Sequence[float] = ()) -> None:
    """Give the axes a small title. With `values`, the y-axis starts at 0 and reaches a little above the largest of
    them."""
    axes.set_title(title, loc="left", fontsize=9, color=_STAND_INS["ink"])
    if values and max(values) > 0:
        axes.set_ylim(0, 1.08 * max(values))


def _plot(title: str, note: str, legend: Sequence[tuple[str, str]], figure: Figure, *, wide: bool = False) -> Plot:
    buffer = io.StringIO()
    # The salt makes the ids of plots on one page distinct, and keeps them the same in every build.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The opening tag keeps only the viewBox, because the page sets the size.
    links = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = rf'<svg role="img" aria-label="{title}" \1 {links}>'
    svg = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', opening, svg, count=1)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font: \1 var(--font)", svg)
    svg = re.sub(r"font-family: [^;\"]+", "font-family: var(--font)", svg)
    for name, stand_in in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return Plot(title, note, tuple(legend), svg, wide)
