"""Makes the layers of a Qwen3 compute with the functions of an engine, and gives them a backward pass.

Two programs give the same log-probs only if they run the same kernels in the same order and round at the same places.
So the forward pass of each layer is written here as the engine computes it: queries, keys and values are one matrix
product, gate and up another, and each function is the engine's own. The backward pass need not be the engine's, which
has none; it is that of the plain formula, computed from the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ...layers import attend_rows


class EngineFunctions(Protocol):
    """The functions from which an engine computes a layer; `VllmKernels` has those of vLLM."""

    cos_sin: torch.Tensor

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...
    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor: ...
    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def gate(self, x: torch.Tensor) -> torch.Tensor: ...
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        ends: torch.Tensor,
        longest: int,
        scale: float,
    ) -> torch.Tensor: ...
    def divide(self, logits: torch.Tensor, temperature: float) -> torch.Tensor: ...
    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class _Engine(torch.autograd.Function):
    """Computes a result with the engine's function, and gradients with those of a plain formula of the same inputs."""

    @staticmethod
    def forward(ctx: Any, engine: Callable[..., Any], plain: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return engine(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        inputs = [one.detach().requires_grad_(need) for one, need in zip(ctx.saved_tensors, wanted, strict=True)]
        with torch.enable_grad(), _deterministic():
            outputs = ctx.plain(*inputs)
            found = iter(torch.autograd.grad(outputs, [one for one in inputs if one.requires_grad], grads))
        return None, None, *(next(found) if need else None for need in wanted)


class _Linear(torch.autograd.Function):
    """Computes the product with several weights side by side, `[T, sum of N]`, with the engine's function."""

    @staticmethod
    def forward(ctx: Any, engine: Callable[..., torch.Tensor], x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return engine(x, weights[0] if len(weights) == 1 else torch.cat(weights))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x = grads[0] @ torch.cat(weights) if ctx.needs_input_grad[1] else None
        parts = grads[0].split([len(one) for one in weights], dim=1)
        wanted = zip(parts, ctx.needs_input_grad[2:], strict=True)
        return None, of_x, *(part.t() @ x if need else None for part, need in wanted)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Context manager in which torch takes kernels that give the same result each time. Flash attention's backward pass
    otherwise adds in any order, also if torch only warns of that."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def use_exact_layers(model: Any, functions: EngineFunctions) -> None:
    """Make the decoder layers and the last norm of a Hugging Face Qwen3 compute with `functions`. Passes then need the
    arguments of packed rows (`position_ids`, `row_ends`, `longest_row`)."""
    for layer in model.model.layers:
        layer.forward = partial(_layer, layer, functions)
    last = model.model.norm
    last.forward = lambda hidden: _norm(functions, hidden[0], last)[None]


def differentiable(product: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return an engine's `product` of `x` `[T, K]` and a weight, with a backward pass."""

    def found(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: Any = _Linear.apply(product, x, weight)
        return result

    return found


def _layer(
    layer: Any,
    functions: EngineFunctions,
    hidden_states: torch.Tensor,
    *_args: Any,
    position_ids: torch.Tensor,
    row_ends: torch.Tensor,
    longest_row: int,
    **_: Any,
) -> torch.Tensor:
    """Return the output of a decoder layer for packed rows, `[1, S, H]`."""
    own, mlp, hidden = layer.self_attn, layer.mlp, hidden_states[0]
    positions, width = position_ids[0], own.head_dim
    normed = _norm(functions, hidden, layer.input_layernorm)
    projections = [own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]
    query, key, value = _linear(functions, normed, *projections).split([len(one) for one in projections], dim=-1)
    query, key = (
        _norm(functions, part.unflatten(-1, (-1, width)), norm).flatten(1)
        for part, norm in ((query, own.q_norm), (key, own.k_norm))
    )
    turned = partial(functions.rotate, positions=positions), partial(_rotate, positions, functions.cos_sin)
    query, key = _Engine.apply(*turned, query, key)  # pyright: ignore[reportGeneralTypeIssues]
    parts = [part.unflatten(-1, (-1, width)) for part in (query, key, value)]
    attend = partial(functions.attend, ends=row_ends, longest=longest_row, scale=own.scaling)
    mixed: Any = _Engine.apply(attend, partial(_attend, row_ends, longest_row, own.scaling), *parts)
    hidden = hidden + _linear(functions, mixed.flatten(1), own.o_proj.weight)
    normed = _norm(functions, hidden, layer.post_attention_layernorm)
    both = _linear(functions, normed, mlp.gate_proj.weight, mlp.up_proj.weight)
    gated: Any = _Engine.apply(functions.gate, _gate, both)
    return (hidden + _linear(functions, gated, mlp.down_proj.weight))[None]


def _linear(functions: EngineFunctions, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    product: Any = _Linear.apply(functions.linear, x, *weights)
    return product


def _norm(functions: EngineFunctions, x: torch.Tensor, norm: Any) -> torch.Tensor:
    epsilon: float = norm.variance_epsilon
    normed: Any = _Engine.apply(partial(functions.norm, epsilon=epsilon), partial(_rms_norm, epsilon), x, norm.weight)
    return normed


# ---------------- These are the plain formulas, whose gradients the backward pass takes.


def _rms_norm(epsilon: float, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), epsilon).to(x.dtype)


def _rotate(
    positions: torch.Tensor, cos_sin: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        left, right = x.unflatten(-1, (-1, cos_sin.shape[-1])).float().chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).flatten(1).to(x.dtype)

    return turned(query), turned(key)


def _gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _attend(
    ends: torch.Tensor, longest: int, scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    if query.is_cuda:
        return attend_rows(query, key, value, ends, ends, (longest, longest), scale)
    rows = []
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)
