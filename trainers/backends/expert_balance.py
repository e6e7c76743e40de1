"""Balances the use of experts in training with an auxiliary loss and biases of the routers, and measures their load.

    forward pass of a microbatch     each router's choice is counted, and the auxiliary loss is attached to its output
    backward pass                    the loss adds its gradient; layers that are computed again count nothing
    end of the step                  counts are summed over the ranks, the biases move once, metrics are made

A token is counted for the experts to which it was sent: the engine's choice where router replay installs it, else the
router's own choice. Forward passes without a backward pass are not counted.

In the formulas a router sends each token to k of E experts. `n_i` is the number of tokens that it sends to expert i,
and `p_ti` the probability that it gives to expert i for token t.

    auxiliary loss of a row of T tokens     E / (k T^2) * sum over i of n_i * (sum over t of p_ti)
    step of the bias of expert i            rate * sign(mean of n - n_i)

The loss is that of the Switch Transformer (Fedus et al. 2022, arXiv:2101.03961, equations 4 to 6), divided by k so that
it is 1 for even use. As in GShard (Lepikhin et al. 2020, arXiv:2006.16668) it is computed in groups of tokens and then
averaged; a group is a row. The whole step as one group would need the counts of the step before its first backward
pass, and a microbatch as a group would make gradients depend on how rows are divided into microbatches. The step of the
biases is that of Wang et al. 2024 (arXiv:2408.15664, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...actors.train_backend import MicroBatch
from ...codecs.tokens.routes import RouteSpec
from ..losses.aggregation import Aggregation
from .config import BackendConfig, MoeConfig
from .layers import uncompiled
from .rows.row_layout import to_device
from .train_step import StepTotals

ScoreKind = Literal["softmax", "sigmoid"]
"""Function by which a router turns logits into scores: over all experts together, or for each expert separately."""


def probabilities(logits: torch.Tensor, kind: ScoreKind) -> torch.Tensor:
    """Return the probabilities of all experts for each token, float32 `[T, E]`, with gradient.

    logits: the router's, `[T, E]`. Scores of sigmoids are divided by their sum (DeepSeek-V3, arXiv:2412.19437, equation
    19).
    """
    if kind == "softmax":
        return torch.softmax(logits, -1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def row_counts(used: torch.Tensor, owners: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return how many tokens of each row are sent to each expert, float32 `[N, E]`.

    used: bool `[T, E]`, true for the experts that a token is sent to. owners: row of each token, int64 `[T]`; -1 for
    tokens that do not count, such as padding. num_rows: N.
    """
    counts = torch.zeros(num_rows + 1, used.shape[1], dtype=torch.float32, device=used.device)
    # The owner -1 becomes N, the row that the slice drops.
    return counts.index_add_(0, owners % (num_rows + 1), used.float())[:num_rows]


def loss_slopes(counts: torch.Tensor, tokens: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the derivative of each row's auxiliary loss with respect to a token's expert probability. It is float32
    `[N, E]`. The loss of a row is the sum of slope times probability over its tokens and the experts.

    counts: numbers of tokens `[N, E]` of whole rows. tokens: number of tokens of each row, `[N]`.
    """
    scale = counts.shape[1] / (top_k * tokens.float().clamp(min=1) ** 2)
    return counts * scale[:, None]


def bias_steps(loads: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the number to add to the bias of each expert, float32 `[layers, E]`. It is `rate` for experts with fewer
    tokens than the layer's mean, -`rate` for those with more.

    loads: number of tokens of each expert in a whole step, `[layers, E]`.
    """
    return (rate * torch.sign(loads.mean(-1, keepdim=True) - loads)).float()


def load_metrics(loads: torch.Tensor, layers: Sequence[int]) -> dict[str, float]:
    """Return the metrics of the experts' load. loads: number of tokens of each expert in a whole step, float64
    `[layers, E]`. layers: the numbers of the decoder layers.

    `moe/load_imbalance` is the load of the fullest expert divided by the mean load, 1.0 at best, as a mean over layers,
    `moe/load_imbalance_max` that of the worst layer, and `moe/load_imbalance_layer_N` that of decoder layer N.
    `moe/idle_experts` is the number of experts of all layers that got no token. {} for a step without tokens.
    """
    means = loads.mean(-1)
    if not bool((means > 0).all()):
        return {}
    imbalance = loads.amax(-1) / means
    return {
        "moe/load_imbalance": float(imbalance.mean()),
        "moe/load_imbalance_max": float(imbalance.max()),
        "moe/idle_experts": float((loads == 0).sum()),
        **{f"moe/load_imbalance_layer_{layer}": float(one) for layer, one in zip(layers, imbalance, strict=True)},
    }


@dataclass(frozen=True, slots=True)
class RowShares:
    """The rows of a microbatch, and the weight of each row in the auxiliary loss of the step."""

    owners: torch.Tensor
    """Row of each input token, int64 `[T]`; -1 for tokens that do not count: padding, and the last token of a row,
    which predicts nothing."""
    tokens: torch.Tensor
    """Number of tokens of each whole row that count, float32 `[N]`."""
    weights: torch.Tensor
    """Weight of each row in the auxiliary loss, float32 `[N]`. The weights of a step add up to the denominator of its
    loss; they are 0 without an auxiliary loss."""


@dataclass(frozen=True, slots=True)
class LayerLoss:
    """The auxiliary loss of one layer on one microbatch, as a function of the probabilities of its router."""

    slopes: torch.Tensor
    """Factor for a token's probability of each expert, by the token's row, float32 `[N + 1, E]`. The last row is for
    padding."""
    owners: torch.Tensor
    """Row of each token as in `RowShares`, int64 `[T]`."""

    def of(self, probs: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar with gradient. probs: float32 `[T, E]`."""
        return (self.slopes[self.owners] * probs).sum()


class ExpertBalance:
    """Balances the experts of the layers that this rank computes. Outside of `training` it leaves routers alone."""

    def __init__(
        self,
        config: BackendConfig,
        spec: RouteSpec,
        stage: range,
        device: torch.device,
        biases: Sequence[torch.Tensor],
        *,
        kind: ScoreKind,
        groups: Sequence[dist.ProcessGroup],
        row_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        """Begin with all counts at zero.

        spec: shape of the routes of the whole model. stage: positions in `spec.layers` of the layers that this rank
        computes. biases: bias of each of these layers' routers, float32 `[num_experts]`; they are changed in place.
        kind: how the routers turn logits into scores. groups: process groups. A sum over one group after the other
        counts each token of a step once in each layer. row_groups: process groups for the same sum over the tokens of
        the rows that this rank shares with others.
        """
        assert not biases or len(biases) == len(stage), (len(biases), stage)
        self._config: MoeConfig = config.trainer.moe
        self._aggregation = Aggregation(config.loss.aggregation, config.loss.length_norm)
        self._spec, self._stage = spec, stage
        self._kind: ScoreKind = kind
        self._device, self._biases = device, list(biases)
        self._groups, self._row_groups = tuple(groups), tuple(row_groups)
        self._rows: RowShares | None = None
        self._losses: dict[int, LayerLoss] = {}
        """Losses of the layers that have run in the current forward pass."""
        self.begin_step()

    def begin_step(self) -> None:
        """Set all counts to zero."""
        layers = len(self._spec.layers)
        self._loads = torch.zeros(layers, self._spec.num_experts, dtype=torch.float64, device=self._device)
        self._totals = torch.zeros(layers, dtype=torch.float64, device=self._device)

    def shares(self, micro: MicroBatch, owners: torch.Tensor) -> RowShares:
        """Return the shares of a microbatch's rows in the auxiliary loss. owners: row of each input token on this rank,
        as in `RowShares`. Raises ValueError when there is an auxiliary loss and the microbatch has no `row_tokens`."""
        weights = torch.zeros(len(micro.lengths))
        if self._config.aux_loss_coef:
            if micro.row_tokens is None:
                raise ValueError("microbatch: it has no row_tokens, which trainer.moe.aux_loss_coef needs")
            weights = self._aggregation.row_weights(micro.row_tokens, micro.group_tokens)
        tokens = torch.from_numpy(micro.lengths - 1).float()
        return RowShares(owners, to_device(tokens, self._device), to_device(weights, self._device))

    @contextmanager
    def training(self, micro: MicroBatch, owners: torch.Tensor) -> Iterator[None]:
        """Context of the forward and backward passes of one microbatch. owners: as in `shares`."""
        assert self._rows is None, "a pass within a pass"
        self._rows = self.shares(micro, owners)
        try:
            yield
        finally:
            self._rows = None
            self._losses.clear()

    @uncompiled  # torch.compile must leave this method alone, because its effect depends on the pass.
    def balance(self, layer: int, logits: torch.Tensor, used: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Count the choice of a router and return its `gates`, to which the auxiliary loss is attached.

        layer: position among the layers that this rank computes. logits: the router's, `[T, E]`. used: bool `[T, E]`,
        true for the experts that each token is sent to. gates: factors of the experts' outputs, of any shape.
        """
        if self._rows is None:
            return gates
        again = layer in self._losses
        if not again:
            self._losses[layer] = self.count(self._rows, layer, used)
        return self.attach(self._losses[layer], layer, logits, gates, again=again)

    @torch.no_grad()
    def count(self, rows: RowShares, layer: int, used: torch.Tensor) -> LayerLoss:
        """Add the choice of layer number `layer` to the counts of the step, and return its auxiliary loss. Collective
        over the ranks that share rows, if there is an auxiliary loss."""
        counts = row_counts(used, rows.owners, len(rows.tokens))
        self._loads[self._stage[layer]] += counts.sum(0)
        if self._config.aux_loss_coef:
            _reduce(counts, self._row_groups)
        slopes = loss_slopes(counts, rows.tokens, self._spec.top_k) * rows.weights[:, None]
        return LayerLoss(torch.cat([slopes, slopes.new_zeros(1, slopes.shape[1])]), rows.owners)

    def attach(
        self, loss: LayerLoss, layer: int, logits: torch.Tensor, gates: torch.Tensor, *, again: bool
    ) -> torch.Tensor:
        """Return `gates` with the auxiliary loss attached, and add the loss to the step's sum unless `again`. `again`
        is True for a layer that is computed again."""
        if not self._config.aux_loss_coef:
            return gates
        value = loss.of(probabilities(logits, self._kind))
        if not again:
            self._totals[self._stage[layer]] += value.detach()
        if not torch.is_grad_enabled():
            return gates
        attached = _Attach.apply(gates, self._config.aux_loss_coef * value)
        assert isinstance(attached, torch.Tensor)
        return attached

    @torch.no_grad()
    def finish(self, totals: StepTotals) -> dict[str, float]:
        """End the step: move the biases, if the step was applied, and return its metrics. Collective.

        `moe/aux_loss` is the auxiliary loss without its coefficient, as a mean over layers, 1.0 at best. `moe/bias_max`
        is the largest absolute bias of an expert. See `load_metrics` for the others.
        """
        both = torch.cat([self._loads.flatten(), self._totals])
        _reduce(both, self._groups)
        layers = len(self._spec.layers)
        loads, losses = both[:-layers].view(layers, -1), both[-layers:]
        figures = load_metrics(loads.cpu(), self._spec.layers)
        if self._config.aux_loss_coef and totals.denominator:
            figures["moe/aux_loss"] = float(losses.mean()) / totals.denominator
        if self._config.bias_update_rate:
            if totals.applies:
                steps = bias_steps(loads, self._config.bias_update_rate)
                for layer, bias in zip(self._stage, self._biases, strict=True):
                    bias += steps[layer].to(bias.device)
            figures["moe/bias_max"] = self._largest_bias()
        return figures

    def _largest_bias(self) -> float:
        parts = [bias.abs().max().double() for bias in self._biases]
        largest = torch.stack(parts).max().to(self._device) if parts else torch.zeros((), device=self._device).double()
        _reduce(largest, self._groups, dist.ReduceOp.MAX)
        return float(largest)


def _reduce(
    tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup], operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> None:
    """Reduce `tensor` in place over one group after the other. Collective over each of them."""
    for group in groups:
        dist.all_reduce(tensor, operation, group)


class _Attach(torch.autograd.Function):
    """Passes `gates` on unchanged; in backward the loss gets the gradient 1, like a summand of the step's loss.

    The loss cannot be returned by the layer, whose backward pass must run within the hooks of FSDP and of
    recomputation. Megatron's `MoEAuxLossAutoScaler` does the same.
    """

    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)
