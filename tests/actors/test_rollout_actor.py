"""The rollout actor as Ray runs it: built from plain data, mistakes in one sentence, rows out, weights in."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import Qwen3ForCausalLM

from headrace.actors.engines.factory import EngineConfig
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.prompts import DataConfig
from headrace.actors.protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA
from headrace.actors.rewards.factory import RewardConfig
from headrace.actors.rollout_actor import RolloutActor, RolloutSetup
from headrace.actors.transports.ipc import IpcSender
from headrace.codecs import messages
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.traffic import Traffic


@pytest.fixture(scope="module")
def plane() -> Iterator[DataPlane]:
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray warns about its coming default otherwise
        ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    try:
        with open_data_plane(DataPlaneConfig(store=StoreConfig(kind="local"))) as opened:
            yield opened
    finally:
        if started:
            ray.shutdown()


def setup(model_folder: str, plane: DataPlane) -> RolloutSetup:
    return RolloutSetup(
        name="rollout 0",
        threads=1,
        seed=0,
        engine=EngineConfig("hf", model_folder),
        environment="single_turn",
        tokenizer=model_folder,
        rewards=(RewardConfig("exact_match"), RewardConfig("format", 0.1, {"pattern": r"\d+"})),
        data=DataConfig("task:reverse"),
        validation=DataConfig("task:reverse", held_out=True),
        max_prompt_tokens=16,
        check_prompts=True,
        transport="ipc",
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
        report = call(actor.rollout, 0, 16, "train", SamplingParams(n=4, max_new_tokens=8))
        assert report.rows == 64 and len(pickle.dumps(report)) < 2000, "a report is figures, not rows"
        meta = client.claim("train", "train", ROLLOUT_FIELDS, 64, whole_groups=True, timeout_s=10)
        assert client.get(meta).num_rows == 64 and Traffic.from_bytes(report.traffic).bytes_put > 0
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    assert call(actor.validate, 0, 8, greedy).rows == 8
    model = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    sender = IpcSender("run", root=tmp_path)
    manifest = sender.send(3, {name: p.detach() for name, p in model.named_parameters()})
    assert call(actor.load_weights, messages.encode(manifest)) == manifest.num_bytes
    assert call(actor.version) == 3
    sender.close()
    call(actor.close)
    call(actor.close)
    ray.kill(actor)


def test_mistakes_reach_the_driver_in_one_sentence(model_folder: str, plane: DataPlane) -> None:
    good = setup(model_folder, plane)
    wrong = dataclasses.replace(good, data=DataConfig("/no/such/prompts.jsonl"))
    actor = start(wrong)
    with pytest.raises(ValueError, match="'/no/such/prompts.jsonl' cannot be read"):
        call(actor.build)
    with pytest.raises(RuntimeError, match="rollout 0: not built yet"):
        call(actor.version)
    ray.kill(actor)
