"""The watchdog: a process beside the driver that ends a run which stands still, and what a killed driver leaves behind.

    python -m headrace.trainers.supervision.watchdog DESCRIPTOR PID FOLDER ...      (`watched.py` starts it)

The driver beats (`heartbeat.py`) where a stage begins and ends. A beat that is older than its bound and a margin:
watchdog.txt in the run's folder, then SIGUSR2 to the driver; if it is not gone in time, its whole family is killed. A
driver that is gone without a word (kill -9): what it left is killed and removed. One line on standard error says which
it was; a line on standard output, the driver's to read, comes before the signal.
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
from .report import Opened, heading, read_actors, write_report
from .stack_dumps import is_caught

POLL_S = 1.0
"""How often the heartbeat is read."""
LOOK_S = 5.0
"""How often the run's processes are looked up: some milliseconds each time."""
STOP = signal.SIGUSR2
"""Asks the driver to end. Not SIGINT, which shells have the commands ignore that they start in the background."""
MARGIN_S = 30.0
"""Beyond a stage's bound: whoever waits in it gives up first, and can say more."""
GRACE_S = 30.0
"""A driver that is to stop and gives no sign of life for so long is killed."""
END = {"end": True}
"""The driver's last line: all is well, or it has been told by others."""


class Watchdog:
    """Watches one driver, until it says that the run is over or has to be ended."""

    def __init__(self, options: argparse.Namespace) -> None:
        """options: of `main`."""
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

    def watch(self) -> None:
        """Returns when the run is over, one way or the other."""
        while not self._over:
            self._listen(POLL_S)
            if self._over:
                return
            if not self._driver_is_alive():
                self._clean_up(f"the driver (pid {self._pid}) is gone without a word, {self._reader.read()}: killed?")
                return
            if time.monotonic() - self._looked_s > LOOK_S:
                self._look()
            beat = self._reader.read()
            if self.stood_s(beat) > beat.bound_s + self._margin_s and self._stop(beat):
                return

    # ------------------------------------------------------------ what the driver says

    def _listen(self, timeout_s: float) -> None:
        """Take in what it has written, for `timeout_s` at most."""
        if not select.select([0], [], [], timeout_s)[0]:
            return
        data = os.read(0, 1 << 16)
        if not data:  # every end of the pipe is closed, which is the driver's end
            self._wait_for_driver(self._grace_s)
            self._over = self._driver_is_alive()  # and if it is not the driver's: it wants no watchdog any more
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
        """How long the driver has stood where it stands, without the time that somebody has stopped it (Ctrl-Z)."""
        now = time.monotonic()
        try:
            if psutil.Process(self._pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                self._awake_s = now
        except psutil.NoSuchProcess:
            return 0.0
        return now - max(beat.since_s, self._awake_s)

    def _driver_is_alive(self) -> bool:
        return self._family.driver is not None and is_alive(self._family.driver)

    def _wait_for_driver(self, timeout_s: float) -> None:
        """Until it is gone."""
        deadline = time.monotonic() + timeout_s
        while self._driver_is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _look(self) -> None:
        self._family.look()
        if self._opened is not None:
            actors = read_actors(self._folder, self._opened.run_id)
            self._family.add((actor.pid, actor.start) for actor in actors if actor.here and actor.start)
        self._looked_s = time.monotonic()

    # ------------------------------------------------------------ ends

    def _stop(self, beat: Beat) -> bool:
        """Report, then end the run. False: it went on while the report was written."""
        sentence = (
            f"{beat}: no progress for {self.stood_s(beat):.0f} s, expected within {beat.bound_s:g} s "
            f"(and {self._margin_s:g} s of margin)"
        )
        path = write_report(self._folder, sentence, self._pid, self._opened, *self._groups)
        self._listen(0.0)
        if self._over or self._reader.read() != beat:
            _append(path, "It went on while this was written, and was left alone.")
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
            _append(path, "The run stopped by itself when it was told to.")
            return True
        how = "did not stop" if self._driver_is_alive() else "was gone without a word"
        self._clean_up(f"the driver (pid {self._pid}) {how} when it was told to end", path)
        return True

    def _wait_for_end(self) -> None:
        """Until the driver is through, gone, or without a sign of life for the grace."""
        told_s = time.monotonic()
        while not self._over and self._driver_is_alive():
            self._listen(POLL_S)
            if time.monotonic() - max(told_s, self._reader.read().since_s) > self._grace_s:
                return

    def _clean_up(self, sentence: str, path: Path | None = None) -> None:
        """Kill and remove what is left of the run; says so in watchdog.txt, behind what is there when `path` is."""
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
    """In the run's log."""
    try:
        print(f"headrace watchdog: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal is gone with the driver; watchdog.txt has it all


def main(argv: Sequence[str] | None = None) -> None:
    """The watchdog's process."""
    parser = argparse.ArgumentParser(prog="headrace.trainers.supervision.watchdog")
    parser.add_argument("descriptor", type=int, help="of the heartbeat")
    parser.add_argument("pid", type=int, help="of the driver")
    parser.add_argument("folder", type=Path, help="the run's")
    parser.add_argument(
        "--strangers", type=lambda text: [int(pid) for pid in text.split(",") if pid], default=[], help="pids to spare"
    )
    parser.add_argument("--margin-s", type=float, default=MARGIN_S)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--groups", type=int, default=1, help="that a step takes")
    parser.add_argument("--group-size", type=int, default=1)
    Watchdog(parser.parse_args(argv)).watch()


if __name__ == "__main__":
    main()
