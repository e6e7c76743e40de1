"""`python tools/measure/gpu.py --work NAME` measures parts of Headrace on GPUs, for those who change these parts.

    engine-logprobs   an engine without log-probs, with vLLM's own, and with Headrace's
    engine-routes     an engine that records the routes of experts beside one that does not
    switch-2g         what a switch of roles costs each side of a GPU that both roles share
    pool-0.6b -2g     two made-up runs on a pool of two GPUs, and one that has both GPUs to itself

The works engine-logprobs-tiny, engine-routes-tiny and pool-tiny also run without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.bench.gpu.work_report import Progress, WorkReport
from headrace.cli.arguments import Parser, chosen, known, results_folder
from headrace.cli.bench import measured
from headrace.cli.command import ended
from headrace.tools.measure.works import ENGINE_WORKS, POOL_WORKS, ROUTE_WORKS, WORKS
from headrace.trainers.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a work and return the exit code, as `headrace` does."""
    started = time.monotonic()
    parser = Parser("tools/measure/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., object] = parser.add_argument
    add("--work", required=True, metavar="NAME", help=" ".join(WORKS))
    add("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    add("--layout", nargs="+", metavar="NAME", help="switch-*: colocated-N; default: colocated-1")
    add("--backend", default="fsdp", choices=("fsdp", "megatron"), help="train backend; default: fsdp")
    add("--steps", type=int, metavar="N", help="pool-*: steps of each run; engine-*: rounds; default: the work's own")
    add("--prompts", type=int, metavar="N", help="pool-*: prompts of a step; default: 8")
    add("--layers", type=int, metavar="N", help="engine-*: number of layers of the model")
    add("--model", type=Path, metavar="DIR", help="model folder to use again; it is made if it is not there")
    add("--limit-s", type=float, default=900.0, metavar="S", help="seconds that each run may take; default: 900")
    add("overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a key of the runs' config")
    arguments = parser.parse_args(argv)
    return ended(lambda: _measure(arguments, Progress(lambda line: print(line, flush=True), started)))


def _measure(arguments: argparse.Namespace, tell: Progress) -> int:
    [work] = known("--work", (arguments.work,), WORKS)
    for option, number in (("--steps", arguments.steps), ("--prompts", arguments.prompts)):
        if number is not None and number < 1:
            raise UserError(f"{option}: got {number}, expected at least 1")
    report = WorkReport(work, results_folder(arguments, "gpu", new=True), tell)
    run = _engine if work in ENGINE_WORKS else _pool if work in POOL_WORKS else _switch
    return measured(report, lambda: run(arguments, report))


def _engine(arguments: argparse.Namespace, report: WorkReport) -> None:
    from headrace.tools.measure.engine_load import EngineOptions
    from headrace.tools.measure.engine_logprobs import run_engine_logprobs
    from headrace.tools.measure.engine_routes import run_engine_routes

    options = EngineOptions(
        report.out, report.work, pairs=arguments.steps or 5, layers=arguments.layers, model=arguments.model,
        overrides=tuple(arguments.overrides),
    )  # fmt: skip
    (run_engine_routes if report.work in ROUTE_WORKS else run_engine_logprobs)(options, report)


def _pool(arguments: argparse.Namespace, report: WorkReport) -> None:
    from headrace.tools.measure.pool import PoolOptions, run_pool

    options = PoolOptions(
        report.out, report.work, arguments.backend, steps=arguments.steps, prompts=arguments.prompts,
        model=arguments.model, limit_s=arguments.limit_s, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    run_pool(options, report)


def _switch(arguments: argparse.Namespace, report: WorkReport) -> None:
    from headrace.tools.measure.switch import SwitchOptions, run_switch

    if arguments.overrides:
        raise UserError(f"{arguments.overrides[0]}: no run is made for --work {report.work}, expected no overrides")
    layouts = chosen(arguments.layout, ("colocated-1",))
    run_switch(SwitchOptions(report.out, report.work, arguments.backend, layouts=layouts), report)


if __name__ == "__main__":
    sys.exit(main())
