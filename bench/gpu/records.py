"""Turns the outcome of a run of `headrace bench gpu` into the line of results.jsonl that holds all of its steps."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .baseline import TrlOutcome
from .train_run import TrainOutcome


def train_record(work: str, outcome: TrainOutcome) -> dict[str, Any]:
    """Return a run of Headrace as plain data. Figures that are not finite become None."""
    task = outcome.task
    return {
        "op": "gpu", "trainer": "headrace", "work": work, "layout": task.layout.label, "gpus": task.layout.gpus,
        "backend": task.backend, "arguments": task.arguments(), "start_s": outcome.start_s,
        "steps": [_finite(asdict(step)) for step in outcome.figures],
        "idle_shares": outcome.idle_shares, "memory_gib": outcome.peaks_gib, "complaints": outcome.complaints,
    }  # fmt: skip


def trl_record(work: str, outcome: TrlOutcome) -> dict[str, Any]:
    """Return a run of TRL as plain data."""
    return {
        "op": "gpu", "trainer": "trl", "work": work, "seconds": list(outcome.seconds),
        "grad_norms": list(outcome.grad_norms), "peak_gib": outcome.peak_gib, "problem": outcome.problem,
    }  # fmt: skip


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }
