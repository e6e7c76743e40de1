"""The command line up to this floor: train, simulate, replay, doctor, report. Floors above add theirs.

Exit codes: 0 done, 1 failed, 2 the user's mistake (one sentence each, no traceback), 130 interrupted.
Heavy packages (torch, ray, transformers, matplotlib) are imported by the commands that need them, once they need them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from . import __version__
from .trainers.errors import ConfigError, UserError

if TYPE_CHECKING:
    from .trainers.config.config import Config

DONE, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

_EPILOG = """examples:
  headrace train examples/quickstart.yaml
  headrace train my.yaml trainer.lr=1e-4 dataplane.store.kind=ray run.dir=runs/first
  headrace train my.yaml --dry-run
"""


def main(argv: Sequence[str] | None = None, add_commands: Callable[[Any], None] | None = None) -> int:
    """Run one command; returns the exit code. `argv` defaults to the process's arguments.

    add_commands: given argparse's subparsers, adds further commands, each with a `command` default of its own.
    """
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv, add_commands)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after a mistake
        return stop.code if isinstance(stop.code, int) else MISTAKE
    try:
        return arguments.command(arguments)
    except ConfigError as error:
        return _mistake(error.problems)
    except UserError as error:
        return _mistake([str(error)])
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _failure(error)


# ---------------------------------------------------------------- commands


def _train(arguments: argparse.Namespace) -> int:
    from .trainers.config.config import resolved_yaml, with_run_dir
    from .trainers.config.load import load_config
    from .trainers.simulation.config import simulation_section

    config = load_config(arguments.config, arguments.overrides, of_old_run=arguments.resume)
    simulation_section(config)  # a run reads none of it, but a mistake there is told at once
    if arguments.resume and config.run.dir is None:
        raise UserError("--resume: run.dir is not set, expected the folder of the run to go on with")
    config = with_run_dir(config)
    if arguments.dry_run:
        from .trainers.run.dry_run import describe

        print(resolved_yaml(config))
        print(describe(config))
        return DONE
    from .trainers.run.launch import run_training

    _stop_on_sigterm()
    try:
        run_training(config, resume=arguments.resume)
    except UserError:
        raise  # it may be about the folder, and what is in there then is another run's
    except BaseException:
        _leave_report(config)
        raise
    return DONE


def _leave_report(config: Config) -> None:
    """Report what there is of a run that did not finish. A report that cannot be built is told, and hides nothing."""
    from .trainers.observe.report import write_report
    from .trainers.observe.run_folder import has_figures

    folder = config.run.dir
    if folder is None or not has_figures(folder):
        return
    try:
        print(f"report: {write_report(folder)}")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        print(f"headrace: report.html could not be built ({why}); try `headrace report {folder}`", file=sys.stderr)


def _doctor(_: argparse.Namespace) -> int:
    from .trainers.run.doctor import run_doctor

    return run_doctor(Console())


def _simulate(arguments: argparse.Namespace) -> int:
    from .trainers.config.load import load_config
    from .trainers.simulation.config import simulation_section
    from .trainers.simulation.report import SimulateOptions, run_simulation, simulation_table

    config = load_config(arguments.config, arguments.overrides)
    options = SimulateOptions(simulation_section(config), from_run=arguments.from_run, gpus=tuple(arguments.gpus))
    console = Console()
    with console.status("simulating") as status:
        summary = run_simulation(config, options, arguments.out, lambda line: status.update(line))
    console.print(simulation_table(summary))
    console.print(f"results: {arguments.out}", highlight=False)
    return DONE


def _replay(arguments: argparse.Namespace) -> int:
    from .trainers.run.rollout_replay import replay_rollouts, write_replay

    console, out = Console(), arguments.out or arguments.run_dir / "replay.json"
    with console.status("loading the model") as status:
        report = replay_rollouts(
            arguments.run_dir, arguments.model, arguments.version, lambda line: status.update(line)
        )  # fmt: skip
    write_replay(report, out)
    alike = report.rows_alike == report.rows
    console.print(
        f"version {report.version} ({report.model}): {report.groups} groups, {report.tokens} tokens again in "
        f"{report.seconds:.1f} s\n"
        f"rows with the same tokens: {report.rows_alike} of {report.rows}; log-probs of same tokens differ by at most "
        f"{report.logprob_diff_max:.2g}\n"
        f"mean reward {report.reward:.4f}, recorded {report.reward_recorded:.4f}; of same rows it differs by at most "
        f"{report.reward_diff_max:.2g}\n"
        f"results: {out}",
        highlight=False,
    )
    return DONE if alike else FAILED


def _report(arguments: argparse.Namespace) -> int:
    from .trainers.observe.report import write_report

    print(write_report(arguments.run_dir))
    return DONE


# ---------------------------------------------------------------- arguments


def _parse(argv: Sequence[str], add_commands: Callable[[Any], None] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="RL post-training for language models, built around its data plane.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train from a YAML file", description="Train from a YAML file.")
    train.add_argument("config", metavar="CONFIG", help="YAML file")
    train.add_argument(
        "overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a key; the value is YAML"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print resolved config, placement, memory and plan, then exit"
    )
    train.add_argument("--resume", action="store_true", help="go on with the run in run.dir from its last checkpoint")
    train.set_defaults(command=_train)

    simulate = commands.add_parser(
        "simulate", help="step time and idle shares of sync, async and streaming, without running them"
    )
    simulate.add_argument("config", metavar="CONFIG", help="YAML file; its section `simulation` has speeds and sizes")
    simulate.add_argument("overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a key")
    simulate.add_argument(
        "--out", type=Path, default=Path("runs/simulation"), metavar="DIR", help="folder of the results"
    )
    simulate.add_argument(
        "--from", dest="from_run", type=Path, metavar="RUN_DIR", help="a sync run to take speeds from"
    )
    simulate.add_argument(
        "--gpus", nargs="+", type=int, default=[], metavar="N", help="numbers of GPUs to simulate, too"
    )
    simulate.set_defaults(command=_simulate)

    replay = commands.add_parser(
        "replay",
        help="roll out again what a run has recorded, without a trainer, and compare",
        description="Roll out again what a run with run.record=true has recorded, without a trainer, and compare: exit "
        "code 1 when tokens differ. (Its training without an engine: headrace train ... run.replay=RUN_DIR.)",
    )
    replay.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder")
    replay.add_argument(
        "--model", metavar="PATH", help="weights: a folder, a hub id, or `best`; default: what the run started from"
    )
    replay.add_argument(
        "--version", type=int, metavar="N", help="policy version that these are; its groups are rolled out"
    )
    replay.add_argument("--out", type=Path, metavar="FILE", help="results; default: RUN_DIR/replay.json")
    replay.set_defaults(command=_replay)

    doctor = commands.add_parser("doctor", help="what this machine can run, and how to fix what it cannot")
    doctor.set_defaults(command=_doctor)

    report = commands.add_parser("report", help="build report.html of a run folder again")
    report.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    report.set_defaults(command=_report)

    if add_commands is not None:
        add_commands(commands)

    arguments, rest = parser.parse_known_args(argv)
    # argparse takes the overrides behind an option for unknown arguments.
    if arguments.command in (_train, _simulate) and all("=" in word and not word.startswith("-") for word in rest):
        arguments.overrides = [*arguments.overrides, *rest]
    elif rest:
        parser.error(f"unknown argument {rest[0]!r} (overrides are written key.sub=value, without dashes)")
    return arguments


# ---------------------------------------------------------------- endings


def _mistake(sentences: Sequence[str]) -> int:
    for sentence in sentences:
        print(f"headrace: {sentence}", file=sys.stderr)
    return MISTAKE


def _failure(error: Exception) -> int:
    """One panel: what failed and where the traceback is; the traceback itself when no run folder keeps it."""
    notes = getattr(error, "__notes__", [])
    if not notes:
        traceback.print_exception(error)
    text = "\n".join([f"{type(error).__name__}: {error}", *notes])
    Console(stderr=True).print(Panel(Text(text), title="headrace failed", title_align="left", border_style="red"))
    return FAILED


def _stop_on_sigterm() -> None:
    """Have SIGTERM unwind like Ctrl-C, so that the run ends its processes and removes its files."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
