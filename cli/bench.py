"""The commands `headrace bench ...` that need no GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ..trainers.errors import UserError
from .arguments import bench_command, chosen, known, results_folder
from .gpu_bench import add_gpu_commands
from .outcome import DONE, FAILED
from .terminal import command_line, print_table, show_results, status_line

_BENCH_EPILOG = """examples:
  headrace bench transfer --quick
  headrace bench transfer --stores shm simple --workloads rl-1024 --pattern put get shuffled
  headrace bench step --quick
  headrace bench chaos --minutes 15 --seed 1
  headrace bench gpu --work grpo-0.6b --layout colocated-1 colocated-2 --baseline trl
  headrace bench gpu-train --backend megatron --gpus 2
"""


def add_bench_commands(commands: Any) -> None:
    """Add `headrace bench` with all its benchmarks."""
    bench = commands.add_parser(
        "bench",
        help="measure the data plane, weight sync, the modes, train steps and whole runs on this machine",
        description="Measure on this machine. Each benchmark prints a table and writes results.jsonl, summary.json and "
        "often a Markdown report with plots.",
        epilog=_BENCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True)

    transfer = bench_command(kinds, "transfer", _transfer, "every store against every baseline, on the same rows")
    transfer.add_argument(
        "--stores",
        nargs="+",
        metavar="STORE",
        help="local shm tcp ray simple mooncake; default: all; simple and mooncake open ports that ask for no key, and "
        "the benchmark sets dataplane.trusted_network for them",
    )
    transfer.add_argument("--workloads", nargs="+", metavar="NAME", help="rl-256, rl-1024, ...; default: all")
    transfer.add_argument(
        "--pattern",
        nargs="+",
        metavar="NAME",
        help="put get shuffled field write-back clear claim step padding; default: all",
    )
    transfer.add_argument("--quick", action="store_true", help="few workloads and repeats, under five minutes")

    plan = bench_command(kinds, "plan", _plan, "time, memory and balance of the planner, up to a million rows")
    plan.add_argument("--quick", action="store_true", help="at most 16k rows")

    replica = bench_command(
        kinds, "replica", _replica, "one read per replica and a broadcast, against a read by each rank and padded rows"
    )
    replica.add_argument("--sizes", nargs="+", type=int, metavar="N", help="ranks of a replica; default: 2 4 8")
    replica.add_argument("--store", default="simple", choices=("shm", "tcp", "ray", "simple", "mooncake"))
    replica.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per rank")

    weights = bench_command(kinds, "weights", _weights, "weight sync from a trainer to engines, over every transport")
    weights.add_argument("--transports", nargs="+", metavar="NAME", help="collective ipc store disk; default: all")
    weights.add_argument("--sizes", nargs="+", metavar="SIZE", help="0.1B 0.5B 1.7B 4B 8B; default: up to 1.7B")
    weights.add_argument("--engines", nargs="+", type=int, metavar="N", help="numbers of engines; default: 1 2 4")
    weights.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per process")
    weights.add_argument("--quick", action="store_true", help="0.1B only and few repeats, under two minutes")

    step = bench_command(kinds, "step", _step, "steps of sync, streaming and async on a scripted engine, and simulated")
    step.add_argument("--quick", action="store_true", help="few and short steps, under a minute")

    directory = bench_command(kinds, "directory", _directory, "memory and speed of the directory with a million rows")
    directory.add_argument("--rows", type=int, default=1 << 20, metavar="N", help="number of rows")

    chaos = bench_command(
        kinds, "chaos", _chaos, "real runs whose processes are stopped, killed and starved at random moments"
    )
    chaos.add_argument("--minutes", type=float, default=15.0, metavar="M", help="from 15 on there are bars to reach")
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the schedule of faults")
    chaos.add_argument(
        "--engine", default="scripted", choices=("scripted", "hf"), help="hf: the tiny model, trained on the CPU"
    )

    add_gpu_commands(kinds)


def _transfer(arguments: argparse.Namespace) -> int:
    from ..bench.transfer.benchmark import (
        PATTERNS,
        QUICK_STORES,
        QUICK_WORKLOADS,
        STORES,
        WORKLOADS,
        TransferOptions,
        run_transfer,
    )
    from ..bench.transfer.report import failures, tables, write_report

    options = TransferOptions(
        out=results_folder(arguments, "transfer"),
        stores=chosen(arguments.stores, QUICK_STORES if arguments.quick else STORES),
        workloads=chosen(arguments.workloads, QUICK_WORKLOADS if arguments.quick else WORKLOADS),
        patterns=chosen(arguments.pattern, PATTERNS),
        quick=arguments.quick,
    )
    with status_line("starting") as (console, tell):
        report = run_transfer(options, tell)
    for table in tables(report):
        print_table(console, table)
    for name, why in report.absent.items():
        console.print(f"not measured: {name}: {why}", highlight=False)
    path = write_report(report, options, command_line())
    failed = failures(report)
    for line in failed:
        console.print(f"failed: {line}", style="red", highlight=False)
    console.print(f"report: {path}", highlight=False)
    return FAILED if failed else DONE


def _plan(arguments: argparse.Namespace) -> int:
    from ..bench.plan import plan_table, run_plan

    out = results_folder(arguments, "plan")
    with status_line("planning") as (console, tell):
        results = run_plan(out, quick=arguments.quick, tell=tell)
    return show_results(console, plan_table(results), out)


def _replica(arguments: argparse.Namespace) -> int:
    from ..bench.replica import SIZES, ReplicaOptions, replica_table, run_replica

    sizes = tuple(dict.fromkeys(arguments.sizes or SIZES))
    if min(sizes) < 2:
        raise UserError(f"--sizes: got {min(sizes)}, expected replicas of at least 2 ranks")
    options = ReplicaOptions(results_folder(arguments, "replica"), sizes, arguments.store, device=arguments.device)
    with status_line("starting") as (console, tell):
        results = run_replica(options, tell)
    return show_results(console, replica_table(results), options.out)


def _weights(arguments: argparse.Namespace) -> int:
    from ..bench.weights.benchmark import SIZES, TRANSPORT_KINDS, WeightOptions, run_weights, weights_table

    out = results_folder(arguments, "weights")
    plain = WeightOptions.quick(out) if arguments.quick else WeightOptions(out)
    options = replace(
        plain,
        transports=known("--transports", chosen(arguments.transports, plain.transports), TRANSPORT_KINDS),
        sizes=known("--sizes", chosen(arguments.sizes, plain.sizes), SIZES),
        engines=tuple(arguments.engines or plain.engines),
        device=arguments.device,
    )
    with status_line("starting") as (console, tell):
        results, skipped = run_weights(options, tell)
    print_table(console, weights_table(results))
    for label, why in skipped.items():
        console.print(f"not measured: {label}: {why}", highlight=False)
    console.print(f"results: {out}", highlight=False)
    return DONE


def _step(arguments: argparse.Namespace) -> int:
    from ..bench.modes import StepOptions, run_steps
    from ..bench.modes_report import steps_table, write_report

    out = results_folder(arguments, "step")
    options = StepOptions.quick(out) if arguments.quick else StepOptions(out)
    with status_line("starting") as (console, tell):
        report = run_steps(options, tell)
    print_table(console, steps_table(report))
    console.print(f"report: {write_report(report, options, command_line())}", highlight=False)
    return DONE


def _chaos(arguments: argparse.Namespace) -> int:
    from ..bench.chaos.benchmark import ChaosOptions, run_chaos
    from ..bench.chaos.report import lines, pairs_table, rows_table, write_report

    if not arguments.minutes > 0:
        raise UserError(f"--minutes: got {arguments.minutes:g}, expected a number above 0")
    out = results_folder(arguments, "chaos", new=True)
    with status_line("starting") as (console, tell):
        report = run_chaos(ChaosOptions(out, arguments.minutes, arguments.seed, arguments.engine), tell)
    print_table(console, pairs_table(report))
    print_table(console, rows_table(report))
    for line in lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in report.complaints:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {write_report(report, out, command_line())}", highlight=False, soft_wrap=True)
    return FAILED if report.complaints else DONE


def _directory(arguments: argparse.Namespace) -> int:
    from ..bench.directory import directory_table, run_directory

    if arguments.rows < 1:
        raise UserError(f"--rows: got {arguments.rows}, expected at least 1")
    out = results_folder(arguments, "directory")
    with status_line("filling the directory") as (console, tell):
        summary = run_directory(out, num_rows=arguments.rows, tell=tell)
    return show_results(console, directory_table(summary), out)
