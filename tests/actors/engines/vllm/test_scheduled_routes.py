"""Tests that vLLM's own schedulers, changed to record routes at less cost, still give each request its own routes.

The schedulers are real. The model runner is made up: it has the routes of a table, which differ by request and token.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM need not be installed where types are checked; without it pyright takes the folder above for it.
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.vllm.step_outputs import RoutesOfSamples, joining_scheduler
from headrace.tests.actors.engines.moe import EXPERTS, TOP_K, save_moe

LAYERS, BLOCK, END = 3, 16, 2


@dataclass
class Traffic:
    """Requests that pass through a scheduler, and the routes that come out."""

    scheduler: Any
    in_flight: int
    """Number of steps that are decided before the first of them is answered."""
    tables: dict[str, np.ndarray] = field(default_factory=dict)
    """Routes of the tokens of each request, prompt first."""
    samples: RoutesOfSamples = field(default_factory=RoutesOfSamples)
    found: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """vLLM's output loop collects these routes of each request, by its id, and joins them when it ends."""
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of output tokens of each request."""
    preempted: int = 0
    """Number of requests in all steps that were put off to make room for others."""

    def submit(self, name: str, prompt: int, tokens: int, *, start: int = 0) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        rng = np.random.default_rng(sum(name.encode()) * 1000 + prompt)
        self.tables[name] = rng.integers(0, EXPERTS, (prompt + tokens, LAYERS, TOP_K), np.uint8)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, routed_experts_prompt_start=start)
        params.update_from_generation_config({}, END)
        self.scheduler.add_request(Request(name, [3 + len(name)] * prompt, params, None))

    def run(self, *, abort: str = "", after: int = 0) -> None:
        """Run steps until all requests are done. abort: name of a request that is ended after the `after`-th step is
        decided."""
        from vllm.v1.request import RequestStatus

        pending, decided = deque[tuple[Any, Any]](), 0
        while self.scheduler.has_unfinished_requests() or pending:
            step = self.scheduler.schedule()
            if step.total_num_scheduled_tokens:
                decided += 1
                assert decided < 2000, "the requests do not end"
                self.preempted += len(step.preempted_req_ids or ())
                pending.append((step, self._computed(step)))
                if abort and decided == after:
                    self.scheduler.finish_requests(abort, RequestStatus.FINISHED_ABORTED)
                if len(pending) < self.in_flight:
                    continue
            for outputs in self.scheduler.update_from_output(*pending.popleft()).values():
                self.samples.split(outputs.outputs)
                for one in outputs.outputs:
                    if one.routed_experts is not None:
                        self.found[one.request_id].append(one.routed_experts)
                    assert len(self.found[one.request_id]) == 1, "the first output has what all others add to"
                    self.tokens[one.request_id] += len(one.new_token_ids)

    def _computed(self, step: Any) -> Any:
        """Return what a model runner returns for a step, with the requests in the opposite order."""
        from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists

        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        names = list(reversed(step.num_scheduled_tokens))
        routes, slots, sampled = [], [], []
        for name in names:
            tokens = np.arange(starts[name], starts[name] + step.num_scheduled_tokens[name])
            [blocks] = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
            routes.append(self.tables[name][tokens])
            slots.append(np.array(blocks)[tokens // BLOCK] * BLOCK + tokens % BLOCK)
            sampled.append([] if self.scheduler.requests[name].is_prefill_chunk else [5])
        recorded = RoutedExpertsLists(np.concatenate(routes).astype(np.int32), np.concatenate(slots))
        index = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled_token_ids=sampled, routed_experts=recorded)

    def expect_routes(self, name: str, start: int = 0) -> None:
        """A request has the routes of all its tokens but the last, from `start` on."""
        found, table = np.concatenate(self.found[name]), self.tables[name]
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, table[start:-1])


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(params=["one step at a time", "two steps in flight"])
def traffic(request: pytest.FixtureRequest, moe_folder: str) -> Iterator[Traffic]:
    library = pytest.importorskip("headrace.actors.engines.vllm.library")
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    overlap = request.param == "two steps in flight"
    config = library.create_config(
        library.AsyncEngineArgs(
            model=moe_folder,
            skip_tokenizer_init=True,
            enable_return_routed_experts=True,
            max_num_seqs=6,
            max_model_len=128,
            max_num_batched_tokens=32,
            enable_prefix_caching=False,
        )  # fmt: skip
    )
    config.scheduler_config.async_scheduling = overlap  # vLLM turns it off on CPUs
    blocks = 20  # of six requests with up to 7 blocks each, so that some must make room
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler = joining_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )
    assert isinstance(scheduler, AsyncScheduler) == overlap
    yield Traffic(scheduler, in_flight=2 if overlap else 1)


@pytest.mark.vllm
@pytest.mark.long
def test_requests_that_are_put_off_and_prompts_in_parts_get_their_routes(traffic: Traffic) -> None:
    for number in range(12):
        traffic.submit(f"request {number}", prompt=7 + 5 * number, tokens=50 - 3 * number)
    traffic.run()
    assert traffic.preempted
    for name, table in traffic.tables.items():
        number = int(name.split()[1])
        assert traffic.tokens[name] == 50 - 3 * number and len(table) == 57 + 2 * number
        traffic.expect_routes(name)
    assert traffic.scheduler._re_block_ids == {}


@pytest.mark.vllm
@pytest.mark.long
def test_routes_of_a_prompt_s_beginning_can_be_left_out(traffic: Traffic) -> None:
    traffic.submit("all", prompt=40, tokens=3)
    traffic.submit("later turn", prompt=40, tokens=3, start=30)
    traffic.run()
    traffic.expect_routes("all")
    traffic.expect_routes("later turn", start=30)


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("after", [1, 2, 3])
def test_the_end_of_a_request_changes_nothing_for_others(traffic: Traffic, after: int) -> None:
    """`ended` computes its prompt in the first three steps."""
    traffic.submit("ended", prompt=80, tokens=9)
    traffic.submit("other", prompt=20, tokens=9)
    traffic.run(abort="ended", after=after)
    traffic.expect_routes("other")
    assert traffic.scheduler._re_block_ids == {}
