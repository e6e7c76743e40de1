"""Measures the data-plane traffic of a GRPO step with two train ranks.

The processes do the following, in this order:
  producer      puts the ids, mask and generation log-probs of all rows, with the reward as a tag
  rank 0, 1     read the ids and mask of their shard, and put the previous policy's log-probs
  rank 0, 1     put the reference model's log-probs (they have already read ids and mask)
  one process   reads the mask of all rows, and puts the advantages
  rank 0, 1     read the other columns: three kinds of log-probs, and the advantages
  producer      clears the rows
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...actors.train.microbatch_plan import Budget, plan_shards
from ...actors.train.topology import Topology
from .contenders import Digests, RowContender, Share
from .processes import PRODUCER, LoadSize, Span, call, consumer
from .results import StepResult
from .rounds import Case, Keep, Seat, attempt, close_cases, open_cases
from .workloads import STEP_FIRST, LoadSpec

DP = 2
BLOCK_ROWS = 16
"""Number of rows of a block, the unit of storage. A block holds the rows of one prompt, so that only one rank reads
it."""
TOKENS_PER_MICROBATCH = 32_768

FORWARD = ("input_ids", "mask")
TRAIN = (*FORWARD, "generation_logprobs", "previous_logprobs", "reference_logprobs", "advantages")


def measure_steps(seats: Sequence[Seat], share: float, repeats: int, tell: Callable[[str], None], keep: Keep) -> None:
    """Run a GRPO step through every contender in turn. The first run checks every read, the second counts bytes and
    calls, and `repeats` further runs are timed. Each pool of processes needs DP + 1 consumers. keep: as for
    `measure`."""
    chosen = [(pool, contender) for pool, contender in seats if "step" in contender.ops]
    cases = open_cases(chosen, [LoadSpec("step", share)])
    counts: dict[str, StepResult] = {}
    try:
        for case in cases:
            tell(f"{case.label}: warm-up and verification")
            step = _Step(case)
            attempt(case, cases, step.verify)
            attempt(case, cases, lambda step=step, case=case: counts.update({case.label: step.count()}))
            case.seconds = {}
        for number in range(repeats):
            tell(f"step: round {number + 1} of {repeats}")
            for case in cases:
                attempt(case, cases, _Step(case).run)
    finally:
        keep([_result(case, counts) for case in cases if case.failure or "called" in case.seconds])
    close_cases(cases)


def _result(case: Case, counts: Mapping[str, StepResult]) -> StepResult:
    if case.failure:
        return StepResult(case.contender.name, (), failure=case.failure)
    seconds, called = case.seconds["step"], case.seconds["called"]
    return replace(counts[case.label], seconds=tuple(seconds), called_seconds=tuple(called))


def train_shares(size: LoadSize) -> list[Share]:
    """Return the rows that the planner assigns to each rank."""
    assert size.lengths is not None
    budget = Budget(max(TOKENS_PER_MICROBATCH, int(size.lengths.max())), packing="packed")
    plan = plan_shards(size.lengths, Topology(dp=DP), budget, size.groups)
    return [Share(rank, DP, np.sort(plan.shard(rank)[0])) for rank in range(DP)]


class _Step:
    """Runs the GRPO step through one contender (store or baseline)."""

    def __init__(self, case: Case) -> None:
        assert isinstance(case.contender, RowContender)
        self._pool = case.pool
        self._case = case
        self._label = case.label
        self._contender: RowContender = case.contender
        self._size = case.size
        self._whole = Share(0, 1, np.arange(case.size.num_rows))
        self._shares = train_shares(case.size)
        self._processes = [*[consumer(rank) for rank in range(DP)], consumer(DP)]
        self._stages_s = 0.0
        self._counting = False
        self._blocks_read = 0
        self._blocks_needed = 0

    def run(self, *, verify: bool = False) -> None:
        """Run one step, and record its duration in the case of this contender."""
        self._stages_s = 0.0
        names = tuple(self._size.field_bytes)
        expected = [self._expected(share, names) if verify else None for share in (*self._shares, self._whole)]
        keys = _keys(self._size)
        started = time.monotonic()
        (token,) = self._stage([self._pool.start(PRODUCER, "write", self._label, keys, STEP_FIRST, None, True)])
        mine = [self._contender.part(token, share) for share in self._shares]
        mine = self._ranks(mine, FORWARD, FORWARD, "previous_logprobs", expected)
        mine = self._ranks(mine, FORWARD, (), "reference_logprobs", expected)
        self._count_blocks([token], ("mask",))
        write = ("advantages",), keys
        arguments = (self._label, token, self._whole, ("mask",), write, expected[DP])
        (advantages,) = self._stage([self._pool.start(self._processes[DP], "stage", *arguments)])
        mine = [
            self._contender.merge(part, self._contender.part(advantages, share))
            for part, share in zip(mine, self._shares, strict=True)
        ]
        self._ranks(mine, TRAIN, TRAIN[len(FORWARD) :], None, expected)
        cleared = call(self._pool, PRODUCER, "clear", self._label, token)
        self._case.note("step", self._stages_s + cleared.seconds)
        self._case.note("called", time.monotonic() - started)
        self._pool.gather([self._pool.start(process, "forget", self._label) for process in self._processes])

    def verify(self) -> None:
        """Run one step and verify every read."""
        self.run(verify=True)

    def count(self) -> StepResult:
        """Run one extra, untimed step, and return its bytes per token, directory calls, and ratio of blocks read."""
        before = self._counters()
        self._counting = True
        self.run()
        moved = {name: value - before[name] for name, value in self._counters().items()}
        assert self._size.lengths is not None
        tokens = int(self._size.lengths.sum())
        put = sum(self._size.field_bytes.values())
        return StepResult(
            self._contender.name,
            (),
            bytes_put_per_token=put / tokens,
            wire_bytes_put_per_token=moved.get("wire_bytes_put", math.nan) / tokens,
            bytes_got_per_token=moved["bytes_got"] / tokens,
            directory_calls=moved.get("directory_calls", math.nan),
            blocks_read_ratio=self._blocks_read / self._blocks_needed if self._blocks_needed else math.nan,
        )

    def _ranks(
        self,
        tokens: Sequence[Any],
        read: tuple[str, ...],
        missing: tuple[str, ...],
        write: str | None,
        expected: Sequence[Digests | None],
    ) -> list[Any]:
        """Run a stage on all ranks at once. Returns one token per rank, which also reads the columns that the rank has
        just written.

        `missing` are the fields of `read` that no earlier stage has read.
        """
        self._count_blocks(tokens, missing)
        calls = [
            self._pool.start(
                name, "stage", self._label, token, share, read,
                None if write is None else ((write,), self._contender.keys(token)), digests,
            )
            for name, token, share, digests in zip(
                self._processes[:DP], tokens, self._shares, expected[:DP], strict=True
            )
        ]  # fmt: skip
        written = self._stage(calls)
        if write is None:
            return list(tokens)
        return [self._contender.merge(token, new) for token, new in zip(tokens, written, strict=True)]

    def _stage(self, calls: Sequence[Any]) -> list[Any]:
        """Wait for the parallel calls of a stage, and return the tokens for reading the columns that they wrote. The
        time from the first start to the last end is added to the step's time."""
        done: list[tuple[Any, Span]] = self._pool.gather(calls)
        self._stages_s += max(span.end for _, span in done) - min(span.start for _, span in done)
        return [token for token, _ in done]

    def _count_blocks(self, tokens: Sequence[Any], fields: tuple[str, ...]) -> None:
        if not self._counting or not fields:
            return
        touched = [self._contender.blocks(token, fields) for token in tokens]
        self._blocks_read += sum(map(len, touched))
        self._blocks_needed += len(frozenset().union(*touched))

    def _expected(self, share: Share, names: tuple[str, ...]) -> Digests:
        return call(self._pool, PRODUCER, "expected", self._label, share, names)

    def _counters(self) -> dict[str, int]:
        processes = [PRODUCER, *self._processes]
        total: dict[str, int] = {}
        for counters in self._pool.gather(
            [self._pool.start(process, "counters", self._label) for process in processes]
        ):
            for name, value in counters.items():
                total[name] = total.get(name, 0) + value
        return total


_steps = iter(range(1 << 62))


def _keys(size: LoadSize) -> list[str]:
    """Return keys for the rows of a step. No other step uses the same keys."""
    run, order = next(_steps), np.zeros(size.num_rows, np.int64)
    starts = np.flatnonzero(np.diff(size.groups, prepend=-1))
    order[starts] = starts
    sample = np.arange(size.num_rows) - np.maximum.accumulate(order)
    return [f"s{run}p{group}.{number}" for group, number in zip(size.groups.tolist(), sample.tolist(), strict=True)]
