"""Prompts that are generated: numbers of the environment's own tasks, and tasks of reasoning-gym."""

from __future__ import annotations

import pytest

from headrace.actors.protocols import Prompt
from headrace.actors.rewards.config import RewardConfig
from headrace.actors.rewards.rubric import build_rubric
from headrace.actors.rollout.config import DataConfig
from headrace.actors.rollout.prompts import open_source


def test_every_tenth_task_of_an_environment_is_held_out() -> None:
    config = DataConfig(train="environment")
    train, held_out = open_source(config), open_source(config, validation=True)
    trained = [train.row(index).fields["task"] for index in range(90)]
    validated = [held_out.row(index).fields["task"] for index in range(10)]
    assert sorted(trained + validated) == list(range(100)) and validated == list(range(9, 100, 10))
    assert train.texts(9, 11) == ["10", "11"] and train.size is None and config.generated


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # cellpylib's, at the first import of reasoning_gym
def test_tasks_of_reasoning_gym_are_scored_by_it() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = DataConfig(train="reasoning-gym:chain_sum", options=options)
    source, again = open_source(config, seed=3), open_source(config, seed=3)
    rows = [source.row(index) for index in range(5)]
    assert rows == [again.row(index) for index in range(5)] != [open_source(config, seed=4).row(i) for i in range(5)]
    assert open_source(config, seed=3, validation=True).row(0) != rows[0]
    rubric = build_rubric(RewardConfig.model_validate({"functions": [{"kind": "reasoning_gym"}]}))
    for row in rows:
        prompt = Prompt("p", row.text, row.answer, row.fields)
        assert rubric.score(prompt, f" {row.answer}\n", "stop").reward == 1.0
        assert rubric.score(prompt, "many", "stop").reward < 0.1
    wrong = rubric.score(Prompt("p", "1+1", "2", {}), "2", "stop")
    assert not wrong.valid and "is not of reasoning-gym" in wrong.error
    with pytest.raises(ValueError, match="no data set 'chain_summ'; did you mean 'chain_sum'"):
        open_source(DataConfig(train="reasoning-gym:chain_summ"))
    with pytest.raises(ValueError, match=r"data.options: .* do not fit reasoning-gym:chain_sum"):
        open_source(DataConfig(train="reasoning-gym:chain_sum", options={"terms": 1}))
