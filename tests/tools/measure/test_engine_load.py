"""Tests of what the works `engine-*` of `headrace bench gpu` share: their options, their requests and their rounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from headrace.actors.engines.protocol import SamplingParams
from headrace.bench.gpu.work_report import Progress
from headrace.tools.measure.engine_load import EngineOptions, check_options, made_up_load, ratio_figures, time_in_turns
from headrace.trainers.errors import UserError


def test_the_load_is_the_same_every_time() -> None:
    params = SamplingParams(n=4, max_new_tokens=16)
    load = made_up_load(3, (5, 9), 100, params)
    assert load == made_up_load(3, (5, 9), 100, params) and load.tokens == 3 * 4 * 16
    assert all(5 <= len(prompt) <= 9 and max(prompt) < 97 for prompt in load.prompts)


def test_options_that_do_not_fit_are_told(tmp_path: Path) -> None:
    options = EngineOptions(tmp_path, "engine-logprobs-tiny", overrides=("rollout.max_batch=2", "trainer.tp=2"))
    with pytest.raises(UserError, match=r"trainer.tp=2: no run is made .*, expected keys of rollout.\* only"):
        check_options(options, ("rollout",))
    check_options(options, ("rollout", "trainer"))
    if not torch.cuda.device_count():
        with pytest.raises(UserError, match="--work: got 'engine-routes' on a machine .*, expected engine-routes-tiny"):
            check_options(EngineOptions(tmp_path, "engine-routes"), ("rollout",))


def test_every_round_has_all_ways_in_changing_orders(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    async def run(way: str, number: int) -> float:
        seen.append((number, way))
        return float(len(seen))

    rates: dict[str, list[float]] = {}
    tell = Progress()
    tell.plan(*(f"round {number}" for number in range(1, 9)))
    asyncio.run(time_in_turns(("a", "b"), 8, run, tmp_path / "notes.jsonl", tell, rates))
    assert not tell.unfinished
    assert [number for number, _ in seen] == [number for number in range(-1, 8) for _ in "ab"]
    orders = {(seen[at][1], seen[at + 1][1]) for at in range(0, len(seen), 2)}
    assert orders == {("a", "b"), ("b", "a")}
    assert sorted(rates["a"] + rates["b"]) == list(range(3, 19)), "the first round warms up and does not count"
    noted = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [(line["round"], line["way"]) for line in noted] == seen


def test_ratios_are_those_of_rounds() -> None:
    figures = ratio_figures("arrays_vs_plain", [10.0, 19.0, 40.0], [10.0, 20.0, 80.0])
    assert figures == {"arrays_vs_plain": 0.95, "arrays_vs_plain_min": 0.5, "arrays_vs_plain_max": 1.0}
