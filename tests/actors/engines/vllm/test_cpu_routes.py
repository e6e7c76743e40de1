"""Routes that Headrace's own worker records on CPUs: each token's in its slot, copied before anything else runs."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
cpu_routes = pytest.importorskip("headrace.actors.engines.vllm.cpu_routes")
pytestmark = [pytest.mark.vllm, pytest.mark.long]

BLOCK, LAYERS, TOP_K = 4, 3, 2


def cache_of(blocks: int) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    sizes: Any = dict(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    groups = [SlidingWindowSpec(sliding_window=8, **sizes), FullAttentionSpec(**sizes)]
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec([str(i)], one) for i, one in enumerate(groups)])


def config_of(experts: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: LAYERS,
            get_num_experts=lambda: experts,
            get_num_experts_per_tok=lambda: TOP_K,
        )
    )


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_a_prompt_gets_the_routes_of_its_blocks_in_their_order(experts: int, dtype: Any) -> None:
    routes = cpu_routes.SlotRoutes(config_of(experts), cache_of(5))
    assert routes.attn_gid == 1 and routes.routed_experts_by_slot.shape == (5 * BLOCK, LAYERS, TOP_K)
    tokens = np.arange(6 * LAYERS * TOP_K, dtype=np.int32).reshape(6, LAYERS, TOP_K)
    routes.store_batch(tokens, np.array([12, 13, 14, 15, 4, 5]))  # of blocks 3 and 1
    np.testing.assert_array_equal(routes.get([3, 1], 6), tokens)
    np.testing.assert_array_equal(routes.get([3, 1], 6, 3), tokens[3:])
    assert routes.get([3, 1], 6).dtype == dtype


def test_a_step_s_routes_are_copied_before_its_tokens_are_sampled() -> None:
    recorded = torch.arange(8 * LAYERS * TOP_K, dtype=torch.int32).view(8, LAYERS, TOP_K)
    slots = torch.arange(8) + 20
    wanted = recorded[:3].clone()

    def sample_tokens(grammar: Any) -> Any:
        recorded.zero_()  # as a draft model would
        slots.zero_()
        return SimpleNamespace(tokens=grammar)

    table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=slots))
    runner = SimpleNamespace(
        sample_tokens=sample_tokens,
        execute_model_state=SimpleNamespace(scheduler_output=SimpleNamespace(total_num_scheduled_tokens=3)),
        input_batch=SimpleNamespace(block_table=[None, table]),
    )
    cpu_routes.record_routes(runner, recorded, cache_of(5))
    found = runner.sample_tokens("x")
    assert found.tokens == "x"
    np.testing.assert_array_equal(found.routed_experts.routing_data, wanted)
    np.testing.assert_array_equal(found.routed_experts.slot_mapping, [20, 21, 22])
    runner.execute_model_state = None  # a step without tokens
    assert not hasattr(runner.sample_tokens("y"), "routed_experts")
