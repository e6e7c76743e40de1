"""Builds the inputs of the loss from the columns of a microbatch, restricted to the tokens that are trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...actors.columns import ColumnConfig
from ...actors.protocols import MicroBatch
from ..losses.terms import LossInputs
from .config import BackendConfig
from .row_layout import to_device


def loss_inputs(
    config: BackendConfig,
    micro: MicroBatch,
    *,
    index: torch.Tensor,
    row_ids: torch.Tensor,
    row_tokens: torch.Tensor,
    logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    reduce_rows: Callable[[torch.Tensor], torch.Tensor] | None,
) -> LossInputs:
    """Build the `LossInputs` of a microbatch for its trained tokens.

    `index` has the positions of these tokens in the microbatch's columns (int64 `[T]`, on the CPU). The other arguments
    are as in `LossInputs`; `entropy` is None unless it is trained on, and `row_tokens` may be on any device. Raises
    ValueError naming a missing column.
    """
    device = logprobs.device

    def column(name: str, why: str) -> torch.Tensor:
        if name not in micro.batch:
            raise ValueError(f"microbatch: has no {name!r}, which {why} needs; it has {', '.join(micro.batch)}")
        return to_device(micro.batch.jagged(name).values[index], device)

    loss = config.loss
    rollout = column("rollout_logprobs", "every step")
    if config.prev == "recompute" or config.prev == "fixed" and "prev_logprobs" in micro.batch:
        prev = column("prev_logprobs", f"prev = {config.prev!r}")
    else:
        prev = rollout if config.prev == "rollout" else logprobs.detach()
    groups = None
    if loss.aggregation == "prompt":
        if micro.group_tokens is None:
            raise ValueError("microbatch: has no group_tokens, which loss.aggregation = 'prompt' needs")
        groups = to_device(torch.from_numpy(micro.group_tokens), device)
    return LossInputs(
        logprobs=logprobs,
        prev_logprobs=prev,
        rollout_logprobs=rollout,
        ref_logprobs=column("ref_logprobs", "loss.kl_coef") if loss.kl_coef > 0 else None,
        advantages=to_device(torch.tensor(micro.advantages), device)[row_ids],
        row_ids=row_ids,
        row_tokens=to_device(row_tokens, device),
        group_tokens=groups,
        entropy=entropy,
        reduce_rows=reduce_rows,
        columns={own.name: _own_column(own, micro, index, device) for own in config.columns},
    )


def _own_column(own: ColumnConfig, micro: MicroBatch, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    if own.kind == "per_sample":
        return to_device(micro.batch.tensor(own.name), device)
    return to_device(micro.batch.jagged(own.name).values[index], device)
