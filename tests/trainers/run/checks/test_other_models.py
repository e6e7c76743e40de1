"""A model beside the policy that does not exist or has another vocabulary than the policy is refused before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from headrace.actors.engines.config import ModelConfig
from headrace.trainers.errors import ConfigError
from headrace.trainers.run.checks.other_models import check_other_models

KEY = "distillation.teachers.0.model"


def problem(policy: Path | str, path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_other_models(ModelConfig(path=str(policy)), [(KEY, str(path))])
    [sentence] = caught.value.problems
    return sentence


def test_the_same_vocabulary_is_fine_also_that_of_the_built_in_model(model: Path) -> None:
    for policy in (str(model), "builtin:tiny-qwen3"):
        assert check_other_models(ModelConfig(path=policy), [(KEY, str(model))]) == []
    assert check_other_models(ModelConfig(path="some/where"), []) == []


def test_a_model_that_is_not_here_is_left_to_the_run(model: Path) -> None:
    [line] = check_other_models(ModelConfig(path=str(model)), [(KEY, "no-such/model-here")])
    assert (
        line
        == f"{KEY}: no-such/model-here or the policy is not on this machine, so their vocabularies are not compared"
    )
    for path in ("/no/such/folder", "builtin:tiny-qwen3"):
        assert problem(model, path) == f"{KEY}: got '{path}', expected an existing model folder or a hub id"


def test_another_vocabulary_is_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = [token for token in vocab if len(token) == 1][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    sentence = problem(model, other)
    assert f"{KEY}: got '{other}', expected a model with the vocabulary of model.path='{model}'" in sentence
    assert "they differ in 4 entries" in sentence and "both have it at different places" in sentence
    assert "\n" not in sentence


def test_a_model_with_too_few_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    assert "with vocab_size=7 in its config.json, expected a model with the vocabulary of" in problem(model, other)


def test_a_model_with_a_shorter_context_than_the_rows_is_refused(model: Path) -> None:
    """Transformers computes log-probs at any position, but those behind a model's context mean nothing."""
    context = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    policy, other = ModelConfig(path=str(model)), [(KEY, str(model))]
    assert check_other_models(policy, other, context) == []
    with pytest.raises(ConfigError) as caught:
        check_other_models(policy, other, context + 1)
    [sentence] = caught.value.problems
    assert sentence.startswith(f"{KEY}: got '{model}' with max_position_embeddings={context} in its config.json, expec")
