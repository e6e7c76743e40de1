"""Forms process groups outside of torch's default group, gloo between CPUs and NCCL between GPUs, and leaves them.

Members find each other through `actors/process/rendezvous_store.py`, whose server is in the sender's process.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from ...process.group_proof import prove_members
from ...process.rendezvous_store import RendezvousStore
from .protocol import Deadline

T = TypeVar("T")
_GPU_TICK_S = 5e-5
_MOMENT_S = 0.05
_EXIT_S = 5.0
"""Longest time in seconds that an exiting process waits for its threads to leave their groups."""
_GRACE_S = 30.0
"""Seconds by which the timeout of a process group exceeds the timeout of the weight updates that use it."""


class Group:
    """This process's membership in a process group, in which rank 0 broadcasts. Two broadcasts may run at the same
    time."""

    def __init__(
        self,
        store: RendezvousStore,
        name: str,
        rank: int,
        world: int,
        *,
        host: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Join the group. Blocks until all members have joined, so call it within `bounded`. store: a store of this
        group's own, which the group closes when it is left, or when joining fails. host: this process's own address.
        Raises what torch raises."""
        self.name = name
        self._store = store  # The store must outlive the group.
        self.device = device
        deadline = timedelta(seconds=timeout_s + _GRACE_S)
        prefixed = PrefixStore(name, store)
        self._backend: Any
        try:
            if device.type == "cuda":
                from torch.distributed import ProcessGroupNCCL

                options = ProcessGroupNCCL.Options()
                options._timeout = deadline
                self._backend = ProcessGroupNCCL(prefixed, rank, world, options)
                self._backend._set_sequence_number_for_group()
                self._stream = torch.cuda.Stream(device)
            else:
                gloo: Any = cast(Any, ProcessGroupGloo)._Options()
                gloo._devices = [ProcessGroupGloo.create_device(hostname=host)]
                gloo._timeout = deadline
                gloo._threads = 2
                self._backend = ProcessGroupGloo(prefixed, rank, world, gloo)
                prove_members(self._backend, store.key, name)
        except BaseException:
            store.close()
            raise

    def broadcast(self, buffer: torch.Tensor) -> Broadcast:
        """Start a broadcast of `buffer` (uint8 `[n]`): rank 0 sends it, the other ranks receive into it. On a GPU it
        runs after the work that is queued on the current CUDA stream."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.asyncOp = True
        if self.device.type != "cuda":
            return Broadcast(self._backend.broadcast([buffer], options), None, buffer)
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            work = self._backend.broadcast([buffer], options)
            work.wait()  # This makes the current stream wait for NCCL's stream, and does not block the thread.
            event.record(self._stream)
        return Broadcast(work, event, buffer)

    def leave(self) -> None:
        """Leave the group. This is done in a separate thread, because an operation that hangs ends only at the group's
        timeout. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None:
            held = [backend, self]  # Buffers of the group must outlive its operations.
            del backend
            args = (held, self._store, self.device)
            leaving = threading.Thread(target=_end, args=args, daemon=True, name="headrace-leave")
            _leaving.add(leaving)
            leaving.start()


class Broadcast:
    """A broadcast that has been started and may still be in progress."""

    def __init__(self, work: Any, event: torch.cuda.Event | None, buffer: object) -> None:
        """buffer: what must outlive the operation."""
        self._work = work
        self._event = event
        self._buffer = buffer

    def ended(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds, and return whether the broadcast has ended. Raises RuntimeError when it
        failed."""
        if self._event is not None:
            until = time.monotonic() + wait_s
            while not (ended := self._event.query()) and time.monotonic() < until:
                time.sleep(_GPU_TICK_S)
            return ended
        try:
            self._work.wait(timedelta(seconds=max(wait_s, 1e-3)))
            return True
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # The work may have succeeded just after the timeout.
            return True


def bounded(
    call: Callable[[], T], deadline: Deadline, what: str, look: Callable[[], None], drop: Callable[[T], None]
) -> T:
    """Run `call()` in a thread and return its result. The thread is abandoned at the deadline, or when `look` raises.

    look: function that is called repeatedly while the thread runs, and may raise an error to end the wait. drop:
    function that is given the result of an abandoned thread. Raises WeightTransferError at the deadline, and when
    `call` fails.
    """
    ended: Future[T] = Future()
    threading.Thread(
        target=_run, args=(call, ended, drop), daemon=True, name=f"headrace-{what.replace(' ', '-')}"
    ).start()
    try:
        while not wait([ended], 0.01).done:
            look()
            if not deadline.left_s:
                raise deadline.error(f"{what}: not all members have joined")
    except BaseException:
        if not ended.cancel() and ended.exception() is None:  # `call` has just ended.
            drop(ended.result())
        raise
    failed = ended.exception()
    if failed is not None:
        time.sleep(_MOMENT_S)
        look()  # `look` raises a better error when it knows the lost member.
        reason = str(failed).strip().splitlines() or [type(failed).__name__]
        raise deadline.error(f"{what}: {reason[0]}") from failed
    return ended.result()


def _run(call: Callable[[], T], ended: Future[T], drop: Callable[[T], None]) -> None:
    """Set `ended` to what `call()` returns or raises. Gives the result to `drop` if `ended` was cancelled meanwhile."""
    try:
        result = call()
    except Exception as error:
        with contextlib.suppress(InvalidStateError):  # No caller waits for the result.
            ended.set_exception(error)
        return
    try:
        ended.set_result(result)
    except InvalidStateError:
        drop(result)


_leaving: set[threading.Thread] = set()


def _end(held: list[Any], store: RendezvousStore, device: torch.device) -> None:
    if device.type == "cuda":
        held[0].abort()  # Otherwise kernels that wait for a lost peer would block the device.
    held.clear()
    store.close()
    _leaving.discard(threading.current_thread())


@atexit.register
def _wait_for_leaving() -> None:
    """At interpreter exit, wait for the threads that leave groups. Exiting while a thread is inside a group's
    destructor would abort the process."""
    until = time.monotonic() + _EXIT_S
    for leaving in list(_leaving):
        leaving.join(max(0.0, until - time.monotonic()))
