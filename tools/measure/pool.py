"""`python tools/measure/pool.py` runs two tenants on a pool of two GPUs, and one that has both GPUs to itself.

    pool start -> tenant `alone`, to its end -> tenants `a` and `b` at once, until each has made its steps
          -> pool stop, report

Each trains on one GPU and has an engine on both. The pool admits one of `a` and `b` first, and the other one after its
first step. The figures of both are those of the time in which both were at work. `--work pool-tiny` also runs without a
GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.bench.gpu.nvml import GpuSamples, gpu_names, sampler_of, usable_nvml
from headrace.bench.gpu.train_run import complaints
from headrace.bench.gpu.work_report import WorkReport
from headrace.bench.gpu.works import HALF, GrpoWork
from headrace.bench.models import make_folder
from headrace.bench.progress import Progress
from headrace.bench.records import conditions
from headrace.cli.arguments import Parser, known, results_folder
from headrace.cli.bench import measured
from headrace.cli.command import ended
from headrace.tools.measure.pool_figures import (
    TenantFigures,
    against_link,
    double_grants,
    read_tenant,
    read_timed_events,
    shared_window,
    stage_seconds,
    switch_figures,
    tenant_figures,
)
from headrace.tools.measure.pool_tenants import NUM_GPUS, TenantTask, follow, served, tenants
from headrace.trainers.errors import UserError
from headrace.trainers.pool.server.gpu_trace import pool_trace, write_perfetto

ALONE, BOTH = "alone", ("a", "b")
"""Name of the tenant that has the pool to itself, and names of the tenants that share it."""
LINK = "host link"
"""Name of the part in which bare copies are measured."""
ENDLESS = 1_000_000
"""Number of steps of tenants `a` and `b`, which are ended when both have made the wanted number."""
MOST_GROWTH_GIB = 0.0625
"""Largest growth, in GiB, of what a process holds asleep that counts as none."""
_LINK_TIMEOUT_S = 120.0
_LINK_BYTES = 2 << 30
_WIDE = replace(HALF, mismatch_mean=0.03)
"""Bounds for bfloat16 and 2 G parameters. Runs whose weights were equal byte for byte had means of up to 0.021, and a
largest difference of 0.12."""
_SHORT = (192, 128, (64, 192))
POOL_WORKS = {
    "pool-tiny": GrpoWork("tiny", "gpu-0.6b.yaml", 32, 24, (16, 48), prompts=2, group_size=4, steps=10),
    "pool-0.6b": GrpoWork("0.6b", "gpu-0.6b.yaml", *_SHORT, prompts=8, steps=20),
    "pool-2g": GrpoWork("2g", "gpu-1.7b.yaml", *_SHORT, prompts=8, steps=10, half=_WIDE),
}
"""Name of a work -> the run of each of two tenants."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of `tools/measure/pool.py`."""

    out: Path
    """Folder for the results, the run folders and the pool's, which is new or empty."""
    work: str
    """Name of the work, a key of `POOL_WORKS`."""
    backend: str = "fsdp"
    """Train backend, `fsdp` or `megatron`."""
    steps: int | None = None
    """Number of steps of the tenant `alone`, and of those that `a` and `b` must make; None means the work's own."""
    prompts: int | None = None
    """Number of prompts of a step; None means the work's own."""
    model: Path | None = None
    """Model folder to use, which is made if it is not there, and kept; None means one that is removed at the end."""
    limit_s: float = 400.0
    """Seconds that the tenant alone may take, and as many for both."""
    overrides: tuple[str, ...] = ()
    """Keys of the runs' configuration, as `key=value`."""


@dataclass(slots=True)
class _Measured:
    """Figures of the runs, as far as these came."""

    alone: TenantFigures
    both: list[TenantFigures]
    samples: GpuSamples
    link: tuple[float, float] | None
    """Bytes per second of a copy to the host and of one to the device; None without a GPU."""
    problems: list[str] = field(default_factory=list)
    weight_bytes: int = 0
    """Size of the model's files; 0 before they are made."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a work and return the exit code, as `headrace` does."""
    started = time.monotonic()
    parser = Parser("tools/measure/pool.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., object] = parser.add_argument
    add("--work", default="pool-0.6b", metavar="NAME", help=f"{' '.join(POOL_WORKS)}; default: pool-0.6b")
    add("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    add("--backend", default="fsdp", choices=("fsdp", "megatron"), help="train backend; default: fsdp")
    add("--steps", type=int, metavar="N", help="steps of each run; default: the work's own")
    add("--prompts", type=int, metavar="N", help="prompts of a step; default: the work's own")
    add("--model", type=Path, metavar="DIR", help="model folder to use again; it is made if it is not there")
    add("--limit-s", type=float, default=900.0, metavar="S", help="seconds that each run may take; default: 900")
    add("overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a key of the runs' config")
    arguments = parser.parse_args(argv)
    return ended(lambda: _measure(arguments, Progress(lambda line: print(line, flush=True), started)))


def _measure(arguments: argparse.Namespace, tell: Progress) -> int:
    [work] = known("--work", (arguments.work,), tuple(POOL_WORKS))
    for option, number in (("--steps", arguments.steps), ("--prompts", arguments.prompts)):
        if number is not None and number < 1:
            raise UserError(f"{option}: got {number}, expected at least 1")
    report = WorkReport(work, results_folder(arguments, "gpu", new=True), tell)
    options = PoolOptions(
        report.out, work, arguments.backend, steps=arguments.steps, prompts=arguments.prompts,
        model=arguments.model, limit_s=arguments.limit_s, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    return measured(report, lambda: run_pool(options, report))


def run_pool(options: PoolOptions, report: WorkReport) -> None:
    """Run the pool and its tenants, and write results.jsonl, summary.json and the pool's timeline, also if interrupted.
    Raises UserError on a machine with one GPU, and RuntimeError if the pool does not start."""
    work, gpus = POOL_WORKS[options.work], torch.cuda.device_count()
    if gpus < NUM_GPUS and (gpus or options.work != "pool-tiny"):
        raise UserError(f"--work: got {options.work!r} with {gpus} GPU(s), expected {NUM_GPUS} (pool-tiny: or none)")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = (options.model or out / "model").resolve()
    found = _Measured(TenantFigures(ALONE, (), (), ()), [], GpuSamples([]), None)
    tell = report.tell
    tell.plan(ALONE, " and ".join(BOTH), *([LINK] if gpus else []))
    judge = partial(_judge, report, options, found, gpu=bool(gpus))
    with report.kept(judge), ExitStack() as stack:
        nvml = stack.enter_context(usable_nvml(report.notes)) if gpus else None
        report.conditions = _conditions(options, work, gpu_names(nvml, NUM_GPUS) if gpus else [])
        if options.model is None:
            stack.callback(shutil.rmtree, model, ignore_errors=True)
        tell("making the model")
        make_folder(model, work.folder_task("bfloat16" if gpus else "float32"), "cuda" if gpus else "cpu")
        found.weight_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        report.conditions["weight_bytes"] = found.weight_bytes
        sampler = None if nvml is None else sampler_of(nvml, NUM_GPUS)
        if sampler is not None:
            found.samples = sampler.samples
        with sampler or nullcontext():
            _run_tenants(options, work, model, found, gpu=bool(gpus), tell=tell)
        if gpus:
            tell(LINK)
            found.link = _link()
            tell.finish(LINK)


def _conditions(options: PoolOptions, work: GrpoWork, gpus: list[str]) -> dict[str, Any]:
    return conditions(
        gpus=gpus, work=options.work, example=work.example, backend=options.backend,
        steps=options.steps or work.steps, prompts=options.prompts or work.prompts, group_size=work.group_size,
        prompt_tokens=list(work.prompt_tokens), max_new_tokens=work.max_new_tokens, overrides=list(options.overrides),
    )  # fmt: skip


# ---------------- The runs.


def _run_tenants(
    options: PoolOptions, work: GrpoWork, model: Path, found: _Measured, *, gpu: bool, tell: Progress
) -> None:
    """Run the pool with the tenant alone, then with both, and read what they have logged, also if interrupted.
    `found.problems` reports what goes wrong."""
    out, steps = options.out.resolve(), options.steps or work.steps

    def task(name: str, train_gpu: int, num_steps: int) -> TenantTask:
        return TenantTask(
            name, work, train_gpu, options.backend, model, out / name, num_steps, options.prompts or work.prompts, gpu,
            options.overrides,
        )  # fmt: skip

    tell("starting the pool")
    with served(out / "pool", gpu=gpu) as pool:
        for tasks, wanted in (
            ([task(ALONE, 0, steps)], 0),
            ([task(name, gpu, ENDLESS) for gpu, name in enumerate(BOTH)], steps),
        ):
            try:
                with tenants(tasks, pool) as running:
                    problem = follow(running, options.limit_s, tell, steps=wanted)
            finally:
                figures = [read_tenant(one.name, one.folder) for one in tasks]
                for one in tasks:
                    shutil.rmtree(one.folder / "model", ignore_errors=True)  # gigabytes of weights that mean nothing
                if tasks[0].name == ALONE:
                    found.alone = figures[0]
                else:
                    found.both = figures
            if problem:
                found.problems.append(problem)
                return
            tell.finish(" and ".join(one.name for one in tasks))
        tell("stopping the pool")


def _link() -> tuple[float, float] | None:
    """Return the bytes per second of the host link in both directions; None if the measurement fails. It is made in a
    process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        try:
            return pool.apply_async(_measure_link).get(_LINK_TIMEOUT_S)
        except (RuntimeError, multiprocessing.TimeoutError):
            return None


def _measure_link() -> tuple[float, float]:
    return link_bytes_per_s(torch.device("cuda", 0))


def link_bytes_per_s(device: torch.device, num_bytes: int = _LINK_BYTES, repeats: int = 5) -> tuple[float, float]:
    """Return the bytes per second of copies from the device to pinned host memory, and back. They are medians, after
    one copy that is not counted."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rates = []
    for to, source in ((here, there), (there, here)):
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            to.copy_(source)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        rates.append(num_bytes / statistics.median(seconds[1:]))
    return rates[0], rates[1]


# ---------------- What they come to.


def _judge(report: WorkReport, options: PoolOptions, found: _Measured, *, gpu: bool) -> None:
    """Fill in the report's figures from what the runs have logged, note what is wrong, and write the timeline. The
    timeline is the pool's."""
    work = POOL_WORKS[options.work]
    since, until = shared_window(found.both) if found.both else (0.0, 0.0)
    figures = {"weights_gib": found.weight_bytes / 2**30} | _walls(found, since, until)
    trace = options.out / "pool"
    events = read_timed_events(trace)
    if events:
        write_perfetto(pool_trace([event for _, event in events]), options.out / "pool.trace.json")
    inside = [(at, event) for at, event in events if since <= at <= until]
    figures |= switch_figures(stage_seconds(inside, BOTH))
    figures |= tenant_figures(found.both, since, until)
    if found.link is not None:
        figures |= against_link(figures, found.weight_bytes, *found.link)
    report.summary = {f"gpu.{report.work}.{name}": value for name, value in figures.items()}
    report.complaints = [*found.problems, *double_grants(events)]
    rows = (options.prompts or work.prompts) * work.group_size
    for tenant in (found.alone, *found.both):
        wrong = complaints(tenant.steps, work.half, rows)  # kept samples have tokens of older weights
        report.complaints += [f"{tenant.name}: {line}" for line in wrong] + _losses(tenant)
    if gpu:
        report.complaints += _growth(figures)
    if "wall_vs_alone" not in figures:
        report.complaints.append("the tenants a and b did not both make two steps side by side, after a run alone")
    if not gpu:
        report.notes.append("the pool's GPUs are numbers only: memory is that of the host, and there is no link")
    report.records = [
        {"tenant": one.name, "steps": [dict(record) for record in one.records]} for one in (found.alone, *found.both)
    ]


def _walls(found: _Measured, since: float, until: float) -> dict[str, float]:
    """Return the seconds per step of the tenant alone and of both, their ratio, and each GPU's idle share. A GPU is
    idle while it runs no kernel."""
    figures: dict[str, float] = {}
    ends = found.alone.ends
    alone = found.alone.step_s(ends[0], ends[-1]) if ends else None
    both = {tenant.name: tenant.step_s(since, until) for tenant in found.both}
    for name, seconds in {ALONE: alone, **both}.items():
        if seconds is not None:
            figures[f"{name}.step_s"] = seconds
    slowest = max((seconds for seconds in both.values() if seconds is not None), default=None)
    if alone and slowest is not None and None not in both.values():
        figures["wall_vs_alone"] = slowest / alone
    windows = {ALONE: (ends[0], ends[-1])} if ends else {}
    for name, window in {**windows, "both": (since, until)}.items():
        if shares := found.samples.idle_shares(*window):
            figures |= {f"{name}.idle_share.{gpu}": share for gpu, share in enumerate(shares)}
            figures[f"{name}.idle_share"] = sum(shares) / len(shares)
    figures |= {f"peak_gib.{gpu}": peak for gpu, peak in enumerate(found.samples.peaks_gib())}
    return figures


def _losses(tenant: TenantFigures) -> list[str]:
    """Return a sentence for each thing that a tenant lost: tokens, processes, or all of its steps."""
    if not tenant.records:
        return [f"{tenant.name}: no step was finished"]
    last = tenant.records[-1]
    return [
        f"{tenant.name}: {key} is {last[key]:g}, expected 0"
        for key in ("pool/lost_tokens", "rollout/actors_replaced", "run/restarts")
        if last.get(key)
    ]


def _growth(figures: Mapping[str, float]) -> list[str]:
    """Return a sentence for each kind of process that held more and more memory while it slept."""
    return [
        f"pool/{name} grew by {figures[f'{name}_growth']:.3f} GiB while both were at work, expected at most "
        f"{MOST_GROWTH_GIB}"
        for name in ("engine_gib_asleep", "trainer_gib_offloaded")
        if figures.get(f"{name}_growth", 0.0) > MOST_GROWTH_GIB
    ]


if __name__ == "__main__":
    sys.exit(main())
