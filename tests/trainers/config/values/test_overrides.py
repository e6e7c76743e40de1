"""Overrides and YAML files: a text key gets the text that was typed, any other key the value of its YAML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace.tests.trainers.config.refusals import file_problems
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import load_config, read_sections
from headrace.trainers.config.values.overrides import override_value
from headrace.trainers.config.values.yaml_values import can_be_unset, is_text, parse_yaml, section_at
from headrace.trainers.errors import ConfigError

LOOKS = (
    "#### (.+)", "Put the answer after #### at the end", "0.10", "1e3", "007", "1_000", "true", "off", "2025-11-20",
    "Answer as follows:", "Q: {prompt}", "[a", "{a}", "- a", "*a", "&a b", "!a", "%a", "@a", '"a" and "b"', " a ", "",
    "'", "1:30", ".inf",
)  # fmt: skip
"""Texts that YAML reads as something else, or not at all."""


def text_keys(section: type[BaseModel] = Config, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the configuration that takes text, with its annotation; lists have one entry."""
    for name, field in section.model_fields.items():
        if is_text(field.annotation):
            yield above + name, field.annotation
        elif section_at([name], section) is not None:
            yield from text_keys(section_at([name], section) or Config, f"{above}{name}.")


def value_at(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("")
    return path


def test_a_text_key_gets_what_was_typed(empty: Path) -> None:
    keys = dict(text_keys())
    assert len(keys) > 50 and {"data.answer_pattern", "run.name", "run.dir", "rollout.engine", "pool.name"} <= {*keys}
    for key, annotation in keys.items():
        for text in LOOKS:
            assert value_at(read_sections(empty, [f"{key}={text}"]), key) == text, (key, text)
        for null in ("null", "~"):
            assert value_at(read_sections(empty, [f"{key}={null}"]), key) == (
                None if can_be_unset(annotation) else null
            )


@pytest.mark.parametrize("text", ["0.10", "1e3", "007", "1_000", "true", "1:30", ".inf", "-3"])
def test_text_in_a_file_stays_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(
        f"run: {{name: {text}}}\nrollout: {{stop: [a, {text}]}}\ndata: {{system_prompt: {text}, options: {{a: 1e3}}}}\n"
        f"reward: {{functions: [{{kind: format, name: {text}, weight: 1e1}}]}}\n"
        f"evaluation: {{hard: {{data: {{source: 'task:reverse', template: {text}}}}}}}\n"
    )
    read = read_sections(tmp_path / "run.yaml")
    assert read["run"]["name"] == read["rollout"]["stop"][1] == read["data"]["system_prompt"] == text
    assert read["reward"]["functions"][0] == {"kind": "format", "name": text, "weight": 10.0}
    assert read["evaluation"]["hard"]["data"]["template"] == text and read["data"]["options"] == {"a": 1000.0}


def test_values_that_are_no_text_are_yaml(empty: Path) -> None:
    config = load_config(
        empty,
        ["trainer.lr=1e-4", "trainer.grad_clip=null", "rollout.stop=[END, 1e3]", "rollout.stop.0=#", "trainer.dp=2"]
        + ["data.options={min_digits: 1e0}", 'run.name="1e3"', "run.dir='it''s'", "algorithm.prompts_per_step=8"],
    )
    assert (config.trainer.lr, config.trainer.grad_clip, config.rollout.stop) == (1e-4, None, ("#", "1e3"))
    assert (config.data.options, config.run.name, config.run.dir) == ({"min_digits": 1.0}, "1e3", "it's")


def test_no_comment_begins_in_an_override(empty: Path) -> None:
    assert override_value("#### (.+)", None, "x") == "#### (.+)"  # An option of a user's function has no type.
    assert override_value("a: b # c", None, "x") == "a: b # c"
    assert override_value("['#', 'a # b']", None, "x") == ["#", "a # b"]
    [sentence] = file_problems(empty.parent, "", "trainer.lr=1e-4 # low")
    assert sentence == "trainer.lr: got '1e-4 # low', expected a finite number"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data:\n  answer_field: # none\n", "data.answer_field: got nothing, expected text (in a YAML file, text that"),
        (
            "data:\n  system_prompt: Answer: now\n",
            "line 2: mapping values are not allowed here, expected YAML (in a YA",
        ),
        ('run:\n  name: "\\ud800"\n', r"line 2: got '\ud800', expected text that UTF-8 can encode"),
        ("data: &a {options: *a}", "its values are nested too deeply or contain themselves"),
        ("data: " + "[" * 2000, "its values are nested too deeply"),
        ("run: {seed: !!int abc}", "invalid literal for int"),
        ("run: {seed: !!python/name:os.system }", "could not determine a constructor"),
        ("run: {dir: ''}", "run.dir: got '', expected text that is not empty"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    [found] = file_problems(tmp_path, text)
    assert sentence in found and "\n" not in found


def test_bytes_that_are_not_text_are_refused(empty: Path) -> None:
    [found] = file_problems(empty.parent, "", "run.name=\udcff")
    assert found == r"override 'run.name=\udcff': got bytes that are not UTF-8, expected text"
    with pytest.raises(ConfigError, match=r"override 'a' line 1: .*expected YAML"):
        parse_yaml("[0-9]+", "override 'a'")
