"""The names of other libraries lead to keys that exist, also when whole sections of theirs are given."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.tests.trainers.config.refusals import file_problems, only_problem
from headrace.tests.trainers.config.verl_keys import KEYS
from headrace.trainers.config.absent_peers import WITHOUT_COUNTERPART
from headrace.trainers.config.config import Config
from headrace.trainers.config.effects import value_of
from headrace.trainers.config.peers import ALIASES, PEERS, REMARKS, meant_keys

ROWS = [(library, *row) for library, rows in PEERS.items() for row in rows]
DEFAULTS = Config()


def exists(path: str) -> bool:
    try:
        value_of(DEFAULTS, path)
    except AttributeError:
        return False
    return True


def test_every_key_of_ours_exists() -> None:
    named = {key for _, _, ours, _ in ROWS for key in ours.split()} | {key for keys in ALIASES.values() for key in keys}
    assert [key for key in sorted(named) if not exists(key)] == []
    assert all(key.count(".") for key in named)


def test_no_setting_of_a_library_stands_twice() -> None:
    for library, rows in PEERS.items():
        theirs = [row[0] for row in rows]
        assert len(set(theirs)) == len(theirs), library


@pytest.mark.parametrize(("library", "theirs", "ours", "note"), ROWS)
def test_a_setting_of_another_library_is_answered_with_ours(
    tmp_path: Path, library: str, theirs: str, ours: str, note: str
) -> None:
    """The setting as it is typed there leads to its row, unless it is a key of ours, too."""
    if exists(theirs):
        assert theirs in ours.split()
        return
    sentences = file_problems(tmp_path, "{}", f"{theirs}=1")
    assert len(sentences) == 1 and sentences[0].startswith(f"{theirs}: unknown key; did you mean "), sentences
    assert all(key in sentences[0] for key in ours.split()), sentences


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("learning_rate", "trainer.lr"),
        ("trainer.learning_rate", "trainer.lr"),
        ("rollout.n", "algorithm.group_size"),
        ("ppo_mini_batch_size", "algorithm.minibatches"),
        ("actor.ppo_mini_batch_size", "algorithm.minibatches"),
        ("loss.beta", "loss.kl_coef"),
        ("num_generations", "algorithm.group_size"),
        ("grpo.num_generations_per_prompt", "algorithm.group_size"),
        ("val_kwargs.n", "validation.n"),
        ("ckpt.interval", "run.checkpoint_every"),
    ],
)
def test_short_forms_are_answered_too(tmp_path: Path, typed: str, ours: str) -> None:
    assert file_problems(tmp_path, "{}", f"{typed}=1") == [f"{typed}: unknown key; did you mean {ours}?"]


def test_a_whole_file_of_another_library_is_answered_key_by_key(tmp_path: Path) -> None:
    text = """
        actor_rollout_ref:
          rollout: {n: 8, gpu_memory_utilization: 0.5, free_cache_engine: true}
          actor: {optim: {lr: 1.0e-6}}
        data: {train_batch_size: 256}
    """
    assert file_problems(tmp_path, text) == [
        "data.train_batch_size: unknown key; did you mean algorithm.prompts_per_step?",
        "actor_rollout_ref.rollout.n: unknown key; did you mean algorithm.group_size?",
        "actor_rollout_ref.rollout.gpu_memory_utilization: unknown key; did you mean rollout.gpu_memory_utilization?",
        "actor_rollout_ref.rollout.free_cache_engine: unknown key; it has no counterpart here",
        "actor_rollout_ref.actor.optim.lr: unknown key; did you mean trainer.lr?",
    ]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("peft_config=1", "peft_config: unknown key; adapters are the section trainer.lora, from trainer.lora.rank on"),
        ("critic.model.path=org/m", "critic.model.path: unknown key; there is no critic, advantages come from the"),
        ("reward_model.model.path=org/m", "reward_model.model.path: unknown key; there is no reward model, a function"),
        ("trainer.optim=adamw_8bit", "trainer.optim: unknown key; did you mean trainer.optimizer?"),
        (
            "repetition_penalty=1.1",
            "repetition_penalty: unknown key; sampling has rollout.temperature, top_p, top_k and m",
        ),
        ("trust_remote_code=true", "trust_remote_code: unknown key; models with code of their own are not loaded"),
        ("actor_rollout_ref.actor.profiler.tool_config.npu.level=1", "the timeline of run.trace_step and the metr"),
        ("algorithm.lam=0.9", "algorithm.lam: unknown key; there is no critic, advantages come from the rewards"),
        ("algorithm.kl_ctrl.type=adaptive", "the weight of the KL divergence is fixed, loss.kl_coef"),
    ],
)
def test_what_does_not_exist_is_said_to_be_missing(tmp_path: Path, typed: str, words: str) -> None:
    [sentence] = file_problems(tmp_path, "{}", typed)
    assert words in sentence


def fields(path: Path, name: str) -> set[str]:
    """The fields that the class `name` of a Python file declares. Nothing is imported."""
    classes = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
    [found] = (node for node in classes if node.name == name)
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]


def installed(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.submodule_search_locations[0])


def assert_answered(folder: Path, library: str, names: Iterable[str]) -> None:
    """Type each setting of a library, and expect our keys, or why there is none."""
    rows = {theirs: ours for theirs, ours, _ in PEERS[library]}
    without = WITHOUT_COUNTERPART[library]
    for name in names:
        [sentence] = file_problems(folder, "{}", f"{name}=1") if not exists(name) else [f"; did you mean {name}?"]
        if name in rows:
            assert all(key in sentence for key in rows[name].split()), sentence
        else:
            reason = without.get(name) or next((why for part, why in REMARKS.items() if part in name.split(".")), "")
            assert reason and sentence == f"{name}: unknown key; {reason}", sentence


def test_every_setting_of_the_installed_trl_is_answered(tmp_path: Path) -> None:
    trainer = installed("trl") / "trainer"
    own = fields(trainer / "grpo_config.py", "GRPOConfig")
    inherited = fields(installed("transformers") / "training_args.py", "TrainingArguments")
    every = own | inherited | fields(trainer / "base_config.py", "_BaseConfig")
    assert len(own) >= 79 and len(every) >= 180
    assert_answered(tmp_path, "TRL", sorted(every))


def test_every_setting_of_the_actor_and_the_algorithm_of_verl_is_answered(tmp_path: Path) -> None:
    assert len(KEYS) == 112
    assert_answered(tmp_path, "verl", KEYS)


def test_a_setting_has_keys_or_a_reason_and_not_both() -> None:
    for library, absent in WITHOUT_COUNTERPART.items():
        assert not {row[0] for row in PEERS[library]} & absent.keys()


def test_a_misspelt_section_of_ours_is_still_a_misspelling() -> None:
    assert only_problem({"trainers": {"lr": 1}}) == "trainers: unknown key; did you mean trainer?"


def test_a_name_that_says_too_little_is_left_to_our_own_keys() -> None:
    assert meant_keys(["path"], {"path"}).keys == ()
    assert meant_keys(["nothing", "of", "the", "kind"]).keys == ()
