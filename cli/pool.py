"""The commands `headrace pool start|status|stop|report` for a pool of GPUs that several runs share."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainers.errors import UserError
from .arguments import path
from .outcome import DONE, FAILED, stop_on_sigterm
from .terminal import new_console, print_table

if TYPE_CHECKING:
    from ..trainers.pool.server.folder import ServedPool
    from ..trainers.pool.state.status import PoolStatus

FOLDER = Path("runs/pool")
STOP_S = 60.0
"""Seconds that a pool has to end after it was asked to stop."""
LOOK_S = 0.5
PERFETTO = "trace.json"
"""Name of the timeline file in a pool's folder."""


def add_pool_commands(commands: Any) -> None:
    """Add the command `pool` with its subcommands."""
    summary = "share GPUs among several runs"
    pool = commands.add_parser("pool", help=summary, description=f"{summary.capitalize()}: docs/scale/time-sharing.md.")
    pools = pool.add_subparsers(metavar="COMMAND", required=True)

    start = pools.add_parser(
        "start",
        help="start a pool, and keep it until it is stopped",
        description="Start a pool of GPUs, or start it again from its journal, and keep it until Ctrl-C or `headrace "
        "pool stop`. Runs join it with pool.address=ADDRESS.",
    )
    start.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: those of the Ray cluster)")
    start.add_argument("--name", default="pool", help="name of the pool in its Ray cluster (pool.name)")
    start.add_argument("--address", help="Ray cluster to join (default: start one)")
    start.add_argument("--trusted-network", action="store_true", help="join a Ray cluster that asks for no token, too")
    start.add_argument("--cpus", type=int, metavar="N", help="logical CPUs of the Ray cluster that is started")
    start.add_argument(
        "--engines",
        type=path,
        metavar="CONFIG",
        help="start the engines of this run's configuration, which runs with pool.engines=shared use together",
    )
    start.add_argument(
        "--prometheus-port", type=int, metavar="PORT", help="serve pool_* metrics on loopback (0: any free port)"
    )
    start.set_defaults(command=_start)

    status = pools.add_parser(
        "status",
        help="tell who holds which GPU, and who waits for what",
        description="Tell who holds which GPU, who waits for what and since when, and what frees it next.",
    )
    status.set_defaults(command=_status)

    stop = pools.add_parser("stop", help="stop a pool", description="Stop a pool that has no tenants.")
    stop.add_argument("--force", action="store_true", help="stop it although runs use it, which then end")
    stop.set_defaults(command=_stop)

    report = pools.add_parser(
        "report",
        help="show which tenant held which GPU, and what switches took",
        description="Print how long GPUs were held and waited for, and write trace.json, a timeline with one track per "
        "GPU for Perfetto, into the pool's folder.",
    )
    report.set_defaults(command=_report)
    for parser in (start, status, stop, report):
        parser.add_argument(
            "--dir", type=path, default=FOLDER, metavar="DIR", help="folder of the pool's journal and trace"
        )


def _start(arguments: argparse.Namespace) -> int:
    from ..trainers.config.load import load_config
    from ..trainers.pool.server.server import served_pool

    if arguments.gpus is not None and arguments.gpus < 1:
        raise UserError(f"--gpus: got {arguments.gpus}, expected a number from 1")
    port = arguments.prometheus_port
    if port is not None and not 0 <= port <= 65535:
        raise UserError(f"--prometheus-port: got {port}, expected a port from 0 to 65535")
    stop_on_sigterm()
    engines = None
    if arguments.engines is not None:
        from ..trainers.pool.tenant.shared_engines import SharedEngines

        engines = SharedEngines(arguments.name, arguments.dir, load_config(arguments.engines))
        engines.check()
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(
            served_pool(
                arguments.dir,
                name=arguments.name,
                num_gpus=arguments.gpus,
                address=arguments.address,
                num_cpus=arguments.cpus,
                prometheus_port=port,
                trusted_network=arguments.trusted_network,
            )
        )
        if engines is not None:
            gpus = stack.enter_context(engines.running())
            print(
                f"{len(gpus)} engine(s) of {engines.config.model.path} on GPU(s) {', '.join(map(str, sum(gpus, ())))}, "
                f"for up to {engines.config.rollout.max_adapters} runs with pool.engines=shared",
                flush=True,
            )
        print(
            f"pool {served.name} of {served.num_gpus} GPU(s); a run joins it with\n"
            f"  RAY_AUTH_MODE={served.auth_mode} headrace train CONFIG pool.address={served.address}",
            flush=True,
        )
        if port is not None:
            print(f"metrics for Prometheus: {(arguments.dir / 'prometheus.txt').read_text().strip()}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C and SIGTERM both stop a pool.
            while True:
                time.sleep(LOOK_S)
    print(f"pool {served.name} has stopped", flush=True)
    return DONE


def _asked(served: ServedPool) -> PoolStatus:
    """Return the status of a pool. This process joins the pool's Ray cluster with the pool's authentication mode,
    unless the environment sets another."""
    from ..trainers.pool.server.folder import AUTH_MODE

    os.environ.setdefault(AUTH_MODE, served.auth_mode)
    from ..trainers.pool.server.server import joined  # This import loads Ray, which then reads the environment.

    with joined(served) as client:
        return client.status()


def _status(arguments: argparse.Namespace) -> int:
    from ..trainers.pool.server.folder import find_pool

    status = _asked(find_pool(arguments.dir))
    # This import loads Ray, so it follows `_asked`, which sets the environment.
    from ..trainers.pool.server.server import status_lines

    print("\n".join(status_lines(status)))
    return DONE


def _stop(arguments: argparse.Namespace) -> int:
    from ..dataplane.owned_folder import pid_space
    from ..trainers.pool.server.folder import find_pool
    from ..trainers.supervision.cleanup import wait_until_ended

    served = find_pool(arguments.dir)
    tenants = [] if arguments.force else [one.name for one in _asked(served).tenants if one.driver != served.pid]
    if tenants:
        raise UserError(f"pool: the pool has the tenants {', '.join(tenants)}, expected none; --force stops it anyway")
    if served.space != pid_space():
        raise UserError(f"pool: the pool (pid {served.pid}) is on another host or in another container; stop it there")
    find_pool(arguments.dir)  # This raises an error if the process has ended meanwhile.
    os.kill(served.pid, signal.SIGTERM)
    return DONE if wait_until_ended(lambda: [(served.pid, served.start)], STOP_S) else FAILED


def _report(arguments: argparse.Namespace) -> int:
    from ..trainers.pool.server.gpu_trace import pool_tables, pool_trace, read_events, write_perfetto
    from ..trainers.pool.state.status import TRACE

    trace, path = pool_trace(read_events(arguments.dir / TRACE)), arguments.dir / PERFETTO
    write_perfetto(trace, path)
    console = new_console()
    for table in pool_tables(trace):
        print_table(console, table)
    print(f"timeline for https://ui.perfetto.dev: {path}")
    return DONE
