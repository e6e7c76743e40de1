"""Runs `headrace simulate`, and reports all modes as a table and in summary.json, steps.jsonl and depth.jsonl."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from ...version import __version__
from ..config.config import Config
from ..config.load import load_config
from ..errors import UserError
from .config import SimulationConfig
from .saturation import saturation, saturation_table
from .scenario import MODES, Mode, Scenario, build_scenario, measure_run
from .simulate import SimulatedRun, simulate

DEPTH_POINTS = 2000
"""Largest number of points in time per simulated run in depth.jsonl. Each point has the numbers of ready and in-flight
groups."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The command-line options of `headrace simulate` besides the configuration."""

    section: SimulationConfig = field(default_factory=SimulationConfig)
    modes: tuple[Mode, ...] = MODES
    from_run: Path | None = None
    """Folder of a run in the mode `sync`. Measured values of this run replace unset keys of the section
    `simulation`."""
    gpus: tuple[int, ...] = ()
    """GPU counts to simulate besides `simulation.gpus`."""


def run_simulation(
    config: Config, options: SimulateOptions, out: Path, tell: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """Simulate the modes, write the results into `out` and return the summary. Raises UserError when a mode is unknown,
    no mode is given, a number of GPUs is below 1, or the runs cannot be simulated.

    summary.json has `simulate.{mode}.{seconds | trainer_idle_share | engine_idle_share | staleness_max | ...}` and
    `simulate.{mode}_vs_sync` (above 1 means faster), and the same under `simulate.gpus{N}.` for each of `options.gpus`.
    It also has `step.{mode}.{seconds | trainer_idle_share}` and `step.{mode}_vs_sync`, the names that `headrace bench
    step` uses. steps.jsonl has one line per step; depth.jsonl has the numbers of ready and in-flight groups over time.
    `tell` receives a line of progress before each simulated run.
    """
    if not options.modes or any(mode not in MODES for mode in options.modes):
        raise UserError(f"simulate: got modes {list(options.modes)}, expected some of {', '.join(MODES)}")
    if any(number < 1 for number in options.gpus):
        raise UserError(f"--gpus: got {min(options.gpus)}, expected whole numbers >= 1")
    measured = {}
    if options.from_run is not None:  # Sizes of the simulated run may differ from those of the measured run.
        path = options.from_run / "config.yaml"
        of_run = load_config(path, of_old_run=True) if path.is_file() else config
        measured = measure_run(options.from_run, of_run, options.section)
    base = build_scenario(config, options.section, measured)
    scenarios = {"simulate": base}
    scenarios |= {f"simulate.gpus{number}": base.scaled(options.section, number) for number in options.gpus}
    summary: dict[str, float] = {}
    steps: list[dict[str, Any]] = []
    depths: list[dict[str, Any]] = []
    started = time.monotonic()
    for name, scenario in scenarios.items():
        runs: dict[Mode, SimulatedRun] = {}
        for mode in options.modes:
            tell(f"{name.removeprefix('simulate.')} {mode}")
            runs[mode] = simulate(scenario, mode)
            steps += [
                {"run": name, "mode": mode, "step": number, **asdict(step)}
                for number, step in enumerate(runs[mode].steps, start=1)
            ]
            depths += _depth_lines(name, mode, runs[mode])
        summary |= summarise(name, scenario, runs)
    shared = (".seconds", ".trainer_idle_share", "_vs_sync")
    base_keys = [key for key in summary if not key.startswith("simulate.gpus") and key.endswith(shared)]
    summary |= {key.replace("simulate.", "step.", 1): summary[key] for key in base_keys}
    out.mkdir(parents=True, exist_ok=True)
    _write_lines(out / "steps.jsonl", steps)
    _write_lines(out / "depth.jsonl", depths)
    facts = {
        "headrace": __version__,
        "took_s": round(time.monotonic() - started, 3),
        "from": None if options.from_run is None else str(options.from_run),
        "scenario": asdict(base),
    }
    text = json.dumps({**summary, "conditions": facts}, indent=1, allow_nan=False)
    (out / "summary.json").write_text(text + "\n")
    return summary


def summarise(name: str, scenario: Scenario, runs: dict[Mode, SimulatedRun]) -> dict[str, float]:
    """Return the summary of a scenario's runs, one for each mode: name of the metric -> value.

    Times, idle shares and means leave out the first steps, during which the pipeline of the run fills up. The largest
    staleness and the share of dropped groups are taken over all steps.
    """
    summary: dict[str, float] = {}
    for mode, run in runs.items():
        kept = run.steps[min(scenario.staleness[mode] + 1, len(run.steps) - 1) :]
        seconds = math.fsum(step.seconds for step in kept)
        trainer = math.fsum(step.trainer_busy_s for step in kept) / seconds
        engines = math.fsum(step.engines_busy_s for step in kept) / (seconds * scenario.num_engines)
        directory_s = math.fsum(step.directory_busy_s for step in kept)
        depth = _mean_depth(run, run.steps[-1].end_s - seconds, run.steps[-1].end_s)
        summary |= {
            f"{name}.{mode}.seconds": seconds / len(kept),
            f"{name}.{mode}.trainer_idle_share": min(1.0, max(0.0, 1.0 - trainer)),
            f"{name}.{mode}.engine_idle_share": min(1.0, max(0.0, 1.0 - engines)),
            f"{name}.{mode}.staleness_mean": float(np.mean([step.staleness_mean for step in kept])),
            f"{name}.{mode}.staleness_max": float(max(step.staleness_max for step in run.steps)),
            f"{name}.{mode}.groups_ready_mean": depth,
            f"{name}.{mode}.dropped_share": run.dropped / run.started,
            f"{name}.{mode}.directory_wait_s": run.directory_wait_s,
        }
        summary |= saturation(name, scenario, mode, seconds / len(kept), directory_s / len(kept))
    if "sync" in runs:
        sync_s = summary[f"{name}.sync.seconds"]
        summary |= {f"{name}.{mode}_vs_sync": sync_s / summary[f"{name}.{mode}.seconds"] for mode in runs}
        del summary[f"{name}.sync_vs_sync"]
    return summary


def simulation_tables(summary: dict[str, float]) -> tuple[Table, Table]:
    """Format the summary as two tables: the steps in each mode, and the shares of capacity that parts use."""
    return simulation_table(summary), saturation_table(summary)


def simulation_table(summary: dict[str, float]) -> Table:
    """Format the summary as a table with one line for each combination of GPU count and mode."""
    header = ("s per step", "vs sync", "trainer idle", "engines idle", "staleness", "ready", "dropped")
    columns = ("run", "mode", *(Column(name, justify="right") for name in header))
    table = Table(*columns, title="headrace simulate", title_justify="left", title_style="bold")
    for key in summary:
        if not (key.startswith("simulate.") and key.endswith(".seconds")):
            continue
        name, mode = key.removesuffix(".seconds").rsplit(".", 1)
        at = f"{name}.{mode}"
        speedup = summary.get(f"{at}_vs_sync")
        table.add_row(
            name.partition(".")[2] or "as configured",
            mode,
            f"{summary[key]:.3f}",
            "" if speedup is None else f"{speedup:.2f}x",
            f"{summary[f'{at}.trainer_idle_share']:.1%}",
            f"{summary[f'{at}.engine_idle_share']:.1%}",
            f"{summary[f'{at}.staleness_mean']:.2f} (max {summary[f'{at}.staleness_max']:.0f})",
            f"{summary[f'{at}.groups_ready_mean']:.1f}",
            f"{summary[f'{at}.dropped_share']:.1%}",
        )
    return table


def _mean_depth(run: SimulatedRun, start_s: float, end_s: float) -> float:
    """Return the mean number of groups that were ready for training between `start_s` and `end_s`."""
    times = np.frombuffer(run.depth_times, np.float64)
    ready = np.frombuffer(run.depth_ready, np.int64)
    lasting = np.diff(np.clip(times, start_s, end_s), append=end_s)
    return float((ready * lasting).sum() / max(end_s - start_s, 1e-12))


def _depth_lines(name: str, mode: Mode, run: SimulatedRun) -> list[dict[str, Any]]:
    every = max(1, math.ceil(len(run.depth_times) / DEPTH_POINTS))
    columns = (run.depth_times, run.depth_ready, run.depth_in_flight)
    return [
        {"run": name, "mode": mode, "time_s": at, "groups_ready": ready, "groups_in_flight": in_flight}
        for at, ready, in_flight in zip(*(column[::every] for column in columns), strict=True)
    ]


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
