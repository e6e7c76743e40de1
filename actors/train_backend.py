"""Defines what a train backend has to offer to a train worker, and the microbatches and results between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..codecs.batch import Batch
from ..codecs.blobs import BlobRows
from .adapters.spec import AdapterSpec
from .weight_sync.base_offer import BaseRecord
from .weight_sync.plan.regions import Region


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows for one forward and backward pass, reduced to the data that this rank needs. All ranks of a data-parallel
    replica get the same rows."""

    batch: Batch
    """Columns of the rows, packed without padding; the backend may pad them or repack them. A pipeline stage gets only
    the fields that it uses: a middle stage gets only `routed_experts`, and every stage gets only its own layers of that
    field. A context-parallel rank gets only its parts of each row (`codecs.context_slices`)."""
    lengths: np.ndarray
    """Number of tokens in each row, int64 `[N]`. This is the length of the whole row, even if context parallelism gives
    this rank only parts of it."""
    advantages: np.ndarray
    """Advantage of each row, float32 `[N]`."""
    group_ids: np.ndarray
    """Id of each row's group (all rows of one prompt), int64 `[N]`."""
    group_tokens: np.ndarray | None = None
    """For each row, the number of response tokens in its entire group that this step trains on, int64 `[N]`. None
    unless `loss.aggregation` is `prompt`; no other setting needs it."""
    row_tokens: np.ndarray | None = None
    """Number of response tokens in each whole row that this step trains on, int64 `[N]`. A pipeline stage without the
    column `response_mask` cannot count them itself. None unless `trainer.moe.aux_loss_coef` is above 0."""
    counted: np.ndarray | None = None
    """1 for each row that counts in the step's mean over rows or groups, although it may be cut off and masked, else 0:
    int64 `[N]`. None: rows with a trained token count."""
    pictures: BlobRows | None = None
    """Pictures of the rows, each read once: for each, the arguments by which the model's vision tower takes it, and
    `num_tokens`. Ranks that run no tower have no pixels. None for rows without a column of pictures."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs that a teacher gives to the tokens of rows, aligned with `input_ids`. They are 0 at each row's first
    token, and wherever the response mask is 0."""

    logprobs: torch.Tensor
    """Log-prob of each token, float32 `[tokens]` on the CPU."""
    top_ids: torch.Tensor | None = None
    """Ids of the k most likely tokens at each token's position, int `[tokens, k]`; None if not asked for."""
    top_logprobs: torch.Tensor | None = None
    """Log-probs of these tokens, float32 `[tokens, k]`; None if not asked for."""


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Report of one `offload` or `onload` of a train rank: bytes moved, seconds, and effect on device memory. Counts
    and seconds are 0 if there was nothing to do."""

    bytes_moved: int
    """Number of bytes copied between the device and host memory."""
    copy_s: float
    """Seconds that the copies took."""
    memory_s: float
    """Seconds spent on releasing or reallocating device memory. Allocating host memory does not count here; it happens
    only once."""
    groups_s: float
    """Seconds spent on destroying or re-creating the process groups; 0.0 if they are kept."""
    device_bytes_before: int
    """Bytes of the rank's GPU that were in use before the call, by all processes together; 0 on a CPU."""
    device_bytes_after: int
    """Bytes of the rank's GPU that were in use after the call, by all processes together; 0 on a CPU."""


def device_bytes_in_use() -> int:
    """Return the number of bytes of the current GPU that are in use, by all processes together; 0 without a GPU.

    torch's allocator is not asked, because its number leaves out NCCL's buffers and the CUDA context.
    """
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def offloaded_error(call: str) -> RuntimeError:
    """Return the error for a call that needs the weights while they are offloaded. call: name of the method."""
    return RuntimeError(f"{call}: the backend is offloaded; onload comes first")


class TrainBackend(Protocol):
    """Protocol of a model in training, from the view of one rank of the train mesh. Each step is a sequence of calls:

    `begin_step -> accumulate* -> finish_step | abort_step`. Every rank of the mesh makes the same calls in the same
    order, because most of them are collective.
    """

    def begin_step(self, temperature: float = 1.0) -> None:
        """Start a step and set gradients and running sums to zero. Raises RuntimeError if a step is already open."""
        ...

    def accumulate(self, micros: Iterable[MicroBatch], count: int) -> None:
        """Run the forward pass, the summed loss and the backward pass of `count` microbatches, one chunk of the step.
        Gradients are accumulated without scaling.

        A step may consist of any number of calls, but all ranks must make the same number of calls with the same
        counts. Microbatches are taken from `micros` one at a time, so that the next one can be read while the current
        one is computed. All of them have been taken at the end of the call, while a pipeline may keep some backward
        passes for the next call or for `finish_step`. Raises ValueError if there are fewer than `count`, as `logprobs`
        does.
        """
        ...

    def finish_step(self) -> dict[str, float]:
        """End the step: scale the gradients once by 1/N, clip them and step the optimizer. The loss denominator N, the
        number of tokens, sequences or groups as the loss defines it, is all-reduced first.

        Returns metrics over all ranks. When N is 0 or a gradient is not finite, the optimizer step is skipped and the
        metric `train/skipped` is 1.
        """
        ...

    def abort_step(self) -> None:
        """End an open step without an optimizer step, and discard its gradients and running sums. Idempotent."""
        ...

    def logprobs(
        self, micros: Iterable[MicroBatch], count: int, *, reference: bool = False, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return the log-probs of the tokens of each microbatch, aligned with `input_ids`. They are float32
        `[sum(lengths)]` on the CPU.

        The log-prob of a token is conditioned on the tokens before it. It is 0 at each row's first token and, if the
        batch has `response_mask`, wherever that mask is 0. reference: True asks for the log-probs of the reference
        model. The call is collective. In each data-parallel replica, the rank that writes the results to the data plane
        (`Topology.writer`) gets the log-probs of whole rows; other ranks get an empty list.
        """
        ...

    @property
    def adapter(self) -> AdapterSpec | None:
        """The adapter whose matrices `weights` yields; None if it yields the weights of the whole model."""
        ...

    @property
    def base_record(self) -> BaseRecord | None:
        """Digests of this rank's parts of an adapter's base; None without an adapter, or if none were taken."""
        ...

    @property
    def shares_features(self) -> bool:
        """True if only the first rank of a replica runs the vision tower. The others then need no pixels."""
        ...

    def weight_specs(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of each weight by its Hugging Face (HF) name, in the order of `weights`. The
        result is the same on every rank.

        The names are those of the HF model's parameters, with a layer's experts stacked into one tensor; tied
        parameters appear once. The call is not collective.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the HF name and the full tensor of each weight, gathered one weight (or fused module) at a time.

        The model is never gathered as a whole. The call is collective, so every rank must iterate to the end. On rank 0
        each tensor is complete, detached, on the backend's device, and valid until the next one is requested; on other
        ranks it is empty.
        """
        ...

    def weight_regions(self) -> Sequence[Sequence[Region]]:
        """Return the regions of the weights that each rank has, by rank: the same on every rank. The local tensor of a
        weight has the name of the weight. The call is not collective."""
        ...

    def own_weights(self) -> Callable[[str], torch.Tensor]:
        """Return the function that returns this rank's part of a weight by its name, as `weight_regions` describes it.

        Parts are contiguous, in any dtype, and may be live weights. The call is not collective.
        """
        ...

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write a sharded checkpoint of model, optimizer, schedule and RNG. Collective.

        With `wait=False` the checkpoint is written in the background, and a write error is raised by the next `save`,
        `wait_saved` or `close`.
        """
        ...

    def wait_saved(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete. If writing it failed, raise
        the error, but only once."""
        ...

    def load(self, path: str) -> None:
        """Load a checkpoint that `save` wrote; the number of ranks may differ from the number that wrote it.
        Collective."""
        ...

    def export_model(self, path: str) -> None:
        """Write a Hugging Face model folder (weights, config, tokenizer) from rank 0. Collective."""
        ...

    def offload(self) -> OffloadReport:
        """Move parameters, gradient buffers and optimizer state to host memory and give the device's memory back.
        Idempotent.

        Until `onload`, every call that needs the weights (`begin_step`, `logprobs`, `weights`, `save`, `load`,
        `export_model`) raises RuntimeError. Process groups are kept: `TrainWorker.offload` destroys them. The call
        first waits for a checkpoint that is being written. Raises RuntimeError while a step is open, and the error of
        the last write.
        """
        ...

    def onload(self) -> OffloadReport:
        """Undo `offload`: bring everything back to the device. Tensors to which other code holds references keep their
        storages. Idempotent."""
        ...

    def group_holders(self) -> Sequence[object]:
        """Return the objects through which all references to process groups are reached, so that they can be replaced.
        See `ProcessGroups`."""
        ...

    def close(self) -> None:
        """Discard an open step, wait for a checkpoint that is still being written, and release the backend's resources.
        If writing the checkpoint failed, the error is raised. Idempotent."""
        ...
