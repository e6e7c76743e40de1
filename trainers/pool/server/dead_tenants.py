"""Ends all processes of a tenant that is not trusted any more, and tells whether they are gone.

A GPU is given to another tenant only after the processes that may hold its memory have been seen dead; the passing of
time alone frees nothing.
"""

from __future__ import annotations

import socket
from pathlib import Path

from ....dataplane.owned_folder import process_start
from ...supervision.cleanup import Family, is_alive
from ...supervision.report import read_actors
from ..state.commands import Processes


def driver_is_gone(processes: Processes) -> bool:
    """Return whether the driver's process has ended. Returns False for one on another host, which cannot be seen."""
    return processes.host == socket.gethostname() and process_start(processes.driver) != processes.start


def end_processes(processes: Processes) -> str:
    """Kill the driver and all processes of the run that actors.json lists, and wait until they are gone. Returns "", or
    a sentence that says what is left, which then has to be ended by hand or by another call."""
    if processes.host != socket.gethostname():
        return f"its driver is on {processes.host}, which this pool cannot reach: end it there"
    driver = [] if driver_is_gone(processes) else [(processes.driver, processes.start)]
    actors = read_actors(Path(processes.folder))
    far = sorted({actor.host for actor in actors if not actor.here})
    family = Family(processes.driver if driver else 0)
    family.add((actor.pid, actor.start) for actor in actors if actor.here and actor.start is not None)
    family.kill()
    everyone = [*family.members, *([family.driver] if family.driver is not None else [])]
    left = [process.pid for process in everyone if is_alive(process)]
    if left:
        return f"its processes {left} do not end"
    return f"it has processes on {', '.join(far)}, which this pool cannot reach" if far else ""
