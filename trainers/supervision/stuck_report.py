"""Writes the report on a run that makes no progress: its processes, its data plane, and the stacks of all threads.

Processes write their stacks into files on SIGUSR1. The handler is written in C (faulthandler), so a process that hangs
in native code also answers. Every query has a timeout, so that the report is always written. This module imports
neither Ray nor torch, because every actor imports it.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import psutil

from ...actors.process.user_errors import is_users
from ...dataplane.owned_folder import pid_space, process_start

_log = logging.getLogger(__name__)

FOLDER = "stacks"
"""Name of the folder of stack files in the run's folder."""
SIGNAL = signal.SIGUSR1
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
SETTLE_S = 0.2
"""Seconds without growth after which a stack file counts as complete."""

_files: list[TextIO] = []
"""The open stack file. It must stay referenced, because faulthandler keeps only its descriptor."""


def answer_with_stacks(folder: str | os.PathLike[str]) -> None:
    """Install a handler of SIGUSR1 that writes the stacks of this process's threads to a file in the run's `folder`. A
    later call replaces the folder."""
    path = stacks_path(folder, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.append(open(path, "w", encoding="utf-8"))
    faulthandler.register(SIGNAL, _files[-1], all_threads=True)
    while len(_files) > 1:
        _files.pop(0).close()


def stop_answering() -> None:
    """Remove the handler of SIGUSR1, so that the signal ends the process again. Idempotent."""
    faulthandler.unregister(SIGNAL)
    while _files:
        _files.pop().close()


def stacks_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """Return the file that process `pid` of the run in `folder` writes its stacks to."""
    return Path(folder) / FOLDER / f"{pid}.txt"


def collect_stacks(folder: str | os.PathLike[str], pids: Mapping[str, int], timeout_s: float) -> dict[str, str]:
    """Ask processes of this host for their stacks, and return name -> stacks. pids: name -> pid.

    For a process that does not answer, the text says why. Waits at most `timeout_s` for all processes together.
    """
    asked: dict[str, tuple[Path, int]] = {}
    found: dict[str, str] = {}
    for name, pid in pids.items():
        path = stacks_path(folder, pid)
        # The signal would end a process without a handler.
        if not path.exists() or not is_caught(pid, SIGNAL):
            found[name] = "none: the process is gone or does not handle the signal"
            continue
        asked[name] = path, path.stat().st_size
        os.kill(pid, SIGNAL)
    deadline = time.monotonic() + timeout_s
    sizes: dict[str, int] = {}
    while time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        before, sizes = sizes, {name: path.stat().st_size - start for name, (path, start) in asked.items()}
        if all(sizes.values()) and sizes == before:
            break
    for name, (path, start) in asked.items():
        text = path.read_bytes()[start:].decode(errors="replace").strip()
        found[name] = text or f"none: no answer to the signal within {timeout_s:g} s"
    return found


STUCK = "stuck.txt"
"""File in the run's folder with the stacks of actors that were ended because they hung."""


def record_stuck(folder: str | os.PathLike[str], name: str, pid: int) -> str:
    """Append the stacks of a process of this host to stuck.txt, and return the place at which it hangs.

    Returns "" if the process does not answer within STUCK_TIMEOUT_S. folder: the run's folder. name: name of the
    process in the file.
    """
    text = collect_stacks(folder, {name: pid}, STUCK_TIMEOUT_S)[name]
    try:
        with open(Path(folder) / STUCK, "a", encoding="utf-8") as file:
            file.write(f"{heading(f'{name} was stuck')}\n{text}\n\n")
    except OSError as error:  # The place is worth more than the file.
        _log.warning("the stacks of %s are not written: %s", name, error)
    return stuck_place(text)


def stuck_place(stacks: str) -> str:
    """Return the place at which a process hangs, such as `badenv.py:9 (play)`; "" if its stacks do not show it.

    stacks: the stacks of its threads, as faulthandler writes them. The place is the innermost line of the user's code,
    first in a thread that runs an event loop, then in any other. Without such a line it is the innermost line of an
    event loop that does not wait.
    """
    threads = [_FRAME.findall(part) for part in re.split(r"^(?=Thread |Current thread )", stacks, flags=re.MULTILINE)]
    loops = [frames for frames in threads if any(file.endswith("asyncio/base_events.py") for file, _, _ in frames)]
    users = [frame for frames in (*loops, *threads) for frame in frames if is_users(frame[0])]
    busy = [frames[0] for frames in loops if not frames[0][0].endswith("selectors.py")]
    for file, line, function in (*users, *busy):
        return f"{os.path.basename(file)}:{line} ({function})"
    return ""


def remove_stacks(folder: str | os.PathLike[str]) -> None:
    """Remove all stack files of the run; open ones disappear when their processes close them. Idempotent."""
    shutil.rmtree(Path(folder) / FOLDER, ignore_errors=True)


def is_caught(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal; False if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


ASK_TIMEOUT_S = 5.0
"""Seconds within which the directory must answer a request for its status."""
IMPORT_TIMEOUT_S = 60.0
"""Additional seconds for importing the data plane's client. The watchdog imports it only for a report, to stay
small."""
STACKS_TIMEOUT_S = 10.0
STUCK_TIMEOUT_S = 5.0
"""Seconds within which an actor that is about to be ended can tell its stacks."""
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Opened:
    """Message from a run to its watchdog when the data plane is open, with the address of the directory. Plain data."""

    run_id: str
    """Id of the run. It is part of the names of the run's folders in shared memory, and is written in actors.json."""
    local: str
    host: str
    port: int
    """TCP port of the directory (the data plane's metadata service). `local`, `host` and `port` form its
    `DirectoryAddress`."""
    key: str = field(repr=False)
    """Secret of the run's data plane in hexadecimal, which authenticates clients."""
    peer: str
    """Name of the directory in error messages."""


@dataclass(frozen=True, slots=True)
class ActorLine:
    """One entry of actors.json: a process of the run."""

    name: str
    pid: int
    host: str
    """Name of the process's host, for reading only: several hosts can have the same name."""
    space: str = ""
    """Space in which `pid` has its meaning, as `pid_space` returns it; "" if it is unknown."""
    start: int | None = None
    """Start time of the process in clock ticks, as `process_start` returns it; None if the process had already ended,
    or if it is of the data plane and on another host."""
    run: str = ""
    """Id of the run that has started the process. In a folder, a run continues after another one."""

    @property
    def here(self) -> bool:
        """True when the process is on this host, in the same space of process ids."""
        return self.space == pid_space()

    @property
    def may_live(self) -> bool:
        """False when the process is known to have ended."""
        return not self.here or (self.start is not None and process_start(self.pid) == self.start)


def listed_actors(folder: Path, run_id: str | None = None) -> list[ActorLine] | None:
    """Return all processes in actors.json of the run's `folder`, those too that were replaced and may still live. With
    `run_id`, only those of that run. Returns None if the file is missing or is not such a list."""
    try:
        content = json.loads((folder / "actors.json").read_text(encoding="utf-8"))
        lines = [
            ActorLine(**{"run": content["run_id"], **actor}) for actor in content.get("earlier", []) + content["actors"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return [line for line in lines if run_id in (None, line.run)]


def read_actors(folder: Path, run_id: str | None = None) -> list[ActorLine]:
    """Return the present process of each actor from actors.json in the run's `folder`. Actors that have left the run
    are not among them. Returns [] if the file is missing or unreadable, or if the run id in it is not `run_id` (None
    accepts any id)."""
    try:
        content = json.loads((folder / "actors.json").read_text(encoding="utf-8"))
        latest, present = content["run_id"], {actor["name"] for actor in content["actors"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    lines = listed_actors(folder, latest) or [] if run_id in (None, latest) else []
    return list({line.name: line for line in lines if line.name in present}.values())


def write_actors(folder: Path, run_id: str, actors: Iterable[tuple[Any, ...]], *, left: str = "") -> None:
    """Write processes of a run to actors.json. `actors` gives (name, pid, host, `pid_space`, `process_start`); without
    a start time, that of a process on this host is looked up. A process replaces an earlier one of the same name. Those
    that were replaced, or are of earlier runs, are kept apart in the file while they may live. So is the process named
    `left`, which has left the run.

    The list has to be written before the run makes others depend on it (with no process), and again when processes have
    started and before they use a GPU. All processes of a run can then be found and ended, those too that were replaced
    and hang. The id is part of the names of the run's folders in shared memory.
    """
    lines = [ActorLine(*actor, run=run_id) for actor in actors]
    lines = [
        replace(line, start=process_start(line.pid)) if line.here and line.start is None else line for line in lines
    ]
    listed = listed_actors(folder) or []
    known = [line for line in (*read_actors(folder, run_id), *lines) if line.name != left]
    present = {line.name: line for line in known}.values()
    earlier = [line for line in listed if line not in present and line.may_live]
    content = {
        "run_id": run_id,
        "actors": [asdict(line) for line in present],
        "earlier": [asdict(line) for line in earlier],
    }
    draft = folder / "actors.json.new"
    draft.write_text(json.dumps(content, indent=1), "utf-8")
    draft.rename(folder / "actors.json")


def write_report(
    folder: Path, sentence: str, driver_pid: int, opened: Opened | None, groups: int, group_size: int
) -> Path:
    """Write the report watchdog.txt into the run's `folder`, and return its path.

    `sentence` says what happened. `opened` is None if the run has not yet told the watchdog the directory's address. A
    step takes `groups` groups of `group_size` rows.
    """
    actors = read_actors(folder, opened.run_id) if opened is not None else []
    everyone = [ActorLine(DRIVER, driver_pid, socket.gethostname(), pid_space()), *actors]
    stacks = collect_stacks(folder, {actor.name: actor.pid for actor in everyone if actor.here}, STACKS_TIMEOUT_S)
    sections = [
        heading(sentence),
        "\n".join(["Processes:", *_table([_process_line(actor) for actor in everyone])]),
        "\n".join(["Data plane:", *(f"  {line}" for line in _data_plane(opened, groups, group_size))]),
        *(f"Stacks of {name}:\n{text}" for name, text in stacks.items()),
    ]
    path = folder / "watchdog.txt"
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    return path


def heading(sentence: str) -> str:
    """Return the first line of a report: the time and what happened."""
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{now}: {sentence}"


def _process_line(actor: ActorLine) -> tuple[str, ...]:
    where = f"pid {actor.pid} on {actor.host}"
    if not actor.here:
        return actor.name, where, "on another host"
    try:
        process = psutil.Process(actor.pid)
        with process.oneshot():
            times = process.cpu_times()
            memory = process.memory_info().rss / 1e6
            return actor.name, where, process.status(), f"{times.user + times.system:.1f} s of CPU", f"{memory:,.0f} MB"
    except psutil.NoSuchProcess:
        return actor.name, where, "gone"
    except psutil.AccessDenied:
        return actor.name, where, "belongs to another user"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = max(len(row) for row in rows)
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(columns)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    ]


def _data_plane(opened: Opened | None, groups: int, group_size: int) -> list[str]:
    if opened is None:
        return ["it was not open yet"]
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(_status(opened))
        except Exception as error:  # Every error goes into the report, because the report must be written.
            answer.append(error)

    asking = threading.Thread(target=ask, name="ask the directory", daemon=True)
    asking.start()
    asking.join(IMPORT_TIMEOUT_S + ASK_TIMEOUT_S)
    if not answer:
        return [f"the directory does not answer within {IMPORT_TIMEOUT_S + ASK_TIMEOUT_S:g} s"]
    [status] = answer
    if isinstance(status, Exception):
        return [f"the directory does not answer: {status}"]
    written = ", ".join(f"{field} {count}" for field, count in status.ready.items()) or "nothing"
    return [
        f"rows: {status.rows} ({_groups(status.rows, group_size)}); a step takes {groups} groups of {group_size}",
        f"ready, rows in which a field is written: {written}",
        f"leased: {status.leased_rows} rows ({_groups(status.leased_rows, group_size)}) by {status.leases} claims, "
        f"the oldest for {status.oldest_lease_s:.1f} s" + (f" ({status.oldest_lease})" if status.oldest_lease else ""),
        f"waiting: {status.waiting_claims} claims for rows, {status.waiting_puts} puts for room",
        f"bytes: {status.bytes_used} used, {status.bytes_reserved} reserved, capacity {status.bytes_capacity}",
    ]


def _groups(rows: int, group_size: int) -> str:
    return f"{rows / group_size:g} groups"


def _status(opened: Opened) -> Any:
    """Ask the directory for its `DataPlaneStatus`. Raises DataPlaneError."""
    from ...dataplane.directory import requests
    from ...dataplane.rpc.frames import DirectoryAddress
    from ...dataplane.rpc.socket_link import SocketLink
    from ...dataplane.security.run_key import unpacked
    from ...dataplane.status import DataPlaneStatus

    address = DirectoryAddress(opened.local, opened.host, opened.port)
    link = SocketLink(address, unpacked(bytes.fromhex(opened.key)), opened.peer, connect_s=None)
    try:
        reply = link.call("status", requests.encode(requests.Status(None)), ASK_TIMEOUT_S)
        return DataPlaneStatus.from_bytes(requests.body_of(reply, "status", ASK_TIMEOUT_S))
    finally:
        link.detach()
