"""The FSDP2 backend: a HF causal LM, sharded over the data-parallel ranks, on CPU (gloo) or GPU (NCCL).

One rank alone is not wrapped: with nothing to shard, FSDP's hooks only cost (see `_shard`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ...actors.protocols import MicroBatch
from ...codecs.batch import Batch
from ..losses.factory import build_loss
from ..losses.terms import LossInputs
from .causal_lm import CausalLM, RowLayout, lay_out
from .checkpoint import load_checkpoint, on_first_rank, save_checkpoint, training_state
from .config import BackendConfig
from .hf_model import full_weights, load_causal_lm, write_folder
from .optimizer import build_adamw, clip_coefficient, learning_rate, local_gradients, scale_, square_norm
from .train_step import TrainStep


class FsdpBackend:
    """See `TrainBackend`. Collective calls wait until all ranks make them, bounded by the process group's timeout."""

    def __init__(self, config: BackendConfig, rank: int, world: int) -> None:
        """Load and shard the model. Needs a default process group of `world` ranks when `world` > 1.

        Raises ValueError for a model that is not there or needs another `head`; RuntimeError without the process group.
        """
        if world > 1 and (not dist.is_initialized() or dist.get_world_size() != world):
            raise RuntimeError(f"fsdp backend: needs a default process group of {world} ranks before it is built")
        self._config = config
        self._rank, self._world = rank, world
        self._half = config.mixed_precision == "bf16"
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self._mesh = init_device_mesh(self._device.type, (world,), mesh_dim_names=("dp",)) if world > 1 else None
        policy = CausalLM(load_causal_lm(config.model), config.head)
        self._reference: CausalLM | None = None
        if config.with_reference:
            reference = copy.deepcopy(policy).requires_grad_(False)
            self._reference = self._shard(reference, offload=True)
        self._policy = self._shard(policy, offload=False)
        self._optimizer = build_adamw(self._policy.model, config.optimizer)
        self._steps = torch.zeros((), dtype=torch.int64)
        group = None if self._mesh is None else self._mesh.get_group()
        self._step = TrainStep(build_loss(config.loss), self._device, group, with_entropy=config.entropy)

    # ------------------------------------------------------------ one step

    def begin_step(self, temperature: float = 1.0) -> None:
        """See `TrainBackend`. Raises ValueError when `temperature` is not above 0."""
        self._step.begin(temperature)
        self._optimizer.zero_grad(set_to_none=True)

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """See `TrainBackend`. Every rank must have as many microbatches; one of no rows is legal.

        Needs `input_ids`, `response_mask`, `rollout_logprobs`; `prev_logprobs` with `prev` "recompute"; `ref_logprobs`
        with a KL term. Raises RuntimeError when no step is open, ValueError naming a column that is missing.
        """
        for micro in itertools.islice(micros, count):
            self._accumulate(micro)

    def finish_step(self) -> dict[str, float]:
        """See `TrainBackend`. A skipped step leaves weights, optimizer state and schedule as they were."""
        grads = local_gradients(self._policy.parameters())
        totals = self._step.finish(square_norm(grads, self._device))
        config = self._config.optimizer
        rate = learning_rate(config, int(self._steps))
        if totals.applies:
            clip = clip_coefficient(totals.grad_norm, config.grad_clip)
            scale_(grads, clip / totals.denominator)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {
            **totals.metrics,
            "train/grad_norm": totals.grad_norm,
            "train/lr": rate,
            "train/skipped": 0.0 if totals.applies else 1.0,
        }

    def abort_step(self) -> None:
        """See `TrainBackend`."""
        self._step.abort()
        self._optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ log-probs

    @torch.no_grad()
    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """See `TrainBackend`. Legal while a step is open. Raises ValueError for `reference` without a reference."""
        model = self._reference if reference else self._policy
        if model is None:
            raise ValueError("trainer.with_reference: got False, expected True for log-probs of the reference model")
        return [self._logprobs(model, micro.batch, temperature) for micro in itertools.islice(micros, count)]

    # ------------------------------------------------------------ weights and state

    def export_weights(self) -> Mapping[str, torch.Tensor]:
        """See `TrainBackend`. bfloat16 with `mixed_precision`, as forward computes with; else float32."""
        dtype = torch.bfloat16 if self._half else torch.float32
        return full_weights(self._policy.model, dtype, keep=self._rank == 0)

    def save(self, path: str) -> None:
        """See `TrainBackend`. A checkpoint of that name is replaced once the new one is whole.

        Raises RuntimeError while a step is open, ValueError when `path` exists and is no checkpoint.
        """
        self._step.require_closed("save")
        save_checkpoint(path, self._state(), self._rank, self._world)

    def load(self, path: str) -> None:
        """See `TrainBackend`. The reference stays the config's model; learning rate and the like stay the config's.

        Raises RuntimeError while a step is open, ValueError when `path` is no whole checkpoint of this model.
        """
        self._step.require_closed("load")
        load_checkpoint(path, self._state(), self._rank, self._world)

    def export_model(self, path: str) -> None:
        """See `TrainBackend`. Weights as `export_weights` gives them. Raises ValueError when `path` exists."""
        weights = self.export_weights()
        on_first_rank(
            lambda: write_folder(path, self._policy.model, weights, self._config.model), self._rank, self._world
        )

    def close(self) -> None:
        """Drop an open step. The process group is its owner's to end."""
        self.abort_step()

    # ------------------------------------------------------------ inside

    def _accumulate(self, micro: MicroBatch) -> None:
        with self._step.accumulating() as temperature:
            layout = lay_out(micro.batch, self._device)
            with self._precision():
                logprobs, entropy = self._policy(
                    layout.input_ids, layout.source, layout.targets, temperature, self._config.entropy
                )
            inputs = self._loss_inputs(micro, layout, logprobs)
            self._step.add(inputs, layout.row_tokens.numpy(), micro.group_ids, entropy).backward()

    def _logprobs(self, model: CausalLM, batch: Batch, temperature: float) -> torch.Tensor:
        layout = lay_out(batch, self._device)
        with self._precision():
            values, _ = model(layout.input_ids, layout.source, layout.targets, temperature)
        if isinstance(model, FSDPModule):
            model.reshard()  # the root keeps its parameters gathered for a backward that does not come
        result = torch.zeros(len(batch.jagged("input_ids").values), dtype=torch.float32)
        result[layout.index] = values.cpu()
        return result

    def _shard(self, module: CausalLM, *, offload: bool) -> CausalLM:
        """Shard each decoder layer, then the rest, over the ranks; `offload` keeps the shards in host memory.

        One rank is left unwrapped: there is nothing to shard, and hooks and copies would only cost.
        """
        if self._mesh is None:
            return module.to(self._device)
        names = module.model._no_split_modules or ()
        layers = [child for child in module.modules() if type(child).__name__ in names]
        if not layers:
            raise ValueError(
                f"trainer.model: {type(module.model).__name__} does not name its layers, cannot be sharded"
            )
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        precision = half if self._half else MixedPrecisionPolicy()
        host = CPUOffloadPolicy() if offload and self._device.type == "cuda" else OffloadPolicy()
        for part in (*layers, module):
            sharded = fully_shard(part, mesh=self._mesh, mp_policy=precision, offload_policy=host)
            _sum_gradients(sharded)
        return module

    def _precision(self) -> AbstractContextManager[object]:
        """One rank has no FSDP to cast for it."""
        if self._mesh is None and self._half:
            return torch.autocast(self._device.type, torch.bfloat16)
        return nullcontext()

    def _loss_inputs(self, micro: MicroBatch, layout: RowLayout, logprobs: torch.Tensor) -> LossInputs:
        def column(name: str, why: str) -> torch.Tensor:
            if name not in micro.batch:
                raise ValueError(f"microbatch: has no {name!r}, which {why} needs; it has {', '.join(micro.batch)}")
            return micro.batch.jagged(name).values[layout.index].to(self._device)

        rollout = column("rollout_logprobs", "every step")
        recompute = self._config.prev == "recompute"
        return LossInputs(
            logprobs=logprobs,
            prev_logprobs=column("prev_logprobs", "algorithm.prev_logprobs = 'recompute'") if recompute else rollout,
            rollout_logprobs=rollout,
            ref_logprobs=column("ref_logprobs", "loss.kl_coef") if self._config.loss.kl_coef > 0 else None,
            advantages=torch.tensor(micro.advantages, device=self._device)[layout.row_ids],
            row_ids=layout.row_ids,
            row_tokens=layout.row_tokens.to(self._device),
        )

    def _state(self) -> dict[str, torch.Tensor]:
        return training_state(self._policy.model, self._optimizer, self._steps)


def _sum_gradients(module: FSDPModule) -> None:
    """Have a shard's gradients summed over the ranks, not averaged: the step divides once, by N of all ranks."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, which a factor asks for otherwise
