"""Keeps the list of a run's processes, in actors.json and in the driver, from the start of the run to its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...actors.process.own_process import ActorInfo
from ...dataplane.factory import DataPlane
from ..supervision.cleanup import Family, remove_shared_memory, wait_until_ended
from ..supervision.stuck_report import write_actors

END_S = 10.0
"""Seconds that Ray has to end the actors' processes."""


class ListedProcesses:
    """The list of one run's processes. A process is in it before it uses a GPU."""

    def __init__(self, folder: Path, run_id: str) -> None:
        """Begin the list in actors.json of the run's `folder`. The list of an earlier run in that folder no longer
        counts."""
        self._folder = folder
        self._run_id = run_id
        self.actors = list[ActorInfo]()
        """All processes of actors so far, those too that were replaced."""
        write_actors(folder, run_id, [])

    def add_actors(self, infos: Sequence[ActorInfo]) -> None:
        """Add new processes of actors."""
        self.actors += infos
        lines = [(info.name, info.pid, info.host, info.space, info.start) for info in infos]
        write_actors(self._folder, self._run_id, lines)

    def remove_actor(self, name: str) -> None:
        """Take an actor that has left the run out of the processes that the run needs."""
        write_actors(self._folder, self._run_id, [], left=name)

    def add_plane(self, plane: DataPlane) -> None:
        """Add the processes of the data plane."""
        lines = [(name, pid, plane.host, plane.space) for name, pid in plane.processes().items()]
        write_actors(self._folder, self._run_id, lines)

    def remove_shared_memory(self) -> None:
        """Remove what the run's processes have left in this host's shared memory."""
        remove_shared_memory(self._run_id)

    def end_actors(self) -> None:
        """Kill the processes of actors on this host that Ray does not end. It ends none that has outlived its raylet,
        and such a process is not a descendant of the driver."""
        own = [(info.pid, info.start) for info in self.actors if info.is_here and info.start is not None]
        if not wait_until_ended(lambda: own, END_S):
            family = Family(0)
            family.add(own)
            family.kill()
