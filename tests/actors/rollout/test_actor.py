"""The rollout actor as Ray runs it, over engine actors of which some die. It is built from plain data, answers mistakes
with one sentence, and takes weights."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from headrace.actors.engine_actor import CONCURRENCY, EngineActor, EngineSetup
from headrace.actors.engines.config import EngineKeys, ModelConfig, ScriptedConfig
from headrace.actors.engines.factory import EngineConfig
from headrace.actors.engines.protocol import EngineDied, SamplingParams
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA
from headrace.actors.rewards.config import RewardConfig, RewardFunctionConfig
from headrace.actors.rollout.actor import EvaluationSetup, RolloutActor, RolloutSetup
from headrace.actors.rollout.data_config import DataConfig
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.traffic import Traffic
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled
from headrace.trainers.cluster.calls import ActorFailed, Call, DriverMeter, gather
from headrace.trainers.cluster.handles import EngineHandle, RolloutHandle

T = TypeVar("T")


@pytest.fixture(scope="module")
def plane(ray_session: None) -> Iterator[DataPlane]:
    with open_data_plane(DataPlaneConfig(store=StoreConfig(kind="local"))) as opened:
        yield opened


def setup(model_folder: str, plane: DataPlane) -> RolloutSetup:
    return RolloutSetup(
        name="rollout 0",
        threads=1,
        seed=0,
        engine=EngineConfig(EngineKeys(), ModelConfig(path=model_folder), receiver=receiver()),
        endpoint=EndpointConfig(),
        environment=EnvironmentConfig(),
        model=ModelConfig(path=model_folder),
        tokenizer=model_folder,
        reward=RewardConfig(
            functions=(
                RewardFunctionConfig(kind="exact_match"),
                RewardFunctionConfig(kind="format", weight=0.1, options={"pattern": r"\d+"}),
            )
        ),
        data=DataConfig(max_prompt_tokens=16),
        evaluations=(
            EvaluationSetup("validation", "val", DataConfig(max_prompt_tokens=16), 8, RewardConfig(), correct=None),
        ),
        check_prompts=True,
        data_plane=plane.handle,
    )


def start(config: RolloutSetup) -> RolloutHandle:
    return RolloutHandle(
        lambda: ray.remote(RolloutActor).options(num_cpus=0).remote(config), config.name, DriverMeter()
    )


def got(call: Call[T]) -> T:
    return gather([call], "test", 120)[0]


def ask(method: Any, *args: Any) -> Any:
    """The result of a method that the driver has no call for."""
    return ray.get(method.remote(*args), timeout=120)


def test_an_actor_s_life(model_folder: str, plane: DataPlane, tmp_path: Path) -> None:
    actor = start(setup(model_folder, plane))
    info = got(actor.ping())
    assert info.name == "rollout 0" and info.pid != os.getpid()
    got(actor.build())
    with connect(plane.handle) as client:
        client.register("train", ROLLOUT_SCHEMA, ["train"], group_size=4)
        report = got(actor.rollout(list(range(16)), "train", SamplingParams(n=4, max_new_tokens=8), False, False))
        assert report.rows == 64 and len(pickle.dumps(report)) < 2000, "a report is figures, not rows"
        meta = client.claim("train", "train", ROLLOUT_FIELDS, 64, whole_groups=True, timeout_s=10)
        assert client.get(meta).num_rows == 64 and Traffic.from_bytes(report.traffic).bytes_put > 0
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    assert got(actor.evaluate("validation", 0, 1, greedy, 0)).rows == 8
    publisher = Publisher(tmp_path)
    assert got(actor.num_workers()) == 1
    got(actor.prepare_weights(publisher.publish(3, scaled(model_folder, 1.1))))
    assert ask(actor.ray_actor.version) == 0
    report = got(actor.commit_weights(3, "keep", "recompute"))
    assert (report.version, report.kept, ask(actor.ray_actor.version)) == (3, 0, 3)
    got(actor.prepare_weights(publisher.publish(4, scaled(model_folder, 1.2))))
    got(actor.drop_weights(4))
    with pytest.raises(ActorFailed, match="ValueError: .*got version 4 to commit, expected the prepared one, none"):
        got(actor.commit_weights(4, "wait", "recompute"))
    publisher.close()
    ask(actor.ray_actor.close)
    ask(actor.ray_actor.close)
    actor.kill()


def test_mistakes_reach_the_driver_in_one_sentence(model_folder: str, plane: DataPlane) -> None:
    good = setup(model_folder, plane)
    wrong = dataclasses.replace(good, data=DataConfig(train="/no/such/prompts.jsonl"))
    actor = start(wrong)
    with pytest.raises(ActorFailed, match="'/no/such/prompts.jsonl' cannot be read") as failed:
        got(actor.build())
    assert isinstance(failed.value.cause, ValueError)
    for call in (actor.num_workers(), actor.end_rollouts()):
        with pytest.raises(ActorFailed, match="RuntimeError: rollout 0: the (engine|worker) is not built yet"):
            gather([call], "test", 120)
    actor.kill()


def test_over_engine_actors_of_which_one_dies(model_folder: str, plane: DataPlane) -> None:
    def start_engine(name: str) -> EngineHandle:
        engine = EngineConfig(
            EngineKeys(engine="scripted"),
            ModelConfig(path=model_folder),
            ScriptedConfig(latency_s=1.0, latency_sigma=0.3),
        )
        actor = ray.remote(EngineActor).options(num_cpus=0, max_concurrency=CONCURRENCY)
        handle = EngineHandle(lambda: actor.remote(EngineSetup(name, 1, engine)), name, DriverMeter())
        got(handle.build())
        return handle

    actor = start(dataclasses.replace(setup(model_folder, plane), engine=None))
    got(actor.build())
    engines = {name: start_engine(name) for name in ("engine 0", "engine 1")}
    got(actor.set_engines(list(engines.values())))
    with connect(plane.handle) as client:
        client.register("over-engines", ROLLOUT_SCHEMA, ["train"], group_size=4)
        params = SamplingParams(n=4, max_new_tokens=8)
        running = actor.rollout(list(range(12)), "over-engines", params, False, False)
        # Not before it has requests to lose: an engine that has none is not missed.
        while not ask(engines["engine 0"].ray_actor.running):
            pass
        engines["engine 0"].kill()
        report = got(running)
        assert report.rows == 48 and report.failed == 0
        assert [left.name for left in report.left_out] == ["engine 0"]
        assert "EngineDied" in report.left_out[0].reason
        meta = client.claim("over-engines", "train", ROLLOUT_FIELDS, 48, whole_groups=True, timeout_s=10)
        assert len(set(meta.keys)) == 48
    engines["engine 2"] = start_engine("engine 2")
    got(actor.add_engine(engines["engine 2"]))
    got(actor.remove_engine(engines["engine 1"]))
    got(actor.remove_engine(engines["engine 1"]))
    report = got(actor.rollout([12, 13], "over-engines", params, False, False))
    assert report.rows == 8 and not report.left_out and not ask(engines["engine 2"].ray_actor.running)
    with pytest.raises(ActorFailed, match="'engine 0' is dead") as failed:
        got(actor.add_engine(engines["engine 0"]))
    assert isinstance(failed.value.cause, EngineDied)
    ask(actor.ray_actor.close)
    assert ask(engines["engine 1"].ray_actor.version) == 0, "engine actors are their owner's to close"
    for handle in (actor, engines["engine 1"], engines["engine 2"]):
        handle.kill()


def test_an_actor_that_embeds_its_engine_takes_no_others(model_folder: str, plane: DataPlane) -> None:
    actor = start(setup(model_folder, plane))
    got(actor.build())
    with pytest.raises(ActorFailed, match="RuntimeError: rollout 0: this actor runs its engine itself"):
        got(actor.set_engines([]))
    actor.kill()
