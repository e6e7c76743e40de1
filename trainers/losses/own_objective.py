"""`OwnObjective` is an objective whose loss at each token a function of the user's computes.

def weighted(inputs, floor=0.0):        # inputs: LossInputs, with the columns of `data.columns`
    weight = inputs.columns["weight"][inputs.row_ids].clamp(min=floor)
    return -weight * inputs.advantages * inputs.logprobs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...dataplane.imports import import_object
from .objective import DRIFT_METRICS, TokenLosses, drift
from .terms import LossInputs


class OwnObjective:
    """Objective that calls the user's function with a microbatch's `LossInputs` for the loss of each token.
    Corrections, averages, KL terms and entropy bonuses apply to it as to the objectives here."""

    metrics = DRIFT_METRICS

    def __init__(self, name: str, function: Callable[[LossInputs], Any]) -> None:
        """name: import path of the function, for error messages."""
        self.name = name
        self._function = function

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the losses of a microbatch. Raises ValueError if the function raises, or does not return a tensor with
        a gradient of one loss for each token."""
        try:
            values = self._function(inputs)
        except Exception as error:  # of the user's function
            raise ValueError(f"loss.kind: {self.name!r} raised {type(error).__name__}: {error}") from error
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        if shape != tuple(inputs.logprobs.shape) or not values.is_floating_point():
            raise ValueError(
                f"loss.kind: {self.name!r} returned {shape}, expected the loss at each token, a float tensor of "
                f"{tuple(inputs.logprobs.shape)}"
            )
        if inputs.logprobs.requires_grad and len(values) and not values.requires_grad:
            raise ValueError(f"loss.kind: {self.name!r} returned a loss without gradient, so it would train nothing")
        return TokenLosses(values, drift(inputs))


def build_own_objective(kind: str, options: Mapping[str, Any]) -> OwnObjective:
    """Import the function `kind` (`package.module:function`), whose keyword arguments are `options`.

    Raises ValueError if it cannot be imported, is no function, or does not take the options.
    """
    function = import_object(kind, "loss.kind")
    if not callable(function):
        raise ValueError(f"loss.kind: {kind!r} is a {type(function).__name__}, expected a function")
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise ValueError(f"loss.options: {sorted(options)} do not fit {kind!r}: {error}") from error
    return OwnObjective(kind, lambda inputs: function(inputs, **options))
