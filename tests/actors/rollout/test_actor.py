"""The rollout actor as Ray runs it: built from plain data, mistakes in one sentence, rows out, weights in; over engine
actors of which some die."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headrace.actors.engine_actor import CONCURRENCY, EngineActor, EngineSetup
from headrace.actors.engines.config import ModelConfig, RolloutConfig, ScriptedConfig
from headrace.actors.engines.factory import EngineConfig
from headrace.actors.engines.protocol import CommitReport, EngineDied, SamplingParams
from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA
from headrace.actors.rewards.config import RewardFunctionConfig
from headrace.actors.rollout.actor import RolloutActor, RolloutSetup
from headrace.actors.rollout.config import DataConfig
from headrace.codecs import messages
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.traffic import Traffic
from headrace.tests.actors.weights.weight_updates import Publisher, receiver, scaled


@pytest.fixture(scope="module")
def plane(ray_session: None) -> Iterator[DataPlane]:
    with open_data_plane(DataPlaneConfig(store=StoreConfig(kind="local"))) as opened:
        yield opened


def setup(model_folder: str, plane: DataPlane) -> RolloutSetup:
    return RolloutSetup(
        name="rollout 0",
        threads=1,
        seed=0,
        engine=EngineConfig(RolloutConfig(), ModelConfig(path=model_folder), receiver=receiver()),
        rollout=RolloutConfig(),
        tokenizer=model_folder,
        rewards=(
            RewardFunctionConfig(kind="exact_match"),
            RewardFunctionConfig(kind="format", weight=0.1, options={"pattern": r"\d+"}),
        ),
        tagged_rewards=frozenset(),
        data=DataConfig(max_prompt_tokens=16),
        validates=True,
        check_prompts=True,
        data_plane=plane.handle,
    )


def start(config: RolloutSetup) -> Any:
    return ray.remote(RolloutActor).options(num_cpus=0).remote(config)


def call(method: Any, *args: Any) -> Any:
    return ray.get(method.remote(*args), timeout=120)


def test_an_actor_s_life(model_folder: str, plane: DataPlane, tmp_path: Path) -> None:
    actor = start(setup(model_folder, plane))
    info = call(actor.info)
    assert info.name == "rollout 0" and info.pid != os.getpid()
    call(actor.build)
    with connect(plane.handle) as client:
        client.register("train", ROLLOUT_SCHEMA, ["train"], group_size=4)
        report = call(actor.rollout, list(range(16)), "train", SamplingParams(n=4, max_new_tokens=8))
        assert report.rows == 64 and len(pickle.dumps(report)) < 2000, "a report is figures, not rows"
        meta = client.claim("train", "train", ROLLOUT_FIELDS, 64, whole_groups=True, timeout_s=10)
        assert client.get(meta).num_rows == 64 and Traffic.from_bytes(report.traffic).bytes_put > 0
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    assert call(actor.validate, 0, 8, greedy).rows == 8
    publisher = Publisher(tmp_path)
    assert call(actor.num_workers) == 1
    call(actor.prepare_weights, messages.encode(publisher.publish(3, scaled(model_folder, 1.1))))
    assert call(actor.version) == 0
    report = messages.decode(call(actor.commit_weights, 3, "keep"), CommitReport)
    assert (report.version, report.kept, call(actor.version)) == (3, 0, 3)
    call(actor.prepare_weights, messages.encode(publisher.publish(4, scaled(model_folder, 1.2))))
    call(actor.drop_weights, 4)
    with pytest.raises(ValueError, match="got version 4 to commit, expected the prepared one, none"):
        call(actor.commit_weights, 4)
    publisher.close()
    call(actor.close)
    call(actor.close)
    ray.kill(actor)


def test_mistakes_reach_the_driver_in_one_sentence(model_folder: str, plane: DataPlane) -> None:
    good = setup(model_folder, plane)
    wrong = dataclasses.replace(good, data=DataConfig(train="/no/such/prompts.jsonl"))
    actor = start(wrong)
    with pytest.raises(ValueError, match="'/no/such/prompts.jsonl' cannot be read"):
        call(actor.build)
    with pytest.raises(RuntimeError, match="rollout 0: not built yet"):
        call(actor.version)
    ray.kill(actor)


def test_over_engine_actors_of_which_one_dies(model_folder: str, plane: DataPlane) -> None:
    def start_engine(name: str) -> Any:
        engine = EngineConfig(
            RolloutConfig(engine="scripted"),
            ModelConfig(path=model_folder),
            ScriptedConfig(latency_s=1.0, latency_sigma=0.3),
        )
        actor = ray.remote(EngineActor).options(num_cpus=0, max_concurrency=CONCURRENCY)
        handle = actor.remote(EngineSetup(name, 1, engine))
        call(handle.build)
        return handle

    actor = start(dataclasses.replace(setup(model_folder, plane), engine=None))
    call(actor.build)
    engines = {name: start_engine(name) for name in ("engine 0", "engine 1")}
    call(actor.set_engines, list(engines.items()))
    with connect(plane.handle) as client:
        client.register("over-engines", ROLLOUT_SCHEMA, ["train"], group_size=4)
        running = actor.rollout.remote(list(range(12)), "over-engines", SamplingParams(n=4, max_new_tokens=8))
        # Not before it has requests to lose: an engine that has none is not missed.
        while not call(engines["engine 0"].running):
            pass
        ray.kill(engines["engine 0"])
        report: Any = ray.get(running, timeout=60)
        assert report.rows == 48 and report.failed == 0
        assert [left.name for left in report.left_out] == ["engine 0"]
        assert "EngineDied" in report.left_out[0].reason
        meta = client.claim("over-engines", "train", ROLLOUT_FIELDS, 48, whole_groups=True, timeout_s=10)
        assert len(set(meta.keys)) == 48
    engines["engine 2"] = start_engine("engine 2")
    call(actor.add_engine, "engine 2", engines["engine 2"])
    call(actor.remove_engine, "engine 1")
    call(actor.remove_engine, "engine 1")
    report = call(actor.rollout, [12, 13], "over-engines", SamplingParams(n=4, max_new_tokens=8))
    assert report.rows == 8 and not report.left_out and call(engines["engine 2"].stats).rows == 8
    with pytest.raises(EngineDied, match="'engine 0' is dead"):
        call(actor.add_engine, "engine 0", engines["engine 0"])
    call(actor.close)
    assert call(engines["engine 1"].version) == 0, "engine actors are their owner's to close"
    for handle in (actor, engines["engine 1"], engines["engine 2"]):
        ray.kill(handle)


def test_an_actor_that_embeds_its_engine_takes_no_others(model_folder: str, plane: DataPlane) -> None:
    actor = start(setup(model_folder, plane))
    call(actor.build)
    with pytest.raises(RuntimeError, match="rollout 0: it embeds its engine"):
        call(actor.set_engines, [])
    ray.kill(actor)
