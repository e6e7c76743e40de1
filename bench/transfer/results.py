"""Holds the transfer benchmark's results as records and as a flat summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..records import write_records
from .contenders import CHECKSUMMED
from .workloads import MOE

PAIRED = "+paired"
"""Suffix of a store's name in rounds with a single baseline that cannot run together with the others."""

OWN_PADDING = "headrace"
MASKED_COPY = "masked copy"
"""Names of the two compared ways to pad rows: the functions of `codecs.jagged`, and a masked copy in torch."""

IN_TURNS: dict[str, str] = {"put": "put, in turns", "get": "get, in turns"}
"""Operation -> its name in the results of two contenders that were measured alternately."""

SUMMARY_OPS = ("put", "get", "get8", "clear")


@dataclass(frozen=True, slots=True)
class Result:
    """The measured times of one operation of one contender (store or baseline) on one workload."""

    workload: str
    op: str
    contender: str
    nbytes: int
    """Number of bytes of values that one run moves; 0 for clear and claim, which move none."""
    seconds: tuple[float, ...]
    """Seconds of every run after the warm-up; () when the case failed."""
    failure: str = ""
    """Reason why the case failed; "" if it did not, and every kind of read was verified once against the written
    bytes."""
    wire_bytes: int = 0
    """Number of bytes that one run writes, including block headers; 0 for reads and for contenders that do not count
    them."""
    note: str = ""
    """Remark on the times, such as a store that was full; "" if there is none."""

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    @property
    def p99_s(self) -> float:
        """99th percentile of the seconds; with fewer than 100 runs, the seconds of the slowest."""
        return float(np.quantile(self.seconds, 0.99, method="higher"))

    @property
    def mib_per_s(self) -> float:
        """Throughput in MiB/s of the run with the median time; nan when the operation moves no bytes."""
        return self.nbytes / 2**20 / self.median_s if self.nbytes else math.nan

    def record(self) -> dict[str, Any]:
        """Return plain data for results.jsonl, with times in milliseconds."""
        line: dict[str, Any] = {"workload": self.workload, "op": self.op, "contender": self.contender}
        if self.failure:
            return line | {"failed": self.failure}
        return line | {
            "bytes": self.nbytes,
            "runs": len(self.seconds),
            "median_ms": self.median_s * 1e3,
            "p99_ms": self.p99_s * 1e3,
            "min_ms": min(self.seconds) * 1e3,
            "mib_per_s": self.mib_per_s if self.nbytes else None,
            **({"wire_bytes": self.wire_bytes} if self.wire_bytes else {}),
            **({"note": self.note} if self.note else {}),
            "verified": True,
            "times_ms": [round(seconds * 1e3, 4) for seconds in self.seconds],
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """The measured times and counts of a GRPO step's traffic through one contender (store or baseline)."""

    contender: str
    seconds: tuple[float, ...]
    """Seconds of every run after the warm-up; () when the case failed. The seconds of a run are the sum over its
    stages. A stage lasts from the start of the first process to the end of the last one."""
    called_seconds: tuple[float, ...] = ()
    """Seconds of every run, including the benchmark's calls to its processes. These calls take about the same time for
    all contenders."""
    bytes_put_per_token: float = math.nan
    """Number of bytes of the values of all written columns, per token."""
    wire_bytes_put_per_token: float = math.nan
    """Number of written bytes per token, including block headers and lengths; nan when the contender does not count
    them."""
    bytes_got_per_token: float = math.nan
    directory_calls: float = math.nan
    """Number of calls to the directory by all processes in one step; nan for contenders without a directory."""
    blocks_read_ratio: float = math.nan
    """Number of blocks (units of storage with several rows) that all processes read, divided by the number of distinct
    blocks; nan for contenders without blocks."""
    failure: str = ""

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    @property
    def called_s(self) -> float:
        return float(np.median(self.called_seconds))

    def record(self) -> dict[str, Any]:
        """Return plain data for results.jsonl, with times in milliseconds."""
        line: dict[str, Any] = {"workload": "step", "op": "step", "contender": self.contender}
        if self.failure:
            return line | {"failed": self.failure}
        counts = {name: value for name, value in self.counts().items() if math.isfinite(value)}
        times = [round(seconds * 1e3, 4) for seconds in self.seconds]
        medians = {"median_ms": self.median_s * 1e3, "called_median_ms": self.called_s * 1e3}
        return line | {"runs": len(times), **medians, **counts, "times_ms": times}

    def counts(self) -> dict[str, float]:
        """Return all figures that are not times, by name."""
        names = ("bytes_put_per_token", "wire_bytes_put_per_token", "bytes_got_per_token", "directory_calls")
        return {name: getattr(self, name) for name in (*names, "blocks_read_ratio")}


class KeptResults:
    """Results of a run. They are written as soon as they are measured, so that an interruption leaves them."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        """path: results.jsonl. facts: conditions of the measurement."""
        self.results: list[Result] = []
        self.steps: list[StepResult] = []
        self._path, self._facts = path, facts

    def add(self, found: Sequence[Result | StepResult]) -> None:
        self.results += [one for one in found if isinstance(one, Result)]
        self.steps += [one for one in found if isinstance(one, StepResult)]
        self.write()

    def write(self) -> None:
        write_records(self._path, [one.record() for one in (*self.results, *self.steps)], self._facts)


def summarise(
    results: Sequence[Result],
    steps: Sequence[StepResult],
    stores: Sequence[str],
    baselines: Mapping[str, str],
    paired_baselines: Sequence[str] = (),
) -> dict[str, float]:
    """Return the flat summary of all cases that have results, by key. A ratio above 1 means that the store is faster
    than the baseline. `baselines` maps a baseline's name in the summary to the name of its contender. Baselines in
    `paired_baselines` are compared only with results whose store has the suffix PAIRED; other baselines only with the
    other results.
    """
    median = {(r.workload, r.op, r.contender): r.median_s for r in results if r.seconds}
    summary: dict[str, float] = {}
    for (workload, op, name), seconds in median.items():
        store = name.removesuffix(PAIRED)
        if store not in stores or op not in SUMMARY_OPS:
            continue
        for baseline, contender in baselines.items():
            other = median.get((workload, op, contender))
            if other is not None and (baseline in paired_baselines) == name.endswith(PAIRED):
                summary[f"{workload}.{op}.{store}.vs_{baseline}"] = other / seconds
    for (workload, op, name), seconds in median.items():
        if name == OWN_PADDING:
            summary[f"{workload}.{op}.milliseconds"] = seconds * 1e3
            summary[f"{workload}.{op}.vs_masked_copy"] = median[workload, op, MASKED_COPY] / seconds
    summary |= _step_summary(steps, stores)
    for store in stores:
        for op in ("put", "get"):
            pair = median.get(("wide-32", op, store)), median.get(("narrow-1", op, store))
            if pair[0] and pair[1]:
                summary[f"wide_vs_narrow.{op}.{store}"] = pair[0] / pair[1]
        cost = _checksum_cost(results, store)
        if cost is not None:
            summary[f"checksum_cost.{store}"] = cost
    return summary


@dataclass(frozen=True, slots=True)
class RouteSizes:
    """Sizes of the workload with routes. The bytes that stores write are compared with them."""

    tokens: int
    """Number of tokens of all rows."""
    formula_bytes: int
    """Number of bytes of the columns if each group's prompt is written once."""
    padded_bytes: int
    """Number of bytes of the same columns as other libraries store them, with int32 routes and all rows padded to the
    longest."""


def route_summary(results: Iterable[Result], summary: Mapping[str, float], sizes: RouteSizes) -> dict[str, float]:
    """Return the figures of the workload `moe` other than ratios of times. They are the bytes that stores write per
    token, their ratio to the formula, and the ratio of padded int32 to the formula.

    summary: the ratios of times. The ratio of `put` to `tcp` against raw TCP also gets the name `vs_raw_tcp`.
    """
    written = [r.wire_bytes for r in results if r.workload == MOE and r.op == "put" and r.wire_bytes]
    if not written:
        return {}
    figures = {
        "moe.bytes_put_per_token": max(written) / sizes.tokens,
        "moe.bytes_over_formula": max(written) / sizes.formula_bytes,
        "moe.padded_int32_over_formula": sizes.padded_bytes / sizes.formula_bytes,
    }
    raw = summary.get("moe.put.tcp.vs_tcp")
    return figures if raw is None else {**figures, "moe.put.tcp.vs_raw_tcp": raw}


def _step_summary(steps: Sequence[StepResult], stores: Sequence[str]) -> dict[str, float]:
    summary: dict[str, float] = {}
    done = {step.contender: step for step in steps if step.seconds}
    queue = done.get("transferqueue")
    for store in stores:
        if store not in done:
            continue
        counts = {name: value for name, value in done[store].counts().items() if math.isfinite(value)}
        summary |= {f"step.{store}.{name}": value for name, value in counts.items()}
        summary[f"step.{store}.milliseconds"] = done[store].median_s * 1e3
        summary[f"step.{store}.called_milliseconds"] = done[store].called_s * 1e3
        if queue is not None:
            summary[f"step.{store}.vs_transferqueue"] = queue.median_s / done[store].median_s
            summary[f"step.{store}.called_vs_transferqueue"] = queue.called_s / done[store].called_s
    return summary


def _checksum_cost(results: Sequence[Result], store: str) -> float | None:
    """Return the median time of put and get with checksums divided by that without; None if not measured in turns. The
    median is that of the ratios of all turns."""
    totals = {}
    for name in (store + CHECKSUMMED, store):
        both = [r.seconds for r in results if r.contender == name and r.op in IN_TURNS.values() and r.seconds]
        if len(both) != len(IN_TURNS):
            return None
        totals[name] = np.sum(both, axis=0)
    return float(np.median(totals[store + CHECKSUMMED] / totals[store]))
