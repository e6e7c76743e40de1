"""Passes an order for another number of engines from `headrace scale` to a run, and the run's answer back.

    headrace scale -- scale.json --> the driver looks at it at each step, and once per second while it waits for rows
                   <- scaled.json --

Both files are in the run folder. Nothing here needs Ray or torch, so the command starts at once.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...actors.process.json_lines import replace_file
from ...dataplane.owned_folder import try_lock
from ..errors import UserError

ORDER, ANSWER = "scale.json", "scaled.json"
POLL_S = 0.2
"""Seconds between two looks at the run's answer."""


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """A run's answer to an order."""

    id: str
    """Id of the order."""
    state: Literal["under way", "done", "refused"]
    before: int
    """Number of engines when the run saw the order."""
    engines: tuple[str, ...]
    """Each present engine with its host and the version of its weights, as text."""
    why: str = ""
    """Sentence about what the run waits for, or why it refuses; "" if there is nothing to say."""


class ScaleOrders:
    """The driver's side: the newest order for a run, and its answer. It outlasts restarts of the run."""

    def __init__(self, folder: Path) -> None:
        """Forget the orders to earlier processes of the run in `folder`."""
        self._folder = folder
        self._seen: tuple[int, int] | None = None
        self._order = self._told = ScaleAnswer("", "done", 0, ())
        self.wanted: int | None = None
        """Number of engines that the last order asked for and that the run did not refuse; None without one."""
        for name in (ORDER, ANSWER):
            (folder / name).unlink(missing_ok=True)

    @property
    def is_open(self) -> bool:
        """Whether an order is neither carried out nor refused."""
        return self._order.state == "under way"

    def read(self, num_engines: int) -> int | None:
        """Return the number of engines of a new order; None if there is none. num_engines: present number of
        engines."""
        try:
            state = os.stat(self._folder / ORDER)
            if (state.st_ino, state.st_mtime_ns) == self._seen:
                return None
            self._seen = state.st_ino, state.st_mtime_ns
            told: Any = json.loads((self._folder / ORDER).read_bytes())
            name, engines = str(told["id"]), int(told["engines"])
            if engines < 1:
                return None
        except (OSError, ValueError, KeyError, TypeError):  # A stranger's file is no order.
            return None
        self._order = ScaleAnswer(name, "under way", num_engines, ())
        return engines

    def answer(self, state: Literal["under way", "done", "refused"], engines: tuple[str, ...], why: str = "") -> None:
        """Answer the open order; a no-op without one, or if the answer is the last one again. A full disk is
        ignored."""
        told = replace(self._order, state=state, engines=engines, why=why)
        if not self.is_open or told == self._told:
            return
        self._order = self._told = told
        try:
            replace_file(self._folder / ANSWER, json.dumps(asdict(told)).encode())
        except OSError:
            self._told = ScaleAnswer("", "done", 0, ())


def order_engines(
    folder: Path, engines: int, timeout_s: float, tell: Callable[[str], None] = lambda line: None
) -> ScaleAnswer:
    """Ask the run in `folder` for `engines` engines, and wait for its answer. tell: receives what the run waits for.

    Returns the last answer, which is `under way` if the time is over. Raises UserError if no run is under way there,
    if it ends meanwhile, or if a later order has replaced this one.
    """
    if engines < 1:
        raise UserError(f"--engines: got {engines}, expected a number from 1")
    _expect_run(folder)
    name, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    replace_file(folder / ORDER, json.dumps({"id": name, "engines": engines}).encode())
    last = ScaleAnswer(name, "under way", 0, (), "the run has not seen the order yet")
    while True:
        found = _answer(folder)
        if found is not None and found.id == name and found != last:
            last = found
            tell(last.why)
        if last.state != "under way" or time.monotonic() >= deadline:
            return last
        if _ordered(folder) != name:
            raise UserError(f"--engines: got {engines}, but a later order to {folder} has replaced this one")
        _expect_run(folder)
        time.sleep(POLL_S)


def _expect_run(folder: Path) -> None:
    """Raise UserError if no process has the run in `folder` open."""
    try:
        lock = try_lock(folder / "run.lock")
    except FileNotFoundError:
        raise UserError(f"{folder}: this folder has no run.lock, expected the folder of a run under way") from None
    if lock is not None:
        os.close(lock)
        raise UserError(f"{folder}: no run is under way in this folder, expected one whose engines can be scaled")


def _ordered(folder: Path) -> str:
    try:
        return str(json.loads((folder / ORDER).read_bytes())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _answer(folder: Path) -> ScaleAnswer | None:
    try:
        told = json.loads((folder / ANSWER).read_bytes())
        return ScaleAnswer(**{**told, "engines": tuple(told["engines"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
