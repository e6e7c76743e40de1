"""The commands that run something: train, sft, simulate, eval, replay and doctor."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ..trainers.errors import UserError
from .arguments import chosen, config_and_overrides, import_from_here, path
from .outcome import DONE, FAILED, stop_on_sigterm
from .terminal import new_console, print_table, show_results, status_line


def add_run_commands(commands: Any) -> None:
    """Add the commands that run something."""
    _add_train(commands, "train", "train from a YAML file", supervised=False)
    _add_train(commands, "sft", "train on a user's conversations, the files of section sft", supervised=True)
    _add_simulate(commands)
    _add_eval(commands)
    _add_replay(commands)
    _add_scale(commands)
    does = "show what this machine can run, and how to fix what it cannot"
    doctor = commands.add_parser("doctor", help=does, description=f"{does.capitalize()}.")
    doctor.add_argument(
        "--model",
        type=os.path.expanduser,
        metavar="PATH",
        help="say which meshes, engines and machines fit the model of this folder or hub id; with weights, compare "
        "an engine with a train backend on 64 tokens",
    )
    doctor.add_argument(
        "--machine",
        type=_machine,
        metavar="HOSTSxGPUSxGIB",
        help="with --model: plan its memory for this machine, such as 1x8x80, and load no weights",
    )
    doctor.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="compare all hosts of this Ray cluster, as the start of a run does, and measure the links between them",
    )
    doctor.add_argument(
        "overrides",
        metavar="[CONFIG] key.sub=value",
        nargs="*",
        default=[],
        help="with --model: keys, such as rollout.engine=vllm; with --cluster: the configuration of the run and keys",
    )
    doctor.add_argument(
        "--constraints", metavar="SET", help="print a set of tested versions, cpu or gpu, for `pip install -c`"
    )
    doctor.set_defaults(command=_doctor)


def _add_train(commands: Any, name: str, what: str, *, supervised: bool) -> None:
    """Add `headrace train`, or if `supervised` is True `headrace sft`."""
    train = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    config_and_overrides(train)
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print placement, memory, plan and the resolved config, and start nothing",
    )
    train.add_argument(
        "--machine",
        type=_machine,
        metavar="HOSTSxGPUSxGIB",
        help="with --dry-run: plan for this machine instead of the present one, such as 4x8x80",
    )
    train.add_argument("--resume", action="store_true", help="continue the run in run.dir from its last checkpoint")
    train.set_defaults(command=partial(_train, supervised=supervised))


def _add_simulate(commands: Any) -> None:
    summary = "predict step times and idle shares of sync, async and streaming, or how several runs share a pool"
    simulate = commands.add_parser(
        "simulate",
        help=summary,
        description=f"{summary.capitalize()}. A run's speeds are those of the config's `simulation` section or of "
        "another run; a file with the sections `pool` and `tenants` describes a pool.",
    )
    config_and_overrides(simulate)
    simulate.add_argument(
        "--out", type=path, default=Path("runs/simulation"), metavar="DIR", help="folder for the results"
    )
    simulate.add_argument(
        "--from", dest="from_run", type=path, metavar="RUN_DIR", help="folder of a sync run whose speeds are used"
    )
    simulate.add_argument(
        "--gpus", nargs="+", type=int, default=[], metavar="N", help="also simulate these numbers of GPUs"
    )
    simulate.set_defaults(command=_simulate)


def _add_eval(commands: Any) -> None:
    evaluate = commands.add_parser(
        "eval",
        help="evaluate a model on the sets of a config, without a trainer",
        description="Evaluate a model on validation prompts and evaluation sets of a config, without a trainer. The "
        "exit code is 1 when a sample's reward or episode failed.",
    )
    config_and_overrides(evaluate)
    evaluate.add_argument(
        "--model",
        type=os.path.expanduser,
        metavar="PATH",
        help="model folder or hub id; default: model.path of the config",
    )
    evaluate.add_argument(
        "--set",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="sets, `validation` among them; default: all",
    )
    evaluate.add_argument(
        "--out", type=path, default=Path("eval.json"), metavar="FILE", help="file for the results; default: eval.json"
    )
    evaluate.set_defaults(command=_eval)


def _add_replay(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="generate a recorded run's rollouts again and compare them",
        description="Generate again what a run with run.record=true recorded, without a trainer, and compare. The exit "
        "code is 1 when tokens differ. (To train on the recorded rows instead: headrace train ... run.replay=RUN_DIR.)",
    )
    replay.add_argument("run_dir", type=path, metavar="RUN_DIR", help="run folder")
    replay.add_argument(
        "--model",
        type=os.path.expanduser,
        metavar="PATH",
        help="weights: a folder, a hub id, or `best`; default: the run's initial model",
    )
    replay.add_argument(
        "--version", type=int, metavar="N", help="policy version of these weights; its groups are generated again"
    )
    replay.add_argument("--out", type=path, metavar="FILE", help="file for the results; default: RUN_DIR/replay.json")
    replay.set_defaults(command=_replay)


def _add_scale(commands: Any) -> None:
    summary = "change the number of engines of a run under way"
    scale = commands.add_parser(
        "scale",
        help=summary,
        description=f"{summary.capitalize()}, and wait until that is done. The exit code is 1 when the run refuses, "
        "and also when the time to wait is over, after which the run still carries the order out.",
    )
    scale.add_argument("run_dir", type=path, metavar="RUN_DIR", help="run folder")
    scale.add_argument("--engines", type=int, required=True, metavar="N", help="number of engines to reach")
    scale.add_argument("--wait", type=float, default=600.0, metavar="S", help="seconds to wait; default: 600")
    scale.set_defaults(command=_scale)


def _scale(arguments: argparse.Namespace) -> int:
    from ..trainers.elastic.scale_order import order_engines

    with status_line("waiting for the run") as (console, tell):
        answer = order_engines(arguments.run_dir, arguments.engines, arguments.wait, tell)
    for line in answer.engines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    ends = {"done": "", "refused": f"refused: {answer.why}", "under way": f"still under way: {answer.why}"}
    console.print(
        f"engines: {answer.before} before, {len(answer.engines)} now; {ends[answer.state]}".removesuffix("; "),
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    return DONE if answer.state == "done" else FAILED


def _train(arguments: argparse.Namespace, *, supervised: bool) -> int:
    from ..trainers.config.config import resolved_yaml
    from ..trainers.config.load import overridden_keys, read_sections
    from ..trainers.run.requested import requested_run

    import_from_here()
    config = requested_run(
        read_sections(arguments.config, arguments.overrides),
        overridden_keys(arguments.overrides),
        Path(arguments.config).parent,
        resume=arguments.resume,
        supervised=supervised,
    )
    if arguments.machine is not None and not arguments.dry_run:
        raise UserError(
            "--machine: got a machine without --dry-run, expected both, because a run uses this machine as it is"
        )
    if arguments.dry_run:
        from ..actors.process.memory import assume_machine
        from ..trainers.run.checks.dry_run import describe
        from ..trainers.run.checks.preflight import check_start

        with assume_machine(arguments.machine):
            read = check_start(config, resume=arguments.resume)
            print(describe(config, read.plan, [*read.ends, *read.notes]))
        of_machine = ["host memory, and Ray's cluster, which --machine stands for"] if arguments.machine else []
        for line in (*read.left, *of_machine):
            print(f"not checked: {line}")
        print(f"configuration\n{resolved_yaml(config)}")
        return DONE
    stop_on_sigterm()
    from ..trainers.run.early_ray import train_early

    try:
        train_early(config, resume=arguments.resume)
    except UserError:
        raise  # No report is written, because the folder can belong to another run.
    except BaseException:
        _leave_report(config.run.dir)
        raise
    return DONE


def _leave_report(folder: str | None) -> None:
    """Write the report of the unfinished run in `folder`. If the report cannot be built, print the reason
    instead of raising an error, so that the error of the run itself stays visible."""
    from ..trainers.observe.pages.report import write_report
    from ..trainers.observe.run_folder import has_figures

    if folder is None or not has_figures(folder):
        return
    try:
        print(f"report: {write_report(folder)}")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        print(f"headrace: report.html could not be built ({why}); try `headrace report {folder}`", file=sys.stderr)


def _simulate(arguments: argparse.Namespace) -> int:
    from ..trainers.config.load import load_config, read_sections
    from ..trainers.pool.simulation.config import is_pool_file
    from ..trainers.simulation.config import simulation_section
    from ..trainers.simulation.modes import SimulateOptions, run_simulation, simulation_tables

    if is_pool_file(sections := read_sections(arguments.config, arguments.overrides)):
        return _simulate_pool(arguments, sections)
    config = load_config(arguments.config, arguments.overrides)
    options = SimulateOptions(simulation_section(config), from_run=arguments.from_run, gpus=tuple(arguments.gpus))
    with status_line("simulating") as (console, tell):
        summary = run_simulation(config, options, arguments.out, tell)
    steps, shares = simulation_tables(summary)
    print_table(console, steps)
    return show_results(console, shares, arguments.out)


def _simulate_pool(arguments: argparse.Namespace, sections: dict[str, Any]) -> int:
    from ..trainers.pool.simulation.config import pool_file
    from ..trainers.pool.simulation.policies import pool_table, run_pool_simulation

    if arguments.from_run is not None or arguments.gpus:
        raise UserError(
            f"--from, --gpus: got one of them with {arguments.config}, the file of a pool; expected neither, because "
            "its sections `pool` and `tenants` give both"
        )
    file = pool_file(sections)
    with status_line("simulating") as (console, tell):
        summary = run_pool_simulation(file, arguments.out, tell)
    return show_results(console, pool_table(summary), arguments.out)


def _replay(arguments: argparse.Namespace) -> int:
    from ..trainers.run.rollout_replay import replay_rollouts, write_replay

    import_from_here()
    stop_on_sigterm()  # The engine of this process has processes of its own, which must end with it.
    folder: Path = arguments.run_dir
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: this folder has no config.yaml, expected a run folder")
    out = arguments.out or folder / "replay.json"
    with status_line("loading the model") as (console, tell):
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
    from rich.table import Table

    from ..trainers.config.load import load_config
    from ..trainers.run.evaluate import evaluate_model, write_results

    import_from_here()
    stop_on_sigterm()  # The engine of this process has processes of its own, which must end with it.
    given = arguments.set or []  # Overrides behind --set are among its names.
    overrides = [*arguments.overrides, *(name for name in given if "=" in name)]
    config = load_config(arguments.config, overrides)
    with status_line("starting") as (console, tell):
        names = [name for name in given if "=" not in name]
        results = evaluate_model(config, arguments.model, chosen(names or None, ()), tell)
    table = Table(title=f"Evaluation of {results[0].model}", title_justify="left")
    for column in ("set", "metric", "value"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for result in results:
        for index, (key, value) in enumerate(result.metrics.items()):
            table.add_row(result.name if not index else "", key, f"{value:.4f}")
    print_table(console, table)
    for result in results:
        line = f"{result.name}: {result.rows} samples of {result.source} in {result.seconds:.1f} s"
        if result.failed:
            line += f"; {result.failed} failed, the first one: {result.first_error}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    write_results(results, arguments.out)
    console.print(f"results: {arguments.out}", highlight=False, soft_wrap=True)
    return FAILED if any(result.failed for result in results) else DONE


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.constraints is not None:
        from ..trainers.run.checks.version_sets import set_text

        if arguments.model or arguments.machine or arguments.overrides:
            raise UserError(f"--constraints: got {arguments.constraints!r} with other arguments, expected it alone")
        print(set_text(arguments.constraints), end="")
        return DONE
    if arguments.cluster is not None:
        return _doctor_of_cluster(arguments)
    if arguments.model is None:
        if arguments.overrides or arguments.machine:
            got = "--machine: got a machine" if arguments.machine else f"{arguments.overrides[0]}: got a key"
            raise UserError(f"{got} without --model, expected both")
        from ..trainers.run.checks.doctor import run_doctor

        return run_doctor(new_console())
    from ..trainers.config.load import load_config

    # Without a file, all keys except these have their defaults.
    config = load_config(os.devnull, [f"model.path={arguments.model}", *arguments.overrides])
    fit = _show_fit(config, arguments.machine)
    if arguments.machine is not None or not _has_weights(arguments.model):
        why = "--machine plans for another machine" if arguments.machine else f"{arguments.model} has no weights"
        print(f"engine and trainer were not compared, because {why}")
        return DONE if fit.fits else FAILED
    from ..trainers.run.checks.trust_probe import longest_row, probe_trust, show_trust

    with status_line("loading the model") as (console, tell):
        asked = (config.model, config.rollout, config.trainer, config.run.seed, tell)
        longest = longest_row(fit.parameters)
        report = probe_trust(*asked, longest=longest, replay=fit.replay, bitwise=config.run.bitwise)
    show_trust(console, arguments.model, report)
    return DONE if report.sound else FAILED


def _doctor_of_cluster(arguments: argparse.Namespace) -> int:
    from ..trainers.config.config import with_run_dir
    from ..trainers.config.load import load_config
    from ..trainers.run.hosts.cluster_doctor import Demands, examine_cluster, tables

    if arguments.model or arguments.machine:
        raise UserError("--cluster: got it with --model or --machine, expected it without them")
    import_from_here()
    stop_on_sigterm()
    files = [text for text in arguments.overrides if "=" not in text]
    if len(files) > 1:
        raise UserError(f"CONFIG: got {', '.join(files)}, expected one file at most")
    config = load_config(files[0] if files else os.devnull, [text for text in arguments.overrides if "=" in text])
    with status_line("joining the cluster") as (console, tell):
        report = examine_cluster(arguments.cluster, Demands(with_run_dir(config)), tell)
    for table in tables(report):
        print_table(console, table)
    problems = report.sentences("problem")
    for line in (*(f"note: {note}" for note in report.sentences("note")), report.nccl, *problems):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return FAILED if problems else DONE


def _show_fit(config: Any, machine: Any) -> Any:
    """Print what a model can be used with, and return it as a `ModelFit`."""
    from ..actors.process.memory import assume_machine
    from ..trainers.run.checks.doctor import table
    from ..trainers.run.checks.model_fit import examine_model

    with status_line("building the model without weights") as (console, _), assume_machine(machine):
        try:
            fit = examine_model(config)
        except ValueError as error:
            raise UserError(str(error)) from error
    print_table(console, table(fit.findings, f"headrace doctor --model {config.model.path}"))
    return fit


def _has_weights(model: str) -> bool:
    """Return whether a folder has weight files; true for a hub id, whose weights can be downloaded."""
    folder = Path(model)
    return not folder.is_dir() or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _machine(text: str) -> Any:
    """Return the machine that a text such as `4x8x80` describes: hosts, GPUs per host, and GiB per GPU."""
    from ..actors.process.memory import AssumedMachine

    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected HOSTSxGPUSxGIB, such as 4x8x80")
    hosts, gpus, gib = map(int, parts)
    return AssumedMachine(hosts, gpus, gib << 30)
