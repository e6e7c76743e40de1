"""Defines routes, the experts that a model's routers choose for each token, and checks, cuts and joins arrays of them.

The route of a token is an array `[layers, k]`: for each layer with experts, in the order of the model, the ids of the
k experts that the layer's router chose while the model computed that token. The route affects the log-prob of the next
token. A row of L tokens has routes for its tokens 0 .. L-2; its last token never went through the model, and its route
is missing. A route is missing as a whole or not at all. All entries of a missing route are the value of `missing_mark`,
which is never the id of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..schema import Field, Kind

ROUTES = "routed_experts"
"""Name of the field that holds the routes of a row's tokens."""
MOST_BYTE_EXPERTS = 255
"""Largest number of experts per layer whose ids are stored as bytes. The byte 255 remains free to mark a missing
route."""


def routes_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype of expert ids in memory, in the store and on the wire. It is uint8 for models of up to 255
    experts per layer, else int16. Raises ValueError for a number of experts that does not fit int16."""
    if not 1 <= num_experts <= 1 << 15:
        raise ValueError(f"num_experts: got {num_experts}, expected a number from 1 to {1 << 15}")
    return torch.uint8 if num_experts <= MOST_BYTE_EXPERTS else torch.int16


def missing_mark(num_experts: int) -> int:
    """Return the value of every entry of a missing route: 255 in bytes, -1 in int16. It is never an expert's id."""
    return 255 if routes_dtype(num_experts) is torch.uint8 else -1


def num_experts(model: Any) -> int:
    """Return the number of experts that a router of a model chooses from; 0 for a dense model.

    model: a HF config, or an object with the content of a config.json as attributes. Models like DeepSeek-V3 count
    shared experts separately and call the others routed.
    """
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    return next((count for name in names if (count := getattr(model, name, None))), 0)


_KINDS = {"layers_block_type": "moe", "hybrid_override_pattern": "E"}
"""Key of a config that lists what each decoder layer is -> what it says of a layer with experts, if it says that of
one (Nemotron-H). Jamba and Granite list other things there."""


def is_expert_layer(model: Any, layer: int) -> bool:
    """Return whether decoder layer `layer` (from 0) of a model has experts instead of an MLP.

    model: a HF config, or an object with the content of a config.json as attributes.
    """
    if not num_experts(model) or layer in (getattr(model, "mlp_only_layers", None) or ()):
        return False
    if kinds := getattr(model, "mlp_layer_types", None):
        return kinds[layer] == "sparse"
    for name, sparse in _KINDS.items():
        if sparse in (kinds := getattr(model, name, None) or ()):
            return kinds[layer] == sparse
    if (listed := getattr(model, "moe_layers", None)) is not None:
        return layer in listed
    first = getattr(model, "first_k_dense_replace", None) or getattr(model, "num_dense_layers", None) or 0
    first = getattr(model, "moe_layer_start_index", None) or first
    last = getattr(model, "moe_layer_end_index", None)
    if layer < first or (last is not None and 0 <= last < layer):
        return False
    if period := getattr(model, "expert_layer_period", None):
        return layer % period == model.expert_layer_offset
    step = getattr(model, "decoder_sparse_step", None) or getattr(model, "moe_layer_interval", None) or 1
    return (layer + 1) % step == 0


def expert_layers(model: Any) -> tuple[int, ...]:
    """Return the indices (from 0) of the decoder layers of a model that have experts, in order; () for a dense model.

    model: a HF config, or an object with the content of a config.json as attributes.
    """
    count = getattr(model, "num_hidden_layers", None) or 0
    return tuple(layer for layer in range(count) if is_expert_layer(model, layer))


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """Shape of the routes of one model, the same in engines, rows and train backends."""

    layers: tuple[int, ...]
    """Indices (from 0) of the model's decoder layers with experts, in order. Their number is the routes' first trailing
    dimension."""
    top_k: int
    """Number of experts that each layer chooses for a token. It is the routes' last dimension."""
    num_experts: int
    """Number of experts of each of these layers; ids are 0 .. num_experts - 1."""
    hidden_layers: int
    """Number of all decoder layers of the model, those without experts included."""

    @staticmethod
    def of(model: Any) -> RouteSpec | None:
        """Return the spec of a model, or None for a model without experts.

        model: a HF config, or an object with the content of a config.json as attributes.
        """
        layers = expert_layers(model)
        if not layers:
            return None
        top_k = getattr(model, "num_experts_per_tok", None) or model.moe_k
        return RouteSpec(layers, int(top_k), num_experts(model), int(model.num_hidden_layers))

    @property
    def trailing(self) -> tuple[int, int]:
        """Shape `[layers, k]` of the route of one token."""
        return len(self.layers), self.top_k

    @property
    def dtype(self) -> torch.dtype:
        return routes_dtype(self.num_experts)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.dtype is torch.uint8 else np.int16)

    @property
    def mark(self) -> int:
        """Value of every entry of a missing route."""
        return missing_mark(self.num_experts)

    @property
    def token_bytes(self) -> int:
        """Number of bytes of the route of one token."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    @property
    def field(self) -> Field:
        """Declaration of the field `routed_experts` in the schema of the rows. Padding is marked as missing."""
        return Field(ROUTES, Kind.PER_TOKEN, self.dtype, self.trailing, pad_value=self.mark, shared=True)

    def missing(self, tokens: int) -> np.ndarray:
        """Return `tokens` missing routes, `[tokens, layers, k]`."""
        return np.full((tokens, *self.trailing), self.mark, self.numpy_dtype)


def select_moe_layers(routes: np.ndarray, spec: RouteSpec) -> np.ndarray:
    """Return the routes that an engine reported as a new array `[tokens, layers, k]` of `spec`'s dtype. It has only the
    layers with experts.

    routes: integers `[tokens, hidden layers or layers with experts, k]`. Engines report layers without experts as
    zeros, which `check_routes` would take for duplicates, so select the layers before any check. The order of the k
    experts is kept. Raises ValueError for another shape, and for an id that no expert has.
    """
    layers, top_k = spec.trailing
    if routes.ndim != 3 or routes.shape[1] not in (spec.hidden_layers, layers) or routes.shape[2] != top_k:
        raise ValueError(
            f"routes: got shape {tuple(routes.shape)}, expected [tokens, {spec.hidden_layers} or {layers}, {top_k}] "
            f"(layers with experts: {list(spec.layers)})"
        )
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < spec.num_experts:
        raise ValueError(
            f"routes: got expert ids from {int(routes.min())} to {int(routes.max())}, expected 0 to "
            f"{spec.num_experts - 1}"
        )
    if routes.shape[1] != layers:
        routes = routes[:, list(spec.layers)]
    return np.array(routes, spec.numpy_dtype, order="C")


def missing_tokens(routes: np.ndarray | torch.Tensor, spec: RouteSpec) -> Any:
    """Return which tokens have no route, bool `[tokens]`, as an array or a tensor like `routes`.

    routes: `[tokens, layers, k]`. Only the first entry of each route is read, because `check_routes` refuses routes
    that are missing in part.
    """
    return routes[:, 0, 0] == spec.mark


class RoutesDamaged(ValueError):
    """Routes that no router can have chosen: an id out of range, the same expert twice, or a route missing in part."""


def check_routes(routes: np.ndarray, spec: RouteSpec, key: str) -> None:
    """Raise RoutesDamaged if a route is one that no router can have chosen. That is an id out of range, the same expert
    twice in a layer, or a route that is missing only in part. The error names the row's `key`, the token and the layer.

    routes: `[tokens, layers, k]`. Also raises it for another shape or dtype.
    """
    if routes.shape[1:] != spec.trailing or routes.dtype != spec.numpy_dtype:
        raise RoutesDamaged(
            f"{key}: routes of shape {tuple(routes.shape)} and type {routes.dtype}, expected [tokens, "
            f"{spec.trailing[0]}, {spec.trailing[1]}] and {spec.numpy_dtype}"
        )
    marked = (routes == spec.mark).reshape(len(routes), -1)
    missing = marked.all(1)
    ordered = np.sort(routes, axis=2)
    wrong = (ordered[:, :, 0] < 0) | (ordered[:, :, -1] >= spec.num_experts)
    wrong |= (ordered[:, :, 1:] == ordered[:, :, :-1]).any(2)
    wrong[missing] = False
    if wrong.any():
        token, layer = (int(index) for index in np.argwhere(wrong)[0])
        raise RoutesDamaged(
            f"{key}: token {token}, layer {spec.layers[layer]}: experts {routes[token, layer].tolist()}, expected "
            f"{spec.top_k} different ids from 0 to {spec.num_experts - 1}, or {spec.mark} in all layers of the token"
        )


def join_routes(pieces: Sequence[np.ndarray], starts: Sequence[int], spec: RouteSpec) -> np.ndarray:
    """Return the routes of one sequence whose pieces were generated one after another, `[tokens, layers, k]`.

    pieces: for each request, the routes `[n, layers, k]` of its tokens, which begin at index `starts[i]` of the
    sequence. Where pieces overlap, the earlier one is kept, because the next tokens were sampled with its routes.
    Tokens that no piece covers have missing routes.
    """
    end = max((start + len(piece) for piece, start in zip(pieces, starts, strict=True)), default=0)
    joined = spec.missing(end)
    for piece, start in reversed(list(zip(pieces, starts, strict=True))):
        joined[start : start + len(piece)] = piece
    return joined


def align_routes(routes: np.ndarray | None, length: int, spec: RouteSpec) -> np.ndarray:
    """Return the routes of a row of `length` tokens, `[length, layers, k]`.

    routes: routes of the row's first tokens, or None if there are none. Tokens after them have no route; the last token
    never has one.
    """
    aligned = spec.missing(length)
    if routes is not None:
        count = min(len(routes), max(length - 1, 0))
        aligned[:count] = routes[:count]
    return aligned
