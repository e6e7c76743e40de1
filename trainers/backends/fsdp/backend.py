"""The fsdp backend trains a HF causal LM over data- and tensor-parallel ranks, on CPUs (gloo) or GPUs (NCCL)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ....actors.engines.hf.positions import fix_rotary_length
from ....actors.train_backend import MicroBatch, TokenScores
from ..config import BackendConfig
from ..expert_balance import ExpertBalance
from ..layers import compile_layers, recompute_layers
from ..lora.adapted_layers import LoraSwitch, add_adapter, expect_gradients, matrix_names
from ..lora.rounded_layers import fill_rounded, round_layers
from ..model_backend import ModelBackend
from ..model_split import check_split, mesh_problems, resolved_packing
from ..optimizers.optimizer import build_optimizer
from ..router_replay import RouterReplay, route_spec
from ..rows.packed_rows import sum_rows, whole_counts
from ..rows.row_layout import RowLayout, exactly, lay_out
from ..throughput import flop_model
from ..train_step import local_gradients, scale_, square_norm
from ..weight_stream import OwnPiece, WeightSource
from .causal_lm import CausalLM, TokenValues, freeze_weights, half_parameters, use_closed_form_norms
from .context_parallel import check_context, require_splittable, split_rows
from .expert_parallel import holds_experts
from .hf_routers import balance_experts, replay_routers
from .output_checks import head_of
from .row_checks import check_rows
from .sharding import (
    build_expert_mesh,
    build_mesh,
    context_group,
    fill,
    give_back,
    give_back_unfinished,
    open_source,
    own_piece,
    own_pieces,
    spread,
    spread_weights,
)
from .tensor_parallel import split_dim, sum_per_head_gradients


class FsdpBackend(ModelBackend[RouterReplay, ExpertBalance]):
    """A `TrainBackend` that trains HF models with FSDP2. Each collective call waits for all ranks, but not longer than
    the timeout of the process group."""

    def __init__(self, config: BackendConfig, rank: int, world: int) -> None:
        """Shard the model and read this rank's pieces of its weights.

        When `world` > 1, a default process group of `world` ranks must exist. Raises RuntimeError if it does not.
        Raises ValueError when the model does not exist, needs another value of `head`, does not support packing, or
        cannot be split as the topology says.
        """
        if world > 1 and (not dist.is_initialized() or dist.get_world_size() != world):
            raise RuntimeError(f"fsdp backend: it needs a default process group of {world} ranks before it is built")
        super().__init__(config, rank, world)
        self._mesh = build_mesh(config.topology, self._device)
        self._expert_mesh = build_expert_mesh(config.topology, self._device)
        self._cp = context_group(config.topology, self._device)
        self._tp = None if self._mesh is None or config.topology.tp == 1 else self._mesh["tp"].get_group()
        source = open_source(config.base, config.attention)
        if self._adapter is not None and config.rounded is None:
            source = self._recorded = self._adapter.recorded(source, config.known)
        self._packed = False
        self._switch: LoraSwitch | None = None
        policy = self._build(source, trained=config.trains)
        if config.trainer.fp8 != "none":
            policy.use_fp8(config.trainer.fp8, self._device, config.topology.tp, trained=config.trains)
        self._replay = self._route_replay(policy)
        flops = flop_model(policy.model.config, frozen=self._adapter is not None)
        self._reference: CausalLM | None = None
        if config.with_reference and self._adapter is None:  # The base of an adapter is the reference.
            reference = self._build(source, trained=False)
            host = config.trainer.offload or self._device.type == "cuda"
            self._reference = self._spread(reference, source, offload=host)
        layers = policy.layers()  # The layers are found first, because FSDP renames their classes.
        self._policy = self._spread(policy, source, offload=config.trainer.offload)
        if config.rounded is not None:
            self._rounded = fill_rounded(
                self._policy.model, config.model, config.rounded, device=self._device, rank=rank, world=world
            )
        group = None if self._mesh is None else self._mesh["dp"].get_group()
        if config.trainer.moe.active:
            self._balance = balance_experts(self._policy.model, config, self._device, group)
        with self._policy.exact() as called:
            self._check_rows()
        self._policy.keep_fp8(called, config.trainer.fp8, self._device)
        if config.trainer.compile:
            compile_layers(layers)
        recompute_layers(layers, config.trainer.recompute, config.trainer.recompute_layers)
        dtype = torch.bfloat16 if self._half else torch.float32
        self._weights = spread_weights(self._policy.model, config.topology, dtype)
        self._optimizer = build_optimizer(self._policy.model, config.trainer, _place_of(config, rank))
        # Context-parallel ranks share their rows, so only the first of them counts rows.
        self._prepare_steps(flops, group, counts_rows=self._place.cp == 0)

    def _route_replay(self, policy: CausalLM) -> RouterReplay | None:
        if not self._config.router_replay.enabled:
            return None
        spec = route_spec(policy.model.config)
        replay = RouterReplay(self._config.router_replay, spec, range(len(spec.layers)), self._device)
        replay_routers(policy.model, replay)
        return replay

    def _check_rows(self) -> None:
        """Check that rows do not affect each other, and split them over context-parallel ranks from now on.
        Collective."""
        config = self._config
        check_rows(
            self._policy,
            self._device,
            self._precision(self._policy),
            packed=self._packed and self._cp is None,  # Split rows have attention of their own.
            half=self._half,
            longest=min(config.context or 0, config.trainer.tokens_per_microbatch),
            budget=config.trainer.tokens_per_microbatch,
        )
        if self._cp is not None:
            self._split_rows(self._cp)

    def _split_rows(self, group: dist.ProcessGroup) -> None:
        """Split rows over the context-parallel ranks `group` from now on. Collective."""
        for module in filter(None, (self._policy, self._reference)):
            check_context(
                module,
                self._topology,
                self._place,
                group,
                self._precision(module),
                device=self._device,
                half=self._half,
                longest=min(self._config.context or 0, self._config.trainer.tokens_per_microbatch),
            )

    # ---------------- These methods run one train step.

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Run the forward pass, the summed loss and the backward pass of `count` microbatches. Gradients stay unscaled
        sums. Collective.

        Every rank must pass the same number of microbatches; one without rows is allowed. Needs the columns
        `input_ids`, `response_mask` and `rollout_logprobs`, also `prev_logprobs` when `prev` is "recompute", and
        `ref_logprobs` with a KL term. Raises RuntimeError when no step is open, and ValueError naming a missing column.
        """
        with self._meter.working():
            for number, micro in enumerate(exactly(micros, count), start=1):
                if isinstance(self._policy, FSDPModule) and not self._config.trainer.reshard_after_forward:
                    self._policy.set_reshard_after_backward(number == count)
                self._accumulate(micro)

    def abort_step(self) -> None:
        """Drop the gradients and sums of an open step. Idempotent."""
        self._step.abort()
        give_back_unfinished(self._policy, reshard=self._config.trainer.reshard_after_forward)
        self._clear()

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

    def _clear(self) -> None:
        self._optimizer.zero_grad()

    def _columns(
        self, micros: Iterable[MicroBatch], count: int, reference: bool, temperature: float
    ) -> list[torch.Tensor]:
        model, replay = (self._reference or self._policy, None) if reference else (self._policy, self._replay)
        base = self._switch.off() if reference and self._switch is not None else nullcontext()
        try:
            with base:
                return [self._logprobs(model, replay, micro, temperature) for micro in exactly(micros, count)]
        finally:
            give_back(model)  # No backward pass needs the gathered weights.

    def _measure_all(self, replay: RouterReplay, micros: Iterable[MicroBatch], count: int, temperature: float) -> None:
        try:
            for micro in exactly(micros, count):
                self._measure(replay, micro, self._lay_out(micro, replay), temperature)
        finally:
            give_back(self._policy)

    def _own_pieces(self) -> OwnPiece:
        give_back(self._policy)
        return own_pieces(self._policy.model)

    def _load(self, path: str) -> None:
        state, model = self._state(), self._policy.model
        # Another version can have written the checkpoint, without frozen weights, or another mesh, with other scales.
        optional = {name: state.pop(name) for name in list(state) if ".scale." in name}
        params = model.named_parameters(remove_duplicate=False) if self._adapter is None else ()
        frozen = {f"model.{name}" for name, param in params if not param.requires_grad}
        optional |= {name: state.pop(name) for name in list(state) if name in frozen}
        optional |= {name: state.pop(name, value) for name, value in self._reference_state().items()}
        self._checkpointer.load(path, state, optional)
        self._optimizer.restore(model, {**state, **optional})

    @property
    def shares_features(self) -> bool:
        return self._policy.features is not None

    @property
    def _experts_transposed(self) -> bool:
        return any(getattr(module, "is_transposed", False) for module in self._policy.model.modules())

    def _hf_model(self) -> Any:
        return self._policy.model

    def _moving(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        return self._resident(), ()

    def _build(self, source: WeightSource, *, trained: bool) -> CausalLM:
        """Build the whole model on the meta device, where its weights have no values and need no memory. With mixed
        precision the weights of a model that is not trained are in bfloat16."""
        model = source.empty_model(torch.float32)
        for problem in mesh_problems(self._config.trainer):
            raise ValueError(problem)
        check_split(self._config.trainer, model.config)
        if self._topology.cp > 1:
            require_splittable(model, self._topology.cp)
        packing = resolved_packing(self._config.trainer, model.config, gpu=self._device.type == "cuda")
        self._packed = packing == "packed"
        self._reach = fix_rotary_length(model, self._config.context)
        if self._half and self._device.type == "cuda" and self._config.attention == "auto":
            from .causal_lm import use_varlen_kernels  # They need a GPU and half precision.

            use_varlen_kernels(model, packed=self._packed)
        if (self._half and self._device.type == "cuda") or self._config.trainer.lora.experts:
            from .grouped_experts import use_grouped_experts

            use_grouped_experts(model)
        if self._device.type == "cpu" and not self._config.trainer.compile:
            use_closed_form_norms(model)
        head = head_of(model, self._config.trainer.head)
        if trained and self._adapter is not None:
            if self._config.rounded is not None:
                base: Any = self._config.trainer.lora.base
                round_layers(model, base, torch.bfloat16 if self._half else torch.float32)
            self._switch = add_adapter(model, self._config.trainer.lora)
            self._adapter.expect_matrices(matrix_names(model))
        freeze_weights(model, self._config.trainer.freeze if trained else None, half=self._half)
        built = CausalLM(model, head)
        if self._config.bitwise is not None:
            built.compute_as_engine(self._config.bitwise, self._device)
        return built

    def _spread(self, module: CausalLM, source: WeightSource, *, offload: bool) -> CausalLM:
        """Shard `module` over the mesh, read this rank's pieces of its weights from `source`, and return it.

        With `offload` the pieces are in host memory between uses. A single rank has the whole module, always on its
        device.
        """
        topology = self._topology
        if self._tp is not None:
            module.share_features(self._tp, self._device)
        reshard = self._config.trainer.reshard_after_forward
        spread(module, self._mesh, self._expert_mesh, self._device, half=self._half, offload=offload, reshard=reshard)
        host = offload and self._mesh is not None
        fill(module, source, topology, self._rank, self._device, host=host, adapter=self._adapter)
        return module

    def _accumulate(self, micro: MicroBatch) -> None:
        with self._step.accumulating() as temperature:
            layout = self._lay_out(micro, self._replay)
            if self._replay is not None and self._replay.take_measurement():
                self._measure(self._replay, micro, layout, temperature)
            with (
                self._precision(self._policy),
                _replaying(self._replay, layout),
                self._balancing(micro, layout.owners),
                nullcontext() if self._switch is None else self._switch.dropping(),
            ):
                candidates = self._candidates(micro, layout, self._policy.model.config.get_text_config().vocab_size)
                values: TokenValues = self._policy(layout, temperature, self._entropy, candidates=candidates)
                tokens, counted, reduce_rows = layout.row_tokens, micro.lengths, None
                if self._cp is not None:
                    tokens, reduce_rows = whole_counts(tokens, self._cp, self._device), partial(sum_rows, self._cp)
                    # Context-parallel ranks share their rows, so only the first of them counts rows.
                    counted = micro.lengths if self._place.cp == 0 else micro.lengths[:0]
                self._add_loss(
                    micro,
                    layout,
                    tokens,
                    values.logprobs,
                    values.entropy,
                    counted=counted,
                    candidates=values.candidates,
                    reduce_rows=reduce_rows,
                ).backward()

    def _finish(self) -> dict[str, float]:
        if self._switch is not None:
            expect_gradients(self._policy.model)
        if self._tp is not None:
            sum_per_head_gradients(self._policy, self._tp, self._device)
        params = list(self._policy.parameters())
        grads = local_gradients(params)
        # Gradients that are the same on all tensor-parallel ranks count once, on the first of them.
        apart = (p for p in params if split_dim(p) is not None or holds_experts(p))
        own = grads if self._place.tp == 0 else local_gradients(apart)
        square = square_norm(own, self._device)
        if self._tp is not None:
            dist.all_reduce(square, group=self._tp)

        def update(factor: float, rate: float) -> None:
            scale_(grads, factor)
            self._optimizer.step(rate)

        totals = self._step.finish(square)
        metrics = totals.apply(self._config, self._steps, update)
        if self._balance is not None:
            metrics |= self._balance.finish(totals)
        self._clear()
        return metrics

    def _lay_out(self, micro: MicroBatch, replay: RouterReplay | None) -> RowLayout:
        routes, mark = (None, 0) if replay is None else (replay.read(micro.batch), replay.spec.mark)
        given: Any = {"routes": routes, "missing_route": mark, "with_owners": self._balance is not None}
        if self._cp is not None:
            layout = split_rows(micro, self._topology, self._place, self._device, **given)
        else:
            layout = lay_out(micro.batch, self._device, packed=self._packed, **given)
        if micro.pictures is not None:
            layout = self._policy.with_pictures(layout, micro, self._topology, replays=self._replay is not None)
        if self._reach is not None and layout.longest >= self._reach:  # `longest` leaves out each row's last token.
            raise ValueError(
                f"microbatch: got a row of {layout.longest + 1} tokens, expected at most {self._reach}, the context "
                "for which the model's positions were chosen"
            )
        return layout

    def _logprobs(
        self, model: CausalLM, replay: RouterReplay | None, micro: MicroBatch, temperature: float
    ) -> torch.Tensor:
        layout = self._lay_out(micro, replay)
        with _replaying(replay, layout):
            values = self._predict(model, layout, temperature).logprobs
        return self._whole(values, layout, micro)

    @torch.no_grad()
    def score(
        self, micros: Iterable[MicroBatch], count: int, top_k: int, *, temperature: float = 1.0
    ) -> list[TokenScores]:
        """Return the log-probs of the tokens of `count` microbatches, and the `top_k` most likely tokens at each.

        They are as those of `logprobs`, also in where they are. Collective.
        """
        self._residence.require_onloaded("score")
        found = []
        try:
            for micro in exactly(micros, count):
                layout = self._lay_out(micro, None)
                values = self._predict(self._policy, layout, temperature, top_k)
                whole = partial(self._whole, layout=layout, micro=micro)
                ids, logprobs = (None if part is None else whole(part) for part in (values.top_ids, values.candidates))
                found.append(TokenScores(whole(values.logprobs), ids, logprobs))
        finally:
            give_back(self._policy)
        return found if self._rank == self._topology.writer(self._place.dp) else []

    def _whole(self, values: torch.Tensor, layout: RowLayout, micro: MicroBatch) -> torch.Tensor:
        """Return values of the wanted tokens, `[T, ...]`, as a column of whole rows on the CPU, with 0 elsewhere."""
        if self._cp is not None:  # The sum over the ranks has the values of whole rows.
            column = values.new_zeros(int(micro.lengths.sum()), *values.shape[1:])
            column[layout.whole_index] = values
            dist.all_reduce(column, group=self._cp)
            return column.cpu()
        column = torch.zeros(len(micro.batch.jagged("input_ids").values), *values.shape[1:], dtype=values.dtype)
        column[layout.index] = values.cpu()
        return column

    def _predict(self, model: CausalLM, layout: RowLayout, temperature: float, top_k: int = 0) -> TokenValues:
        with self._precision(model):
            return model(layout, temperature, top_k=top_k)

    @torch.no_grad()
    def _measure(self, replay: RouterReplay, micro: MicroBatch, layout: RowLayout, temperature: float) -> None:
        """Count the routers' own choices on a microbatch, and the log-probs that result from these choices.
        Collective."""
        with replay.observing(layout.routes):
            values = self._predict(self._policy, layout, temperature).logprobs
        rollout = micro.batch.jagged("rollout_logprobs").values[layout.index]
        replay.native.add_logprobs(values, rollout.to(self._device))

    def _precision(self, module: CausalLM) -> AbstractContextManager[object]:
        """Return the context in which forward and backward passes of `module` must run.

        On a single rank with mixed precision it provides bfloat16 copies of the parameters. On several ranks FSDP
        itself makes such copies, and the context does nothing.
        """
        return half_parameters(module) if self._mesh is None and self._half else nullcontext()

    def _resident(self) -> Iterator[torch.Tensor]:
        """Yield this rank's pieces of all tensors that stay between steps. Gradients are not among them."""
        for model in filter(None, (self._policy, self._reference)):
            give_back(model)
            yield from map(own_piece, (*model.parameters(), *model.buffers()))
        yield from map(own_piece, self._optimizer.tensors())

    @torch.no_grad()
    def _move_reference(self, mix: float) -> None:
        assert self._reference is not None
        pairs = []
        for module in (self._policy, self._reference):
            give_back(module)
            pairs.append(map(own_piece, (*module.parameters(), *module.buffers())))
        for value, kept in zip(*pairs, strict=True):
            if kept.is_floating_point():
                value = value.float()
                kept.copy_(torch.lerp(kept.to(value), value, mix))

    def _reference_state(self) -> dict[str, torch.Tensor]:
        if self._reference is None:
            return {}
        return {f"reference.{name}": value for name, value in self._reference.model.state_dict().items()}

    def _state(self) -> dict[str, torch.Tensor]:
        model = self._policy.model
        state = self._optimizer.training_state(model, self._steps)
        if self._adapter is None:  # Weights that `trainer.freeze` names can have been trained earlier in the run.
            state |= {f"model.{name}": value for name, value in model.state_dict().items()}
        return {**state, **self._reference_state()} if self._config.reference_updates else state


def _place_of(config: BackendConfig, rank: int) -> str:
    """Return the name of a rank's place in the mesh, which a checkpoint of the same mesh has, too."""
    topology = config.topology
    return f"dp{topology.dp}.tp{topology.tp}.cp{topology.cp}.ep{topology.ep}.{rank}"


def _replaying(replay: RouterReplay | None, layout: RowLayout) -> AbstractContextManager[object]:
    """Return the context for the passes over `layout`, backward passes included. It has the layout's routes if the
    backend replays them."""
    return nullcontext() if replay is None else replay.replaying(layout.routes)
