"""Configuration: files, overrides, sentences, cross checks, round trips."""

from __future__ import annotations

import datetime
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from headrace.actors.rollout.rows import MaskRules
from headrace.cli.command import parse
from headrace.tests.trainers.config.refusals import file_problems, only_problem
from headrace.trainers.cluster.rollout_specs import (
    EvaluationDefaults,
    evaluation_plans,
    fingerprint,
    mask_rules,
    sampling,
)
from headrace.trainers.config.checks import contradictions
from headrace.trainers.config.config import Config, resolved_yaml, with_run_dir
from headrace.trainers.config.load import build_config, load_config
from headrace.trainers.config.store_demand import StoreDemand
from headrace.trainers.config.tracker_options import options_section
from headrace.trainers.errors import ConfigError, UserError


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Config()
    assert load(tmp_path, "trainer:\nrun: {}\n") == Config()


def test_file_and_overrides_later_ones_win(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "trainer: {lr: 1e-3, dp: 1}\nreward: {functions: [{kind: format}]}",
        "trainer.dp=2",
        "trainer.dp=4",
        "dataplane.store.kind=shm",
        "reward.functions.0.weight=0.5",
        "data.options={min_digits: 3}",
        "data.options.max_digits=8",
        "trainer.betas=[0.8, 0.9]",
    )
    assert (config.trainer.lr, config.trainer.dp, config.trainer.betas) == (1e-3, 4, (0.8, 0.9))
    assert config.dataplane.store.kind == "shm"
    assert config.reward.functions[0].weight == 0.5
    assert config.data.options == {"min_digits": 3, "max_digits": 8}


def test_scalars_read_as_a_user_means_them(tmp_path: Path) -> None:
    config = load(tmp_path, "dataplane: {integrity: off}", "run.dir=20251120", "data.options={a: 1e-3, b: 1:30, c: on}")
    assert config.dataplane.integrity == "off"
    assert config.run.dir == "20251120"
    assert config.data.options == {"a": 1e-3, "b": "1:30", "c": "on"}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.dp_=2", "trainer.dp_: unknown key; did you mean trainer.dp?"),
        ("rollout.dp=2", "rollout.dp: unknown key; did you mean trainer.dp?"),
        ("rollout.group_sise=2", "rollout.group_sise: unknown key; did you mean algorithm.group_size?"),
        ("store.kind=shm", "store: unknown key; did you mean dataplane.store?"),
        ("trainers.dp=2", "trainers: unknown key; did you mean trainer?"),
        ("dataplane.store.knd=shm", "dataplane.store.knd: unknown key; did you mean dataplane.store.kind?"),
        ("use_peft=true", "use_peft: unknown key; adapters are the section trainer.lora"),
        ("rollout.xyz=x", "rollout.xyz: unknown key; rollout has engine, num_engines,"),
        ("trainer.learning_rate=1", "trainer.learning_rate: unknown key; did you mean trainer.lr?"),
        ("trainer.optimizer=sgd", "trainer.optimizer: got 'sgd', expected one of adamw, adamw_8bit, adamw_bf16, muon"),
        ("rollout.n=8", "rollout.n: unknown key; did you mean algorithm.group_size?"),
        ("loss.beta=0", "loss.beta: unknown key; did you mean loss.kl_coef?"),
        ("trainer.micro_batch_size=1", "did you mean trainer.tokens_per_microbatch?"),
        ("trainer.ppo_epochs=2", "did you mean algorithm.epochs?"),
        ("sync.xyz=1", "sync.xyz: unknown key; sync has transport, bucket_mib, in_flight,"),
        ("dataplane.store.kind=shmm",
         "expected one of auto, local, shm, tcp, ray, simple, mooncake (did you mean shm?)"),
        ("trainer.lr=fast", "trainer.lr: got 'fast', expected a finite number"),
        ("trainer.weight_decay=-0.1", "trainer.weight_decay: got -0.1, expected a number >= 0"),
        ("trainer.betas=[0.9, 1.0]", "trainer.betas.1: got 1.0, expected a number < 1"),
        ("trainer.grad_clip=0", "trainer.grad_clip: got 0, expected a number > 0"),
        ("trainer.schedule=step", "trainer.schedule: got 'step', expected one of constant, cosine, linear"),
        ("scripted.train_row_s=-1", "scripted.train_row_s: got -1, expected a number >= 0"),
        ("resources.ship=sometimes", "resources.ship: got 'sometimes', expected one of auto, never or a list"),
        ("model.dtype=int8", "model.dtype: got 'int8', expected one of auto, float32, bfloat16"),
        ("rollout.kv_cache=small", "rollout.kv_cache: got 'small', expected auto or a whole number >= 1, the size in"),
        ("rollout.kv_cache=0", "rollout.kv_cache: got 0, expected auto or a whole number >= 1, the size in MiB"),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization: got 1.5, expected a number <= 1"),
        ("rollout.vllm=fp8", "rollout.vllm: got 'fp8', expected a section of keys and values"),
        ("rollout.vllm={block_size: 16}", "with rollout.engine='hf', expected {}, because it has an effect only with"),
        ("rollout.engine=scriptd", "expected one of hf, vllm, scripted (did you mean scripted?)"),
        ("environment.kind=multi", "got 'multi', expected single_turn, tool_use, verifiers, textarena, openenv or "),
        ("trainer.recompute=some", "trainer.recompute: got 'some', expected one of none, selective, full"),
        ("algorithm.prev_logprobs=old", "algorithm.prev_logprobs: got 'old', expected one of rollout, recompute"),
        ("trainer.lr=.inf", "trainer.lr: got inf, expected a finite number"),
        ("trainer.lr=-1", "trainer.lr: got -1, expected a number >= 0"),
        ("trainer.dp=1.5", "trainer.dp: got 1.5, expected a whole number"),
        ("run.seed=true", "run.seed: got true, expected a number"),
        ("run.seed=9223372036854775808", "run.seed: got 9223372036854775808, expected a number below 2**63"),
        ("rollout.stop_token_ids=[5, true]", "rollout.stop_token_ids: got true, expected a number"),
        ("rollout.stop_token_ids=[99999999999999999999]", "rollout.stop_token_ids: got 99999999999999999999, expected"),
        ("run.name=a\0b", r"run.name: got 'a\x00b', expected text without NUL characters"),
        ("data.train=a\0.jsonl", r"data.train: got 'a\x00.jsonl', expected text without NUL characters"),
        ("run.name=" + 101 * "n", "expected text of at most 100 characters"),
        ("run.dir=" + 256 * "n", "expected a path of at most 4095 bytes with names of at most 255"),
        ("data.train=" + 500 * "nine/bytes", "expected a path of at most 4095 bytes with names of at most 255"),
        ("data.template=x", "data.template: got 'x', expected a text with {prompt} or another column in braces"),
        ("trainer.dp=", "trainer.dp: got nothing, expected a whole number"),
        ("trainer.mixed_precision=3", "trainer.mixed_precision: got 3, expected true or false"),
        ("trainer=3", "trainer: got 3, expected a section with the keys backend, dp, tp,"),
        ("reward.functions=[]", "reward.functions: got [], expected at least one function"),
        ("reward.functions=[{kind: exact_mach}]", "(did you mean exact_match?)"),
        ("reward.functions=[{weight: 2}]", "reward.functions.0.kind: not set"),
        ("algorithm.group_size=1",
         "got 1 with advantage.kind='grpo', expected at least 2 (or advantage.kind='reinforce_pp' with"),
        ("algorithm.group_size=0", "algorithm.group_size: got 0, expected a number >= 1"),
        ("model.path=builtin:huge",
         "model.path: got 'builtin:huge', expected 'builtin:tiny-qwen3' or 'builtin:tiny-qwen3-moe'"),
        ("trainer.dp=3", "algorithm.prompts_per_step: got 32, expected a multiple of trainer.dp=3"),
        ("rollout.num_engines=33", "got 32, expected at least rollout.num_engines=33, because every rollout"),
        ("rollout.num_actors=33", "got 32, expected at least rollout.num_actors=33, because every rollout"),
        ("rollout.tp=2", "rollout.tp: got 2 with rollout.engine='hf', expected 1, because it has an effect only"),
        ("sync.transport=nccl", "got 'nccl', expected one of auto, collective, ipc, pairs, store, disk"),
        ("sync.timeout_s=400", "sync.timeout_s: got 400, expected less than resources.stage_timeout_s=300"),
        ("algorithm.chunk_groups=4", "algorithm.chunk_groups: got 4 with algorithm.mode='sync', expected it unset"),
        ("algorithm.mode=pipelined",
         "algorithm.mode: got 'pipelined', expected one of sync, streaming, async, async_streaming"),
        ("sync.dir=/weights", "sync.dir: got '/weights' with sync.transport='auto', expected it unset"),
        ("rollout.max_new_tokens=20000", "trainer.tokens_per_microbatch: got 16384, expected at least 20512"),
        ("trainer.pp=2", "trainer.pp: got 2 with trainer.backend='fsdp', expected 1, because it has an effect only"),
        ("trainer.sequence_parallel=true", "trainer.sequence_parallel: got true with trainer.backend='fsdp', expected"),
        ("trainer.distributed_optimizer=false", "trainer.distributed_optimizer: got false with trainer.backend='fsdp'"),
        ("trainer.offload=true", "trainer.offload: got true with one train worker, expected false"),
        ("trainer.fetch=all", "trainer.fetch: got 'all', expected one of auto, leader, independent"),
        ("trainer.packing=tight", "trainer.packing: got 'tight', expected one of auto, none, packed, dynamic"),
        ("rollout.top_k=600", "rollout.top_k: got 600, expected at most rollout.mask_limit=512"),
        ("trainer.lr", "override 'trainer.lr': expected key.sub=value"),
        (".lr=2", "override '.lr=2': expected key.sub=value"),
        ("reward.functions={}", "reward.functions: got {}, expected a list"),
    ],
)  # fmt: skip
def test_one_sentence_names_key_value_and_what_was_expected(tmp_path: Path, override: str, sentence: str) -> None:
    found = file_problems(tmp_path, "", override)
    assert len(found) == 1, found
    assert sentence in found[0]
    assert "\n" not in found[0]


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    found = file_problems(tmp_path, "trainer: {dp_: 1, lr: x}\nloss: {clip_low: 2}")
    assert {sentence.partition(":")[0] for sentence in found} == {"trainer.dp_", "trainer.lr", "loss.clip_low"}
    found = file_problems(tmp_path, "", "trainer.dp=3", "rollout.num_engines=33", "rollout.top_k=600")
    assert len(found) == 3


def test_overrides_through_lists_and_scalars_are_refused(tmp_path: Path) -> None:
    text = "trainer: {lr: 1}\nreward: {functions: [{kind: format}]}"
    assert "got 1 as trainer.lr, expected a section" in file_problems(tmp_path, text, "trainer.lr.x=3")[0]
    assert (
        "got '1' in reward.functions, expected a number below 1, its length"
        in file_problems(tmp_path, text, "reward.functions.1.kind=format")[0]
    )


def test_broken_files(tmp_path: Path) -> None:
    assert "line 2: the key 'trainer' appears twice" in file_problems(tmp_path, "trainer: {dp: 1}\ntrainer: {dp: 2}")[0]
    assert "line 1" in file_problems(tmp_path, "trainer: [")[0]
    assert "expected sections" in file_problems(tmp_path, "- 3")[0]
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "missing.yaml")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    found = file_problems(tmp_path, "", "model.path=/no/such/model", "data.train=no.jsonl", "data.validation=./no")
    assert [sentence.partition(":")[0] for sentence in found] == ["model.path", "data.train", "data.validation"]
    (tmp_path / "train.jsonl").write_text("{}\n")
    config = load(tmp_path, "", f"data.train={tmp_path}/train.jsonl", "validation.every=0")
    assert not config.data.generated


def test_a_dataset_needs_its_own_validation_set(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    [sentence] = file_problems(tmp_path, "", f"data.train={tmp_path}/train.jsonl")
    assert sentence.startswith("data.validation: not set")


def test_only_the_builtin_model_is_warmed_up(tmp_path: Path) -> None:
    [sentence] = file_problems(tmp_path, "", "warmup.corpus=digit_skills", "model.path=org/model")
    assert "it has an effect only with the built-in model" in sentence
    assert load(tmp_path, "", "warmup.corpus=digit_skills").warmup.corpus == "digit_skills"


def test_pairs_send_an_adapter_only_by_itself(tmp_path: Path) -> None:
    given = "trainer: {lora: {rank: 4}}\nsync: {transport: pairs}"
    assert load(tmp_path, given, "sync.delta=true").sends_adapter
    [sentence] = file_problems(tmp_path, given.replace("pairs", "pairs, adapter: merged"))
    assert "sync.adapter: got 'merged' with sync.transport='pairs', expected 'only'" in sentence


def test_reward_names_are_unique(tmp_path: Path) -> None:
    twice = "reward: {functions: [{kind: exact_match}, {kind: 'my.rewards:exact_match'}]}"
    assert "got the name 'exact_match', which is taken" in file_problems(tmp_path, twice)[0]
    config = load(tmp_path, twice, "reward.functions.1.name=mine")
    assert [function.label for function in config.reward.functions] == ["exact_match", "mine"]


def test_resolved_yaml_reads_back_equal(tmp_path: Path) -> None:
    config = load(
        tmp_path, "", "trainer.lr=3e-5", "sync.in_flight=keep", "run.name=off", "data.options={a: '1', b: '{x} = '}"
    )
    config = with_run_dir(config)
    assert load(tmp_path, resolved_yaml(config)) == config
    assert set(yaml.safe_load(resolved_yaml(config))) == set(Config.model_fields)


def test_run_dir_is_named_after_run_and_time() -> None:
    config = with_run_dir(Config(), datetime.datetime(2025, 11, 20, 7, 8, 9))
    assert config.run.dir is not None
    assert config.run.dir.endswith("/runs/headrace-20251120-070809")
    assert with_run_dir(config) == config


def test_derived_values() -> None:
    config = build_config({"algorithm": {"steps": 3}, "loss": {"kl_coef": 0.1}})
    assert (config.rows_per_step, config.with_reference, config.traced_step) == (256, True, 3)


def test_config_never_changes() -> None:
    with pytest.raises(ValidationError):
        Config().trainer.lr = 1.0  # type: ignore[misc]


def test_config_error_is_a_user_error_and_travels() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert error.problems == ("a", "b") and issubclass(ConfigError, UserError)
    assert str(error) == "a\nb"


def test_every_field_of_every_section_survives_its_own_default() -> None:
    """A default that its own checks refuse would only show when a user writes it down."""

    def sections(model: type[BaseModel]) -> typing.Iterator[type[BaseModel]]:
        yield model
        for field in model.model_fields.values():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from sections(field.annotation)

    for section in sections(Config):
        assert section.model_validate(section().model_dump()) == section()


def test_a_mesh_of_megatron(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "trainer: {backend: megatron, dp: 2, tp: 2, cp: 2, pp: 2, ep: 4, sequence_parallel: true, packing: packed}",
    )
    assert config.trainer.topology.world == 16 and config.trainer.topology.pad_multiple == 8
    [found] = file_problems(tmp_path, "trainer: {backend: megatron, sequence_parallel: true}")
    assert found.startswith("trainer.sequence_parallel: got true with trainer.tp=1, expected false")
    [found] = file_problems(tmp_path, "trainer: {backend: megatron, ep: 2}")
    assert found.startswith("trainer.ep: got 2, expected a divisor of trainer.dp x tp x cp = 1")
    for backend in ("megatron", "fsdp"):
        [found] = file_problems(tmp_path, f"trainer: {{backend: {backend}, cp: 2, packing: none}}")
        assert found.startswith("trainer.packing: got 'none' with trainer.cp=2, expected 'packed'")
    small = "trainer: {backend: megatron, tp: 2, cp: 2, packing: packed, tokens_per_microbatch: 765}"
    [found] = file_problems(tmp_path, small, "rollout.max_new_tokens=250")
    assert (
        "got 765, expected at least 768, the length of the longest row" in found
        and "rounded up to a multiple of 8" in found
    )


def test_the_data_plane_may_import_the_samplers_that_the_configuration_names(tmp_path: Path) -> None:
    listed = load(tmp_path, "dataplane: {samplers: ['my:first']}")
    assert listed.dataplane.with_sampler(listed.resolved_sampler) is listed.dataplane and listed.dataplane.samplers == (
        "my:first",
    )
    own = load(tmp_path, "dataplane: {samplers: ['my:first']}", "algorithm.sampler=my:second")
    assert own.dataplane.with_sampler(own.resolved_sampler).samplers == ("my:first", "my:second")
    both = load(tmp_path, "dataplane: {samplers: ['my:first']}", "algorithm.sampler=my:first")
    assert both.dataplane.with_sampler(both.resolved_sampler).samplers == ("my:first",)


def test_a_run_has_one_directory() -> None:
    problem = only_problem({"dataplane": {"directory_shards": 2}})
    assert problem.startswith("dataplane.directory_shards: got 2, expected 1 in a run")


def test_a_sleeping_process_keeps_less_on_the_gpus_of_a_pool() -> None:
    """An engine of a model with experts kept 2210 MiB asleep, which the limit of a run with its own GPUs allows."""
    gpus: dict[str, Any] = {"trainer_gpus": [0], "rollout_gpus": [0, 1]}
    pooled: dict[str, Any] = {
        "pool": {"address": "a"},
        "rollout": {"engine": "vllm", "num_engines": 2, "num_actors": 1},
    }
    pooled |= {"algorithm": {"mode": "async"}, "sync": {"in_flight": "keep"}}
    assert build_config({}).residual_mib > 2210 > build_config({**pooled, "resources": gpus}).residual_mib
    assert build_config({"resources": {"residual_mib": 100}}).residual_mib == 100
    assert build_config({**pooled, "resources": {**gpus, "residual_mib": 100}}).residual_mib == 100


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"mode": "async"}}, "got 'always' with algorithm.mode='async', expected algorithm.mode='sync'"),
        ({"algorithm": {"mode": "streaming"}}, "with algorithm.mode='streaming', expected algorithm.mode='sync'"),
        ({"validation": {"background": True}}, "got 'always' with validation.background=true, expected false"),
        ({"sync": {"delta": True}}, "got 'always' with sync.delta=true, expected false"),
        ({"sync": {"staging": "full"}}, "got 'always' with sync.staging='full', expected 'auto'"),
        ({"run": {"replay": "/a"}, "validation": {"every": 0}}, "got 'always' with run.replay set, expected it unset"),
    ],
)
def test_turns_in_memory_are_refused_where_both_sides_are_busy(sections: dict, words: str) -> None:
    always = {"resources": {"switch_roles": "always"}}
    assert words in only_problem({**sections, **always})
    build_config({**sections, "resources": {"switch_roles": "auto"}})


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({"algorithm": {"mode": "streaming"}}, 0.5),
        ({"algorithm": {"mode": "streaming", "chunk_groups": 32}}, 1 / 16),
        ({"algorithm": {"mode": "streaming", "sampler": "in_order"}}, 1.0),
        ({"algorithm": {"mode": "streaming"}, "run": {"deterministic": True}}, 1.0),
        ({"algorithm": {"mode": "streaming"}, "loss": {"kl_coef": 0.1}}, 1.0),
        ({"algorithm": {"mode": "sync"}}, 1.0),
        ({"algorithm": {"mode": "async_streaming", "max_staleness": 2}}, 3.0),
    ],
)
def test_modes_that_give_room_back_need_less_of_the_store(sections: dict[str, Any], steps: float) -> None:
    algorithm = {"prompts_per_step": 1024, **sections["algorithm"]}
    config = Config.model_validate({**sections, "algorithm": algorithm, "rollout": {"max_new_tokens": 16_000}})
    demand, capacity = StoreDemand.of(config), config.dataplane.store.capacity_mib
    assert demand.steps == steps
    assert bool(demand.problems(capacity)) == (steps * demand.step_bytes / (1 << 20) > capacity) == (steps >= 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("decode_context_parallel_size", 2), ("kv_transfer_config", {"kv_connector": "x"}), ("enable_eplb", True)],
)
def test_vllm_arguments_without_routes_are_refused_with_router_replay(name: str, value: Any) -> None:
    data = {"rollout": {"engine": "vllm", "vllm": {name: value}}, "router_replay": {"enabled": True}}
    assert only_problem(data) == (
        f"rollout.vllm.{name}: got {value!r} with router_replay.enabled=true, expected it unset, because vLLM reports "
        "no experts with it"
    )
    build_config({**data, "router_replay": {"enabled": False}})


def test_episodes_of_several_rows_are_refused_with_router_replay() -> None:
    data = {"environment": {"kind": "package.module:make", "max_rows": 2}, "router_replay": {"enabled": True}}
    assert only_problem(data) == (
        "environment.max_rows: got 2 with router_replay.enabled=true, expected 1, because routes are recorded for the "
        "first row of an episode only"
    )


def test_pictures_are_refused_where_nothing_takes_them() -> None:
    images, router = {"enabled": True}, {"enabled": True}
    given = {"data": {"images": images}, "trainer": {"backend": "megatron", "cp": 2}, "router_replay": router}
    problems = " ".join(contradictions(Config.model_validate(given)))
    for key in ("trainer.backend: got 'megatron'", "trainer.cp: got 2", "router_replay.enabled: got true"):
        assert f"{key} with data.images.enabled=true, expected" in problems


def test_a_home_folder_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "d.jsonl").write_text("")
    source = {"source": "~/d.jsonl"}
    data = {"train": "mixture", "validation": "~/d.jsonl", "mixture": [source]}
    sections: dict[str, Any] = {
        "model": {"path": "~/m"}, "data": data, "evaluation": {"s": {"data": source}},
        "run": {"dir": "~/r", "replay": "~/m"}, "sync": {"dir": "~/w", "transport": "disk"},
    }  # fmt: skip
    assert "~" not in resolved_yaml(Config.model_validate(sections)), "the one home folder is that of the configuration"
    assert build_config({"data": {"train": "~/d.jsonl", "validation": "~/d.jsonl"}}).data.train == f"{tmp_path}/d.jsonl"
    options = [options_section("trackio", {"dir": "~/t"}), options_section("mlflow", {"uri": "~/t"})]
    assert [list(section.model_dump(exclude_defaults=True).values()) for section in options] == [[f"{tmp_path}/t"]] * 2
    parsed = parse(["eval", "run.yaml", "--model=~/m", "--out=~/e.json"])
    assert parsed.model == f"{tmp_path}/m" and parsed.out == tmp_path / "e.json"
    assert parse(["doctor", "--model", "~/m"]).model == f"{tmp_path}/m"


def test_a_reward_has_a_name_of_its_own() -> None:
    environment = {"kind": "environment", "options": {"name": "judge"}}
    config = build_config({"reward": {"functions": [{"kind": "environment"}, environment]}})
    assert config.reward.weights == {"environment": 1.0, "judge": 1.0}
    for name in ("std", "a/b"):
        with pytest.raises(ConfigError, match="one without / and whitespace, other than mean, std, flat_groups_share"):
            build_config({"reward": {"functions": [environment | {"options": {"name": name}}]}})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("rollout.mask_limit=0",), "algorithm.prev_logprobs: got 'rollout' with rollout.top_p=0.9, rollout.top_k=0"),
        (("rollout.engine=vllm", "rollout.logprobs=vllm"), "rollout.mask_limit: got 512 with rollout.top_p=0.9"),
        (("rollout.engine=vllm", "rollout.vllm={speculative_config: {method: ngram}}"), "rollout.mask_limit: got 512"),
        (("distillation.teachers=[{model: other}]",), "rollout.mask_limit: got 512 with rollout.top_p=0.9"),
        (("rollout.top_k=1",), "rollout.top_k: got 1, expected 0 (off) or at least 2, because it leaves one token"),
        (("rollout.min_p=1",), "rollout.min_p: got 1, expected below 1, because it leaves one token"),
        (("rollout.mask_limit=1",), "rollout.mask_limit: got 1, expected 0 (off) or at least 2"),
    ],
)
def test_sampling_that_masks_cannot_replay_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    assert load(tmp_path, "rollout: {top_p: 0.9}").rollout.masked
    problems = file_problems(tmp_path, "rollout: {top_p: 0.9}", *overrides)
    assert any(one.startswith(sentence) for one in problems), problems


def test_temperatures_above_the_limit_of_vllm_are_refused(tmp_path: Path) -> None:
    text = 'evaluation: {a: {data: {source: "task:arithmetic"}, num_prompts: 2, temperature: 2.5}}'
    assert load(tmp_path, text).evaluation["a"].temperature == 2.5
    given = ("rollout.engine=vllm", "rollout.temperature=4", "validation.temperature=3")
    problems = "\n".join(file_problems(tmp_path, text, *given))
    for key, got in (("rollout", "4"), ("validation", "3"), ("evaluation.a", "2.5")):
        assert f"{key}.temperature: got {got} with rollout.engine='vllm', expected at most 2, which" in problems


def test_requests_that_say_how_they_are_sampled_need_masks(tmp_path: Path) -> None:
    text = "rollout: {engine: hf, endpoint: {enabled: true, sampling: request}}\nenvironment: {kind: tool_use}"
    config = load(tmp_path, text)
    assert config.rollout.masked and mask_rules(config.rollout) == MaskRules(512, required=False)
    assert sampling(config.rollout, n=1, seed=0).mask_limit == 512
    [problem] = file_problems(tmp_path, text, "rollout.mask_limit=0")
    assert problem.startswith("rollout.endpoint.sampling: got 'request' with rollout.mask_limit=0"), problem
    problems = file_problems(tmp_path, text, "distillation.teachers=[{model: other}]")
    sentence = "rollout.endpoint.sampling: got 'request' with distillation.teachers, expected 'run'"
    assert any(one.startswith(sentence) for one in problems), problems


def test_only_training_rollouts_have_masks() -> None:
    config = Config.model_validate({"rollout": {"top_p": 0.9, "min_p": 0.1}, "validation": {"temperature": 1.0}})
    training = sampling(config.rollout, n=2, seed=0)
    assert training.masked and training.mask_limit == 512
    defaults = EvaluationDefaults(config.rollout, config.data, config.reward, 0)
    [plan] = evaluation_plans(defaults, config.validation, {}, idle=True)
    assert (plan.sampling.top_p, plan.sampling.min_p, plan.sampling.mask_limit) == (0.9, 0.1, 0)
    assert "mask_limit" not in fingerprint(Config()) and "mask_limit" in fingerprint(config)
