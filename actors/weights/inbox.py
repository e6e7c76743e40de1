"""Where a version of the weights waits in an engine's process, whole and verified, until it is served.

prepare(update) -> staged -> committed(version)     beside the version that is served
                     |-----> drop(version)
prepare(update) -> arriving(update) -> committed    without room for two: received while it is committed
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ...codecs.bucket_delta import apply_sparse
from ...codecs.buckets import BucketPlan, expect_all, read_bucket
from ...codecs.gpu_scatter import scatter_kernel
from .config import Staging
from .transports.factory import build_receiver
from .transports.protocol import BucketFrame, ReceiverConfig, WeightTransferError, WeightUpdate
from .transports.receiving import Receiver, Stream, bucket_offsets
from .views import BucketLandings, BucketViews, Landing

__all__ = ["ReceiverConfig", "StagedWeights", "WeightInbox"]

_MARGIN = 1.1


@dataclass(slots=True)
class StagedWeights:
    """A whole, verified version. Its tensors are valid until it is dropped, or the next one is committed (without
    `sync.delta`, until it is committed itself). Nobody may write to them."""

    version: int
    named: dict[str, torch.Tensor]
    """HF name -> whole tensor, on the CPU unless the transport brings payloads to the GPU."""
    plan: BucketPlan
    memory: torch.Tensor
    """uint8: bucket b at `bucket_offsets(plan)[b]`."""
    stream: Stream | None
    """Whose memory it is; None: the inbox's own."""


class WeightInbox:
    """Receives versions for one process of an engine. One thread at a time calls it, but for `drop` and `close`."""

    def __init__(self, config: ReceiverConfig, worker: int) -> None:
        """worker: this process's number in its engine, from 0."""
        self._config = config
        self._worker = worker
        self._lock = threading.Lock()
        """Of the fields below, while `drop` may look at them."""
        self._receivers: dict[str, Receiver] = {}
        self._arriving: tuple[int, Receiver | None, Stream | None] | None = None
        """Version that is being received, or only joined; by whom."""
        self._staged: StagedWeights | None = None
        self._base: StagedWeights | None = None
        self._spare: torch.Tensor | None = None
        """Memory of a version that is not needed any more."""
        self._views = BucketViews()
        self._landings = BucketLandings()
        self._chosen: Staging | None = None
        self._dropped: int | None = None
        self._closed = False

    @property
    def staging(self) -> Staging:
        """`full` or `none`; `auto` until the first update has come."""
        return self._chosen or self._config.sync.staging

    @property
    def staged(self) -> StagedWeights | None:
        """The prepared version; None when there is none, or it is only joined."""
        return self._staged

    @property
    def names(self) -> tuple[str, ...]:
        """Of the weights of the version that is prepared, staged or joined; () when none is."""
        staged, arriving = self._staged, self._arriving
        if staged is not None:
            return staged.plan.names
        return () if arriving is None or arriving[2] is None else arriving[2].plan.names

    def prepare(self, update: WeightUpdate) -> None:
        """Receive and verify `update` in the calling thread; without staging only join it. What was prepared before
        is dropped.

        Raises WeightTransferError; nothing is staged then, and the version served is still a base.
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
                    if update.base is not None:
                        error = stream.bound.error(
                            f"refers to version {update.base}, nothing is staged here: send it whole"
                        )
                        stream.give_up(error)
                        raise error
                    scatter_kernel(stream.device)  # compiled now, once, and not when the engine stands still
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
        """Without staging: let what comes first arrive before `arriving` is asked for it; what goes wrong, that
        raises. By the thread that prepared; returns when no more can come before that."""
        arriving = self._arriving
        if arriving is not None and arriving[2] is not None:
            arriving[2].read_ahead()

    def arriving(
        self, update: WeightUpdate, places: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Without staging: whole tensors of the joined `update` as soon as all their pieces are there; valid until the
        next list. Verified, and the update whole, only when the iterator ends.

        places: by name, where weights belong, if they may be written there at once: on a GPU, contiguous and in the
        dtype and shape that they are sent in. Such a tensor comes as its place. The mapping must not change; the same
        one is best given again. Raises WeightTransferError, ValueError when `update` was not joined.
        """
        arriving = self._arriving
        if arriving is None or arriving[0] != update.version or arriving[2] is None:
            raise ValueError(f"weights: version {update.version} was not joined, prepare it first")
        stream = arriving[2]
        pieces: dict[str, torch.Tensor] = {}
        read = set()
        plan = stream.plan
        stream.take = lambda frame, payload: self._landing(plan, frame, payload, places).scatter(payload)
        try:
            for frame, payload in stream:
                yield self._whole_tensors(plan, frame, payload, pieces, places)
                read.add(frame.bucket)
            _expect_whole(stream, read)
        finally:
            stream.close()
            with self._lock:
                self._arriving = None

    def committed(self, version: int) -> None:
        """`version`, staged before, is served: it is the base of a next delta from now on (with `sync.delta`), and what
        was the base is let go of. Without staging there is nothing to do."""
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
        """Forget prepared `version`, or end its reception. Idempotent; legal from any thread."""
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

    def close(self) -> None:
        """Let go of everything, ending what arrives. Idempotent; legal from any thread."""
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

    # ------------------------------------------------------------ receiving

    def _receiver(self, kind: str) -> Receiver:
        if kind not in self._receivers:
            self._receivers[kind] = build_receiver(kind, self._config, self._worker)
        return self._receivers[kind]

    def _choose(self, update: WeightUpdate, stream: Stream) -> Staging:
        """What `auto` means here: once, by the first update."""
        if self._chosen is None:
            self._chosen = self._config.sync.staging
            if self._chosen == "auto":
                self._chosen = "full" if _has_room(stream.device, update.num_bytes) else "none"
        return self._chosen

    def _expect_wanted(self, update: WeightUpdate, stream: Stream) -> None:
        if self._dropped == update.version or self._closed:
            raise stream.bound.error("was dropped meanwhile")

    def _receive(self, update: WeightUpdate, stream: Stream) -> StagedWeights:
        base = self._expect_base(update, stream)
        plan, offsets = stream.plan, bucket_offsets(stream.plan)
        if base is None and stream.memory is not None:
            memory, owner = stream.memory, stream  # the bytes stay where they are
        else:
            memory, owner = self._memory(offsets[-1], stream.device), None
            stream.receive_into(memory)
        read = set()
        for frame, payload in stream:
            target = memory[offsets[frame.bucket] : offsets[frame.bucket] + plan.sizes[frame.bucket]]
            if frame.encoding != "whole":
                assert base is not None
                target.copy_(base.memory[offsets[frame.bucket] : offsets[frame.bucket] + len(target)])
                if frame.encoding == "sparse":
                    _apply(stream, frame, payload, target)
            elif target.data_ptr() != payload.data_ptr():
                target.copy_(payload)
            read.add(frame.bucket)
        _expect_whole(stream, read)
        views = self._views if owner is None else BucketViews()  # a stream's memory is not to be kept
        return StagedWeights(update.version, dict(views.all(plan, memory)), plan, memory, owner)

    def _whole_tensors(
        self,
        plan: BucketPlan,
        frame: BucketFrame,
        payload: torch.Tensor,
        pieces: dict[str, torch.Tensor],
        places: Mapping[str, torch.Tensor],
    ) -> list[tuple[str, torch.Tensor]]:
        """Tensors that are whole with this bucket: views of it, or put together in `pieces` over several buckets."""
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
        if update.base is None:
            return None
        base = self._base
        if base is None or base.version != update.base:
            there = "none" if base is None else f"version {base.version}"
            raise self._refused(stream, f"refers to version {update.base}, kept here is {there}")
        if base.plan != stream.plan:
            raise self._refused(stream, f"refers to version {update.base}, which has another layout here")
        return base

    def _refused(self, stream: Stream, what: str) -> WeightTransferError:
        error = stream.bound.error(f"the update {what}: send it whole")
        stream.give_up(error)
        return error

    def _memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        spare, self._spare = self._spare, None
        if spare is None or len(spare) != nbytes or spare.device != device:
            spare = None  # given back before more is taken
            self._views.clear()
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return spare

    # ------------------------------------------------------------ letting go

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


def _apply(stream: Stream, frame: BucketFrame, payload: torch.Tensor, target: torch.Tensor) -> None:
    try:
        if target.device.type == "cpu":
            apply_sparse(payload.numpy(), target.numpy())
        else:
            changed = target.cpu()
            apply_sparse(payload.cpu().numpy(), changed.numpy())
            target.copy_(changed)
    except ValueError as error:
        raise stream.bound.error(f"bucket {frame.bucket} of {len(stream.plan.sizes)}: {error}") from error


def _expect_whole(stream: Stream, read: set[int]) -> None:
    try:
        expect_all(stream.plan, read)
    except ValueError as error:
        raise stream.bound.error(str(error)) from None


def _has_room(device: torch.device, nbytes: int) -> bool:
    """Whether two versions fit into what is free where payloads come to: one staged, one kept as base."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return free > 2 * nbytes * _MARGIN
