"""Measures what 8-bit weights change in a model's log-probs, for each kind of layer apart.

A kind is the last part of the layers' names, such as `q_proj` or `experts.down_proj`. Only the weights of one kind are
rounded at a time, and activations never are. So the numbers say which layers are sensitive; they do not add up to the
engine's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....actors.engines.hf.model import load_model
from ....actors.engines.hf.quantized_layers import quantization_of
from ....codecs.weights.quantization import Scheme, dequantize, quantize


@dataclass(frozen=True, slots=True)
class Rounding:
    """Effect of rounding all layers of one kind."""

    num_layers: int
    weight_error: float
    """Root of the mean square of the rounding errors, divided by that of the weights."""
    mismatch_mean: float
    """Mean absolute difference of the log-probs of the rows' tokens, in nats."""


def rounding_by_kind(path: str, scheme: Scheme, rows: Sequence[np.ndarray], device: str) -> dict[str, Rounding]:
    """Return the effect of rounding by kind of layer, the largest mismatch first. path: folder or hub id of the model.
    rows: token ids, int64 `[L]`, of which all but the first are compared."""
    model = load_model(path, torch.float32).to(torch.device(device))
    kinds: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for name in quantization_of(path, scheme).names:
        layer = name.removesuffix(".weight").split(".")
        kinds[".".join(layer[-2:] if layer[-2] == "experts" else layer[-1:])].append(model.get_parameter(name))
    found: dict[str, Rounding] = {}
    with torch.no_grad():
        exact = _logprobs(model, rows)
        for kind, weights in kinds.items():
            error = total = 0.0
            kept = [weight.clone() for weight in weights]
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(dequantize(*quantize(own, scheme), torch.float32))
                error += (weight - own).square().sum().item()
                total += own.square().sum().item()
            mismatch = (_logprobs(model, rows) - exact).abs().mean().item()
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(own)
            found[kind] = Rounding(len(weights), (error / max(total, 1e-30)) ** 0.5, mismatch)
    return dict(sorted(found.items(), key=lambda item: -item[1].mismatch_mean))


def _logprobs(model: torch.nn.Module, rows: Sequence[np.ndarray]) -> torch.Tensor:
    found = []
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64)).to(next(model.parameters()).device)[None]
        table = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        found.append(table.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(found)
