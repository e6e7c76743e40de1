"""What engines take when the configuration leaves it to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.actors.engines.config import EngineKeys, ModelConfig, engine_batch, engine_dtype, memory_share
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.cluster.engine_specs import engine_config, engine_log, neighbour_bytes
from headrace.trainers.cluster.rollout_specs import rollout_setup
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config

VLLM, HF = EngineKeys(engine="vllm"), EngineKeys()


def kept_free(config: Config) -> int:
    return neighbour_bytes(config.pool, config.rollout, config.sync, config.residual_mib)


def test_weights_are_bfloat16_on_gpus_alone() -> None:
    assert (engine_dtype(ModelConfig(), gpu=True), engine_dtype(ModelConfig(), gpu=False)) == ("bfloat16", "float32")
    assert engine_dtype(ModelConfig(dtype="float32"), gpu=True) == "float32"
    assert engine_dtype(ModelConfig(dtype="bfloat16"), gpu=False) == "bfloat16"


def test_vllm_on_gpus_takes_larger_batches() -> None:
    assert [engine_batch(rollout, gpu=gpu) for rollout in (VLLM, HF) for gpu in (True, False)] == [512, 256, 256, 256]
    assert engine_batch(EngineKeys(engine="vllm", max_batch=7), gpu=True) == 7


def test_an_engine_leaves_room_on_gpus_that_train_workers_use() -> None:
    assert memory_share(VLLM, shared=False) == 0.9
    assert 0 < memory_share(VLLM, shared=True) < 0.5
    assert memory_share(EngineKeys(engine="vllm", gpu_memory_utilization=0.3), shared=True) == 0.3


def test_an_engine_on_a_pools_gpu_leaves_memory_for_those_that_sleep_there() -> None:
    kept, size = 16 << 30, 80 << 30
    assert memory_share(VLLM, shared=False, kept_free=kept, gpu_bytes=size) == pytest.approx(0.75)
    assert memory_share(VLLM, shared=False, kept_free=1 << 30, gpu_bytes=size) == 0.9
    assert memory_share(VLLM, shared=False, kept_free=kept, gpu_bytes=0) == 0.9, "the GPU's size is not known"
    asked = EngineKeys(engine="vllm", gpu_memory_utilization=0.3)
    assert memory_share(asked, shared=False, kept_free=kept, gpu_bytes=16 << 30) == 0.3
    with pytest.raises(
        ValueError, match=r"pool.other_runs: got processes that may keep 16384 MiB asleep on a GPU of 16384"
    ):
        memory_share(VLLM, shared=False, kept_free=kept, gpu_bytes=16 << 30)


def test_what_sleeps_on_a_pools_gpu_are_the_own_trainer_and_two_processes_of_each_other_run() -> None:
    pool = {"address": "a", "other_runs": 2}
    rollout = {"engine": "vllm", "num_engines": 2, "num_actors": 1}
    gpus = {"trainer_gpus": [0], "rollout_gpus": [0, 1], "residual_mib": 1000}
    sections = {"pool": pool, "rollout": rollout, "resources": gpus, "algorithm": {"mode": "async"}}
    sections["sync"] = {"in_flight": "keep"}
    kept = kept_free(build_config(sections))
    assert kept == (3 * 1128 + 2 * 1000) << 20, "each trainer has two buckets of 64 MiB"
    handle: Any = SimpleNamespace(store=SimpleNamespace(key="k"))
    engine = engine_config(build_config(sections), "engine 1", "m", handle, "cuda:0")
    assert engine.kept_free_bytes == kept
    assert engine_config(build_config(sections), "engine 1", "m", handle, "cpu").kept_free_bytes == 0
    assert kept_free(build_config({**sections, "rollout": {**rollout, "kv_cache": 512}})) == 0
    assert kept_free(build_config({})) == 0


def test_an_engine_takes_sequences_as_long_as_training_and_validation_need() -> None:
    data = {"max_prompt_tokens": 100}
    assert build_config({"data": data, "rollout": {"max_new_tokens": 50}}).engine_length == 150
    longer = {"max_new_tokens": 80}
    assert build_config({"data": data, "rollout": {"max_new_tokens": 50}, "validation": longer}).engine_length == 180
    given = {"engine": "vllm", "max_new_tokens": 50, "max_model_len": 200}
    assert build_config({"data": data, "rollout": given, "validation": longer}).engine_length == 200
    without = {
        "data": data,
        "rollout": {"max_new_tokens": 50},
        "environment": {"kind": "tool_use"},
        "validation": {"every": 0},
    }
    assert build_config(without).engine_length == 150, "tools' results count among max_new_tokens"


def test_engines_too_short_for_the_run_are_refused() -> None:
    rollout = {"engine": "vllm", "max_new_tokens": 50, "max_model_len": 149}
    sentence = only_problem({"data": {"max_prompt_tokens": 100}, "rollout": rollout})
    assert sentence.startswith("rollout.max_model_len: got 149, expected at least 150, the length of the longest")


def test_a_setup_tells_the_engine_where_it_runs_and_where_its_log_is() -> None:
    config = build_config({"run": {"dir": "/r"}, "rollout": {"engine": "vllm"}})
    assert engine_log(config.run.dir, "rollout 3") == engine_log(config.run.dir, "engine 3")
    assert engine_log(config.run.dir, "engine 3") == "/r/engines/engine-3.log"
    assert engine_log(build_config({}).run.dir, "engine 3") == ""


def test_an_actor_s_engine_is_told_its_length_its_place_and_its_log() -> None:
    sections = {"run": {"dir": "/r"}, "rollout": {"engine": "vllm"}, "data": {"max_prompt_tokens": 100}}
    config = build_config(sections)
    handle: Any = SimpleNamespace(store=SimpleNamespace(key="k"))
    rollout = rollout_setup(config, 1, "m", handle, "cuda:0", shared_gpu=True)
    for engine in (rollout.engine, engine_config(config, "engine 1", "m", handle, "cuda:0", shared_gpu=True)):
        assert engine is not None and engine.on_gpu and engine.shared_gpu
        assert (engine.max_model_len, engine.log) == (356, "/r/engines/engine-1.log")
    alone = engine_config(config, "engine 0", "m", handle, "cpu")
    assert not alone.on_gpu and not alone.shared_gpu
    assert rollout_setup(config, 1, "m", handle, None).engine is None
