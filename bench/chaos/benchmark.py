"""`headrace bench chaos` injects faults into real runs at random moments, and checks that rows are trained once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..conditions import conditions
from ..transfer.results import write_records, write_summary
from .injured_run import GROUP_SIZE, PROMPTS_PER_STEP, InjuredRun
from .ledger import Balance, balance
from .memory import Growth
from .pairs import PAIRS, STORES, Pair, StoreKind
from .schedule import TWICE, Injury, more, schedule
from .surgeon import Fault, Hung, Surgeon

WHOLE_MINUTES = 15.0
"""Default duration in minutes. A benchmark of at least this duration must also reach minimum numbers of faults and
steps, and inject every fault at least TWICE times; a shorter one need not."""
LEAST_FAULTS, LEAST_STEPS = 60, 100


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Options of the chaos benchmark."""

    out: Path
    """Folder for the results and the run folders. It must not contain run folders yet."""
    minutes: float = WHOLE_MINUTES
    seed: int = 0
    engine: str = "scripted"
    """Engine of the runs: `scripted`, or `hf` for the tiny built-in model on a CPU."""


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
    """Results of all runs of the chaos benchmark, and the failures that were found."""

    runs: list[Injured]
    complaints: list[str] = field(default_factory=list)
    """Failures found, as sentences: promises that the library broke, and minimum numbers that the benchmark did not
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
    """Return the benchmark's figures by name, such as `faults` or `shm/lost`."""
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
    run = InjuredRun(folder.absolute(), store, options.engine, options.seed)
    surgeon = Surgeon(run, lambda line: tell(f"{store}: {line}"))
    try:
        surgeon.operate(_endless(store, planned, options.seed), until_s)
    except Hung as error:
        surgeon.complaints.append(str(error))
    finally:
        run.end()
    found = balance(run.control.notes(), prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE)
    growths = surgeon.memory.growths()
    grown = [f"memory grew: {growth}" for growth in growths if not growth.flat]
    complaints = [*surgeon.complaints, *found.complaints, *grown]
    return Injured(store, surgeon.faults, found, growths, surgeon.launches, complaints)


def _endless(store: StoreKind, planned: list[Injury], seed: int) -> Iterator[Injury]:
    yield from planned
    again = 0
    while True:
        again += 1
        yield from more(store, seed, again)
