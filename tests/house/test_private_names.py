"""Every private name of another library that the package uses is listed here, with the test that notices its change.

A release may change such a name without a word. Before a library's version moves, run the tests in its list.
"""

from __future__ import annotations

import ast
import re

from headrace.tests.house import tree

NAMES: dict[str, dict[str, str]] = {
    "torch": {
        "torch._C._cuda_clearCublasWorkspaces": "trainers/backends/test_offload_gpu.py",
        "torch._C._distributed_c10d.PrefixStore": "actors/weight_sync/transports/test_rendezvous.py",
        "torch._foreach_copy_": "codecs/weights/test_gpu_scatter.py",
        "torch._foreach_mul_": "trainers/backends/test_train_step.py",
        "torch._foreach_norm": "trainers/backends/test_train_step.py",
        "torch._foreach_zero_": "actors/engines/vllm/test_slot_memory.py",
        "torch.UntypedStorage._new_shared_cuda": "actors/weight_sync/transports/test_gpu.py",
        "torch.distributed.checkpoint.default_planner"
        "._EmptyStateDictLoadPlanner": "bench/train_steps/test_benchmark.py",
        "torch.distributed.checkpoint.state_dict_loader._load_state_dict": "bench/train_steps/test_benchmark.py",
        "torch.ops.aten._unsafe_view": "trainers/backends/fsdp/test_fp8_layers.py",
        "torch.nested._internal.nested_tensor.NestedTensor": "dataplane/contract/test_rows.py",
        "torch.utils.data._utils.collate.default_collate_fn_map": "dataplane/test_streaming.py",
        "torch.utils._python_dispatch.TorchDispatchMode": "actors/engines/vllm/test_copy_plan.py",
        "_local_scalar_dense": "actors/engines/vllm/test_copy_plan.py",
        "_Options": "actors/weight_sync/transports/test_rendezvous.py",
        "_buffers": "trainers/backends/fsdp/test_sharding.py",
        "_end_coalescing": "actors/weight_sync/pairs/test_expert_layouts.py",
        "_start_coalescing": "actors/weight_sync/pairs/test_expert_layouts.py",
        "_device_types": "actors/train/test_process_groups.py",
        "_get_backend": "actors/train/test_process_groups.py",
        "_modules": "actors/engines/vllm/test_copy_plan.py",
        "_new_process_group_helper": "actors/train/test_process_groups.py",
        "_non_persistent_buffers_set": "trainers/backends/fsdp/test_sharding.py",
        "_ragged_idx": "dataplane/contract/test_rows.py",
        "_set_pg_timeout": "actors/train/test_process_groups.py",
        "_set_sequence_number_for_group": "actors/weight_sync/transports/test_rendezvous.py",
        "_share_cuda_": "actors/weight_sync/transports/test_gpu.py",
    },
    "transformers": {
        "_get_num_multimodal_tokens": "actors/images/test_processor.py",
        "_keep_in_fp32_modules_strict": "trainers/backends/fsdp/test_sharding.py",
        "_apply_gate": "trainers/backends/fsdp/test_experts.py",
        "_attn_implementation": "trainers/backends/fsdp/test_causal_lm.py",
        "_is_expert_parallel": "trainers/backends/fsdp/test_experts.py",
        "_is_hf_initialized": "trainers/backends/fsdp/test_sharding.py",
        "_no_split_modules": "trainers/backends/fsdp/test_causal_lm.py",
        "_supports_attention_backend": "trainers/backends/fsdp/test_causal_lm.py",
    },
    "ray": {
        "ray._private.authentication.authentication_token_setup.ensure_token_if_auth_enabled": (
            "trainers/cluster/test_ray_cluster.py"
        ),
        "ray._private.internal_api.memory_summary": "bench/transfer/test_pictures.py",
        "ray._private.node.Node": "trainers/cluster/test_ray_cluster.py",
        "ray._private.runtime_env.py_modules.upload_py_modules_if_needed": "runs/test_differing_hosts.py",
        "ray._private.parameter": "trainers/cluster/test_ray_cluster.py",
        "ray._private.services": "trainers/cluster/test_ray_cluster.py",
        "ray._private.state.state": "trainers/cluster/test_gpu_bundles.py",
        "ray._private.worker": "trainers/cluster/test_ray_cluster.py",
        "ray._raylet.ClusterID": "trainers/cluster/test_ray_cluster.py",
        "ray._raylet.Config": "trainers/cluster/test_ray_cluster.py",
        "ray._raylet.GcsClient": "trainers/cluster/test_ray_cluster.py",
        "ray._raylet.PlacementGroupID": "trainers/pool/server/test_bundles.py",
        "_webui_url": "trainers/cluster/test_ray_cluster.py",
    },
    "vllm": {
        "vllm.model_executor.model_loader.reload.layerwise._get_original_loader": (
            "actors/engines/vllm/test_quantized_engine.py"
        ),
        "_adapter_manager": "actors/engines/vllm/test_adapters.py",
        "_create_merged_loras_inplace": "actors/engines/vllm/test_adapters.py",
        "_get_mm_fields_config": "actors/engines/vllm/vision/test_prepared_pictures.py",
        "_get_model_cls": "actors/engines/vllm/vision/test_prepared_pictures.py",
        "_load_adapter": "actors/engines/vllm/test_adapters.py",
        "_processor_factory": "actors/engines/vllm/vision/test_prepared_pictures.py",
        "_registry": "actors/engines/vllm/test_weights.py",
        "_re_block_ids": "actors/engines/vllm/test_step_outputs.py",
        "_run_output_handler": "actors/engines/vllm/test_engine.py",
        "_shadow_obj": "actors/engines/vllm/test_engine.py",  # of zmq's contexts
        "_update_after_schedule": "actors/engines/vllm/test_step_outputs.py",
    },
    "megatron-core": {
        "_forward_impl": "trainers/backends/megatron/test_meshes.py",
        "_get_cuda_rng_state": "trainers/backends/megatron/test_backend.py",
        "_get_model_param_range_map": "trainers/backends/megatron/test_weights.py",
        "_global_process_group_list": "trainers/backends/megatron/test_backend.py",
        "_set_cuda_rng_state": "trainers/backends/megatron/test_backend.py",
    },
    "verifiers": {"_interception": "actors/environments/test_verifiers_process.py"},
    "the standard library": {"_max_workers": "dataplane/client/test_async_client.py"},  # of a pool of threads
}
"""Library -> private name -> test file. A name from an import, or of a module, is written with all its parts."""
OVERRIDDEN = {"_forward_impl", "_re_block_ids", "_update_after_schedule"}
"""Listed names that classes of the package also define, in order to replace what a library does."""
PUBLIC = {"torch._C", "_exit"}
"""Names that are the beginning of a listed one, and `os._exit`, which is documented."""


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") and part != "_" for part in name.split("."))


def _defined() -> set[str]:
    """Return the names that the package itself defines, its parameters and the attributes of `self` among them."""
    found = set[str]()
    for path in tree.package():
        for node in tree.nodes(path):
            if isinstance(node, tree.Definition):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
    return found


def _named(node: ast.AST) -> list[str]:
    """Return the names of imports, attributes and `getattr` that a node holds, those of torch with all their parts."""
    if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        whole = ast.unparse(node)
        return [whole if re.fullmatch(r"torch\.[\w.]+", whole) else node.attr]
    inner: list[ast.expr] = []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
        inner = node.args
    elif isinstance(node, ast.Tuple) and len(node.elts) == 3:  # a patch: its owner, its name and what it becomes
        inner = node.elts
    return [one.value for one in inner[1:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def test_the_list_names_what_the_package_uses() -> None:
    own = _defined()
    used = {name for path in tree.package() for node in tree.nodes(path) for name in _named(node)}
    foreign = {name for name in used if _is_private(name) and ("." in name or name not in own)}
    listed = {name for names in NAMES.values() for name in names}
    assert foreign - PUBLIC | OVERRIDDEN == listed


def test_the_tests_of_the_list_exist() -> None:
    tests = {test for names in NAMES.values() for test in names.values()}
    assert [test for test in sorted(tests) if f"tests/{test}" not in tree.files()] == []
