"""AdamW whose two moments take fewer bits between steps, or are in host memory.

torch's own fused AdamW computes each step in float32. It gets the moments of one parameter at a time, which are put
away again afterwards:

    32 bits   as they are, which is worthwhile in host memory only
    16 bits   bfloat16, rounded up or down at random, so that small changes of a moment add up
    8 bits    blocks of 256 values with a code for each value and a scale (arXiv:2110.02861)

The functions that round to 8 bits are torchao's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK, LEAST = 256, 4096
"""Number of values of a block, and least number of values of a tensor that is kept in 8 bits. A tensor that is smaller,
or no multiple of a block, is kept in float32, as torchao does."""


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) over this rank's pieces of parameters, with moments in a smaller form or elsewhere.

    The state of a parameter has `step`, the pieces `exp_avg` and `exp_avg_sq`, and for 8 bits the scales of their
    blocks as `exp_avg.scale` and `exp_avg_sq.scale`. All are plain tensors.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, bits: int,
        host: bool, place: str,
    ) -> None:  # fmt: skip
        """Allocate all moments as zeros.

        bits: 32, 16 or 8, for each value of a moment. host: true to keep moments in host memory. place: name of this
        rank's place in the mesh, under which checkpoints have the scales of its blocks. Raises ValueError for 8 bits
        without torchao.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._bits, self._place, self._host = bits, place, host
        self._updates: dict[torch.Tensor, int] = {}
        """Number of updates of each parameter, from which its noise comes, so that ranks round its replicas alike."""
        if bits == 8:
            _rounding()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = self._blank(_piece(param))

    def _blank(self, piece: torch.Tensor) -> dict[str, torch.Tensor]:
        device = torch.device("cpu") if self._host else piece.device
        kept: dict[str, Any] = {"device": device, "pin_memory": self._host and piece.device.type == "cuda"}
        coded = self._bits == 8 and piece.numel() >= LEAST and piece.numel() % BLOCK == 0
        dtype = torch.uint8 if coded else torch.bfloat16 if self._bits == 16 else torch.float32
        state = {"step": torch.zeros((), dtype=torch.float32, device=piece.device)}
        for moment in MOMENTS:
            state[moment] = torch.zeros(piece.shape, dtype=dtype, **kept)
            if coded:
                state[f"{moment}.scale"] = torch.zeros(piece.numel() // BLOCK, **kept)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step each parameter that has a gradient. closure: None, as gradients are there already."""
        assert closure is None
        every = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, (param, group) in enumerate(every):
            if param.grad is not None:  # An empty piece counts the step, too: a checkpoint has the count of one rank.
                self._updates[param] = self._updates.get(param, 0) + 1
                self._step(param, group, 2 * (self._updates[param] * len(every) + number))
        if self._host and torch.cuda.is_available():
            torch.cuda.synchronize()  # A checkpoint reads the host memory that the device writes.

    def _step(self, param: torch.Tensor, group: dict[str, Any], seed: int) -> None:
        piece, state = _piece(param), self.state[param]
        first, second = (_values(state, moment, piece.device) for moment in MOMENTS)
        adamw(
            [piece], [_piece(param.grad)], [first], [second], [], [state["step"]], fused=True, amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for number, value in enumerate((first, second)):
            _put(state, MOMENTS[number], value, seed + number)

    # ---------------- Checkpoints have moments that any mesh can read, and AdamW in float32, too.

    @torch.no_grad()
    def stored(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return copies of the state of a parameter in host memory, by their names in a checkpoint.

        Moments are float32 or bfloat16, and sharded like the parameter. The scales of blocks are this rank's own.
        """
        state = self.state[param]
        found = {"step": state["step"].cpu()}
        for moment in MOMENTS:
            coded = f"{moment}.scale" in state
            value = _values(state, moment, state[moment].device) if coded else state[moment]
            found[moment] = _like(param, value)
            if coded:
                found[self._scale_name(moment)] = state[f"{moment}.scale"].cpu()
        return found

    @torch.no_grad()
    def restore(self, param: torch.Tensor, stored: dict[str, torch.Tensor]) -> None:
        """Set the state of a parameter to what `stored` returned, filled from a checkpoint.

        With the scales of a checkpoint from the same mesh, the codes are exactly those that were saved. Without them,
        values are rounded to 8 bits again.
        """
        state = self.state[param]
        state["step"].copy_(stored["step"])
        self._updates[param] = int(stored["step"])
        for moment in MOMENTS:
            value, scale = _piece(stored[moment]).to(state[moment].device), stored.get(self._scale_name(moment))
            if f"{moment}.scale" not in state:
                state[moment].copy_(value)
            elif scale is None or not scale.any():
                _put(state, moment, value)
            else:
                own = state[f"{moment}.scale"].copy_(scale)
                _encode(state, moment, (value.view(-1, BLOCK) / own.view(-1, 1)).view(value.shape))

    def _scale_name(self, moment: str) -> str:
        return f"{moment}.scale.{self._place}"


@cache
def _rounding() -> ModuleType:
    """Return the module of torchao that rounds moments. Raises ValueError, naming the extra, without torchao."""
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise ValueError(
            f"trainer.optimizer: got 'adamw_8bit', which needs torchao: pip install 'headrace[quantized]' ({error})"
        ) from None
    return quant_utils


@cache
def _codes(moment: str, device: torch.device) -> torch.Tensor:
    """Return the value of each of the 256 codes of a moment, ascending, as a share of its block's scale: float32."""
    values = _rounding().create_dynamic_map(signed=moment == MOMENTS[0])
    return torch.tensor(values, dtype=torch.float32, device=device)


def _values(state: dict[str, torch.Tensor], moment: str, device: torch.device) -> torch.Tensor:
    """Return the values of a moment, float32 on `device`. Those in float32 that are there already are not copied."""
    kept = state[moment].to(device, non_blocking=True)
    if f"{moment}.scale" not in state:
        return kept.float()
    scale = state[f"{moment}.scale"].to(device, non_blocking=True)
    return _rounding().dequant_with_qmap(kept, _codes(moment, device), scale)


def _put(state: dict[str, torch.Tensor], moment: str, value: torch.Tensor, seed: int = 0) -> None:
    """Keep the new values of a moment, float32, in its own form and place. seed: that of the noise of rounding."""
    if f"{moment}.scale" in state:
        value, scale = _rounding().scale_tensor(value, BLOCK)
        state[f"{moment}.scale"].copy_(scale, non_blocking=True)
        _encode(state, moment, value)
        return
    if state[moment].dtype == torch.bfloat16:
        value = _rounded_at_random(value, seed)
    state[moment].copy_(value, non_blocking=True)


def _rounded_at_random(value: torch.Tensor, seed: int) -> torch.Tensor:
    """Round float32 to bfloat16, up or down, so that the mean of the result is `value`."""
    generator = torch.Generator(value.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    return ((value.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


def _encode(state: dict[str, torch.Tensor], moment: str, shares: torch.Tensor) -> None:
    """Keep the codes of the values of a moment. shares: the values as shares of the scales of their blocks.

    A second moment above 0 gets a code above 0, unlike torchao's. Otherwise a weight without a gradient in the next
    step, as of a token that does not occur, would be moved by its first moment divided by `eps`.
    """
    codes = _rounding().quantize_8bit_with_qmap(shares, _codes(moment, shares.device))
    if moment == MOMENTS[1]:
        codes = codes.clamp(min=1).where(shares > 0, codes)
    state[moment].copy_(codes, non_blocking=True)


def _piece(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(param: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Return a copy of `piece` in host memory, sharded like `param`."""
    if not isinstance(param, DTensor):
        return piece.to("cpu", copy=True)
    whole = DTensor.from_local(
        piece, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return whole.to("cpu", copy=True)
