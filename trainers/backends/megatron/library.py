"""Imports everything that Headrace uses from megatron-core, so that differences between its releases are handled here.

It works with megatron-core 0.16 (Python 3.11) and 0.19 (Python 3.12 and newer); docs/internals/versions.md says where
each was run. TransformerEngine and Apex are not needed.
"""

from __future__ import annotations

# pyright: reportMissingImports=false
# Types are also checked on machines without megatron-core.
import inspect
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns about a dozen missing optional packages.
    try:
        from megatron.core import __version__ as MEGATRON_VERSION
        from megatron.core import parallel_state
    except ImportError as error:
        raise ValueError(
            f"trainer.backend: got 'megatron', which needs megatron-core: pip install 'headrace[megatron]' ({error})"
        ) from None
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import forward_step, get_tensor_shapes
    from megatron.core.tensor_parallel import (
        RowParallelLinear,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention
    from megatron.core.utils import get_model_config, get_model_type

# Without TransformerEngine, megatron-core 0.16 never sets this name, and every router's forward raises NameError, also
# on GPUs (moe_utils.py, RouterGatingLinearFunction). Later releases set the name, so these lines can be deleted when
# 0.16 is no longer supported.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None

# Without TransformerEngine, megatron-core 0.16 takes a stand-in for it, and attention in a latent space cannot be built
# (multi_latent_attention.py, MultiLatentAttention). These lines can be deleted with those above.
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False

_STEP_TAKES_MODEL_TYPE = "model_type" in inspect.signature(schedules.backward_step).parameters
"""True if the schedules' backward step takes the model's type, as in megatron-core 0.16."""

__all__ = [
    "MEGATRON_VERSION",
    "ChainedOptimizer",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "MLASelfAttention",
    "MLATransformerConfig",
    "MoELayer",
    "OptimizerConfig",
    "P2PCommunicator",
    "ParamKey",
    "ParamPredicate",
    "RowParallelLinear",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "backward_step",
    "copy_to_tensor_model_parallel_region",
    "finalize_model_grads",
    "forward_step",
    "layer_mlp",
    "shared_mlp",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_model_config",
    "get_tensor_shapes",
    "is_layer_window_attention",
    "moe_utils",
    "parallel_state",
    "tensor_parallel_random",
    "token_dispatcher",
]


def backward_step(received: Any, sent: Any, gradient: Any, model: Any) -> Any:
    """Run the backward pass of one microbatch through a pipeline stage, and return the gradient of what it received.

    received, sent: activations of the forward pass. gradient: that of `sent`. model: the stage.
    """
    step: Any = schedules.backward_step
    kind = (get_model_type(model),) if _STEP_TAKES_MODEL_TYPE else ()
    return step(received, sent, gradient, *kind, get_model_config(model))


def layer_mlp(spec: Any) -> Any:
    """Return the submodules of the MLP or of the experts of a layer's spec, which may be replaced."""
    mlp = spec.submodules.mlp
    # megatron-core 0.19 has a partial here.
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


def shared_mlp(spec: Any) -> Any:
    """Return the submodules of the shared experts of a layer with experts, which may be replaced."""
    shared = layer_mlp(spec).shared_experts
    return shared.submodules if isinstance(shared, ModuleSpec) else shared.keywords["submodules"]
