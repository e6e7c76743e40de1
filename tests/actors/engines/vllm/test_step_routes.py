"""Tests that the routes of a step are joined and split again without a change, and of what the scheduler lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines import vllm
from headrace.actors.engines.vllm.step_routes import join, joining_scheduler, split


@dataclass
class Output:
    """Stands in for the output of vLLM's scheduler for one request in a step, as far as routes go."""

    new_token_ids: list[int]
    routed_experts: np.ndarray | None


def outputs(*sizes: tuple[int, int | None]) -> list[Output]:
    """Return an output for each number of new tokens and number of routes, None for no routes at all."""
    rng = np.random.default_rng(0)
    return [
        Output([7] * tokens, None if routes is None else rng.integers(0, 128, (routes, 3, 2), np.uint8))
        for tokens, routes in sizes
    ]


def routes_of(given: Sequence[Output]) -> list[np.ndarray | None]:
    return [None if one.routed_experts is None else one.routed_experts.copy() for one in given]


def expect_same(found: Sequence[np.ndarray | None], wanted: Sequence[np.ndarray | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "sizes",
    [
        [(1, 1)] * 5,
        [(1, 1), (1, 40), (1, 1), (0, None), (1, 1)],  # a prompt of 40 tokens, and an output without a token
        [(2, 2), (1, 1), (3, 3)],  # several tokens in a step
        [(1, 40), (1, 1), (1, 1)],
        [(0, None), (1, 1), (1, 1)],
    ],
)
def test_every_output_gets_its_routes_again(sizes: list[tuple[int, int | None]]) -> None:
    step = outputs(*sizes)
    wanted = routes_of(step)
    join(step)
    carried = [one.routed_experts for one in step if one.routed_experts is not None and one.routed_experts.ndim == 4]
    assert [array.shape[1] for array in carried] == [sum(tokens for tokens, routes in sizes if tokens == routes)]
    assert sum(one.routed_experts is not None for one in step) == 1 + sum(routes == 40 for _, routes in sizes)
    split(step)
    expect_same(routes_of(step), wanted)
    for one in step:
        assert one.routed_experts is None or one.routed_experts.base is None or one.routed_experts.shape[0] == 40


@pytest.mark.parametrize("sizes", [[(1, 1)], [(1, None), (1, 1), (1, 1)], [(1, None)] * 3, [(1, 40), (1, 1)], []])
def test_what_cannot_be_joined_stays_as_it_is(sizes: list[tuple[int, int | None]]) -> None:
    step = outputs(*sizes)
    wanted = routes_of(step)
    join(step)
    expect_same(routes_of(step), wanted)
    split(step)
    expect_same(routes_of(step), wanted)


def test_a_step_with_other_tokens_than_routes_is_refused() -> None:
    step = outputs((1, 1), (1, 1), (1, 1))
    join(step)
    del step[-1]
    with pytest.raises(RuntimeError, match="3 joined routes for 2 tokens"):
        split(step)


class Scheduler:
    """Stands in for vLLM's scheduler, as far as it lists the blocks of requests, in vLLM 0.26 and 0.30 alike."""

    def __init__(self, vllm_config: Any) -> None:
        self.enable_return_routed_experts = True
        self.routed_experts_mgr = SimpleNamespace(attn_gid=1)
        self.requests = {name: SimpleNamespace(num_output_tokens=tokens) for name, tokens in vllm_config.items()}
        self.listed: list[str] = []
        self.kv_cache_manager = SimpleNamespace(get_blocks=self._blocks)
        self._re_block_ids: dict[str, list[int]] = {"earlier": [1]}

    def _blocks(self, name: str) -> Any:
        self.listed.append(name)
        return SimpleNamespace(get_block_ids=lambda: ([0], [7, 8]))

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        if self.enable_return_routed_experts:
            for name in scheduler_output.num_scheduled_tokens:
                self._re_block_ids[name] = self._blocks(name).get_block_ids()[self.routed_experts_mgr.attn_gid]
        if "broken" in scheduler_output.num_scheduled_tokens:
            raise KeyError("broken")


def test_the_scheduler_lists_blocks_of_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(scheduler_class=lambda config: Scheduler)  # the real one needs vLLM
    monkeypatch.setattr(vllm, "library", library, raising=False)
    scheduler = joining_scheduler(vllm_config={"prompt": 0, "decodes": 3, "waits": 0})
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"prompt": 8, "decodes": 1}))
    assert scheduler.listed == ["prompt"] and scheduler._re_block_ids == {"earlier": [1], "prompt": [7, 8]}
    with pytest.raises(KeyError, match="broken"):
        scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"broken": 1}))
    assert scheduler.enable_return_routed_experts
