"""`WeightPublisher` on train rank 0 announces versions of the weights, sends them, and keeps copies to send again.

main thread     open -> publish(weights())             gathers and sends weights; fills the cache, if there is one
main thread     cache(weights())                       gathers weights and fills the cache only
any thread      open(cached=True) -> publish_cached    sends from the cache without gathering, while training goes on
any thread      abort                                  ends the open update
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from ...codecs.weights.buckets import BucketPlan, plan_buckets, write_piece
from ...codecs.weights.parameter_digests import DigestTaker, ParameterDigests, sampled_names
from ...codecs.weights.quantization import Quantization
from ..adapters.spec import AdapterSpec
from .cache import NUM_VERSIONS, BucketCache, CachedVersion
from .config import SyncConfig
from .stream import BucketStream, Publication, SendReport
from .transports.protocol import ReceiverGroup, WeightSender, WeightTransferError, WeightUpdate
from .views import BucketViews

WeightSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each weight by name, as `TrainBackend.weight_specs` returns them."""


class WeightPublisher:
    """Publishes weight versions through one sender. Calls from several threads take turns, and each waits at most
    `sync.timeout_s` seconds for its turn; `abort` never waits.

    Opening an update aborts the one that is still open.
    """

    def __init__(
        self,
        sender: WeightSender,
        config: SyncConfig,
        bucket_bytes: int,
        *,
        keep_versions: bool = False,
        adapter: AdapterSpec | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Create a publisher that owns `sender` and closes it in `close`.

        bucket_bytes: size of a bucket in bytes, a multiple of 64. At most two buckets are in transit at a time.
        keep_versions: whether the last versions are kept in host memory whatever `sync` says, because some versions are
        not sent to any receiver at first. adapter: the adapter whose tensors are published; None if they are those of
        the whole model. The digests of an adapter's tensors are always kept, whatever `sync.verify` says. quantization:
        the weights that are sent in 8 bits; None if none are. They are quantized as they are gathered, so that plans,
        digests and copies are those of the 8-bit weights. An adapter is sent as it is: only its base is in 8 bits.
        """
        self._sender = sender
        self._adapter = adapter
        self._quantization = quantization if adapter is None else None
        self._config = config
        self._bucket_bytes = bucket_bytes
        self._cache: BucketCache | None = None
        if keep_versions or config.delta or (config.cache and not sender.lasting):
            self._cache = BucketCache(config.timeout_s)
        self._lock = threading.Lock()
        self._task = ""
        """Operation for which the lock was last taken; named in error messages."""
        self._opened: Publication | None = None
        self._planned: tuple[list[tuple[str, tuple[torch.dtype, tuple[int, ...]]]], BucketPlan] | None = None
        """Weight specs and bucket plan of the last update; None before the first. Most updates have the same specs and
        reuse the plan."""
        self._views = BucketViews()
        self.sent = 0
        """Progress counter since the start: number of weights gathered, plus number of buckets sent from the cache. Any
        thread may read it."""
        self._finished: WeightUpdate | None = None
        """Newest update that the sender has finished; None before the first."""
        self._digests: dict[int, ParameterDigests] = {}
        """Digests of the last versions that were gathered, the newest last; empty with `sync.verify=off`."""

    def reserve(self, specs: WeightSpecs) -> None:
        """Allocate all the host memory that the version cache needs for this model. Does nothing without a cache.
        Raises ValueError if too little memory is available."""
        if self._cache is not None:
            self._cache.reserve(self._plan(specs))

    def open(
        self,
        version: int,
        specs: WeightSpecs,
        receivers: Sequence[ReceiverGroup],
        *,
        base: int | None = None,
        cached: bool = False,
    ) -> WeightUpdate:
        """Open an update that will send `version`, and return its announcement. The call waits only while another
        thread is publishing.

        base: version that all `receivers` serve now. If `sync.delta` is set and this version is the newest one in the
        cache, only the differences from it are sent. cached: True if `version` was published before and is to be sent
        again in full, from the cache. If receivers can still read the complete version from the sender, nothing is
        sent, and the version is only announced to `receivers`.

        Raises what `WeightSender.begin` and `BucketCache.reserve` raise, ValueError for a cached version that the cache
        does not hold, and WeightTransferError if another thread publishes for too long.
        """
        with self._turn(f"open version {version}"):
            self._opened = None
            if cached and self._has_whole(version):
                assert self._finished is not None
                opened = Publication(replace(self._finished, receivers=tuple(receivers)), self._plan(specs), True, True)
            else:
                plan = self._cached_plan(version) if cached else self._plan(specs)
                if self._cache is not None:
                    self._cache.reserve(plan)
                if self._finished is not None and self._finished.version == version:
                    self._finished = None  # A version that is begun again is incomplete until it is finished.
                used = None if cached else self._base(base, plan)
                update = replace(self._sender.begin(version, plan, receivers, used), adapter=self._adapter)
                opened = Publication(update, plan, cached)
            self._opened = opened
            return opened.update

    def publish(self, update: WeightUpdate, weights: Iterator[tuple[str, torch.Tensor]]) -> SendReport:
        """Send `weights` as the open `update`. They are full tensors, in the order, dtypes and shapes of the specs
        given to `open`, not quantized yet.

        `weights` is always read to its end, even after an error, because gathering each weight is a collective
        operation that the other ranks take part in. If the sender fails and there is a cache, the complete version is
        still written to the cache before the error is raised, so that it can be sent to the remaining receivers without
        gathering again.

        Raises WeightTransferError or OSError if the sender fails, and ValueError if the weights are not as planned or
        the update is not open. The receivers learn of the failure.
        """
        names = () if self._planned is None else self._planned[1].names
        gather = _Gathered(self._sent(weights), self._digest_taker(update.version, names))
        try:
            with self._publishing(update, cached=False) as opened:
                with self._writing(opened) as draft, self._reading(update.base) as base:
                    stream = BucketStream(self._sender, opened, draft, base, self._views)
                    for name, tensor in gather:
                        stream.feed(name, tensor)
                        self.sent += 1
                    stream.finish()
                return stream.report(gather.waited_s)
        finally:
            for _ in gather:
                self.sent += 1
            self._keep_digests(gather)

    def cache(self, version: int, specs: WeightSpecs, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write `weights` into the cache as `version` without sending them, for receivers that come later.

        `weights` is read to its end even after an error, as in `publish`. Raises ValueError if there is no cache or the
        weights are not as `specs` say.
        """
        gather = _Gathered(self._sent(weights), self._digest_taker(version, tuple(self._sent_specs(specs))))
        try:
            with self._turn(f"cache version {version}"):
                if self._cache is None:
                    raise ValueError(f"weights: version {version} is to be cached, but the trainer keeps no versions")
                plan = self._plan(specs)
                with self._cache.writing(version, plan) as draft:
                    for (planned, entries), (name, tensor) in zip(plan.weights, gather, strict=True):
                        if name != planned:
                            raise ValueError(f"weights: version {version}: got weight {name!r}, expected {planned!r}")
                        for entry in entries:
                            write_piece(entry, tensor, draft.bucket(entry.bucket))
                        self.sent += 1
        finally:
            for _ in gather:
                self.sent += 1
            self._keep_digests(gather)

    def publish_cached(self, update: WeightUpdate) -> SendReport:
        """Send the open `update` from the cache. Nothing is sent if receivers can still read the complete version from
        the sender.

        Raises WeightTransferError or OSError if the sender fails, and ValueError if the update was not opened with
        `cached`.
        """
        with self._publishing(update, cached=True) as opened:
            stream = BucketStream(self._sender, opened)
            if not opened.there:
                with self._reading(update.version) as source:
                    assert source is not None
                    for bucket in range(len(source.plan.sizes)):
                        stream.copy(bucket, source.bucket(bucket))
                        self.sent += 1
                    stream.finish()
            return stream.report(0.0)

    def digests(self, version: int) -> ParameterDigests:
        """Return the digests of the weights of `version` that `sync.verify` wants compared. They were computed when the
        weights were gathered. Any thread may call it. Raises ValueError unless `version` is one of the last that were
        gathered."""
        digests = self._digests
        if version not in digests:
            there = ", ".join(map(str, digests)) or "none"
            raise ValueError(f"weights: no digests of version {version} are kept, only of: {there}")
        return digests[version]

    def abort(self, reason: str) -> None:
        """End the open update, if there is one.

        The publishing thread and the receivers then raise WeightTransferError with `reason`. Idempotent; any thread may
        call it at any time.
        """
        opened = self._opened
        if opened is not None and not opened.there:
            opened.aborted = reason
            self._sender.abort(reason)

    def close(self) -> None:
        """Abort the open update, remove everything that was published and free the memory. Idempotent."""
        self.abort("the trainer closes")
        try:
            with self._turn("close"):
                self._opened = None
        finally:
            self._sender.close()
            if self._cache is not None:
                self._cache.close()

    # ---------------- These methods are private.

    def _plan(self, specs: WeightSpecs) -> BucketPlan:
        if self._planned is None or self._planned[0] != list(specs.items()):
            self._views.clear()
            self._planned = list(specs.items()), plan_buckets(self._sent_specs(specs), self._bucket_bytes)
        return self._planned[1]

    def _sent_specs(self, specs: WeightSpecs) -> WeightSpecs:
        return specs if self._quantization is None else self._quantization.specs(specs)

    def _sent(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        return weights if self._quantization is None else self._quantization.stream(weights)

    def _digest_taker(self, version: int, names: Sequence[str]) -> DigestTaker:
        if self._config.verify == "sample" and self._adapter is None:
            return DigestTaker(version, sampled_names(names, version))
        return DigestTaker(version, frozenset(names) if self._keeps_digests else ())

    @property
    def _keeps_digests(self) -> bool:
        return self._config.verify != "off" or self._adapter is not None

    def _keep_digests(self, gathered: _Gathered) -> None:
        if self._keeps_digests:
            digests = gathered.digests.result()
            earlier = [kept for kept in self._digests.values() if kept.version != digests.version]
            self._digests = {kept.version: kept for kept in [*earlier[1 - NUM_VERSIONS :], digests]}

    def _has_whole(self, version: int) -> bool:
        """Return whether the sender still offers a full copy of `version`. A receiver can read it without having any
        earlier version."""
        finished = self._finished
        return self._sender.lasting and finished is not None and finished.version == version and finished.base is None

    def _cached_plan(self, version: int) -> BucketPlan:
        if self._cache is None:
            raise ValueError(f"weights: version {version} is to be sent again, but the trainer keeps no versions")
        with self._cache.reading(version) as cached:
            return cached.plan

    def _base(self, base: int | None, plan: BucketPlan) -> int | None:
        newest = self._cache.newest if self._config.delta and self._cache is not None else None
        return base if newest is not None and newest.version == base and newest.plan == plan else None

    def _writing(self, opened: Publication) -> AbstractContextManager[CachedVersion | None]:
        return nullcontext() if self._cache is None else self._cache.writing(opened.update.version, opened.plan)

    def _reading(self, version: int | None) -> AbstractContextManager[CachedVersion | None]:
        return nullcontext() if self._cache is None or version is None else self._cache.reading(version)

    @contextmanager
    def _publishing(self, update: WeightUpdate, *, cached: bool) -> Iterator[Publication]:
        """Context manager that holds the lock while the open update is sent. If the block raises an exception, the
        update is aborted; otherwise it is recorded as the newest finished one. Raises ValueError if `update` is not the
        open one."""
        with self._turn(f"publish version {update.version}"):
            opened = self._opened
            if opened is None or opened.update != update or opened.cached != cached:
                there = "none" if opened is None else f"version {opened.update.version}, cached: {opened.cached}"
                raise ValueError(
                    f"weights: version {update.version}, cached: {cached}, is not open; the open update is {there}"
                )
            try:
                yield opened
                self._finished = update
            except BaseException as error:
                self._sender.abort(f"{type(error).__name__}: {error}")
                self._views.clear()  # The sender can leave its buffers to receivers that still read them.
                raise
            finally:
                self._opened = None

    @contextmanager
    def _turn(self, task: str) -> Iterator[None]:
        start = time.monotonic()
        if not self._lock.acquire(timeout=self._config.timeout_s):
            raise WeightTransferError(
                f"weights: waited {time.monotonic() - start:.1f} s to {task}: another thread uses the sender "
                f"to {self._task}"
            )
        self._task = task
        try:
            yield
        finally:
            self._lock.release()


class _Gathered:
    """Iterator over another iterator's weights that measures how long it waits for them, and takes their digests."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], digests: DigestTaker) -> None:
        self._weights = weights
        self.digests = digests
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        start = time.perf_counter()
        try:
            name, tensor = next(self._weights)
        finally:
            self.waited_s += time.perf_counter() - start
        self.digests.take(name, tensor)
        return name, tensor
