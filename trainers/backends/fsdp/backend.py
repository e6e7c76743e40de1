"""The fsdp backend trains a HF causal LM over data- and tensor-parallel ranks, on CPUs (gloo) or GPUs (NCCL)."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ....actors.protocols import MicroBatch, OffloadReport
from ....codecs.batch import Batch
from ...losses.step_loss import build_loss
from ..checkpoint_files import Checkpointer, training_state
from ..config import BackendConfig
from ..expert_balance import ExpertBalance
from ..hf_model import collect, write_folder
from ..layers import compile_layers, recompute_layers
from ..model_split import check_split, resolved_packing
from ..optimizer import build_adamw, local_gradients, scale_, square_norm
from ..residence import Residence
from ..router_replay import RouterReplay, require_replay, route_spec
from ..row_layout import RowLayout, lay_out, loss_inputs
from ..throughput import StepMeter, flop_model
from ..train_step import TrainStep
from ..vocab.logprobs import Entropy
from ..weight_stream import stream_weights
from .causal_lm import CausalLM, half_parameters, halve_parameters, use_closed_form_norms
from .hf_routers import balance_experts, replay_routers, router_biases
from .output_checks import check_head, check_packing
from .sharding import (
    WeightSource,
    build_mesh,
    fill,
    give_back,
    give_back_unfinished,
    open_source,
    own_piece,
    spread,
    spread_weights,
)
from .tensor_parallel import split_dim, sum_per_head_gradients


class FsdpBackend:
    """A `TrainBackend` that trains HF models with FSDP2. Each collective call waits for all ranks, but not longer than
    the timeout of the process group."""

    def __init__(self, config: BackendConfig, rank: int, world: int) -> None:
        """Shard the model and read this rank's pieces of its weights.

        When `world` > 1, a default process group of `world` ranks must exist. Raises RuntimeError if it does not.
        Raises ValueError when the model does not exist, needs another value of `head`, does not support packing, or
        cannot be split as the topology says.
        """
        if world > 1 and (not dist.is_initialized() or dist.get_world_size() != world):
            raise RuntimeError(f"fsdp backend: needs a default process group of {world} ranks before it is built")
        self._config = config
        self._rank, self._world = rank, world
        self._place = config.topology.place(rank)
        self._half = config.trainer.mixed_precision
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._mesh = build_mesh(config.topology, self._device)
        self._tp = None if self._mesh is None or config.topology.tp == 1 else self._mesh["tp"].get_group()
        source = open_source(config.model)
        self._packed = False
        policy = self._build(source, trained=config.trains)
        if config.trainer.head == "selected":
            check_head(policy.model)
        self._replay = self._route_replay(policy)
        flops = flop_model(policy.model.config)
        self._reference: CausalLM | None = None
        if config.with_reference:
            reference = self._build(source, trained=False)
            host = config.trainer.offload or self._device.type == "cuda"
            self._reference = self._spread(reference, source, offload=host)
        layers = policy.layers()  # FSDP gives them other class names
        self._policy = self._spread(policy, source, offload=config.trainer.offload)
        group = None if self._mesh is None else self._mesh["dp"].get_group()
        self._balance: ExpertBalance | None = None
        if config.trainer.moe.active:
            self._balance = balance_experts(self._policy.model, config, self._device, group)
        if self._packed:
            check_packing(self._policy, self._device, self._precision(self._policy), half=self._half)
        if config.trainer.compile:
            compile_layers(layers)
        recompute_layers(layers, config.trainer.recompute, config.trainer.recompute_layers)
        dtype = torch.bfloat16 if self._half else torch.float32
        self._weights = spread_weights(self._policy.model, config.topology, dtype)
        self._optimizer = build_adamw(self._policy.model, config.trainer)
        self._steps = torch.zeros((), dtype=torch.int64)
        self._checkpointer = Checkpointer(rank, world)
        self._residence = Residence(self._device)
        self._entropy: Entropy = (
            "train" if config.loss.entropy_coef > 0 else "report" if config.trainer.entropy_metric else "off"
        )
        self._step = TrainStep(
            build_loss(config.loss, config.columns),
            self._device,
            group,
            recomputed=config.prev in ("recompute", "fixed"),
            with_entropy=self._entropy != "off",
        )
        self._meter = StepMeter(flops, self._device, world, group, half=self._half)

    def _route_replay(self, policy: CausalLM) -> RouterReplay | None:
        if not self._config.router_replay.enabled:
            return None
        spec = route_spec(policy.model.config)
        replay = RouterReplay(self._config.router_replay, spec, range(len(spec.layers)), self._device)
        replay_routers(policy.model, replay)
        return replay

    # ------------------------------------------------------------ one step

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
        self._optimizer.zero_grad(set_to_none=True)

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Run the forward pass, the summed loss and the backward pass of `count` microbatches. Gradients stay unscaled
        sums. Collective.

        Every rank must pass the same number of microbatches; one without rows is allowed. Needs the columns
        `input_ids`, `response_mask` and `rollout_logprobs`, also `prev_logprobs` when `prev` is "recompute", and
        `ref_logprobs` with a KL term. Raises RuntimeError when no step is open, and ValueError naming a missing column.
        """
        with self._meter.working():
            for number, micro in enumerate(itertools.islice(micros, count), start=1):
                if isinstance(self._policy, FSDPModule) and not self._config.trainer.reshard_after_forward:
                    self._policy.set_reshard_after_backward(number == count)
                self._accumulate(micro)

    def finish_step(self) -> dict[str, float]:
        """Sum the step's losses and counts over the ranks, divide the gradients by N, clip them, and step. Collective.

        N is the denominator of the step's mean loss. Returns metrics over all ranks. When N is 0 or the gradients are
        not finite, the step is skipped: weights, optimizer state and schedule stay as they were. Raises RuntimeError
        when no step is open, a microbatch failed or the backend is offloaded.
        """
        self._residence.require_onloaded("finish_step")
        with self._meter.working():
            metrics = self._finish()
            if self._replay is not None:
                metrics |= self._replay.metrics()
        return {**metrics, **self._meter.metrics()}

    def abort_step(self) -> None:
        """Drop the gradients and sums of an open step. Idempotent."""
        self._step.abort()
        give_back_unfinished(self._policy, reshard=self._config.trainer.reshard_after_forward)
        self._optimizer.zero_grad(set_to_none=True)

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
        model = self._reference if reference else self._policy
        if model is None:
            raise ValueError("with_reference: got False, expected True for log-probs of the reference model")
        replay = None if reference else self._replay
        given = itertools.islice(micros, count)
        try:
            columns = [self._logprobs(model, replay, micro.batch, temperature) for micro in given]
        finally:
            give_back(model)  # no backward pass follows
        return columns if self._rank == self._config.topology.writer(self._place.dp) else []

    @torch.no_grad()
    def native_figures(self, micros: Iterable[MicroBatch], count: int, *, temperature: float = 1.0) -> dict[str, float]:
        """Return what `count` microbatches are like without replay: `routes/native_*` (see `NativeTally.metrics`).
        Collective.

        Not allowed while a step is open, which measures these itself. Raises ValueError without router replay.
        """
        self._residence.require_onloaded("native_figures")
        self._step.require_closed("native_figures")
        replay = require_replay(self._replay)
        try:
            for micro in itertools.islice(micros, count):
                self._measure(replay, micro, self._lay_out(micro.batch, replay), temperature)
        finally:
            give_back(self._policy)
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
        give_back(self._policy)
        params = {**dict(self._policy.model.named_parameters()), **router_biases(self._policy.model)}
        return stream_weights(self._weights, lambda weight: own_piece(params[weight.name]), self._rank, self._device)

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write model, optimizer, schedule and RNG as the sharded checkpoint `path`. Collective.

        An older checkpoint at `path` is replaced once the new one is complete. Without `wait` the checkpoint is written
        while training continues (see `Checkpointer.save`). Raises RuntimeError while a step is open or the backend is
        offloaded, and ValueError when `path` exists and is not a checkpoint.
        """
        self._config.require_trains("save")
        self._step.require_closed("save")
        self._residence.require_onloaded("save")
        self._checkpointer.save(path, self._state(), wait=wait)

    def wait_saved(self) -> None:
        """Wait until no checkpoint is being written. Raises the error of the last write, once."""
        self._checkpointer.wait()

    def load(self, path: str) -> None:
        """Read the checkpoint `path`, which any number of ranks may have written. Collective.

        The reference model and hyperparameters such as the learning rate are not read; they come from the config.
        Raises RuntimeError while a step is open or the backend is offloaded, and ValueError when `path` is not a
        complete checkpoint of this model.
        """
        self._config.require_trains("load")
        self._step.require_closed("load")
        self._residence.require_onloaded("load")
        self._checkpointer.load(path, self._state())

    def export_model(self, path: str) -> None:
        """Write the model as the new HF folder `path` (weights, config, tokenizer) from rank 0. Collective.

        Rank 0 first collects all weights in host memory. Raises ValueError when `path` exists, and RuntimeError when
        the backend is offloaded.
        """
        self._residence.require_onloaded("export_model")
        weights = collect(self.weights(), keep=self._rank == 0)
        self._checkpointer.on_first_rank(lambda: write_folder(path, self._policy.model, weights, self._config.model))

    def offload(self) -> OffloadReport:
        """Move weights and optimizer state, and a reference model that is on the device, to host memory. Idempotent.

        The call first waits for a checkpoint that is being written. Raises RuntimeError while a step is open, the error
        of the last write, and OSError when host memory does not suffice.
        """
        self._config.require_trains("offload")
        self._step.require_closed("offload")
        self._checkpointer.wait()
        return self._residence.offload(self._resident())

    def onload(self) -> OffloadReport:
        """Undo `offload`. Idempotent."""
        return self._residence.onload()

    def group_holders(self) -> Sequence[object]:
        """Return the objects that refer to process groups. FSDP's own objects are found through the hooks of the
        modules."""
        return (self,)

    def close(self) -> None:
        """Drop an open step and wait until no checkpoint is being written. Raises the error of the last write.

        The process group stays open, because its owner closes it.
        """
        self.abort_step()
        try:
            self._checkpointer.close()
        finally:
            self._residence.close()

    # ------------------------------------------------------------ inside

    def _build(self, source: WeightSource, *, trained: bool) -> CausalLM:
        """Build the whole model on the meta device, where its weights have no values and need no memory. With mixed
        precision the weights of a model that is not trained are in bfloat16."""
        model = source.empty_model(torch.float32)
        check_split(self._config.trainer, model.config)
        packing = resolved_packing(self._config.trainer, model.config, gpu=self._device.type == "cuda")
        self._packed = packing == "packed"
        if self._packed and self._half and self._device.type == "cuda":
            from .causal_lm import use_varlen_attention  # the kernels need a GPU and half precision

            use_varlen_attention(model)
        if self._device.type == "cpu" and not self._config.trainer.compile:
            use_closed_form_norms(model)
        if not trained:
            model.requires_grad_(False)
            if self._half:
                halve_parameters(model)
        return CausalLM(model, self._config.trainer.head)

    def _spread(self, module: CausalLM, source: WeightSource, *, offload: bool) -> CausalLM:
        """Shard `module` over the mesh, read this rank's pieces of its weights from `source`, and return it.

        With `offload` the pieces are in host memory between uses. A single rank has the whole module, always on its
        device.
        """
        topology = self._config.topology
        reshard = self._config.trainer.reshard_after_forward
        spread(module, self._mesh, self._device, half=self._half, offload=offload, reshard=reshard)
        fill(module, source, topology, self._rank, self._device, host=offload and self._mesh is not None)
        return module

    def _accumulate(self, micro: MicroBatch) -> None:
        with self._step.accumulating() as temperature:
            layout = self._lay_out(micro.batch, self._replay)
            if self._replay is not None and self._replay.take_measurement():
                self._measure(self._replay, micro, layout, temperature)
            with (
                self._precision(self._policy),
                _replaying(self._replay, layout),
                self._balancing(micro, layout),
            ):
                logprobs, entropy = self._policy(layout, temperature, self._entropy)
                inputs = loss_inputs(
                    self._config,
                    micro,
                    index=layout.index,
                    row_ids=layout.row_ids,
                    row_tokens=layout.row_tokens,
                    logprobs=logprobs,
                    entropy=entropy if self._entropy == "train" else None,
                    reduce_rows=None,
                )
                self._step.add(inputs, layout.row_tokens.numpy(), micro.group_ids, entropy).backward()
            self._meter.add(micro.lengths, len(layout.index))

    def _finish(self) -> dict[str, float]:
        if self._tp is not None:
            sum_per_head_gradients(self._policy, self._tp, self._device)
        params = list(self._policy.parameters())
        grads = local_gradients(params)
        # Gradients that are the same on all tensor-parallel ranks count once, on the first of them.
        own = grads if self._place.tp == 0 else local_gradients(p for p in params if split_dim(p) is not None)
        square = square_norm(own, self._device)
        if self._tp is not None:
            dist.all_reduce(square, group=self._tp)

        def update(factor: float, rate: float) -> None:
            scale_(grads, factor)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()

        totals = self._step.finish(square)
        metrics = totals.apply(self._config, self._steps, update)
        if self._balance is not None:
            metrics |= self._balance.finish(totals)
        self._optimizer.zero_grad(set_to_none=True)
        return metrics

    def _lay_out(self, batch: Batch, replay: RouterReplay | None) -> RowLayout:
        routes, mark = (None, 0) if replay is None else (replay.read(batch), replay.spec.mark)
        with_owners = self._balance is not None
        return lay_out(
            batch, self._device, packed=self._packed, routes=routes, missing_route=mark, with_owners=with_owners
        )

    def _logprobs(self, model: CausalLM, replay: RouterReplay | None, batch: Batch, temperature: float) -> torch.Tensor:
        layout = self._lay_out(batch, replay)
        with _replaying(replay, layout):
            values = self._predict(model, layout, temperature)
        result = torch.zeros(len(batch.jagged("input_ids").values), dtype=torch.float32)
        result[layout.index] = values.cpu()
        return result

    def _predict(self, model: CausalLM, layout: RowLayout, temperature: float) -> torch.Tensor:
        with self._precision(model):
            values, _ = model(layout, temperature)
        return values

    @torch.no_grad()
    def _measure(self, replay: RouterReplay, micro: MicroBatch, layout: RowLayout, temperature: float) -> None:
        """Count what the routers' own choices are on a microbatch, and what its log-probs are with them. Collective."""
        with replay.observing(layout.routes):
            values = self._predict(self._policy, layout, temperature)
        rollout = micro.batch.jagged("rollout_logprobs").values[layout.index]
        replay.native.add_logprobs(values, rollout.to(self._device))

    def _balancing(self, micro: MicroBatch, layout: RowLayout) -> AbstractContextManager[object]:
        """Return the context for the training passes over `layout`: with the balance of experts if the step has one."""
        if self._balance is None:
            return nullcontext()
        assert layout.owners is not None
        return self._balance.training(micro, layout.owners)

    def _precision(self, module: CausalLM) -> AbstractContextManager[object]:
        """Return the context in which forward and backward passes of `module` must run.

        On a single rank with mixed precision it provides bfloat16 copies of the parameters. On several ranks FSDP
        itself makes such copies, and the context does nothing.
        """
        return half_parameters(module) if self._mesh is None and self._half else nullcontext()

    def _resident(self) -> Iterator[torch.Tensor]:
        """Yield this rank's pieces of all tensors that stay between steps. Gradients do not."""
        for model in filter(None, (self._policy, self._reference)):
            give_back(model)
            yield from map(own_piece, (*model.parameters(), *model.buffers()))
        for state in self._optimizer.state.values():
            yield from map(own_piece, state.values())

    def _state(self) -> dict[str, torch.Tensor]:
        return training_state(self._policy.model, self._optimizer, self._steps)


def _replaying(replay: RouterReplay | None, layout: RowLayout) -> AbstractContextManager[object]:
    """Return the context for the passes over `layout`, backward passes included. It has the layout's routes if the
    backend replays them."""
    return nullcontext() if replay is None else replay.replaying(layout.routes)
