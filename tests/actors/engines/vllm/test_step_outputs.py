"""Tests that each output of a step gets the routes of its own tokens, also with vLLM's own schedulers.

These schedulers are real. The model runner is made up: it has the routes of a table, which differ by request and token.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM need not be installed where types are checked; without it pyright takes the folder above for it.
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines import vllm
from headrace.actors.engines.vllm.step_outputs import (
    ROOM,
    RoutesOfSamples,
    SampleRoutes,
    StepRoutes,
    hand_out,
    joining_scheduler,
)
from headrace.tests.actors.engines.moe import EXPERTS, TOP_K, save_moe

BLOCK = 4
"""Number of tokens of a block of the stand-in for vLLM's scheduler."""
LAYERS, BLOCK_TOKENS, END = 3, 16, 2


@dataclass
class Output:
    """Stands in for the output of vLLM's scheduler for one request in a step, as far as routes go."""

    request_id: str
    new_token_ids: list[int]
    routed_experts: Any = None


@dataclass(frozen=True)
class Case:
    """Describes what a request does in a step."""

    new: int
    """Number of new tokens in its output."""
    computed: int
    """Number of tokens that the step computes for it."""
    drafted: bool = False
    """True if speculative decoding has drafted its tokens."""
    prompt: bool = False
    """True if the output is the first of the request."""


def some_routes(tokens: int) -> np.ndarray:
    """Return routes of which no two tokens have the same."""
    return np.arange(tokens * 6, dtype=np.uint8).reshape(tokens, 3, 2)


def hand_out_step(cases: Sequence[Case]) -> tuple[list[Output], list[np.ndarray | None]]:
    """Return the outputs of a step in which routes were handed out, and the routes that each must have at the end."""
    array, starts, end = some_routes(sum(case.computed for case in cases)), dict[str, int](), 0
    wanted: list[np.ndarray | None] = []
    for index, case in enumerate(cases):
        start, end = end, end + case.computed
        starts[str(index)] = start
        first = start if case.drafted else end - case.new
        routes = array[first : first + case.new] if case.new else None
        wanted.append(100 + some_routes(5) if case.prompt else routes)
    tokens = {str(index): case.computed for index, case in enumerate(cases)}
    drafted = {str(index) for index, case in enumerate(cases) if case.drafted}
    outputs = [Output(str(index), [7] * case.new) for index, case in enumerate(cases)]
    prompts = {str(index): f"request {index}" for index, case in enumerate(cases) if case.prompt}
    asked: list[str] = []

    def prompt_routes(request: str) -> np.ndarray:
        asked.append(request)
        return 100 + some_routes(5)

    outputs.reverse()  # vLLM's outputs come in another order than its rows
    hand_out(outputs, StepRoutes(array, starts, tokens, drafted), prompts, prompt_routes)
    assert sorted(asked) == list(prompts.values())
    return outputs, wanted[::-1]


@pytest.mark.parametrize(
    "cases",
    [
        [Case(1, 1)] * 5,
        [Case(1, 1)],
        [Case(1, 1), Case(1, 5, prompt=True), Case(0, 5), Case(0, 1), Case(1, 1)],  # of two, part of a prompt
        [Case(1, 5, prompt=True), Case(1, 1), Case(1, 1)],
        [Case(1, 1), Case(1, 9), Case(1, 1)],  # one that was preempted computes its earlier tokens again
        [Case(1, 4, drafted=True), Case(3, 4, drafted=True), Case(1, 1), Case(4, 4, drafted=True)],
        [Case(0, 1), Case(1, 1)],
        [Case(1, 1), Case(1, 1, prompt=True)],
    ],
)
def test_every_output_gets_the_routes_of_its_tokens(cases: list[Case]) -> None:
    outputs, wanted = hand_out_step(cases)
    own = [case.new for case in cases if case.new and not case.prompt]
    carried = [one.routed_experts for one in outputs if one.routed_experts is not None]
    assert [array.shape[1] for array in carried if array.ndim == 4] == [sum(own)]
    assert len(carried) == 1 + sum(case.prompt for case in cases)
    RoutesOfSamples().split(outputs)
    for one, routes in zip(outputs, wanted, strict=True):
        assert (one.routed_experts is None) == (routes is None)
        if routes is not None:
            found = np.concatenate([one.routed_experts])
            assert found.dtype == routes.dtype
            np.testing.assert_array_equal(found, routes)


def test_the_steps_of_a_sample_add_to_the_routes_of_its_first_output() -> None:
    samples = RoutesOfSamples()
    wanted = {"a": [some_routes(3)], "b": [some_routes(2 * ROOM)]}
    outputs = [Output(name, [7], *wanted[name]) for name in wanted]
    samples.split(outputs)
    firsts = [one.routed_experts for one in outputs]
    for step in range(3 * ROOM):
        outputs = [Output("b", [7] * 2), Output("a", [7])]
        routes = (some_routes(3) + step).astype(np.uint8)
        outputs[0].routed_experts = routes[None]
        samples.split(outputs)
        assert [one.routed_experts for one in outputs] == [None, None]
        wanted["b"].append(routes[:2])
        wanted["a"].append(routes[2:])
    assert all(isinstance(first, SampleRoutes) for first in firsts)
    np.testing.assert_array_equal(np.concatenate(firsts[:1]), np.concatenate(wanted["a"]))
    np.testing.assert_array_equal(np.concatenate(firsts[1:]), np.concatenate(wanted["b"]))
    assert np.array(firsts[0], np.int32, copy=True).dtype == np.int32
    assert set(samples._samples) == {"a", "b"}
    firsts.clear()
    assert not set(samples._samples), "a sample that vLLM's output loop has forgotten keeps its routes"


def test_a_sample_whose_first_routes_did_not_come_begins_with_the_next() -> None:
    samples, routes = RoutesOfSamples(), some_routes(2)
    first, second = Output("a", [7], routes[None, :1]), Output("a", [7], routes[None, 1:])
    samples.split([first])
    samples.split([second])
    np.testing.assert_array_equal(np.concatenate([first.routed_experts]), routes)


@pytest.mark.parametrize("cases", [[], [Case(0, 1)], [Case(1, 5, prompt=True), Case(0, 2)]])
def test_a_step_without_tokens_but_those_after_prompts_has_nothing_to_split(cases: list[Case]) -> None:
    outputs, wanted = hand_out_step(cases)
    RoutesOfSamples().split(outputs)
    assert [one.routed_experts is None for one in outputs] == [routes is None for routes in wanted]


def test_outputs_without_routes_stay_as_they_are() -> None:
    outputs = [Output("0", [7]), Output("1", [7])]
    RoutesOfSamples().split(outputs)
    assert [one.routed_experts for one in outputs] == [None, None]


def test_a_step_with_other_tokens_than_routes_is_refused() -> None:
    outputs, _ = hand_out_step([Case(1, 1)] * 3)
    del outputs[-1]
    with pytest.raises(RuntimeError, match="3 joined routes for 2 tokens"):
        RoutesOfSamples().split(outputs)


class Scheduler:
    """Stands in for vLLM's scheduler, as far as it lists blocks and answers."""

    def __init__(self, vllm_config: Mapping[str, Any]) -> None:
        self.enable_return_routed_experts = True
        self.routed_experts_mgr = Slots()
        self.requests = dict(vllm_config)
        self.listed: list[str] = []
        self.kv_cache_manager = SimpleNamespace(get_blocks=self._blocks)
        self._re_block_ids: dict[str, list[int]] = {}

    def _blocks(self, name: str) -> Any:
        self.listed.append(name)
        return SimpleNamespace(get_block_ids=lambda: ([0], [2, 1]))

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.enable_return_routed_experts:
            for name in scheduler_output.num_scheduled_tokens:
                self._re_block_ids[name] = self._blocks(name).get_block_ids()[1]
        if "broken" in scheduler_output.num_scheduled_tokens:
            raise KeyError("broken")

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        assert model_runner_output.routed_experts is None, "vLLM would cut an array for each request"
        outputs = [
            Output(name, list(model_runner_output.sampled[name])) for name in scheduler_output.num_scheduled_tokens
        ]
        for name in model_runner_output.finished:
            del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}


class Slots:
    """Stands in for vLLM's store of the routes of all tokens in the KV cache, by block and offset."""

    attn_gid = 1

    def __init__(self) -> None:
        self.routed_experts_by_slot = np.zeros((3 * BLOCK, 3, 2), np.uint8)

    def store_batch(self, data: np.ndarray, slot_mapping: np.ndarray) -> None:
        self.routed_experts_by_slot[slot_mapping] = data

    def get(self, blocks: list[int], num_tokens: int, token_start: int) -> np.ndarray:
        slots = (np.array(blocks)[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        return self.routed_experts_by_slot[slots[token_start:num_tokens]]


def request(name: str, prompt: int, start: int | None = None) -> Any:
    params = SimpleNamespace(routed_experts_prompt_start=start)
    return SimpleNamespace(request_id=name, num_prompt_tokens=prompt, sampling_params=params)


def scheduled(new: Mapping[str, int], cached: Mapping[str, tuple[int, int]]) -> Any:
    """Return what the scheduler decided for a step.

    new: tokens of requests that begin. cached: tokens of those that continue, and their number of output tokens.
    """
    return SimpleNamespace(
        num_scheduled_tokens={**new, **{name: tokens for name, (tokens, _) in cached.items()}},
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_output_tokens=[output for _, output in cached.values()]
        ),
        scheduled_spec_decode_tokens={},
    )


def ran(step: Any, slots: Sequence[int], *, silent: Sequence[str] = (), finished: Sequence[str] = ()) -> Any:
    """Return what the model runner returns for a step, in an order of its own. silent: requests without a new token."""
    ids = sorted(step.num_scheduled_tokens)
    routes = some_routes(sum(step.num_scheduled_tokens.values())).astype(np.int32)
    return SimpleNamespace(
        req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)}, finished=finished,
        sampled={name: [] if name in silent else [7] for name in ids},
        routed_experts=SimpleNamespace(routing_data=routes, slot_mapping=np.array(slots)),
    )  # fmt: skip


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Any:
    library = SimpleNamespace(scheduler_class=lambda config: Scheduler)  # the real one needs vLLM
    monkeypatch.setattr(vllm, "library", library, raising=False)
    return joining_scheduler(vllm_config={"old": request("old", 2), "new": request("new", 5, start=1)})


def test_the_scheduler_lists_blocks_of_prompts_alone(scheduler: Any) -> None:
    scheduler._update_after_schedule(scheduled({"new": 3}, {"old": (1, 3)}))
    assert scheduler.listed == ["new"] and scheduler._re_block_ids == {"new": [2, 1]}
    scheduler._update_after_schedule(scheduled({}, {"new": (2, 0), "old": (1, 4)}))  # the rest of its prompt
    assert scheduler.listed == ["new", "new"]
    scheduler._update_after_schedule(scheduled({}, {"new": (1, 1)}))  # its first token is being computed
    assert scheduler.listed == ["new", "new"]
    with pytest.raises(KeyError, match="broken"):
        scheduler._update_after_schedule(scheduled({"broken": 1}, {}))
    assert scheduler.enable_return_routed_experts


def test_a_prompt_in_two_parts_gets_its_routes_with_the_first_token(scheduler: Any) -> None:
    """`new` computes three tokens of its prompt, then two, while `old` continues; then both continue."""
    step = scheduled({"new": 3}, {"old": (1, 1)})
    scheduler._update_after_schedule(step)
    done = scheduler.update_from_output(step, ran(step, [8, 9, 10, 0], silent=["new"]))[0].outputs
    RoutesOfSamples().split(done)
    assert [one.request_id for one in done] == ["new", "old"] and done[0].routed_experts is None
    np.testing.assert_array_equal(done[1].routed_experts, some_routes(4)[3:])
    step = scheduled({}, {"old": (1, 2), "new": (2, 0)})
    scheduler._update_after_schedule(step)
    done = scheduler.update_from_output(step, ran(step, [11, 4, 1], finished=["new"]))[0].outputs
    RoutesOfSamples().split(done)
    np.testing.assert_array_equal(done[0].routed_experts, some_routes(3)[2:])
    # Without its first token, which it does not want; slots 8 to 11 and 4 are those of its blocks 2 and 1.
    np.testing.assert_array_equal(done[1].routed_experts, [*some_routes(4)[1:3], *some_routes(3)[:2]])
    assert scheduler._re_block_ids == {}


def test_the_blocks_of_a_request_that_is_gone_are_forgotten(scheduler: Any) -> None:
    step = scheduled({"new": 5}, {})
    scheduler._update_after_schedule(step)
    del scheduler.requests["new"]  # it was ended before its step was
    step = scheduled({}, {"old": (1, 1)})
    scheduler.update_from_output(step, ran(step, [0]))
    assert scheduler._re_block_ids == {}


def test_a_step_without_routes_is_left_to_vllm(scheduler: Any) -> None:
    step = scheduled({}, {"old": (1, 1)})
    output = ran(step, [0])
    output.routed_experts = None
    assert scheduler.update_from_output(step, output)[0].outputs == [Output("old", [7])]


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
        from vllm.v1.outputs import ModelRunnerOutput

        from headrace.actors.engines.vllm.cpu_routes import RecordedRoutes

        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        names = list(reversed(step.num_scheduled_tokens))
        routes, slots, sampled = [], [], []
        for name in names:
            tokens = np.arange(starts[name], starts[name] + step.num_scheduled_tokens[name])
            [blocks] = self.scheduler.kv_cache_manager.get_blocks(name).get_block_ids()
            routes.append(self.tables[name][tokens])
            slots.append(np.array(blocks)[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS)
            sampled.append([] if self.scheduler.requests[name].is_prefill_chunk else [5])
        index = {name: number for number, name in enumerate(names)}
        output: Any = ModelRunnerOutput(names, index, sampled_token_ids=sampled)
        output.routed_experts = RecordedRoutes(np.concatenate(routes).astype(np.int32), np.concatenate(slots))
        return output

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
            **library.route_arguments(),
            max_num_seqs=6,
            max_model_len=128,
            max_num_batched_tokens=32,
            enable_prefix_caching=False,
        )  # fmt: skip
    )
    config.scheduler_config.async_scheduling = overlap  # vLLM turns it off on CPUs
    blocks = 20  # of six requests with up to 7 blocks each, so that some must make room
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler = joining_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], attention)]),
        block_size=BLOCK_TOKENS,
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
