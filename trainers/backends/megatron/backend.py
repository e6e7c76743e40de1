"""The megatron backend trains a HF causal LM over tensor-, context-, data-, pipeline- and expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from ....actors.protocols import MicroBatch, OffloadReport
from ....codecs.tokens.routes import RouteSpec
from ...losses.step_loss import build_loss
from ..checkpoint_files import Checkpointer
from ..config import BackendConfig
from ..hf_model import HfSource, collect, write_folder
from ..layers import compile_layers, recompute_layers, uncompiled
from ..model_split import resolved_packing
from ..residence import Residence
from ..router_replay import require_replay, route_spec
from ..row_layout import loss_inputs
from ..throughput import StepMeter, flop_model
from ..train_step import TrainStep
from ..vocab.logprobs import Entropy
from ..weight_stream import stream_weights
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
from .megatron_routers import PipelineBalance, PipelineReplay
from .mesh import clear_scratch, global_groups, open_mesh
from .model import build_model
from .pieces import OwnPieces, TrainingState, spread_weights
from .pipeline import OpenPipeline
from .rows import PackedRows, pack_rows, sum_rows, whole_counts
from .without_cuda import megatron_calls


@dataclass(frozen=True, slots=True)
class _Training:
    """Holds the parts that a backend needs for its steps. A backend that only computes log-probs has none of them."""

    model: DistributedDataParallel
    """The policy with its gradient buffers."""
    optimizer: ChainedOptimizer
    state: TrainingState


class MegatronBackend:
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
        self._config, self._topology = config, config.topology
        self._rank, self._world = rank, world
        self._half = config.trainer.mixed_precision
        cuda = torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._source = HfSource(config.model)
        check_fits(config, self._source.config)
        packing = resolved_packing(config.trainer, self._source.config, gpu=cuda)
        self._packed = packing == "packed"
        self._entropy: Entropy = (
            "train" if config.loss.entropy_coef > 0 else "report" if config.trainer.entropy_metric else "off"
        )
        self._steps = torch.zeros((), dtype=torch.int64)
        self._residence = Residence(self._device)
        with megatron_calls(self._device):
            self._mesh = open_mesh(config.topology, rank)
            try:
                self._build()
            except BaseException:
                self._mesh.close()
                raise

    def _build(self) -> None:
        config, model = self._config, self._source.config
        self._policy = build_model(config, self._source, self._mesh, self._device)
        self._reference = reference_copy(self._policy) if config.with_reference else None
        self._replay: PipelineReplay | None = None
        if config.router_replay.enabled:
            spec, topology = route_spec(model), self._topology
            self._replay = PipelineReplay(
                config.router_replay, spec, self._policy, topology, self._mesh, self._device,
                kept_graph=config.trainer.recompute == "selective",
            )  # fmt: skip
        self._balance: PipelineBalance | None = None
        if config.trainer.moe.active:
            spec = RouteSpec.of(model)
            assert spec is not None, "check_fits refuses models without experts"
            self._balance = PipelineBalance(config, spec, self._policy, self._mesh, self._device)
        layers = list(self._policy.decoder.layers)
        if config.trainer.compile:
            for layer in layers:
                if isinstance(layer.mlp, MoELayer):  # the dispatcher names CUDA streams, which cannot be traced
                    layer.mlp.forward = uncompiled(layer.mlp.forward)
            compile_layers(layers)
        if config.trainer.recompute == "selective":  # Megatron itself does `full`
            recompute_layers(layers, "selective")
        self._training: _Training | None = None
        if config.trains:
            wrapped = wrap_model(config, self._policy)
            optimizer = build_optimizer(config, wrapped)
            state = TrainingState(self._policy, optimizer, self._steps, model, self._mesh)
            self._training = _Training(wrapped, optimizer, state)
        self._model: Any = self._policy if self._training is None else self._training.model
        self._pipeline = OpenPipeline(self._model)
        dtype = torch.bfloat16 if self._half else torch.float32
        self._weights = spread_weights(self._source, self._topology, dtype)
        self._checkpointer = Checkpointer(self._rank, self._world)
        first = self._mesh.place.cp == 0  # context-parallel ranks share their rows, which the first one counts
        group, reported = self._mesh.tokens, self._entropy != "off"
        self._step = TrainStep(
            build_loss(config.loss, config.columns),
            self._device,
            group,
            recomputed=config.prev in ("recompute", "fixed"),
            with_entropy=reported,
            counts_rows=first,
        )
        self._meter = StepMeter(flop_model(model), self._device, self._world, group, half=self._half)

    # ------------------------------------------------------------ one step

    def begin_step(self, temperature: float = 1.0) -> None:
        """Open a step with gradients and sums at zero. Its passes divide logits by `temperature`.

        Raises RuntimeError when a step is open or the backend is offloaded, and ValueError when `temperature` is not
        above 0.
        """
        self._required("begin_step")
        self._residence.require_onloaded("begin_step")
        self._step.begin(temperature)
        self._meter.begin()
        if self._replay is not None:
            self._replay.begin_step(int(self._steps) // self._config.updates_per_step)
        if self._balance is not None:
            self._balance.begin_step()
        self._clear()

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
            if count and self._replay is not None and self._replay.take_measurement():
                micros = iter(micros)
                first = list(islice(micros, 1))
                self._predict_all(first, 1, partial(self._measure, self._replay, temperature))
                micros = chain(first, micros)
            with megatron_calls(self._device):
                self._pipeline.run(iter(micros), count, partial(self._train, temperature))

    def finish_step(self) -> dict[str, float]:
        """Sum the step's losses and counts over the ranks, divide the gradients by N, clip them, and step. Collective.

        N is the denominator of the step's mean loss. Returns metrics over all ranks. When N is 0 or the gradients are
        not finite, the step is skipped: weights, optimizer state and schedule stay as they were. Raises RuntimeError
        when no step is open, a microbatch failed or the backend is offloaded.
        """
        self._residence.require_onloaded("finish_step")
        with self._meter.working(), megatron_calls(self._device):
            metrics = self._finish()
            if self._replay is not None:
                metrics |= self._replay.metrics()
        return {**metrics, **self._meter.metrics()}

    def abort_step(self) -> None:
        """Drop the gradients and sums of an open step. Idempotent."""
        self._step.abort()
        self._pipeline.drop()
        for queues in filter(None, (self._replay, self._balance)):
            queues.drop()
        if not self._residence.offloaded:  # the gradient buffers have no memory then, and are zero afterwards
            self._clear()

    # ------------------------------------------------------------ log-probs

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
        if reference and self._reference is None:
            raise ValueError("with_reference: got False, expected True for log-probs of the reference model")
        columns: list[torch.Tensor] = []
        swapped = Swapped(self._policy, self._reference) if reference and self._reference else nullcontext()
        replay = None if reference else self._replay
        with swapped:
            self._predict_all(micros, count, partial(self._predict, replay, temperature, columns))
        return columns if self._rank == self._topology.writer(self._mesh.place.dp) else []

    @torch.no_grad()
    def native_figures(self, micros: Iterable[MicroBatch], count: int, *, temperature: float = 1.0) -> dict[str, float]:
        """Return what `count` microbatches are like without replay: `routes/native_*` (see `NativeTally.metrics`).
        Collective.

        Not allowed while a step is open, which measures these itself. Raises ValueError without router replay.
        """
        self._residence.require_onloaded("native_figures")
        self._step.require_closed("native_figures")
        replay = require_replay(self._replay)
        self._predict_all(micros, count, partial(self._measure, replay, temperature))
        return replay.native.metrics()

    # ------------------------------------------------------------ weights and state

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each weight by HF name, in the HF model's order.

        The dtype is bfloat16 with `mixed_precision`, as in the forward pass, else float32.
        """
        return {weight.name: (weight.dtype, weight.shape) for weight in self._weights}

    def weights(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the HF name and tensor of each weight, whole on rank 0 and empty on the other ranks. Collective.

        Every rank must iterate to the end (see `stream_weights`). Raises RuntimeError when the backend is offloaded.
        """
        self._residence.require_onloaded("weights")
        own = OwnPieces(self._policy, self._source.config, self._mesh)
        return stream_weights(self._weights, own, self._rank, self._device)

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write model, optimizer, schedule and RNG as the sharded checkpoint `path`. Collective.

        An older checkpoint at `path` is replaced once the new one is complete. Without `wait` the checkpoint is written
        while training continues (see `Checkpointer.save`). Raises RuntimeError while a step is open or the backend is
        offloaded, and ValueError when `path` exists and is not a checkpoint.
        """
        training = self._required("save")
        self._step.require_closed("save")
        self._residence.require_onloaded("save")
        with megatron_calls(self._device):
            state = training.state.collect()
        self._checkpointer.save(path, state, wait=wait)

    def wait_saved(self) -> None:
        """Wait until no checkpoint is being written. Raises the error of the last write, once."""
        self._checkpointer.wait()

    def load(self, path: str) -> None:
        """Read the checkpoint `path`, which any number of ranks may have written. Collective.

        The reference model and hyperparameters such as the learning rate are not read; they come from the config.
        Raises RuntimeError while a step is open or the backend is offloaded, and ValueError when `path` is not a
        complete checkpoint of this model.
        """
        training = self._required("load")
        self._step.require_closed("load")
        self._residence.require_onloaded("load")
        state = training.state.blank()
        self._checkpointer.load(path, state)
        training.state.restore(state)

    def export_model(self, path: str) -> None:
        """Write the model as the new HF folder `path` (weights, config, tokenizer) from rank 0. Collective.

        Rank 0 first collects all weights in host memory. Raises ValueError when `path` exists, and RuntimeError when
        the backend is offloaded.
        """
        self._residence.require_onloaded("export_model")
        weights = collect(self.weights(), keep=self._rank == 0)
        self._checkpointer.on_first_rank(
            lambda: write_folder(path, self._source.empty_model(), weights, self._config.model)
        )

    def offload(self) -> OffloadReport:
        """Move weights and optimizer state to host memory, and free the gradient buffers, which are zero between steps.
        Idempotent.

        The call first waits for a checkpoint that is being written. Raises RuntimeError while a step is open, the error
        of the last write, and OSError when host memory does not suffice.
        """
        training = self._required("offload")
        self._step.require_closed("offload")
        self._checkpointer.wait()
        clear_scratch()
        kept, zeros = resident_tensors(training.model, training.optimizer)
        return self._residence.offload(kept, zeros)

    def onload(self) -> OffloadReport:
        """Undo `offload`. Idempotent."""
        return self._residence.onload()

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

    # ------------------------------------------------------------ inside

    def _required(self, call: str) -> _Training:
        """Return the parts that `call` needs. Raises RuntimeError if this backend only computes log-probs."""
        self._config.require_trains(call)
        assert self._training is not None
        return self._training

    def _clear(self) -> None:
        if self._training is not None:
            with megatron_calls(self._device):
                clear_gradients(self._training.model, self._training.optimizer)

    def _predict_all(self, micros: Iterable[MicroBatch], count: int, forward: Any) -> None:
        """Run the forward passes of `count` microbatches with one of Megatron's schedules. It calls `forward(iterator,
        model)` for each."""
        if count < 1:
            return
        with megatron_calls(self._device):
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micros),
                model=self._model,
                num_microbatches=count,
                seq_length=1,  # lengths vary, and stages send them to each other
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )

    def _next(self, micros: Iterator[MicroBatch], replay: PipelineReplay | None) -> tuple[MicroBatch, PackedRows]:
        micro = next(micros, None)
        if micro is None:
            raise ValueError("microbatches: there are fewer than `count`, which all ranks must agree on")
        routes, mark = (None, 0) if replay is None else (replay.read(micro.batch), replay.spec.mark)
        place = self._mesh.place
        rows = pack_rows(
            micro, self._topology, place, self._device, packed=self._packed, routes=routes, missing_route=mark,
            with_owners=self._balance is not None,
        )  # fmt: skip
        return micro, rows

    def _train(self, temperature: float, micros: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        micro, rows = self._next(micros, self._replay)
        replaying = nullcontext() if self._replay is None else self._replay.training(rows.routes)
        with replaying, self._balancing(micro, rows):
            output = model(rows, temperature, self._entropy)
        return output, partial(self._loss, micro, rows)

    def _balancing(self, micro: MicroBatch, rows: PackedRows) -> AbstractContextManager[None]:
        """Return the context of a microbatch's forward pass that a backward pass follows. It has the balance of experts
        if the step has one."""
        if self._balance is None:
            return nullcontext()
        assert rows.owners is not None
        return self._balance.training(micro, rows.owners)

    def _loss(
        self, micro: MicroBatch, rows: PackedRows, output: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the loss of a microbatch in the form that Megatron's schedules expect. They call this on the last
        pipeline stage only.

        The second value would be a count that the loss is divided by. It is 0 here and not used, because gradients stay
        sums (see `updates`).
        """
        logprobs, entropy = output
        cp = self._mesh.cp
        row_tokens = whole_counts(rows.row_tokens, cp, self._device)
        inputs = loss_inputs(
            self._config,
            micro,
            index=rows.index,
            row_ids=rows.row_ids,
            row_tokens=row_tokens,
            logprobs=logprobs,
            entropy=entropy if self._entropy == "train" else None,
            reduce_rows=partial(sum_rows, cp) if cp.size() > 1 else None,
        )
        loss = self._step.add(inputs, row_tokens.numpy(), micro.group_ids, entropy)
        # Context-parallel ranks share their rows, which the first of them counts.
        lengths = micro.lengths if self._mesh.place.cp == 0 else micro.lengths[:0]
        self._meter.add(lengths, len(rows.index))
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
        """Count what the routers' own choices are on a microbatch, and what its log-probs are with them."""
        micro, rows = self._next(micros, replay)
        values = self._forward(model, rows, temperature, replay.observing(rows.routes))

        def collect(values: torch.Tensor, **_: Any) -> None:
            rollout = micro.batch.jagged("rollout_logprobs").values[rows.index]
            replay.native.add_logprobs(values, rollout.to(self._device))

        return values, collect

    def _forward(
        self, model: Any, rows: PackedRows, temperature: float, routed: AbstractContextManager[None]
    ) -> torch.Tensor:
        """Return a forward-only pass's log-probs of the wanted tokens, on earlier pipeline stages its hidden states."""
        with routed:
            output = model(rows, temperature, "off")
        return output[0] if isinstance(output, tuple) else output

    def _collect(
        self, micro: MicroBatch, rows: PackedRows, columns: list[torch.Tensor], values: torch.Tensor, **_: Any
    ) -> None:
        """Append the log-probs of a microbatch to `columns`. Megatron calls this on the last pipeline stage only.

        Each context-parallel rank has the log-probs of its own tokens, and 0 for the others. The sum over these ranks
        contains those of whole rows.
        """
        column = torch.zeros(int(micro.lengths.sum()), dtype=torch.float32, device=self._device)
        column[rows.whole_index] = values
        if self._mesh.cp.size() > 1:
            dist.all_reduce(column, group=self._mesh.cp)
        columns.append(column.cpu())

    def _finish(self) -> dict[str, float]:
        training = self._required("finish_step")
        self._pipeline.drain()
        for queues in filter(None, (self._replay, self._balance)):
            queues.check_drained()
        norm = sum_gradients(training.model, training.optimizer)
        # The norm already covers all ranks, so only the first rank contributes it to the sum.
        whole = norm**2 if dist.get_rank(self._mesh.tokens) == 0 else 0.0
        totals = self._step.finish(torch.tensor(whole, dtype=torch.float64, device=self._device))
        update = partial(apply, training.optimizer, self._config.trainer.weight_decay)
        metrics = totals.apply(self._config, self._steps, update)
        if self._balance is not None:
            metrics |= self._balance.finish(totals)
        self._clear()
        return metrics
