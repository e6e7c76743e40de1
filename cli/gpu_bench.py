"""The commands `headrace bench gpu`, `gpu-train` and `gpu-weights`, which measure on GPUs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..trainers.errors import UserError
from .arguments import bench_command, chosen, known, results_folder
from .outcome import stop_at_once
from .terminal import command_line, judged, print_table

if TYPE_CHECKING:
    from ..bench.gpu.figures import Figures
    from ..bench.gpu.progress import Progress


def add_gpu_commands(kinds: Any) -> None:
    """Add the benchmarks that measure on GPUs."""
    gpu = bench_command(kinds, "gpu", _gpu, "whole training runs on GPUs, every second accounted for, and parts")
    add: Callable[..., object] = gpu.add_argument
    add(
        "--work", required=True, metavar="NAME",
        help="whole runs: grpo-0.6b grpo-1.7b grpo-4b; train steps alone: train-0.6b train-1.7b train-4b train-moe; "
        "parts of an engine: engine-logprobs engine-routes; switches of roles: switch-2g; two runs on one pool of two "
        "GPUs: pool-0.6b pool-2g; without a GPU: grpo-tiny train-tiny train-tiny-moe engine-logprobs-tiny "
        "engine-routes-tiny pool-tiny",
    )  # fmt: skip
    add(
        "--layout", nargs="+", metavar="NAME",
        help="colocated separate tensor one-engine, each with -N for N GPUs; default: colocated on all GPUs",
    )  # fmt: skip
    add("--backend", default="fsdp", choices=("fsdp", "megatron"), help="train backend; default: fsdp")
    add("--steps", type=int, metavar="N", help="steps of each run, the first of which is not counted; default: 6")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each layout; default: 1")
    add("--prompts", type=int, metavar="N", help="pool-*: prompts of a step; default: 8")
    add("--weak", action="store_true", help="as many prompts per step for each GPU as there are for one")
    add(
        "--baseline", choices=("trl", "none"),
        help="trl: also run TRL twice on one GPU, where it is installed; none: train-* without plain torch beside it",
    )  # fmt: skip
    add("--layers", type=int, metavar="N", help="train-*, engine-*: number of layers of the model")
    add("--tokens", type=int, metavar="N", help="train-*: tokens of a microbatch; default: 16384")
    add("--micros", type=int, metavar="N", help="train-*: microbatches of a step; default: 2")
    add("--row-tokens", type=int, default=0, metavar="N", help="train-*: tokens of each row; default: random lengths")
    add(
        "--prompt-share", type=float, default=0.0, metavar="X",
        help="train-*: share of a row's tokens that have no loss; default: 0",
    )  # fmt: skip
    add("--model", type=Path, metavar="DIR", help="model folder to use again; it is made if it is not there")
    add("--limit-s", type=float, default=900.0, metavar="S", help="seconds that each run may take; default: 900")
    add("overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a key of the runs' config")
    # The older GPU benchmarks parse their own options, which are only known once torch is imported.
    for name, command, what in (
        ("gpu-train", _gpu_train, "check and time train steps of a backend on GPUs, without Ray"),
        ("gpu-weights", _gpu_weights, "check and time weight sync into a running vLLM on GPUs, without Ray"),
    ):
        kinds.add_parser(name, help=what, add_help=False).set_defaults(command=command, takes_any=True)


def _gpu(arguments: argparse.Namespace) -> int:
    started = time.monotonic()  # before torch is imported
    from ..bench.gpu.progress import Progress
    from ..bench.gpu.works import ENGINE_WORKS, POOL_WORKS, SWITCH_WORKS, TRAIN_WORKS, WORKS

    [work] = known("--work", (arguments.work,), WORKS)
    out = results_folder(arguments, "gpu", new=True)
    for option, number, least in (
        ("--steps", arguments.steps, 2),
        ("--repeat", arguments.repeat, 1),
        ("--prompts", arguments.prompts, 1),
    ):
        if number is not None and number < least:
            raise UserError(f"{option}: got {number}, expected at least {least}")
    tell = Progress(lambda line: print(line, flush=True), started)
    if work in TRAIN_WORKS:
        return _gpu_train_steps(arguments, tell, out)
    if work in ENGINE_WORKS:
        return _gpu_engine(arguments, tell, out)
    if work in POOL_WORKS:
        return _gpu_pool(arguments, tell, out)
    return (_gpu_switch if work in SWITCH_WORKS else _gpu_runs)(arguments, tell, out)


def _gpu_runs(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.benchmark import GpuOptions, GpuReport, run_gpu
    from ..bench.gpu.report import conditions_line, gpu_table, write_report

    options = GpuOptions(
        out, arguments.work, layouts=chosen(arguments.layout, ()), backend=arguments.backend, steps=arguments.steps,
        repeat=arguments.repeat, weak=arguments.weak,
        baseline=None if arguments.baseline == "none" else arguments.baseline, model=arguments.model,
        limit_s=arguments.limit_s, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    report = GpuReport(arguments.work, out, tell)

    def show(console: Console) -> Path:
        print_table(console, gpu_table(report))
        if report.conditions:
            console.print(conditions_line(report), highlight=False, markup=False, soft_wrap=True)
        return write_report(report, out, command_line())

    return _measured(report, lambda: run_gpu(options, report), show)


def _gpu_switch(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.figures import Figures
    from ..bench.gpu.switch.benchmark import SwitchOptions, run_switch

    if arguments.overrides:
        raise UserError(f"{arguments.overrides[0]}: no run is made for --work {arguments.work}, expected no overrides")
    options = SwitchOptions(out, arguments.work, arguments.backend, layouts=chosen(arguments.layout, ("colocated-1",)))
    report = Figures(arguments.work, out, tell)
    return _measured(report, lambda: run_switch(options, report))


def _gpu_pool(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.figures import Figures
    from ..bench.gpu.pool.benchmark import PoolOptions, run_pool

    options = PoolOptions(
        out, arguments.work, arguments.backend, steps=arguments.steps, prompts=arguments.prompts,
        model=arguments.model, limit_s=arguments.limit_s, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    report = Figures(arguments.work, out, tell)
    return _measured(report, lambda: run_pool(options, report))


def _gpu_train_steps(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.figures import Figures
    from ..bench.train_steps.benchmark import TrainOptions, run_train_steps

    options = TrainOptions(
        out, arguments.work, arguments.backend, steps=arguments.steps, layers=arguments.layers,
        tokens=arguments.tokens, micros=arguments.micros, row_tokens=arguments.row_tokens,
        prompt_share=arguments.prompt_share, plain=arguments.baseline != "none", model=arguments.model,
        overrides=tuple(arguments.overrides),
    )  # fmt: skip
    report = Figures(arguments.work, out, tell)
    return _measured(report, lambda: run_train_steps(options, report))


def _gpu_engine(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.engine.load import EngineOptions
    from ..bench.gpu.engine.logprobs import run_engine_logprobs
    from ..bench.gpu.engine.routes import run_engine_routes
    from ..bench.gpu.figures import Figures
    from ..bench.gpu.works import ROUTE_WORKS

    options = EngineOptions(
        out, arguments.work, pairs=arguments.steps or 5, layers=arguments.layers, model=arguments.model,
        overrides=tuple(arguments.overrides),
    )  # fmt: skip
    report = Figures(arguments.work, out, tell)
    run = run_engine_routes if arguments.work in ROUTE_WORKS else run_engine_logprobs
    return _measured(report, lambda: run(options, report))


def _measured(report: Figures, run: Callable[[], None], show: Callable[[Console], Path] | None = None) -> int:
    """Measure a work and show its figures, also those of a work that is interrupted or fails. Returns the exit code.

    show: function that prints the figures and returns where the results are; None means the report's own table.
    """
    console = Console()

    def table(console: Console) -> Path:
        print_table(console, report.table())
        return report.out

    def finish() -> int:
        results = (show or table)(console)
        for line in report.notes:
            console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)
        if report.interrupted:
            console.print(report.interrupted, style="red", highlight=False, markup=False, soft_wrap=True)
        return judged(console, report.complaints, results)

    with stop_at_once():
        try:
            run()
        except BaseException:
            if report.interrupted:
                finish()
            raise
    return finish()


def _gpu_train(arguments: argparse.Namespace) -> int:
    from ..bench.gpu_train import main as bench_main

    return bench_main(arguments.rest)


def _gpu_weights(arguments: argparse.Namespace) -> int:
    from ..bench.weights.gpu import main as bench_main

    return bench_main(arguments.rest)
