"""Defines the section `trainer` of the configuration and the settings from which each rank builds its train backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ...actors.columns import ColumnConfig
from ...actors.engines.config import Attention, RouterReplayConfig, ScriptedConfig
from ...actors.train.topology import Topology
from ...dataplane.config import Count, CountOrZero, NonNegative, Positive, Section
from ..losses.config import LossConfig
from ..losses.distillation_config import DistillationConfig
from .lora_config import LoraConfig

if TYPE_CHECKING:  # The module imports torch, which takes seconds.
    from ...actors.weight_sync.base_offer import KnownBase

Head = Literal["auto", "selected", "full"]
Recompute = Literal["none", "selective", "full"]
Schedule = Literal["constant", "cosine", "linear", "polynomial", "inverse_sqrt", "warmup_stable_decay"]
MOMENT_BYTES = {"adamw": 8.0, "adamw_bf16": 4.0, "adamw_8bit": 2 + 8 / 256, "muon": 4.0}
"""Number of bytes of an optimizer's state for each weight, by the value of `trainer.optimizer`. With `muon` it is that
of the matrices of decoder layers; other weights take 8."""
ROUNDED_MESH = (
    "trainer.backend='fsdp' with data parallelism alone (trainer.tp, trainer.cp, trainer.pp and trainer.ep at 1)"
)
"""Words for the meshes that can train on a rounded base of an adapter."""
PrevSource = Literal["rollout", "recompute", "train_pass", "fixed"]


class MoeConfig(Section):
    """Settings for the even use of a model's experts, which the policy's loss alone would not ensure."""

    aux_loss_coef: NonNegative = 0.0
    """Coefficient of the auxiliary loss (Switch Transformer, arXiv:2101.03961). The loss of a layer is 1 when all
    experts get the same number of tokens of a row, and larger otherwise. It is averaged over rows like the policy's
    loss and summed over layers. 0.001 is a usual value."""
    bias_update_rate: NonNegative = 0.0
    """Amount by which each optimizer update changes the bias of an expert, for routers with such biases. The bias rises
    for experts with fewer tokens than the mean of their layer in that update, and falls for experts with more
    (arXiv:2408.15664). Biases change which experts are chosen, not their weights, and get no gradient. 0.001 is a usual
    value."""
    load_metrics: bool = False
    """If true, `moe/load_imbalance`, `moe/load_imbalance_max` and `moe/idle_experts` are reported. With
    `trainer.moe.aux_loss_coef` or `trainer.moe.bias_update_rate` above 0 they are always reported."""

    @property
    def active(self) -> bool:
        """True if the backends must observe the routers."""
        return self.load_metrics or self.aux_loss_coef > 0 or self.bias_update_rate > 0


class ParameterGroupConfig(Section):
    """Settings for some of the model's weights that differ from those of the others."""

    pattern: str = Field(min_length=1)
    """Pattern of the names of these weights in the Hugging Face model, where `*` stands for any text, such as
    `*.embed_tokens.*`. A weight belongs to the first entry of the list whose pattern its name matches."""
    lr_factor: Positive = 1.0
    """Factor of the learning rate of these weights. `trainer.lr` and its schedule are multiplied by it."""
    weight_decay: NonNegative | None = None
    """Weight decay of these weights, whatever their role. Unset: that of `trainer.weight_decay` and their role."""


class TrainerConfig(Section):
    """Settings of the train workers: their mesh, their memory, and their optimizer."""

    backend: Literal["fsdp", "megatron", "scripted"] = "fsdp"
    """Backend that trains the model. `fsdp` trains any causal language model of transformers with FSDP2, and with the
    kinds of parallelism that the model supports (see the table of models). `megatron` uses megatron-core, which also
    has pipeline parallelism, for the types of models that the same table names. `scripted` has no model; it reads its
    rows and then sleeps for the times that the section `scripted` sets."""
    dp: Count = 1
    """Number of data-parallel replicas, each of which trains on a share of the step's rows. There are dp x tp x cp x pp
    train workers."""
    tp: Count = 1
    """Number of tensor-parallel ranks, which split each layer between them. It must divide the model's numbers of
    attention heads and of key-value heads, and the width of its MLP. `fsdp` splits a model by the plan that
    transformers declares for it, and refuses a model without one."""
    pp: Count = 1
    """Number of pipeline stages, each of which holds a part of the layers."""
    cp: Count = 1
    """Number of context-parallel ranks, which split each row's tokens between them. Rows are then packed. `fsdp`
    refuses models with layers that look across tokens by other means than attention."""
    ep: Count = 1
    """Number of expert-parallel ranks, over which the experts of a model are distributed. They are taken from the dp x
    tp x cp ranks and are not additional ones. Tokens are sent to the ranks of their experts."""
    sequence_parallel: bool = False
    """If true, each tensor-parallel rank computes the norms only for its share of the tokens."""
    distributed_optimizer: bool = True
    """If true, the data-parallel ranks split the optimizer's state between them. `fsdp` always splits it."""
    recompute: Recompute = "none"
    """Part of the forward pass that is computed again in the backward pass. `none` keeps all intermediate values.
    `selective` keeps the results of matrix products and of attention, and computes norms, activations and other cheap
    operations again. `full` saves most memory by keeping only the input of each decoder layer."""
    recompute_layers: Count | None = None
    """Number of decoder layers to which `recompute: full` applies, counted from the start of each pipeline stage. The
    other layers keep all intermediate values. `null` means all layers. The smallest number that fits into memory is the
    fastest."""
    compile: bool = False
    """If true, decoder layers are compiled with torch.compile, which fuses their cheap operations. The first steps of a
    run take a minute longer. It needs a GPU, or a C++ compiler on a CPU."""
    offload: bool = False
    """If true, weights, gradients and optimizer state stay in host memory while they are not used. Needs more than one
    train worker; `megatron` does not support it."""
    reshard_after_forward: bool = True
    """If true, a rank of `fsdp` gathers the weights of a layer for each pass over the layer and frees them afterwards.
    If false, it keeps them until its last microbatch, which is faster but takes 2 bytes of GPU memory per parameter (4
    without mixed precision), divided by `trainer.tp`."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_bf16", "muon"] = "adamw"
    """Optimizer of the backend `fsdp`; `megatron` has `adamw` only. `adamw` (arXiv:1711.05101) keeps two moments of
    each weight in float32, 8 bytes. `adamw_8bit` rounds them to 8 bits in blocks (arXiv:2110.02861, 2 bytes; needs the
    extra `quantized`), and `adamw_bf16` to bfloat16, at random (4 bytes). `muon` (arXiv:2502.16982) orthogonalises the
    updates of the matrices between embedding and output layer and keeps one moment of these (4 bytes); it trains the
    other weights, and stacked experts, with `adamw`."""
    offload_optimizer: bool = False
    """If true, AdamW's moments are in host memory, from where each update takes those of one weight after the other to
    the GPU and back. It works on one train worker, too. Only for the backend `fsdp`."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of weights that are not trained, where `*` stands for any text, such as
    `[model.embed_tokens.*, "*.mlp.gate.*"]`. Names are those of the Hugging Face model. Each pattern must match one.
    `vision` stands for all weights of the model's vision tower."""
    groups: tuple[ParameterGroupConfig, ...] = ()
    """Groups of weights with a learning rate or a weight decay of their own."""
    lr: NonNegative = 1e-6
    """Peak learning rate. With 0 the policy does not change, which serves as a control for runs that train."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: Positive = 1e-8
    """Number that AdamW adds to the root of the second moment before it divides by it. Below a gradient of this size
    the updates of AdamW become smaller."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices, those of embedding and output layer among them, as in the Trainer of transformers.
    Norms, biases, scales, and the rates `A_log` of state-space layers have none, whatever their shape. `trainer.groups`
    changes it by name."""
    grad_clip: Positive | None = 1.0
    """Largest global norm of the mean gradient. A gradient with a larger norm is scaled down to this norm. `null` never
    scales gradients down."""
    warmup_steps: CountOrZero = 0
    """Number of steps over which the learning rate rises to `trainer.lr`. It rises with each optimizer update. In a run
    with fewer steps it rises until the end."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Length of the warm-up as a share of the run's steps, instead of `trainer.warmup_steps`."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up, by the names and formulas of transformers. `constant` keeps it.
    `cosine`, `linear` and `polynomial` lower it to `trainer.min_lr` by the end of the run. `warmup_stable_decay` keeps
    it, and lowers it along a half cosine in the last part of the run (`trainer.decay_ratio`). `inverse_sqrt` lowers it
    with the root of the number of updates. The rate changes with each optimizer update."""
    min_lr: NonNegative = 0.0
    """Learning rate at which the schedules that have an end stop; at most `trainer.lr`."""
    power: Positive = 1.0
    """Exponent of the schedule `polynomial`, which is `linear` with 1."""
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Last part of the run in which `warmup_stable_decay` lowers the learning rate, as a share of the run's steps."""
    packing: Literal["auto", "none", "packed", "dynamic"] = "auto"
    """Layout of the rows of a microbatch. `none` pads them to the length of the longest. `dynamic` does the same but
    puts rows of similar length into the same microbatch. `packed` puts rows one after the other without padding;
    context parallelism needs it. `auto` means `packed` on GPUs in bfloat16 for a local folder with a model whose
    attention the kernel for packed rows computes, which most families of the table of models have, and with the backend
    `megatron`. Otherwise `auto` means `none`."""
    tokens_per_microbatch: Count = 16384
    """Largest number of tokens, including padding, of one forward and backward pass on a replica. The length of a row
    is rounded up to a multiple of tp x 2 cp (of tp without context parallelism)."""
    patches_per_microbatch: Count | None = None
    """Largest number of patches of one pass of the vision tower on a replica. A picture that several rows of a
    microbatch show counts once. Unset: as many as the pictures of `tokens_per_microbatch` have."""
    fetch: Literal["auto", "leader", "independent"] = "auto"
    """Ranks of a replica that read its rows from the store. With `leader` the first rank reads them and sends them to
    the others. With `independent` each rank reads them itself. `auto` means `leader` if a replica has more than one
    rank."""
    entropy_metric: bool = False
    """If true, the policy's mean entropy at the trained tokens is reported as `train/entropy`, which costs a softmax
    over the vocabulary. With `loss.entropy_coef` above 0 it is always reported."""
    mixed_precision: bool = False
    """If true, forward and backward passes compute in bfloat16. Weights, sums of gradients and optimizer state stay in
    float32."""
    fp8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Recipe by which the linear layers of the policy compute their matrix products in fp8, by the names of torchao
    (extra `quantized`). `tensorwise` has one scale for each tensor, which is fastest, but a token's log-prob then
    depends on the other tokens of its microbatch. `rowwise` has one for each token and each row of a weight;
    `rowwise_with_gw_hp` is the same, but gradients of weights are computed in the format of the passes. Only for the
    backend `fsdp`, without an adapter. It needs GPUs that compute in fp8; CPUs compute the same numbers, which saves
    nothing. Embeddings, output layer, routers, stacked experts, vision towers and the reference model are left out."""

    export_dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    """Number format of the weights in exported models, such as `model/` and `best/` in the run folder. `source` gives
    each weight the format that it has in the initial model. Checkpoints always keep float32."""

    moe: MoeConfig = MoeConfig()
    lora: LoraConfig = LoraConfig()
    head: Head = "auto"
    """Tokens to which the output layer is applied. `selected` applies it only to the positions whose log-probs are
    wanted. `full` has the model compute all logits, for models that change their logits after the output layer; such a
    model is refused with `selected`. `auto` means `selected` where a check at the start finds that the model's logits
    are its output layer applied to its last hidden state, and `full` otherwise."""

    @property
    def topology(self) -> Topology:
        """Sizes of the train mesh: the numbers of data-, tensor-, context-, pipeline- and expert-parallel ranks."""
        return Topology(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep)


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """Settings from which a rank builds its train backend. They are sent to the worker process."""

    model: str
    """Local folder or hub id of a Hugging Face causal language model, which is loaded as float32."""
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    scripted: ScriptedConfig = ScriptedConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    total_steps: int = 0
    """Number of steps of the run, after which schedules reach `trainer.min_lr`. Without `trainer.warmup_ratio` the
    schedules `constant` and `inverse_sqrt` do not need it."""
    updates_per_step: int = 1
    """Number of optimizer updates of each step: epochs x mini-batches."""
    prev: PrevSource = "rollout"
    """Source of the log-probs in the denominator of the probability ratio. `rollout` takes those of the engine.
    `recompute` takes the column `prev_logprobs`, which is written before the step. `train_pass` takes those of the
    training forward pass itself, which equal the recomputed ones as long as each step has only one optimizer update.
    `fixed`, for steps with several updates, takes the column `prev_logprobs` where a microbatch has it, and the
    log-probs of the forward pass otherwise. The driver leaves the column out only in the step's first update."""
    columns: tuple[ColumnConfig, ...] = ()
    """User-defined columns of numbers that the loss reads."""
    rounded: str | None = None
    """Folder with the model's weights as `trainer.lora.base` rounds them, which is the base of the adapter and the
    engines' model; None if they are not rounded."""
    adapter: str | None = None
    """Folder of an adapter in PEFT's format with which training starts; None for a new one."""
    engine_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which engines keep the weights. Weights are sent in it if it is smaller than the trainer's."""
    sends_adapter: bool = False
    """If true, `weights` yields the adapter's matrices; otherwise those of the model with the adapter added to them."""
    attention: Attention = "auto"
    """Kind of attention of the Hugging Face model, see `ModelConfig.attention`."""
    context: int | None = None
    """Number of tokens that no row exceeds, the same as that of the engines; None: unknown. It decides the positions of
    models that have others for long contexts, and how long the rows of the checks at the start are."""
    bitwise: Literal["hf", "vllm"] | None = None
    """Kind of the engines whose log-probs the backend's equal bit for bit, see `run.bitwise`; None if they need not."""
    with_reference: bool = False
    """If true, the backend keeps a frozen copy of the initial weights for `logprobs(reference=True)`."""
    trains: bool = True
    """If false, the backend only computes log-probs, and `begin_step`, `save` and `load` raise RuntimeError (with
    `megatron`, so does `offload`). It has no optimizer, so that a parameter takes 2 bytes (4 without mixed precision)
    instead of 12 or more. The backend `scripted` has no parameters and ignores this field."""
    known: KnownBase | None = None
    """Record that this rank made of the adapter's base before it was started again; None at the first start."""

    def __post_init__(self) -> None:
        if self.loss.kl_coef > 0 and not self.with_reference and self.loss.reference_model is None:
            raise ValueError(
                f"with_reference: got False, expected True with loss.kl_coef = {self.loss.kl_coef}, which needs a "
                "reference model"
            )

        lora = self.trainer.lora
        if (self.rounded is not None) != lora.rounds:
            raise ValueError(
                f"rounded: got {self.rounded!r} with trainer.lora.rank={lora.rank} and trainer.lora.base="
                f"{lora.base!r}, expected the folder of a rounded base with an adapter of one, else None"
            )
        if self.rounded is not None and (self.trainer.backend != "fsdp" or self.topology.world != self.topology.dp):
            raise ValueError(f"trainer.lora.base: got {lora.base!r}, expected 'model', or {ROUNDED_MESH}")

    @property
    def reference_updates(self) -> int:
        """Number of optimizer updates after which the reference model moves; 0 if it never does."""
        return self.loss.reference_every * self.updates_per_step

    @property
    def base(self) -> str:
        """Folder or hub id of the weights to which an adapter is added."""
        return self.rounded or self.model

    @property
    def topology(self) -> Topology:
        """Sizes of the train mesh: the numbers of data-, tensor-, context-, pipeline- and expert-parallel ranks."""
        return self.trainer.topology

    def frozen(self, model: str, *, offload: bool) -> BackendConfig:
        """Return the settings of a backend that computes log-probs of another model, beside this one on each rank.

        It is always `fsdp`, because a process can have only one backend of `megatron`. offload: whether its weights
        stay in host memory between passes if there are several ranks.
        """
        changes = {"backend": "fsdp", "ep": 1, "recompute": "none", "compile": False, "entropy_metric": False}
        moves = (offload or self.trainer.offload) and self.topology.world > 1  # One rank keeps its weights where it is.
        changes |= {"lora": LoraConfig(), "moe": MoeConfig(), "offload": moves, "fp8": "none"}
        trainer = self.trainer.model_copy(update=changes)
        return BackendConfig(model, trainer, attention=self.attention, context=self.context, trains=False)

    def require_trains(self, call: str) -> None:
        """Raise RuntimeError if the backend only computes log-probs. call: name of the method that trains."""
        if not self.trains:
            raise RuntimeError(f"{call}: this {self.trainer.backend} backend only computes log-probs (trains=False)")
