"""Runs `headrace bench transfer`, which measures every store and every baseline on the same bytes in one run."""

from __future__ import annotations

import logging
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...codecs.schema import Kind
from ...dataplane.config import StoreKind
from ...dataplane.errors import DataPlaneError
from ...dataplane.owned_folder import SHARED_MEMORY
from ...trainers.errors import UserError
from ...trainers.run.checks import doctor
from ..progress import Progress
from ..records import conditions, write_summary
from . import baselines
from .contenders import CHECKSUMMED, Contender, Op
from .picture_rounds import measure_pictures, picture_summary
from .pictures import RANKS, SIDE, VLM, PictureProcess, PictureSpec
from .processes import PRODUCER, PoolHost, ProcessPool, RayPool, ThreadPool, call
from .results import (
    IN_TURNS,
    PAIRED,
    KeptResults,
    Result,
    RouteSizes,
    StepResult,
    route_summary,
    summarise,
)
from .rounds import Keep, Pattern, measure, measure_in_turns
from .step import BLOCK_ROWS, DP, measure_steps
from .stores import StoreContender
from .workloads import MOE, MOE_ROUTES, STEP_ENDS, LoadSpec, build_load
from .workloads import WORKLOADS as DESCRIBED

_logger = logging.getLogger(__name__)

WORKLOADS = tuple(name for name in DESCRIBED if name not in ("step", STEP_ENDS))
"""Names of the workloads on which each operation is timed by itself. The workload `step` is measured as a whole step.
The workload `step-ends` measures padding in one process."""
STORES = ("local", "shm", "tcp", "ray", "simple", "mooncake")
PATTERNS: dict[str, frozenset[Op]] = {
    "put": frozenset(("put",)),
    "get": frozenset(("get",)),
    "shuffled": frozenset(("gets",)),
    "field": frozenset(("field",)),
    "write-back": frozenset(("write_back",)),
    "clear": frozenset(("clear",)),
    "claim": frozenset(("claim",)),
    "step": frozenset(("step",)),
    "padding": frozenset(("padding",)),
}
TOGETHER = ("wide-32", "narrow-1")
"""Workloads that are measured in the same rounds, because the summary has the ratio of their times."""
CHECKSUM_WORKLOADS = ("rl-1024", "rl-256")
"""Workloads that can also be measured with checksums. Only the first in this list that was chosen is measured so."""
CHECKSUM_TURNS = 100
"""Number of turns in which a store with checksums and the same store without are measured alternately."""
QUICK_WORKLOADS = {"rl-256": 1.0, "rl-1024": 1.0, "tiny": 1.0, "dense": 0.25}
QUICK_STORES = tuple(kind for kind in STORES if kind != "local")
"""Stores that `--quick` measures. The reference implementation `local` is left out, because it is slow between
processes."""
QUICK_SECOND = "rl-1024"
QUICK_PICTURES = 0.125
"""Share of the prompts with pictures that `--quick` measures. All need about 14 GiB of memory, since some contenders
store each picture eight times."""
CAPACITY_MIB = 1024
OBJECT_STORE_MIB = 3072
PICTURES_STORE_MIB = 8192
"""Memory of Ray's object store with pictures. Ray frees the objects of a step of 417 MB some time later, and moves
objects to the disk from four fifths of the memory on."""
RAY_CPUS = 4
"""Number of logical CPUs of the benchmark's Ray cluster. Only TransferQueue's actors request any of them."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """The options of one run of the benchmark."""

    out: Path
    stores: tuple[str, ...] = STORES
    workloads: tuple[str, ...] = WORKLOADS
    patterns: tuple[str, ...] = tuple(PATTERNS)
    baselines: tuple[str, ...] = baselines.NAMES
    quick: bool = False
    in_process: bool = False
    """True to use threads of this process instead of Ray and its processes, as tests do."""
    share: float = 1.0
    """Share of each workload's rows that is measured. Tests use a small share."""

    def __post_init__(self) -> None:
        _check("--stores", self.stores, STORES)
        _check("--workloads", self.workloads, (*WORKLOADS, VLM))
        _check("--pattern", self.patterns, tuple(PATTERNS))
        _check("baselines", self.baselines, baselines.NAMES)

    @property
    def repeats(self) -> int:
        return 3 if self.quick else 5

    @property
    def readers(self) -> tuple[int, ...]:
        return (8,) if self.quick else (2, 4, 8)

    def specs(self) -> list[list[LoadSpec]]:
        """Return the chosen workloads in lists. Workloads in one list are measured in the same rounds, so that they can
        be compared."""
        shares = {name: QUICK_WORKLOADS.get(name, 1.0) * self.share if self.quick else self.share for name in WORKLOADS}
        chosen = [LoadSpec(name, shares[name]) for name in self.workloads if name != VLM]
        pair = [spec for spec in chosen if spec.name in TOGETHER]
        return [[spec] for spec in chosen if spec.name not in TOGETHER] + ([pair] if pair else [])

    def second_specs(self) -> list[list[LoadSpec]]:
        """Return the workloads for the baseline `transferqueue_mooncake`, in lists like those of `specs`. `--quick` has
        time for only one list."""
        specs = self.specs()
        return [group for group in specs if group[0].name == QUICK_SECOND] or specs[:1] if self.quick else specs

    def pattern(self) -> Pattern:
        ops: frozenset[Op] = frozenset().union(*(PATTERNS[name] for name in self.patterns))
        return Pattern(ops, self.readers, self.repeats)


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The results of one run of the benchmark."""

    results: list[Result]
    steps: list[StepResult]
    summary: dict[str, float]
    absent: dict[str, str]
    """Stores and baselines that were not measured: name -> the reason, and how to install what is missing."""
    conditions: dict[str, Any]


def run_transfer(options: TransferOptions, tell: Callable[[str], None]) -> TransferReport:
    """Measure the chosen stores and baselines, and write results.jsonl and summary.json into `options.out`. `tell` is
    called with one line per phase.

    A store or baseline that fails on a workload is reported as failed for this workload. After an interruption, the
    files have what was measured, and the summary's conditions say what is missing. Raises UserError if none of the
    chosen stores can start.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    absent = {kind: why for kind in options.stores if (why := why_absent(kind, options.in_process))}
    for name in options.baselines:
        if why := baselines.why_absent(name, options.in_process):
            absent[baselines.contender_name(name)] = why
    present = [kind for kind in options.stores if kind not in absent]
    if not present:
        raise UserError("no store can start here: " + "; ".join(f"{kind}: {why}" for kind, why in absent.items()))
    facts = conditions(repeats=options.repeats, quick=options.quick, rows_share=options.share, threads_per_process=1)
    kept, progress = KeptResults(options.out / "results.jsonl", facts), Progress(tell)
    try:
        _measure_all(options, present, absent, progress, kept)
    except BaseException as error:
        facts["interrupted"] = "; ".join(filter(None, (progress.stopped(error), progress.missing())))
        raise
    finally:
        report = _report(options, kept, absent, facts)
        kept.write()
        write_summary(options.out / "summary.json", report.summary, facts | {"absent": absent})
    return report


def _measure_all(
    options: TransferOptions, present: Sequence[str], absent: dict[str, str], tell: Progress, kept: KeptResults
) -> None:
    """Measure the chosen workloads, and keep the results."""
    names = [name for name in options.baselines if baselines.contender_name(name) not in absent]
    second = bool(options.specs()) and baselines.SECOND_RUN in names and "mooncake" in present
    ops = options.pattern().ops if options.specs() else frozenset()
    tell.plan(*([VLM] if VLM in options.workloads else []))
    tell.plan(*[_names(specs) for specs in options.specs() if ops - {"step", "padding"}])
    tell.plan(*[part for part in ("padding", "step") if part in ops], *([baselines.SECOND_RUN] if second else []))
    if VLM in options.workloads:
        with _ray(options.in_process, PICTURES_STORE_MIB):
            _with_pictures(options, present, names, tell, kept.add)
        tell.finish(VLM)
    if options.specs():
        with _ray(options.in_process):
            _first_run(options, present, names, absent, tell, kept.add)
    if second:
        with _ray(options.in_process):
            _second_run(options, absent, tell, kept.add)
        tell.finish(baselines.SECOND_RUN)


def _report(
    options: TransferOptions, kept: KeptResults, absent: dict[str, str], facts: dict[str, Any]
) -> TransferReport:
    """Return the results and the summary of what was measured."""
    results = kept.results
    contender_of = {name: baselines.contender_name(name) for name in options.baselines}
    rows = [result for result in results if result.workload != VLM]
    summary = summarise(rows, kept.steps, options.stores, contender_of, (baselines.SECOND_RUN,))
    if MOE in options.workloads:
        summary |= route_summary(results, summary, _route_sizes(LoadSpec(MOE, options.share)))
    summary |= picture_summary([result for result in results if result.workload == VLM], options.stores)
    return TransferReport(results, kept.steps, summary, absent, facts)


def _names(specs: Sequence[LoadSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


def _with_pictures(
    options: TransferOptions, kinds: Sequence[str], names: Sequence[str], tell: Callable[[str], None], keep: Keep
) -> None:
    """Measure the workload with pictures, in processes of its own."""
    share = options.share * (QUICK_PICTURES if options.quick else 1.0)
    with ExitStack() as stack:
        pool = (ThreadPool if options.in_process else RayPool)(RANKS, PictureProcess)
        stack.callback(pool.close)
        spec = PictureSpec(max(RANKS, round(32 * share)), side=8 if options.in_process else SIDE)
        measure_pictures(pool, spec, kinds, names, options.repeats, options.in_process, tell, keep)


def _route_sizes(spec: LoadSpec) -> RouteSizes:
    """Return the sizes of the workload with routes. This builds its rows another time."""
    load = build_load(spec)
    assert load.batch.lengths is not None
    others = sum(load.schema[name].item_bytes for name in load.first if load.schema[name].kind is Kind.PER_TOKEN)
    padded = 4 * math.prod(MOE_ROUTES.trailing) + others - MOE_ROUTES.token_bytes
    longest = int(load.batch.lengths.max())
    return RouteSizes(int(load.batch.lengths.sum()), load.formula_bytes(), load.num_rows * longest * padded)


def why_absent(kind: str, in_process: bool) -> str:
    """Return why a store cannot be measured and how to change that; "" if it can be."""
    if in_process:
        return "" if kind in ("local", "shm") else "needs Ray, which this run does not use"
    probe = next(probe for probe in doctor.PROBES if probe.area == "store" and probe.name == kind)
    error = doctor.try_imports({kind: probe.imports})[kind] if probe.extra else ""
    if kind == "shm":
        error = doctor.write_error(SHARED_MEMORY)
    finding = doctor.verdict(probe, error, typing.get_args(StoreKind))
    if finding.state is doctor.State.OK:
        return ""
    return f"{finding.detail}; to get it: {finding.fix}" if finding.fix else finding.detail


# ---------------- These functions run the parts of the benchmark.


def _first_run(
    options: TransferOptions,
    kinds: Sequence[str],
    names: Sequence[str],
    absent: dict[str, str],
    tell: Progress,
    keep: Keep,
) -> None:
    pattern = options.pattern()
    in_process = options.in_process
    with ExitStack() as stack:
        pool = _start_pool(stack, options, pattern)
        open_one = _Opener(stack, absent, tell)
        stores = [open_one(kind, lambda kind=kind: _store(kind, in_process)) for kind in kinds]
        others = [
            open_one(baselines.contender_name(name), lambda name=name: baselines.open_baseline(name, PoolHost(pool)))
            for name in names
            if name != baselines.SECOND_RUN
        ]
        checked = next((name for name in CHECKSUM_WORKLOADS if name in options.workloads), None)
        if pattern.ops - {"step", "padding"}:
            for number, specs in enumerate(options.specs()):
                sums: list[Contender] = []
                if any(spec.name == checked for spec in specs):
                    sums = _checksummed(open_one, kinds, absent, in_process)
                # With the buffers of all contenders in the same processes, two workloads of 256 MiB would need more
                # than 24 GiB.
                everyone = [contender for contender in (*stores, *others, *sums) if contender is not None]
                turns = [[one] for one in everyone] if len(specs) > 1 else [everyone]
                for part, seated in enumerate(turns):
                    if number + part and not options.quick:
                        # Restarting frees the memory that the heaps of the processes keep. It would otherwise grow
                        # until none is left.
                        pool.restart()
                    measure([(pool, contender) for contender in seated], specs, pattern, tell, keep)
                by_name = {contender.name: contender for contender in everyone}
                for contender in sums if pattern.ops >= IN_TURNS.keys() else ():
                    tell(f"{checked}: {contender.name} and the store without checksums, in turns")
                    pair = (by_name[contender.name.removesuffix(CHECKSUMMED)], contender)
                    [spec] = [spec for spec in specs if spec.name == checked]
                    keep(measure_in_turns(pool, pair, spec, CHECKSUM_TURNS))
                for contender in sums:
                    contender.close()
                tell.finish(_names(specs))
        if "padding" in pattern.ops:
            tell(f"{STEP_ENDS}: padded tensors to packed columns and back")
            keep(call(pool, PRODUCER, "pad", LoadSpec(STEP_ENDS, options.share), options.repeats))
            tell.finish("padding")
        if "step" in pattern.ops:
            for store in stores:
                if store is not None:
                    store.close()
            by_prompt = [
                open_one(kind, lambda kind=kind: _store(kind, in_process, block_rows=BLOCK_ROWS))
                for kind in kinds
                if kind not in absent
            ]
            steppers = [contender for contender in (*by_prompt, *others) if contender is not None]
            measure_steps([(pool, contender) for contender in steppers], options.share, options.repeats, tell, keep)
            tell.finish("step")


def _second_run(options: TransferOptions, absent: dict[str, str], tell: Callable[[str], None], keep: Keep) -> None:
    """Measure the store `mooncake` against TransferQueue on MooncakeStore. In the results the store's name has the
    suffix PAIRED.

    The second TransferQueue needs another Ray cluster, because one cluster cannot host two. The store and TransferQueue
    have separate processes, because MooncakeStore changes mooncake's settings in its process.
    """
    name, pattern = baselines.SECOND_RUN, options.pattern()
    if options.quick:  # Few processes are used, because starting them takes longer than all other work.
        pattern = replace(pattern, ops=pattern.ops - {"gets"}, readers=())

    def paired(results: Sequence[Any]) -> None:
        keep([one if one.contender == name else replace(one, contender=one.contender + PAIRED) for one in results])

    for specs in options.second_specs():
        # Each list starts everything afresh, because the baseline's master uses memory of its clients and fails when
        # they end.
        with ExitStack() as stack:
            open_one = _Opener(stack, absent, tell)
            pool, other = _start_pool(stack, options, pattern), _start_pool(stack, options, pattern)
            store = open_one("mooncake", lambda: _store("mooncake", False))
            baseline = open_one(name, lambda other=other: baselines.open_baseline(name, PoolHost(other)))
            if store is None or baseline is None:
                return
            measure([(pool, store), (other, baseline)], specs, pattern, tell, paired)


class _Opener:
    """Starts stores and baselines, and closes them at the end. If one cannot start, the reason is recorded in
    `absent`."""

    def __init__(self, stack: ExitStack, absent: dict[str, str], tell: Callable[[str], None]) -> None:
        self._stack = stack
        self._absent = absent
        self._tell = tell

    def __call__(self, name: str, build: Callable[[], Contender]) -> Contender | None:
        self._tell(f"starting {name}")
        try:
            contender = build()
        except (DataPlaneError, ValueError, RuntimeError, ImportError, OSError, TimeoutError) as error:
            self._absent[name] = f"did not start: {type(error).__name__}: {error}".splitlines()[0]
            return None
        self._stack.callback(contender.close)
        return contender


def _checksummed(open_one: _Opener, kinds: Sequence[str], absent: dict[str, str], in_process: bool) -> list[Contender]:
    made = [
        open_one(kind + CHECKSUMMED, lambda kind=kind: _store(kind, in_process, checksum=True))
        for kind in kinds
        if kind not in absent
    ]
    return [contender for contender in made if contender is not None]


def _store(kind: str, in_process: bool, *, checksum: bool = False, block_rows: int | None = None) -> StoreContender:
    return StoreContender(
        kind, capacity_mib=CAPACITY_MIB, block_rows=block_rows, checksum=checksum, in_process=in_process
    )


def _start_pool(stack: ExitStack, options: TransferOptions, pattern: Pattern) -> ProcessPool:
    num_consumers = max(DP + 1, *pattern.readers) if pattern.readers else DP + 1
    pool = ThreadPool(num_consumers) if options.in_process else RayPool(num_consumers)
    stack.callback(pool.close)
    return pool


@contextmanager
def _ray(in_process: bool, object_store_mib: int = OBJECT_STORE_MIB) -> Iterator[None]:
    if in_process:
        yield
        return
    from ...trainers.cluster.ray_cluster import Cluster, CpuDemand

    cluster = Cluster(
        address=None,
        num_cpus=RAY_CPUS,
        demand=CpuDemand(0, 0, 0),
        namespace="headrace-bench",
        object_store_mib=object_store_mib,
    )
    try:
        yield
    finally:
        cluster.close()


def _check(what: str, got: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in got if name not in allowed]
    if unknown or not got:
        raise UserError(f"{what}: got {', '.join(unknown) or 'nothing'}, expected some of {', '.join(allowed)}")
