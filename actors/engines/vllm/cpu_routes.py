"""Records the experts that routers choose on CPUs, where vLLM from 0.31 on does not.

From that release on, only vLLM's second model runner records routes. It needs Triton, which does not run on CPUs. Here
a worker class of Headrace reads them from the first model runner through vLLM's own hooks in the routers. The scheduler
keeps them by the slot of each token in the key-value cache, as vLLM 0.26 to 0.30 do. Cached prefixes and preempted
requests therefore keep their routes. Delete this module when vLLM records routes on CPUs again.

    worker      routers -> buffer of a step -> `RecordedRoutes` in the outputs of the model runner
    scheduler   `SlotRoutes.store_batch` -> routes of a prompt with `SlotRoutes.get`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import library


@dataclass(frozen=True, slots=True)
class RecordedRoutes:
    """Routes of the tokens of one step, with the names that they have in vLLM 0.30."""

    routing_data: np.ndarray
    """Ids of the experts, int32 `[tokens, layers, k]`."""
    slot_mapping: np.ndarray
    """Slot of each token in the key-value cache, int64 `[tokens]`."""


class SlotRoutes:
    """Keeps the routes of all tokens in the key-value cache, by slot. A slot is a block's number times its size, plus
    the token's place in the block."""

    def __init__(self, config: Any, cache: Any) -> None:
        """config: vLLM's configuration. cache: vLLM's KVCacheConfig; one of its groups must have full attention."""
        self.attn_gid = library.full_attention_group(cache)
        self._block_size = cache.kv_cache_groups[self.attn_gid].kv_cache_spec.block_size
        shape = library.routes_shape(config)
        # The largest expert id is one less than the number of experts.
        dtype = np.uint8 if config.model_config.get_num_experts() <= 256 else np.uint16
        self.routed_experts_by_slot = np.zeros((cache.num_blocks * self._block_size, *shape), dtype)

    def store_batch(self, data: np.ndarray, slot_mapping: np.ndarray) -> None:
        """Store the routes of a step, `[tokens, layers, k]`, in the slots of its tokens, `[tokens]`."""
        self.routed_experts_by_slot[slot_mapping] = data

    def get(self, blocks: Sequence[int], num_tokens: int, token_start: int = 0) -> np.ndarray:
        """Return the routes of a request's tokens from `token_start` up to `num_tokens`, `[tokens, layers, k]`.

        blocks: numbers of the request's blocks.
        """
        tokens = np.arange(token_start, num_tokens)
        slots = np.asarray(blocks)[tokens // self._block_size] * self._block_size + tokens % self._block_size
        return self.routed_experts_by_slot[slots]


class RecordingWorker(library.cpu_worker()):
    """vLLM's worker on CPUs, whose model runner also returns a step's routes. They are its `routed_experts`."""

    model_runner: Any

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        record_routes(self.model_runner, library.bound_recorder(self.model_runner), kv_cache_config)


def record_routes(runner: Any, recorded: Any, cache: Any) -> None:
    """Make vLLM's first model runner add RecordedRoutes to the outputs of each step.

    recorded: tensor of the experts of a step's tokens, int32 `[at least tokens, layers, k]`, which the routers fill.
    cache: vLLM's KVCacheConfig.
    """
    group, inner = library.full_attention_group(cache), runner.sample_tokens

    def sample_tokens(grammar: Any) -> Any:
        state, found = runner.execute_model_state, None
        if state is not None:  # A draft model may run next and overwrite both, so they are copied here.
            tokens = state.scheduler_output.total_num_scheduled_tokens
            slots = runner.input_batch.block_table[group].slot_mapping.gpu
            found = RecordedRoutes(recorded[:tokens].numpy().copy(), slots[:tokens].numpy().copy())
        outputs = inner(grammar)
        if found is not None:
            outputs.routed_experts = found
        return outputs

    runner.sample_tokens = sample_tokens
