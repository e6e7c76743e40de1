"""Has vLLM's scheduler record routes at less cost, and sends those of a step's tokens to the engine as one array.

vLLM's own way sends an array for each token of each request, and packs and unpacks each of them. Here the scheduler
joins the routes of a step's tokens, and the engine's process gives each request its part again before vLLM's output
loop looks at them. vLLM's own way also lists all blocks of every request in each step, where only those of a prompt
that ends are read. What a request gets, and when, stays the same.

    engine process     scheduler's outputs of a step -> `join` -> one message
    headrace's process                                   one message -> `split` -> vLLM's output loop
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SCHEDULER = f"{__name__}.joining_scheduler"
"""Value of vLLM's option `scheduler_cls` for an engine that records routes."""


def joining_scheduler(**settings: Any) -> Any:
    """Return vLLM's own scheduler for these settings, whose outputs have joined routes and which lists blocks of
    prompts alone. It runs in the engine process."""
    from . import library  # imports vLLM, which what looks at outputs alone does not need

    base: Any = library.scheduler_class(settings["vllm_config"])

    class JoiningScheduler(base):
        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            for one in outputs.values():
                join(one.outputs)
            return outputs

        def _update_after_schedule(self, scheduler_output: Any) -> None:
            self.enable_return_routed_experts = False  # else vLLM lists the blocks of all requests
            try:
                super()._update_after_schedule(scheduler_output)
            finally:
                self.enable_return_routed_experts = True
            group = self.routed_experts_mgr.attn_gid
            for request_id in scheduler_output.num_scheduled_tokens:
                if not self.requests[request_id].num_output_tokens:  # its prompt is not known to have ended
                    blocks = self.kv_cache_manager.get_blocks(request_id)
                    self._re_block_ids[request_id] = blocks.get_block_ids()[group]

    return JoiningScheduler(**settings)


def join(outputs: Sequence[Any]) -> None:
    """Join the routes of a step's outputs where each new token has one, `[tokens, layers, k]`.

    The first of these outputs gets those of all, `[1, tokens of all, layers, k]`, and the others None. Outputs with
    routes of prompt tokens stay as they are, and so do all if there is a token without a route.
    """
    parts = [one for one in outputs if one.new_token_ids]
    if any(one.routed_experts is None for one in parts):
        return
    parts = [one for one in parts if len(one.routed_experts) == len(one.new_token_ids)]
    if len(parts) < 2:
        return
    joined = np.concatenate([one.routed_experts for one in parts])[None]
    for one in parts:
        one.routed_experts = None
    parts[0].routed_experts = joined


def split(outputs: Sequence[Any]) -> None:
    """Undo `join`. Each output gets an array of its own, so that a long request does not keep those of others in
    memory. Raises RuntimeError if there are not as many routes as tokens."""
    joined = next((one.routed_experts for one in outputs if _is_joined(one.routed_experts)), None)
    if joined is None:
        return
    start = 0
    for one in outputs:
        if one.new_token_ids and (one.routed_experts is None or _is_joined(one.routed_experts)):
            end = start + len(one.new_token_ids)
            one.routed_experts, start = joined[0, start:end].copy(), end
    if start != joined.shape[1]:
        raise RuntimeError(f"routes: a step of vLLM has {joined.shape[1]} joined routes for {start} tokens")


def _is_joined(routes: np.ndarray | None) -> bool:
    return routes is not None and routes.ndim == 4
