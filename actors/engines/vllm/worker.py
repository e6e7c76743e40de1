"""What lives in vLLM's worker processes: weights arrive in a thread of their own, and are loaded on command.

    prepare   start a thread: receive into staging, verify, compare names and shapes; the worker goes on generating
    state     how far that is (asked again and again)
    load      vLLM's weight-update session: start_weight_update, update_weights(version), finish_weight_update
    drop      forget a staged version, or end its reception

`WeightWorker` is mixed into vLLM's worker, its methods are called by name (`collective_rpc`); the rest is a weight
transfer engine of vLLM's own API, registered as `headrace`. Of that API only the load session is used: its
`update_weights` runs in the worker's one thread, and nothing would be generated while weights arrive.
"""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....codecs import messages
from ...transports.protocol import WeightTransferError, WeightUpdate
from ...transports.settings import ReceiverConfig
from ...transports.staging import WeightInbox
from . import library
from .loading import ModelLoader
from .names import WeightNames
from .wire import BACKEND, LoadReport, PrepareState


@dataclass
class InboxInfo(library.WeightTransferInitInfo):
    """How this worker receives."""

    receiver: bytes
    """A pickled ReceiverConfig: it comes from the process that started this one, and never from anywhere else."""
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
        self._thread: threading.Thread | None = None
        self._state = PrepareState(-1, "none")
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- vLLM's weight-transfer API

    def init_transfer_engine(self, init_info: InboxInfo) -> None:
        config = pickle.loads(init_info.receiver)
        assert isinstance(config, ReceiverConfig)
        self._names = WeightNames(init_info.model)
        self._inbox = WeightInbox(replace(config, device=str(self.device)), self.parallel_config.rank)

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
        else:
            self._load_arriving(inbox, names, self._update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class also calls torch.accelerator.synchronize: the loader does, once a session.
        self.receive_weights(self.parse_update_info(update_info))

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

    # ---------------------------------------------------------------- receiving

    def prepare(self, update: WeightUpdate) -> None:
        """Start to receive; returns at once. What is prepared already is dropped."""
        self._opened()
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError(f"weights: {self._state.describe()}, when version {update.version} was announced")
        self._update = update
        self._state = PrepareState(update.version, "receiving")
        self._thread = threading.Thread(target=self._receive, args=(update,), name="weights", daemon=True)
        self._thread.start()

    def state(self) -> PrepareState:
        """How far the last `prepare` is."""
        with self._lock:
            return self._state

    def drop(self, version: int) -> None:
        """Forget a prepared version; a reception that runs ends with an error. Idempotent."""
        inbox, _ = self._opened()
        inbox.drop(version)
        if self._update is not None and self._update.version == version:
            self._update = None

    def committed(self, version: int) -> None:
        """`version` was loaded whole."""
        inbox, _ = self._opened()
        inbox.committed(version)
        self._update = None

    def _receive(self, update: WeightUpdate) -> None:
        inbox, names = self._opened()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        state = PrepareState(update.version, "ready")
        try:
            inbox.prepare(update)
            if (staged := inbox.staged) is not None:
                names.check(staged.named)
        except WeightTransferError as error:
            state = PrepareState(update.version, "failed", "transfer", str(error))
        except ValueError as error:
            state = PrepareState(update.version, "failed", "value", str(error))
        except Exception as error:  # a thread's exception would be lost: the engine raises it
            state = PrepareState(update.version, "failed", "transfer", f"{type(error).__name__}: {error}")
        if state.phase == "failed":
            inbox.drop(update.version)
        with self._lock:
            self._state = state

    def _load_arriving(self, inbox: WeightInbox, names: WeightNames, update: WeightUpdate) -> None:
        """Load bucket by bucket as they arrive. An error leaves the model in pieces."""
        got: set[str] = set()
        for whole in inbox.arriving(update):
            for name, tensor in whole:
                names.check_one(name, tensor)
                got.add(name)
            if not self.loader.in_place:
                # Layerwise reload keeps tensors until their layer is whole; these are gone with the next bucket.
                whole = [(name, tensor.clone()) for name, tensor in whole]
            self.loader.load(whole)
        names.check_complete(got)

    def _opened(self) -> tuple[WeightInbox, WeightNames]:
        if self._inbox is None or self._names is None:
            raise RuntimeError("weights: the worker was given no receiver")
        return self._inbox, self._names


class WeightWorker:
    """Mixed into vLLM's worker: what the engine calls by name. Arguments and results are msgpack."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def headrace_prepare(self, update: bytes) -> None:
        """Start to receive `update`, a WeightUpdate."""
        self.weight_transfer_engine.prepare(messages.decode(update, WeightUpdate))

    def headrace_state(self) -> bytes:
        """A PrepareState."""
        return messages.encode(self.weight_transfer_engine.state())

    def headrace_drop(self, version: int) -> None:
        """Forget a prepared version."""
        self.weight_transfer_engine.drop(version)

    def headrace_load(self, version: int) -> bytes:
        """Load a prepared version whole; a LoadReport, which names the error of one that broke off."""
        worker: Any = self
        engine: StagedWeightEngine = self.weight_transfer_engine
        started = time.perf_counter()
        error, in_transfer = "", False
        try:
            worker.start_weight_update()
            worker.update_weights({"version": version})
            worker.finish_weight_update()
            engine.committed(version)
        except Exception as failure:  # raised by the engine, for all workers at once
            error, in_transfer = f"{type(failure).__name__}: {failure}", isinstance(failure, WeightTransferError)
            self._weight_update_active = False
            engine.loader.abandon()
        return messages.encode(LoadReport(time.perf_counter() - started, engine.loader.way, error, in_transfer))

    def headrace_close(self) -> None:
        """Let go of receivers."""
        self.weight_transfer_engine.shutdown()


if BACKEND not in library.WeightTransferEngineFactory._registry:  # this module is imported once in every worker
    library.WeightTransferEngineFactory.register_engine(BACKEND, StagedWeightEngine)
