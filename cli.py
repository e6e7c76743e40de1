"""The command `headrace`: train, eval, recipe, simulate, replay, doctor, report, samples, compare and bench.

Exit codes: 0 success, 1 failure, 2 user error (each error reported in one sentence, without a traceback), 130
interrupted (Ctrl-C), 143 terminated (SIGTERM). Heavy packages (torch, ray, transformers, matplotlib) are imported only
by the commands that need them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .codecs.imports import MissingExtra
from .trainers.errors import ConfigError, UserError
from .version import __version__

if TYPE_CHECKING:
    from .trainers.config.config import Config

DONE, FAILED, MISTAKE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143

_EPILOG = """examples:
  headrace doctor
  headrace doctor --model my-moe rollout.engine=vllm
  headrace train examples/quickstart.yaml
  headrace train my.yaml trainer.lr=1e-4 dataplane.store.kind=ray run.dir=runs/first
  headrace train my.yaml --dry-run
  headrace bench transfer --quick

`headrace COMMAND --help` shows the arguments of a command. Documentation: docs/index.md.
"""

_BENCH_EPILOG = """examples:
  headrace bench transfer --quick
  headrace bench transfer --stores shm simple --workloads rl-1024 --pattern put get shuffled
  headrace bench step --quick
  headrace bench chaos --minutes 15 --seed 1
  headrace bench gpu --work grpo-0.6b --layout colocated-1 colocated-2 --baseline trl
  headrace bench gpu-train --backend megatron --gpus 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` defaults to the process's arguments."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 after a mistake
        return stop.code if isinstance(stop.code, int) else MISTAKE
    try:
        return arguments.command(arguments)
    except ConfigError as error:
        return _mistake(error.problems)
    except (UserError, MissingExtra) as error:
        return _mistake([str(error)])
    except _Terminated:
        print("headrace: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("headrace: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _failure(error)


# ---------------------------------------------------------------- runs


def _train(arguments: argparse.Namespace) -> int:
    from .trainers.config.config import resolved_yaml, with_run_dir
    from .trainers.config.load import load_config
    from .trainers.simulation.config import simulation_section

    _import_from_here()
    config = load_config(arguments.config, arguments.overrides, of_old_run=arguments.resume)
    simulation_section(config)  # a run reads none of it, but a mistake there is told at once
    if arguments.resume and config.run.dir is None:
        raise UserError("--resume: run.dir is not set, expected the folder of the run to continue")
    config = with_run_dir(config)
    if arguments.machine is not None and not arguments.dry_run:
        raise UserError("--machine: got a machine without --dry-run, expected both, because a run takes what is there")
    if arguments.dry_run:
        from .actors.memory import assume_machine
        from .trainers.run.dry_run import describe
        from .trainers.run.preflight import check_start

        with assume_machine(arguments.machine):
            left = check_start(config, resume=arguments.resume)
            print(resolved_yaml(config))
            print(describe(config))
        if arguments.machine is not None:
            left = [*left, "host memory, and Ray's cluster, which --machine stands for"]
        for line in left:
            print(f"not checked: {line}")
        return DONE
    _stop_on_sigterm()
    from .trainers.run.early_ray import train_early

    try:
        train_early(config, resume=arguments.resume)
    except UserError:
        raise  # the mistake may be about the folder, and then what is in the folder belongs to another run
    except BaseException:
        _leave_report(config)
        raise
    return DONE


def _leave_report(config: Config) -> None:
    """Write the report of a run that did not finish. If the report cannot be built, print the reason instead of raising
    an error, so that the error of the run itself stays visible."""
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


def _simulate(arguments: argparse.Namespace) -> int:
    from .trainers.config.load import load_config
    from .trainers.simulation.config import simulation_section
    from .trainers.simulation.report import SimulateOptions, run_simulation, simulation_table

    config = load_config(arguments.config, arguments.overrides)
    options = SimulateOptions(simulation_section(config), from_run=arguments.from_run, gpus=tuple(arguments.gpus))
    with _status("simulating") as (console, tell):
        summary = run_simulation(config, options, arguments.out, tell)
    return _show(console, simulation_table(summary), arguments.out)


def _replay(arguments: argparse.Namespace) -> int:
    from .trainers.run.rollout_replay import replay_rollouts, write_replay

    _import_from_here()
    folder: Path = arguments.run_dir
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: no config.yaml there, expected a run folder")
    out = arguments.out or folder / "replay.json"
    with _status("loading the model") as (console, tell):
        report = replay_rollouts(folder, arguments.model, arguments.version, tell)
    write_replay(report, out)
    console.print(
        f"version {report.version} ({report.model}): {report.groups} groups with {report.tokens} tokens were generated "
        f"again in {report.seconds:.1f} s\n"
        f"rows with the same tokens: {report.rows_alike} of {report.rows}; log-probs of equal tokens differ by at most "
        f"{report.logprob_diff_max:.2g}\n"
        f"mean reward {report.reward:.4f}, recorded {report.reward_recorded:.4f}; rewards of equal rows differ by at "
        f"most {report.reward_diff_max:.2g}\n"
        f"results: {out}",
        highlight=False,
    )
    return DONE if report.rows_alike == report.rows else FAILED


def _eval(arguments: argparse.Namespace) -> int:
    from .trainers.config.load import load_config
    from .trainers.run.evaluate import evaluate_model, write_results

    _import_from_here()
    config = load_config(arguments.config, arguments.overrides)
    with _status("starting") as (console, tell):
        results = evaluate_model(config, arguments.model, _chosen(arguments.set, ()), tell)
    table = Table(title=f"Evaluation of {results[0].model}", title_justify="left")
    for column in ("set", "metric", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for result in results:
        for index, (key, value) in enumerate(result.metrics.items()):
            table.add_row(result.name if not index else "", key, f"{value:.4f}")
    _print_table(console, table)
    for result in results:
        line = f"{result.name}: {result.rows} samples of {result.source} in {result.seconds:.1f} s"
        if result.failed:
            line += f"; {result.failed} failed, the first one: {result.first_error}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    write_results(results, arguments.out)
    console.print(f"results: {arguments.out}", highlight=False, soft_wrap=True)
    return FAILED if any(result.failed for result in results) else DONE


def _recipe(arguments: argparse.Namespace) -> int:
    from .trainers.recipes.gallery import find_recipe, recipes
    from .trainers.recipes.offline import write_offline

    if arguments.name is None:
        for name, recipe in recipes().items():
            print(f"{name:<20} {recipe.file.summary} ({recipe.file.hardware})")
        return DONE
    recipe = find_recipe(arguments.name)
    if not arguments.offline and not arguments.small:
        print(
            f"{recipe.name}: {recipe.file.summary}\nhardware: {recipe.file.hardware}\npage: {recipe.folder}/README.md"
        )
        print(f"command: headrace train {recipe.config}")
        return DONE
    out = arguments.out or Path(f"recipe-{recipe.name}")
    for line in write_offline(recipe, out, small=arguments.small):
        print(line)
    machine = f" --machine {recipe.file.machine}" if recipe.file.machine else ""
    print(f"command: headrace train {out}/config.yaml" + ("" if arguments.small else f" --dry-run{machine}"))
    return DONE


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        if arguments.overrides:
            raise UserError(f"{arguments.overrides[0]}: keys are for --model, which is not given")
        from .trainers.run.doctor import run_doctor

        return run_doctor(Console())
    from .trainers.config.load import load_config
    from .trainers.run.trust_probe import probe_trust, show_trust

    # Without a file all keys but these have their defaults.
    config = load_config(os.devnull, [f"model.path={json.dumps(arguments.model)}", *arguments.overrides])
    with _status("loading the model") as (console, tell):
        report = probe_trust(config, tell)
    show_trust(console, arguments.model, report)
    return DONE if report.sound else FAILED


def _report(arguments: argparse.Namespace) -> int:
    from .trainers.observe.report import write_report

    print(write_report(arguments.run_dir))
    return DONE


def _samples(arguments: argparse.Namespace) -> int:
    from .trainers.observe.samples import SHOWS, Choice, show_samples

    [show] = _known("--show", (arguments.show,), list(SHOWS))
    choice = Choice(show, arguments.set, arguments.step, arguments.search, arguments.limit)
    show_samples(arguments.run_dir, choice, Console(), as_json=arguments.json)
    return DONE


def _compare(arguments: argparse.Namespace) -> int:
    from .trainers.observe.compare import read_runs, tables, write_comparison

    console = Console()
    runs = read_runs(arguments.run_dirs)
    for table in tables(runs):
        _print_table(console, table)
    print(write_comparison(runs, arguments.out))
    return DONE


# ---------------------------------------------------------------- benchmarks


def _transfer(arguments: argparse.Namespace) -> int:
    from .bench.transfer.benchmark import (
        PATTERNS,
        QUICK_STORES,
        QUICK_WORKLOADS,
        STORES,
        WORKLOADS,
        TransferOptions,
        run_transfer,
    )
    from .bench.transfer.report import failures, tables, write_report

    options = TransferOptions(
        out=_folder(arguments, "transfer"),
        stores=_chosen(arguments.stores, QUICK_STORES if arguments.quick else STORES),
        workloads=_chosen(arguments.workloads, QUICK_WORKLOADS if arguments.quick else WORKLOADS),
        patterns=_chosen(arguments.pattern, PATTERNS),
        quick=arguments.quick,
    )
    with _status("starting") as (console, tell):
        report = run_transfer(options, tell)
    for table in tables(report):
        _print_table(console, table)
    for name, why in report.absent.items():
        console.print(f"not measured: {name}: {why}", highlight=False)
    path = write_report(report, options, _command_line())
    failed = failures(report)
    for line in failed:
        console.print(f"failed: {line}", style="red", highlight=False)
    console.print(f"report: {path}", highlight=False)
    return FAILED if failed else DONE


def _plan(arguments: argparse.Namespace) -> int:
    from .bench.plan import plan_table, run_plan

    out = _folder(arguments, "plan")
    with _status("planning") as (console, tell):
        results = run_plan(out, quick=arguments.quick, tell=tell)
    return _show(console, plan_table(results), out)


def _replica(arguments: argparse.Namespace) -> int:
    from .bench.replica import SIZES, ReplicaOptions, replica_table, run_replica

    sizes = tuple(dict.fromkeys(arguments.sizes or SIZES))
    if min(sizes) < 2:
        raise UserError(f"--sizes: got {min(sizes)}, expected replicas of at least 2 ranks")
    options = ReplicaOptions(_folder(arguments, "replica"), sizes, arguments.store, device=arguments.device)
    with _status("starting") as (console, tell):
        results = run_replica(options, tell)
    return _show(console, replica_table(results), options.out)


def _weights(arguments: argparse.Namespace) -> int:
    from .bench.weights.benchmark import SIZES, TRANSPORT_KINDS, WeightOptions, run_weights, weights_table

    out = _folder(arguments, "weights")
    plain = WeightOptions.quick(out) if arguments.quick else WeightOptions(out)
    options = replace(
        plain,
        transports=_known("--transports", _chosen(arguments.transports, plain.transports), TRANSPORT_KINDS),
        sizes=_known("--sizes", _chosen(arguments.sizes, plain.sizes), SIZES),
        engines=tuple(arguments.engines or plain.engines),
        device=arguments.device,
    )
    with _status("starting") as (console, tell):
        results, skipped = run_weights(options, tell)
    _print_table(console, weights_table(results))
    for label, why in skipped.items():
        console.print(f"not measured: {label}: {why}", highlight=False)
    console.print(f"results: {out}", highlight=False)
    return DONE


def _step(arguments: argparse.Namespace) -> int:
    from .bench.modes import StepOptions, run_steps
    from .bench.modes_report import steps_table, write_report

    out = _folder(arguments, "step")
    options = StepOptions.quick(out) if arguments.quick else StepOptions(out)
    with _status("starting") as (console, tell):
        report = run_steps(options, tell)
    _print_table(console, steps_table(report))
    console.print(f"report: {write_report(report, options, _command_line())}", highlight=False)
    return DONE


def _chaos(arguments: argparse.Namespace) -> int:
    from .bench.chaos.benchmark import ChaosOptions, run_chaos
    from .bench.chaos.report import lines, pairs_table, rows_table, write_report

    if not arguments.minutes > 0:
        raise UserError(f"--minutes: got {arguments.minutes:g}, expected a number above 0")
    out = _folder(arguments, "chaos")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty, expected a new folder")
    with _status("starting") as (console, tell):
        report = run_chaos(ChaosOptions(out, arguments.minutes, arguments.seed, arguments.engine), tell)
    _print_table(console, pairs_table(report))
    _print_table(console, rows_table(report))
    for line in lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in report.complaints:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {write_report(report, out, _command_line())}", highlight=False, soft_wrap=True)
    return FAILED if report.complaints else DONE


def _directory(arguments: argparse.Namespace) -> int:
    from .bench.directory import directory_table, run_directory

    if arguments.rows < 1:
        raise UserError(f"--rows: got {arguments.rows}, expected at least 1")
    out = _folder(arguments, "directory")
    with _status("filling the directory") as (console, tell):
        summary = run_directory(out, num_rows=arguments.rows, tell=tell)
    return _show(console, directory_table(summary), out)


def _gpu(arguments: argparse.Namespace) -> int:
    from .bench.gpu.works import ENGINE_WORKS, SWITCH_WORKS, TRAIN_WORKS, WORKS

    [work] = _known("--work", (arguments.work,), WORKS)
    out = _folder(arguments, "gpu")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out: {out} is not empty, expected a new folder")
    for option, number, least in (("--steps", arguments.steps, 2), ("--repeat", arguments.repeat, 1)):
        if number is not None and number < least:
            raise UserError(f"{option}: got {number}, expected at least {least}")
    _stop_on_sigterm()
    if work in TRAIN_WORKS:
        return _gpu_train_steps(arguments, out)
    if work in ENGINE_WORKS:
        return _gpu_engine(arguments, out)
    return (_gpu_switch if work in SWITCH_WORKS else _gpu_runs)(arguments, out)


def _gpu_runs(arguments: argparse.Namespace, out: Path) -> int:
    from .bench.gpu.benchmark import GpuOptions, run_gpu
    from .bench.gpu.report import conditions_line, gpu_table, write_report

    options = GpuOptions(
        out, arguments.work, layouts=_chosen(arguments.layout, ()), backend=arguments.backend, steps=arguments.steps,
        repeat=arguments.repeat, weak=arguments.weak,
        baseline=None if arguments.baseline == "none" else arguments.baseline, model=arguments.model,
        limit_s=arguments.limit_s, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    with _status("starting") as (console, tell):
        report = run_gpu(options, tell)
    _print_table(console, gpu_table(report))
    console.print(conditions_line(report), highlight=False, markup=False, soft_wrap=True)
    for line in report.notes:
        console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)
    path = write_report(report, out, _command_line())
    return _judged(console, report.complaints, path)


def _gpu_switch(arguments: argparse.Namespace, out: Path) -> int:
    from .bench.gpu.switch import SwitchOptions, run_switch, switch_table

    if arguments.overrides:
        raise UserError(f"{arguments.overrides[0]}: no run is made for --work {arguments.work}, expected no overrides")
    options = SwitchOptions(out, arguments.work, arguments.backend, layouts=_chosen(arguments.layout, ("colocated-1",)))
    with _status("starting") as (console, tell):
        report = run_switch(options, tell)
    _print_table(console, switch_table(report))
    return _judged(console, report.complaints, out)


def _gpu_train_steps(arguments: argparse.Namespace, out: Path) -> int:
    from .bench.train_steps.benchmark import TrainOptions, run_train_steps, train_table

    options = TrainOptions(
        out, arguments.work, arguments.backend, steps=arguments.steps, layers=arguments.layers,
        tokens=arguments.tokens, micros=arguments.micros, row_tokens=arguments.row_tokens,
        prompt_share=arguments.prompt_share, plain=arguments.baseline != "none", model=arguments.model,
        overrides=tuple(arguments.overrides),
    )  # fmt: skip
    with _status("starting") as (console, tell):
        report = run_train_steps(options, tell)
    _print_table(console, train_table(report))
    for line in report.notes:
        console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)
    return _judged(console, report.complaints, out)


def _gpu_engine(arguments: argparse.Namespace, out: Path) -> int:
    from .bench.gpu.engine_logprobs import EngineOptions, engine_table, run_engine_logprobs

    options = EngineOptions(
        out, arguments.work, pairs=arguments.steps or 5, model=arguments.model, overrides=tuple(arguments.overrides)
    )
    with _status("starting") as (console, tell):
        report = run_engine_logprobs(options, tell)
    _print_table(console, engine_table(report))
    return _judged(console, report.complaints, out)


def _judged(console: Console, complaints: Sequence[str], results: Path) -> int:
    """Print what was wrong and where the results are. Returns the exit code."""
    for line in complaints:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    console.print(f"results: {results}", highlight=False, soft_wrap=True)
    return FAILED if complaints else DONE


def _gpu_train(arguments: argparse.Namespace) -> int:
    from .bench.gpu_train import main as bench_main

    return bench_main(arguments.rest)


def _gpu_weights(arguments: argparse.Namespace) -> int:
    from .bench.weights.gpu import main as bench_main

    return bench_main(arguments.rest)


@contextmanager
def _status(first: str) -> Iterator[tuple[Console, Callable[[str], None]]]:
    """Context manager that shows a status line on the console while its body runs. Yields the console, and a function
    that replaces the text of the line. first: initial text."""
    console = Console()
    with console.status(first) as status:
        yield console, lambda line: status.update(line)


def _print_table(console: Console, table: Table) -> None:
    """Print a table without truncating cells. If the output is not a terminal, the table takes as much width as it
    needs; on a terminal that is too narrow, each row is printed as several lines, one per cell."""
    needed = console.measure(table, options=console.options.update(width=10_000)).maximum
    if needed <= console.width:
        console.print(table)
    elif not console.is_terminal:
        Console(file=console.file, width=needed).print(table)
    else:
        console.print(table.title, style="bold", highlight=False)
        headers = [str(column.header) for column in table.columns]
        width = max(map(len, headers))
        for row in zip(*(column.cells for column in table.columns), strict=True):
            lines = [f"{header:<{width}}  {cell}" for header, cell in zip(headers, row, strict=True) if cell]
            console.print("\n".join(lines), "", sep="\n", markup=False, highlight=False, soft_wrap=True)


def _show(console: Console, table: Table, out: Path) -> int:
    _print_table(console, table)
    console.print(f"results: {out}", highlight=False)
    return DONE


def _command_line() -> str:
    return shlex.join(["headrace", *sys.argv[1:]])


def _known(option: str, given: tuple[str, ...], every: Sequence[str]) -> tuple[str, ...]:
    for name in given:
        if name not in every:
            raise UserError(f"{option}: got {name!r}, expected some of {', '.join(every)}")
    return given


def _chosen(given: Iterable[str] | None, every: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `given`, each of which may hold several separated by commas, without duplicates. If `given`
    is None, return all of `every`."""
    names = every if given is None else [name for item in given for name in item.split(",") if name]
    return tuple(dict.fromkeys(names))


def _folder(arguments: argparse.Namespace, what: str) -> Path:
    """Return the folder for a benchmark's results: `--out`, or else a new name in `runs`. Raises UserError if `--out`
    is a file."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = arguments.out or Path("runs") / f"bench-{what}-{now}"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file, expected a folder or a new name")
    return folder


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one sentence and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"headrace: {message} (`{self.prog} --help` shows what is expected)\n")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="headrace",
        description="RL post-training for language models, built around its data plane.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run_commands(commands)
    _add_bench_commands(commands)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(MISTAKE)
    arguments, rest = parser.parse_known_args(argv)
    # argparse treats overrides behind an option as unknown arguments. A malformed one is refused where all are read.
    if arguments.command in (_train, _simulate, _eval, _gpu):
        arguments.overrides = [*arguments.overrides, *(word for word in rest if not word.startswith("-"))]
        rest = [word for word in rest if word.startswith("-")]
    if arguments.command in (_gpu_train, _gpu_weights):
        arguments.rest = rest
    elif rest:
        overrides = "; overrides are written key.sub=value, without dashes" if hasattr(arguments, "overrides") else ""
        commands.choices[argv[0]].error(f"unknown argument {rest[0]!r}{overrides}")
    return arguments


def _add_run_commands(commands: Any) -> None:
    train = commands.add_parser("train", help="train from a YAML file", description="Train from a YAML file.")
    _config_and_overrides(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config, placement, memory and plan, and start nothing",
    )
    train.add_argument(
        "--machine",
        type=_machine,
        metavar="HOSTSxGPUSxGIB",
        help="with --dry-run: plan for this machine instead of the present one, such as 4x8x80",
    )
    train.add_argument("--resume", action="store_true", help="continue the run in run.dir from its last checkpoint")
    train.set_defaults(command=_train)

    summary = "predict step times and idle shares of sync, async and streaming"
    simulate = commands.add_parser(
        "simulate",
        help=summary,
        description=f"{summary.capitalize()} from the config's `simulation` section, or from the speeds of a run.",
    )
    _config_and_overrides(simulate)
    simulate.add_argument(
        "--out", type=Path, default=Path("runs/simulation"), metavar="DIR", help="folder for the results"
    )
    simulate.add_argument(
        "--from", dest="from_run", type=Path, metavar="RUN_DIR", help="folder of a sync run whose speeds are used"
    )
    simulate.add_argument(
        "--gpus", nargs="+", type=int, default=[], metavar="N", help="also simulate these numbers of GPUs"
    )
    simulate.set_defaults(command=_simulate)

    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model on the sets of a config, without a trainer",
        description="Evaluate a model on validation prompts and evaluation sets of a config, without a trainer. The "
        "exit code is 1 when a sample's reward or episode failed.",
    )
    _config_and_overrides(evaluate)
    evaluate.add_argument("--model", metavar="PATH", help="model folder or hub id; default: model.path of the config")
    evaluate.add_argument("--set", nargs="+", metavar="NAME", help="sets, `validation` among them; default: all")
    evaluate.add_argument(
        "--out", type=Path, default=Path("eval.json"), metavar="FILE", help="file for the results; default: eval.json"
    )
    evaluate.set_defaults(command=_eval)

    replay = commands.add_parser(
        "replay",
        help="generate a recorded run's rollouts again and compare them",
        description="Generate again what a run with run.record=true recorded, without a trainer, and compare. The exit "
        "code is 1 when tokens differ. (To train on the recorded rows instead: headrace train ... run.replay=RUN_DIR.)",
    )
    replay.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder")
    replay.add_argument(
        "--model", metavar="PATH", help="weights: a folder, a hub id, or `best`; default: the run's initial model"
    )
    replay.add_argument(
        "--version", type=int, metavar="N", help="policy version of these weights; its groups are generated again"
    )
    replay.add_argument("--out", type=Path, metavar="FILE", help="file for the results; default: RUN_DIR/replay.json")
    replay.set_defaults(command=_replay)

    recipe = commands.add_parser(
        "recipe",
        help="list the recipes of examples/, or make one work without a network",
        description="List the recipes of examples/, show one, or write a copy of it whose model and data sets are "
        "replaced by stand-ins that are made on the spot.",
    )
    recipe.add_argument("name", nargs="?", metavar="NAME", help="recipe; default: list all")
    recipe.add_argument(
        "--offline",
        action="store_true",
        help="write a copy that needs no network, for --dry-run, and say what is replaced",
    )
    recipe.add_argument(
        "--small", action="store_true", help="as --offline, with a tiny model and a short run that trains on a CPU"
    )
    recipe.add_argument("--out", type=Path, metavar="DIR", help="folder for the copy; default: recipe-NAME")
    recipe.set_defaults(command=_recipe)

    doctor = commands.add_parser("doctor", help="show what this machine can run, and how to fix what it cannot")
    doctor.add_argument(
        "--model", metavar="PATH", help="compare an engine with a train backend on 64 tokens of this folder or hub id"
    )
    doctor.add_argument(
        "overrides", metavar="key.sub=value", nargs="*", default=[], help="with --model: such as rollout.engine=vllm"
    )
    doctor.set_defaults(command=_doctor)

    report = commands.add_parser("report", help="build report.html of a run folder again")
    report.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    report.set_defaults(command=_report)

    summary = "print what the policy wrote, from samples.jsonl of a run folder"
    samples = commands.add_parser("samples", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    samples.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder")
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

    summary = "compare runs: curves over each other, figures, time and memory, and settings that differ"
    compare = commands.add_parser("compare", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    compare.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders")
    compare.add_argument(
        "--out", type=Path, default=Path("runs/comparison.html"), metavar="FILE",
        help="page that is written; default: runs/comparison.html",
    )  # fmt: skip
    compare.set_defaults(command=_compare)


def _machine(text: str) -> Any:
    """Return the machine that a text such as `4x8x80` describes: hosts, GPUs of each, and GiB of each GPU."""
    from .actors.memory import AssumedMachine

    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected HOSTSxGPUSxGIB, such as 4x8x80")
    hosts, gpus, gib = map(int, parts)
    return AssumedMachine(hosts, gpus, gib << 30)


def _config_and_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument(
        "overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a config key; the value is YAML"
    )


def _add_bench_commands(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure the data plane, weight sync, the modes, train steps and whole runs on this machine",
        description="Measure on this machine. Each benchmark prints a table and writes results.jsonl, summary.json and "
        "often a Markdown report with plots.",
        epilog=_BENCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True)

    transfer = _bench(kinds, "transfer", _transfer, "every store against every baseline, on the same rows")
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

    plan = _bench(kinds, "plan", _plan, "time, memory and balance of the planner, up to a million rows")
    plan.add_argument("--quick", action="store_true", help="at most 16k rows")

    replica = _bench(
        kinds, "replica", _replica, "one read per replica and a broadcast, against a read by each rank and padded rows"
    )
    replica.add_argument("--sizes", nargs="+", type=int, metavar="N", help="ranks of a replica; default: 2 4 8")
    replica.add_argument("--store", default="simple", choices=("shm", "tcp", "ray", "simple", "mooncake"))
    replica.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per rank")

    weights = _bench(kinds, "weights", _weights, "weight sync from a trainer to engines, over every transport")
    weights.add_argument("--transports", nargs="+", metavar="NAME", help="collective ipc store disk; default: all")
    weights.add_argument("--sizes", nargs="+", metavar="SIZE", help="0.1B 0.5B 1.7B 4B 8B; default: up to 1.7B")
    weights.add_argument("--engines", nargs="+", type=int, metavar="N", help="numbers of engines; default: 1 2 4")
    weights.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per process")
    weights.add_argument("--quick", action="store_true", help="0.1B only and few repeats, under two minutes")

    step = _bench(kinds, "step", _step, "steps of sync, streaming and async on a scripted engine, and simulated")
    step.add_argument("--quick", action="store_true", help="few and short steps, under a minute")

    directory = _bench(kinds, "directory", _directory, "memory and speed of the directory with a million rows")
    directory.add_argument("--rows", type=int, default=1 << 20, metavar="N", help="number of rows")

    chaos = _bench(
        kinds, "chaos", _chaos, "real runs whose processes are stopped, killed and starved at random moments"
    )
    chaos.add_argument("--minutes", type=float, default=15.0, metavar="M", help="from 15 on there are bars to reach")
    chaos.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the schedule of faults")
    chaos.add_argument(
        "--engine", default="scripted", choices=("scripted", "hf"), help="hf: the tiny model, trained on the CPU"
    )

    _add_gpu_command(kinds)
    # The older GPU benchmarks parse their own options, which are only known once torch is imported.
    for name, command, what in (
        ("gpu-train", _gpu_train, "check and time train steps of a backend on GPUs, without Ray"),
        ("gpu-weights", _gpu_weights, "check and time weight sync into a running vLLM on GPUs, without Ray"),
    ):
        kinds.add_parser(name, help=what, add_help=False).set_defaults(command=command)


def _add_gpu_command(kinds: Any) -> None:
    gpu = _bench(kinds, "gpu", _gpu, "whole training runs on GPUs, every second accounted for, and parts of them")
    add: Callable[..., object] = gpu.add_argument
    add(
        "--work", required=True, metavar="NAME",
        help="whole runs: grpo-0.6b grpo-1.7b grpo-4b; train steps alone: train-0.6b train-1.7b train-4b train-moe; "
        "log-probs of an engine: engine-logprobs; switches of roles: switch-2g; without a GPU: grpo-tiny train-tiny "
        "train-tiny-moe engine-logprobs-tiny",
    )  # fmt: skip
    add(
        "--layout", nargs="+", metavar="NAME",
        help="colocated separate tensor one-engine, each with -N for N GPUs; default: colocated on all GPUs",
    )  # fmt: skip
    add("--backend", default="fsdp", choices=("fsdp", "megatron"), help="train backend; default: fsdp")
    add("--steps", type=int, metavar="N", help="steps of each run, the first of which is not counted; default: 6")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each layout; default: 1")
    add("--weak", action="store_true", help="as many prompts a step for each GPU as there are for one")
    add(
        "--baseline", choices=("trl", "none"),
        help="trl: also run TRL twice on one GPU, where it is installed; none: train-* without plain torch beside it",
    )  # fmt: skip
    add("--layers", type=int, metavar="N", help="train-*: number of layers of the model")
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


def _bench(kinds: Any, name: str, command: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    parser.set_defaults(command=command)
    return parser


# ---------------------------------------------------------------- endings


def _mistake(sentences: Sequence[str]) -> int:
    for sentence in sentences:
        print(f"headrace: {sentence}", file=sys.stderr)
    return MISTAKE


def _failure(error: Exception) -> int:
    """Print a panel that says what failed, and below it where the traceback was saved, on a line of its own so that the
    path can be copied. Print the traceback itself if it was not saved in a run folder."""
    notes = getattr(error, "__notes__", [])
    if not notes:
        traceback.print_exception(error)
    console = Console(stderr=True)
    text = Text(f"{type(error).__name__}: {error}")
    console.print(Panel(text, title="headrace failed", title_align="left", border_style="red"))
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    return FAILED


class _Terminated(KeyboardInterrupt):
    """Raised when the process receives SIGTERM, the signal that schedulers and containers send to end a process."""


def _stop_on_sigterm() -> None:
    """Make SIGTERM raise an exception in the main thread, as Ctrl-C does, so that the run ends its processes and
    removes its files."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    raise _Terminated


def _import_from_here() -> None:
    """Add the working folder to the import path, so that rewards, tools and samplers defined there can be imported in
    this process as in the run's actors."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)


if __name__ == "__main__":
    sys.exit(main())
