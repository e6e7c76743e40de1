"""The command `headrace` in full: what the trainers' command line has, and `bench`, which stands above them.

Heavy packages are imported by the commands that need them, once they need them.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import cli
from ..trainers.errors import UserError

_EPILOG = """examples:
  headrace bench transfer --quick
  headrace bench transfer --stores shm simple --workloads rl-1024 --pattern put get shuffled
  headrace bench plan --out runs/plan
  headrace bench step --quick
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, as `trainers.cli.main`."""
    return cli.main(argv, add_commands=_add_bench)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure the data plane and the modes on this machine",
        description="Measure on this machine; tables, results.jsonl, summary.json, Markdown, plots.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True)

    transfer = kinds.add_parser("transfer", help="every store against every baseline, on the same rows")
    transfer.add_argument("--stores", nargs="+", metavar="STORE", help="local shm ray simple mooncake; default: all")
    transfer.add_argument("--workloads", nargs="+", metavar="NAME", help="rl-256, rl-1024, ...; default: all")
    transfer.add_argument(
        "--pattern", nargs="+", metavar="NAME", help="put get shuffled field write-back clear claim step; default: all"
    )
    transfer.add_argument("--quick", action="store_true", help="few workloads, few repeats: under five minutes")
    _out(transfer)
    transfer.set_defaults(command=_transfer)

    plan = kinds.add_parser("plan", help="the planner: time, memory and balance, up to a million rows")
    plan.add_argument("--quick", action="store_true", help="at most 16k rows")
    _out(plan)
    plan.set_defaults(command=_plan)

    replica = kinds.add_parser("replica", help="one read for a replica's ranks, against one by each and padded rows")
    replica.add_argument("--sizes", nargs="+", type=int, metavar="N", help="ranks of the replica; default: 2 4 8")
    replica.add_argument("--store", default="simple", choices=("shm", "ray", "simple", "mooncake"))
    replica.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: a GPU for each rank")
    _out(replica)
    replica.set_defaults(command=_replica)

    weights = kinds.add_parser("weights", help="a version of the weights from trainer to engines, by every transport")
    weights.add_argument("--transports", nargs="+", metavar="NAME", help="collective ipc store disk; default: all")
    weights.add_argument("--sizes", nargs="+", metavar="SIZE", help="0.1B 0.5B 1.7B 4B 8B; default: those up to 1.7B")
    weights.add_argument("--engines", nargs="+", type=int, metavar="N", help="engines; default: 1 2 4")
    weights.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: a GPU for each process")
    weights.add_argument("--quick", action="store_true", help="0.1B only, few repeats: under two minutes")
    _out(weights)
    weights.set_defaults(command=_weights)

    step = kinds.add_parser("step", help="steps of sync, streaming and async on a scripted engine, and simulated")
    step.add_argument("--quick", action="store_true", help="few and short steps: under a minute")
    _out(step)
    step.set_defaults(command=_step)

    directory = kinds.add_parser("directory", help="the directory: a million rows of ten fields")
    directory.add_argument("--rows", type=int, default=1 << 20, metavar="N", help="rows to fill it with")
    _out(directory)
    directory.set_defaults(command=_directory)


def _out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results; default: runs/bench-...")


# ---------------------------------------------------------------- commands


def _transfer(arguments: argparse.Namespace) -> int:
    from .transfer.benchmark import (
        PATTERNS,
        QUICK_STORES,
        QUICK_WORKLOADS,
        STORES,
        WORKLOADS,
        TransferOptions,
        run_transfer,
    )
    from .transfer.report import failures, tables, write_report

    options = TransferOptions(
        out=_folder(arguments, "transfer"),
        stores=_chosen(arguments.stores, QUICK_STORES if arguments.quick else STORES),
        workloads=_chosen(arguments.workloads, QUICK_WORKLOADS if arguments.quick else WORKLOADS),
        patterns=_chosen(arguments.pattern, PATTERNS),
        quick=arguments.quick,
    )
    console = Console()
    with console.status("starting") as status:
        report = run_transfer(options, lambda line: status.update(line))
    for table in tables(report):
        console.print(table)
    for name, why in report.absent.items():
        console.print(f"not measured: {name}: {why}", highlight=False)
    path = write_report(report, options, shlex.join(["headrace", *sys.argv[1:]]))
    failed = failures(report)
    for line in failed:
        console.print(f"failed: {line}", style="red", highlight=False)
    console.print(f"report: {path}", highlight=False)
    return cli.FAILED if failed else cli.DONE


def _plan(arguments: argparse.Namespace) -> int:
    from .plan import plan_table, run_plan

    out = _folder(arguments, "plan")
    console = Console()
    with console.status("planning") as status:
        results = run_plan(out, quick=arguments.quick, tell=lambda line: status.update(line))
    console.print(plan_table(results))
    console.print(f"results: {out}", highlight=False)
    return cli.DONE


def _replica(arguments: argparse.Namespace) -> int:
    from .replica import SIZES, ReplicaOptions, replica_table, run_replica

    sizes = _chosen_sizes(arguments.sizes, SIZES)
    options = ReplicaOptions(_folder(arguments, "replica"), sizes, arguments.store, device=arguments.device)
    console = Console()
    with console.status("starting") as status:
        results = run_replica(options, lambda line: status.update(line))
    console.print(replica_table(results))
    console.print(f"results: {options.out}", highlight=False)
    return cli.DONE


def _chosen_sizes(given: Sequence[int] | None, every: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(every if given is None else given))
    if min(sizes) < 2:
        raise UserError(f"--sizes: got {min(sizes)}, expected replicas of at least 2 ranks")
    return sizes


def _weights(arguments: argparse.Namespace) -> int:
    from .weights.benchmark import SIZES, TRANSPORT_KINDS, WeightOptions, run_weights, weights_table

    out = _folder(arguments, "weights")
    plain = WeightOptions.quick(out) if arguments.quick else WeightOptions(out)
    options = replace(
        plain,
        transports=_known("--transports", _chosen(arguments.transports, plain.transports), TRANSPORT_KINDS),
        sizes=_known("--sizes", _chosen(arguments.sizes, plain.sizes), SIZES),
        engines=tuple(arguments.engines or plain.engines),
        device=arguments.device,
    )
    console = Console()
    with console.status("starting") as status:
        results, skipped = run_weights(options, lambda line: status.update(line))
    console.print(weights_table(results))
    for label, why in skipped.items():
        console.print(f"not measured: {label}: {why}", highlight=False)
    console.print(f"results: {out}", highlight=False)
    return cli.DONE


def _known(option: str, given: tuple[str, ...], every: Sequence[str]) -> tuple[str, ...]:
    for name in given:
        if name not in every:
            raise UserError(f"{option}: got {name!r}, expected some of {', '.join(every)}")
    return given


def _step(arguments: argparse.Namespace) -> int:
    from .modes import StepOptions, run_steps
    from .modes_report import steps_table, write_report

    out = _folder(arguments, "step")
    options = StepOptions.quick(out) if arguments.quick else StepOptions(out)
    console = Console()
    with console.status("starting") as status:
        report = run_steps(options, lambda line: status.update(line))
    console.print(steps_table(report))
    path = write_report(report, options, shlex.join(["headrace", *sys.argv[1:]]))
    console.print(f"report: {path}", highlight=False)
    return cli.DONE


def _directory(arguments: argparse.Namespace) -> int:
    from .directory import directory_table, run_directory

    if arguments.rows < 1:
        raise UserError(f"--rows: got {arguments.rows}, expected at least 1")
    out = _folder(arguments, "directory")
    console = Console()
    with console.status("filling the directory") as status:
        summary = run_directory(out, num_rows=arguments.rows, tell=lambda line: status.update(line))
    console.print(directory_table(summary))
    console.print(f"results: {out}", highlight=False)
    return cli.DONE


def _chosen(given: Iterable[str] | None, every: Iterable[str]) -> tuple[str, ...]:
    """What was asked for, separated by spaces or commas, each once; everything when nothing was."""
    names = every if given is None else [name for item in given for name in item.split(",") if name]
    return tuple(dict.fromkeys(names))


def _folder(arguments: argparse.Namespace, what: str) -> Path:
    """Where the results go. Raises UserError when that is not a folder."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = arguments.out or Path("runs") / f"bench-{what}-{now}"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file, expected a folder or a new name")
    return folder


if __name__ == "__main__":
    sys.exit(main())
