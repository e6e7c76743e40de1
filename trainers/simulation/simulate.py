"""Simulates one GRPO run as discrete events: engines, one trainer, weight syncs, and their waits.

    prompt allowed -> admitted by an engine -> last token -> put -> ready -> claimed, trained -> sync -> next version

Prompts begin in the order of the prompt stream, each at most `staleness` weight versions before the step that would
train on it. The modes `sync` and `async` train on all groups of a step at once. The modes `streaming` and
`async_streaming` train on groups as they become ready and step the optimizer once per step; in `async_streaming`, after
training on a chunk, as many new prompts can begin. An engine decodes its rows in one batch, at a speed that depends on
the number of rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dataplane.directory.samplers import StreamProgress
from ..config.staleness import Mode
from .scenario import Scenario


class SimulatedEngine:
    """An engine that decodes one token for all its rows at a time. The time per token is `decode_s +
    decode_row_s * (number of running rows)` seconds.

    The engine counts the tokens that it has decoded per row since the start of the run. Between changes (new rows,
    pauses) the ends of rows are known: `_marks` has the token count at which each row ends, and `_times` has the
    corresponding times in seconds. Both are recomputed only at changes.
    """

    def __init__(self, rows: int, decode_s: float, decode_row_s: float) -> None:
        self.rows = rows
        self.stamp = 0
        """Number of changes (rows that joined, pauses) so far. A predicted event is no longer valid when this number
        has changed since the prediction."""
        self._decode_s = decode_s
        self._decode_row_s = decode_row_s
        self._mark = 0.0
        self._since = 0.0
        """Simulated time in seconds at which the engine's token count was `_mark`."""
        self._marks = np.empty(0)
        self._times: list[float] = []
        self._mark_list: list[float] = []
        self._groups: list[tuple[float, int]] = []
        """Heap of pairs (token count of the engine at which the group's last row ends, number of the group)."""
        self._busy_s = 0.0
        """Seconds before the time `_since` during which rows were decoded."""

    def running(self, now: float) -> int:
        """Return the number of rows that are being decoded at time `now`."""
        return len(self._times) - bisect_right(self._times, now)

    def busy_s(self, now: float) -> float:
        """Return the number of seconds before `now` during which rows were decoded."""
        if not self._times:
            return self._busy_s
        return self._busy_s + max(0.0, min(now, self._times[-1]) - self._since)

    def join(self, now: float, groups: Sequence[int], lengths: np.ndarray) -> None:
        """Start `groups` at time `now`. `lengths` has the number of tokens of each of their rows (float64 `[G, rows per
        group]`)."""
        self._settle(now, pause_s=0.0)
        ends = self._mark + lengths
        for group, last in zip(groups, ends.max(axis=1).tolist(), strict=True):
            heapq.heappush(self._groups, (last, group))
        self._foresee(np.sort(np.concatenate((self._marks, ends.reshape(-1)))))

    def pause(self, now: float, seconds: float) -> None:
        """Stop decoding for `seconds`, starting at time `now` or at the end of a pause in progress."""
        self._settle(now, pause_s=seconds)
        self._foresee(self._marks)

    def next_end(self) -> float:
        """Return the time at which the next group ends; infinity if the engine has no group."""
        if not self._groups:
            return math.inf
        return self._times[bisect_left(self._mark_list, self._groups[0][0])]

    def take_ended(self, now: float) -> list[int]:
        """Return the groups that have ended by time `now` and were not returned before. Must be called before `join`
        and `pause`."""
        ended = []
        while self._groups and self.next_end() <= now:
            ended.append(heapq.heappop(self._groups)[1])
        return ended

    def room_at(self, now: float, rows: int) -> float:
        """Return the earliest time, `now` or later, at which the engine has room for `rows` more rows."""
        leaving = len(self._times) + rows - self.rows
        return now if leaving <= 0 else max(now, self._times[leaving - 1])

    def _settle(self, now: float, pause_s: float) -> None:
        """Advance the engine to time `now`, remove rows that have ended, and pause decoding for `pause_s` seconds."""
        self._busy_s = self.busy_s(now)
        gone, running = bisect_right(self._times, now), len(self._times)
        if gone:
            self._mark, self._since = self._mark_list[gone - 1], self._times[gone - 1]
            assert not self._groups or self._groups[0][0] > self._mark, "ended groups were not taken"
        if gone < running and now > self._since:
            self._mark += (now - self._since) / (self._decode_s + self._decode_row_s * (running - gone))
        self._since = max(now, self._since) + pause_s  # A pause in progress ends before the new pause begins.
        self._marks = self._marks[gone:]

    def _foresee(self, marks: np.ndarray) -> None:
        """Compute the time at which each row ends. `marks` has the engine's token counts at which rows end, in
        ascending order."""
        self.stamp += 1
        self._marks = marks
        left = len(marks) - np.arange(len(marks))
        seconds = np.diff(marks, prepend=self._mark) * (self._decode_s + self._decode_row_s * left)
        self._times = (self._since + np.cumsum(seconds)).tolist()
        self._mark_list = marks.tolist()


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One optimizer step, from the end of the previous weight sync to the end of its own weight sync."""

    end_s: float
    seconds: float
    trainer_busy_s: float
    """Seconds during which the trainer computed, excluding waits, reads and weight syncs."""
    engines_busy_s: float
    """Seconds during which engines decoded, summed over the engines."""
    directory_busy_s: float
    """Seconds of work that arrived at the directory, summed over its shards."""
    staleness_mean: float
    staleness_max: int
    """Largest number of weight versions between the start of a group and the step that trained on it."""


@dataclass(slots=True)
class SimulatedRun:
    """The result of a simulated run: its steps, its ready and in-flight groups over time, and the final counts."""

    steps: list[SimulatedStep] = field(default_factory=list)
    depth_times: array[float] = field(default_factory=lambda: array("d"))
    depth_ready: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of groups that are ready for training. Each number is valid from the time at the same index of
    `depth_times` until the next time."""
    depth_in_flight: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of groups that have begun but are not ready for training. Each number is valid from the time at the same
    index of `depth_times` until the next time."""
    started: int = 0
    trained: int = 0
    puts: int = 0
    directory_wait_s: float = 0.0
    """Longest time for which a call waited until the directory had answered earlier calls."""
    dropped: int = 0
    """Number of groups that were dropped because they became too old for training."""
    ready: int = 0
    in_flight: int = 0


class Simulation:
    """Simulates one run in one mode. The result is deterministic. With the same seed each prompt has the same response
    lengths in all modes."""

    def __init__(self, scenario: Scenario, mode: Mode) -> None:
        self._scenario = scenario
        self._streaming = mode in ("streaming", "async_streaming")
        self._paced = mode == "async_streaming"
        """True if prompts begin as the trainer takes chunks, and not a whole step's together after a weight sync."""
        self._staleness = scenario.staleness[mode]
        self._engines = [
            SimulatedEngine(scenario.engine_rows, scenario.decode_s, scenario.decode_row_s)
            for _ in range(scenario.num_engines)
        ]
        self._draw((scenario.steps + self._staleness + 1) * scenario.prompts_per_step)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._order = itertools.count()
        self._version = 0
        """Version of the weights that engines serve; equal to the index of the current train step, from 0."""
        self._begun: dict[int, int] = {}
        """Weight version at which each group began: number of the group -> version. A group is removed when its
        training begins or it is dropped."""
        self._doomed = 0
        """Number of groups that are not ready for training yet but are already too old for it. Other groups begin in
        their place."""
        self._decoding = 0
        self._open = True
        """True while engines admit new groups."""
        self._draining = False
        self._sampler = scenario.sampler[mode]
        self._window = {"in_order": 1, "windowed": scenario.window}.get(self._sampler)
        self._granted: list[tuple[int, int, int]] = []
        """Heap of the ready groups that the sampler lets the trainer take, in the sampler's order: (key, tie-breaker,
        group)."""
        self._blocked: list[int] = []
        """Heap of the groups that are ready but too far ahead in the prompt stream for the sampler to let the trainer
        take them."""
        self._progress = StreamProgress()
        """Positions in the prompt stream whose groups the trainer may take or that were dropped."""
        self._unput: list[list[int]] = [[] for _ in self._engines]
        """Groups that wait for their put, by the number of their engine."""
        self._putting: set[int] = set()
        """Numbers of the engines whose rollout actor has a put in progress."""
        self._shards = [0.0] * scenario.directory_shards
        """Heap of the times at which the directory's shards have answered all calls so far."""
        self._training: list[int] = []
        self._step_groups = 0
        self._step_busy_s = 0.0
        self._step_staleness: list[int] = []
        self._engines_busy_s = 0.0
        self._directory_busy_s = 0.0
        self.run = SimulatedRun()

    def result(self) -> SimulatedRun:
        """Simulate all steps and return the finished run."""
        self._admit()
        while self._version < self._scenario.steps:
            self._now, _, handler, arguments = heapq.heappop(self._events)
            handler(*arguments)
        return self.run

    # ---------------- These methods simulate engines.

    @property
    def _waiting(self) -> int:
        """Number of prompts that can begin now but have not begun; 0 while engines admit no new groups."""
        prompts = self._scenario.prompts_per_step
        allowed = (self._version + self._staleness + 1) * prompts
        if self._paced:
            taken = self.run.trained + len(self._training)
            allowed = min(allowed, taken + (self._staleness + 1) * prompts - min(self._scenario.chunk_groups, prompts))
        return allowed + self.run.dropped + self._doomed - self.run.started if self._open else 0

    def _admit(self, engines: Iterable[int] | None = None) -> None:
        """Start waiting prompts, each on the engine with the fewest running rows, until no engine has room for another.

        `engines` are the numbers of the engines to consider; None means all.
        """
        size, room = self._scenario.group_size, self._scenario.engine_rows
        chosen = range(len(self._engines)) if engines is None else engines
        waiting, begun = self._waiting, dict[int, list[int]]()
        if waiting > 0:
            loads = [(self._engines[number].running(self._now), number) for number in chosen]
            heapq.heapify(loads)
            while waiting and loads[0][0] + size <= room:
                rows, number = loads[0]
                heapq.heapreplace(loads, (rows + size, number))
                begun.setdefault(number, []).append(self._begin())
                waiting -= 1
        for number, groups in begun.items():
            self._collect(number)
            self._engines[number].join(self._now, groups, self._work[groups])
        for number in chosen if waiting else begun:
            self._foresee(number)

    def _begin(self) -> int:
        group = self.run.started
        if group == len(self._lengths):
            self._draw(2 * group)
        self.run.started += 1
        self.run.in_flight += 1
        self._decoding += 1
        self._begun[group] = self._version
        return group

    def _foresee(self, number: int) -> None:
        engine = self._engines[number]
        at = engine.next_end()
        if self._waiting > 0:
            at = min(at, engine.room_at(self._now, self._scenario.group_size))
        if at < float("inf"):
            self._at(at, self._engine_changed, number, engine.stamp)

    def _engine_changed(self, number: int, stamp: int) -> None:
        """Handle the event that a group has ended on engine `number` or that the engine has room for another group.

        Events that were scheduled before the engine's last change are ignored.
        """
        engine = self._engines[number]
        if stamp != engine.stamp:
            return
        self._collect(number)
        if self._waiting > 0:
            self._admit((number,))
        if stamp == engine.stamp:  # The stamp is unchanged if no group has joined since.
            self._foresee(number)

    def _collect(self, number: int) -> None:
        """Take the groups that have ended on engine `number`, and schedule when each is ready. A group is ready when
        its rows are stored.

        Starts the weight sync if it was waiting for the last running groups to end.
        """
        ended = self._engines[number].take_ended(self._now)
        for group in ended:
            self._at(self._now + self._scenario.request_s, self._finished, number, group)
        self._decoding -= len(ended)
        if self._draining and not self._decoding:
            self._sync()

    # ---------------- These methods simulate groups.

    def _finished(self, number: int, group: int) -> None:
        """Let the rollout actor of engine `number` put a group. Groups that finish during a put are put together in the
        next one."""
        self._unput[number].append(group)
        if number not in self._putting:
            self._putting.add(number)
            self._at(self._now, self._put, number)

    def _put(self, number: int) -> None:
        groups, self._unput[number] = self._unput[number], []
        self._at(self._now + self._scenario.put_s(self._tokens(groups)), self._commit, number, *groups)

    def _commit(self, number: int, *groups: int) -> None:
        self.run.puts += 1
        self._at(self._directory_answers(self._scenario.directory_groups_s(len(groups))), self._stored, number, *groups)

    def _stored(self, number: int, *groups: int) -> None:
        if self._unput[number]:
            self._put(number)
        else:
            self._putting.remove(number)
        for group in groups:
            self._became_ready(group)

    def _directory_answers(self, cpu_s: float) -> float:
        """Return the time at which the directory has answered a call of now that takes `cpu_s` seconds of its CPU.

        The shards of the directory answer one call at a time, in the order of arrival, each by the next free shard.
        """
        start_s = max(self._now, self._shards[0])
        heapq.heapreplace(self._shards, start_s + cpu_s)
        self._directory_busy_s += cpu_s
        self.run.directory_wait_s = max(self.run.directory_wait_s, start_s - self._now)
        return start_s + cpu_s

    def _became_ready(self, group: int) -> None:
        self.run.in_flight -= 1
        self.run.ready += 1
        if self._begun[group] < self._version - self._staleness:
            self._doomed -= 1
            self._drop([group])
        elif self._window is None:
            key = self._begun[group] if self._sampler == "oldest_version_first" else 0
            heapq.heappush(self._granted, (key, next(self._order), group))
        else:
            heapq.heappush(self._blocked, group)
        self._grant()
        self._note_depth()
        self._train()

    def _grant(self) -> None:
        """Let the trainer take the ready groups inside the sampler's window, a range of the prompt stream.

        The window begins at the first prompt that was neither granted to the trainer nor dropped. Only the samplers
        `in_order` and `windowed`, which follow the prompt stream, have a window.
        """
        while self._window and self._blocked and self._blocked[0] < self._progress.first + self._window:
            group = heapq.heappop(self._blocked)
            self._progress.settle((group,))
            heapq.heappush(self._granted, (group, 0, group))

    def _drop_stale(self) -> None:
        oldest = self._version - self._staleness
        ready = [*self._blocked, *(group for _, _, group in self._granted)]
        stale = {group for group in ready if self._begun[group] < oldest}
        if stale:
            self._granted = [entry for entry in self._granted if entry[2] not in stale]
            self._blocked = [group for group in self._blocked if group not in stale]
            heapq.heapify(self._granted)
            heapq.heapify(self._blocked)
            self._drop(stale)
            self._grant()
        self._doomed = sum(version < oldest for version in self._begun.values())

    def _drop(self, groups: Collection[int]) -> None:
        for group in groups:
            del self._begun[group]
        self._progress.settle(groups)
        self.run.dropped += len(groups)
        self.run.ready -= len(groups)
        self._admit()

    def _tokens(self, groups: Sequence[int]) -> float:
        """Return the number of tokens of all rows of `groups`, including their prompts."""
        prompts = len(groups) * self._scenario.group_size * self._scenario.prompt_tokens
        return float(self._lengths[list(groups)].sum()) + prompts

    # ---------------- These methods simulate the trainer.

    def _train(self) -> None:
        """Start to train on a chunk if the trainer is free and enough groups are ready. A chunk consists of groups that
        are trained on together."""
        scenario, missing = self._scenario, self._scenario.prompts_per_step - self._step_groups
        wanted = min(scenario.chunk_groups, missing) if self._streaming else missing
        if self._training or not missing or len(self._granted) < wanted:
            return
        taken = min(missing, len(self._granted)) if self._paced else wanted
        groups = self._training = [heapq.heappop(self._granted)[2] for _ in range(taken)]
        self.run.ready -= len(groups)
        self._note_depth()
        self._step_staleness += [self._version - self._begun.pop(group) for group in groups]
        tokens = self._tokens(groups)
        compute_s = scenario.compute_s(len(groups) * scenario.group_size, tokens)
        wait_s = scenario.read_s(tokens) + self._directory_answers(scenario.directory_claim_s) - self._now
        if len(groups) == missing:
            compute_s += scenario.train_step_s
            wait_s += scenario.controller_s
        self._step_busy_s += compute_s
        self._at(self._now + wait_s + compute_s, self._trained)
        if self._paced:
            self._admit()

    def _trained(self) -> None:
        self._step_groups += len(self._training)
        self.run.trained += len(self._training)
        self._training = []
        if self._step_groups < self._scenario.prompts_per_step:
            self._train()
        elif self._scenario.in_flight == "wait" and self._decoding:
            self._open, self._draining = False, True
        else:
            self._sync()

    def _sync(self) -> None:
        self._draining = False
        scenario = self._scenario
        self._at(self._now + scenario.sync_s - scenario.pause_s, self._pause)
        self._at(self._now + scenario.sync_s, self._synced)

    def _pause(self) -> None:
        if self._scenario.pause_s:
            for number, engine in enumerate(self._engines):
                self._collect(number)
                engine.pause(self._now, self._scenario.pause_s)
                self._foresee(number)

    def _synced(self) -> None:
        self._end_step()
        self._version += 1
        if self._version == self._scenario.steps:
            return
        self._open = True
        self._drop_stale()
        self._admit()
        self._train()

    def _end_step(self) -> None:
        before = self.run.steps[-1].end_s if self.run.steps else 0.0
        busy = sum(engine.busy_s(self._now) for engine in self._engines)
        lag = self._step_staleness
        self.run.steps.append(
            SimulatedStep(
                self._now, self._now - before, self._step_busy_s, busy - self._engines_busy_s,
                self._directory_busy_s, float(np.mean(lag)), max(lag),
            )
        )  # fmt: skip
        self._engines_busy_s = busy
        self._step_groups, self._step_busy_s, self._directory_busy_s, self._step_staleness = 0, 0.0, 0.0, []

    # ---------------- These methods draw the workload, schedule events and keep records.

    def _draw(self, num_prompts: int) -> None:
        self._lengths = self._scenario.draw_lengths(num_prompts)
        self._work = self._scenario.draw_work(num_prompts, self._lengths)

    def _at(self, time: float, handler: Callable[..., None], *arguments: int) -> None:
        heapq.heappush(self._events, (time, next(self._order), handler, arguments))

    def _note_depth(self) -> None:
        self.run.depth_times.append(self._now)
        self.run.depth_ready.append(self.run.ready)
        self.run.depth_in_flight.append(self.run.in_flight)


def simulate(scenario: Scenario, mode: Mode) -> SimulatedRun:
    """Simulate all steps of `scenario` in `mode` and return the finished run."""
    return Simulation(scenario, mode).result()
