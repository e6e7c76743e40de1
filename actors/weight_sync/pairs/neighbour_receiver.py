"""`NeighbourReceiver` takes an engine worker's part of a version from the train rank on its own GPU.

    hello to all ranks -> open the neighbour's slots -> read, digest and unpack a bucket -> through -> ... -> done

The neighbour hands over the buckets of all ranks (`neighbour_sender`). As in `GroupReceiver`, every rank tells the
digests of its buckets at the end, and hears how the worker fares.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import torch

from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.control_link import Hello, Note
from ..transports.protocol import Deadline, WeightUpdate
from .device_slots import OpenSlots, place_of
from .group_receiver import GroupReceiver
from .pair_receiver import Damaged
from .pair_sender import number_of


class NeighbourReceiver(GroupReceiver):
    """Receiver of buckets in the memory of the train rank beside it, into the memory of the same device."""

    def __init__(self, engine: str, worker: int, key: bytes, device: torch.device, gpu: str = "") -> None:
        """key: the run's key, which the senders must know. device: device of the engine's weights. gpu: as for
        `place_of`."""
        super().__init__(engine, worker, key, device)
        self.place = place_of(device, gpu)
        """GPU and host of this worker."""
        self._open = OpenSlots(device)
        self._slots: list[torch.Tensor] = []
        self._neighbour = 0
        self._far = False
        """True if the neighbour is on another GPU of the host."""
        self._ranks_group = ""
        """Name of the ranks' group in the last version, which this worker has got; "" after an error."""

    def leave(self) -> None:
        """Make the ranks form a new group for the next version. Idempotent."""
        super().leave()
        self._ranks_group = ""

    def close(self) -> None:
        """Close the neighbour's slots. Idempotent."""
        self.leave()
        self._slots = []
        self._open.close()

    # ---------------- These methods are private.

    def _meet(self, update: WeightUpdate, rank: int, deadline: Deadline) -> None:
        """Connect to all ranks, and open the slots of the neighbour."""
        hello = Hello(number_of(update), rank + 1, self._ranks_group, self.place)
        starts = self._greet(update, hello, deadline)
        told = [(number, start.data) for number, start in enumerate(starts) if start.data]
        if len(told) != 1:
            raise deadline.error(f"{len(told)} ranks hand over buckets to this worker, not one")
        [(self._neighbour, message)], self._slots = told, []
        self._slots = self._open.open(message, deadline)
        self._far = update.location.split(";")[1 + self._neighbour].split("|")[4] != self.place
        self._ranks_group = starts[0].text

    def _take(
        self, plan: TransferPlan, rank: int, tensors: Mapping[str, torch.Tensor], arrived: Callable[[Bucket], None],
        deadline: Deadline,
    ) -> dict[int, list[tuple[Bucket, torch.Tensor]]]:  # fmt: skip
        """Take and unpack all buckets. Returns the buckets of each sender with their digests."""
        neighbour = self._senders[self._neighbour]
        found: dict[int, list[tuple[Bucket, torch.Tensor]]] = defaultdict(list)
        queued: deque[tuple[Bucket, torch.cuda.Event | None]] = deque()

        def settle(num: int) -> None:
            """Wait until the GPU has at most `num` buckets left, and give the slots of the others back."""
            while len(queued) > num:
                bucket, event = queued.popleft()
                if event is not None:
                    event.synchronize()
                self._last = bucket.number
                self._tell_one(neighbour, Note("through", number=bucket.number), deadline)
                deadline.moved()
                arrived(bucket)

        for bucket in plan.taking(rank):
            what = f"bucket {bucket.number}"
            self._look(deadline, what)
            if not neighbour.notes:
                settle(0)
            note = self._next(neighbour, "frame", what, deadline)
            if note.frame is None or (note.frame.bucket, note.frame.nbytes) != (bucket.number, bucket.nbytes):
                raise Damaged(str(deadline.error(f"{neighbour.name}: got {note.frame}, expected {what}")))
            payload = self._slots[note.number][: bucket.nbytes]
            if self._far:
                payload = payload.clone()  # Another GPU's memory would be read twice.
            digest = self._unpacker.take(plan.key, bucket, payload, tensors, self.staying)
            found[bucket.sender].append((bucket, digest))
            queued.append((bucket, _mark(self.device)))
            settle(1)  # The GPU works on this bucket meanwhile.
        settle(0)
        return found


def _mark(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
