"""A run mixes two files of a user's, and its environment, reward and loss see the columns of their rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.tests.runs import cli_runs as runs

CODE = """
import json
from pathlib import Path

def note(who, values):
    with Path(__file__).with_name("log").open("a") as file:
        file.write(json.dumps([who, values]) + "\\n")

async def play(episode):
    turn = await episode.generate()
    episode.set_column("credit", 2.0, turn)
    note("environment", episode.prompt.fields["level"])
    return len(turn.text) / 10

def score(prompt, response, finish_reason):
    note("reward", prompt.fields["level"])
    return 0.1 * len(response)

def loss(inputs, scale):
    level, credit = inputs.columns["level"], inputs.columns["credit"]
    note("loss", [level.tolist(), sorted(set(credit.tolist())), len(credit) == len(inputs.logprobs)])
    return -scale * (level[inputs.row_ids] + credit) * inputs.advantages * inputs.logprobs
"""


@pytest.mark.processes
def test_columns_reach_environment_reward_and_loss(tmp_path: Path) -> None:
    (tmp_path / "brought.py").write_text(CODE)
    for name, level in (("low", 1), ("high", 5)):
        lines = [json.dumps({"prompt": f"r{number}=", "answer": "1", "level": level}) for number in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    columns = "[{name: level, dtype: int32}, {name: credit, kind: per_token}]"
    mixture = "[{source: low.jsonl, weight: 3}, {source: high.jsonl}]"  # in the run's folder, which is not that of Ray
    overrides = (
        "data.train=mixture", f"data.mixture={mixture}",
        f"data.columns={columns}", "environment.kind=brought:play", "loss.kind=brought:loss",
        "loss.options={scale: 0.5}", "reward.functions=[{kind: environment}, {kind: 'brought:score'}]",
        "validation.every=0", "algorithm.steps=2", "algorithm.prompts_per_step=8", "algorithm.group_size=2",
    )  # fmt: skip
    runs.finish(tmp_path / "run", *overrides, timeout_s=280)
    seen: dict[str, list] = {"environment": [], "reward": [], "loss": []}
    for line in (tmp_path / "log").read_text().splitlines():
        who, values = json.loads(line)
        seen[who].append(values)
    assert sorted(seen["environment"]) == sorted(seen["reward"]) and set(seen["reward"]) == {1, 5}
    rows = [level for levels, credit, whole in seen["loss"] if credit == [2.0] and whole for level in levels]
    assert sorted(rows) == sorted(seen["reward"]), seen  # those of tries on made-up rows have other credits
    assert 2 * rows.count(5) < rows.count(1)
    (tmp_path / "low.jsonl").write_text('{"prompt": "r1=", "answer": "1"}\n')
    code, output = runs.run(tmp_path / "other", *overrides, "environment.kind=single_turn")
    assert code == 2 and "low.jsonl' has no column 'level', which has no default" in output, output
