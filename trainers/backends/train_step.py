"""Implements a train step on one rank: it sums over microbatches, counts, divides once, and updates.

    begin -> (accumulating: add -> backward)* -> finish -> apply | abort

The fsdp and megatron backends share it. Losses and metrics are kept as sums, denominators as counts. `finish` adds them
up over the ranks in one all-reduce, and finds the largest mismatch and token gradient of all ranks in another.
Gradients are divided by the denominator and clipped, and the optimizer steps at the learning rate of the schedule.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..losses.correction import MISMATCH_MAX, MISMATCH_SUMS, mismatch
from ..losses.terms import LossInputs, PolicyLoss
from .config import BackendConfig
from .optimizers.schedule import learning_rate


class StepState(enum.Enum):
    """The state of a train step. The values are the phrases that describe the state in error messages."""

    CLOSED = "no step is open"
    OPEN = "a step is open"
    BROKEN = "a microbatch of the open step failed; abort it"
    """State during each microbatch and after one that failed. Because an exception leaves the step in this state, a
    partial gradient is never applied."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The sums and counts of a finished train step over all ranks."""

    denominator: float
    """Denominator N of the step's mean loss: the number of tokens, sequences or groups, as the loss declares. 0 when
    there was nothing to train on."""
    grad_norm: float
    """Norm of the mean gradient, before clipping; 0.0 when there was nothing to train on."""
    metrics: dict[str, float]
    """Metrics of the step: `train/loss` (the summed loss divided by the denominator), `train/tokens`,
    `train/sequences`, the mean over tokens of each loss metric, and `logprob/mismatch_mean`, `logprob/mismatch_kl` and
    `logprob/mismatch_max` (see `losses.mismatch`). `train/sampled_entropy` is the mean of -log p over the sampled
    tokens, which estimates the entropy without bias where this policy sampled them. `train/token_gradient_share` is the
    largest share of one token in the sum over all tokens of the loss's absolute gradient with respect to the
    log-prob."""

    @property
    def applies(self) -> bool:
        """True if the optimizer can be stepped: some token was trained on, and the gradient's norm is finite."""
        return self.denominator > 0 and math.isfinite(self.grad_norm)

    def apply(
        self, config: BackendConfig, steps: torch.Tensor, update: Callable[[float, float], None]
    ) -> dict[str, float]:
        """Step the optimizer if the step has a usable gradient, and return the step's metrics.

        `steps`, the number of optimizer updates of the run so far (int64 scalar), is incremented in place when the
        optimizer is stepped. `update(factor, rate)` must multiply the summed gradients by `factor`, which combines
        division by the denominator and clipping, and step the optimizer at learning rate `rate`.
        """
        rate = learning_rate(config.trainer, int(steps), config.total_steps, config.updates_per_step)
        if self.applies:
            update(clip_coefficient(self.grad_norm, config.trainer.grad_clip) / self.denominator, rate)
            steps += 1
        return {
            **self.metrics,
            "train/grad_norm": self.grad_norm,
            "train/lr": rate,
            "train/skipped": 0.0 if self.applies else 1.0,
        }


WORST = tuple(f"logprob/unequal_{name}" for name in ("difference", "trainer", "engine", "group", "token"))
"""Names of the metrics of the token with the largest mismatch of an exact step: the difference of its log-probs, both,
the id of its group, and its number among the trained tokens of its row."""


class TrainStep:
    """Keeps the sums and counts of the open train step and checks that its methods are called in the right order."""

    def __init__(
        self,
        loss: PolicyLoss,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        recomputed: bool = False,
        with_entropy: bool = False,
        counts_rows: bool = True,
        exact: bool = False,
    ) -> None:
        """Prepare train steps with `loss`, whose sums are reduced over the ranks of `group`.

        `group` contains ranks that train on different tokens (data- and context-parallel); it is None for one rank
        alone. Ranks that compute the loss of the same tokens are in different groups. `recomputed` is true when the
        trainer itself computed `prev_logprobs`. `with_entropy` is true when `add` gets entropies, whose mean is then
        reported. `counts_rows` is False on all context-parallel ranks but the first, because these ranks share their
        rows.
        """
        self._loss = loss
        self._recomputed = recomputed
        self._exact = exact
        self._counts_rows = counts_rows
        self._device = device
        self._group = group
        self._names = ("loss", "sampled_entropy", *loss.metrics, *(("entropy",) if with_entropy else ()))
        self._state = StepState.CLOSED
        self._reset()

    def _reset(self) -> None:
        self._temperature = 1.0
        self._sums = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        self._mismatch = torch.zeros(len(MISMATCH_SUMS), dtype=torch.float64, device=self._device)
        # These are the largest mismatch and the largest gradient of a token.
        self._largest = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._worst = [0.0] * len(WORST)
        self._gradients = torch.zeros((), dtype=torch.float64, device=self._device)
        self._tokens = self._sequences = 0
        self._group_ids: set[int] = set()

    def begin(self, temperature: float) -> None:
        """Open a step. Raises RuntimeError when a step is open, ValueError when `temperature` is not above 0."""
        if self._state is not StepState.CLOSED:
            raise RuntimeError(f"begin_step: {self._state.value}; finish_step or abort_step comes first")
        if not temperature > 0:
            raise ValueError(f"temperature: got {temperature}, expected a number above 0")
        self._reset()
        self._temperature = temperature
        self._state = StepState.OPEN

    def require_closed(self, call: str) -> None:
        """Raise RuntimeError, with the name of the method `call` in its message, if a step is open."""
        if self._state is not StepState.CLOSED:
            raise RuntimeError(f"{call}: {self._state.value}; finish_step or abort_step comes first")

    def _require_open(self, call: str) -> None:
        if self._state is not StepState.OPEN:
            raise RuntimeError(f"{call}: {self._state.value}; {call} goes between begin_step and finish_step")

    @contextmanager
    def accumulating(self) -> Iterator[float]:
        """Context for the forward and backward passes of microbatches. It yields the step's temperature.

        Raises RuntimeError when no step is open or an earlier microbatch failed.
        """
        self._require_open("accumulate")
        self._state = StepState.BROKEN
        yield self._temperature
        self._state = StepState.OPEN

    def add(
        self,
        inputs: LossInputs,
        row_tokens: np.ndarray,
        group_ids: np.ndarray,
        entropy: torch.Tensor | None,
        counted: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Add one microbatch to the sums and return its summed loss, a scalar to call `backward` on.

        `row_tokens` (int64 `[N]`) has the values of `inputs.row_tokens`, but on the CPU, so that counting does not wait
        for a GPU. `group_ids` (int64 `[N]`) has the id of each row's group, the rows of one prompt. `entropy` (float32
        `[T]`) is None exactly when the step reports no entropy. `counted` (int64 `[N]`) is not 0 for rows that count in
        means over rows or groups; None: rows with tokens count.
        """
        sums = self._loss(inputs)
        extra = () if entropy is None else (entropy.detach().sum(),)
        surprise = -inputs.logprobs.detach().sum()
        self._sums += torch.stack([sums.loss.detach(), surprise, *sums.metrics.values(), *extra]).double()
        distance, largest = mismatch(inputs, recomputed=self._recomputed)
        self._mismatch += distance
        self._largest[0] = torch.maximum(self._largest[0], largest)
        if self._exact and largest != 0:
            self._find_worst(inputs, group_ids)
        if inputs.logprobs.requires_grad:
            inputs.logprobs.register_hook(self._weigh_tokens)
        self._tokens += len(inputs.logprobs)
        if not self._counts_rows:
            return sums.loss
        counts = (row_tokens if counted is None else counted) > 0
        self._sequences += int(counts.sum())
        if self._loss.denominator == "groups":
            self._group_ids.update(group_ids[counts].tolist())
        return sums.loss

    def _find_worst(self, inputs: LossInputs, group_ids: np.ndarray) -> None:
        """Remember the token of a microbatch with the largest mismatch, unless an earlier one has a larger one."""
        ours = inputs.prev_logprobs if self._recomputed else inputs.logprobs.detach()
        distance = (ours.double() - inputs.rollout_logprobs).abs().nan_to_num(nan=torch.inf)
        place, rows = int(distance.argmax()), inputs.row_ids.tolist()
        found = distance[place], ours[place], inputs.rollout_logprobs[place], group_ids[rows[place]]
        worst = [*map(float, found), float(rows[:place].count(rows[place]))]
        self._worst = max(self._worst, worst)

    def _worst_of_all(self) -> dict[str, float]:
        """Return the metrics WORST of the token with the largest mismatch on all ranks; {} if none has one."""
        worst = [torch.tensor(self._worst, dtype=torch.float64, device=self._device)]
        if self._group is not None:
            worst = [torch.empty_like(worst[0]) for _ in range(dist.get_world_size(self._group))]
            dist.all_gather(worst, torch.tensor(self._worst, dtype=torch.float64, device=self._device), self._group)
        found = max(one.tolist() for one in worst)
        return dict(zip(WORST, found, strict=True)) if found[0] else {}

    def _weigh_tokens(self, gradient: torch.Tensor) -> None:
        """Add a microbatch's gradient to the sum and the maximum over tokens of its absolute value.

        gradient: that of the loss with respect to the log-probs, float32 `[T]`.
        """
        if len(gradient):
            sizes = gradient.detach().abs().double()
            self._gradients += sizes.sum()
            self._largest[1] = torch.maximum(self._largest[1], sizes.max())

    def finish(self, square_norm: torch.Tensor) -> StepTotals:
        """Close the step and return its totals over all ranks of the group. Collective over the group.

        `square_norm` is this rank's part of the squared norm of the summed gradient (float64 scalar); the parts of all
        ranks add up to the whole. Raises RuntimeError when no step is open or a microbatch failed.
        """
        self._require_open("finish_step")
        counts = torch.tensor([self._tokens, self._sequences], dtype=torch.float64, device=self._device)
        totals = torch.cat([counts, square_norm.reshape(1), self._gradients.reshape(1), self._mismatch, self._sums])
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
            dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=self._group)
        tokens, sequences, square, gradients, *sums = totals.tolist()
        largest_mismatch, largest_gradient = self._largest.tolist()
        means = [value / max(tokens, 1.0) for value in sums]
        denominator = {"tokens": tokens, "sequences": sequences}.get(self._loss.denominator)
        if denominator is None:
            denominator = float(self._count_groups())
        if not tokens:
            denominator = 0.0  # Masked rows alone teach nothing.
        self._state = StepState.CLOSED
        names = (*(f"logprob/{name}" for name in MISMATCH_SUMS), *(f"train/{name}" for name in self._names))
        metrics = {
            **dict(zip(names, means, strict=True)),
            f"logprob/{MISMATCH_MAX}": largest_mismatch,
            "train/token_gradient_share": largest_gradient / gradients if gradients else 0.0,
            "train/loss": sums[len(MISMATCH_SUMS)] / max(denominator, 1.0),
            "train/tokens": tokens,
            "train/sequences": sequences,
        }
        if self._exact:
            metrics |= self._worst_of_all()
        norm = math.sqrt(square) / denominator if denominator else 0.0
        return StepTotals(denominator, norm, metrics)

    def _count_groups(self) -> int:
        """Return the number of distinct groups over all ranks. The ranks exchange group ids, because the rows of a
        group may be on several ranks."""
        own = torch.tensor(sorted(self._group_ids), dtype=torch.int64, device=self._device)
        if self._group is None:
            return len(own)
        world = dist.get_world_size(self._group)
        sizes = torch.zeros(world, dtype=torch.int64, device=self._device)
        sizes[dist.get_rank(self._group)] = len(own)
        dist.all_reduce(sizes, group=self._group)
        padded = torch.zeros(int(sizes.max()), dtype=torch.int64, device=self._device)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=self._group)
        return len({gid for part, size in zip(parts, sizes.tolist(), strict=True) for gid in part[:size].tolist()})

    def abort(self) -> None:
        """Close the step and drop its sums. Idempotent."""
        self._state = StepState.CLOSED
        self._reset()


# ---------------- These functions update the weights.

CLIP_EPS = 1e-6
"""Small number added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""


def local_gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients of all parameters that have one. The shards share memory with the
    gradients."""
    grads = [param.grad for param in params if param.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def square_norm(grads: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of this rank's gradient shards, a float64 scalar.

    Each element is on one rank only, so the ranks' values add up to the square of the whole norm.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]  # what torch's own clipping calls
    return torch.stack(norms).to(device).double().square().sum()


def scale_(grads: list[torch.Tensor], factor: float) -> None:
    """Multiply all `grads` by `factor` in place, with one kernel."""
    torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that reduces a gradient of norm `norm` to norm `max_norm`, at most 1. It is 1 if `max_norm` is
    None."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPS))
