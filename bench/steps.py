"""`headrace bench step` times the training modes in the real system, with a scripted engine and trainer.

Everything runs as in training: Ray, directory, store, rollout actor, train worker, train loop, weight syncs. Only the
model is missing. For each group the engine waits for a random latency from a log-normal distribution (sigma 1, all
groups at once), and the train worker takes a fixed time for each row. The times are chosen so that on average the
training of a step takes as long as its generation, which ends with the slowest group. `sync` must therefore take twice
that time, and the other modes show how much they overlap.

Two more runs compare `async` and `async_streaming` with each other. They train on groups in the order of the prompts,
and training takes half as long as generation, so that a step waits for its slowest group.

The seconds per step are the wall time of the counted steps divided by their number, as they would be in a long run. The
report also has the median, in which slow steps have less weight. Then `headrace simulate` simulates the same groups. It
adds the overhead of the sync run's steps, which is the time that they took beyond the chosen times. The report shows
the simulated figures beside the measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ..trainers.config.config import Config
from ..trainers.config.load import build_config
from ..trainers.config.staleness import Mode
from ..trainers.observe.metrics import read_metrics
from ..trainers.run.launch import run_training
from ..trainers.simulation.config import SimulationConfig
from ..trainers.simulation.scenario import Scenario, build_scenario, measure_run
from ..trainers.simulation.simulate import simulate
from .records import conditions, markdown, one_line, table, write_page, write_records, write_summary
from .transfer.plots import COLOURS, Figure


@dataclass(frozen=True, slots=True)
class Case:
    """One run that the benchmark times."""

    name: str
    """Name of the case in the results, and of its run folder."""
    mode: Mode
    in_order: bool = False
    """True if groups are trained on in the order of their prompts. Otherwise they are trained on in the order in which
    they become ready, in modes that allow it."""
    train_share: float = 1.0
    """Seconds that the training of a step takes, divided by the seconds that its slowest group takes."""


CASES = (
    Case("sync", "sync"),
    Case("streaming", "streaming"),
    Case("async", "async"),
    Case("async_in_order", "async", in_order=True, train_share=0.5),
    Case("async_streaming", "async_streaming", in_order=True, train_share=0.5),
)
LAST = 2
"""Number of steps at a run's end that are not counted, because no rollouts of later steps run at the same time."""
TRAIN_STEP_SHARE = 0.05
"""Share of a step's training time that the optimizer step takes, after all rows have been processed."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of the benchmark `headrace bench step`."""

    out: Path
    """Folder for the results and the run folders."""
    warm: int = 3
    """Number of warm-up steps at the start of a run. They are not counted."""
    counted: int = 30
    prompts: int = 32
    """Number of groups (one for each prompt) in a step."""
    group_size: int = 2
    chunk_groups: int = 4
    """Least number of groups on which `streaming` and `async_streaming` train together."""
    sigma: float = 1.0
    """Sigma of the log-normal distribution of latencies."""
    train_s: float = 1.2
    """Seconds that the training of a step takes. The generation of a step takes the same time on average."""
    seed: int = 0

    @staticmethod
    def quick(out: Path) -> StepOptions:
        """Return options with few, short steps. They try out the command, but its figures mean little."""
        return StepOptions(out, warm=1, counted=6, prompts=16, train_s=0.3)

    @property
    def steps(self) -> int:
        return self.warm + self.counted + LAST


@dataclass(frozen=True, slots=True)
class ModeResult:
    """Figures of the counted steps of one case, measured or simulated."""

    case: str
    seconds: tuple[float, ...]
    """Wall seconds of each step, from the end of the previous step."""
    trainer_busy_s: float
    """Seconds for which the train worker computed in all counted steps together."""
    staleness_mean: float
    """Mean number of versions between the policy that generated a row's oldest token and the policy that trained on the
    row."""
    staleness_max: float
    groups_dropped: int
    """Number of groups that the whole run dropped because they were too old to be trained on."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def trainer_idle_share(self) -> float:
        return min(1.0, max(0.0, 1.0 - self.trainer_busy_s / sum(self.seconds)))

    def figures(self) -> dict[str, float]:
        """Return the figures for the summary and the records, by name."""
        return {
            "seconds": self.step_s,
            "median_seconds": float(np.median(self.seconds)),
            "trainer_idle_share": self.trainer_idle_share,
            "staleness_mean": self.staleness_mean,
            "staleness_max": self.staleness_max,
        }


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of each case, measured and simulated, with a summary and the conditions."""

    measured: tuple[ModeResult, ...]
    simulated: tuple[ModeResult, ...]
    summary: Mapping[str, float]
    conditions: Mapping[str, Any]


def run_steps(options: StepOptions, tell: Callable[[str], None]) -> StepReport:
    """Run and simulate all cases. Writes results.jsonl, summary.json and each run's folder into `options.out`.

    Raises UserError if one of these folders already has a run.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    facts = conditions(
        **{name: getattr(options, name) for name in ("warm", "counted", "prompts", "group_size", "chunk_groups")},
        sigma=options.sigma, train_s=options.train_s, seed=options.seed,
    )  # fmt: skip
    configs = {case: case_config(options, case) for case in CASES}
    measured = []
    for case, config in configs.items():
        tell(f"{case.name}: {options.steps} steps")
        run_training(config, resume=False)
        measured.append(measured_steps(options.out / case.name, case, options))
    overheads = measure_run(options.out / CASES[0].name, configs[CASES[0]], SimulationConfig())
    tell("simulating the same")
    simulated = [
        simulated_steps(build_scenario(config, SimulationConfig(), overheads), case, options)
        for case, config in configs.items()
    ]
    summary = summarise(measured, simulated)
    facts |= {"load_average_after": conditions()["load_average"], "overheads": overheads}
    records = [_record("measured", result) for result in measured]
    records += [_record("simulated", result) for result in simulated]
    write_records(options.out / "results.jsonl", records, facts)
    write_summary(options.out / "summary.json", summary, facts)
    return StepReport(tuple(measured), tuple(simulated), summary, facts)


def case_config(options: StepOptions, case: Case) -> Config:
    """Return the configuration of one case's run. All cases have the same prompts, latencies and rows."""
    mode = case.mode
    algorithm: dict[str, Any] = {
        "mode": mode,
        "steps": options.steps,
        "prompts_per_step": options.prompts,
        "group_size": options.group_size,
    }
    if mode in ("streaming", "async_streaming"):
        algorithm["chunk_groups"] = options.chunk_groups
    if mode in ("async", "async_streaming"):
        algorithm["max_staleness"] = 1
    if mode == "async" and not case.in_order:
        # Groups that grow too old are dropped, because a new try of the same prompt would take as long.
        algorithm |= {"sampler": "ready_first", "stale_groups": "drop"}
    train_s = case.train_share * options.train_s
    rows_s = (1 - TRAIN_STEP_SHARE) * train_s
    return build_config(
        {
            "run": {
                "dir": str(options.out / case.name),
                "name": f"bench-step-{case.name}",
                "seed": options.seed,
                "trace_step": 5,
                "checkpoint_minutes": 0.0,
            },
            "algorithm": algorithm,
            "rollout": {"engine": "scripted", "max_new_tokens": 32},
            "data": {"max_prompt_tokens": 32},
            "trainer": {"backend": "scripted"},
            "sync": {"in_flight": "keep"},
            "validation": {"every": 0},
            "logging": {"tensorboard": False, "progress": False, "samples": {"every": 0}},
            "scripted": {
                "latency_s": median_latency(options),
                "latency_sigma": options.sigma,
                "train_row_s": rows_s / (options.prompts * options.group_size),
                "train_step_s": train_s - rows_s,
            },
        }
    )


def median_latency(options: StepOptions) -> float:
    """Return the median of the latency of requests in seconds. With it, the slowest group of a counted step takes
    `train_s` on average."""
    section = SimulationConfig(latency_s=1.0, latency_sigma=options.sigma)
    plain = build_scenario(build_config({"run": {"seed": options.seed}}), section, {})
    slowest = plain.draw_latencies(options.steps * options.prompts).reshape(-1, options.prompts).max(axis=1)
    return options.train_s / float(slowest[options.warm : -LAST].mean())


def measured_steps(folder: Path, case: Case, options: StepOptions) -> ModeResult:
    """Read a finished run's metrics.jsonl and return the figures of its counted steps."""
    records = read_metrics(folder / "metrics.jsonl")[0]
    by_step = {int(record["step"]): record for record in records if record.get("time/step_s")}
    ends = [by_step[step]["time/elapsed_s"] for step in range(options.warm, options.warm + options.counted + 1)]
    kept = [by_step[step] for step in range(options.warm + 1, options.warm + options.counted + 1)]
    return ModeResult(
        case.name,
        tuple(np.diff(ends).tolist()),
        trainer_busy_s=sum(record["time/step_s"] - record["time/trainer_idle_s"] for record in kept),
        staleness_mean=float(np.mean([record["staleness/mean"] for record in kept])),
        staleness_max=max(record["staleness/max"] for record in by_step.values()),
        groups_dropped=int(sum(record.get("rollout/groups_stale") or 0 for record in by_step.values())),
    )


def simulated_steps(scenario: Scenario, case: Case, options: StepOptions) -> ModeResult:
    """Simulate the steps of a case and return their figures. scenario: the case with the overheads of the sync run."""
    run = simulate(scenario, case.mode)
    kept = run.steps[options.warm : options.warm + options.counted]
    return ModeResult(
        case.name,
        tuple(step.seconds for step in kept),
        trainer_busy_s=sum(step.trainer_busy_s for step in kept),
        staleness_mean=float(np.mean([step.staleness_mean for step in kept])),
        staleness_max=float(max(step.staleness_max for step in run.steps)),
        groups_dropped=run.dropped,
    )


def summarise(measured: Sequence[ModeResult], simulated: Sequence[ModeResult]) -> dict[str, float]:
    """Return the summary by key. Keys are `step.{case}.{seconds | median_seconds
    | trainer_idle_share | staleness_mean | staleness_max}`, `step.{case}_vs_sync` for cases with the times of `sync`,
    and `step.async_streaming_vs_async`. Ratios above 1 mean faster.

    The same keys exist with the prefix `simulated.`. `simulated.step.{case}.relative_difference` is the measured
    seconds divided by the simulated ones, minus 1.
    """
    compared = {case.name for case in CASES[1:] if case.train_share == CASES[0].train_share}
    summary: dict[str, float] = {}
    for prefix, results in (("", measured), ("simulated.", simulated)):
        step_s = {result.case: result.step_s for result in results}
        for result in results:
            name = f"{prefix}step.{result.case}"
            summary |= {f"{name}.{figure}": value for figure, value in result.figures().items()}
            if result.case in compared:
                summary[f"{name}_vs_sync"] = step_s["sync"] / result.step_s
        summary[f"{prefix}step.async_streaming_vs_async"] = step_s["async_in_order"] / step_s["async_streaming"]
    for case in CASES:
        ratio = summary[f"step.{case.name}.seconds"] / summary[f"simulated.step.{case.name}.seconds"]
        summary[f"simulated.step.{case.name}.relative_difference"] = ratio - 1
    return summary


def _record(kind: str, result: ModeResult) -> dict[str, Any]:
    return {
        "op": "step",
        "kind": kind,
        "case": result.case,
        "runs": len(result.seconds),
        **result.figures(),
        "groups_dropped": result.groups_dropped,
        "times_s": [round(seconds, 4) for seconds in result.seconds],
    }


HEADER = ("run", "s a step", "median", "vs sync", "trainer idle", "staleness", "simulated s", "simulated vs sync",
          "simulated idle", "off by")  # fmt: skip
NOT_SHOWN = ("median", "simulated vs sync", "simulated idle")
"""Columns that are in report.md but not in the terminal's table."""


def steps_table(report: StepReport) -> Table:
    """Return a table with one row per mode and the columns that fit a narrow terminal."""
    shown = [number for number, name in enumerate(HEADER) if name not in NOT_SHOWN]
    rows = ([row[number] for number in shown] for row in _rows(report))
    return table("headrace bench step", [HEADER[number] for number in shown], rows)


def write_report(report: StepReport, options: StepOptions, command: str) -> Path:
    """Write report.md and steps.png into `options.out`; returns the path of report.md."""
    _draw(report, options.out / "steps.png")
    lines = [meaning(options), "", "![steps](steps.png)", "", *markdown(HEADER, _rows(report))]
    return write_page(options.out / "report.md", "headrace bench step", command, lines, report.conditions)


def meaning(options: StepOptions) -> str:
    """Return the paragraph of the report that explains the measurement."""
    return (
        f"{options.prompts} groups of {options.group_size} rows per step, generated at once, a group in a log-normal "
        f"time of sigma {options.sigma:g}; the slowest of a step takes {options.train_s:g} s on average, and so does "
        f"its training. Seconds per step: wall time of {options.counted} steps over their number, without the first "
        f"{options.warm} and the last {LAST}. `streaming` trains on {options.chunk_groups} groups at a time, staleness "
        "0; `async` on those that are ready first, staleness 1, groups that grow too old dropped. `async_in_order` and "
        "`async_streaming` train half as long, in the order of the prompts; the latter also on "
        f"{options.chunk_groups} groups at a time or more. Simulated: the same groups, with what the sync run's steps "
        "took besides; off by: measured over simulated."
    )


def _rows(report: StepReport) -> list[tuple[str, ...]]:
    return [
        _row(report, measured, simulated) for measured, simulated in zip(report.measured, report.simulated, strict=True)
    ]


def _row(report: StepReport, measured: ModeResult, simulated: ModeResult) -> tuple[str, ...]:
    case, summary = measured.case, report.summary

    def ratio(prefix: str) -> str:
        versus_sync = summary.get(f"{prefix}step.{case}_vs_sync")
        return "" if versus_sync is None else f"{versus_sync:.2f}x"

    return (
        case,
        f"{measured.step_s:.3f}",
        f"{np.median(measured.seconds):.3f}",
        ratio(""),
        f"{measured.trainer_idle_share:.1%}",
        f"{measured.staleness_mean:.2f}, max {measured.staleness_max:.0f}",
        f"{simulated.step_s:.3f}",
        ratio("simulated."),
        f"{simulated.trainer_idle_share:.1%}",
        f"{summary[f'simulated.step.{case}.relative_difference']:+.1%}",
    )


def _draw(report: StepReport, path: Path) -> None:
    figure = Figure(figsize=(13, 4.2))
    figure.suptitle("seconds of each step; dashed: simulated", x=0.01, ha="left", fontsize=10)
    top = 1.05 * max(max(result.seconds) for result in (*report.measured, *report.simulated))
    for number, case in enumerate(CASES):
        axes = figure.add_subplot(1, len(CASES), number + 1)
        for results, line, label in ((report.measured, "-", "measured"), (report.simulated, "--", "simulated")):
            result = results[number]
            axes.plot(range(1, 1 + len(result.seconds)), result.seconds, line, color=COLOURS[number], linewidth=1.2)
            axes.axhline(
                result.step_s, linestyle=line, color="black", linewidth=0.8, label=f"{label} {result.step_s:.2f}"
            )
        axes.set_title(case.name, loc="left", fontsize=9)
        axes.set_ylim(0, top)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, loc="upper right")
    figure.text(0.01, 0.01, one_line(dict(report.conditions)), fontsize=6, color="#57606a")
    figure.subplots_adjust(left=0.04, right=0.99, top=0.86, bottom=0.12, wspace=0.12)
    figure.savefig(path, dpi=130)
