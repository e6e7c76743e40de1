"""Holds what the backends that train a model share: the order of a step, its checks, checkpoints and offloading.

A backend adds the model: how microbatches run through it, how its gradients are summed, and where its state is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ...actors.adapters.spec import AdapterSpec
from ...actors.protocols import TOP_IDS
from ...actors.train_backend import MicroBatch, OffloadReport
from ...actors.weight_sync.base_offer import BaseRecord
from ...actors.weight_sync.plan.regions import Region, held
from ...codecs.schema import DTYPES
from ...codecs.weights.conversion import wire_dtype
from ..losses.step_loss import build_loss
from .checkpoint_files import Checkpointer
from .config import BackendConfig
from .expert_balance import ExpertBalance
from .hf_model import collect, export_dtypes, write_folder
from .lora.adapter import BASE, Adapter
from .lora.matrices import divided, merged, on_wire, wire_specs
from .lora.recorded_base import RecordedSource
from .residence import Residence, own_device
from .router_replay import RouterReplay, require_replay
from .rows.row_layout import loss_inputs, to_device
from .throughput import FlopModel, StepMeter
from .train_step import TrainStep
from .vocab.logprobs import Entropy
from .weight_stream import OwnPiece, SpreadWeight, rank_regions, stream_weights

ReplayT = TypeVar("ReplayT", bound=RouterReplay)
BalanceT = TypeVar("BalanceT", bound=ExpertBalance)


class ModelBackend(ABC, Generic[ReplayT, BalanceT]):
    """The part of a `TrainBackend` that does not depend on how the model is divided among the ranks."""

    _weights: list[SpreadWeight]
    """Weights of the model with their pieces, those of an adapter among them."""
    _rounded: Container[str] = ()
    """Names of the weights of an adapter's base that are rounded to fewer bits."""

    _recorded: RecordedSource | None = None
    """Source of the base of an adapter; None if no digests are taken of what is read."""

    def __init__(self, config: BackendConfig, rank: int, world: int) -> None:
        self._config, self._topology = config, config.topology
        self._rank, self._world = rank, world
        self._place = config.topology.place(rank)
        self._half = config.trainer.mixed_precision
        self._device = own_device()
        self._entropy: Entropy = (
            "train" if config.loss.entropy_coef > 0 else "report" if config.trainer.entropy_metric else "off"
        )
        self._steps = torch.zeros((), dtype=torch.int64)
        self._residence = Residence(self._device)
        self._adapter = Adapter.of(config, rank, world, self._device)
        self._replay: ReplayT | None = None
        self._balance: BalanceT | None = None

    def _prepare_steps(self, flops: FlopModel | None, group: dist.ProcessGroup | None, *, counts_rows: bool) -> None:
        """Create the objects that sum, measure and save a step. group, counts_rows: as in `TrainStep`."""
        config = self._config
        self._checkpointer = Checkpointer(self._rank, self._world)
        self._step = TrainStep(
            build_loss(config.loss, config.columns, config.distillation),
            self._device,
            group,
            recomputed=config.prev in ("recompute", "fixed"),
            with_entropy=self._entropy != "off",
            counts_rows=counts_rows,
            exact=config.bitwise is not None,
        )
        self._meter = StepMeter(flops, self._device, self._world, group, half=self._half)

    # ---------------- These methods run one train step.

    def begin_step(self, temperature: float = 1.0) -> None:
        """Open a step with gradients and sums at zero. Its passes divide logits by `temperature`.

        Raises RuntimeError when a step is open or the backend is offloaded, and ValueError when `temperature` is not
        above 0.
        """
        self._config.require_trains("begin_step")
        self._residence.require_onloaded("begin_step")
        self._step.begin(temperature)
        self._meter.begin()
        if self._replay is not None:
            self._replay.begin_step(int(self._steps) // self._config.updates_per_step)
        if self._balance is not None:
            self._balance.begin_step()
        self._clear()

    def finish_step(self) -> dict[str, float]:
        """Sum the step's losses and counts over the ranks, and update the weights. Gradients are divided by N and
        clipped. Collective.

        N is the denominator of the step's mean loss. Returns metrics over all ranks. When N is 0 or the gradients are
        not finite, the step is skipped: weights, optimizer state and schedule stay as they were. Raises RuntimeError
        when no step is open, a microbatch failed or the backend is offloaded.
        """
        self._residence.require_onloaded("finish_step")
        with self._meter.working():
            metrics, every = self._finish(), self._config.reference_updates
            if every and not metrics["train/skipped"] and int(self._steps) % every == 0:
                self._move_reference(self._config.loss.reference_mix)
            if self._replay is not None:
                metrics |= self._replay.metrics()
        return {**metrics, **self._meter.metrics()}

    def _balancing(self, micro: MicroBatch, owners: torch.Tensor | None) -> AbstractContextManager[object]:
        """Return the context of the passes that train on a microbatch: with the balance of experts if the step has one.
        owners: as in `ExpertBalance.shares`."""
        if self._balance is None:
            return nullcontext()
        assert owners is not None
        return self._balance.training(micro, owners)

    def _add_loss(
        self,
        micro: MicroBatch,
        rows: Any,
        row_tokens: torch.Tensor,
        logprobs: torch.Tensor,
        entropy: torch.Tensor | None,
        *,
        counted: np.ndarray,
        candidates: torch.Tensor | None = None,
        reduce_rows: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Add a microbatch to the sums of the step, and return its loss. rows: its `RowLayout` or `PackedRows`.
        counted: numbers of tokens of the rows that this rank counts. candidates: see
        `LossInputs.candidate_logprobs`."""
        inputs = loss_inputs(
            self._config,
            micro,
            index=rows.index,
            row_ids=rows.row_ids,
            row_tokens=row_tokens,
            logprobs=logprobs,
            entropy=entropy if self._entropy == "train" else None,
            candidates=candidates,
            reduce_rows=reduce_rows,
        )
        self._meter.add(counted, len(rows.index))
        return self._step.add(inputs, row_tokens.numpy(), micro.group_ids, entropy, micro.counted)

    def _candidates(self, micro: MicroBatch, rows: Any, vocab: int) -> torch.Tensor | None:
        """Return the teacher's most likely tokens at the wanted tokens, int64 `[T, k]` on the device. None without the
        column. rows: as in `_add_loss`. vocab: number of the policy's tokens. Raises ValueError for a token that the
        policy does not have."""
        if not self._config.distillation.top_k or TOP_IDS not in micro.batch:
            return None
        ids = micro.batch.jagged(TOP_IDS).values[rows.index].long()
        if len(ids) and (most := int(ids.max())) >= vocab:
            raise ValueError(
                f"distillation.teachers: got the token {most} among a teacher's most likely tokens, expected less than "
                f"{vocab}, the size of the policy's vocabulary"
            )
        return to_device(ids, self._device)

    # ---------------- These methods compute log-probs.

    @torch.no_grad()
    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return the log-probs of the tokens of each of `count` microbatches, float32 `[number of tokens]` on the CPU.
        Collective.

        Only the rank that writes the replica's columns back gets them; other ranks get []. With `reference` they are
        those of the reference model. Allowed while a step is open. Raises ValueError for `reference` when there is no
        reference model, and RuntimeError when the backend is offloaded.
        """
        self._residence.require_onloaded("logprobs")
        if reference and not self._config.with_reference:
            raise ValueError("with_reference: got False, expected True for log-probs of the reference model")
        columns = self._columns(micros, count, reference, temperature)
        return columns if self._rank == self._topology.writer(self._place.dp) else []

    @torch.no_grad()
    def native_figures(self, micros: Iterable[MicroBatch], count: int, *, temperature: float = 1.0) -> dict[str, float]:
        """Return the metrics of `count` microbatches without replay: `routes/native_*` (see `NativeTally.metrics`).
        Collective.

        Not allowed while a step is open, which measures these itself. Raises ValueError without router replay.
        """
        self._residence.require_onloaded("native_figures")
        self._step.require_closed("native_figures")
        replay = require_replay(self._replay)
        self._measure_all(replay, micros, count, temperature)
        return replay.native.metrics()

    # ---------------- These methods read and write weights and training state.

    @property
    def adapter(self) -> AdapterSpec | None:
        """The adapter whose matrices `weights` yields; None if it yields the weights of the whole model."""
        return self._adapter.spec if self._adapter is not None and self._config.sends_adapter else None

    @property
    def base_record(self) -> BaseRecord | None:
        """Digests of this rank's parts of the adapter's base; None if none were taken."""
        return None if self._recorded is None else self._recorded.record

    @property
    def shares_features(self) -> bool:
        """True if only the first rank of a replica runs the vision tower."""
        return False

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each tensor that `weights` yields, by its name, in the same order.

        The dtype is bfloat16 with `mixed_precision`, as in the forward pass, and if the engines keep the weight so;
        else float32. Names are those of the HF model, in its order; those of an adapter's matrices are PEFT's.
        """
        adapter, base = divided(self._sent)
        if self.adapter is not None:
            return wire_specs(adapter)
        return {weight.name: (weight.dtype, weight.shape) for weight in base}

    def weights(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the HF name and tensor of each weight, whole on rank 0 and empty on the other ranks. Collective.

        With an adapter, they are its matrices, or the model's weights with the adapter merged into them. Every rank
        must iterate to the end (see `stream_weights`). Raises RuntimeError when the backend is offloaded.
        """
        self._residence.require_onloaded("weights")
        if self.adapter is not None:
            return on_wire(self._streamed(divided(self._sent)[0]))
        if self._adapter is None:
            return self._streamed(self._sent)
        specs = self.weight_specs()
        return self._merged(lambda name: specs[name][0])

    def weight_regions(self) -> Sequence[Sequence[Region]]:
        """Return the regions of the weights that each rank has, by rank. Rank 0 has an adapter that is sent, because it
        gathers it."""
        if self.adapter is not None:
            whole = [part for name, (_, shape) in self.weight_specs().items() for part in held(name, shape)]
            return [whole, *[[]] * (self._world - 1)]
        return rank_regions(divided(self._weights)[1], self._world)

    def own_weights(self) -> Callable[[str], torch.Tensor]:
        """Return the function that returns this rank's part of a weight by its name. Not collective. Raises
        RuntimeError when the backend is offloaded."""
        self._residence.require_onloaded("weights")
        own, by_name = self._own_pieces(), {weight.name: weight for weight in self._weights}
        return lambda name: own(by_name[name]).contiguous()

    @property
    def _sent(self) -> list[SpreadWeight]:
        """The weights in the dtypes in which they are sent to engines."""
        engine = DTYPES[self._config.engine_dtype]
        return [one if one.exact else replace(one, dtype=wire_dtype(one.dtype, engine)) for one in self._weights]

    def _streamed(self, weights: Sequence[SpreadWeight]) -> Generator[tuple[str, torch.Tensor], None, None]:
        return stream_weights(weights, self._own_pieces(), self._rank, self._device)

    def _merged(self, dtype_of: Callable[[str], torch.dtype | None]) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the weights of the model with its adapter merged into them. dtype_of: see `merged`."""
        assert self._adapter is not None
        adapter, base = divided(self._weights, whole=True, rounded=self._rounded)
        stream = self._streamed([*adapter, *base])
        return merged(stream, self._adapter.spec, dtype_of, transposed=self._experts_transposed)

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write model, optimizer, schedule and RNG as the sharded checkpoint `path`. Collective.

        An older checkpoint at `path` is replaced once the new one is complete. Without `wait` the checkpoint is written
        while training continues (see `Checkpointer.save`). Raises RuntimeError while a step is open or the backend is
        offloaded, and ValueError when `path` exists and is not a checkpoint.
        """
        self._config.require_trains("save")
        self._step.require_closed("save")
        self._residence.require_onloaded("save")
        base = {} if self._adapter is None else self._adapter.state()
        self._checkpointer.save(path, {**self._state(), **base}, wait=wait)

    def wait_saved(self) -> None:
        """Wait until no checkpoint is being written. Raises the error of the last write, once."""
        self._checkpointer.wait()

    def load(self, path: str) -> None:
        """Read the checkpoint `path`, which any number of ranks may have written. Collective.

        Hyperparameters such as the learning rate are not read; they come from the config. The reference model is read
        if it has moved (`loss.reference_every`), and else comes from the config, too.
        Raises RuntimeError while a step is open or the backend is offloaded, and ValueError when `path` is not a
        complete checkpoint of this model.
        """
        self._config.require_trains("load")
        self._step.require_closed("load")
        self._residence.require_onloaded("load")
        if self._adapter is not None:
            stored = {name: torch.zeros_like(value) for name, value in self._adapter.state().items()}
            self._checkpointer.load(path, stored)
            self._adapter.expect_base(path, stored[BASE])
        self._load(path)

    def export_model(self, path: str) -> None:
        """Write the model as the new HF folder `path` (weights, config, tokenizer, processor) from rank 0. Collective.

        A model with an adapter is written with the adapter merged into it, and the adapter alone as the folder
        `adapter` in it, in PEFT's format. Rank 0 first collects all weights in host memory. Raises ValueError when
        `path` exists, and RuntimeError when the backend is offloaded.
        """
        self._residence.require_onloaded("export_model")
        dtype_of = export_dtypes(self._config.trainer.export_dtype, self._config.model)
        first, source, add = self._rank == 0, self._config.model, None
        stream = self._streamed(self._weights) if self._adapter is None else self._merged(dtype_of)
        weights = collect(stream, keep=first, dtype_of=dtype_of)
        if self._adapter is not None:
            adapter, _ = divided(self._weights, whole=True)
            matrices = collect(on_wire(self._streamed(adapter)), keep=first, dtype_of=lambda name: torch.float32)
            names = [one.name for one in adapter]
            add = partial(self._adapter.write, base=source, tensors=matrices, names=names)
        self._checkpointer.on_first_rank(lambda: write_folder(path, self._hf_model(), weights, source, add=add))

    def offload(self) -> OffloadReport:
        """Move weights and optimizer state, and a reference model that is on the device, to host memory. Gradient
        buffers, which are zero between steps, are freed. Idempotent.

        The call first waits for a checkpoint that is being written. Raises RuntimeError while a step is open, the error
        of the last write, and OSError when host memory does not suffice.
        """
        self._step.require_closed("offload")
        self._checkpointer.wait()
        return self._residence.offload(*self._moving())

    def onload(self) -> OffloadReport:
        """Undo `offload`. Idempotent."""
        return self._residence.onload()

    # ---------------- A backend implements these methods.

    @abstractmethod
    def _clear(self) -> None: ...

    @abstractmethod
    def _finish(self) -> dict[str, float]:
        """Sum the gradients, step the optimizer, and return the metrics of the step."""

    @abstractmethod
    def _move_reference(self, mix: float) -> None:
        """Move the weights of the reference model towards the policy's, of which they then have the share `mix`."""

    @abstractmethod
    def _columns(
        self, micros: Iterable[MicroBatch], count: int, reference: bool, temperature: float
    ) -> list[torch.Tensor]: ...

    @abstractmethod
    def _measure_all(self, replay: ReplayT, micros: Iterable[MicroBatch], count: int, temperature: float) -> None:
        """Count the routers' own choices on `count` microbatches in `replay`."""

    @abstractmethod
    def _own_pieces(self) -> OwnPiece: ...

    @abstractmethod
    def _state(self) -> Any: ...

    @abstractmethod
    def _load(self, path: str) -> None: ...

    @property
    def _experts_transposed(self) -> bool:
        """True if stacked experts of the model have their inputs before their outputs."""
        return False

    @abstractmethod
    def _hf_model(self) -> Any:
        """Return a HF model whose config and buffers are those of the folder to write. Called on rank 0."""

    @abstractmethod
    def _moving(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Return the tensors that stay between steps: those with content, and those that contain zeros only."""
