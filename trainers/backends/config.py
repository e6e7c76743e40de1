"""The section `trainer` of the configuration, and everything that a rank builds its train backend from."""

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
    """Backend that trains the model. `fsdp` trains Hugging Face models with FSDP2 and tensor parallelism. `megatron`
    uses megatron-core and can split a model in all the ways below. `scripted` reads its rows and computes nothing for
    as long as the keys of the section `scripted` say."""
    dp: Count = 1
    """Number of data-parallel replicas, each of which trains on a share of the step's rows. There are dp x tp x cp x pp
    train workers."""
    tp: Count = 1
    """Number of tensor-parallel ranks, which split each layer between them. It must divide the model's numbers of
    attention heads and of key-value heads, and the width of its MLP."""
    pp: Count = 1
    """Number of pipeline stages, each of which holds a part of the layers."""
    cp: Count = 1
    """Number of context-parallel ranks, which split each row's tokens between them."""
    ep: Count = 1
    """Number of expert-parallel ranks, which are taken from the dp x tp x cp ranks."""
    sequence_parallel: bool = False
    """Whether the tensor-parallel ranks split the computation of norms by tokens."""
    distributed_optimizer: bool = True
    """Whether the data-parallel ranks split the optimizer's state between them. `fsdp` always splits it."""
    recompute: Literal["none", "full"] = "none"
    """Part of the forward pass that the backward pass computes again. `none` keeps all intermediate values. `full`
    saves memory by keeping only the input of each decoder layer and computing the rest again."""
    offload: bool = False
    """Whether weights, gradients and optimizer state are in host memory while they are not used. Needs more than one
    train worker."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices. Norms and biases have none."""
    grad_clip: Positive = 1.0
    """Largest global norm of the mean gradient, to which larger gradients are scaled down."""
    warmup_steps: CountOrZero = 0
    """Number of steps over which the learning rate rises to `trainer.lr`. In a run with fewer steps it rises until the
    end."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after it has risen. `constant` keeps it; `cosine` and `linear` reach 0 at the end of
    the run."""
    packing: Literal["none", "packed", "dynamic"] = "none"
    """Layout of the rows of a microbatch. `none` pads them to the longest. `dynamic` does the same and puts rows of
    similar length together. `packed` puts rows one after the other without padding; context parallelism needs it."""
    tokens_per_microbatch: Count = 16384
    """Largest number of tokens, including padding, of one forward and backward pass on a replica. The length of a row
    is rounded up to a multiple of tp x 2 cp (of tp without context parallelism)."""
    fetch: Literal["auto", "leader", "independent"] = "auto"
    """Which ranks of a replica read its rows from the store. With `leader` the first rank reads them and sends them to
    the others. With `independent` each rank reads them itself. `auto` is `leader` where a replica has more than one
    rank."""
    entropy_metric: bool = False
    """Whether the policy's mean entropy at the trained tokens is reported as `train/entropy`, which costs a softmax
    over the vocabulary. With `loss.entropy_coef` above 0 it always is."""
    mixed_precision: bool = False
    """Whether forward and backward passes compute in bfloat16. Weights, sums of gradients and optimizer state stay in
    float32."""

    @property
    def topology(self) -> Topology:
        """The train mesh."""
        return Topology(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Everything that a rank builds its backend from; it is sent to the worker."""

    model: str
    """Local folder or hub id of a Hugging Face causal language model, which is loaded as float32."""
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    scripted: ScriptedConfig = ScriptedConfig()
    total_steps: int = 0
    """Step at which the schedules cosine and linear reach 0; `constant` does not need it."""
    prev: Literal["rollout", "recompute", "train_pass"] = "rollout"
    """Source of the log-probs in the denominator of the ratio. `rollout` means the engine's; `recompute` means the
    column `prev_logprobs`, which is written before the step; `train_pass` means those of the pass that trains, which
    are the same as long as rows are trained on in one optimizer step."""
    with_reference: bool = False
    """Whether a frozen copy of the initial weights is kept for `logprobs(reference=True)`."""
    head: Head = "selected"
    """Method that computes log-probs from the output layer. `full` is for models that change their logits after the
    output layer; the backend raises an error when such a model has `selected`."""

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
