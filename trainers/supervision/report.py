"""What a watchdog writes of a run that stands still: data plane, processes, stacks. Every question has a bound."""

from __future__ import annotations

import datetime
import json
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ...codecs.owned_folder import process_start
from .stack_dumps import collect_stacks

ASK_TIMEOUT_S = 5.0
"""Of the directory to answer."""
IMPORT_TIMEOUT_S = 60.0
"""In which the data plane's client must be imported, too: only now, as a watchdog is to be light."""
STACKS_TIMEOUT_S = 10.0
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Opened:
    """What a run tells its watchdog once its data plane is up. Plain data."""

    run_id: str
    """Part of the names of its folders in shared memory; that of its actors.json."""
    local: str
    host: str
    port: int
    token: str
    """The directory's `DirectoryAddress`, its token in hexadecimal."""
    peer: str
    """What errors call the directory."""


@dataclass(frozen=True, slots=True)
class ActorLine:
    """A process of actors.json."""

    name: str
    pid: int
    host: str
    start: int | None = None
    """`process_start` of it; None where it was gone by then, or is another host's."""

    @property
    def here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == socket.gethostname()


def read_actors(folder: Path, run_id: str | None = None) -> list[ActorLine]:
    """Of actors.json; none when there is none, or (unless `run_id` is None) it is an earlier launch's."""
    try:
        content = json.loads((folder / "actors.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if run_id not in (None, content["run_id"]):
        return []
    return [ActorLine(**actor) for actor in content["actors"]]


def write_actors(folder: Path, run_id: str, actors: Iterable[tuple[str, int, str]]) -> None:
    """actors.json: the run's id (part of its folders' names in shared memory) and who runs where, (name, pid, host)
    each."""
    lines = [ActorLine(*actor) for actor in actors]
    lines = [replace(line, start=process_start(line.pid)) if line.here else line for line in lines]
    draft = folder / "actors.json.new"
    draft.write_text(json.dumps({"run_id": run_id, "actors": [asdict(line) for line in lines]}, indent=1), "utf-8")
    draft.rename(folder / "actors.json")


def write_report(
    folder: Path, sentence: str, driver_pid: int, opened: Opened | None, groups: int, group_size: int
) -> Path:
    """watchdog.txt of the run in `folder`; returns its path.

    sentence: what happened. opened: None before the run has told. groups: of `group_size` rows, that a step takes.
    """
    actors = read_actors(folder, opened.run_id) if opened is not None else []
    everyone = [ActorLine(DRIVER, driver_pid, socket.gethostname()), *actors]
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
    """First lines of a report: when, and what."""
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{now}: {sentence}"


def _process_line(actor: ActorLine) -> tuple[str, ...]:
    """Name, pid, state and seconds of CPU."""
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
        return actor.name, where, "another user's"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with the cells of `rows` below one another."""
    columns = max(len(row) for row in rows)
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(columns)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    ]


def _data_plane(opened: Opened | None, groups: int, group_size: int) -> list[str]:
    """What stands in it, or why that is not known."""
    if opened is None:
        return ["it was not up yet"]
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(_status(opened))
        except Exception as error:  # whatever it is belongs into the report, which must be written
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
        f"the oldest for {status.oldest_lease_s:.1f} s",
        f"waiting: {status.waiting_claims} claims for rows, {status.waiting_puts} puts for room",
        f"bytes: {status.bytes_used} used, {status.bytes_reserved} reserved, {status.bytes_capacity} fit",
    ]


def _groups(rows: int, group_size: int) -> str:
    return f"{rows / group_size:g} groups"


def _status(opened: Opened) -> Any:
    """The directory's `DataPlaneStatus`. Raises DataPlaneError."""
    from ...dataplane.directory import requests
    from ...dataplane.rpc.frames import DirectoryAddress
    from ...dataplane.rpc.socket_link import SocketLink
    from ...dataplane.status import DataPlaneStatus

    token = bytes.fromhex(opened.token)
    link = SocketLink(DirectoryAddress(opened.local, opened.host, opened.port, token), opened.peer)
    try:
        reply = link.call("status", requests.encode(requests.Status(None)), ASK_TIMEOUT_S)
        return DataPlaneStatus.from_bytes(requests.body_of(reply, "status", ASK_TIMEOUT_S))
    finally:
        link.detach()
