"""The commands that show the results of runs: report, watch, samples, routes and compare."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from .arguments import known, path
from .outcome import DONE
from .terminal import new_console, print_table


def add_result_commands(commands: Any) -> None:
    """Add the commands that show the results in run folders."""
    report = commands.add_parser("report", help="build report.html of a run folder again")
    report.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    report.set_defaults(command=_report)

    summary = "serve the page of a run on this machine, and keep it up to date while the run goes on"
    watch = commands.add_parser("watch", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    watch.add_argument("run_dir", type=path, metavar="RUN_DIR", help="run folder")
    watch.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1; default: any free one")
    watch.add_argument("--open", action="store_true", help="open the page in a browser")
    watch.set_defaults(command=_watch)

    summary = "print what the policy wrote, from samples.jsonl of a run folder"
    samples = commands.add_parser("samples", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    samples.add_argument("run_dir", type=path, metavar="RUN_DIR", help="run folder")
    samples.add_argument(
        "--show",
        default="all",
        metavar="WHICH",
        help="all (the latest first), best, worst, mismatch, truncated, failed or untrained; default: all",
    )
    samples.add_argument("--set", metavar="NAME", help="train or validation; default: both")
    samples.add_argument("--step", type=int, metavar="N", help="only of this step")
    samples.add_argument("--search", default="", metavar="TEXT", help="only with this text in prompt or answer")
    samples.add_argument("--limit", type=int, default=5, metavar="N", help="largest number of episodes; default: 5")
    samples.add_argument("--json", action="store_true", help="one JSON object a line, with all there is")
    samples.set_defaults(command=_samples)

    summary = "print what a run measured of its routes and of the load of its experts, by step and by layer"
    routes = commands.add_parser("routes", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    routes.add_argument("run_dir", type=path, metavar="RUN_DIR", help="run folder")
    routes.add_argument("--last", type=int, metavar="N", help="only of the last N steps that measured any")
    routes.set_defaults(command=_routes)

    summary = "compare runs: curves over each other, figures, time and memory, and settings that differ"
    compare = commands.add_parser("compare", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    compare.add_argument("run_dirs", nargs="+", type=path, metavar="RUN_DIR", help="run folders")
    compare.add_argument(
        "--out", type=path, default=Path("runs/comparison.html"), metavar="FILE",
        help="page that is written; default: runs/comparison.html",
    )  # fmt: skip
    compare.set_defaults(command=_compare)


def _report(arguments: argparse.Namespace) -> int:
    from ..trainers.observe.pages.report import write_report

    print(write_report(arguments.run_dir))
    return DONE


def _watch(arguments: argparse.Namespace) -> int:
    import webbrowser

    from ..trainers.observe.pages.watch import WatchServer

    with WatchServer(arguments.run_dir, arguments.port) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"{arguments.run_dir} is shown at {server.address} (Ctrl-C ends this)", flush=True)
        if arguments.open:
            webbrowser.open(server.address)
        server.serve_forever()
    return DONE


def _samples(arguments: argparse.Namespace) -> int:
    from ..trainers.observe.samples import SHOWS, Choice, show_samples

    [show] = known("--show", (arguments.show,), list(SHOWS))
    choice = Choice(show, arguments.set, arguments.step, arguments.search, arguments.limit)
    show_samples(arguments.run_dir, choice, new_console(), as_json=arguments.json)
    return DONE


def _routes(arguments: argparse.Namespace) -> int:
    from ..trainers.observe.route_tables import route_tables

    console = new_console()
    for table in route_tables(arguments.run_dir, last=arguments.last):
        print_table(console, table)
    return DONE


def _compare(arguments: argparse.Namespace) -> int:
    from ..trainers.observe.pages.compare import read_runs, tables, write_comparison

    console = new_console()
    runs = read_runs(arguments.run_dirs)
    for table in tables(runs):
        print_table(console, table)
    print(write_comparison(runs, arguments.out))
    return DONE
