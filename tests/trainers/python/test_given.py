"""Rows and settings of a script become files and sections, and mistakes in them are refused in one sentence."""

from __future__ import annotations

import json
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Config, load_config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError
from headrace.trainers.python import given
from headrace.trainers.python.given import GivenRows, given_sections, reward_sections

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "ä"}]


def written(rows: Any, folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(GivenRows(folder).write(rows, "train")).read_text().splitlines()]


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), iter(ROWS), deque(ROWS)], ids=lambda rows: type(rows).__name__)
def test_rows_become_lines(rows: Any, tmp_path: Path) -> None:
    assert written(rows, tmp_path / "new" / "run") == ROWS


def test_a_split_of_a_dataset_is_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    assert written(datasets.Dataset.from_list([{"prompt": "a", "n": [1, 2]}]), tmp_path) == [
        {"prompt": "a", "n": [1, 2]}
    ]
    with pytest.raises(ConfigError, match=r"^train: got a DatasetDict, expected rows: .*, one split of a dataset"):
        GivenRows(tmp_path).write(datasets.DatasetDict(), "train")


def test_equal_rows_have_one_file_and_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    rows = GivenRows(tmp_path)
    first = rows.write([{"prompt": "a", "x": np.float32(0.5), "y": np.arange(2)}], "train")
    assert rows.write([{"prompt": "a", "x": 0.5, "y": [0, 1]}], "train") == first
    assert rows.write("task:reverse", "train") == "task:reverse" and rows.write(tmp_path, "train") == str(tmp_path)


def test_an_endless_iterator_is_read_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(given, "MAX_ITERATED", 3)
    assert len(written(({"prompt": str(n)} for n in count()), tmp_path)) == 3
    assert capsys.readouterr().out == "note: train: the iterator was read up to its row 3\n"
    assert len(written([{"prompt": str(n)} for n in range(5)], tmp_path)) == 5


class Table(list[str]):
    """Stands for a DataFrame, whose iterator has the names of its columns."""

    def iterrows(self) -> None: ...


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"prompt": ["a"]}, "train: got a dict, expected rows: a list of dicts, an iterator of them, one split of a "),
        (7, "train: got a int, expected rows"),
        ([{"prompt": "a"}, "b"], "train: row 1 is a str, expected a dict from column to value"),
        ([{"prompt": "a", "x": object()}], "train: row 0, column 'x' has a object, expected what JSON can hold"),
        ([{("a", 1): "b"}], r"train: row 0 has the columns \[\('a', 1\)\], expected names that are text"),
        (Table(), r"train: got a Table, expected rows: .*; `to_dict\('records'\)` makes rows of a table"),
    ],
)
def test_what_is_not_a_row_is_refused_and_leaves_nothing(rows: Any, said: str, tmp_path: Path) -> None:
    made = GivenRows(tmp_path / "new" / "run")
    with pytest.raises(ConfigError, match=said):
        made.write(rows, "train")
    made.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run.dir: .*/file cannot be written \(Not a directory\)"):
        GivenRows(tmp_path / "file").write(ROWS, "train")


def test_only_what_was_written_is_removed(tmp_path: Path) -> None:
    GivenRows(tmp_path).write(ROWS, "train")
    again = GivenRows(tmp_path)
    again.write(ROWS, "train")
    again.write(ROWS, "validation")
    again.remove()
    assert [path.name.partition("-")[0] for path in (tmp_path / "given").iterdir()] == ["train"]


def f(prompt: Any, response: str, finish_reason: str) -> float:
    return 0.0


def test_objects_stand_where_paths_can_stand() -> None:
    settings = {
        "environment": {"kind": "tool_use", "options": {"tools": ["calculator", f]}},
        "evaluation": {"hard": {"reward": {"functions": [{"kind": f}]}}},
    }
    sections = given_sections(settings, {"algorithm.sampler": f, "reward.functions": reward_sections(["boxed", f])})
    [_, tool], [own] = (
        sections["environment"]["options"]["tools"],
        sections["evaluation"]["hard"]["reward"]["functions"],
    )
    assert tool == own["kind"] == sections["algorithm"]["sampler"] == sections["reward"]["functions"][1]["kind"]
    assert tool.startswith("object@") and tool.endswith(":f")
    assert build_config({"reward": sections["reward"]}).objects == [tool]
    with pytest.raises(ConfigError, match=r"^loss.options.scale: got the object 'f', expected a plain value, because"):
        given_sections({"loss": {"options": {"scale": f}}}, {})


def test_a_reward_can_say_that_it_scores_groups() -> None:
    class OfGroups:
        per = "group"

    sections = given_sections(None, {"reward.functions": reward_sections(OfGroups)})
    assert sections["reward"]["functions"][0]["per"] == "group"


def test_settings_are_a_file_a_config_or_dicts(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("algorithm: {steps: 7}\nmodel: {path: 'builtin:tiny-qwen3'}\n")
    config = load_config(tmp_path / "my.yaml")
    kinds = (tmp_path / "my.yaml", str(tmp_path / "my.yaml"), config, {"algorithm": {"steps": 7}})
    for settings in kinds:
        assert build_config(given_sections(settings, {"trainer.lr": 0.5})).model_dump() == {
            **config.model_dump(),
            "trainer": {**config.trainer.model_dump(), "lr": 0.5},
        }
    assert given_sections(Config(), {}) == {}


def test_dotted_keys_reach_into_lists_and_stop_at_values() -> None:
    data = {"reward": {"functions": [{"kind": "boxed"}]}}
    assert given_sections(data, {"reward.functions.0.weight": 0.5})["reward"]["functions"][0]["weight"] == 0.5
    assert data == {"reward": {"functions": [{"kind": "boxed"}]}}, "the user's dict is not changed"
    for key in ("reward.functions.1.weight", "reward.functions.x"):
        with pytest.raises(ConfigError, match=rf"^{key}: got \[.*\] in front of '(1|x)', expected a section with keys"):
            given_sections(data, {key: 1})
