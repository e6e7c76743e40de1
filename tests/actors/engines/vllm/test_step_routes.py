"""Tests that each output of a step gets the routes of its own tokens, and of what the scheduler lists and forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines import vllm
from headrace.actors.engines.vllm.step_outputs import (
    ROOM,
    RoutesOfSamples,
    SampleRoutes,
    StepRoutes,
    hand_out,
    joining_scheduler,
)

BLOCK = 4
"""Number of tokens of a block of the stand-in for vLLM's scheduler."""


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
    """Stands in for vLLM's scheduler, as far as it lists blocks and answers, in vLLM 0.26 and 0.30 alike."""

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
