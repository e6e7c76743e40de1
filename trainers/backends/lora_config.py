"""Defines the section `trainer.lora` of the configuration: the size, place and start of a LoRA adapter."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ...dataplane.config import CountOrZero, Positive, Section

ALL_LINEAR = "all-linear"
ROUNDED_BYTES = {"int8": 1.0, "nf4": 0.5625}
"""Number of bytes of a value of a rounded weight, for each `trainer.lora.base`. The scales of rows of `int8`, 4 bytes
each, are left out."""


class LoraConfig(Section):
    """Training of a LoRA adapter (arXiv:2106.09685) instead of all weights.

    The model's own weights, the base, stay as they are, in bfloat16 with `trainer.mixed_precision`. The adapter and
    its optimizer are in float32. The reference model is the base without the adapter, and takes no memory.
    """

    rank: CountOrZero = 0
    """Rank of the adapter's matrices. 0 trains all weights of the model instead."""
    alpha: Positive | None = None
    """Numerator of the scaling alpha / rank of the adapter. Unset: twice the rank, so that the scaling is 2 for each
    rank."""
    targets: Literal["all-linear"] | tuple[str, ...] = ALL_LINEAR
    """Modules that get an adapter. `all-linear` is every linear layer of the decoder layers, without routers and the
    output layer. Otherwise a list of names, or endings of names, of modules, such as `[q_proj, v_proj]`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of the adapter that are set to zero in training passes. Log-probs of the policy before the
    step and of the reference model are computed without it."""
    experts: bool = False
    """If true, the stacked experts of a model get adapters, too."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Start of the matrix A: `kaiming` is uniform as in PEFT's default, `gaussian` is normal with standard deviation
    1 / rank. The matrix B starts with zeros, so that the policy starts as the base."""
    base: Literal["model", "int8", "nf4"] = "model"
    """Number format of the base in training. `int8` rounds the weights of linear layers to 8 bits (torchao), `nf4` to 4
    bits (bitsandbytes, arXiv:2305.14314); engines then get the rounded weights once, at the start. Only for the backend
    `fsdp` with data parallelism."""
    lr_factor: Positive = 10.0
    """Factor by which the learning rate of the adapter exceeds `trainer.lr`, which then has the same meaning as when
    all weights are trained. About ten was best for Llama and Qwen models, measured with alpha 32 at every rank
    (thinkingmachines.ai/blog/lora); for the built-in model, three was better at the end of a run."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_is_a_list(cls, targets: Any) -> Any:
        return (targets,) if isinstance(targets, str) and targets != ALL_LINEAR else targets

    @property
    def rounds(self) -> bool:
        """True if the weights of the base are rounded, because `base` is not `model`."""
        return self.rank > 0 and self.base != "model"

    @property
    def scaling(self) -> float:
        """Factor of the product B A. The rank must be above 0."""
        return self.chosen_alpha / self.rank

    @property
    def chosen_alpha(self) -> float:
        """Numerator of the scaling: `alpha`, or twice the rank if it is unset."""
        return 2.0 * self.rank if self.alpha is None else self.alpha
