"""Processes that send and serve versions of weights, for the drill that kills them at random buckets."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.pairs import neighbour_sender, pair_receiver, pair_sender
from headrace.actors.weight_sync.pairs.rank_publisher import RankPublisher
from headrace.actors.weight_sync.plan import packing
from headrace.actors.weight_sync.plan.regions import held
from headrace.actors.weight_sync.transports import ends
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import (
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightUpdate,
)
from headrace.bench.models import digest_of
from headrace.tests.actors.weight_sync.transports import sample_weights

SPECS = {"a": (torch.bfloat16, (500, 300)), "b": (torch.float32, (257, 128)), "scale": (torch.float32, ())}
BUCKET_BYTES = 1 << 13
NUM_BUCKETS = 24
"""Every process handles at least as many buckets in an update."""
Weights = dict[str, torch.Tensor]


def weights(version: int) -> Weights:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SPECS.items()}


class End:
    """Does its part of an update in a thread, so that it can be asked for other things meanwhile."""

    dies_in: Sequence[tuple[ModuleType, str]]
    """Functions of which one is called for each bucket."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None

    def begin(self, update: WeightUpdate, dies_at: int | None) -> None:
        """dies_at: number of the bucket, in the order in which this process handles them, at which it kills itself."""
        count = itertools.count()

        def counted(original: Callable[..., object], *args: object) -> object:
            if next(count) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args)

        for module, name in self.dies_in if dies_at is not None else ():
            setattr(module, name, partial(counted, getattr(module, name)))
        self._running = self._pool.submit(self._run, update)

    def outcome(self) -> str | None:
        """The error of the update, "" without any, and None while it runs."""
        assert self._running is not None
        if not self._running.done():
            return None
        error = self._running.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def _run(self, update: WeightUpdate) -> None:
        raise NotImplementedError


class ServingEnd(End):
    """An engine: it copies a version over the one that it serves when that is committed."""

    dies_in = ((ends, "checksum"), (pair_receiver, "checksum"), (packing, "device_digest"))

    def __init__(self, engine: str, timeout_s: float, key: bytes) -> None:
        super().__init__()
        self._inbox = WeightInbox(ReceiverConfig(engine, SyncConfig(timeout_s=timeout_s), key=key), 0)
        self._served = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in SPECS.items()}
        self._pause = threading.Lock()

    def _run(self, update: WeightUpdate) -> None:
        self._inbox.prepare(update)

    def commit(self, version: int) -> None:
        staged = self._inbox.staged
        assert staged is not None and staged.version == version
        with self._pause:
            for name, tensor in staged.named.items():
                self._served[name].copy_(tensor)
        self._inbox.committed(version)

    def drop(self, version: int) -> None:
        self._inbox.drop(version)

    def served(self) -> str:
        """Digest of what is served now."""
        with self._pause:
            return digest_of(self._served)

    def close(self) -> None:
        self._inbox.close()


class RankEnd(End):
    """A train rank of the transport `pairs`, over TCP, or beside engines that read its memory."""

    dies_in = ((pair_sender, "pack"), (neighbour_sender, "pack"))

    def __init__(self, rank: int, num: int, timeout_s: float, key: bytes, shares_gpus: bool) -> None:
        super().__init__()
        self._regions = [
            [
                region
                for name, (_, shape) in SPECS.items()
                for region in held(name, shape, [(0, num, one)] if shape else [])
            ]
            for one in range(num)
        ]
        self._rank, sync = rank, SyncConfig(timeout_s=timeout_s)
        limit = BUCKET_BYTES * pair_sender.SLOTS
        wire: dict[str, Any] = {"group": torch.device("cpu"), "shares_gpus": True} if shares_gpus else {}
        self._publisher = RankPublisher(rank, "127.0.0.1", key, sync, limit, SPECS, self._regions, **wire)

    def address(self) -> str:
        return self._publisher.addresses[0]

    def meet(self, addresses: list[str]) -> None:
        self._publisher.addresses = addresses

    def open(self, version: int, groups: Sequence[ReceiverGroup]) -> WeightUpdate:
        return self._publisher.open(version, groups)

    def _run(self, update: WeightUpdate) -> None:
        whole = weights(update.version)
        local = {
            region.tensor: whole[region.weight][tuple(slice(a, b) for a, b in region.box)].contiguous()
            for region in self._regions[self._rank]
        }
        self._publisher.send(update, local.__getitem__)

    def close(self) -> None:
        self._publisher.close()


class BroadcastEnd(End):
    """Train rank 0 of the transport `collective`."""

    dies_in = ((sample_weights, "checksum"),)

    def __init__(self, timeout_s: float, key: bytes) -> None:
        super().__init__()
        config = SenderConfig("drill", SyncConfig(timeout_s=timeout_s), "127.0.0.1", key=key)
        self._sender = build_sender("collective", config)
        self._plan = sample_weights.plan_of(weights(0), BUCKET_BYTES)

    def open(self, version: int, groups: Sequence[ReceiverGroup]) -> WeightUpdate:
        return self._sender.begin(version, self._plan, groups)

    def _run(self, update: WeightUpdate) -> None:
        try:
            sample_weights.publish(self._sender, self._plan, weights(update.version))
        except Exception as error:
            self._sender.abort(str(error))
            raise

    def close(self) -> None:
        self._sender.close()
