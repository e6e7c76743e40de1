"""Prompts are selected and ordered by the success rates in a column of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.rollout.data_config import DataConfig
from headrace.actors.rollout.prompts import PromptStream, open_prompts
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.cluster.rollout_specs import fingerprint
from headrace.trainers.config.config import Config

RATES = [0.5, 0.0, 1.0, 0.25, 0.5, 0.9, 0.1, 0.5]


def data(folder: Path, rates: Sequence[Any] = RATES, **keys: Any) -> DataConfig:
    rows = [{"prompt": f"p{index}", "answer": "", "solved": rate} for index, rate in enumerate(rates)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return DataConfig(train=str(path), **{"success_field": "solved", **keys})


def stream(config: DataConfig, seed: int = 3) -> tuple[PromptStream, tuple[str, ...]]:
    opened = open_prompts(config, None, seed=seed, check_lengths=False)
    return PromptStream(opened.source, seed=seed, rates=opened.rates), opened.notes


def texts(prompts: PromptStream, epoch: int, size: int) -> list[str]:
    return [prompts[position].text for position in range(epoch * size, (epoch + 1) * size)]


def test_prompts_outside_of_the_range_are_left_out_and_counted(tmp_path: Path) -> None:
    config = data(tmp_path, success_range=[0.1, 0.9])
    prompts, notes = stream(config)
    for epoch in (0, 1):
        assert sorted(texts(prompts, epoch, 6)) == ["p0", "p3", "p4", "p5", "p6", "p7"]
    assert notes == (
        f"2 of 8 training prompts of {config.train} are left out, as their success rates are not in "
        "data.success_range=[0.1, 0.9]",
    )
    assert texts(prompts, 0, 6) != texts(prompts, 1, 6)
    assert stream(data(tmp_path))[1] == ()


def test_an_epoch_goes_from_easy_to_hard_and_shuffles_equals(tmp_path: Path) -> None:
    prompts, _ = stream(data(tmp_path, success_range=[0.1, 1.0], curriculum="easy_first"))
    epochs = [texts(prompts, epoch, 7) for epoch in range(6)]
    for epoch in epochs:
        assert epoch[:2] == ["p2", "p5"] and epoch[5:] == ["p3", "p6"] and sorted(epoch[2:5]) == ["p0", "p4", "p7"]
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_each_source_of_a_mixture_has_its_order(tmp_path: Path) -> None:
    path = data(tmp_path).train
    config = DataConfig.model_validate(
        {"train": "mixture", "mixture": [{"source": path}, {"source": "task:reverse"}], "success_field": "solved",
         "success_range": [0.2, 1.0], "curriculum": "easy_first"}
    )  # fmt: skip
    prompts = PromptStream(open_prompts(config, None, seed=1, check_lengths=False).source, seed=1)
    mine = [text for text in (prompts[position].text for position in range(60)) if text.startswith("p")]
    assert mine[:2] == mine[6:8] == ["p2", "p5"] and mine[5] == mine[11] == "p3" and "p1" not in mine


def test_held_out_prompts_stay_as_they_are(tmp_path: Path) -> None:
    config = data(tmp_path, success_range=[0.4, 0.6])
    held_out = config.model_copy(update={"validation": config.train})
    assert open_prompts(held_out, None, seed=0, check_lengths=False, held_out="validation").source.size == 8


@pytest.mark.parametrize(
    ("rates", "keys", "words"),
    [
        ([0.5, 1.5], {}, "data.success_field: got 'solved', but this column of line 2 of .* is 1.5, expected a number"),
        ([0.5, None], {}, "data.success_field: got 'solved', but this column of line 2 of .* is None, expected a numb"),
        ([True], {}, "data.success_field: got 'solved', but this column of line 1 of .* is True, expected a number fr"),
        ([0.5], {"success_field": "rate"}, "data.success_field: got 'rate', but this column of line 1 .* does not exi"),
        (
            [0.0, 0.2],
            {"success_range": [0.5, 0.9]},
            "data.success_range: got .0.5, 0.9., but .* all 2 prompts of",
        ),
    ],
)
def test_columns_without_rates_are_refused(tmp_path: Path, rates: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stream(data(tmp_path, rates, **keys))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"success_field": "solved"},
            "data.success_field: got 'solved' with data.train='task:reverse', expected it un",
        ),
        (
            {"curriculum": "easy_first"},
            "data.curriculum: got 'easy_first' with data.success_field=None, expected 'none'",
        ),
        ({"success_range": [0.9, 0.1]}, "data.success_range: got [0.9, 0.1], expected the smaller end first"),
        ({"success_range": [0, 2]}, "data.success_range.1: got 2, expected a number <= 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys: dict[str, Any], sentence: str) -> None:
    assert only_problem({"data": keys}).startswith(sentence)


def test_a_journal_belongs_to_one_order_of_prompts() -> None:
    def print_of(**keys: Any) -> str:
        return fingerprint(Config.model_validate({"data": {"train": "p.jsonl", **keys}}))

    prints = [print_of(), print_of(success_field="s"), print_of(success_field="s", curriculum="easy_first")]
    assert len({*prints, print_of(success_field="s", success_range=[0.1, 1.0])}) == 4
    assert "success" not in prints[0]
