"""What a train backend is built from: model, mesh, precision, loss and optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...dataplane.topology import Topology
from ..losses.factory import LossConfig

Head = Literal["selected", "full"]
Packing = Literal["none", "packed", "dynamic"]


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and its schedule."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices; norms and biases have none."""
    grad_clip: float | None = 1.0
    """Largest global norm of the mean gradient; None: not clipped."""
    warmup_steps: int = 0
    """Steps of linear warm-up; a run that is shorter only rises."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up."""
    total_steps: int = 0
    """Step at which cosine and linear reach 0; not needed by `constant`."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"trainer.{name}: got {getattr(self, name)}, expected a number above 0")
        for name in ("weight_decay", "warmup_steps", "total_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"trainer.{name}: got {getattr(self, name)}, expected 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"trainer.betas: got {self.betas}, expected two numbers in [0, 1)")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"trainer.grad_clip: got {self.grad_clip}, expected a number above 0, or null for none")
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"trainer.schedule: got {self.schedule!r}, expected 'constant', 'cosine' or 'linear'")


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Everything a rank needs to build its backend; plain data, so it travels to the worker."""

    model: str
    """HF causal LM: a local folder or a hub id. Loaded as float32."""
    kind: Literal["fsdp", "megatron", "scripted"] = "fsdp"
    topology: Topology = Topology(1)
    """The train mesh. `fsdp` and `scripted` have data and tensor parallelism only."""
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    prev: Literal["rollout", "recompute"] = "rollout"
    """What ratios are taken against: the engine's log-probs, or the `prev_logprobs` column written before the step."""
    mixed_precision: Literal["off", "bf16"] = "off"
    """`bf16`: forward and backward in bfloat16; parameters, gradient sums and optimizer stay float32."""
    with_reference: bool = False
    """Keep a frozen copy of the initial weights for `logprobs(reference=True)`."""
    entropy: bool = False
    """Report the policy's mean entropy at the trained tokens (`train/entropy`); costs a softmax over the vocabulary."""
    head: Head = "selected"
    """`full` for models that alter their logits behind the output layer; the backend says when it must be set."""
    packing: Packing = "none"
    """`packed`: a microbatch is one row of all its tokens. `none`, `dynamic`: right-padded rows; the two differ in how
    the plan makes up microbatches, not here."""
    recompute: Literal["none", "full"] = "none"
    """`full`: of each decoder layer only the input is kept for backward, the rest is computed again."""
    offload: bool = False
    """Parameters, gradients and optimizer state stay in host memory between uses; needs more than one rank."""
    sequence_parallel: bool = False
    """`megatron` only: norms split by tokens over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """`megatron` only: optimizer state split over the data-parallel ranks. `fsdp` always splits it."""
    train_row_s: float = 0.0
    """`scripted` only: seconds a row, by a replica."""
    train_step_s: float = 0.0
    """`scripted` only: seconds of an optimizer step."""

    def __post_init__(self) -> None:
        if self.prev not in ("rollout", "recompute"):
            raise ValueError(f"algorithm.prev_logprobs: got {self.prev!r}, expected 'rollout' or 'recompute'")
        if self.mixed_precision not in ("off", "bf16"):
            raise ValueError(f"trainer.mixed_precision: got {self.mixed_precision!r}, expected 'off' or 'bf16'")
        if self.head not in ("selected", "full"):
            raise ValueError(f"trainer.head: got {self.head!r}, expected 'selected' or 'full'")
        if self.packing not in ("none", "packed", "dynamic"):
            raise ValueError(f"trainer.packing: got {self.packing!r}, expected 'none', 'packed' or 'dynamic'")
        if self.recompute not in ("none", "full"):
            raise ValueError(f"trainer.recompute: got {self.recompute!r}, expected 'none' or 'full'")
        if self.kind in ("fsdp", "scripted"):
            self._check_plain_mesh()
        if self.kind == "scripted":
            for name in ("train_row_s", "train_step_s"):
                if not getattr(self, name) >= 0:
                    raise ValueError(f"scripted.{name}: got {getattr(self, name)}, expected 0 or more")
        if self.loss.kl_coef > 0 and not self.with_reference:
            raise ValueError(
                f"trainer.with_reference: got False, expected True with loss.kl_coef = {self.loss.kl_coef}, "
                "which needs a reference model"
            )

    def _check_plain_mesh(self) -> None:
        behind = f"with trainer.backend = {self.kind!r}"
        for name in ("pp", "cp", "ep"):
            if getattr(self.topology, name) > 1:
                raise ValueError(f"trainer.{name}: got {getattr(self.topology, name)}, expected 1 {behind}")
        if self.sequence_parallel:
            raise ValueError(f"trainer.sequence_parallel: got True, expected False {behind}")
        if self.offload and self.topology.world == 1:
            raise ValueError(f"trainer.offload: got True, expected False {behind} and one rank")
