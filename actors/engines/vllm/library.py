"""The only module of the engine that imports vLLM, so that it alone handles differences between vLLM's versions.

It works with vLLM 0.26 to 0.32; docs/internals/versions.md says where each was run.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM need not be installed where types are checked. If it is absent, pyright mistakes this folder, also named vllm,
# for it.
from __future__ import annotations

import copy
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from ...adapters.slot_memory import Copies
from .start import log_level

if TYPE_CHECKING:
    from .start import EngineStandby

try:
    with log_level():
        import vllm
        from vllm import ModelRegistry, SamplingParams
        from vllm.config import WeightTransferConfig, set_current_vllm_config
        from vllm.config.lora import MaxLoRARanks
        from vllm.distributed.weight_transfer.base import (
            WeightTransferEngine,
            WeightTransferInitInfo,
            WeightTransferUpdateInfo,
        )
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.lora.request import LoRARequest
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.exceptions import EngineDeadError
        from vllm.v1.outputs import ModelRunnerOutput
except ImportError as error:
    raise ImportError(
        "rollout.engine='vllm' needs vLLM: `make vllm` on a CPU, `pip install 'headrace[vllm]'` for CUDA "
        f"({type(error).__name__}: {error})"
    ) from error

__all__ = [
    "MOST_CACHE",
    "ModelRegistry",
    "MULTIMODAL_REGISTRY",
    "MultiModalKwargsItems",
    "PlaceholderRange",
    "Refused",
    "AsyncEngineArgs",
    "AsyncLLM",
    "DefaultModelLoader",
    "EngineDeadError",
    "RequestOutputKind",
    "SamplingParams",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "activated",
    "adapter_model",
    "adapter_request",
    "adapter_part",
    "adapter_parts",
    "check_attention",
    "bound_recorder",
    "cpu_worker",
    "create_config",
    "choose_kernels_without_adapters",
    "engine_process",
    "finalize_layerwise_reload",
    "forget_moe_kernels",
    "full_attention_group",
    "initialize_layerwise_reload",
    "hindrances",
    "leave_out_tokenizer",
    "load_tokenizer",
    "loader_parameter",
    "lora_rank",
    "mend_int8_on_cpus",
    "noted_copies",
    "on_cpu",
    "plain_parameters",
    "register_model_loader",
    "route_arguments",
    "routes_shape",
    "scheduler_class",
    "set_current_vllm_config",
    "slot_difference",
    "slot_of",
    "spare_slots",
    "structured_outputs",
    "take_what_is_free",
    "take_what_is_useful",
    "token_logprobs",
    "without_adapters",
]

MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0 that vLLM uses. vLLM silently raises lower positive temperatures to this value."""

FREE_SHARE = 0.95
"""Share of the free memory of a GPU that an engine takes when it cannot have its full share. Other processes on the GPU
need some room, for example for their kernels."""
MOST_CACHE = "HEADRACE_MOST_CACHE_BYTES"
"""Environment variable of vLLM's processes with the largest size in bytes of the key-value cache of a worker."""
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_PLAIN_EXPERT_KERNELS = ("TRITON", "BATCHED_TRITON")
"""Names of the MoE expert kernels that read experts in the layout of checkpoints. FlashInfer's kernels swap two halves
of the weights without changing their shapes, and CPU kernels repack the experts."""


def on_cpu() -> bool:
    """Return whether this vLLM was built for CPUs."""
    return current_platform.is_cpu()


def create_config(arguments: AsyncEngineArgs) -> Any:
    """Return vLLM's configuration made from its arguments. On GPUs, arguments that are not given get the defaults of
    vLLM's class for offline batches (`LLM`).

    On GPUs of 70 GB and more, these let a step process 16384 tokens instead of AsyncLLM's 2048, so that prompts and
    recomputed requests take fewer steps.
    """
    return arguments.create_engine_config(None if on_cpu() else UsageContext.LLM_CLASS)


def scheduler_class(config: Any) -> type:
    """Return the class of the scheduler that vLLM itself takes for a configuration. It runs in the engine process."""
    # The import takes seconds, and only the engine process needs it.
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler


def route_arguments() -> dict[str, Any]:
    """Return the arguments that make vLLM record routes. They have the form that `joining_scheduler` reads. Raises
    ValueError if this version of vLLM has no known way to do so."""
    if "routed_experts" in ModelRunnerOutput.__dataclass_fields__:  # vLLM has this field up to 0.30.
        return {"enable_return_routed_experts": True}
    if on_cpu():
        return {"worker_cls": f"{__package__}.cpu_routes.RecordingWorker"}
    raise ValueError(
        f"router_replay.enabled: got true, expected false on GPUs with vLLM {vllm.__version__}, whose way to record "
        "routes is not known here; 0.26 to 0.30 can"
    )


def cpu_worker() -> type:
    """Return vLLM's class of workers on CPUs."""
    from vllm.v1.worker.cpu_worker import CPUWorker  # The import takes seconds, and only workers need it.

    return CPUWorker


def routes_shape(config: Any) -> tuple[int, int]:
    """Return the number of decoder layers of a model, and the number of experts that each chooses for a token."""
    return config.model_config.get_total_num_hidden_layers(), config.model_config.get_num_experts_per_tok()


def full_attention_group(cache: Any) -> int:
    """Return the index of the layer group of a KVCacheConfig in which layers attend to all earlier tokens. Raises
    ValueError if there is no such group."""
    from vllm.v1.kv_cache_interface import is_full_attention_spec  # vLLM 0.26 does not have this function.

    for index, group in enumerate(cache.kv_cache_groups):
        if is_full_attention_spec(group.kv_cache_spec):
            return index
    raise ValueError("router_replay.enabled: got true, expected false, because no layer attends to all earlier tokens")


def bound_recorder(runner: Any) -> torch.Tensor:
    """Make the routers of a model runner's model write the experts that they choose into a tensor.

    Returns the tensor, int32 `[most tokens of a step, layers, k]`, which each step overwrites. For vLLM from 0.31 on.
    """
    # The import loads kernels, which only workers have.
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    # vLLM 0.30 requires another argument, so the type is not checked.
    config, make = runner.vllm_config, cast(Any, RoutedExpertsCapturer)
    capturer = make(config.scheduler_config.max_num_batched_tokens, config)
    with set_current_vllm_config(config):
        bind_routed_experts_capturer(runner.get_model(), capturer)
    return capturer.device_buffer


@contextmanager
def engine_process(standby: EngineStandby | None) -> Iterator[None]:
    """Context manager in which vLLM starts its engine process in `standby`. With None, or if the standby cannot take it
    (see `EngineStandby.run`), vLLM starts a new process.

    vLLM 0.26 to 0.32 do not let their user choose the process. Delete this function when vLLM does, or when it imports
    itself in less time.
    """
    if standby is None:
        yield
        return
    from vllm.v1.engine import utils

    module: Any = utils
    original = module.get_mp_context
    module.get_mp_context = lambda: _StandbyContext(standby, original())
    try:
        yield
    finally:
        module.get_mp_context = original


class _StandbyContext:
    """Context of multiprocessing that starts processes in a standby if the standby can take them."""

    def __init__(self, standby: EngineStandby, context: Any) -> None:
        self._standby = standby
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> Any:
        """Return a process that has not started yet."""
        planned = self._context.Process(target=target, name=name, kwargs=kwargs)
        return _StandbyProcess(planned, lambda: self._standby.run(target, name, kwargs))


class _StandbyProcess:
    """A process that is started in a standby. All attributes except `start` are those of the running process."""

    def __init__(self, planned: Any, take: Callable[[], Any]) -> None:
        """planned: process that is started if `take` returns None. take: function that returns the running process of a
        standby, or None."""
        self._process = planned
        self._take = take

    def start(self) -> None:
        taken = self._take()
        if taken is None:
            self._process.start()
        else:
            self._process = taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def take_what_is_free() -> None:
    """Make the workers in this process take less GPU memory than their configuration allows if less is free. Does
    nothing on CPUs.

    vLLM 0.26 to 0.32 refuse to start if less is free than `gpu_memory_utilization` allows, even with a key-value cache
    of fixed size. An engine that is started while a trainer holds memory of the same GPU would then never start. Delete
    this function when vLLM takes the setting as a maximum.
    """
    if on_cpu():
        return
    from vllm.v1.worker import gpu_worker  # The import takes seconds, and only workers need it.

    module: Any = gpu_worker
    module.request_memory = _lowering(module.request_memory)


def take_what_is_useful() -> None:
    """Bound the size of the key-value cache that the workers in this process choose. Does nothing on CPUs.

    It is in the environment variable MOST_CACHE; without that variable there is no bound. vLLM 0.26 to 0.32 fill the
    whole share `gpu_memory_utilization` with keys and values. Its `kv_cache_memory_bytes` is no maximum, but is taken
    even if less is free. Delete this function when vLLM has such a maximum.
    """
    if on_cpu():
        return
    from vllm.v1.worker.gpu_worker import Worker  # The import takes seconds, and only workers need it.

    Worker.determine_available_memory = _capped(Worker.determine_available_memory)


def _capped(determine: Any) -> Any:
    """Return vLLM's `determine_available_memory`, changed to return no more than MOST_CACHE says.

    It measures again where vLLM gives up because another process has freed memory of the GPU meanwhile.
    """

    def available(worker: Any) -> int:
        try:
            found = determine(worker)
        except AssertionError as error:
            if "memory profiling" not in str(error):
                raise
            # What others have freed is free for this engine, too. vLLM compares with its start only in this check.
            worker.init_snapshot.free_memory = worker.init_snapshot.total_memory
            found = determine(worker)
        most, chosen = os.environ.get(MOST_CACHE), worker.cache_config.kv_cache_memory_bytes is None
        return min(found, int(most)) if most and chosen else found

    return available


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of one token of each row of `logits` (`[N, V]`), float32 `[N]`. vLLM's second model runner
    computes its log-probs with the same kernel. tokens: int64 `[N]`. Needs a GPU."""
    # This module needs Triton, which few CPU machines have.
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    return compute_token_logprobs(logits, tokens[:, None])[:, 0]


def _lowering(request_memory: Any) -> Any:
    """Return vLLM's `request_memory`, changed to lower `gpu_memory_utilization` to FREE_SHARE of the free memory."""

    def request(snapshot: Any, cache_config: Any, *args: Any) -> int:
        free = FREE_SHARE * snapshot.free_memory / snapshot.total_memory
        if snapshot.free_memory < snapshot.total_memory * cache_config.gpu_memory_utilization:
            cache_config.gpu_memory_utilization = free
        return request_memory(snapshot, cache_config, *args)

    return request


def check_attention(config: Any) -> None:
    """Raise ValueError when vLLM runs on a CPU and has no attention kernel for the model there. vLLM would die at the
    first request."""
    head_size, sizes = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if on_cpu() and not config.model_config.use_mla and head_size not in sizes:
        raise ValueError(
            f"its attention heads have size {head_size}, but vLLM has CPU kernels only for {', '.join(map(str, sizes))}"
        )


def keep_prefills_whole(config: Any) -> None:
    """Configure vLLM on a CPU so that each prompt, and each recomputed request, is processed in one model step.

    In vLLM up to 0.32 on CPUs, a step that ends within a prompt rewinds the random generator of a seeded request by
    an offset, which CPU generators do not support, and the engine process dies. Delete this function when vLLM no
    longer does so.
    """
    if on_cpu():
        scheduler = config.scheduler_config
        scheduler.enable_chunked_prefill = False
        scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, config.model_config.max_model_len)


def leave_out_tokenizer(config: Any) -> None:
    """Configure vLLM so that its processes load no tokenizer. Loading it takes each of them a second or more.

    Requests are token ids. Only stop texts need the tokenizer; `load_tokenizer` then loads it.
    """
    config.model_config.skip_tokenizer_init = True


def _refused() -> type[Exception]:
    """Return the class of vLLM's errors for requests that it does not take. Before vLLM 0.32 they are ValueErrors."""
    from vllm import exceptions

    return getattr(exceptions, "VLLMValidationError", ValueError)


Refused = _refused()


def structured_outputs(schema: str) -> Any:
    """Return vLLM's constraint for a JSON schema; None for ""."""
    return StructuredOutputsParams(json=schema) if schema else None


def load_tokenizer(llm: AsyncLLM) -> None:
    """Load the tokenizer that `leave_out_tokenizer` has left out, so that vLLM finds the stop texts of requests."""
    config = copy.copy(llm.model_config)
    config.skip_tokenizer_init = False
    llm.output_processor.tokenizer = cached_tokenizer_from_config(config)


def forget_moe_kernels(model: torch.nn.Module) -> None:
    """Make the next weight load set up the kernels of the MoE experts again, as the first load did.

    In vLLM 0.28 to 0.32 on CPUs, UnquantizedFusedMoEMethod prepacks experts at the first load only. Updated experts are
    then read in the wrong layout, which gives wrong log-probs and no error. Delete this function when vLLM prepacks at
    every load.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def hindrances(
    model: torch.nn.Module, but: Collection[torch.nn.Module] = ()
) -> Iterator[tuple[torch.nn.Module | None, str]]:
    """Yield each module into whose live parameters weights must not be written directly, and the reason. The module is
    None if it also derives tensors from the weights of others, so that it cannot be loaded again alone.

    Writing is allowed if every parameter is still as the loader made it: its kernels read the layout of the checkpoint,
    and nothing is quantised, repacked or derived. but: modules of whose weights this is known to be so.
    """
    known = {id(module) for module in but}
    for name, module in model.named_modules():
        # A quantisation method is checked as the `quant_method` of its layer.
        if isinstance(module, QuantizeMethodBase) or id(module) in known:
            continue
        method = getattr(module, "quant_method", None)
        if method is not None and not _is_plain(method) and not isinstance(module, Attention):
            yield module, f"{name or type(model).__name__} uses {type(method).__name__}"
        elif hasattr(module, "process_weights_after_loading") and not isinstance(module, Attention):
            yield None, f"{name}: {type(module).__name__} derives tensors from its weights"
        elif hasattr(module, "cpu_linear"):
            yield module, f"{name} is multiplied with a copy that a kernel of CPUs has"
        elif reason := _changed_layout(module):
            yield module, f"{name}.{reason}"


def loader_parameter(module: torch.nn.Module, name: str, memory: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter as vLLM's loaders knew it before kernels changed its form, with `memory` as its numbers."""
    made: Any = memory.detach()
    recorded = get_layerwise_info(module).restore_metadata[0][name]
    made.__class__, made.__dict__ = recorded.__class__, recorded.__dict__.copy()
    restore_layer_refs(made, module)
    made.weight_loader = _get_original_loader(made)  # A layerwise reload leaves one that loads nothing outside of it.
    return made


def plain_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return, by name, the parameters that no kernel repacks.

    Their modules have no quantisation method, or one that leaves them as the loader made them, such as embeddings on
    GPUs. Kernels of CPUs multiply with a copy (`cpu_linear`).
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        plain = _is_plain(method) and not _changed_layout(module) and not hasattr(module, "cpu_linear")
        kept = method is None or plain
        if kept and not hasattr(module, "process_weights_after_loading"):
            for name, parameter in module.named_parameters(recurse=False):
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found


def mend_int8_on_cpus() -> None:
    """Make the int8 kernels of CPUs keep the scales with which they compute, and let their layers have adapters.

    oneDNN has only the address of a layer's scales. vLLM's layerwise reload frees that memory when it has copied the
    scales to where the old ones were, so that the layers then compute with whatever comes to be there (vLLM 0.32).
    oneDNN also takes the weight itself, of which adapters want to know the device: an empty one stays in its place.
    """
    if not on_cpu():
        return
    # Only workers need this module.
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    process = CPUInt8ScaledMMLinearKernel.process_weights_after_loading

    def process_and_keep(kernel: Any, layer: Any) -> None:
        process(kernel, layer)
        kernel.headrace_scales = layer.weight_scale
        if layer.weight is None:
            layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)

    CPUInt8ScaledMMLinearKernel.process_weights_after_loading = process_and_keep


def _is_plain(method: Any) -> bool:
    """Return whether the kernels of this quantisation method read exactly what the loaders write."""
    if type(method).__name__ == "UnquantizedFusedMoEMethod":
        return getattr(method.unquantized_backend, "name", "") in _PLAIN_EXPERT_KERNELS
    return type(method).__name__ in _PLAIN_METHODS


def _changed_layout(module: torch.nn.Module) -> str:
    """Describe a parameter whose layout has changed since the loader made it; "" if none has. Parameters of the
    module's children do not count."""
    made: dict[str, Any] = get_layerwise_info(module).restore_metadata[0]
    if isinstance(module, Attention) and not module._parameters:
        return ""  # It had scales of its cache while it was loaded, which are not sent and stay as they are.
    live = dict(module.named_parameters(recurse=False))
    for name in (live.keys() | made.keys()) - SKIP_TENSORS:  # vLLM's own reload writes these in place.
        before, now = made.get(name), live.get(name)
        if before is None or now is None:
            return f"{name} was added or removed after loading"
        if (before.shape, before.stride(), before.dtype) != (now.shape, now.stride(), now.dtype):
            return f"{name} was repacked from {tuple(before.shape)} to {tuple(now.shape)}"
        if hasattr(before, "weight_loader") and not hasattr(now, "weight_loader"):
            return f"{name} lost its loader"
    return ""


# ---------------- These functions are about adapters (LoRA).


def lora_rank(rank: int) -> int:
    """Return the smallest size of vLLM's slots that has room for adapters of `rank`. Raises ValueError if there is
    none."""
    sizes = typing.get_args(MaxLoRARanks)
    if rank > max(sizes):
        raise ValueError(f"trainer.lora.rank: got {rank}, expected at most {max(sizes)}, the largest that vLLM serves")
    return min(size for size in sizes if size >= rank)


def spare_slots() -> int:
    """Return how many slots must stay empty, beside those for adapters.

    On CPUs, in a step with other requests that have adapters, vLLM 0.26 to 0.32 give requests without one the last
    slot (index -1 of `lora_ops.bgmv_shrink`). An empty slot changes nothing. Delete this when vLLM leaves them alone.
    """
    return 1 if on_cpu() else 0


def adapter_request(name: str, number: int) -> Any:
    """Return vLLM's reference to an adapter, which requests carry. Its path names no file, because `AdapterStore` hands
    vLLM the tensors. name: part of the hash of cached prefixes. number: id of the adapter in vLLM, above 0."""
    return LoRARequest(name, number, f"/headrace/no-file/{number}")


def choose_kernels_without_adapters() -> None:
    """Make the workers in this process choose the kernels of experts as if there were no adapters. Does nothing on
    GPUs.

    vLLM 0.32 computes experts with Triton as soon as LoRA is enabled, even if no expert gets an adapter, and a worker
    on a CPU dies at its first request. Delete this function when vLLM has CPU kernels for it.
    """
    if not on_cpu():
        return
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # Only workers need this module.

    module: Any = unquantized_fused_moe_method
    select = module.select_unquantized_moe_backend

    def plain_backend(moe_config: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select(moe_config=plain)

    module.select_unquantized_moe_backend = plain_backend


def without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Return a view of a model in which its layers are plain, as before LoRA was enabled.

    Layers with room for adapters contain the plain ones. The view shares all parameters with the model; weights are
    loaded into it under their usual names.
    """
    from vllm.lora.layers import BaseLayerWithLoRA  # The import loads kernels, which only workers have.

    views: dict[int, torch.nn.Module] = {}

    def view(module: Any) -> Any:
        if module is None or isinstance(module, BaseLayerWithLoRA):
            return module and module.base_layer
        if id(module) not in views:
            inner = {name: view(child) for name, child in module._modules.items()}
            views[id(module)] = module
            if any(inner[name] is not child for name, child in module._modules.items()):
                views[id(module)] = made = copy.copy(module)
                made._modules = inner
                get_layerwise_info(made).restore_metadata = get_layerwise_info(module).restore_metadata
        return views[id(module)]

    return view(model)


def adapter_parts(manager: Any) -> frozenset[str]:
    """Return the names in vLLM of all modules that can have an adapter; merged layers count as their parts.

    manager: the WorkerLoRAManager of a worker, here and below.
    """
    inner = manager._adapter_manager
    return frozenset(part for name in inner.modules for part in inner.packed_modules.get(name, [name]))


def adapter_part(manager: Any, tensor: str) -> str:
    """Return the name in vLLM of the module to which an adapter's tensor (PEFT's name) belongs."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    return parse_fine_tuned_lora_name(tensor, renames(manager._adapter_manager.model))[0]


def adapter_model(manager: Any, number: int, rank: int, alpha: float, named: Mapping[str, torch.Tensor]) -> Any:
    """Return vLLM's LoRAModel with these tensors, on the device and in the dtype of the slots. vLLM scales the tensors
    of the matrices B in place."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    return LoRAModel.from_lora_tensors(
        number,
        dict(named),
        PEFTHelper(r=rank, lora_alpha=cast(Any, alpha), target_modules=[]),
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=renames(manager._adapter_manager.model),
    )


def noted_copies(manager: Any, rank: int, named: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], Copies]:
    """Note the copies with which vLLM fills a slot, without making them.

    Returns all tensors in which layers have their slots, and the copies. named: tensors of an adapter in the dtype of
    the slots, whose matrices B are scaled already. Raises ValueError if no layer has one of its matrices.
    """
    inner = manager._adapter_manager
    model = adapter_model(manager, 1, rank, rank, named)  # With alpha = rank, vLLM does not scale them again.
    inner._create_merged_loras_inplace(model)
    if lost := sorted(model.loras.keys() - inner.modules.keys()):
        raise ValueError(f"adapter: no layer has the matrices of {lost[0]}")
    stacks: list[torch.Tensor] = []
    noted: Copies = []
    for name, layer in inner.modules.items():
        twin, firsts = copy.copy(layer), len(stacks)
        stacks += (*layer.lora_a_stacked, *layer.lora_b_stacked)
        if (lora := model.loras.get(name)) is None:
            continue
        noting = [_Noting(stack, number, noted) for number, stack in enumerate(stacks[firsts:], firsts)]
        twin.lora_a_stacked = tuple(noting[: len(layer.lora_a_stacked)])
        twin.lora_b_stacked = tuple(noting[len(layer.lora_a_stacked) :])
        twin.set_lora(0, lora.lora_a, lora.lora_b)
    return stacks, noted


class _Noting:
    """Stands for a tensor with the slots of a layer, and notes what is copied into slot 0."""

    def __init__(self, stack: torch.Tensor, number: int, noted: list[Any], place: tuple[Any, ...] = ()) -> None:
        self._stack, self._number, self._noted, self._place = stack, number, noted, place

    @property
    def shape(self) -> torch.Size:
        return self._stack.shape

    def __getitem__(self, key: tuple[Any, ...]) -> _Noting:
        return _Noting(self._stack, self._number, self._noted, key)

    def __setitem__(self, key: int, value: float) -> None:
        assert (key, value) == (0, 0), "a slot is cleared before it is filled"

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self._noted.append((self._number, self._place[1:], source))


def activated(manager: Any, request: Any, add: Callable[[Any], bool], write: Callable[[int], None]) -> bool:
    """Make vLLM take an adapter into a slot without filling it.

    Calls `write` with the slot's number if the adapter had none before. Returns what `add`, vLLM's
    `WorkerLoRAManager.add_adapter`, returns.
    """
    inner = manager._adapter_manager
    before, modules = slot_of(manager, request.lora_int_id), inner.modules
    inner.modules = {}  # vLLM fills the slots of these layers.
    try:
        done = add(request)
    finally:
        inner.modules = modules
    after = slot_of(manager, request.lora_int_id)
    if after is not None and after != before:
        write(after)
    return done


def slot_of(manager: Any, number: int) -> int | None:
    """Return the slot of an adapter; None if it has none."""
    held = manager._adapter_manager.lora_index_to_id
    return held.index(number) if number in held else None


def slot_difference(manager: Any, model: Any) -> str:
    """Compare the slot of an adapter with what vLLM makes of the adapter's tensors. Returns what differs, or "".

    vLLM scales, merges and slices the tensors; here it does so into an empty copy of each layer's slot. model:
    LoRAModel with the tensors as sent, which is consumed.
    """
    inner = manager._adapter_manager
    if model.id not in inner.lora_index_to_id:
        return "it is in no slot"
    slot = inner.lora_index_to_id.index(model.id)
    inner._create_merged_loras_inplace(model)
    if lost := sorted(model.loras.keys() - inner.modules.keys()):
        return f"no layer has the matrices of {lost[0]}"
    found: dict[str, torch.Tensor] = {}
    for name, layer in inner.modules.items():
        twin = copy.copy(layer)
        twin.lora_a_stacked, twin.lora_b_stacked = (
            tuple(torch.zeros_like(stacked[:1]) for stacked in side)
            for side in (layer.lora_a_stacked, layer.lora_b_stacked)
        )
        if (lora := model.loras.get(name)) is not None:
            twin.set_lora(0, lora.lora_a, lora.lora_b)
        pairs = zip(
            (*twin.lora_a_stacked, *twin.lora_b_stacked), (*layer.lora_a_stacked, *layer.lora_b_stacked), strict=True
        )
        found[name] = torch.stack([(made[0] != kept[slot]).any() for made, kept in pairs]).any()
    wrong = [name for name, one in zip(found, torch.stack(list(found.values())).tolist(), strict=True) if one]
    return f"the slot of {wrong[0]} differs ({len(wrong)} of {len(found)} layers do)" if wrong else ""


def renames(model: Any) -> Any:
    """Return vLLM's mapper of the names of modules, without the merging of layers; None if nothing is renamed."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # vLLM 0.26 has another name for the same method.
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
