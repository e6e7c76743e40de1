"""The configuration of a supervised run has no engines, groups of one row and its own loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.trainers.cluster.places.placement import Host
from headrace.trainers.cluster.places.placement_plan import PlacementRequest, plan_placement
from headrace.trainers.config.config import Config, resolved_yaml
from headrace.trainers.config.load import build_config, load_config
from headrace.trainers.errors import ConfigError
from headrace.trainers.run.supervised_start import warmup_sections


def load(tmp_path: Path, *overrides: str, rows: int = 10) -> Config:
    """Load the configuration of a supervised run on a file of `rows` lines."""
    line = json.dumps({"prompt": "z12=", "completion": "21"}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * rows)
    (tmp_path / "sft.yaml").write_text(f"sft: {{train: {tmp_path}/a.jsonl, max_tokens: 32}}\n")
    return load_config(tmp_path / "sft.yaml", overrides)


def problems(tmp_path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *overrides)
    return list(caught.value.problems)


def test_a_supervised_run_has_rows_of_its_own_and_no_engine(tmp_path: Path) -> None:
    given = ("rollout.engine=vllm", "algorithm.group_size=8", "loss.clip_low=0.1", "reward.scale=2", "trainer.lr=1e-4")
    config = load(tmp_path, *given)
    assert (config.rollout.num_engines, config.rollout.num_actors, config.rollout.engine) == (0, 1, "hf")
    assert (config.algorithm.group_size, config.rows_per_group, config.loss.kind) == (1, 1, "sft")
    assert config.longest_row == ("sft.max_tokens", 32) and config.engine_length == 32
    assert config.validation.every == 0 and config.judged_figure == "validation/loss"
    assert config.trainer.lr == 1e-4 and config.logging.samples.every == 0
    (tmp_path / "again.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config
    # The same file configures a run on rollouts, which keeps its own sections.
    rollouts = load(tmp_path, "sft.train=[]", "reward.scale=2")
    assert (rollouts.rollout.num_engines, rollouts.reward.scale, rollouts.loss.kind) == (1, 2.0, "ppo_clip")


def test_train_workers_get_all_gpus(tmp_path: Path) -> None:
    request = PlacementRequest.of(load(tmp_path, "trainer.dp=2"))
    placement = plan_placement(request, [Host("h", 2, (0, 1), 8.0)])
    assert [placement.numbers(seat) for seat in placement.ranks] == [(0,), (1,)]
    assert not placement.engines and [seat.gpus for seat in placement.rollouts] == [()]


def test_epochs_become_steps(tmp_path: Path) -> None:
    steps = [
        load(tmp_path, f"sft.epochs={epochs}", "algorithm.prompts_per_step=4", rows=10).algorithm.steps
        for epochs in (1, 2, 0.1)
    ]
    assert steps == [3, 5, 1]
    config = load(tmp_path, "sft.epochs=2")
    (tmp_path / "again.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "again.yaml", ["algorithm.steps=9"]).algorithm.steps == 9  # to train longer


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sft.max_tokens=20000"], "trainer.tokens_per_microbatch: got 16384, expected at least 20000, the length of"),
        (["run.keep_best=true"], "run.keep_best: got true with sft.train, expected it unset, because such a run"),
        (["sft.train=[]", "loss.kind=sft"], "loss.kind: got 'sft' without sft.train, expected"),
        (["sft.train=[]", "rollout.num_engines=0"], "rollout.num_engines: got 0 without sft.tr"),
        (["sft.train=no/such.jsonl"], "sft.train: got 'no/such.jsonl', expected an existing .jsonl file"),
        (
            ["warmup.corpus=x.txt"],
            "warmup.corpus: got 'x.txt', expected none, digit_skills or a file that ends in .jso",
        ),
        (
            ["model.renderer=qwen3"],
            "model.renderer: got 'qwen3' with environment.kind='single_turn', expected 'template'",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert any(problem.startswith(sentence) for problem in problems(tmp_path, *overrides)), problems(
        tmp_path, *overrides
    )


def test_a_warm_up_on_a_file_is_a_supervised_run(tmp_path: Path) -> None:
    given = ("sft.train=[]", f"warmup.corpus={tmp_path}/a.jsonl", "warmup.steps=7", "warmup.batch_size=4")
    config = load(tmp_path, *given, "trainer.lora.rank=4", "trainer.dp=2")
    assert config.warmup.on_file and config.rollout.num_engines == 1
    changed = _warmup_sections(config, tmp_path)
    warmup = build_config(config.model_copy(update=changed).model_dump())
    assert warmup.sft.train == (f"{tmp_path}/a.jsonl",) and warmup.sft.max_tokens == 32
    assert (warmup.algorithm.steps, warmup.algorithm.prompts_per_step, warmup.trainer.lr) == (7, 4, 5e-3)
    assert (warmup.trainer.lora.rank, warmup.trainer.dp, warmup.rollout.num_engines) == (0, 2, 0)
    assert warmup.run.dir == str(tmp_path / "run" / "warmup") and warmup.warmup.corpus == "none"
    [sentence] = problems(tmp_path, f"warmup.corpus={tmp_path}/a.jsonl")
    assert sentence.startswith("warmup.corpus: got ") and "with sft.train, expected 'none'" in sentence
    [sentence] = problems(tmp_path, *given, "trainer.lora.rank=4", f"model.adapter={tmp_path}")
    assert (
        sentence.startswith("warmup.corpus: got ") and f"with model.adapter='{tmp_path}', expected 'none'" in sentence
    )


def _warmup_sections(config: Config, folder: Path) -> dict[str, Any]:
    own = config.warmup, config.run, config.model, config.sft, config.trainer
    return warmup_sections(*own, folder / "run")


def test_a_supervised_run_keeps_its_reference_model_and_has_no_teacher(tmp_path: Path) -> None:
    moves = load(tmp_path, "loss.kl_coef=0.1", "loss.reference_every=5", "loss.reference_mix=0.5")
    assert (moves.loss.reference_every, moves.loss.reference_mix) == (5, 0.5)
    teacher = "distillation.teachers=[{model: m, data_source: a, where: engine}]"
    other = load(tmp_path, "loss.kl_coef=0.1", "loss.reference_model=m", teacher)
    assert other.loss.reference_model == "m" and other.distillation.teachers == ()


def test_a_warm_up_trains_all_weights_by_its_texts_alone(tmp_path: Path) -> None:
    groups = "trainer.groups=[{pattern: '*lora_B*', lr_factor: 4}]"
    given = ("sft.train=[]", f"warmup.corpus={tmp_path}/a.jsonl", "loss.kl_coef=0.1", "loss.entropy_coef=0.1")
    given += ("environment.kind=tool_use", "model.renderer=qwen3", "model.renderer_options={enable_thinking: false}")
    for own in (("trainer.lora.rank=4", groups), ("trainer.freeze=['*norm*']", "trainer.warmup_ratio=0.1")):
        teacher = "distillation.teachers=[{model: m, data_source: a}]"
        config = load(tmp_path, *given, *own, teacher)
        changed = _warmup_sections(config, tmp_path)
        warmup = build_config(config.model_copy(update=changed).model_dump())
        assert (warmup.trainer.groups, warmup.trainer.freeze, warmup.trainer.warmup_ratio) == ((), (), 0)
        assert (warmup.loss.kl_coef, warmup.loss.entropy_coef, warmup.distillation.teachers) == (0, 0, ())
