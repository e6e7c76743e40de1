"""Injects faults into one run as a schedule says, waits for its recovery, and records the outcome of every fault."""

from __future__ import annotations

import itertools
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import psutil

from headrace.tests.drills.chaos.control import Note, NotesTail, Order
from headrace.tests.drills.chaos.faults import FaultKind, Injury, Outcome, ProcessKind
from headrace.tests.drills.chaos.injured_run import InjuredRun
from headrace.tests.drills.chaos.memory import MemoryLog

POLL_S = 0.1
SAMPLE_S = 1.0
FIRST_STEP_S = 180.0
"""Seconds within which a new run must finish enough steps to have a complete checkpoint."""
RECOVERY_S = 180.0
"""Seconds within which a run must recover after a fault. This is longer than `resources.stage_timeout_s`, the
watchdog's margin and a new start together."""
STRIKE_S = 20.0
"""Seconds within which an ordered fault must have its first effect. Some of the affected calls are made only when a
checkpoint is written."""
SLOW_S = 0.4
"""Seconds by which a slow-call fault delays each call."""
STUTTER_S = (0.3, 0.1)
"""Seconds for which a storage unit is suspended, and then runs, by turns. This takes the place of slow calls, because
the hook cannot delay the calls inside a storage unit."""
END_S = 120.0
STEPS_AFTER = 3
"""Number of steps that a run must finish after a fault before it counts as recovered. Fewer would not prove recovery,
because steps in flight may have been almost done when the fault struck."""
NOTICE_S = 75.0
"""Seconds that Ray may take to notice that a raylet (Ray's process on each node) is dead."""
_ORDER: tuple[Outcome, ...] = ("goes on", "restarts", "stops")


class Hung(RuntimeError):
    """Raised when a run does not reach its first checkpoint, does not recover from a fault, or does not end in time."""


@dataclass(slots=True)
class Fault:
    """Record of one injected fault and its outcome."""

    process: ProcessKind
    kind: FaultKind
    pid: int
    at_s: float
    """Seconds from the run's start to the fault."""
    present: int
    """Number of living processes of this kind just before the fault."""
    lasted_s: float = 0.0
    struck: bool = False
    """True if the fault had an effect, for example a signal was sent, a connection was cut, or a write failed."""
    on_top: bool = False
    worst: Outcome = "goes on"
    """Most severe outcome of the fault that is allowed."""
    outcome: Outcome = "goes on"
    recovery_s: float = 0.0
    """Seconds that the run took to recover, from when all faults were over until STEPS_AFTER steps had been
    finished."""
    sentences: list[str] = field(default_factory=list)
    """Sentences with which the run explained a restart or a stop."""

    def record(self) -> dict[str, object]:
        """Return the record as plain data for faults.jsonl."""
        return asdict(self)


class Surgeon:
    """Injects faults into one run, and checks that it recovers from them, until the run's time is over."""

    def __init__(self, run: InjuredRun, tell: Callable[[str], None]) -> None:
        self.run = run
        self.faults: list[Fault] = []
        self.complaints: list[str] = []
        """Sentences about things that the run did although the library promises that it does not."""
        self.memory = MemoryLog(run.folder.with_name("memory.jsonl"))
        self.launches = 0
        self._tell = tell
        self._tail = NotesTail(run.control)
        self._notes: list[Note] = []
        self._numbers = itertools.count(1)
        self._began_s = time.monotonic()
        self._sampled_s = math.inf
        """When memory was measured last; infinite until the run has started, because it grows until then."""
        self._events = 0
        """Number of events in metrics.jsonl that have been read."""
        self._open: list[Fault] = []
        """Faults from which the run has not recovered yet."""

    @property
    def steps(self) -> int:
        """Number of steps committed so far. A step that is repeated after going back to a checkpoint counts again."""
        return sum("committed" in note for note in self._notes)

    def operate(self, injuries: Iterator[Injury], until_s: float) -> None:
        """Start the run, inject faults until the time `until_s`, and end it with an interrupt, as a user would. The
        time is that of `time.monotonic()`. Raises Hung if the run makes no progress."""
        self._start(resume=False)
        self._wait_for_steps(11, FIRST_STEP_S)  # the checkpoint of step 5 is whole once that of step 10 begins
        self._sampled_s = 0.0
        for injury in injuries:
            self._pause(injury.rest_s)
            if time.monotonic() > until_s:
                break
            self._suffer(injury)
            if not injury.on_top:
                self._recover()
        self._recover()
        self._end()

    # ------------------------------------------------------------ faults

    def _suffer(self, injury: Injury) -> None:
        pair = injury.pair
        present = self.run.look().get(pair.process, [])
        if not present:
            return  # just being replaced, or the watchdog was killed
        # Rank 0, the first, is the one that takes shared memory.
        target = present[0 if pair.fault == "shm" else int(injury.choice * len(present))]
        fault = Fault(
            pair.process, pair.fault, target.pid, round(time.monotonic() - self._began_s, 1), len(present),
            worst=pair.worst, on_top=injury.on_top,
        )  # fmt: skip
        self._tell(f"{len(self.faults) + 1} faults, {self.steps} steps: {pair}")
        self.faults.append(fault)
        self._open.append(fault)
        began_s = time.monotonic()
        try:
            if pair.fault in ("stop", "pause"):
                self._stop(target, injury.lasts_s)
            elif pair.fault == "kill":
                target.kill()
            elif pair.process == "storage unit":
                self._hurt_unit(target, injury)
            else:
                fault.struck = self._order(target, injury)
            fault.struck = fault.struck or pair.fault in ("stop", "pause", "kill") or pair.process == "storage unit"
        except psutil.NoSuchProcess:
            pass  # it ended by itself, as another was killed
        fault.lasted_s = round(time.monotonic() - began_s, 1)

    def _stop(self, target: psutil.Process, lasts_s: float) -> None:
        target.suspend()
        try:
            self._pause(lasts_s)
        finally:
            target.resume()

    def _hurt_unit(self, target: psutil.Process, injury: Injury) -> None:
        """Inject a fault into a storage unit from outside. All other processes of the run cut their connections to it,
        or it is suspended for short times so that its calls are slow."""
        if injury.pair.fault == "cut":
            for members in self.run.look().values():
                for process in members:
                    if process != target:
                        self._give(process, "cut", injury.lasts_s)
            self._pause(1.0)
            return
        ends = time.monotonic() + injury.lasts_s
        while time.monotonic() < ends:
            self._stop(target, STUTTER_S[0])
            self._pause(STUTTER_S[1])

    def _order(self, target: psutil.Process, injury: Injury) -> bool:
        """Order the process `target` to inject the fault into its own calls, and wait until the fault is over. Returns
        whether it had an effect."""
        number = self._give(target, injury.pair.fault, injury.lasts_s)
        deadline = time.monotonic() + STRIKE_S
        while time.monotonic() < deadline and self.run.returncode is None and target.is_running():
            self._pause(POLL_S)
            if any(note.get("struck") == number for note in self._notes):
                if injury.pair.fault != "cut":
                    self._pause(injury.lasts_s)
                return True
        return any(note.get("struck") == number for note in self._notes)

    def _give(self, target: psutil.Process, kind: str, lasts_s: float) -> int:
        number = next(self._numbers)
        folder = str(self.run.folder) if kind in ("disk", "slow_checkpoint") else ""
        ports = self.run.unit_ports() if kind == "cut" else ()
        self.run.control.order(target.pid, Order(number, kind, lasts_s, STRIKE_S, SLOW_S, folder, ports))
        return number

    # ------------------------------------------------------------ recovery

    def _recover(self) -> None:
        """Wait until the run has recovered from all of its faults, and resume it if it has stopped. An outcome that is
        more severe than allowed becomes a complaint. Raises Hung if the run does not recover within RECOVERY_S."""
        since_s = time.monotonic()
        deadline = since_s + RECOVERY_S
        while self._open:
            if self.run.returncode is not None:
                self._note_stop()
                self._start(resume=True)
                deadline = time.monotonic() + RECOVERY_S
            self._pause(POLL_S)
            if self._has_recovered(since_s):
                self._note_outcomes()
                for fault in self._open:
                    fault.recovery_s = round(time.monotonic() - since_s, 1)
                    if _ORDER.index(fault.outcome) > _ORDER.index(self._worst_allowed()):
                        self.complaints.append(
                            f"{fault.kind} {fault.process} at {fault.at_s:.0f} s: the run {fault.outcome}, expected "
                            f"that it {self._worst_allowed()}: {' / '.join(fault.sentences)}"
                        )
                self._open.clear()
            elif time.monotonic() > deadline:
                self._note_outcomes()
                raise Hung(
                    f"no step was finished for {RECOVERY_S:.0f} s after "
                    + " and ".join(f"{fault.kind} {fault.process} (pid {fault.pid})" for fault in self._open)
                )

    def _has_recovered(self, since_s: float) -> bool:
        """Return whether the run has recovered from faults since `since_s` (by `time.monotonic()`). It has when it has
        finished STEPS_AFTER steps, killed processes have been replaced, and Ray has noticed a killed raylet (or
        NOTICE_S have passed)."""
        if sum("committed" in note and note["t"] > since_s for note in self._notes) < STEPS_AFTER:
            return False
        kinds = self.run.look()
        for fault in self._open:
            if fault.kind == "kill":
                if fault.process != "raylet" and len(kinds.get(fault.process, [])) < fault.present:
                    return False
                if fault.process == "raylet" and fault.outcome == "goes on":
                    self._note_outcomes()
                    if fault.outcome == "goes on" and time.monotonic() - since_s < NOTICE_S:
                        return False
        return True

    def _worst_allowed(self) -> Outcome:
        """Return the most severe outcome that is allowed for the faults from which the run has not recovered yet."""
        allowed: list[Outcome] = [fault.worst for fault in self._open]
        return _worse(*allowed)

    def _note_outcomes(self) -> None:
        """Read the new events in metrics.jsonl. A restart becomes the outcome of all faults from which the run has not
        recovered yet."""
        for event in self._new_events():
            if event["event"] == "resumed" and event.get("died"):
                self._set("restarts", event["died"])

    def _new_events(self) -> list[Note]:
        try:
            lines = (self.run.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        events = [json.loads(line) for line in lines if line.endswith(b"\n") and b'"event"' in line]
        new, self._events = events[self._events :], len(events)
        return new

    def _set(self, outcome: Outcome, sentence: str) -> None:
        for fault in self._open:
            fault.outcome = _worse(fault.outcome, outcome)
            fault.sentences.append(sentence)

    def _note_stop(self) -> None:
        """Record that the run has stopped. If it gave no explanation, or left processes or shared memory behind, add a
        complaint."""
        left = self.run.left_behind()
        sentence = self.run.explanation()
        names = " and ".join(f"{fault.kind} {fault.process}" for fault in self._open) or "nothing"
        if not sentence:
            self.complaints.append(
                f"the run stopped after {names} (exit code {self.run.returncode}) without a sentence that says why"
            )
        if left:
            self.complaints.append(f"the run stopped after {names} and left behind: {', '.join(left)}")
            self.run.end()
        self._set("stops", sentence or f"exit code {self.run.returncode}, no sentence")

    # ------------------------------------------------------------ time

    def _start(self, *, resume: bool) -> None:
        self.run.start(resume=resume)
        self.launches += 1

    def _wait_for_steps(self, count: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.steps < count:
            if self.run.returncode is not None:
                raise Hung(f"the run ended before its first fault: {self.run.explanation()}")
            if time.monotonic() > deadline:
                raise Hung(f"the run did not reach step {count} within {timeout_s:.0f} s")
            self._pause(POLL_S)

    def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, and meanwhile read notes and sample the run's memory."""
        deadline = time.monotonic() + seconds
        while True:
            self._notes += [note for note in self._tail.new() if not note.keys() & {"putting", "read"}]
            now = time.monotonic()
            if now - self._sampled_s > SAMPLE_S:
                self._sampled_s = now
                self.memory.sample(self.run.look(), self.run.shared_memory())
            if now >= deadline:
                return
            time.sleep(min(POLL_S, deadline - now))

    def _end(self) -> None:
        """Interrupt the run, and wait until it has saved a checkpoint and ended. A wrong exit code, or anything that it
        leaves behind, becomes a complaint. Raises Hung if it does not end in time."""
        self.run.interrupt()
        deadline = time.monotonic() + END_S
        while self.run.returncode is None:
            if time.monotonic() > deadline:
                raise Hung(f"the run did not end within {END_S:.0f} s of an interrupt")
            self._pause(POLL_S)
        if self.run.returncode != 128 + signal.SIGINT:
            self.complaints.append(
                f"an interrupted run ended with exit code {self.run.returncode}, expected 130: {self.run.explanation()}"
            )
        left = self.run.left_behind()
        if left:
            self.complaints.append(f"an interrupted run left behind: {', '.join(left)}")


def _worse(*outcomes: Outcome) -> Outcome:
    """Return the most severe of the outcomes."""
    return _ORDER[max(_ORDER.index(outcome) for outcome in outcomes)]
