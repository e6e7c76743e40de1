"""Computes the attention of vision towers whose patches see only those of their picture or window, in one kernel.

Code of transformers calls its attention function once for each window, unless the function's name says that it is
flash attention. A picture of 640 x 640 pixels has 36 windows in each layer of Qwen2.5-VL, so that a GPU waits for the
many calls.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

WINDOWS = "headrace_flash_windows"
"""Name of `attend_windows` among the attention functions of transformers, which look for "flash" in it."""


def attend_windows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: torch.Tensor | int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within windows as an attention function of transformers, in bfloat16 or float16.

    query, key, value: `[1, heads, N, D]`, window after window. attention_mask: None. cu_seq_lens_q: 0, then the end of
    each window, int32 `[windows + 1]`. max_length_q: largest number of patches of a window. Returns
    `[1, N, heads, D]`.
    """
    assert attention_mask is None, f"{type(module).__name__} has windows and a mask"
    q, k, v = (part[0].transpose(0, 1).to(value.dtype) for part in (query, key, value))
    longest, ends = int(max_length_q), cu_seq_lens_q.to(torch.int32)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out[None], None


def use_window_attention(model: Any) -> None:
    """Make the vision tower of a HF model use `attend_windows`, if its layers have windows and a replaceable function.

    The kernel needs a GPU and half precision.
    """
    vision = getattr(model.config, "vision_config", None)
    if vision is None or vision._attn_implementation != "sdpa":
        return
    layers = [part for part in model.modules() if getattr(part, "config", None) is vision and hasattr(part, "scaling")]
    if layers and all("cu_seqlens" in inspect.signature(part.forward).parameters for part in layers):
        AttentionInterface.register(WINDOWS, attend_windows)
        # `set_attn_implementation` looks for a package of flash attention when it reads such a name.
        vision._attn_implementation = WINDOWS
