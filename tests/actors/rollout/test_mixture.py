"""Mixtures of sources: each has its share of every block, is read in its own order, and nothing is left out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.rollout.config import DataConfig
from headrace.actors.rollout.prompt_sources import TaskSource
from headrace.actors.rollout.prompts import BLOCK, MixedSource, PromptStream, open_prompts, shares


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture(*sources: dict, **keys: object) -> DataConfig:
    return DataConfig.model_validate({"train": "mixture", "mixture": sources, **keys})


def opened(config: DataConfig, seed: int = 0, held_out: str | None = None) -> PromptStream:
    source = open_prompts(config, None, seed=seed, check_lengths=False, held_out=held_out).source
    return PromptStream(source, seed=seed)


def test_each_source_has_its_share_and_its_own_columns(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", *({"q": f"{n}?", "level": n} for n in range(7)))
    plain = write(tmp_path / "plain.jsonl", {"prompt": "p", "answer": "a", "data_source": "mine"})
    config = mixture(
        {"source": few, "prompt_field": "q", "answer_field": "", "template": "Q {prompt}", "weight": 3},
        {"source": plain},
        {"source": "task:reverse", "options": {"max_digits": 3}, "weight": 4},
    )
    prompts = [opened(config)[position] for position in range(2 * BLOCK)]
    counts = Counter(prompt.fields["data_source"] for prompt in prompts[:BLOCK])
    assert counts == {few: 375, "mine": 125, "task:reverse": 500}
    levels = [prompt.fields["level"] for prompt in prompts if prompt.text.startswith("Q ")]
    assert all(sorted(levels[at : at + 7]) == list(range(7)) for at in range(0, 749, 7))  # epochs, none left out
    assert len({tuple(levels[at : at + 7]) for at in range(0, 70, 7)}) > 1  # each in another order
    tasks = [prompt.text for prompt in prompts if prompt.text.startswith("r")]
    alone = TaskSource("reverse", held_out=False, options={"max_digits": 3})
    assert tasks == alone.texts(0, 1000)
    assert len({prompt.uid for prompt in prompts}) == len(prompts)


def test_a_prompt_is_a_function_of_its_position_and_the_seed() -> None:
    config = mixture({"source": "task:reverse"}, {"source": "task:arithmetic"})
    backwards = opened(config)
    texts = [backwards[position].text for position in reversed(range(5 * BLOCK // 2))][::-1]
    forwards, other = opened(config), opened(config, seed=1)
    assert texts == [forwards[position].text for position in range(5 * BLOCK // 2)]
    kinds = [[stream[position].text[0] == "r" for position in range(50)] for stream in (forwards, other)]
    assert kinds[0] != kinds[1] and 10 < sum(kinds[0]) < 40


def test_validation_reads_the_held_out_parts() -> None:
    config = mixture({"source": "task:reverse"}, {"source": "task:arithmetic"})
    train, held = opened(config), opened(config, held_out="validation")
    assert config.generated and not {train[n].text for n in range(300)} & {held[n].text for n in range(300)}


def test_what_cannot_be_mixed_is_said(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.jsonl", {"prompt": "p", "answer": "a"})
    with pytest.raises(ValueError, match="expected at least one"):
        mixture()
    with pytest.raises(ValueError, match="the source 'mixture'"):
        mixture({"source": "mixture"})
    with pytest.raises(ValueError, match="greater than 0"):
        mixture({"source": plain, "weight": 0})
    with pytest.raises(ValueError, match="weight 1 for 'task:reverse', expected at least 1/1000"):
        opened(mixture({"source": "task:reverse"}, {"source": plain, "weight": 5000}))
    with pytest.raises(ValueError, match="no column 'question'"):
        opened(mixture({"source": "task:reverse"}, {"source": plain, "prompt_field": "question"}))
    assert not mixture({"source": "task:reverse"}, {"source": plain}).generated


def test_shares_add_up_and_are_the_nearest() -> None:
    assert shares([1, 1, 1], 10).tolist() == [4, 3, 3]
    assert shares([2.5, 0.1], 1000).tolist() == [962, 38]
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = rng.uniform(0.1, 5, rng.integers(1, 9))
        counts = shares(weights.tolist(), BLOCK)
        assert counts.sum() == BLOCK and (np.abs(counts - weights / weights.sum() * BLOCK) < 1).all()


def test_the_order_is_found_without_reading_what_stands_before() -> None:
    class Far:
        def __init__(self) -> None:
            self.read: list[int] = []

        def __getitem__(self, position: int):  # noqa: ANN204
            self.read.append(position)
            return PromptStream(TaskSource("reverse", held_out=False))[0]

    streams = [Far(), Far()]
    source = MixedSource(["a", "b"], streams, [1, 3], seed=0)  # pyright: ignore[reportArgumentType]
    source.row(10**9)
    [place] = streams[0].read + streams[1].read
    assert place // 250_000_000 in (1, 3) or place in range(250_000_000, 750_000_500)
