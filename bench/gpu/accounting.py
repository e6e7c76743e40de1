"""Splits the seconds of each step of a run by what they were spent on, and judges whether its figures are right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...trainers.observe.metrics import ELAPSED, time_split
from .works import Bounds

PARTS = ("rollout", "data wait", "log-probs", "train", "sync", "switch", "plan", "rest")
"""Parts of a step's seconds, which add up to the step: the driver's wait for groups; the train workers' wait for rows;
forward passes for log-probs; forward, backward and optimizer; weight sync; switching of roles; dealing rows to ranks;
everything else."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step of a run."""

    step: int
    ended_s: float
    """Seconds from the start of the run's metrics until the step ended."""
    seconds: float
    """Seconds of the step."""
    parts: Mapping[str, float]
    """Seconds of each of PARTS."""
    between_s: float
    """Seconds from the end of the step before until this one began, in which metrics are written; 0 for the first."""
    tokens: float
    """Number of response tokens that were trained on."""
    sequences: float
    """Number of rows that were trained on."""
    failed_rows: float
    skipped: float
    """1 if the optimizer made no step, else 0."""
    rollout_tokens_per_s: float
    """Response tokens per second in which any engine generated."""
    train_tokens_per_s: float
    """Tokens, prompts included, per second of the train pass."""
    mfu: float | None
    """Model FLOP/s of the train pass over the device's peak for dense bfloat16; None where that peak is not known."""
    mismatch_mean: float
    """Mean difference between the log-probs that engine and trainer give a sampled token, in nats."""
    mismatch_max: float
    """Largest such difference, in nats."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    peak_gib: float
    """Peak memory of the fullest train rank, in GiB."""


def step_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each of PARTS in a step, from its line of metrics.jsonl. They add up to the step."""
    split = time_split(record)
    parts = {name: split[name] for name in ("rollout", "data wait", "log-probs", "train", "sync")}
    parts |= {"switch": split.get("switch", 0.0), "plan": record.get("time/plan_s") or 0.0}
    return {**parts, "rest": max(0.0, record["time/step_s"] - sum(parts.values()))}


def step_figures(records: Sequence[Mapping[str, Any]]) -> list[StepFigures]:
    """Return the figures of each step of a run, in order. records: the run's metrics, one record for each step; those
    without a step's time, such as that of a validation before the first step, are left out."""
    figures: list[StepFigures] = []
    for record in records:
        seconds = record.get("time/step_s")
        if not seconds:
            continue
        ended, before = record[ELAPSED], figures[-1].ended_s if figures else None

        def number(key: str, record: Mapping[str, Any] = record) -> float:
            value = record.get(key)
            return math.nan if value is None else float(value)

        figures.append(
            StepFigures(
                step=int(record["step"]),
                ended_s=ended,
                seconds=seconds,
                parts=step_parts(record),
                between_s=0.0 if before is None else max(0.0, ended - before - seconds),
                tokens=number("train/tokens"),
                sequences=number("train/sequences"),
                failed_rows=number("rollout/failed_rows"),
                skipped=number("train/skipped"),
                rollout_tokens_per_s=number("rollout/tokens_per_s"),
                train_tokens_per_s=number("train/tokens_per_s"),
                mfu=record.get("train/mfu"),
                mismatch_mean=number("logprob/mismatch_mean"),
                mismatch_max=number("logprob/mismatch_max"),
                grad_norm=number("train/grad_norm"),
                peak_gib=number("memory/peak_gib"),
            )
        )
    return figures


def counted(figures: Sequence[StepFigures]) -> list[StepFigures]:
    """Return the steps that count: all but the first, in which kernels are compiled and memory is reserved."""
    return list(figures[1:])


def median(figures: Sequence[StepFigures], name: str) -> float:
    """Return the median of one figure over steps; NaN if a step lacks it."""
    values = [getattr(one, name) for one in figures]
    return math.nan if any(value is None or math.isnan(value) for value in values) else statistics.median(values)


def complaints(figures: Sequence[StepFigures], bounds: Bounds, rows: int) -> list[str]:
    """Return a sentence for each step and figure that is out of bounds. The first step is judged, too. rows: number of
    rows that a step must train on."""
    found = []
    for one in figures:
        limits = {
            "mean difference of log-probs": (one.mismatch_mean, bounds.mismatch_mean),
            "largest difference of log-probs": (one.mismatch_max, bounds.mismatch_max),
        }
        for name, (value, most) in limits.items():
            if not 0 <= value <= most:
                found.append(f"step {one.step}: {name} {value:.4g}, expected at most {most:g}")
        if not 0 < one.grad_norm <= bounds.grad_norm:
            expected = f"more than 0 and at most {bounds.grad_norm:g}"
            found.append(f"step {one.step}: gradient norm {one.grad_norm:.4g}, expected {expected}")
        if one.skipped:
            found.append(f"step {one.step}: the optimizer made no step")
        if one.sequences != rows or one.failed_rows:
            found.append(
                f"step {one.step}: {one.sequences:g} rows were trained on and {one.failed_rows:g} failed, expected "
                f"{rows} and 0"
            )
    return found
