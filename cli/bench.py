"""The commands `headrace bench ...`, which measure on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trainers.errors import UserError
from .arguments import bench_command, chosen, known, path, results_folder
from .outcome import DONE, FAILED, stop_at_once
from .terminal import command_line, judged, new_console, print_table, show_results, status_line

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.gpu.work_report import WorkReport
from ..bench.progress import Progress

_BENCH_EPILOG = """examples:
  headrace bench transfer --quick
  headrace bench transfer --stores shm simple --workloads rl-1024 --pattern put get shuffled
  headrace bench step --quick
  headrace bench weights --gpus 2
  headrace bench hosts --quick
  headrace bench gpu --work grpo-0.6b --layout colocated-1 colocated-2 --baseline trl
  headrace bench gpu --work train-0.6b --backend megatron trainer.dp=2
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

    replica = bench_command(
        kinds, "replica", _replica, "one read per replica and a broadcast, against a read by each rank and padded rows"
    )
    replica.add_argument("--sizes", nargs="+", type=int, metavar="N", help="ranks of a replica; default: 2 4 8")
    replica.add_argument("--store", default="simple", choices=("shm", "tcp", "ray", "simple", "mooncake"))
    replica.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per rank")

    step = bench_command(kinds, "step", _step, "steps of sync, streaming and async on a scripted engine, and simulated")
    step.add_argument("--quick", action="store_true", help="few and short steps, under a minute")

    hosts = bench_command(
        kinds, "hosts", _hosts, "reads between hosts made of namespaces (needs root), and the directory's cost"
    )
    hosts.add_argument("--quick", action="store_true", help="few repeats, under a minute")

    _add_weights(
        bench_command(kinds, "weights", _weights, "weight sync from a trainer to engines, over every transport")
    )
    _add_gpu(
        bench_command(kinds, "gpu", _gpu, "whole training runs on GPUs, every second accounted for, and train steps")
    )


def _add_weights(weights: argparse.ArgumentParser) -> None:
    add: Callable[..., object] = weights.add_argument
    add("--transports", nargs="+", metavar="NAME", help="collective ipc store disk; default: all")
    add("--sizes", nargs="+", metavar="SIZE", help="0.1B 0.5B 1.7B 4B 8B, default: up to 1.7B; with --gpus 2B 8B tiny")
    add("--engines", nargs="+", type=int, metavar="N", help="numbers of engines; default: 1 2 4")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: one GPU per process")
    add("--quick", action="store_true", help="0.1B only and few repeats, under two minutes")
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="a running vLLM on N GPUs instead, every byte checked; 0: on a CPU",
    )
    add(
        "--senders",
        type=int,
        metavar="N",
        help="N trainer ranks to N engines on hosts made of namespaces instead (needs root), against one sender",
    )
    add("--setups", nargs="+", metavar="NAME", help="with --gpus: none full asleep moe tp2 tp2-none; default: all")
    add("--updates", type=int, default=0, metavar="N", help="with --gpus: updates of each case; default: its own")
    add(
        "--folder",
        default="",
        metavar="DIR",
        help="with --gpus: folder for models; default: a temporary one",
    )


def _add_gpu(gpu: argparse.ArgumentParser) -> None:
    add: Callable[..., object] = gpu.add_argument
    add(
        "--work", required=True, metavar="NAME",
        help="whole runs: grpo-0.6b grpo-1.7b grpo-4b grpo-vl-3b grpo-30b-a3b; train steps alone: train-135m "
        "train-0.6b train-1.7b train-4b train-moe; without a GPU: grpo-tiny grpo-tiny-moe grpo-tiny-vl train-tiny "
        "train-tiny-moe",
    )  # fmt: skip
    add(
        "--layout", nargs="+", metavar="NAME",
        help="colocated separate tensor experts one-engine, each with -N for N GPUs; default: colocated on all GPUs",
    )  # fmt: skip
    add("--backend", default="fsdp", choices=("fsdp", "megatron"), help="train backend; default: fsdp")
    add("--steps", type=int, metavar="N", help="steps of each run, the first of which is not counted; default: 6")
    add("--repeat", type=int, default=1, metavar="N", help="runs of each layout; default: 1")
    add("--weak", action="store_true", help="as many prompts per step for each GPU as there are for one")
    add(
        "--baseline", choices=("trl", "none"),
        help="trl: also run TRL twice on one GPU, where it is installed; none: train-* without plain torch beside it",
    )  # fmt: skip
    add("--layers", type=int, metavar="N", help="number of layers of the model; default: the work's")
    add("--tokens", type=int, metavar="N", help="train-*: tokens of a microbatch; default: 16384")
    add("--micros", type=int, metavar="N", help="train-*: microbatches of a step; default: 2")
    add("--row-tokens", type=int, default=0, metavar="N", help="train-*: tokens of each row; default: random lengths")
    add(
        "--prompt-share", type=float, default=0.0, metavar="X",
        help="train-*: share of a row's tokens that have no loss; default: 0",
    )  # fmt: skip
    add(
        "--skew", type=float, default=0.0, metavar="X",
        help="train-moe: give one expert of each layer X times the mean number of tokens; default: the routers' choice",
    )  # fmt: skip
    add("--model", type=path, metavar="DIR", help="model folder to use again; it is made if it is not there")
    add("--limit-s", type=float, default=900.0, metavar="S", help="seconds that each run may take; default: 900")
    add("overrides", metavar="key.sub=value", nargs="*", default=[], help="override of a key of the runs' config")


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


def _replica(arguments: argparse.Namespace) -> int:
    from ..bench.replica import SIZES, ReplicaOptions, replica_table, run_replica

    sizes = tuple(dict.fromkeys(arguments.sizes or SIZES))
    if min(sizes) < 2:
        raise UserError(f"--sizes: got {min(sizes)}, expected replicas of at least 2 ranks")
    options = ReplicaOptions(results_folder(arguments, "replica"), sizes, arguments.store, device=arguments.device)
    with status_line("starting") as (console, tell):
        results = run_replica(options, tell)
    return show_results(console, replica_table(results), options.out)


def _step(arguments: argparse.Namespace) -> int:
    from ..bench.steps import StepOptions, run_steps, steps_table, write_report

    out = results_folder(arguments, "step")
    options = StepOptions.quick(out) if arguments.quick else StepOptions(out)
    with status_line("starting") as (console, tell):
        report = run_steps(options, tell)
    print_table(console, steps_table(report))
    console.print(f"report: {write_report(report, options, command_line())}", highlight=False)
    return DONE


def _hosts(arguments: argparse.Namespace) -> int:
    from ..bench.hosts.benchmark import HostOptions, directory_table, hosts_table, run_hosts, write_report

    out = results_folder(arguments, "hosts")
    options = HostOptions.quick(out) if arguments.quick else HostOptions(out)
    with status_line("starting") as (console, tell):
        report = run_hosts(options, tell)
    print_table(console, hosts_table(report))
    print_table(console, directory_table(report, options))
    console.print(f"report: {write_report(report, options, command_line())}", highlight=False)
    return DONE


def _weights(arguments: argparse.Namespace) -> int:
    from ..bench.weights.benchmark import SIZES, TRANSPORT_KINDS, WeightOptions, run_weights, weights_table

    out = results_folder(arguments, "weights")
    if arguments.gpus is not None:
        return _updates_of_vllm(arguments, out)
    if arguments.senders is not None:
        return _many_senders(arguments, out)
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


def _many_senders(arguments: argparse.Namespace, out: Path) -> int:
    from ..bench.weights.senders import DEFAULT_REPEATS, DEFAULT_SIZE, SIZES, SenderOptions, run_senders, senders_table

    if arguments.senders < 2:
        raise UserError(f"--senders: got {arguments.senders}, expected at least 2")
    [size] = known("--sizes", chosen(arguments.sizes, (DEFAULT_SIZE,)), SIZES)
    options = SenderOptions(out, arguments.senders, size, repeats=1 if arguments.quick else DEFAULT_REPEATS)
    with status_line("starting") as (console, tell):
        results = run_senders(options, tell)
    print_table(console, senders_table(options, results))
    console.print(f"results: {out}", highlight=False)
    return DONE


def _updates_of_vllm(arguments: argparse.Namespace, out: Path) -> int:
    from ..bench.weights.vllm_updates import SIZES, VllmOptions, run_vllm_updates, setups

    [size] = known("--sizes", chosen(arguments.sizes, ("2B",)), SIZES)
    names = known("--setups", chosen(arguments.setups, ()), tuple(setups(size, arguments.gpus)))
    options = VllmOptions(out, arguments.gpus, size, names, arguments.updates, arguments.folder)
    return judged(new_console(), run_vllm_updates(options), out)


def _gpu(arguments: argparse.Namespace) -> int:
    started = time.monotonic()  # The clock must start before torch is imported.
    from ..bench.gpu.works import TRAIN_WORKS, WORKS
    from ..bench.progress import Progress

    [work] = known("--work", (arguments.work,), WORKS)
    out = results_folder(arguments, "gpu", new=True)
    for option, number, least in (("--steps", arguments.steps, 2), ("--repeat", arguments.repeat, 1)):
        if number is not None and number < least:
            raise UserError(f"{option}: got {number}, expected at least {least}")
    tell = Progress(lambda line: print(line, flush=True), started)
    return (_gpu_train_steps if work in TRAIN_WORKS else _gpu_runs)(arguments, tell, out)


def _gpu_runs(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.whole_runs import GpuOptions, GpuReport, conditions_line, gpu_table, run_gpu, write_report

    options = GpuOptions(
        out, arguments.work, layouts=chosen(arguments.layout, ()), backend=arguments.backend, steps=arguments.steps,
        layers=arguments.layers, repeat=arguments.repeat, weak=arguments.weak,
        baseline=None if arguments.baseline == "none" else arguments.baseline, model=arguments.model,
        limit_s=arguments.limit_s, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    report = GpuReport(arguments.work, out, tell)

    def show(console: Console) -> Path:
        print_table(console, gpu_table(report))
        if report.conditions:
            console.print(conditions_line(report), highlight=False, markup=False, soft_wrap=True)
        return write_report(report, out, command_line())

    return measured(report, lambda: run_gpu(options, report), show)


def _gpu_train_steps(arguments: argparse.Namespace, tell: Progress, out: Path) -> int:
    from ..bench.gpu.work_report import WorkReport
    from ..bench.train_steps.benchmark import TrainOptions, run_train_steps

    options = TrainOptions(
        out, arguments.work, arguments.backend, steps=arguments.steps, layers=arguments.layers,
        tokens=arguments.tokens, micros=arguments.micros, row_tokens=arguments.row_tokens,
        prompt_share=arguments.prompt_share, skew=arguments.skew, plain=arguments.baseline != "none",
        model=arguments.model, overrides=tuple(arguments.overrides),
    )  # fmt: skip
    report = WorkReport(arguments.work, out, tell)
    return measured(report, lambda: run_train_steps(options, report))


def measured(report: WorkReport, run: Callable[[], None], show: Callable[[Console], Path] | None = None) -> int:
    """Measure a work and show its figures, even if the work is interrupted or fails. Returns the exit code.

    show: function that prints the figures and returns where the results are; None means the report's own table.
    """
    console = new_console()

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
