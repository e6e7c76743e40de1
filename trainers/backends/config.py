"""The section `trainer` of the configuration, and all that a rank builds its train backend from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ...actors.engines.config import ScriptedConfig
from ...dataplane.section import Count, CountOrZero, NonNegative, Positive, Section
from ...dataplane.topology import Topology
from ..losses.config import LossConfig

Head = Literal["selected", "full"]


class TrainerConfig(Section):
    """The train workers: their mesh, their memory, and their optimizer (AdamW, arXiv:1711.05101)."""

    backend: Literal["fsdp", "megatron", "scripted"] = "fsdp"
    """`fsdp`: FSDP2 and tensor parallelism on Hugging Face models; `megatron`: megatron-core, all of the mesh below;
    `scripted`: reads its rows and computes nothing, for as long as `scripted` says."""
    dp: Count = 1
    """Number of data-parallel replicas; each trains on a share of the step's rows. There are dp x tp x cp x pp train
    workers."""
    tp: Count = 1
    """Number of tensor-parallel ranks, which split each layer."""
    pp: Count = 1
    """Number of pipeline stages, which split the layers."""
    cp: Count = 1
    """Number of context-parallel ranks, which split each row's tokens."""
    ep: Count = 1
    """Number of expert-parallel ranks, from within dp x tp x cp."""
    sequence_parallel: bool = False
    """Split the norms by tokens over the tensor-parallel ranks."""
    distributed_optimizer: bool = True
    """Split the optimizer's state over the data-parallel ranks; `fsdp` always does."""
    recompute: Literal["none", "full"] = "none"
    """`full`: keep only each decoder layer's input for backward and compute the rest again."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory between uses. Needs several train workers."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; norms and biases have none."""
    grad_clip: Positive = 1.0
    """Bound of the mean gradient's global norm."""
    warmup_steps: CountOrZero = 0
    """Number of steps in which the learning rate rises to `lr`; a run that is shorter only rises."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the rise; cosine and linear reach 0 at the run's end."""
    packing: Literal["none", "packed", "dynamic"] = "none"
    """`none`: rows padded to the microbatch's longest; `dynamic`: the same, rows of like lengths together; `packed`:
    rows one behind the other, without padding."""
    tokens_per_microbatch: Count = 16384
    """Number of tokens, padding included, of one forward and backward on one replica; rows count rounded up to a
    multiple of tp x 2 cp (tp without context parallelism)."""
    fetch: Literal["auto", "leader", "independent"] = "auto"
    """Ranks that read a replica's rows from the store: its first, which broadcasts them, or each for itself. `auto`:
    the leader where a replica has more than one rank."""
    mixed_precision: bool = False
    """Compute forward and backward in bfloat16; weights, gradients' sums and optimizer state stay float32."""

    @property
    def topology(self) -> Topology:
        """The train mesh."""
        return Topology(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Everything that a rank builds its backend from; it travels to the worker."""

    model: str
    """Local folder or hub id of a Hugging Face causal LM, which is loaded as float32."""
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    scripted: ScriptedConfig = ScriptedConfig()
    total_steps: int = 0
    """Step at which the schedules cosine and linear reach 0; `constant` does not need it."""
    prev: Literal["rollout", "recompute"] = "rollout"
    """Log-probs that ratios are taken against: the engine's, or the `prev_logprobs` column written before the step."""
    with_reference: bool = False
    """Keep a frozen copy of the initial weights for `logprobs(reference=True)`."""
    entropy: bool = False
    """Report the policy's mean entropy at the trained tokens (`train/entropy`); costs a softmax over the vocabulary."""
    head: Head = "selected"
    """`full` for models that alter their logits behind the output layer; the backend says when it must be set."""

    def __post_init__(self) -> None:
        if self.loss.kl_coef > 0 and not self.with_reference:
            raise ValueError(
                f"with_reference: got False, expected True with loss.kl_coef = {self.loss.kl_coef}, which needs a "
                "reference model"
            )

    @property
    def topology(self) -> Topology:
        """The train mesh."""
        return self.trainer.topology
