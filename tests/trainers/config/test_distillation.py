"""The section `distillation`: what reaches train workers and engines, and sentences on keys that do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.actors.engines.factory import EngineConfig
from headrace.actors.protocols import Prompt
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.config import RolloutConfig
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.cluster.engine_specs import teacher_engine
from headrace.trainers.cluster.places.placement import Host
from headrace.trainers.cluster.places.placement_plan import PlacementRequest, plan_placement
from headrace.trainers.cluster.rollout_specs import fingerprint, teacher_sources
from headrace.trainers.cluster.worker_specs import backend_config, teacher_setups
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.config.store_demand import StoreDemand

TWO = [{"model": "a", "data_source": "math"}, {"model": "b", "name": "coder", "weight": 2, "data_source": "code"}]
ALL = {"model": "x"}


def distil(teachers: list[dict[str, Any]] | None = None, **keys: Any) -> dict[str, Any]:
    return {"distillation": {"teachers": teachers or [ALL], **keys}}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"distillation": {"coef": 2.0}}, "distillation.coef: got 2 with distillation.teachers=(), expected 1"),
        (distil(k=4), "distillation.k: got 4 with distillation.kind='reverse_kl', expected 16"),
        (distil(kind="topk", max_log_ratio=3.0), "distillation.max_log_ratio: got 3 with distillation.kind='topk'"),
        (distil(kind="topk", kl_in="advantage"), "kl_in: got 'advantage' with distillation.kind='topk', expected"),
        (distil([ALL, ALL], kind="topk"), "got several teachers for the same rows with distillation.kind='topk'"),
        (distil([ALL, *TWO], kind="topk"), "got several teachers for the same rows with distillation.kind='topk'"),
        (distil([{"model": "a", "name": "t"}] * 2), "got the name 't' twice, expected a different `name`"),
        (distil([{"model": "a", "name": "a/b"}]), "distillation.teachers.0.name: got 'a/b'"),
        (distil([{"model": "a", "weight": 0}]), "distillation.teachers.0.weight: got 0, expected a number > 0"),
        (distil() | {"trainer": {"backend": "megatron", "pp": 2}},
         "distillation.teachers.0.where: got 'train' with trainer.pp=2, expected trainer.pp=1 or where='engine'"),
        (distil([{**ALL, "where": "engine"}]) | {"rollout": {"engine": "vllm", "temperature": 0.7}},
         "distillation.teachers.0.where: got 'engine' with rollout.engine='vllm' and rollout.temperature=0.7"),
        (distil([{**ALL, "where": "engine"}]) | {"resources": {"switch_roles": "always"}},
         "resources.switch_roles: got 'always' with distillation.teachers with where='engine' (teacher_0)"),
        (distil() | {"algorithm": {"group_size": 1, "dynamic_sampling": {"enabled": True}}},
         "algorithm.dynamic_sampling.enabled: got true with algorithm.group_size=1, expected false"),
        (distil() | {"reward": {"functions": []}, "validation": {"every": 0},
                     "algorithm": {"dynamic_sampling": {"enabled": True}}},
         "algorithm.dynamic_sampling.enabled: got true with reward.functions=[], expected false"),
        (distil() | {"reward": {"functions": []}}, "validation.every: got 10 with reward.functions=[], expected 0"),
        (distil() | {"reward": {"functions": []}, "validation": {"every": 0},
                     "evaluation": {"e": {"data": {"source": "task:reverse"}, "num_prompts": 4}}},
         "evaluation.e.reward: got no functions, expected at least one"),
    ],
)  # fmt: skip
def test_one_sentence_for_each_mistake(data: dict[str, Any], sentence: str) -> None:
    assert sentence in only_problem(data)


def test_a_run_without_rewards_and_with_groups_of_one() -> None:
    config = build_config(
        distil() | {"reward": {"functions": []}, "validation": {"every": 0}, "algorithm": {"group_size": 1}}
    )
    assert config.reward.weights == {} and config.distillation.in_advantage
    assert Rubric([]).score(Prompt("0", "p", "a", {}), "r", "stop").valid


def test_rows_have_room_for_a_teachers_columns() -> None:
    plain, one, top = (build_config(data) for data in ({}, distil(), distil(kind="topk", k=5)))
    tokens = plain.rows_per_step * (plain.data.max_prompt_tokens + plain.rollout.max_new_tokens)
    demands = [StoreDemand.of(config).step_bytes for config in (plain, one, top)]
    assert [demand - demands[0] for demand in demands] == [0, 4 * tokens, (4 + 8 * 5) * tokens]


def test_teachers_in_train_workers_are_frozen_and_know_their_rows() -> None:
    config = build_config(distil([*TWO, {"model": "c", "where": "engine"}]) | {"trainer": {"lora": {"rank": 4}}})
    backend = backend_config(config, "model")
    setups = teacher_setups(config.distillation, backend, offload=False)
    assert [(one.name, one.weight, one.source) for one in setups] == [
        ("teacher_0", 1.0, 1), ("coder", 2.0, 0), ("teacher_2", 1.0, None)
    ]  # fmt: skip
    assert [one.backend is None for one in setups] == [False, False, True]
    frozen = backend.frozen("a", offload=True)
    assert (frozen.model, frozen.trains, frozen.trainer.lora.rank, frozen.trainer.offload) == ("a", False, 0, False)
    several = dataclasses.replace(backend, trainer=backend.trainer.model_copy(update={"dp": 2}))
    assert several.frozen("a", offload=True).trainer.offload, "one rank has nowhere to gather its weights"
    assert not frozen.distillation.teachers and frozen.context == backend.context


def test_sources_with_teachers_are_part_of_a_rows_origin() -> None:
    one, two = build_config(distil()), build_config(distil(TWO))
    assert fingerprint(one) == fingerprint(Config()), "journals of earlier runs stay valid"
    assert fingerprint(two) != fingerprint(one) and teacher_sources(one.distillation) is None
    sources = teacher_sources(two.distillation)
    assert sources is not None and sources.names == ("code", "math") and not sources.covers_all


def test_a_teachers_engine_has_a_place_and_settings_of_its_own() -> None:
    given = distil([{"model": "b", "name": "far", "where": "engine"}], kind="topk", k=40)
    config = build_config(given | {"rollout": {"engine": "vllm", "num_engines": 2}})
    request = PlacementRequest.of(config)
    assert request.num_cpus == 4
    placement = plan_placement(request, [Host("here", 4, (0, 1, 2, 3), 16.0)])
    assert [seat.name for seat in placement.engines] == ["rollout 0", "rollout 1"]
    assert [(seat.name, len(seat.gpus)) for seat in placement.teachers] == [("teacher far", 1)]
    assert len({gpu for seat in placement.seats for gpu in seat.gpus}) == 4 and placement.layout == "separate"
    [on_cpu] = plan_placement(request, [Host("here", 0, (), 16.0)]).teachers
    assert on_cpu.name == "teacher far"
    policy = EngineConfig(config.rollout, config.model, max_model_len=26, version=3)
    engine = teacher_engine(policy, "b", config.rollout, config.distillation.top_k)
    assert (engine.model.path, engine.receiver, engine.version, engine.max_model_len) == ("b", None, 0, 27)
    assert isinstance(engine.rollout, RolloutConfig) and engine.rollout.vllm["max_logprobs"] == 40
    low = config.rollout.model_copy(update={"quantization": "fp8", "kv_cache_dtype": "fp8"})
    own = teacher_engine(policy, "b", low, 5).rollout
    assert (own.scheme, own.kv_cache_dtype) == (None, "auto"), "a teacher's log-probs are not rounded"
