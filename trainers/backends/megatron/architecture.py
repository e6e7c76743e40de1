"""Translates a HF config and the train mesh to a Megatron config, and checks that Megatron can train the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ....codecs.tokens.routes import is_expert_layer, num_experts
from ..config import BackendConfig, TrainerConfig
from ..families.megatron import FAMILIES, require_family, settings_of
from ..model_split import check_split, expert_tensor_size, mesh_problems
from .library import MLATransformerConfig, TransformerConfig


def check_fits(config: BackendConfig, model: Any) -> None:
    """Raise ValueError, naming the key, when Megatron cannot train the model under the settings in `config`. `model` is
    the model's HF config."""
    _check_model(config, model)
    for problem in mesh_problems(config.trainer):
        raise ValueError(problem)
    check_split(config.trainer, model)


def _check_model(config: BackendConfig, model: Any) -> None:
    for name in ("offload", "offload_optimizer", "optimizer", "fp8"):
        value, plain = getattr(config.trainer, name), TrainerConfig.model_fields[name].default
        if value != plain:
            raise ValueError(f"trainer.{name}: got {value!r}, expected {plain!r} with trainer.backend = 'megatron'")
    if config.trainer.head == "full":
        raise ValueError("trainer.head: got 'full', expected 'auto' or 'selected' with trainer.backend = 'megatron'")
    require_family(config.model, model)
    if config.trainer.lora.rank:
        _check_adapter(config.trainer)


def _check_adapter(trainer: TrainerConfig) -> None:
    lora = trainer.lora
    if trainer.groups:
        raise ValueError(
            f"trainer.groups: got {len(trainer.groups)} entries with trainer.lora.rank = {lora.rank}, expected [] with "
            "trainer.backend = 'megatron'"
        )
    if lora.experts:
        raise ValueError("trainer.lora.experts: got True, expected False with trainer.backend = 'megatron'")
    if lora.base != "model":
        raise ValueError(f"trainer.lora.base: got {lora.base!r}, expected 'model' with trainer.backend = 'megatron'")
    if trainer.moe.bias_update_rate:
        raise ValueError(
            f"trainer.moe.bias_update_rate: got {trainer.moe.bias_update_rate}, expected 0 with trainer.lora.rank = "
            f"{lora.rank}, because an adapter leaves the biases of the base as they are"
        )
    if lora.dropout and trainer.recompute == "selective":
        raise ValueError(
            f"trainer.lora.dropout: got {lora.dropout}, expected 0 with trainer.recompute = 'selective', which would "
            "drop other inputs when it computes them again"
        )


def head_width(model: Any) -> int:
    """Return the width of one attention head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def rotary(model: Any) -> tuple[torch.Tensor, float]:
    """Return the frequencies of a model's rotary positions, and the factor of cosines and sines, as HF computes them.

    Frequencies are in radians per position, float32 `[rotary width / 2]`. If the rotary width is below that of a head,
    the rest of the head has no positions.
    """
    settings = model.rope_parameters
    if settings["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[settings["rope_type"]](model, device=torch.device("cpu"))
    width = int(head_width(model) * settings.get("partial_rotary_factor", 1.0))
    return 1.0 / settings["rope_theta"] ** (torch.arange(0, width, 2).float() / width), 1.0


def layer_windows(model: Any) -> list[bool]:
    """Return for each decoder layer whether its attention sees only the last `sliding_window` tokens."""
    kinds = getattr(model, "layer_types", None) or ["sliding_attention"] * model.num_hidden_layers
    return [bool(getattr(model, "sliding_window", None)) and kind == "sliding_attention" for kind in kinds]


def transformer_config(config: BackendConfig, model: Any) -> TransformerConfig:
    """Build Megatron's config from the train settings and the HF config `model`. Dropout is off, as in the other
    backends."""
    topology = config.topology
    half = config.trainer.mixed_precision
    dtype = torch.bfloat16 if half else torch.float32
    recompute: dict[str, Any] = {}
    if config.trainer.recompute == "full":
        count = config.trainer.recompute_layers or model.num_hidden_layers
        recompute = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": count}
    family, windows = FAMILIES[model.model_type], layer_windows(model)
    kind = MLATransformerConfig if family.latent else TransformerConfig
    built = kind(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_width(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        window_size=(model.sliding_window - 1, 0) if any(windows) else None,
        window_attn_skip_freq=[int(near) for near in windows],
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=half,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,  # Every weight is read from the HF folder.
        tensor_model_parallel_size=topology.tp,
        sequence_parallel=config.trainer.sequence_parallel,
        pipeline_model_parallel_size=topology.pp,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
        expert_tensor_parallel_size=expert_tensor_size(topology),
        variable_seq_lengths=True,
        calculate_per_token_loss=True,  # Losses and gradients stay sums; Megatron must not divide them.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        moe_token_dispatcher_type="alltoall",
        **recompute,
        **{"add_bias_linear": False, **settings_of(family.settings, model)},
        **_experts(model),
    )
    rope = model.rope_parameters
    if rope["rope_type"] == "yarn" and not family.latent:
        # Megatron multiplies cosines and sines by a factor that it computes from these attributes.
        names = {"rotary_scaling_factor": "factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
        for name, key in names.items():
            setattr(built, f"yarn_{name}", rope.get(key) or None)
    return built


def _experts(model: Any) -> dict[str, Any]:
    layers = [int(is_expert_layer(model, layer)) for layer in range(model.num_hidden_layers)]
    if not any(layers):
        return {}
    return {
        "num_moe_experts": num_experts(model),
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",  # Megatron must not add a balancing loss.
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        **settings_of(FAMILIES[model.model_type].experts, model),
    }
