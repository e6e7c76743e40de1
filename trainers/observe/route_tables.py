"""Shows a run's measurements of routes and of the load of experts, from the metrics in its folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from ..errors import UserError
from .metrics import read_run

BY_STEP = {
    "routes/missing_share": "missing share",
    "routes/rows_missing": "rows missing",
    "routes/mixed_context_share": "mixed context",
    "routes/bytes_per_token": "bytes per token",
    "routes/native_agreement": "agreement",
    "routes/native_mismatch_mean": "mismatch without replay",
    "logprob/mismatch_mean": "mismatch",
    "moe/load_imbalance": "imbalance",
    "moe/idle_experts": "idle experts",
    "moe/aux_loss": "auxiliary loss",
    "moe/bias_max": "largest bias",
}
"""Columns of the table by step: metric -> heading. A column without values is left out."""
BY_LAYER = {"routes/native_agreement_layer_": "agreement", "moe/load_imbalance_layer_": "imbalance"}
"""Columns of the table by layer: metric's name without the layer's number at its end -> heading."""
SHARES = ("routes/missing_share", "routes/mixed_context_share", "routes/native_agreement")
"""Metrics that are shown in percent."""


def route_tables(run_dir: Path, *, last: int | None = None) -> list[Table]:
    """Return the tables of a run, by step and by layer. last: number of latest steps to show and average; None for all
    steps. Raises UserError if `last` is below 1, if the folder has no metrics, or if the run measured neither routes
    nor experts."""
    if last is not None and last < 1:
        raise UserError(f"--last: got {last}, expected 1 step or more")
    records, _ = read_run(run_dir)
    steps = [line for line in records if any(name.startswith(("routes/", "moe/")) for name in line)]
    if not steps:
        raise UserError(
            f"{run_dir}: the metrics have no routes/... and no moe/..., expected a run with router_replay.enabled=true "
            "or with trainer.moe"
        )
    steps = steps if last is None else steps[-last:]
    return [_by_step(steps), *_by_layer(steps)]


def _by_step(steps: Sequence[Mapping[str, Any]]) -> Table:
    shown = [name for name in BY_STEP if any(name in line for line in steps)]
    made = _table("by step", ("step", *(BY_STEP[name] for name in shown)))
    for line in steps:
        made.add_row(str(line["step"]), *(_text(name, line.get(name)) for name in shown))
    return made


def _by_layer(steps: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the table by layer, with means over the steps that have the metrics; [] if no step has them."""
    found: dict[int, dict[str, list[float]]] = {}
    for line in steps:
        for name, value in line.items():
            for start in BY_LAYER:
                if layer := re.fullmatch(re.escape(start) + r"(\d+)", name):
                    found.setdefault(int(layer[1]), {}).setdefault(start, []).append(value)
    if not found:
        return []
    shown = [start for start in BY_LAYER if any(start in values for values in found.values())]
    made = _table("by layer, mean over these steps", ("layer", *(BY_LAYER[start] for start in shown)))
    for layer, values in sorted(found.items()):
        means = {start: sum(each) / len(each) for start, each in values.items()}
        made.add_row(str(layer), *(_text(start.removesuffix("_layer_"), means.get(start)) for start in shown))
    return [made]


def _table(title: str, headings: Sequence[str]) -> Table:
    columns = (Column(heading, justify="right") for heading in headings)
    return Table(*columns, title=title, title_justify="left", title_style="bold")


def _text(name: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:.1%}" if name in SHARES else f"{value:.4g}"
