"""What the host does when a GPU has come to a point: told by a thread that waits there, for nobody else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class Afterwards:
    """Makes calls in order, each when a stream has done what was queued on it before."""

    def __init__(self, device: torch.device, name: str) -> None:
        """name: of the thread, which starts with the first call."""
        self._device = device
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], torch.cuda.Event] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> None:
        """Make `call`, which must not wait, when `stream` (the current one) has come to here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        self._calls.put((call, event))

    def check(self) -> None:
        """Raises what the GPU failed with."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Return when all calls were made. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, event = item
            try:
                event.synchronize()
                call()
            except RuntimeError as error:  # raised by whoever waits for what does not come
                self._failure = error
