"""Injects faults into real runs at random moments, and checks that every row is trained once: `make drill-chaos`.

A run for each store is stopped, killed, cut off and starved, one after another. The report says which faults struck,
how the runs reacted, and what became of the rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench.records import conditions, markdown, table, write_page, write_records, write_summary
from headrace.cli.arguments import Parser, results_folder
from headrace.cli.command import ended
from headrace.cli.outcome import DONE, FAILED
from headrace.cli.terminal import print_table, status_line
from headrace.codecs.memory import KEPT_BYTES
from headrace.tests.drills.chaos.faults import (
    FAULTS,
    NO_SENSE,
    PAIRS,
    PROCESSES,
    STORES,
    TWICE,
    Injury,
    Outcome,
    Pair,
    StoreKind,
    more,
    schedule,
)
from headrace.tests.drills.chaos.injured_run import (
    GROUP_SIZE,
    PROMPTS_PER_STEP,
    InjuredRun,
    run_config,
    with_pictures,
)
from headrace.tests.drills.chaos.ledger import Balance, balance
from headrace.tests.drills.chaos.memory import Growth
from headrace.tests.drills.chaos.surgeon import Fault, Hung, Surgeon
from headrace.trainers.errors import UserError

WHOLE_MINUTES = 15.0
"""Default duration in minutes. A benchmark of at least this duration must also reach minimum numbers of faults and
steps, and inject every fault at least TWICE times; a shorter one need not."""
LEAST_FAULTS, LEAST_STEPS = 60, 100


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of the chaos drill."""

    out: Path
    """Folder for the results and the run folders. It must not contain run folders yet."""
    minutes: float = WHOLE_MINUTES
    seed: int = 0
    engine: str = "scripted"
    """Engine of the runs: `scripted`, or `hf` for the tiny built-in model on a CPU."""
    pictures: bool = False
    """True if the prompts have pictures."""


@dataclass(slots=True)
class Injured:
    """Results of one run into which faults were injected."""

    store: StoreKind
    faults: list[Fault]
    balance: Balance
    growths: list[Growth]
    launches: int
    complaints: list[str]


@dataclass(slots=True)
class ChaosReport:
    """Results of all runs of the chaos drill, and the failures that were found."""

    runs: list[Injured]
    complaints: list[str] = field(default_factory=list)
    """Failures found, as sentences: promises that the library broke, and minimum numbers that the drill did not
    reach."""
    conditions: dict[str, Any] = field(default_factory=dict)

    @property
    def faults(self) -> list[Fault]:
        """Faults of all runs that had an effect."""
        return [fault for run in self.runs for fault in run.faults if fault.struck]

    def count(self, pair: Pair) -> int:
        """Return how often the fault of `pair` has struck a process of that kind, in all runs together."""
        return sum(fault.process == pair.process and fault.kind == pair.fault for fault in self.faults)


def run_chaos(options: ChaosOptions, tell: Callable[[str], None]) -> ChaosReport:
    """Inject faults into one run for each store, one run after another, and return the report. Writes faults.jsonl and
    summary.json into `options.out`."""
    options.out.mkdir(parents=True, exist_ok=True)
    facts = conditions(minutes=options.minutes, seed=options.seed, engine=options.engine)
    planned = schedule(options.seed)
    report = ChaosReport([], conditions=facts)
    began_s = time.monotonic()
    for number, store in enumerate(STORES, start=1):
        until_s = began_s + options.minutes * 60 * number / len(STORES)
        report.runs.append(_injure(options, store, planned[store], until_s, tell))
    report.complaints += [f"{run.store}: {line}" for run in report.runs for line in run.complaints]
    if options.minutes >= WHOLE_MINUTES:
        report.complaints += missed_bars(report)
    facts["load_average_after"] = conditions()["load_average"]
    write_records(
        options.out / "faults.jsonl",
        [{"store": run.store, **fault.record()} for run in report.runs for fault in run.faults],
        facts,
    )
    write_summary(options.out / "summary.json", summarise(report), facts)
    return report


def missed_bars(report: ChaosReport) -> list[str]:
    """Return one sentence for each minimum that the benchmark did not reach. There are minima of faults, of steps, and
    of repetitions of a fault."""
    missed = []
    if len(report.faults) < LEAST_FAULTS:
        missed.append(f"{len(report.faults)} faults struck, expected at least {LEAST_FAULTS}")
    steps = sum(run.balance.steps for run in report.runs)
    if steps < LEAST_STEPS:
        missed.append(f"{steps} steps were finished, expected at least {LEAST_STEPS}")
    missed += [
        f"{pair} struck {report.count(pair)} times, expected at least {TWICE}"
        for pair in PAIRS
        if report.count(pair) < TWICE
    ]
    return missed


def summarise(report: ChaosReport) -> dict[str, float]:
    """Return the drill's figures by name, such as `faults` or `shm/lost`."""
    figures: dict[str, float] = {
        "faults": len(report.faults),
        "pairs_twice": sum(report.count(pair) >= TWICE for pair in PAIRS),
        "pairs": len(PAIRS),
        "complaints": len(report.complaints),
    }
    figures |= {f"outcome/{name}": n for name, n in Counter(fault.outcome for fault in report.faults).items()}
    recoveries = sorted(fault.recovery_s for fault in report.faults)
    if recoveries:
        figures["recovery_median_s"] = recoveries[len(recoveries) // 2]
        figures["recovery_max_s"] = recoveries[-1]
    for run in report.runs:
        found = asdict(run.balance)
        figures |= {
            f"{run.store}/{name}": len(value) if isinstance(value, list) else value for name, value in found.items()
        }
        figures[f"{run.store}/launches"] = run.launches
        for growth in run.growths:
            figures[f"{run.store}/memory/{growth.what}/early_mib"] = growth.early / 2**20
            figures[f"{run.store}/memory/{growth.what}/late_mib"] = growth.late / 2**20
    return figures


def _injure(
    options: ChaosOptions, store: StoreKind, planned: list[Injury], until_s: float, tell: Callable[[str], None]
) -> Injured:
    folder = options.out / store
    folder.mkdir()
    config = partial(run_config, store=store, engine=options.engine, seed=options.seed)
    if options.pictures:
        config = with_pictures(config, folder.absolute() / "pictures")
    run = InjuredRun(folder.absolute(), config)
    surgeon = Surgeon(run, lambda line: tell(f"{store}: {line}"))
    try:
        surgeon.operate(_endless(store, planned, options.seed), until_s)
    except Hung as error:
        surgeon.complaints.append(str(error))
    finally:
        run.end()
    found = balance(run.control.notes(), prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
    growths = surgeon.memory.growths()
    # Pictures fill the pool of memory that readers reuse; then it does not grow.
    pooled = KEPT_BYTES if options.pictures else 0
    grown = [f"memory grew: {one}" for one in growths if not one.flat and one.late - one.early > pooled]
    complaints = [*surgeon.complaints, *found.complaints, *grown]
    return Injured(store, surgeon.faults, found, growths, surgeon.launches, complaints)


def _endless(store: StoreKind, planned: list[Injury], seed: int) -> Iterator[Injury]:
    yield from planned
    again = 0
    while True:
        again += 1
        yield from more(store, seed, again)


Grid = tuple[Sequence[str], list[Sequence[str]]]
"""Header and rows of a table."""


def pairs_grid(report: ChaosReport) -> Grid:
    """Return a table of how often each kind of fault struck each kind of process. A "-" marks a fault that makes no
    sense."""
    known = {(pair.process, pair.fault): pair for pair in PAIRS}
    rows: list[Sequence[str]] = []
    for process in PROCESSES:
        cells = [str(report.count(known[process, fault])) if (process, fault) in known else "-" for fault in FAULTS]
        rows.append((process, *cells))
    return ("process", *(name.replace("_", " ") for name in FAULTS)), rows


def rows_grid(report: ChaosReport) -> Grid:
    """Return a table of each run's rows: put, trained on, lost, trained on or put twice, and with wrong bytes."""
    header = ("store", "steps", "undone", "put", "trained", "reads checked", "lost", "twice", "wrong bytes")
    rows: list[Sequence[str]] = []
    for run in report.runs:
        found = run.balance
        figures = (found.steps, found.undone, found.rows_put, found.rows_trained, found.reads_checked)
        errors = (len(found.lost), len(found.twice), len(found.wrong))
        rows.append((run.store, *(f"{figure:,}" for figure in (*figures, *errors))))
    return header, rows


def lines(report: ChaosReport) -> list[str]:
    """Return sentences about the outcomes of faults, recovery times, the growth of memory, and each stop's reason."""
    figures = summarise(report)
    said = [
        f"{len(report.faults)} faults struck: the run continued after {figures.get('outcome/goes on', 0):.0f}, went "
        f"back to a checkpoint by itself after {figures.get('outcome/restarts', 0):.0f}, and stopped and was "
        f"resumed after {figures.get('outcome/stops', 0):.0f}"
    ]
    if "recovery_median_s" in figures:
        said.append(
            f"seconds from a fault's end to new steps: median {figures['recovery_median_s']:.1f}, at most "
            f"{figures['recovery_max_s']:.1f}"
        )
    said += [f"memory with {run.store}: {', '.join(map(str, run.growths))}" for run in report.runs if run.growths]
    stops = [fault for fault in report.faults if fault.outcome == "stops"]
    said += [f"stopped ({fault.kind} {fault.process}): {fault.sentences[-1]}" for fault in stops]
    return said


def write_report(report: ChaosReport, out: Path, command: str) -> Path:
    """Write report.md into `out`: the figures, the failures, the allowed outcome of each fault, and the conditions.
    Returns its path."""
    text = [
        *markdown(*pairs_grid(report)),
        "",
        *markdown(*rows_grid(report)),
        "",
        *(f"- {line}" for line in lines(report)),
    ]
    text += ["", "## Failed", "", *(f"- {line}" for line in report.complaints or ["nothing"])]
    text += ["", "## What each fault may lead to", "", *promises()]
    return write_page(out / "report.md", "chaos", command, text, report.conditions)


def promises() -> list[str]:
    """Return a Markdown table of the most severe outcome that is allowed after each fault in each kind of process. A
    fault that is not tried in a kind of process has the reason instead."""
    rows = ["| process | fault | the run |", "| --- | --- | --- |"]
    for process in PROCESSES:
        for fault in FAULTS:
            pairs = [pair for pair in PAIRS if (pair.process, pair.fault) == (process, fault)]
            said = "; ".join(_MEANING[pair.worst] for pair in pairs) or f"not tried: {NO_SENSE[process, fault]}"
            if len(pairs) > 1:
                said = "; ".join(f"with `{'`, `'.join(pair.stores)}`: {_MEANING[pair.worst]}" for pair in pairs)
            rows.append(f"| {process} | {fault.replace('_', ' ')} | {said} |")
    return rows


_MEANING: dict[Outcome, str] = {
    "goes on": "continues; what was killed is replaced",
    "restarts": "returns to its last checkpoint by itself",
    "stops": "can stop with a sentence; `--resume` continues",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drill, print what became of the runs, and return the exit code: 1 if a promise was broken."""
    parser = Parser("drill-chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="from 15 on there are bars to reach")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the schedule of faults")
    engines = ("scripted", "hf")
    parser.add_argument("--engine", default="scripted", choices=engines, help="hf: the tiny model, trained on the CPU")
    parser.add_argument("--pictures", action="store_true", help="prompts with pictures; only with the engine scripted")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-chaos-...")
    arguments = parser.parse_args(argv)
    return ended(lambda: _drill(arguments))


def _drill(arguments: argparse.Namespace) -> int:
    if not arguments.minutes > 0:
        raise UserError(f"--minutes: got {arguments.minutes:g}, expected a number above 0")
    out = results_folder(arguments, "chaos", new=True)
    with status_line("starting") as (console, tell):
        options = ChaosOptions(out, arguments.minutes, arguments.seed, arguments.engine, arguments.pictures)
        report = run_chaos(options, tell)
    print_table(console, table("times that each fault struck", *pairs_grid(report)))
    print_table(console, table("rows of the history that survived", *rows_grid(report)))
    for line in lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in report.complaints:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    command = f"make drill-chaos ARGS='--minutes={arguments.minutes:g} --seed={arguments.seed}'"
    console.print(f"report: {write_report(report, out, command)}", highlight=False, soft_wrap=True)
    return FAILED if report.complaints else DONE


if __name__ == "__main__":
    sys.exit(main())
