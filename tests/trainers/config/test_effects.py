"""Keys without effect are refused, the reference says where they have one, and older runs' configurations load."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace
from headrace.tests.trainers.config.refusals import file_problems, only_problem
from headrace.tools.config_reference import START_HERE, reference_markdown, run_sections, walk_keys
from headrace.trainers.cluster.rollout_specs import fingerprint
from headrace.trainers.cluster.rollout_specs import journal as journal_of
from headrace.trainers.config.config import Config, resolved_yaml
from headrace.trainers.config.effects import EFFECTS, idle_key_problems, value_of
from headrace.trainers.config.load import build_config, load_config, renamed_keys
from headrace.trainers.errors import ConfigError
from headrace.trainers.simulation.config import SimulationConfig, simulation_section

EXAMPLES = Path(headrace.__file__).resolve().parent / "examples"
SECTIONS = {**run_sections(), "simulation": SimulationConfig}

OLD_RUN = """
run: {dir: /r, checkpoint_every: 5}
rollout: {engine: hf, kv_cache_mib: 512, num_actors: null}
sync: {bucket_mib: 64, dir: null}
algorithm: {mode: sync, max_staleness: 3}
simulation: {steps: null, async_staleness: 1, decode_s: 0.5}
"""
"""As a run folder of before holds it: keys that have no effect, and the section of `headrace simulate`."""


def test_the_table_speaks_of_keys_that_there_are() -> None:
    defaults = Config()
    for key, needs in EFFECTS.items():
        value_of(defaults, key)
        for need in needs:
            value_of(defaults, need.key)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"rollout": {"kv_cache": 512}},
         "rollout.kv_cache: got 512 with rollout.engine='hf', expected 'auto', because it has an effect only with "
         "rollout.engine=vllm"),
        ({"algorithm": {"max_staleness": 3}},
         "algorithm.max_staleness: got 3 with algorithm.mode='sync', expected 1, because it has an effect only with "
         "algorithm.mode=async"),
        ({"algorithm": {"mode": "async", "stale_groups": "drop"}},
         "algorithm.stale_groups: got 'drop' with algorithm.sampler='auto', expected 'requeue'"),
        ({"trainer": {"backend": "scripted", "lr": 1.0}, "rollout": {"engine": "scripted"}},
         "trainer.lr: got 1 with trainer.backend='scripted', expected 1e-06, because it has an effect only with "
         "trainer.backend=fsdp or megatron"),
        ({"dataplane": {"store": {"kind": "shm", "num_units": 2}}},
         "dataplane.store.num_units: got 2 with dataplane.store.kind='shm', expected it unset, because it has "
         "an effect only with dataplane.store.kind=auto or tcp or simple"),
        ({"validation": {"every": 0, "num_prompts": 5}},
         "validation.num_prompts: got 5 with validation.every=0, expected 128, because it has an effect only with "
         "validation.every above 0"),
        ({"algorithm": {"mode": "async", "dynamic_sampling": {"oversample": 2}}},
         "algorithm.dynamic_sampling.oversample: got 2 with algorithm.mode='async', expected 1"),
        ({"logging": {"prometheus_host": "0.0.0.0"}},
         "expected '127.0.0.1', because it has an effect only with logging.p"),
        ({"resources": {"ship": ["a.py"]}},
         "resources.ship: got ('a.py',) with resources.ray_address=None, expected 'auto', because it has an effect "),
        ({"data": {"template": "{prompt}?"}}, "data.template: got '{prompt}?' with data.train='task:reverse'"),
        ({"environment": {"options": {"tools": ["my:tool"]}}},
         "because it has an effect only with an environment other than single_turn"),
        ({"environment": {"kind": "my:play"}, "rollout": {"environment": "tool_use"}},
         "rollout.environment: got 'tool_use' beside environment.kind, expected only environment.kind, its present"),
        ({"loss": {"clip_high": 0.1}, "algorithm": {"prev_logprobs": "recompute"}},
         "loss.clip_high: got 0.1 with algorithm.prev_logprobs='recompute', expected 0.28"),
        ({"loss": {"kind": "reinforce", "clip_low": 0.1}}, "loss.clip_low: got 0.1 with loss.kind='reinforce'"),
        ({"loss": {"kl_kind": "k1", "kl_coef": 0.1}},
         "loss.kl_kind: got 'k1' with loss.kl_in='loss', expected 'k2' or 'k3'"),
        ({"trainer": {"warmup_steps": 200}},
         "trainer.warmup_steps: got 200, expected at most algorithm.steps=100, because the learning rate would nev"),
        ({"algorithm": {"mode": "async", "prev_logprobs": "recompute"}},
         "loss.correction: got 'none' with algorithm.mode='async' and algorithm.prev_logprobs='recompute', expected"),
        ({"loss": {"kl_kind": "k1"}}, "because it has an effect only with loss.kl_coef above 0"),
    ],
)  # fmt: skip
def test_a_key_without_effect_is_refused_in_one_sentence(data: dict[str, Any], sentence: str) -> None:
    assert sentence in only_problem(data)


def test_every_key_of_the_table_is_refused_where_it_has_no_effect() -> None:
    """A condition that always holds would refuse nothing."""
    config = build_config({})
    idle = {key for key, needs in EFFECTS.items() if not all(need.holds(config) for need in needs)}
    other = build_config(
        {
            "run": {"record": True, "trace_step": 0, "checkpoint_minutes": 0},
            "model": {"path": "org/model"},
            "data": {"train": "org/data"},
            "rollout": {"engine": "scripted"},
            "environment": {"kind": "my_environment:play"},
            "trainer": {"backend": "scripted"},
            "algorithm": {"mode": "async", "prev_logprobs": "recompute"},
            "advantage": {"kind": "rloo"},
            "validation": {"every": 0},
            "sync": {"transport": "disk"},
            "dataplane": {"store": {"kind": "shm"}},
            "resources": {
                "ray_address": "auto",
                "trainer_gpus": [0],
                "rollout_gpus": [1],
                "switch_roles": "never",
            },
        }
    )
    replayed = build_config(
        {"run": {"replay": "runs/first"}, "validation": {"every": 0}, "sync": {"transport": "pairs"}}
    )
    for another in (other, replayed):
        idle |= {key for key, needs in EFFECTS.items() if not all(need.holds(another) for need in needs)}
    assert idle == set(EFFECTS)


def test_an_override_that_turns_something_off_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("validation: {num_prompts: 5}\nalgorithm: {mode: async, max_staleness: 3}")
    config = load_config(path, ["validation.every=0", "algorithm.mode=sync"])
    assert (config.validation.num_prompts, config.algorithm.max_staleness) == (5, 3)
    assert load_config(path, ["validation={every: 0, num_prompts: 7}"]).validation.num_prompts == 7
    [problem] = file_problems(tmp_path, "validation: {every: 0}", "validation.num_prompts=7")
    assert problem.startswith("validation.num_prompts: got 7 with validation.every=0")
    [problem] = file_problems(tmp_path, path.read_text(), "algorithm.mode=sync", "algorithm.max_staleness=4")
    assert problem.startswith("algorithm.max_staleness: got 4 with algorithm.mode='sync'")


def test_a_part_that_the_run_lacks_may_be_turned_off() -> None:
    replay: dict[str, Any] = {"run": {"replay": "runs/first", "journal": False}, "validation": {"every": 0}}
    build_config(replay | {"logging": {"samples": {"every": 0}}})
    assert "logging.samples.every: got 5 with run.replay='runs/first'" in only_problem(
        replay | {"logging": {"samples": {"every": 5}}}
    )


def test_a_shorter_run_needs_no_shorter_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {warmup_steps: 50}")
    assert load_config(path, ["algorithm.steps=3"]).trainer.warmup_steps == 50
    [problem] = file_problems(tmp_path, "", "algorithm.steps=3", "trainer.warmup_steps=50")
    assert problem.startswith("trainer.warmup_steps: got 50")


def test_an_old_run_without_a_correction_goes_on_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        resolved_yaml(Config())
        .replace("mode: sync", "mode: async")
        .replace("prev_logprobs: rollout", "prev_logprobs: recompute")
    )
    with pytest.warns(FutureWarning, match="loss.correction: got 'none'"):
        assert load_config(path, of_old_run=True).algorithm.mode == "async"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_and_what_they_resolve_to_load(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


# ---------------------------------------------------------------- older runs


def test_the_configuration_of_an_older_run_loads_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OLD_RUN)
    with pytest.warns(FutureWarning, match="rollout.kv_cache_mib is now called rollout.kv_cache"):
        assert len(file_problems(tmp_path, OLD_RUN)) == 2
    with pytest.warns(FutureWarning) as caught:
        config = load_config(path, of_old_run=True)
    told = [str(warning.message).partition(":")[0] for warning in caught]
    assert told == [
        "rollout.kv_cache_mib is now called rollout.kv_cache, please rename it in your configuration",
        "rollout.kv_cache",
        "algorithm.max_staleness",
    ]
    assert config.rollout.kv_cache == 512
    assert simulation_section(config) == SimulationConfig(decode_s=0.5)


FORMER = {"rollout": {"environment": "tool_use", "tools": ["calculator", "my:tool"], "max_turns": 2}}
OF_BEFORE = {"kind": None, "options": {}, "max_rows": 1}


@pytest.mark.parametrize(
    ("data", "kind", "options"),
    [
        (FORMER, "tool_use", {"tools": ["calculator", "my:tool"], "max_turns": 2}),
        ({**FORMER, "environment": OF_BEFORE}, "tool_use", {"tools": ["calculator", "my:tool"], "max_turns": 2}),
        ({"rollout": {"environment": "tool_use", "max_turns": 2}}, "tool_use", {"max_turns": 2}),
        (
            {
                "rollout": {"environment": "single_turn", "tools": ["calculator"], "max_turns": 4},
                "environment": OF_BEFORE,
            },
            "single_turn",
            {},
        ),
        ({"environment": {"kind": None}}, "single_turn", {}),
    ],
)  # fmt: skip
def test_former_keys_of_the_environment_are_read_and_named(data: Any, kind: str, options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = build_config(data)
    assert (config.environment.kind, config.environment.options) == (kind, options)
    former = [f"rollout.{name}" for name in data.get("rollout", {})]
    assert [str(warning.message).split()[0] for warning in caught] == former
    assert build_config(config.model_dump(mode="json")) == config


def test_former_keys_beside_the_present_one(tmp_path: Path) -> None:
    data = {"environment": {"kind": "my:play"}, "rollout": {"max_turns": 3}}
    with pytest.raises(ConfigError, match="rollout.max_turns: got 3 beside environment.kind, expected only env"):
        build_config(data)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(data))  # as the run folder of a run with an environment of its own
    with pytest.warns(FutureWarning, match="rollout.max_turns is now called environment.options.max_turns"):
        assert load_config(path, of_old_run=True).environment.kind == "my:play"


def test_a_journal_s_fingerprint_is_what_it_was(tmp_path: Path) -> None:
    """A run that is resumed takes its journal up only when the text is the same to the letter."""
    config = build_config({"run": {"checkpoint_every": 5}, "reward": {"functions": [{"kind": "my:f", "weight": 2}]}})
    journal = journal_of(config.run, fingerprint(config))
    assert journal is not None and journal.fingerprint == (
        '{"data": {"answer_field": "answer", "held_out": false, "options": {}, "prompt_field": "prompt", "seed": 0, '
        '"source": "task:reverse", "split": "train", "template": "{prompt}"}, "environment": ["single_turn", '
        '["calculator"], 4], "model": {"dtype": "float32", "path": "builtin:tiny-qwen3"}, "rewards": [{"kind": "my:f", '
        '"name": "f", "options": {}, "tagged": true, "weight": 2.0}], "sampling": {"max_new_tokens": 256, "n": 8, '
        '"seed": 0, "stop": [], "stop_token_ids": [], "temperature": 1.0, "top_k": 0, "top_p": 1.0}, "seed": 0, '
        '"warmup": {"batch_size": 128, "corpus": "none", "lr": 0.005, "steps": 1000, "target_loss": 0.12}}'
    )


@pytest.mark.parametrize("environment", [{}, OF_BEFORE])
def test_a_journal_s_fingerprint_of_tools_is_what_it_was(environment: Any) -> None:
    with pytest.warns(FutureWarning, match="is now called environment"):
        config = build_config({**FORMER, "environment": environment, "run": {"checkpoint_every": 5}})
    journal = journal_of(config.run, fingerprint(config))
    assert journal is not None and "own_environment" not in journal.fingerprint
    assert '"environment": ["tool_use", ["calculator", "my:tool"], 2]' in journal.fingerprint


def test_a_renamed_key_is_accepted_and_its_new_name_told() -> None:
    renamed = {"algorithm.staleness": "algorithm.max_staleness", "store.kind": "dataplane.store.kind"}
    given = {"algorithm": {"staleness": 2, "mode": "async"}, "store": {"kind": "shm"}, "dataplane": None}
    with pytest.warns(FutureWarning, match="is now called") as caught:
        moved = renamed_keys(given, renamed)
    assert [str(warning.message) for warning in caught] == [
        "algorithm.staleness is now called algorithm.max_staleness, please rename it in your configuration",
        "store.kind is now called dataplane.store.kind, please rename it in your configuration",
    ]
    assert moved["algorithm"] == {"mode": "async", "max_staleness": 2}
    assert moved["dataplane"] == {"store": {"kind": "shm"}} and "store" not in moved
    assert given["algorithm"] == {"staleness": 2, "mode": "async"}, "what was given stays as it is"
    assert renamed_keys({"run": {}}, renamed) == {"run": {}}
    with pytest.raises(ConfigError, match="algorithm.staleness: got 2 beside algorithm.max_staleness, expected only"):
        renamed_keys({"algorithm": {"staleness": 2, "max_staleness": 1}}, renamed)


@pytest.mark.parametrize(
    ("given", "section", "key", "value", "warning"),
    [
        ({"pool": {"residual_mib": 100}}, "resources", "residual_mib", 100, "pool.residual_mib is now called res"),
        (
            {"pool": {"residual_mib": 1536}, "resources": {"residual_mib": 1536}},
            "resources", "residual_mib", 1536, "pool.residual_mib is now called resources",
        ),
        ({"advantage": {"normalize_std": False}}, "advantage", "kind", "dr_grpo", "is now advantage.kind=dr_grpo"),
        ({"advantage": {"normalize_std": True, "kind": "rloo"}}, "advantage", "kind", "rloo", None),
    ],
)  # fmt: skip
def test_of_two_spellings_one_stays_and_the_other_is_told_its_name(
    given: dict[str, Any], section: str, key: str, value: object, warning: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = build_config(given)
    assert getattr(getattr(config, section), key) == value
    assert len(caught) == (warning is not None) and all((warning or "") in str(one.message) for one in caught)


def test_two_spellings_with_different_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="pool.residual_mib: got 100 beside resources.residual_mib, expected only"):
        build_config({"pool": {"residual_mib": 100}, "resources": {"residual_mib": 200}})


# ---------------------------------------------------------------- the section of a tool


def test_the_simulators_section_is_checked_with_the_same_sentences() -> None:
    assert simulation_section(Config()) == SimulationConfig()
    config = build_config({"simulation": {"decode_seconds": 1, "gpus": 0}})
    with pytest.raises(ConfigError) as caught:
        simulation_section(config)
    assert set(caught.value.problems) == {
        "simulation.gpus: got 0, expected a number >= 1",
        "simulation.decode_seconds: unknown key; did you mean simulation.decode_s?",
    }
    with pytest.raises(ConfigError, match="simulation: got 3, expected a section"):
        build_config({"simulation": 3})


# ---------------------------------------------------------------- the reference


def test_every_key_is_described() -> None:
    keys = list(walk_keys(SECTIONS))
    assert [key.name for key in keys if not key.description] == []
    assert {key.name.partition(".")[0] for key in keys} == set(yaml.safe_load(resolved_yaml(Config())))
    assert {key.name for key in keys} >= {"dataplane.store.kind", "reward.functions.N.weight", "run.dir", "loss"}


def test_forty_keys_that_there_are_are_marked_as_a_start() -> None:
    assert len(set(START_HERE)) == len(START_HERE) == 40
    described = {key.name: key for key in walk_keys(SECTIONS)}
    assert all(described[key].type for key in START_HERE)


def test_the_reference_gives_type_default_meaning_and_effect() -> None:
    text = reference_markdown({"simulation": SimulationConfig})
    for line in (
        "- **`algorithm.chunk_groups`** (whole number >= 1 or unset; default `unset`): Least number of ready groups "
        "that the modes `streaming` and `async_streaming` train on together, as a chunk. Unset: a quarter of "
        "`algorithm.prompts_per_step`, but at least `trainer.dp`. Has an effect only with algorithm.mode=streaming or "
        "async_streaming.\n",
        "- **`trainer.backend`** (`fsdp`, `megatron`, `scripted`; default `fsdp`; start here): ",
        "- **`simulation.gpus`** (whole number >= 1; default `1`): ",
        "- **`trainer.betas`** ([number >= 0 and < 1, number >= 0 and < 1]; default `[0.9, 0.999]`): ",
        "| `run.dir` | Path of the run folder. |\n",
    ):
        assert line in text
    assert not idle_key_problems(Config())
