"""Runs in vLLM's worker processes: receives weights in a thread of its own, and loads them there on command.

    prepare   receives a version into staging, verifies it, compares names and shapes; the worker keeps generating
    load      does the steps of vLLM's weight-update session (start, receive, finish); nothing else runs meanwhile
    verify    compares the weights in service with digests that the trainer made of them
    drop      forgets a prepared version, or stops receiving it

The engine orders the first three over a socket to each worker (`links`), and a thread in the worker carries them
out. `drop` is called through vLLM: `WeightWorker` is mixed into vLLM's worker class, whose methods can be called by
name (`collective_rpc`). The rest of this module is a weight-transfer engine for vLLM's API, registered as `headrace`.
vLLM's own update session is not used, for two reasons: it would receive in the worker's only thread, which could
generate nothing meanwhile; and each of its calls goes through the engine process, which takes a millisecond each way.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ....codecs import messages
from ....codecs.weights.parameter_digests import ParameterDigests, compare_digests
from ....codecs.weights.quantization import Scheme
from ...weight_sync.inbox import WeightInbox
from ...weight_sync.pairs.planned_receiver import missing_part
from ...weight_sync.plan.regions import Region
from ...weight_sync.plan.weight_reads import WeightReads
from ...weight_sync.transports.protocol import ReceiverConfig, WeightTransferError, WeightUpdate
from . import library
from .adapter_slots import AdapterStore
from .bitwise.kernels import normalize_sums_row_by_row
from .logprobs import SampledLogprobs, Taken
from .process import BACKEND, LoadReport, PrepareState, VerifyReport
from .quantized import file_loader  # noqa: F401 - vLLM finds the loader by its name
from .vision.prepared_pictures import take_pictures_as_they_are
from .weight_loading import ModelLoader, WeightNames
from .worker_orders import Order, WorkerLink

TELL_EVERY_S = 0.25
"""Minimum time in seconds between two messages in which a worker reports how many buckets it has received."""

# A standby imports this module before it knows whether its engine will be in the batch-invariant mode.
normalize_sums_row_by_row()


@dataclass
class InboxInfo(library.WeightTransferInitInfo):
    """Settings that a worker uses to receive weights."""

    receiver: bytes = field(repr=False)
    """Pickled ReceiverConfig, with the run's key in it. Unpickling it is safe, because it only ever comes from the
    process that started this one."""
    link: str
    """Path of the Unix socket on which the engine listens for its workers."""
    model: str
    """Model folder or hub id. An update must have the weight names and shapes of this model."""
    quantization: Scheme | None = None
    """Kind of the 8-bit weights in updates; None for weights as they are."""


@dataclass
class StagedVersion(library.WeightTransferUpdateInfo):
    """Request to load the weight version `version`, which must have been prepared."""

    version: int


class StagedWeightEngine(library.WeightTransferEngine):
    """vLLM weight-transfer engine that loads weight versions from this worker's WeightInbox. A version was staged there
    earlier or, with `staging: none`, arrives during the load."""

    init_info_cls = InboxInfo
    update_info_cls = StagedVersion
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = library.without_adapters(self.model) if self.vllm_config.lora_config else self.model
        self.loader = ModelLoader(plain, self.vllm_config)
        self.adapters: AdapterStore | None = None
        """Adapters of this worker; None if the engine has no room for any."""
        self._seats: dict[str, StagedWeightEngine] = {}
        """Receivers of the adapters of the runs that share the engine, by the run's name."""
        self._begin()

    def _begin(self) -> None:
        self._engine, self._compares = "", False
        self._inbox: WeightInbox | None = None
        self._names: WeightNames | None = None
        self._update: WeightUpdate | None = None
        self._link: WorkerLink | None = None
        self._state = PrepareState(-1, "none")
        self._begun: Callable[[], None] = lambda: None
        """Function that tells the engine that the load in progress has begun; called once its first copies are
        queued."""
        self._told = 0.0
        """Time by `time.monotonic` of the last message that reported received buckets."""
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        """CUDA stream on which weights are received, so that receiving and the model's steps do not wait for each
        other; None on a CPU."""

    # ---------------- vLLM's weight-transfer API consists of these methods.

    def init_transfer_engine(self, init_info: InboxInfo) -> None:
        """Create the inbox that receives weights, and connect to the engine's socket."""
        config = pickle.loads(init_info.receiver)
        assert isinstance(config, ReceiverConfig)
        self._engine, self._compares = config.engine, config.sync.verify != "off"
        self._names = WeightNames(init_info.model, init_info.quantization)
        rank = self.parallel_config.rank
        self._inbox = WeightInbox(replace(config, device=str(self.device)), rank, on_received=self._tell_received)
        self._link = WorkerLink(init_info.link, rank, self._follow)

    def start_weight_update(self) -> None:
        """Open a load session: prepare the model for new weights."""
        update = self._update  # With a plan, this worker may get only its parts.
        notes = self._compares and update is not None and not update.plan
        self.loader.start(self._names, () if self._inbox is None else self._inbox.names, notes=notes)

    def receive_weights(self, update_info: StagedVersion) -> None:
        """Load the prepared version into the model. Raises ValueError when the requested version is not the prepared
        one."""
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
        """Close the load session: the model is ready to generate with the new weights."""
        self.loader.finish()

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError, because the trainer publishes through a WeightPublisher. The method exists only
        because vLLM 0.26 requires it."""
        raise NotImplementedError("weights: vLLM cannot send weights; a WeightPublisher of the trainer sends them")

    def shutdown(self) -> None:
        """Close the inbox, those of all seats, and the connections to the engine. Idempotent."""
        for name in list(self._seats):
            self.close_seat(name)
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        if self._link is not None:
            self._link.close()

    # ---------------- These methods carry out the engine's orders.

    def drop(self, version: int) -> None:
        """Forget a prepared version. If it is still being received, stop receiving it; its `prepare` then fails with an
        error. Idempotent."""
        inbox, _ = self._opened()
        inbox.drop(version)
        if self._update is not None and self._update.version == version:
            self._update = None

    def _follow(self, order: Order) -> None:
        """Carry out an order from the engine, to prepare, load or verify a version. Runs in the link's thread."""
        link = self._link
        assert link is not None
        with torch.cuda.stream(self._stream):  # The context has no effect if the stream is None.
            if order.prepare is not None:
                state = self._prepare(order.prepare)
                link.answer(order, state=state)
                if state.phase == "ready" and self._inbox is not None:
                    self._inbox.read_ahead()
            elif order.load is not None:
                self._begun = partial(link.answer, order)
                link.answer(order, report=self._load(order.load, order.adapter))
                if not order.adapter:
                    self.loader.look()
            elif order.verify is not None:
                link.answer(order, verified=self._verify(order.verify, order.adapter))

    def _tell_received(self, num_received: int) -> None:
        """Report to the engine how many buckets have been received, at most once per TELL_EVERY_S seconds."""
        now = time.monotonic()
        if self._link is not None and now >= self._told + TELL_EVERY_S:
            self._told = now
            self._link.tell_received(num_received)

    def _prepare(self, update: WeightUpdate) -> PrepareState:
        """Receive and check `update`, after dropping what was prepared before. Failures are not raised but reported in
        the returned state."""
        staged = False
        self._update, self._state = update, PrepareState(update.version, "receiving")
        try:
            inbox, names = self._opened()
            inbox.prepare(update)
            if (version := inbox.staged) is not None:
                if update.adapter is None:
                    names.check(version.named)
                else:
                    self._store().check(version.named, update.adapter)
                staged = True
            if self._stream is not None:
                self._stream.synchronize()
            state = PrepareState(update.version, "ready", staged)
        except WeightTransferError as error:
            state = PrepareState(update.version, "failed", kind="transfer", error=str(error))
        except ValueError as error:
            state = PrepareState(update.version, "failed", kind="value", error=str(error))
        except Exception as error:  # An exception in this thread would be lost, so the engine raises it.
            state = PrepareState(update.version, "failed", kind="transfer", error=f"{type(error).__name__}: {error}")
        if state.phase == "failed" and self._inbox is not None:
            self._inbox.drop(update.version)
        self._state = state
        return state

    def _load(self, version: int, adapter: int) -> LoadReport:
        """Load a prepared version and report the outcome. If loading fails halfway, the report names the error, and the
        model holds a mix of two versions. adapter: number of an adapter, which is only staged; 0 for whole weights."""
        started = time.perf_counter()
        error, in_transfer = "", False
        try:
            # The last step of requests that have ended can still be running, but its tokens are dropped.
            if adapter:
                self._stage(version, adapter)
            else:
                with self._noting_needs():
                    self.start_weight_update()
                    self.receive_weights(StagedVersion(version))
                    self.finish_weight_update()
            inbox, _ = self._opened()
            inbox.committed(version)
            self._update = None
        except Exception as failure:  # The engine raises the error, for all workers at once.
            error, in_transfer = f"{type(failure).__name__}: {failure}", isinstance(failure, WeightTransferError)
            try:
                if not adapter:
                    self.loader.abandon()
            except Exception as another:
                error += f"; and on giving up {type(another).__name__}: {another}"
        way = "adapter" if adapter else self.loader.way
        return LoadReport(time.perf_counter() - started, way, error, in_transfer)

    @contextmanager
    def _noting_needs(self) -> Iterator[None]:
        """Note, once, which parts of the weights the loaders read in a load.

        All train ranks then send no more than these. Raises WeightTransferError if the loaders read what was not sent.
        """
        inbox, update = self._opened()[0], self._update
        staged = inbox.staged
        if staged is None or update is None or not self._notes_needs(update):
            yield
            return
        with WeightReads(staged.named) as reads:
            yield
        self._note_needs(update, reads.regions)

    def _notes_needs(self, update: WeightUpdate) -> bool:
        """Return whether this load tells which parts of the weights this worker needs."""
        return not self._opened()[0].needs and bool(update.plan) and self.parallel_config.world_size > 1

    def _note_needs(self, update: WeightUpdate, needs: tuple[Region, ...]) -> None:
        if missing := missing_part(update, self._engine, self.parallel_config.rank, needs):
            raise WeightTransferError(f"weights: version {update.version}: {missing} is needed, but was not sent")
        self._opened()[0].needs = needs

    def _stage(self, version: int, number: int) -> None:
        """Stage a prepared adapter for vLLM, which will know it by `number`."""
        staged, update = self._opened()[0].staged, self._update
        if staged is None or staged.version != version or update is None or update.adapter is None:
            raise ValueError(f"adapter: version {version} was not prepared; {self._state.describe()}")
        with torch.no_grad():
            self._store().stage(number, version, update.adapter, staged.named)
        if self._stream is not None:
            self._stream.synchronize()

    def _verify(self, digests: ParameterDigests, adapter: int) -> VerifyReport:
        """Compare the weights in service with the digests; those of an adapter if its number is not 0."""
        try:
            with torch.no_grad():
                if adapter:
                    return self._store().verify(adapter, digests, self._engine)
                expected = self.loader.expected(digests)
                return VerifyReport(*compare_digests(expected, self.loader.served(), self._engine))
        except Exception as error:  # The engine raises the error, for all workers at once.
            return VerifyReport(0, f"{type(error).__name__}: {error}")

    def _load_arriving(self, inbox: WeightInbox, names: WeightNames, update: WeightUpdate) -> None:
        """Load weights bucket by bucket as they arrive. An error leaves a mix of two versions in the model."""
        got: set[str] = set()
        needs: list[Region] = []
        noting = self._notes_needs(update)
        for whole in inbox.arriving(update, self.loader.places):
            first = not got
            got.update(name for name, _ in whole)
            if names.quantization is not None:
                names.quantization.check_scales(dict(whole))
            whole = self.loader.lasting(whole)  # The tensors are valid only until the next bucket.
            with WeightReads(dict(whole)) if noting else nullcontext() as reads:
                self.loader.load(whole, names.check_one)
            if reads is not None:
                needs += reads.regions
            if first and got:
                self._begun()
        names.check_complete(got)
        if noting:
            self._note_needs(update, tuple(needs))

    def open_adapters(self, manager: Any) -> None:
        """Take over the supply of adapters to vLLM's WorkerLoRAManager."""
        _, names = self._opened()
        self.adapters = AdapterStore(manager, names)

    # ---------------- These methods are for the runs that share the engine.

    def open_seat(self, name: str, info: InboxInfo, manager: Any) -> None:
        """Receive the adapters of run `name`, too. They are kept beside those of other runs. manager: vLLM's
        WorkerLoRAManager."""
        self.close_seat(name)
        seat = copy.copy(self)
        seat._seats = {}
        seat._begin()
        seat.init_transfer_engine(info)
        if self.adapters is None:
            seat.open_adapters(manager)
            self.adapters = seat.adapters
        seat.adapters = self.adapters
        self._seats[name] = seat

    def close_seat(self, name: str) -> None:
        """Stop receiving the adapters of run `name`. Idempotent."""
        if (seat := self._seats.pop(name, None)) is not None:
            seat.shutdown()

    def of_seat(self, name: str) -> StagedWeightEngine | None:
        """Return what receives the updates of run `name`, None without a seat; "" for an engine that no runs share."""
        return self._seats.get(name) if name else self

    def _store(self) -> AdapterStore:
        if self.adapters is None:
            raise RuntimeError("adapter: this worker has no room for adapters")
        return self.adapters

    def _opened(self) -> tuple[WeightInbox, WeightNames]:
        if self._inbox is None or self._names is None:
            raise RuntimeError("weights: this worker has no weight receiver")
        return self._inbox, self._names


class WeightWorker:
    """Methods that vLLM mixes into its worker class and that the engine calls by name. Arguments and results travel as
    msgpack."""

    weight_transfer_engine: Any
    model_runner: Any
    parallel_config: Any

    def headrace_keep_logprobs(self, keep: bool) -> None:
        """Start or stop keeping the log-probs of all tokens that are sampled from now on. All tensor-parallel workers
        sample the same tokens, so only the first keeps anything."""
        kept: SampledLogprobs | None = vars(self).pop("headrace_logprobs", None)
        if kept is not None:
            kept.close()
        if keep and self.parallel_config.rank == 0:
            self.headrace_logprobs = SampledLogprobs(self.model_runner)

    def headrace_take_logprobs(self, ids: list[str], lengths: list[int]) -> bytes:
        """Return what is kept of the first `lengths` tokens of requests, and forget these requests. A worker that keeps
        nothing returns nothing."""
        kept: SampledLogprobs | None = vars(self).get("headrace_logprobs")
        none = Taken(np.zeros(0, np.float32), *[np.zeros(0, np.int32)] * 2)
        return messages.encode(none if kept is None else kept.take(ids, lengths))

    def headrace_drop(self, version: int, seat: str) -> None:
        """Forget a prepared version in this worker, or stop receiving it. seat: name of a run that shares the engine;
        "" if none does. A no-op for a run whose seat is closed."""
        if (receiving := self.weight_transfer_engine.of_seat(seat)) is not None:
            receiving.drop(version)

    def headrace_open_seat(self, name: str, info: dict[str, Any]) -> None:
        """Receive the adapters of run `name`, one of several that share the engine. info: fields of an InboxInfo."""
        self.weight_transfer_engine.open_seat(name, InboxInfo(**info), self.model_runner.lora_manager)

    def headrace_close_seat(self, name: str) -> None:
        """Stop receiving the adapters of run `name`."""
        self.weight_transfer_engine.close_seat(name)

    def headrace_open_adapters(self) -> None:
        """Make vLLM get adapters from this worker's `AdapterStore` instead of from files."""
        self.weight_transfer_engine.open_adapters(self.model_runner.lora_manager)

    def headrace_remove_adapter(self, number: int) -> None:
        """Remove an adapter, and free its slot."""
        self.weight_transfer_engine.adapters.remove(number)

    def headrace_used_bytes(self) -> bytes:
        """Return the number of bytes in use on this worker's GPU, by all processes together."""
        free, total = torch.cuda.mem_get_info()
        return messages.encode(total - free)

    def headrace_close(self) -> None:
        """Close this worker's weight inbox and its connection to the engine."""
        self.weight_transfer_engine.shutdown()


if BACKEND not in library.WeightTransferEngineFactory._registry:  # vLLM refuses to register a name twice.
    library.WeightTransferEngineFactory.register_engine(BACKEND, StagedWeightEngine)
    library.take_what_is_free()
    library.take_what_is_useful()
    library.choose_kernels_without_adapters()
    take_pictures_as_they_are()
