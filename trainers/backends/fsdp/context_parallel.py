"""Splits packed rows over the context-parallel ranks of the fsdp backend, and checks that a model can be split so.

Everything in a decoder layer but attention computes each token for itself, so it needs no change. Attention gathers the
keys and values of all ranks (see `context_attention`), in place of the attention function of the HF model. A model with
layers that look across tokens in another way, such as convolutions and state-space layers, is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from ....actors.protocols import ROLLOUT_SCHEMA
from ....actors.train.topology import Place, Topology
from ....actors.train_backend import MicroBatch
from ....codecs.batch import Batch, Jagged
from ....codecs.tokens.packed_rows import slice_batch
from ..rows.context_attention import AttentionPlan, attend_by_plan
from ..rows.packed_rows import pack_rows
from ..rows.row_layout import RowLayout, lay_out
from .causal_lm import CausalLM
from .row_checks import TOLERANCE, on_any_rank, token_counts
from .sharding import give_back

NAME = "headrace_context"
"""Name under which transformers knows the attention function."""


def split_rows(
    micro: MicroBatch,
    topology: Topology,
    place: Place,
    device: torch.device,
    *,
    routes: torch.Tensor | None = None,
    missing_route: int = 0,
    with_owners: bool = False,
) -> RowLayout:
    """Lay out this rank's part of the rows of a microbatch, whose columns have the rank's tokens only.

    Arguments and errors are those of `pack_rows`. The layout's `row_tokens` has the wanted tokens of this rank, those
    whose log-probs it computes.
    """
    rows = pack_rows(
        micro, topology, place, device, packed=True, routes=routes, missing_route=missing_route, with_owners=with_owners
    )
    assert rows.input_ids is not None, "every rank of this backend gets token ids"
    return RowLayout(
        input_ids=rows.input_ids,
        position_ids=rows.positions[None],
        ends=None,
        longest=max(int(micro.lengths.max(initial=0)) - 1, 1),
        source=rows.source,
        targets=rows.targets,
        row_ids=rows.row_ids,
        row_tokens=rows.row_tokens,
        index=rows.index,
        routes=rows.routes,
        owners=rows.owners,
        plan=rows.attention,
        whole_index=rows.whole_index,
        allowed=rows.allowed,
    )


def require_splittable(model: Any, cp: int) -> None:
    """Raise ValueError, naming `trainer.cp`, if a model looks across tokens by other means than replaceable attention.

    model: a HF model. Its attention can be replaced if the model uses the functions that transformers registers.
    """
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    why = ""
    if kinds or any(isinstance(child, nn.Conv1d) for child in model.modules()):
        why = f"its layers look across tokens by {', '.join(sorted(kinds)) or 'convolutions'}"
    elif not model._supports_attention_backend:
        why = "its attention function cannot be replaced"
    elif getattr(config, "attn_logit_softcapping", None):
        why = "its attention has a soft cap, which the kernels do not have"
    if why:
        raise ValueError(f"trainer.cp: got {cp}, expected 1 for {type(model).__name__}, because {why}")


def use_context_attention(module: CausalLM, group: dist.ProcessGroup) -> None:
    """Make `module` attend to the tokens of all ranks of `group`, by the plans of its layouts.

    Attention gets the group as an argument, because the group is replaced when groups are formed again.
    """
    AttentionInterface.register(NAME, _attend)
    module.model.set_attn_implementation(NAME)
    module.context = group


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    plan: AttentionPlan | None = None,
    group: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within the rows of `plan`. `query` is `[1, heads, S, D]`, `key` and `value` are
    `[1, kv_heads, S, D]`; s_aux: logits of the heads' sinks, `[heads]`. Returns `[1, S, heads, D]`."""
    if plan is None or group is None:
        raise ValueError(
            "trainer.cp: got a number above 1, expected 1, because the model's layers do not pass what they get on to "
            f"their {type(module).__name__}"
        )
    assert attention_mask is None, "HF makes a mask only for attention functions that have a mask function"
    q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return attend_by_plan(q, k, v, plan, group, scale, window=sliding_window, sinks=s_aux)[None], None


@torch.no_grad()
def check_context(
    module: CausalLM,
    topology: Topology,
    place: Place,
    group: dist.ProcessGroup,
    precision: AbstractContextManager[object],
    *,
    device: torch.device,
    half: bool,
    longest: int,
) -> None:
    """Switch `module` to context-parallel attention, and check that made-up rows keep their log-probs.

    The rows are longer than every number of tokens in the model's config at which it begins to compute something else,
    as far as rows of `longest` tokens can be. Collective. Raises ValueError on every rank when they differ on one.
    """
    config = module.model.config.get_text_config()
    counts = [count for count in token_counts(config.to_dict()) if count <= longest]
    length = max([2 * topology.pad_multiple, *counts]) + topology.pad_multiple + 1
    lengths = np.array([length, 3], np.int64)
    ids = torch.arange(int(lengths.sum()), dtype=torch.int32) * 7 % config.vocab_size
    batch = Batch(ROLLOUT_SCHEMA.subset(("input_ids",)), 2, {"input_ids": Jagged(ids, lengths)})
    layout = lay_out(batch, device)
    with precision:
        values = module(layout, 1.0).logprobs
        give_back(module)
        use_context_attention(module, group)
        part = slice_batch(batch, lengths, topology.pad_multiple, topology.cp, place.cp)
        zeros = np.zeros(2, np.int64)
        micro = MicroBatch(part, lengths, zeros.astype(np.float32), zeros, zeros, zeros)
        split = split_rows(micro, topology, place, device)
        own = module(split, 1.0).logprobs
        give_back(module)
    whole = torch.zeros(int(lengths.sum()), dtype=values.dtype, device=device)
    whole[layout.index.to(device)] = values
    far = (own - whole[split.whole_index]).abs().max() if len(own) else values.new_zeros(())
    tolerance = TOLERANCE[torch.bfloat16 if half else torch.float32] * (1 + values.abs().mean())
    [differs] = on_any_rank(far > tolerance, device=device)
    if differs:
        raise ValueError(
            f"trainer.cp: got {topology.cp}, expected 1 for {type(module.model).__name__}, because its log-probs "
            "change when its rows are split over ranks"
        )
