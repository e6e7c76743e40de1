"""`BucketStream` fills the sender's buffers, and the host's cache, bucket by bucket with the tensors of one version.

    without a base   tensor -> sender.buffer(b), hashed while it is copied -> cache, if there is one -> send(b)
    with a base      tensor -> cache -> compared with the base version -> changes -> sender.buffer(b) -> send(b)

A base is the version that the receivers already have, so that a delta suffices. Apart from the current tensor, the
stream holds one bucket in memory: the sender's buffer, or, with a base, the payload computed for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import xxhash

from ...codecs.schema import DTYPES
from ...codecs.weights.buckets import (
    BucketEntry,
    BucketPlan,
    check_planned,
    copy_bytes,
    encode_sparse,
    queue_whole,
    write_piece,
)
from ...codecs.weights.gpu_scatter import device_digest
from .cache import CachedVersion
from .transports.protocol import BucketFrame, Encoding, WeightSender, WeightTransferError, WeightUpdate
from .views import BucketViews, Views

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SendReport:
    """Bytes sent and seconds spent in publishing one version of the weights."""

    num_bytes: int
    """Number of bytes of all weights."""
    bytes_sent: int
    """Number of payload bytes sent; 0 when the sender had the version already."""
    gather_s: float
    """Seconds spent waiting for the next tensor to be gathered."""
    fill_s: float
    """Seconds spent copying, hashing and comparing tensors."""
    send_s: float
    """Seconds spent waiting for a free buffer of the sender and, at the end, for the receivers."""
    num_whole: int
    """Number of buckets that were sent in full."""
    num_same: int
    """Number of buckets that were not sent because they equal those of the base version."""
    num_sparse: int
    """Number of buckets that were sent as their changed elements only."""


@dataclass(slots=True)
class Publication:
    """A weight update that the publisher has announced and that has not ended yet."""

    update: WeightUpdate
    plan: BucketPlan
    cached: bool
    """True if the version is sent from the cache in host memory."""
    there: bool = False
    """True if the sender still holds the complete version, so that nothing needs to be sent."""
    aborted: str | None = None
    """Why the update was aborted; None while it is not aborted. Any thread may set it."""


class BucketStream:
    """Sends the weights of one open update. Call `feed` for each tensor or `copy` for each bucket, then `finish` and
    `report`."""

    def __init__(
        self,
        sender: WeightSender,
        opened: Publication,
        draft: CachedVersion | None = None,
        base: CachedVersion | None = None,
        views: BucketViews | None = None,
    ) -> None:
        """Prepare to send the update `opened` through `sender`.

        draft: slot of the host cache that this version is written to; None without a cache. base: cached version that
        the receivers already have, and from which deltas are computed; None sends all buckets in full. A base requires
        a draft. views: views of the sender's buffers, reused from one update to the next.

        With a draft, a failure of the sender does not end the stream: the draft is still filled, and `report` raises
        the sender's error.
        """
        assert base is None or draft is not None
        self._sender = sender
        self._opened = opened
        self._draft = draft
        self._base = base
        self._failure: Exception | None = None
        plan = opened.plan
        self._planned = plan.weights
        self._num_fed = 0
        self._pieces_left = dict(plan.pieces)
        self._views = views or BucketViews()
        self._places: Views = {}
        """Views of the weights inside `_out`, by weight name; empty on a CPU."""
        self._out: torch.Tensor | None = None
        """Bucket that is being filled, either the sender's buffer or a view of the draft; None between two buckets."""
        self._digest: xxhash.xxh3_64 | None = None
        self._started = time.perf_counter()
        self._send_s = 0.0
        self._bytes_sent = 0
        self._num_sent: Counter[Encoding] = Counter()

    def feed(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the next tensor into its buckets, and send each bucket that becomes full. The caller may change the
        tensor once this returns (on a GPU, once the current CUDA stream has done the work queued here).

        Raises ValueError if the tensor is not the one planned next. An error of the sender is raised here, or by
        `report` if the version is also written to the cache.
        """
        upto = self._num_fed
        if upto == len(self._planned) or name != self._planned[upto][0]:
            planned = self._planned[upto][0] if upto < len(self._planned) else "no more"
            raise ValueError(f"{self._label}: weight {name!r} came after {upto} others, expected {planned!r}")
        entries = self._planned[upto][1]
        out = self._out = self._begin(entries[0].bucket) if self._out is None else self._out
        place = self._places.get(name)
        if place is not None and place.dtype == tensor.dtype and place.shape == tensor.shape:
            queue_whole(entries[0], tensor, out, place)
            self._count(entries[0], out)
        else:
            check_planned(entries[0], tensor)
            whole = tensor.detach().contiguous()
            for entry in entries:
                out = self._out = self._begin(entry.bucket) if self._out is None else self._out
                write_piece(entry, whole, out, self._digest)
                self._count(entry, out)
        self._num_fed += 1

    def copy(self, bucket: int, source: torch.Tensor) -> None:
        """Send `source` as the full content of a bucket. An error of the sender is raised here, or by `report` if the
        version is also written to the cache."""
        self._send(bucket, "whole", source)

    def finish(self) -> None:
        """Wait until the sender has finished the update. Raises ValueError if tensors are missing. An error of the
        sender is raised here, or by `report` if the version is also written to the cache."""
        if self._num_fed < len(self._planned) and not self._opened.cached:
            raise ValueError(
                f"{self._label}: {self._num_fed} of {len(self._planned)} weights came; "
                f"{self._planned[self._num_fed][0]!r} is the first that is missing"
            )
        self._attempt("at the end", self._sender.finish)

    def report(self, gather_s: float) -> SendReport:
        """Return the costs of the update. gather_s: seconds spent waiting for tensors. Raises the sender's error, if it
        failed."""
        if self._failure is not None:
            raise self._failure
        return SendReport(
            num_bytes=self._opened.plan.num_bytes,
            bytes_sent=self._bytes_sent,
            gather_s=gather_s,
            fill_s=max(0.0, time.perf_counter() - self._started - gather_s - self._send_s),
            send_s=self._send_s,
            num_whole=self._num_sent["whole"],
            num_same=self._num_sent["same"],
            num_sparse=self._num_sent["sparse"],
        )

    # ---------------- These methods are private.

    @property
    def _label(self) -> str:
        return f"weights: version {self._opened.update.version}"

    def _count(self, entry: BucketEntry, out: torch.Tensor) -> None:
        """Record that the piece `entry` has been written into its bucket `out`, and send the bucket once it is full."""
        self._pieces_left[entry.bucket] -= 1
        if not self._pieces_left[entry.bucket]:
            self._end(entry.bucket, out)
            self._out = None

    def _begin(self, bucket: int) -> torch.Tensor:
        """Return the memory to fill for a bucket: the sender's buffer, or the bucket's place in the cache (`_draft`).
        It is the latter in a delta update, or after the sender has failed."""
        out = self._buffer(bucket, self._opened.plan.sizes[bucket]) if self._base is None else None
        if out is None:
            assert self._draft is not None
            out = self._draft.bucket(bucket)
        self._digest = xxhash.xxh3_64() if out.device.type == "cpu" else None
        self._places = self._views.inside(self._opened.plan, bucket, out) if out.is_cuda else {}
        return out

    def _end(self, bucket: int, out: torch.Tensor) -> None:
        """Send a bucket that is full. With a base, it is sent in the shortest encoding relative to the base; otherwise
        it is copied to the cache, if there is one, and sent with all its bytes. Does nothing once the sender has
        failed."""
        if self._base is None:
            if self._failure is None:
                if self._draft is not None:
                    # This comes before `send`, which returns the buffer to the sender.
                    self._draft.bucket(bucket).copy_(out)
                self._hand_over(bucket, "whole", out, self._digest)
        elif self._failure is None:
            assert self._digest is not None, "drafts are in host memory"
            encoding, payload = shortest(self._opened.plan.in_bucket(bucket), out, self._base.bucket(bucket))
            self._send(bucket, encoding, payload, 0 if encoding == "whole" else self._digest.intdigest())

    def _send(self, bucket: int, encoding: Encoding, payload: torch.Tensor, result: int = 0) -> None:
        """Copy a payload from host memory into the sender's buffer, and send it. result: hash of the bucket that a
        receiver gets by applying the payload, as in `BucketFrame.result`."""
        out = self._buffer(bucket, len(payload))
        if out is None:
            return
        digest = xxhash.xxh3_64() if out.device.type == "cpu" else None
        copy_bytes(payload, out, digest)
        self._hand_over(bucket, encoding, out, digest, result)

    def _buffer(self, bucket: int, nbytes: int) -> torch.Tensor | None:
        """Return the sender's buffer for a payload of `nbytes` bytes; None once the sender has failed."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)  # Only the frame is sent.
        return self._attempt(f"bucket {bucket}", lambda: self._sender.buffer(bucket, nbytes))

    def _hand_over(
        self, bucket: int, encoding: Encoding, out: torch.Tensor, digest: xxhash.xxh3_64 | None, result: int = 0
    ) -> None:
        """Give a filled buffer to the sender. digest: hash of a payload on the CPU; None for a payload on a GPU, whose
        digest is computed on the GPU."""
        if out.is_cuda:
            frame = BucketFrame(bucket, encoding, len(out), 0, result)
            self._attempt(f"bucket {bucket}", lambda: self._sender.send(frame, partial(device_digest, out)))
        else:
            assert digest is not None
            frame = BucketFrame(bucket, encoding, len(out), digest.intdigest(), result)
            self._attempt(f"bucket {bucket}", lambda: self._sender.send(frame))
        self._bytes_sent += frame.nbytes
        self._num_sent[frame.encoding] += 1

    def _attempt(self, what: str, call: Callable[[], T]) -> T | None:
        """Make `call`, a call of the sender, and return its result; None once the sender has failed. With a cache slot
        to fill (`_draft`), the sender's error is kept for `report`; without one, it is raised."""
        if self._failure is not None:
            return None
        start = time.perf_counter()
        try:
            if self._opened.aborted is not None:
                raise WeightTransferError(f"{self._label}, {what}: aborted: {self._opened.aborted}")
            return call()
        except Exception as error:  # `report` raises this error once the cache has the whole version.
            if self._draft is None:
                raise
            self._failure = error
            self._sender.abort(f"{what}: {type(error).__name__}: {error}")  # The receivers then stop waiting at once.
            return None
        finally:
            self._send_s += time.perf_counter() - start


def shortest(entries: Sequence[BucketEntry], new: torch.Tensor, base: torch.Tensor) -> tuple[Encoding, torch.Tensor]:
    """Return the shortest encoding of bucket `new` for a receiver that has the bucket `base`, and its payload."""
    if torch.equal(new, base):
        return "same", new[:0]
    element_bytes = min((DTYPES[entry.dtype].itemsize for entry in entries if entry.nbytes), default=1)
    if len(new) % element_bytes == 0:
        sparse = encode_sparse(new.numpy(), base.numpy(), element_bytes)
        if sparse is not None:
            return "sparse", torch.from_numpy(sparse)
    return "whole", new
