"""Builds one pipeline stage of a causal LM from Megatron modules; the last stage returns log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ....codecs.integers import ceil_div
from ....codecs.tokens.routes import is_expert_layer, num_experts
from ..config import BackendConfig
from ..hf_model import HfSource
from ..rows.packed_rows import PackedRows
from ..vocab.candidates import candidate_logprobs
from ..vocab.logprobs import Entropy, VocabShard, token_logprobs
from .architecture import rotary, transformer_config
from .library import (
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_gpt_layer_local_spec,
    layer_mlp,
    shared_mlp,
)
from .mesh import Mesh
from .modules import BiasedExperts, GroupedExperts, LatentAttention, PackedAttention, RMSNorm, RowLinear
from .weights import cut, entries_of, expert_range


class PolicyModel(GPTModel):
    """Megatron's GPT model whose last stage returns log-probs of the wanted tokens instead of logits. A token is wanted
    if its log-prob is computed; Megatron's own model returns the logits of all tokens."""

    _frequencies: torch.Tensor

    def __init__(self, config: BackendConfig, model: Any, mesh: Mesh) -> None:
        """Build this rank's pipeline stage of the model with HF config `model`, without setting its weights."""
        settings = transformer_config(config, model)
        topology = config.topology
        self._width = ceil_div(model.vocab_size, topology.tp)
        self.first_layer = mesh.place.pp * (model.num_hidden_layers // topology.pp)
        """Index of the stage's first layer in the whole model."""
        layers: Any = _layers(settings, model, self.first_layer, topology.pp)
        super().__init__(
            config=settings,
            transformer_layer_spec=layers,
            vocab_size=self._width * topology.tp,
            max_sequence_length=model.max_position_embeddings,
            pre_process=mesh.place.pp == 0,
            post_process=mesh.place.pp == topology.pp - 1,
            share_embeddings_and_output_weights=model.tie_word_embeddings,
            position_embedding_type="none",  # `forward` passes the rotary angles to the decoder.
        )
        # Megatron would count tokens and move the biases of experts, which only `trainer.moe.bias_update_rate` does.
        settings.moe_router_enable_expert_bias = False
        for router in self.routers:
            router.enable_expert_bias = False
        start = mesh.place.tp * self._width
        self._tokens = min(self._width, model.vocab_size - start)
        self._vocab: int | VocabShard = model.vocab_size
        if topology.tp > 1:
            self._vocab = VocabShard(mesh.tp, start, self._width, model.vocab_size)
        self._group = mesh.tp
        self._padding: int | None = model.pad_token_id
        frequencies, self._concentration = rotary(model)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # only our own steps call it
        self, rows: PackedRows, temperature: float, entropy: Entropy, candidates: torch.Tensor | None = None
    ) -> Any:
        """On the last pipeline stage, return (log-probs, entropies) of the wanted tokens, as `token_logprobs` does.
        With token ids `candidates`, int64 `[T, k]`, the result also has their log-probs.

        Other stages return hidden states `[S, 1, H]`. Under sequence parallelism S counts only this tensor-parallel
        rank's part of the tokens.
        """
        hidden = self._embed(rows.input_ids) if self.pre_process else None
        half = torch.outer(rows.positions.float(), self._frequencies)
        angles, plan = torch.cat([half, half], -1)[:, None], rows.attention
        latent = self.config.multi_latent_attention
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=None if latent else angles[:, None],
            packed_seq_params=replace(plan, angles=angles, concentration=self._concentration) if latent else plan,
        )
        if not self.post_process:
            return hidden
        # Each rank's logits give a part of the hidden states' gradient; backward of these calls sums the parts.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self._group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._group)
        # If embedding and output layer are tied but on different stages, the last stage has a copy of the embedding.
        tied_here = self.share_embeddings_and_output_weights and self.pre_process
        weight = self.shared_embedding_or_output_weight() if tied_here else self.output_layer.weight
        assert weight is not None, "the last stage has an output layer or shares the embedding"
        if len(weight) > self._tokens:
            weight = weight[: self._tokens]  # Padding follows, which makes the parts of all ranks equally large.

        def head(states: torch.Tensor) -> torch.Tensor:
            return F.linear(states, weight)

        states, layer = hidden[:, 0][rows.source], weight if isinstance(self._vocab, int) else head
        values = token_logprobs(
            states,
            rows.targets,
            layer,
            self._vocab,
            temperature=temperature,
            entropy=entropy,
            allowed=rows.allowed,
        )
        if candidates is None:
            return values
        return *values, candidate_logprobs(states, candidates, head, self._vocab, temperature)

    @property
    def routers(self) -> list[Any]:
        """Routers of the stage's layers with experts, in order."""
        return [layer.mlp.router for layer in self.decoder.layers if hasattr(layer.mlp, "router")]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all tensors that a HF folder contains, by name: parameters, then the biases of experts. Those of an
        adapter are left out."""
        biases = {name: value for name, value in self.named_buffers() if name.endswith(".expert_bias")}
        own = {name: value for name, value in self.named_parameters() if ".adapter." not in name}
        return {**own, **biases}

    def _embed(self, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the embeddings of the tokens. As in HF's embedding, no gradient reaches the vector of the padding
        token."""
        assert ids is not None, "the first stage receives token ids"
        # `[S, 1, H]` with the strides of a new tensor. With those that Megatron's transposition leaves, torch.matmul
        # makes S small products with a frozen weight instead of a large one.
        hidden = self.embedding(input_ids=ids, position_ids=None).flatten(0, 1)[:, None]
        if self.config.recompute_granularity == "full" and torch.is_grad_enabled() and not hidden.requires_grad:
            # Megatron's recomputation passes no gradients to a layer's parameters when its input needs none.
            hidden.requires_grad_()
        if self._padding is None:
            return hidden
        fixed = ids[0] == self._padding
        if self.config.sequence_parallel:
            fixed = fixed.chunk(self._group.size())[self._group.rank()]
        return hidden.detach().where(fixed[:, None, None], hidden)


def build_model(config: BackendConfig, source: HfSource, mesh: Mesh, device: torch.device) -> PolicyModel:
    """Build this rank's pipeline stage on `device`, and fill it with the rank's part of the weights from `source`."""
    model = PolicyModel(config, source.config, mesh)
    params = model.weights()
    with torch.no_grad(), source.reading():
        for entry in entries_of(list(params), model.first_layer, source.config):
            span = expert_range(source.config, mesh.part) if entry.is_expert else (None, None)
            tensors = [source.tensor(name, *span) for name in entry.hf_names]
            param, value = params[entry.name], cut(entry, tensors, source.config, mesh.part)
            assert param.shape == value.shape, (entry.name, param.shape, value.shape)
            param.copy_(value)
            # Megatron marks only parameters that it initialises itself. In the gradient's norm, parameters without the
            # mark count on the first tensor-parallel rank only.
            param.tensor_model_parallel = entry.split != "whole"  # type: ignore[attr-defined]
    return model.to(device)


def _layers(settings: TransformerConfig, model: Any, first: int, stages: int) -> TransformerBlockSubmodules:
    specs = []
    latent = settings.multi_latent_attention
    for layer in range(first, first + model.num_hidden_layers // stages):
        experts = num_experts(model) if is_expert_layer(model, layer) else None
        spec = get_gpt_layer_local_spec(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=settings.qk_layernorm, normalization="RMSNorm",
            multi_latent_attention=latent,
        )  # fmt: skip
        inner: Any = spec.submodules
        inner.input_layernorm = inner.pre_mlp_layernorm = RMSNorm
        if experts:
            layer_mlp(spec).experts = BiasedExperts if settings.add_bias_linear else GroupedExperts
            shared_mlp(spec).linear_fc2 = RowLinear
        else:
            layer_mlp(spec).linear_fc2 = RowLinear
        attention = inner.self_attention.submodules
        attention.core_attention, attention.linear_proj = PackedAttention, RowLinear
        if latent:
            inner.self_attention.module = LatentAttention
        elif settings.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        specs.append(spec)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)  # pyright: ignore[reportArgumentType]  # a class is what it builds from
