"""`WeightInbox` receives a version of the weights in an engine's process and keeps it until it is served.

prepare(update) -> staged -> committed(version)     with memory for a second version beside the one that is served
                     |-----> drop(version)
prepare(update) -> arriving(update) -> committed    without such memory: the version is received during the commit
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...codecs.weights.buckets import BucketPlan, apply_sparse, checksum, expect_all, read_bucket
from ...codecs.weights.gpu_scatter import scatter_kernel
from .config import Staging
from .pairs.pair_sender import KIND as PAIRS
from .pairs.planned_receiver import PlannedReceiver, PlannedStream
from .plan.regions import Region
from .transports.ends import Receiver, Stream, bucket_offsets
from .transports.factory import build_receiver
from .transports.protocol import BucketFrame, ReceiverConfig, WeightTransferError, WeightUpdate
from .views import BucketLandings, BucketViews, Landing

__all__ = ["ReceiverConfig", "StagedWeights", "WeightInbox"]

_MARGIN = 1.1


@dataclass(slots=True)
class StagedWeights:
    """A complete, verified version of the weights that the engine does not serve yet.

    Its tensors must not be written to. They are valid until the version is dropped or the next one is committed;
    without `sync.delta`, only until the version itself is committed.
    """

    version: int
    named: dict[str, torch.Tensor]
    """Complete tensors by Hugging Face name, on the CPU unless the transport delivers payloads on the GPU."""
    plan: BucketPlan
    memory: torch.Tensor
    """Bytes of all buckets, uint8; bucket b starts at `bucket_offsets(plan)[b]`."""
    stream: Stream | None
    """Stream that received the version and owns `memory`; None if the inbox allocated `memory`."""


class WeightInbox:
    """Receives weight versions in one process of an engine.

    One thread at a time may call it, except that any thread may call `drop` and `close`.
    """

    def __init__(
        self, config: ReceiverConfig, worker: int, *, on_received: Callable[[int], None] = lambda num_received: None
    ) -> None:
        """Create an inbox that holds no version yet. worker: number of this process in its engine, from 0. on_received:
        function that the receiving thread calls after each bucket, with the number of buckets received so far."""
        self._config = config
        self._worker = worker
        self._lock = threading.Lock()
        """Lock for the fields below, which another thread may change in `drop`."""
        self._receivers: dict[str, Receiver] = {}
        self._arriving: tuple[int, Receiver | None, Stream | None] | None = None
        """Version that is being received or, without staging, waits to be received during the commit: its number, its
        receiver, and its stream once the transfer is joined. None when there is none."""
        self._staged: StagedWeights | None = None
        self._base: StagedWeights | None = None
        self._spare: torch.Tensor | None = None
        """Memory of a version that is no longer needed, reused for the next one; None when there is none."""
        self._views = BucketViews()
        self._landings = BucketLandings()
        self._chosen: Staging | None = None
        self._dropped: int | None = None
        self._closed = False
        self._on_received = on_received
        self.needs: tuple[Region, ...] = ()
        """Regions of the weights that this process needs of the versions after the next one, in tensors of the whole
        weights' shapes; () for all. Only updates of the kind `pairs` then leave out the rest."""
        self.num_received = 0
        """Number of buckets received since the inbox was made."""

    @property
    def staging(self) -> Staging:
        """Staging mode of new versions, `full` or `none`. With `full`, a version is received into a second copy of the
        weights; with `none`, straight into the weights of the paused engine. A configured `auto` stays `auto` until the
        first update has arrived."""
        return self._chosen or self._config.sync.staging

    @property
    def staged(self) -> StagedWeights | None:
        """Version that `prepare` has received and verified; None if there is none. It is also None for a version that
        is received only during the commit."""
        return self._staged

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights of the prepared or joined version; () when there is none."""
        staged, arriving = self._staged, self._arriving
        if staged is not None:
            return staged.plan.names
        return () if arriving is None or arriving[2] is None else arriving[2].plan.names

    def prepare(self, update: WeightUpdate) -> None:
        """Receive and verify `update` in the calling thread. Without staging, only join its transfer; `arriving` then
        receives it.

        A version that was prepared before is dropped. Raises WeightTransferError if the transfer fails; nothing is
        staged then, and the version in service can still be the base of a later delta.
        """
        self._forget_prepared()
        receiver = self._receiver(update.kind)
        with self._lock:
            if self._closed:
                raise RuntimeError("weights: the inbox is closed")
            self._dropped = None
            self._arriving = (update.version, receiver, None)
        joined = False
        try:
            stream = receiver.open(update)
            kept = False
            try:
                with self._lock:
                    self._expect_wanted(update, stream)
                    self._arriving = (update.version, receiver, stream)
                if self._choose(update, stream) == "none":
                    if update.base is not None and update.kind != PAIRS:
                        error = stream.deadline.error(
                            f"the update refers to version {update.base}, but nothing is staged here: send it whole"
                        )
                        stream.give_up(error)
                        raise error
                    # The kernel is compiled here, once, instead of while the engine is paused.
                    scatter_kernel(stream.device)
                    joined = kept = True
                    return
                staged = self._receive(update, stream)
                with self._lock:
                    self._expect_wanted(update, stream)
                    self._staged = staged
                kept = staged.stream is not None
            finally:
                if not kept:
                    stream.close()
        finally:
            if not joined:
                with self._lock:
                    self._arriving = None

    def read_ahead(self) -> None:
        """Start receiving the version that `prepare` has joined without staging, before `arriving` is called. Buckets
        are received as long as the buffers have room.

        Call it in the thread that called `prepare`. Errors are raised later, by `arriving`.
        """
        arriving = self._arriving
        if arriving is not None and arriving[2] is not None:
            arriving[2].read_ahead()

    def arriving(
        self, update: WeightUpdate, places: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Receive the `update` that `prepare` has joined without staging. Yields lists of (name, complete tensor), each
        tensor as soon as all its pieces have arrived.

        The tensors are valid until the next list is requested. Only when the iterator ends have all checksums been
        verified and is the update known to be complete.

        places: destination memory by weight name. On a GPU, a weight may be written to its destination directly if that
        is contiguous and has the dtype and shape of the weight as sent; the weight is then yielded as its destination
        tensor. The mapping must not change, and passing the same one again saves work. Raises WeightTransferError if
        the transfer fails, and ValueError if `prepare` has not joined `update`.
        """
        arriving = self._arriving
        if arriving is None or arriving[0] != update.version or arriving[2] is None:
            raise ValueError(f"weights: version {update.version} was not joined; call prepare first")
        stream = arriving[2]
        try:
            for whole in (
                stream.weights(places) if isinstance(stream, PlannedStream) else self._unpacked(stream, places)
            ):
                yield whole
                self._count_received()
        finally:
            stream.close()
            with self._lock:
                self._arriving = None

    def _unpacked(self, stream: Stream, places: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the complete tensors of each bucket of a stream."""
        pieces: dict[str, torch.Tensor] = {}
        read = set()
        plan = stream.plan
        stream.take = lambda frame, payload: self._landing(plan, frame, payload, places).scatter(payload)
        for frame, payload in stream:
            yield self._whole_tensors(plan, frame, payload, pieces, places)
            read.add(frame.bucket)
        _expect_whole(stream, read)

    def committed(self, version: int) -> None:
        """Record that the engine now serves the staged `version`. Does nothing when that version is not staged here.

        With `sync.delta` the version becomes the base of the next delta, and the previous base is released; otherwise
        the version itself is released.
        """
        with self._lock:
            staged = self._staged
            if staged is None or staged.version != version:
                return
            self._staged = None
            old, self._base = self._base, staged if self._config.sync.delta else None
            released = [old, None if self._config.sync.delta else staged]
        for version_let_go in released:
            self._release(version_let_go)

    def drop(self, version: int) -> None:
        """Forget the prepared `version`, or stop receiving it. Idempotent; any thread may call it."""
        with self._lock:
            arriving, staged = self._arriving, self._staged
            if arriving is not None and arriving[0] == version:
                self._dropped = version
            else:
                arriving = None
            if staged is not None and staged.version == version:
                self._staged = None
            else:
                staged = None
        self._end(arriving)
        self._release(staged)

    def free_spare(self) -> None:
        """Free the memory that is kept for the next version. It is allocated again when that version arrives."""
        with self._lock:
            self._spare = None
        self._views.clear()

    def close(self) -> None:
        """Stop receiving and release everything. Idempotent; any thread may call it."""
        with self._lock:
            self._closed = True
            arriving = self._arriving
            held, self._staged, self._base = [self._staged, self._base], None, None
        self._end(arriving)
        for staged in held:
            self._release(staged)
        self._spare = None
        self._views.clear()
        self._landings.clear()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.close()

    # ---------------- These private methods receive a version.

    def _receiver(self, kind: str) -> Receiver:
        if kind not in self._receivers:
            config = self._config
            if kind == PAIRS:
                device = torch.device(config.device)
                self._receivers[kind] = PlannedReceiver(
                    config.engine, self._worker, config.key, device, lambda: self.needs, self._kept
                )
            else:
                self._receivers[kind] = build_receiver(kind, config, self._worker)
        return self._receivers[kind]

    def _choose(self, update: WeightUpdate, stream: Stream) -> Staging:
        """Return the staging to use, `full` or `none`; `full` for adapters. At the first update with whole weights,
        `auto` becomes `full` if `_has_room`, else `none`."""
        if update.adapter is not None:
            return "full"  # Adapters are small, and the engine goes on with the old one.
        if self._chosen is None:
            self._chosen = self._config.sync.staging
            if self._chosen == "auto":
                self._chosen = "full" if _has_room(stream.device, update.num_bytes) else "none"
        return self._chosen

    def _expect_wanted(self, update: WeightUpdate, stream: Stream) -> None:
        if self._dropped == update.version or self._closed:
            raise stream.deadline.error("the version was dropped while it was being received")

    def _receive(self, update: WeightUpdate, stream: Stream) -> StagedWeights:
        base = self._expect_base(update, stream)
        plan, offsets = stream.plan, bucket_offsets(stream.plan)
        if base is None and stream.memory is not None:
            memory, owner = stream.memory, stream  # The stream's bytes are used without a copy.
        else:
            memory, owner = self._memory(offsets[-1], stream.device), None
            stream.receive_into(memory)
        read = set()
        for frame, payload in stream:
            target = memory[offsets[frame.bucket] : offsets[frame.bucket] + plan.sizes[frame.bucket]]
            if frame.encoding != "whole":
                assert base is not None
                kept = base.memory[offsets[frame.bucket] : offsets[frame.bucket] + len(target)]
                _apply(stream, frame, payload, kept, target)
            elif target.data_ptr() != payload.data_ptr():
                target.copy_(payload)
            read.add(frame.bucket)
            self._count_received()
        _expect_whole(stream, read)
        views = self._views if owner is None else BucketViews()  # Views of a stream's memory must not be kept.
        return StagedWeights(update.version, dict(views.all(plan, memory)), plan, memory, owner)

    def _count_received(self) -> None:
        self.num_received += 1
        self._on_received(self.num_received)

    def _whole_tensors(
        self,
        plan: BucketPlan,
        frame: BucketFrame,
        payload: torch.Tensor,
        pieces: dict[str, torch.Tensor],
        places: Mapping[str, torch.Tensor],
    ) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) of each weight that this bucket completes. The tensor is a view of the bucket, the
        weight's destination in `places`, or was assembled in `pieces` from several buckets."""
        bucket = frame.bucket
        inside = self._views.inside(plan, bucket, payload)
        parts = self._views.parts(plan, bucket)
        placed = self._landing(plan, frame, payload, places).placed if payload.is_cuda and frame.nbytes else ()
        if apart := tuple(entry for entry in parts if entry.name not in placed):
            read_bucket(BucketPlan(apart, plan.sizes), bucket, payload, pieces)
        ended = [entry.name for entry in parts if self._views.last_bucket(plan, entry.name) == bucket]
        whole = [(name, places[name] if name in placed else pieces.pop(name)) for name in ended]
        return [*((name, places[name] if name in placed else view) for name, view in inside.items()), *whole]

    def _landing(
        self, plan: BucketPlan, frame: BucketFrame, payload: torch.Tensor, places: Mapping[str, torch.Tensor]
    ) -> Landing:
        return self._landings.of(plan, frame.bucket, places, payload.device)

    def _expect_base(self, update: WeightUpdate, stream: Stream) -> StagedWeights | None:
        if update.base is None or update.kind == PAIRS:  # With `pairs`, the stream itself applies changes.
            return None
        base = self._base
        if base is None or base.version != update.base:
            there = "none" if base is None else f"version {base.version}"
            raise self._refused(stream, f"refers to version {update.base}, but the engine keeps {there}")
        if base.plan != stream.plan:
            raise self._refused(stream, f"refers to version {update.base}, which has another layout in the engine")
        return base

    def _kept(self, version: int, plan: BucketPlan) -> torch.Tensor | None:
        """Return the memory of `version` if it is kept here in the layout `plan`, as a base of changes."""
        base = self._base
        return base.memory if base is not None and base.version == version and base.plan == plan else None

    def _refused(self, stream: Stream, what: str) -> WeightTransferError:
        error = stream.deadline.error(f"the update {what}: send it whole")
        stream.give_up(error)
        return error

    def _memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        spare, self._spare = self._spare, None
        if spare is None or len(spare) != nbytes or spare.device != device:
            spare = None  # The old memory is freed before more is allocated.
            self._views.clear()
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return spare

    # ---------------- These private methods release a version.

    def _forget_prepared(self) -> None:
        for prepared in (self._staged, self._arriving):
            if prepared is not None:
                self.drop(prepared.version if isinstance(prepared, StagedWeights) else prepared[0])
        self._arriving = None

    def _end(self, arriving: tuple[int, Receiver | None, Stream | None] | None) -> None:
        if arriving is None:
            return
        _, receiver, stream = arriving
        if stream is not None:
            stream.close()
        elif receiver is not None:
            receiver.interrupt()

    def _release(self, staged: StagedWeights | None) -> None:
        if staged is None:
            return
        if staged.stream is not None:
            staged.stream.close()
        else:
            self._spare = staged.memory


def _apply(stream: Stream, frame: BucketFrame, payload: torch.Tensor, base: torch.Tensor, target: torch.Tensor) -> None:
    """Apply a delta to the bucket `base` and write the resulting bucket into `target`.

    Raises WeightTransferError if the delta does not fit the base, or if the checksum of the result differs from the
    trainer's, which means that the base has changed since it was received. The delta is applied in host memory; a
    bucket on a GPU is copied there and back.
    """
    name = f"bucket {frame.bucket} of {len(stream.plan.sizes)}"
    result = target.copy_(base) if target.device.type == "cpu" else base.cpu()
    if frame.encoding == "sparse":
        try:
            apply_sparse(payload.cpu().numpy(), result.numpy())
        except ValueError as error:
            raise stream.deadline.error(f"{name}: {error}") from error
    found = checksum(result)
    if found != frame.result:
        error = stream.deadline.error(
            f"{name} is damaged in version {stream.update.base}, which was kept here: the checksum of the delta's "
            f"result is {found:016x}, the trainer's is {frame.result:016x}: send it whole"
        )
        stream.give_up(error)
        raise error
    if result is not target:
        target.copy_(result)


def _expect_whole(stream: Stream, read: set[int]) -> None:
    try:
        expect_all(stream.plan, read)
    except ValueError as error:
        raise stream.deadline.error(str(error)) from None


def _has_room(device: torch.device, nbytes: int) -> bool:
    """Return whether two versions, one staged and one kept as base, fit into the device's free memory. Always True on a
    CPU."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return free > 2 * nbytes * _MARGIN
