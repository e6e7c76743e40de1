"""The Ray actor of one train rank: it joins the ranks' process group and runs the driver's calls on a train worker."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import torch

from ...codecs import messages
from ...dataplane.listen_address import listening
from ..process.own_process import ActorInfo, bind_process_groups
from ..process.remote_methods import in_thread_of, invoke
from ..process.rendezvous_store import RendezvousServer, RendezvousStore
from ..weight_sync.base_offer import BaseRecord, Recovery
from .process_groups import ProcessGroups
from .worker import TrainWorker
from .worker_setup import WorkerSetup

CONCURRENCY_GROUPS = {"weights": 1, "abort": 1, "progress": 1}
"""Ray concurrency groups: name -> number of threads that the actor has for it in addition to its main thread. Used as
`ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(TrainActor)`. All methods outside these groups run in one thread,
always the same, because a backend may be bound to the thread that built it."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Address of the server through which the train ranks find each other. Rank 0 runs the server and reports the
    address, and the driver passes it on to the other ranks."""

    host: str
    """IP address of rank 0's host."""
    port: int


class _Notes(logging.Handler):
    """Keeps the lines that this package logs while a worker is built, because users do not see the log of an actor."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class TrainActor:
    """Hosts the TrainWorker of one rank, which `build` creates."""

    def __init__(self, setup: WorkerSetup) -> None:
        torch.set_num_threads(setup.threads)
        self._setup = setup
        self._address = listening().address()
        """IP address of this host at which the other ranks and the engines reach this rank."""
        self._clock: int | None = None
        """Id of the CPU clock of the thread that runs the driver's calls; None before the first `info`."""
        self._rendezvous: RendezvousServer | None = None
        """Server through which the ranks find each other; None in all ranks but 0."""
        self._store: RendezvousStore | None = None
        """This rank's connection to that server, which the process groups need as long as they live; None before
        `build`."""
        self._groups: ProcessGroups | None = None
        """The process groups of the ranks; None before `build`, and where the setup has none."""
        self._worker: TrainWorker | None = None
        self._notes = _Notes()

    @property
    def worker(self) -> TrainWorker:
        """The rank's TrainWorker. Raises RuntimeError before `build`."""
        if self._worker is None:
            raise RuntimeError(f"{self._setup.name}: not built yet (build comes first)")
        return self._worker

    def call(self, method: str, message: bytes, *actors: object) -> bytes:
        """Run a method of the actor, or else of its worker, with the encoded arguments in `message`. Returns the
        encoded result. actors: Ray handles, which are passed as the last arguments.

        It is the only method that the driver calls through Ray, see `actors/process/remote_methods.py`.
        """
        return messages.encode(invoke(self if hasattr(self, method) else self.worker, method, message, actors))

    def info(self) -> ActorInfo:
        """Return name, process id and host of this process. Also records the calling thread, whose CPU time `progress`
        reports."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        return ActorInfo.here(self._setup.name)

    @in_thread_of("progress")
    def progress(self) -> int:
        """Return the CPU time, in nanoseconds, of the thread that runs all other calls; 0 before `info`. While it
        grows, that thread computes, reads or writes; while it does not, the thread waits. An answer also shows that the
        process is alive."""
        return 0 if self._clock is None else time.clock_gettime_ns(self._clock)

    def open_rendezvous(self) -> MeetingPoint:
        """Open the server through which the ranks find each other, on a free port, and return where it listens.

        Only rank 0 calls this. Raises OSError when listening fails.
        """
        self._rendezvous = RendezvousServer(self._address, self._setup.data_plane.store.key)
        return MeetingPoint(self._address, self._rendezvous.port)

    def build(self, meeting_point: MeetingPoint | None, recovery: Recovery | None) -> BaseRecord | None:
        """Join the ranks' process group, if the setup has one, and build the worker. The call is collective.

        meeting_point: what rank 0's `open_rendezvous` returned; None when the setup has no process groups. recovery:
        see `TrainWorker`. Returns what the rank has read of its adapter's base, for `recovery` at a later start.
        """
        setup = self._setup
        bind_process_groups(self._address)
        if meeting_point is not None:
            key = setup.data_plane.store.key
            self._store = RendezvousStore(meeting_point.host, meeting_point.port, key, setup.collective_timeout_s)
            self._groups = ProcessGroups(
                self._store,
                setup.rank,
                setup.world,
                timeout_s=setup.collective_timeout_s,
                name=setup.name,
                forget=None if self._rendezvous is None else self._rendezvous.clear,
                key=key,
            )
            self._groups.form()
        log = logging.getLogger(__name__.partition(".")[0])
        log.setLevel(logging.INFO)
        log.addHandler(self._notes)
        try:
            self._worker = TrainWorker(setup, self._address, groups=self._groups, recovery=recovery)
        finally:
            log.removeHandler(self._notes)
        if self._groups is not None:
            self._groups.prove()
        return self._worker.base_record

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the user about how the rank computes, such as the layers that compute in fp8."""
        return tuple(self._notes.lines)

    def close(self) -> None:
        """Close the worker and leave the process group. Idempotent."""
        try:
            if self._worker is not None:
                self._worker.close()
        finally:
            if self._groups is not None:
                self._groups.close()
            if self._store is not None:
                self._store.close()
            if self._rendezvous is not None:
                self._rendezvous.close()
