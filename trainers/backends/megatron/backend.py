"""The megatron backend trains a HF causal LM over tensor-, context-, data-, pipeline- and expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ....actors.train_backend import MicroBatch
from ....codecs.tokens.routes import RouteSpec
from ..config import BackendConfig
from ..hf_model import HfSource
from ..layers import compile_layers, recompute_layers, uncompiled
from ..model_backend import ModelBackend
from ..model_split import resolved_packing
from ..router_replay import route_spec
from ..rows.packed_rows import PackedRows, pack_rows, sum_rows, whole_counts
from ..rows.row_layout import exactly
from ..throughput import flop_model
from ..weight_stream import OwnPiece
from .architecture import check_fits
from .gradients import (
    Swapped,
    apply,
    build_optimizer,
    clear_gradients,
    reference_copy,
    resident_tensors,
    sum_gradients,
    wrap_model,
)
from .library import ChainedOptimizer, DistributedDataParallel, MoELayer, get_forward_backward_func
from .lora import ModelAdapter
from .megatron_routers import PipelineBalance, PipelineReplay
from .mesh import clear_scratch, global_groups, open_mesh
from .model import build_model
from .pieces import OwnPieces, TrainingState, spread_weights, trained_tensors
from .pipeline import OpenPipeline
from .weight_groups import freeze_entries, group_parameters
from .without_cuda import megatron_calls


@dataclass(frozen=True, slots=True)
class _Training:
    model: DistributedDataParallel
    """The policy with its gradient buffers."""
    optimizer: ChainedOptimizer
    state: TrainingState


class MegatronBackend(ModelBackend[PipelineReplay, PipelineBalance]):
    """A `TrainBackend` that trains HF models with Megatron. Each collective call waits for all ranks, but not longer
    than the timeout of the process group.

    A process can have only one such backend at a time, because Megatron's process groups are global. With
    `mixed_precision` the optimizer keeps float32 copies of the parameters, made from their bfloat16 values.
    """

    def __init__(self, config: BackendConfig, rank: int, world: int) -> None:
        """Load this rank's part of the model.

        When `world` > 1, a default process group of `world` ranks must exist. Raises RuntimeError if it does not, or
        while another Megatron backend of the process is open. Raises ValueError when the model does not exist or cannot
        be trained as the config says.
        """
        super().__init__(config, rank, world)
        self._source = HfSource(config.model)
        check_fits(config, self._source.config)
        packing = resolved_packing(config.trainer, self._source.config, gpu=self._device.type == "cuda")
        self._packed = packing == "packed"
        with megatron_calls(self._device):
            self._mesh = open_mesh(self._topology, rank)
            try:
                self._build()
            except BaseException:
                self._mesh.close()
                raise

    def _build(self) -> None:
        config, model = self._config, self._source.config
        self._policy = build_model(config, self._source, self._mesh, self._device)
        self._lora: ModelAdapter | None = None
        if self._adapter is not None:
            self._lora = ModelAdapter(self._adapter, self._policy, self._source, self._mesh, self._topology)
        if config.trainer.freeze:
            freeze_entries(self._policy, self._source, config.trainer)
        # The base of an adapter is the reference.
        with_copy = config.with_reference and self._adapter is None
        self._reference = reference_copy(self._policy) if with_copy else None
        if config.router_replay.enabled:
            spec, topology = route_spec(model), self._topology
            self._replay = PipelineReplay(
                config.router_replay, spec, self._policy, topology, self._mesh, self._device,
                kept_graph=config.trainer.recompute == "selective",
            )  # fmt: skip
        if config.trainer.moe.active:
            spec = RouteSpec.of(model)
            assert spec is not None, "check_fits refuses models without experts"
            self._balance = PipelineBalance(config, spec, self._policy, self._mesh, self._device)
        layers = list(self._policy.decoder.layers)
        if config.trainer.compile:
            for layer in layers:
                # The dispatcher uses CUDA streams, which torch.compile cannot trace.
                if isinstance(layer.mlp, MoELayer):
                    layer.mlp.forward = uncompiled(layer.mlp.forward)
            compile_layers(layers)
        if config.trainer.recompute == "selective":  # Megatron itself implements `full`.
            recompute_layers(layers, "selective")
        self._training = self._build_training() if config.trains else None
        self._model: Any = self._policy if self._training is None else self._training.model
        self._pipeline = OpenPipeline(self._model)
        dtype = torch.bfloat16 if self._half else torch.float32
        self._weights = spread_weights(self._source, self._topology, dtype)
        if self._lora is not None:
            self._weights = [*self._lora.spread(self._weights, self._topology.tp), *self._weights]
        first = self._place.cp == 0  # Context-parallel ranks share their rows, so only the first of them counts rows.
        self._prepare_steps(flop_model(model, frozen=self._lora is not None), self._mesh.tokens, counts_rows=first)

    def _build_training(self) -> _Training:
        group_parameters(self._policy, self._source, self._config.trainer)
        wrapped = wrap_model(self._config, self._policy)
        optimizer = build_optimizer(self._config, wrapped)
        trained = trained_tensors(self._policy, self._source.config) if self._lora is None else self._lora.trained
        reference = dict(zip(self._policy.weights(), self._reference or (), strict=False))
        state = TrainingState(*trained, optimizer, self._steps, self._source.config, self._mesh, reference)
        return _Training(wrapped, optimizer, state)

    # ---------------- These methods run one train step.

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Run the forward pass, the summed loss and the backward pass of `count` microbatches. Gradients stay unscaled
        sums. Collective.

        Every rank must pass the same number of microbatches; one without rows is allowed. The pipeline stays full at
        the end of a call: the backward passes of the last microbatches run in the next call or in `finish_step`. The
        last stage needs the columns `input_ids`, `response_mask` and `rollout_logprobs`, also
        `prev_logprobs` when `prev` is "recompute", and `ref_logprobs` with a KL term. Raises RuntimeError when no step
        is open, and ValueError naming a missing column.
        """
        with self._meter.working(), self._step.accumulating() as temperature:
            given: Iterator[MicroBatch] = exactly(micros, count)
            if count and self._replay is not None and self._replay.take_measurement():
                first = [next(given)]
                self._predict_all(first, 1, partial(self._measure, self._replay, temperature))
                given = chain(first, given)
            with megatron_calls(self._device), self._dropping():
                self._pipeline.run(given, count, partial(self._train, temperature))

    def abort_step(self) -> None:
        """Drop the gradients and sums of an open step. Idempotent."""
        self._step.abort()
        self._pipeline.drop()
        for queues in filter(None, (self._replay, self._balance)):
            queues.drop()
        if not self._residence.offloaded:  # Gradient buffers have no memory while offloaded, and are zero afterwards.
            self._clear()

    def group_holders(self) -> Sequence[object]:
        """Return the objects that refer to process groups: the backend, and Megatron's global variables."""
        return (self, global_groups())

    def close(self) -> None:
        """Drop an open step, wait until no checkpoint is being written, and close Megatron's process groups.

        The default process group stays open, because its owner closes it. Raises the error of the last write.
        """
        self._step.abort()
        try:
            self._checkpointer.close()
        finally:
            self._mesh.close()
            self._residence.close()

    @property
    def _parts(self) -> _Training:
        assert self._training is not None
        return self._training

    def _clear(self) -> None:
        if self._training is not None:
            with megatron_calls(self._device):
                clear_gradients(self._training.model, self._training.optimizer)

    def _columns(
        self, micros: Iterable[MicroBatch], count: int, reference: bool, temperature: float
    ) -> list[torch.Tensor]:
        columns: list[torch.Tensor] = []
        swapped: AbstractContextManager[Any] = nullcontext()
        if reference and self._lora is not None:
            swapped = self._lora.switch.off()
        elif reference and self._reference:
            swapped = Swapped(self._policy, self._reference)
        replay = None if reference else self._replay
        with swapped:
            self._predict_all(micros, count, partial(self._predict, replay, temperature, columns))
        return columns

    def _measure_all(
        self, replay: PipelineReplay, micros: Iterable[MicroBatch], count: int, temperature: float
    ) -> None:
        self._predict_all(micros, count, partial(self._measure, replay, temperature))

    def _own_pieces(self) -> OwnPiece:
        own = OwnPieces(self._policy, self._source.config, self._mesh)
        return own if self._lora is None else partial(self._lora.piece, own)

    def _state(self) -> Any:
        with megatron_calls(self._device):
            return self._parts.state.collect(reference=self._config.reference_updates > 0)

    def _load(self, path: str) -> None:
        state = self._parts.state.blank()
        optional = {name: state.pop(name) for name in self._parts.state.optional}
        self._checkpointer.load(path, state, optional)
        self._parts.state.restore({**state, **optional})

    @torch.no_grad()
    def _move_reference(self, mix: float) -> None:
        assert self._reference is not None
        for kept, value in zip(self._reference, self._policy.weights().values(), strict=True):
            if kept.is_floating_point():
                kept.copy_(torch.lerp(kept.float(), value.to(kept.device, torch.float32), mix))

    def _dropping(self) -> AbstractContextManager[None]:
        return nullcontext() if self._lora is None else self._lora.switch.dropping()

    def _hf_model(self) -> Any:
        return self._source.empty_model()

    def _moving(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        self._config.require_trains("offload")
        clear_scratch()
        return resident_tensors(self._parts.model, self._parts.optimizer)

    def _predict_all(self, micros: Iterable[MicroBatch], count: int, forward: Any) -> None:
        """Run the forward passes of `count` microbatches with one of Megatron's schedules. It calls `forward(iterator,
        model)` for each."""
        if count < 1:
            return
        with megatron_calls(self._device):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=exactly(micros, count),
                model=self._model,
                num_microbatches=count,
                seq_length=1,  # Lengths vary, so stages send each other the real ones.
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )

    def _next(self, micros: Iterator[MicroBatch], replay: PipelineReplay | None) -> tuple[MicroBatch, PackedRows]:
        micro = next(micros)
        routes, mark = (None, 0) if replay is None else (replay.read(micro.batch), replay.spec.mark)
        place = self._place
        rows = pack_rows(
            micro, self._topology, place, self._device, packed=self._packed, routes=routes, missing_route=mark,
            with_owners=self._balance is not None,
        )  # fmt: skip
        return micro, rows

    def _train(self, temperature: float, micros: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        micro, rows = self._next(micros, self._replay)
        replaying = nullcontext() if self._replay is None else self._replay.training(rows.routes)
        with replaying, self._balancing(micro, rows.owners):
            candidates = self._candidates(micro, rows, self._source.config.vocab_size)
            output = model(rows, temperature, self._entropy, candidates)
        return output, partial(self._loss, micro, rows)

    def _loss(
        self, micro: MicroBatch, rows: PackedRows, output: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the loss of a microbatch in the form that Megatron's schedules expect. Megatron calls this method on
        the last pipeline stage only. The second value would be a count by which the loss is divided. It is 0 and unused
        here, because gradients stay sums (see `updates`).
        """
        logprobs, entropy, candidates = (*output, None)[:3]
        assert logprobs is not None
        cp = self._mesh.cp
        row_tokens = whole_counts(rows.row_tokens, cp, self._device)
        # Context-parallel ranks share their rows, so only the first of them counts rows.
        counted = micro.lengths if self._place.cp == 0 else micro.lengths[:0]
        reduce_rows = partial(sum_rows, cp) if cp.size() > 1 else None
        loss = self._add_loss(
            micro, rows, row_tokens, logprobs, entropy, counted=counted, candidates=candidates, reduce_rows=reduce_rows
        )
        return loss, torch.zeros((), dtype=torch.int32, device=self._device), None

    def _predict(
        self,
        replay: PipelineReplay | None,
        temperature: float,
        columns: list[torch.Tensor],
        micros: Iterator[MicroBatch],
        model: Any,
    ) -> tuple[Any, Any]:
        micro, rows = self._next(micros, replay)
        routed = nullcontext() if replay is None else replay.replaying(rows.routes)
        return self._forward(model, rows, temperature, routed), partial(self._collect, micro, rows, columns)

    def _measure(
        self, replay: PipelineReplay, temperature: float, micros: Iterator[MicroBatch], model: Any
    ) -> tuple[Any, Any]:
        """Count the routers' own choices on a microbatch, and the log-probs that result from these choices."""
        micro, rows = self._next(micros, replay)
        values = self._forward(model, rows, temperature, replay.observing(rows.routes))

        def collect(values: torch.Tensor, **_: Any) -> None:
            rollout = micro.batch.jagged("rollout_logprobs").values[rows.index]
            replay.native.add_logprobs(values, rollout.to(self._device))

        return values, collect

    def _forward(
        self, model: Any, rows: PackedRows, temperature: float, routed: AbstractContextManager[None]
    ) -> torch.Tensor:
        """Return the log-probs of the wanted tokens without gradients. Earlier pipeline stages return hidden states."""
        with routed:
            output = model(rows, temperature, "off")
        return output[0] if isinstance(output, tuple) else output

    def _collect(
        self, micro: MicroBatch, rows: PackedRows, columns: list[torch.Tensor], values: torch.Tensor, **_: Any
    ) -> None:
        """Append the log-probs of a microbatch to `columns`. Megatron calls this on the last pipeline stage only.

        Each context-parallel rank has the log-probs of its own tokens, and 0 for the others. The sum over these ranks
        has the log-probs of whole rows.
        """
        column = torch.zeros(int(micro.lengths.sum()), dtype=torch.float32, device=self._device)
        column[rows.whole_index] = values
        if self._mesh.cp.size() > 1:
            dist.all_reduce(column, group=self._mesh.cp)
        columns.append(column.cpu())

    def _finish(self) -> dict[str, float]:
        self._config.require_trains("finish_step")
        with megatron_calls(self._device):
            training = self._parts
            with self._dropping():
                self._pipeline.drain()
            for queues in filter(None, (self._replay, self._balance)):
                queues.check_drained()
            norm = sum_gradients(training.model, training.optimizer, self._mesh.tp)
            # The norm already covers all ranks, so only the first rank contributes it to the sum.
            whole = norm**2 if dist.get_rank(self._mesh.tokens) == 0 else 0.0
            totals = self._step.finish(torch.tensor(whole, dtype=torch.float64, device=self._device))
            update = partial(apply, training.optimizer)
            metrics = totals.apply(self._config, self._steps, update)
            if self._balance is not None:
                metrics |= self._balance.finish(totals)
            self._clear()
            return metrics
