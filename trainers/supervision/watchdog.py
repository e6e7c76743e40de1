"""Runs the watchdog process, which ends a run without progress and cleans up after a killed driver.

    python -m headrace.trainers.supervision.watchdog DESCRIPTOR PID FOLDER ...      (`under_watchdog.py` starts it)

The driver writes a heartbeat (`heartbeat.py`) when a stage begins and when it ends. When a stage exceeds its time limit
by more than a margin, the watchdog writes watchdog.txt into the run's folder, prints a line on standard output for the
driver to read, and sends SIGUSR2 to the driver. If the driver does not end in time, the watchdog kills it and all
processes of the run. When the driver ends without notice (kill -9), the watchdog kills the remaining processes of the
run and removes their folders in shared memory. In either case one line on standard error describes the event.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from .cleanup import Family, is_alive, remove_shared_memory
from .heartbeat import Beat, HeartbeatReader
from .own_clock import OwnClock
from .stuck_report import Opened, heading, is_caught, listed_actors, write_report

POLL_S = 1.0
"""Seconds between two reads of the heartbeat."""
LOOK_S = 5.0
"""Seconds between two searches for the run's processes, which take some milliseconds each."""
STOP = signal.SIGUSR2
"""Signal that asks the driver to end. SIGINT would not work, because shells make background commands ignore it."""
MARGIN_S = 30.0
"""Seconds by which a stage can exceed its time limit before the watchdog acts. In this time, the waiting code in the
stage can fail by itself with a better error."""
GRACE_S = 30.0
"""Seconds without a heartbeat after which a driver that was asked to stop is killed."""
END = {"end": True}
"""Message from the driver to the watchdog that the run has ended."""


class Watchdog:
    """Watches one driver until its run is over or must be ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Create the watchdog of one driver. `options` are the parsed command-line options of `main`."""
        self._folder: Path = options.folder
        self._pid: int = options.pid
        self._margin_s: float = options.margin_s
        self._grace_s: float = options.grace_s
        self._groups: tuple[int, int] = (options.groups, options.group_size)
        self._reader = HeartbeatReader(options.descriptor)
        self._family = Family(self._pid, options.strangers)
        self._line = b""
        self._opened: Opened | None = None
        self._run_ids: list[str] = []
        self._over = False
        self._looked_s = self._awake_s = time.monotonic()
        self._clock = OwnClock()

    def watch(self) -> None:
        """Watch until the run is over or has been ended."""
        while not self._over:
            self._listen(POLL_S)
            if self._over:
                return
            if not self._driver_is_alive():
                seen = f"last heartbeat: {self._reader.read()}"
                self._clean_up(f"the driver (pid {self._pid}) ended without notice ({seen}), it was probably killed")
                return
            if time.monotonic() - self._looked_s > LOOK_S:
                self._look()
            beat = self._reader.read()
            if self.is_stuck(beat) and self._stop(beat):
                return

    # ---------------- These methods read the driver's messages and watch it.

    def _listen(self, timeout_s: float) -> None:
        if not select.select([0], [], [], timeout_s)[0]:
            return
        data = os.read(0, 1 << 16)
        if not data:  # All writing ends of the pipe are closed, usually because the driver has ended.
            self._wait_for_driver(self._grace_s)
            # If the driver still runs, it has closed the pipe to end the watchdog.
            self._over = self._driver_is_alive()
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if said == END:
                self._over = True
                return
            self._opened = Opened(**said)
            self._run_ids.append(self._opened.run_id)
            self._look()

    def stood_s(self, beat: Beat) -> float:
        """Return for how many seconds the heartbeat `beat` has stood still. The time in which the driver was suspended
        (Ctrl-Z) does not count, nor that in which this process was, because it cannot know what the driver did."""
        return self._since(beat.since_s)

    def _since(self, begin_s: float) -> float:
        """Return the seconds since `begin_s` without interruptions; see `stood_s`."""
        now = time.monotonic()
        self._clock.now_s()
        if self._clock.was_away():
            self._awake_s = now
        try:
            if psutil.Process(self._pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                self._awake_s = now
        except psutil.NoSuchProcess:
            return 0.0
        return now - max(begin_s, self._awake_s)

    def is_stuck(self, beat: Beat) -> bool:
        """Return whether the stage that the heartbeat names has exceeded its time limit by more than the margin."""
        return self.stood_s(beat) > beat.bound_s + self._margin_s

    def _driver_is_alive(self) -> bool:
        return self._family.driver is not None and is_alive(self._family.driver)

    def _wait_for_driver(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._driver_is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _look(self) -> None:
        self._family.look()
        if self._opened is not None:
            actors = listed_actors(self._folder, self._opened.run_id) or ()
            self._family.add((actor.pid, actor.start) for actor in actors if actor.here and actor.start)
        self._looked_s = time.monotonic()

    # ---------------- These methods end the run.

    def _stop(self, beat: Beat) -> bool:
        """Write the report, then end the run; returns False when the run made progress while the report was written."""
        sentence = (
            f"{beat}: no progress for {self.stood_s(beat):.0f} s, expected within {beat.bound_s:g} s "
            f"(and {self._margin_s:g} s of margin)"
        )
        path = write_report(self._folder, sentence, self._pid, self._opened, *self._groups)
        self._listen(0.0)
        if self._over or self._reader.read() != beat:
            _append(path, "The run made progress while this was written, and was left alone.")
            return self._over
        sys.stdout.write(f"{sentence}; report: {path}\n")
        sys.stdout.flush()
        _say(f"{sentence}; stopping the run; report: {path}")
        self._family.look()
        try:
            os.kill(self._pid, STOP if is_caught(self._pid, STOP) else signal.SIGTERM)
        except ProcessLookupError:
            pass
        self._wait_for_end()
        if self._over:
            _append(path, "The run stopped by itself when the watchdog asked it to.")
            return True
        how = "did not stop" if self._driver_is_alive() else "ended without notice"
        self._clean_up(f"the driver (pid {self._pid}) {how} when the watchdog asked it to stop", path)
        return True

    def _wait_for_end(self) -> None:
        """Wait until the driver ends. It reports its end, dies, or writes no heartbeat for GRACE_S seconds."""
        told_s = time.monotonic()
        while not self._over and self._driver_is_alive():
            self._listen(POLL_S)
            if self._since(max(told_s, self._reader.read().since_s)) > self._grace_s:
                return

    def _clean_up(self, sentence: str, path: Path | None = None) -> None:
        """Kill the remaining processes of the run and remove its shared memory. The actions taken are written to
        watchdog.txt, after the report at `path` if there is one."""
        self._look()
        killed = self._family.kill()
        removed = [name for run_id in self._run_ids for name in remove_shared_memory(run_id)]
        done = f"killed {len(killed)} processes ({', '.join(killed)})" if killed else "no process was left"
        done += f"; removed {', '.join(removed)}" if removed else "; no shared memory was left"
        if path is None:
            path = self._folder / "watchdog.txt"
            path.write_text("", encoding="utf-8")
        _append(path, f"{heading(sentence)}\n{done}")
        _say(f"{sentence}; {done}; report: {path}")
        self._over = True


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n{text}\n" if file.tell() else f"{text}\n")


def _say(text: str) -> None:
    """Print a line to standard error, which the driver's terminal or log shows."""
    try:
        print(f"headrace watchdog: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # The terminal ended with the driver. The message is also in watchdog.txt.


def main(argv: Sequence[str] | None = None) -> None:
    """Run the watchdog process with the command-line arguments `argv`."""
    parser = argparse.ArgumentParser(prog="headrace.trainers.supervision.watchdog")
    parser.add_argument("descriptor", type=int, help="file descriptor of the heartbeat's memory")
    parser.add_argument("pid", type=int, help="process id of the driver")
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument(
        "--strangers",
        type=lambda text: [int(pid) for pid in text.split(",") if pid],
        default=[],
        help="process ids below the driver that do not belong to the run, separated by commas",
    )
    parser.add_argument("--margin-s", type=float, default=MARGIN_S, help="seconds beyond a stage's bound")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="seconds that the driver has to stop")
    parser.add_argument("--groups", type=int, default=1, help="number of groups that a step takes")
    parser.add_argument("--group-size", type=int, default=1, help="number of rows of a group")
    Watchdog(parser.parse_args(argv)).watch()


if __name__ == "__main__":
    main()
