"""Injures one run as a schedule says, waits for its recovery, and records what became of every fault."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import psutil

from .control import Note, NotesTail, Order
from .injured_run import InjuredRun
from .memory import MemoryLog
from .pairs import FaultKind, Outcome, ProcessKind
from .schedule import Injury

POLL_S = 0.1
SAMPLE_S = 1.0
FIRST_STEP_S = 180.0
"""Seconds within which a run must have come to its first checkpoint."""
RECOVERY_S = 180.0
"""Seconds within which a run must finish a step after a fault: longer than stage_timeout_s, the watchdog's margin and a
new start together."""
STRIKE_S = 20.0
"""Seconds within which an ordered fault must strike: some calls come only with a checkpoint."""
SLOW_S = 0.4
"""Seconds that a slow call takes longer."""
STUTTER_S = (0.3, 0.1)
"""Seconds for which a storage unit, whose calls are not ours to slow, stands and runs by turns."""
END_S = 120.0
STEPS_AFTER = 3
"""Number of steps after a fault by which the run has recovered; those in flight may have been as good as done."""
NOTICE_S = 75.0
"""Seconds that Ray may take to notice that a raylet is dead."""
_ORDER: tuple[Outcome, ...] = ("goes on", "restarts", "stops")


class Hung(RuntimeError):
    """The run finished no step for RECOVERY_S."""


@dataclass(slots=True)
class Fault:
    """What became of one injury."""

    process: ProcessKind
    kind: FaultKind
    pid: int
    at_s: float
    """Seconds since the run's start."""
    present: int
    """Number of processes of the kind before."""
    lasted_s: float = 0.0
    struck: bool = False
    """Whether it has had an effect: a signal was sent, a connection was cut, a write has failed."""
    on_top: bool = False
    worst: Outcome = "goes on"
    """Worst outcome that is allowed."""
    outcome: Outcome = "goes on"
    recovery_s: float = 0.0
    """Seconds from its end to the end of the next step."""
    sentences: list[str] = field(default_factory=list)
    """What the run said of a restart or a stop."""

    def record(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


class Surgeon:
    """Works on one run until its time is over."""

    def __init__(self, run: InjuredRun, tell: Callable[[str], None]) -> None:
        self.run = run
        self.faults: list[Fault] = []
        self.complaints: list[str] = []
        """What the product must not do, in sentences."""
        self.memory = MemoryLog(run.folder.with_name("memory.jsonl"))
        self.launches = 0
        self._tell = tell
        self._tail = NotesTail(run.control)
        self._notes: list[Note] = []
        self._numbers = itertools.count(1)
        self._began_s = time.monotonic()
        self._sampled_s = 0.0
        self._events = 0
        """Number of events in metrics.jsonl that were looked at."""
        self._open: list[Fault] = []
        """Faults from which the run has not recovered."""

    @property
    def steps(self) -> int:
        """Number of steps that were counted so far, those taken again counted again."""
        return sum("committed" in note for note in self._notes)

    def operate(self, injuries: Iterator[Injury], until_s: float) -> None:
        """Start the run, injure it until `until_s` (`time.monotonic`), and end it as a user would. Raises Hung."""
        self._start(resume=False)
        self._wait_for_steps(11, FIRST_STEP_S)  # the checkpoint of step 5 is whole once that of step 10 begins
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
            if pair.fault == "stop":
                self._stop(target, injury.lasts_s)
            elif pair.fault == "kill":
                target.kill()
            elif pair.process == "storage unit":
                self._hurt_unit(target, injury)
            else:
                fault.struck = self._order(target, injury)
            fault.struck = fault.struck or pair.fault in ("stop", "kill") or pair.process == "storage unit"
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
        """Cut the connections of the unit, from the side of its clients, or let it stutter."""
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
        """Order a fault inside the process, and wait until it is over; returns whether it has struck."""
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
        """Wait until the run has finished a step after the last fault, starting it again if it has stopped."""
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
        """Whether what was killed has been noticed and is there again, and steps have been finished since: so many that
        the last began after the faults."""
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
        """Return the worst outcome that the open faults together allow."""
        allowed: list[Outcome] = [fault.worst for fault in self._open]
        return _worse(*allowed)

    def _note_outcomes(self) -> None:
        """Give the open faults the restarts that metrics.jsonl tells of since the last look."""
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
        """Record that the run has stopped, and complain when it said nothing or left something behind."""
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
        """Let time pass, in which notes are read and memory is measured."""
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
        """Interrupt the run, which then saves a checkpoint and ends."""
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
    """Return the worst of them."""
    return _ORDER[max(_ORDER.index(outcome) for outcome in outcomes)]
