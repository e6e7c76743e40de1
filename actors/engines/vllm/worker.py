"""What lives in vLLM's worker processes: weights arrive in a thread of their own, and are loaded there on command.

    prepare   receive into staging, verify, compare names and shapes; the worker goes on generating
    load      the steps of vLLM's weight-update session, start, receive and finish; nothing else runs meanwhile
    drop      forget a staged version, or end its reception

The first two are ordered over the worker's link and done in its thread (`links`). The third is a call of vLLM's:
`WeightWorker` is mixed into its worker, the methods are called by name (`collective_rpc`). The rest is a weight
transfer engine of vLLM's own API, registered as `headrace`. vLLM's own session would receive in the worker's one
thread, where nothing would be generated while weights arrive, and is asked for through its engine process, which takes
a millisecond there and one back.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...weights.inbox import WeightInbox
from ...weights.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from . import library
from .links import Order, WorkerLink
from .loading import ModelLoader
from .names import WeightNames
from .wire import BACKEND, LoadReport, PrepareState


@dataclass
class InboxInfo(library.WeightTransferInitInfo):
    """How this worker receives."""

    receiver: bytes
    """A pickled ReceiverConfig: it comes from the process that started this one, and never from anywhere else."""
    link: str
    """Where the engine listens for its workers."""
    model: str
    """Whose names and shapes an update must have."""


@dataclass
class StagedVersion(library.WeightTransferUpdateInfo):
    """Which version to load."""

    version: int


class StagedWeightEngine(library.WeightTransferEngine):
    """Loads versions that an inbox has staged, or that arrive while it loads (`staging: none`)."""

    init_info_cls = InboxInfo
    update_info_cls = StagedVersion
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loader = ModelLoader(self.model, self.vllm_config)
        self._inbox: WeightInbox | None = None
        self._names: WeightNames | None = None
        self._update: WeightUpdate | None = None
        self._link: WorkerLink | None = None
        self._state = PrepareState(-1, "none")
        self._begun: Callable[[], None] = lambda: None
        """To be called when a load has something to wait for."""
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        """What is received does not wait for the model's steps, nor they for it."""

    # ---------------------------------------------------------------- vLLM's weight-transfer API

    def init_transfer_engine(self, init_info: InboxInfo) -> None:
        config = pickle.loads(init_info.receiver)
        assert isinstance(config, ReceiverConfig)
        self._names = WeightNames(init_info.model)
        rank = self.parallel_config.rank
        self._inbox = WeightInbox(replace(config, device=str(self.device)), rank)
        self._link = WorkerLink(init_info.link, rank, self._follow)

    def start_weight_update(self) -> None:
        self.loader.start(self._names, () if self._inbox is None else self._inbox.names)

    def receive_weights(self, update_info: StagedVersion) -> None:
        inbox, names = self._opened()
        if self._update is None or self._update.version != update_info.version:
            raise ValueError(f"weights: version {update_info.version} was not prepared; {self._state.describe()}")
        staged = inbox.staged
        if staged is not None:
            assert staged.version == update_info.version
            self.loader.load(staged.named.items())
            self._begun()
        else:
            self._load_arriving(inbox, names, self._update)

    def finish_weight_update(self) -> None:
        self.loader.finish()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """The trainer's end is a WeightPublisher; 0.26 wants this method to be there."""
        raise NotImplementedError("weights are published by a WeightPublisher")

    def shutdown(self) -> None:
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        if self._link is not None:
            self._link.close()

    # ---------------------------------------------------------------- the engine's orders

    def drop(self, version: int) -> None:
        """Forget a prepared version; a reception that runs ends with an error. Idempotent."""
        inbox, _ = self._opened()
        inbox.drop(version)
        if self._update is not None and self._update.version == version:
            self._update = None

    def _follow(self, order: Order) -> None:
        """In the link's thread."""
        link = self._link
        assert link is not None
        with torch.cuda.stream(self._stream):  # of None: no more than this thread's own
            if order.prepare is not None:
                state = self._prepare(order.prepare)
                link.answer(order, state=state)
                if state.phase == "ready" and self._inbox is not None:
                    self._inbox.read_ahead()
            elif order.load is not None:
                self._begun = partial(link.answer, order)
                link.answer(order, report=self._load(order.load))
                self.loader.look()

    def _prepare(self, update: WeightUpdate) -> PrepareState:
        """What was prepared before is dropped."""
        state = PrepareState(update.version, "ready")
        self._update, self._state = update, PrepareState(update.version, "receiving")
        try:
            inbox, names = self._opened()
            inbox.prepare(update)
            if (staged := inbox.staged) is not None:
                names.check(staged.named)
            if self._stream is not None:
                self._stream.synchronize()
        except WeightTransferError as error:
            state = PrepareState(update.version, "failed", "transfer", str(error))
        except ValueError as error:
            state = PrepareState(update.version, "failed", "value", str(error))
        except Exception as error:  # a thread's exception would be lost: the engine raises it
            state = PrepareState(update.version, "failed", "transfer", f"{type(error).__name__}: {error}")
        if state.phase == "failed" and self._inbox is not None:
            self._inbox.drop(update.version)
        self._state = state
        return state

    def _load(self, version: int) -> LoadReport:
        """All of it, or in pieces: then the report names the error."""
        started = time.perf_counter()
        error, in_transfer = "", False
        try:
            # A last step of requests that have ended may still be running: nobody gets what it makes.
            self.start_weight_update()
            self.receive_weights(StagedVersion(version))
            self.finish_weight_update()
            inbox, _ = self._opened()
            inbox.committed(version)
            self._update = None
        except Exception as failure:  # raised by the engine, for all workers at once
            error, in_transfer = f"{type(failure).__name__}: {failure}", isinstance(failure, WeightTransferError)
            try:
                self.loader.abandon()
            except Exception as another:
                error += f"; and on giving up {type(another).__name__}: {another}"
        return LoadReport(time.perf_counter() - started, self.loader.way, error, in_transfer)

    def _load_arriving(self, inbox: WeightInbox, names: WeightNames, update: WeightUpdate) -> None:
        """Load bucket by bucket as they arrive. An error leaves the model in pieces."""
        got: set[str] = set()
        for whole in inbox.arriving(update, self.loader.places):
            first = not got
            got.update(name for name, _ in whole)
            if not self.loader.in_place:
                # Layerwise reload keeps tensors until their layer is whole; these are gone with the next bucket.
                whole = [(name, tensor.clone()) for name, tensor in whole]
            self.loader.load(whole, names.check_one)
            if first and got:
                self._begun()
        names.check_complete(got)

    def _opened(self) -> tuple[WeightInbox, WeightNames]:
        if self._inbox is None or self._names is None:
            raise RuntimeError("weights: the worker was given no receiver")
        return self._inbox, self._names


class WeightWorker:
    """Mixed into vLLM's worker: what the engine calls by name. Arguments and results are msgpack."""

    weight_transfer_engine: Any

    def headrace_drop(self, version: int) -> None:
        """Forget a prepared version."""
        self.weight_transfer_engine.drop(version)

    def headrace_close(self) -> None:
        """Let go of receivers."""
        self.weight_transfer_engine.shutdown()


if BACKEND not in library.WeightTransferEngineFactory._registry:  # this module is imported once in every worker
    library.WeightTransferEngineFactory.register_engine(BACKEND, StagedWeightEngine)
