"""Runs one `headrace train` of `headrace bench gpu` in a separate process, and reads the figures of its steps.

The seconds of each step are split into parts, such as generation and weight sync. Figures out of bounds are reported.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...actors.process.json_lines import read_lines
from ...trainers.observe.metrics import ELAPSED, read_metrics, time_split
from ..models import PROMPTS
from .nvml import GpuSampler, GpuSamples, visible_gpus
from .works import CPU, EXAMPLES, Bounds, GrpoWork, Layout

PARTS = ("rollout", "data wait", "log-probs", "train", "sync", "switch", "plan", "rest")
"""Parts of a step's seconds. They add up to the step: the driver's wait for groups; the train workers' wait for rows;
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
    """Seconds between the end of the previous step and the start of this one, spent on writing metrics; 0 for the
    first."""
    tokens: float
    """Number of response tokens that the step trained on."""
    sequences: float
    """Number of rows that the step trained on."""
    failed_rows: float
    skipped: float
    """1 if the optimizer made no step, else 0."""
    rollout_tokens_per_s: float
    """Response tokens per second of generation. The seconds are those in which any engine generated."""
    train_tokens_per_s: float
    """Tokens, prompts included, per second of the train pass."""
    mfu: float | None
    """Model FLOP/s of the train pass divided by the device's peak for dense bfloat16; None where the peak is not
    known."""
    mismatch_mean: float
    """Mean difference between the engine's and the trainer's log-prob of a sampled token, in nats."""
    mismatch_max: float
    """Largest such difference, in nats."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    peak_gib: float
    """Peak memory of the train rank that used the most, in GiB."""
    plane_share: float
    """Share of the step's seconds that the data plane can have cost: the puts of rollout actors, most of them while
    others generate; the train workers' waits for rows; and dealing rows to ranks."""


def step_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each of PARTS in a step, read from the step's line of metrics.jsonl. They add up to the
    step."""
    split = time_split(record)
    parts = {name: split[name] for name in ("rollout", "data wait", "log-probs", "train", "sync")}
    parts |= {"switch": split.get("switch", 0.0), "plan": record.get("time/plan_s") or 0.0}
    return {**parts, "rest": max(0.0, record["time/step_s"] - sum(parts.values()))}


def step_figures(records: Sequence[Mapping[str, Any]]) -> list[StepFigures]:
    """Return the figures of each step of a run, in order. records: the run's metrics, one record for each step. Records
    without a step's time are left out, such as that of a validation before the first step."""
    figures: list[StepFigures] = []
    for record in records:
        seconds = record.get("time/step_s")
        if not seconds:
            continue
        ended, before = record[ELAPSED], figures[-1].ended_s if figures else None
        parts = step_parts(record)
        plane = parts["data wait"] + parts["plan"] + (record.get("dataplane/put/seconds") or 0.0)

        def number(key: str, record: Mapping[str, Any] = record) -> float:
            value = record.get(key)
            return math.nan if value is None else float(value)

        figures.append(
            StepFigures(
                step=int(record["step"]),
                ended_s=ended,
                seconds=seconds,
                parts=parts,
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
                plane_share=plane / seconds,
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
    """Return a sentence for each figure of a step that is out of bounds. The first step is checked, too. rows: number
    of rows that a step must train on."""
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


REWARD = "headrace.bench.gpu.works:spread"
_LOOK_S = 0.25
_END_S = 120.0
"""Seconds that a run has for ending its processes after it was asked to end."""


@dataclass(frozen=True, slots=True)
class TrainTask:
    """Settings of one run."""

    work: GrpoWork
    layout: Layout
    backend: str
    """Train backend, `fsdp` or `megatron`."""
    model: Path
    """Model folder, with the prompts."""
    folder: Path
    """Folder of the run. It must not exist yet."""
    steps: int
    prompts: int
    """Number of prompts of a step."""
    limit_s: float
    """Seconds after which the run is ended. The steps that it has made by then still count."""
    overrides: tuple[str, ...] = ()
    """Keys of the run's configuration from the command line. They override all others."""

    def arguments(self) -> list[str]:
        """Return the arguments of `headrace` that start the run."""
        keys = run_keys(
            self.work, self.model, self.folder, steps=self.steps, prompts=self.prompts, backend=self.backend,
            gpu=self.layout.name != CPU,
        )  # fmt: skip
        return ["train", str(EXAMPLES / self.work.example), *keys, *self.layout.overrides(), *self.overrides]


def run_keys(
    work: GrpoWork, model: Path, folder: Path, *, steps: int, prompts: int, backend: str, gpu: bool
) -> list[str]:
    """Return the keys of a run of `work`, as `key=value`, except for the placement of its engines and train ranks.
    model: model folder, with the prompts. folder: the run folder. prompts: number of prompts of a step. gpu: whether
    the run has GPUs."""
    keys = [
        f"run.dir={folder}", "run.checkpoint_minutes=0", f"model.path={model}", f"data.train={model / PROMPTS}",
        "data.answer_field=''", "data.chat_template=messages", f"data.max_prompt_tokens={work.max_prompt_tokens}",
        f"reward.functions=[{{kind: '{REWARD}'}}]", f"rollout.max_new_tokens={work.max_new_tokens}",
        f"algorithm.steps={steps}", f"algorithm.prompts_per_step={prompts}", f"algorithm.group_size={work.group_size}",
        f"trainer.backend={backend}", "validation.every=0", "logging.tensorboard=false", "logging.samples.every=0",
    ]  # fmt: skip
    if gpu:
        return keys
    return [*keys, "rollout.engine=hf", "model.dtype=float32", "trainer.mixed_precision=false", "resources.threads=1"]


@dataclass(slots=True)
class TrainOutcome:
    """Figures of one run."""

    task: TrainTask
    figures: list[StepFigures]
    """Figures of all steps that the run finished, the first included."""
    start_s: float
    """Seconds from the start of the process until the first step began; 0 if there was none."""
    idle_shares: list[float]
    """Share of the counted steps' time in which each GPU ran no kernel; empty if NVML was not sampled."""
    peaks_gib: list[float]
    """Largest memory in use on each GPU in the whole run, in GiB; empty if NVML was not sampled."""
    complaints: list[str] = field(default_factory=list)
    """Sentences about what was wrong with the run or its figures."""


def run_train(
    task: TrainTask,
    bounds: Bounds,
    sampler: GpuSampler | None,
    tell: Callable[[str], None],
    keep: Callable[[TrainOutcome], None],
) -> None:
    """Run `headrace train` to its end, or until it takes longer than its limit.

    The run's output goes to a text file beside the run folder, with the same name. When this function is interrupted,
    it first ends the run and calls `keep`. bounds: limits within which the figures are right. sampler: samples the GPUs
    during the run; with None they are not sampled. keep: function that gets the figures of the steps that were made.
    """
    output = task.folder.with_name(f"{task.folder.name}.txt")
    output.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    problem = "the run was interrupted"
    try:
        with sampler or nullcontext():
            problem = _run(task, output, tell)
    finally:
        samples = GpuSamples([]) if sampler is None else sampler.samples
        keep(_judged(read_outcome(task, started, samples), bounds, samples, problem, output))


def _judged(outcome: TrainOutcome, bounds: Bounds, samples: GpuSamples, problem: str, output: Path) -> TrainOutcome:
    """Return the outcome with its complaints. problem: sentence about how the process failed, or ""."""
    task = outcome.task
    # The trained weights take gigabytes, and nothing uses them.
    shutil.rmtree(task.folder / "model", ignore_errors=True)
    if problem:
        outcome.complaints.append(f"{task.layout.label}: {problem}; its output is in {output}")
    if samples.failure:
        outcome.complaints.append(f"{task.layout.label}: {samples.failure}")
    wrong = complaints(outcome.figures, bounds, rows=task.prompts * task.work.group_size)
    if not counted(outcome.figures):
        wrong.append(f"{len(outcome.figures)} steps were finished, expected at least 2")
    outcome.complaints += [f"{task.layout.label}: {line}" for line in wrong]
    return outcome


def read_outcome(task: TrainTask, started: float, samples: GpuSamples) -> TrainOutcome:
    """Return the figures of a run that has ended, from its metrics.jsonl. started: Unix time at which its process was
    started. samples: samples of the GPUs. Those taken during the counted steps give the idle shares."""
    path = task.folder / "metrics.jsonl"
    figures = step_figures(read_metrics(path)[0]) if path.exists() else []
    if not figures:
        return TrainOutcome(task, [], 0.0, [], samples.peaks_gib())
    zero = metrics_start(path)
    start_s = zero + figures[0].ended_s - figures[0].seconds - started
    idle: list[float] = []
    if steps := counted(figures):
        idle = samples.idle_shares(zero + steps[0].ended_s - steps[0].seconds, zero + steps[-1].ended_s)
    return TrainOutcome(task, figures, start_s, idle, samples.peaks_gib())


def metrics_start(path: Path) -> float:
    """Return the Unix time from which `time/elapsed_s` in a metrics.jsonl counts. It is the time of the file's last
    change minus the seconds in its last line. It is right to some milliseconds, because each line is written as soon as
    it is made."""
    _, last = read_lines(path)[-1]
    return path.stat().st_mtime - last["time/elapsed_s"]


def _run(task: TrainTask, output: Path, tell: Callable[[str], None]) -> str:
    deadline = time.monotonic() + task.limit_s
    environment = dict(os.environ)
    if task.layout.gpus:  # The run sees only the GPUs of its layout.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(task.layout.gpus))
    process = start_process("headrace.cli", task.arguments(), output, environment)
    try:
        while time.monotonic() < deadline:
            try:
                code = process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                tell(run_phase(task.folder, task.steps))
                continue
            return "" if code == 0 else f"the run ended with exit code {code}"
        return f"the run was ended after its limit of {task.limit_s:g} s"
    finally:
        end_process(process)


def run_phase(folder: Path, steps: int) -> str:
    """Return the progress of the run in `folder` in words. steps: number of steps that the run will make."""
    done = steps_done(folder)
    return f"{folder.name}: {done} of {steps} steps made" if done else f"{folder.name}: starting, and the first step"


def steps_done(folder: Path) -> int:
    """Return the number of steps in the run's metrics so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b'"time/step_s"') if path.exists() else 0


def start_process(
    module: str, arguments: Sequence[str], output: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `python -m module` in its own session, with its output in the file `output`.

    A Ctrl-C therefore reaches this process alone, which then ends the started one once."""
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process if it still runs, by SIGTERM and after two minutes by SIGKILL. A run that gets SIGTERM ends its own
    processes."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
