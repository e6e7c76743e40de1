"""Draws the transfer benchmark's plots as PNG: throughput with memcpy as the limit, throughput by size, and latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...dataplane.imports import MissingExtra

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter
except ModuleNotFoundError:
    raise MissingExtra("matplotlib", "a benchmark's report", "report") from None

from .contenders import CHECKSUMMED
from .results import PAIRED, Result

COLOURS = ("#1f6feb", "#e4761b", "#2da44e", "#8250df", "#d1242f", "#6e7781", "#bf8700", "#1b7c83", "#bf3989", "#57606a")
SHOWN_OPS = ("put", "get", "get8")


def draw(results: Sequence[Result], stores: Sequence[str], under: str, folder: Path) -> list[Path]:
    """Draw all plots that have results, and return their files. The line `under` is drawn below each plot; it names the
    conditions."""
    timed = [result for result in results if result.seconds and not result.contender.endswith((CHECKSUMMED, PAIRED))]
    moved = [result for result in timed if result.nbytes and result.op in SHOWN_OPS]
    if not moved:
        return []
    names = list(dict.fromkeys(result.contender for result in moved))
    colour = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    ops = [op for op in SHOWN_OPS if any(result.op == op for result in moved)]
    figures = {
        "throughput.png": _bars(moved, ops, stores, colour),
        "size.png": _sizes(moved, ops, colour),
        "latency.png": _percentiles(moved, ops, colour),
    }
    paths = []
    for name, figure in figures.items():
        figure.text(0.01, 0.01, under, fontsize=6, color="#57606a")
        figure.savefig(folder / name, dpi=130)
        paths.append(folder / name)
    return paths


def _bars(results: Sequence[Result], ops: Sequence[str], stores: Sequence[str], colour: dict[str, str]) -> Figure:
    figure, places = _grid(
        1, len(ops), "MiB/s of the median run (log scale); the black line is one memcpy of the same bytes"
    )
    workloads = list(dict.fromkeys(result.workload for result in results))
    ordered = [name for name in colour if name in stores] + [name for name in colour if name not in stores]
    ordered = [name for name in ordered if name != "memcpy"]
    width = 0.8 / max(1, len(ordered))
    for axes, op in zip(places, ops, strict=True):
        speed = {(r.workload, r.contender): r.mib_per_s for r in results if r.op == op}
        for number, name in enumerate(ordered):
            at = [place for place, workload in enumerate(workloads) if (workload, name) in speed]
            heights = [speed[workloads[place], name] for place in at]
            axes.bar(
                [place - 0.4 + (number + 0.5) * width for place in at], heights, width, color=colour[name], label=name
            )
        for place, workload in enumerate(workloads):
            if (workload, "memcpy") in speed:
                axes.hlines(speed[workload, "memcpy"], place - 0.42, place + 0.42, color="black", linewidth=1.2)
        axes.set_xticks(range(len(workloads)), workloads, rotation=30, fontsize=8)
        axes.set_title(op, loc="left", fontsize=9)
        axes.set_yscale("log")
    _legend(figure, places[0])
    return figure


def _sizes(results: Sequence[Result], ops: Sequence[str], colour: dict[str, str]) -> Figure:
    figure, places = _grid(1, len(ops), "MiB/s against the MiB of one run, one point per workload")
    for axes, op in zip(places, ops, strict=True):
        for name in colour:
            points = sorted((r.nbytes / 2**20, r.mib_per_s) for r in results if r.op == op and r.contender == name)
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour[name], markersize=4, linewidth=1, label=name)
        axes.set_title(op, loc="left", fontsize=9)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("MiB per run", fontsize=8)
    _legend(figure, places[0])
    return figure


def _percentiles(results: Sequence[Result], ops: Sequence[str], colour: dict[str, str]) -> Figure:
    by_size = sorted({(result.nbytes, result.workload) for result in results})
    chosen = list(dict.fromkeys((by_size[0][1], by_size[-1][1])))
    figure, places = _grid(len(chosen), len(ops), "share of runs that took at most so many milliseconds")
    panels = [(workload, op) for workload in chosen for op in ops]
    for axes, (workload, op) in zip(places, panels, strict=True):
        for result in results:
            if (result.workload, result.op) != (workload, op):
                continue
            times = sorted(seconds * 1e3 for seconds in result.seconds)
            shares = [(number + 1) / len(times) for number in range(len(times))]
            axes.step(
                times, shares, where="post", color=colour[result.contender], linewidth=1.4, label=result.contender
            )
        axes.set_title(f"{workload}: {op}", loc="left", fontsize=9)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())  # Labels between the powers of ten would overlap.
        axes.set_ylim(0, 1.02)
    _legend(figure, places[0])
    return figure


def _grid(rows: int, columns: int, title: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(13, 1.2 + 3.2 * rows))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    places = [figure.add_subplot(rows, columns, number + 1) for number in range(rows * columns)]
    for axes in places:
        axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.subplots_adjust(left=0.06, right=0.985, top=1 - 0.75 / (1.2 + 3.2 * rows), bottom=0.95 / (1.2 + 3.2 * rows))
    return figure, places


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", ncols=len(labels), fontsize=7, frameon=False)
