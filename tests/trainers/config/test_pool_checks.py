"""Each way in which a run cannot borrow its GPUs from a pool is refused in a sentence of its own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.config.config import with_run_dir
from headrace.trainers.config.load import build_config, load_config

GOOD: dict[str, Any] = {
    "pool": {"address": "here:1"},
    "resources": {"trainer_gpus": [0, 1], "rollout_gpus": [0, 1, 2, 3]},
    "rollout": {"num_engines": 2, "num_actors": 1, "tp": 2, "engine": "vllm"},
    "trainer": {"dp": 2},
    "algorithm": {"mode": "async"},
    "sync": {"in_flight": "keep"},
}
TINY = "builtin:tiny-qwen3"
APART = {"resources": {"trainer_gpus": [4, 5]}, "model": {"path": "folder"}}
EXAMPLES = Path(__file__).parents[3] / "examples" / "time-sharing"


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    """Return the good sections with some keys changed."""
    asked = copy.deepcopy(GOOD)
    for name, keys in sections.items():
        asked.setdefault(name, {}).update(keys)
    return asked


def test_a_run_that_fits_joins_the_cluster_of_its_pool() -> None:
    config = build_config(GOOD)
    assert with_run_dir(config).resources.ray_address == "here:1"
    assert with_run_dir(build_config({})).resources.ray_address is None
    build_config(with_run_dir(config).model_dump(mode="json"))  # the resolved configuration loads again


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_example_fits(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml", ["pool.address=here:1"])
    assert config.run.name == name and config.pool.name == "pool"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resources": {"trainer_gpus": None, "rollout_gpus": None}}, "resources.trainer_gpus: not set"),
        ({"resources": {"trainer_gpus": [0, 4]}}, "got GPU 4 with pool.address set, expected GPUs of"),
        ({"resources": {"trainer_gpus": [0, 2]}}, "expected that one engine of resources.rollout_gpus has none"),
        ({"resources": {"rollout_gpus": [0, 1, 3, 2]}}, "got [3, 2] for one engine"),
        ({"resources": {"rollout_gpus": [0, 1]}, "rollout": {"num_engines": 1}}, "expected at least 2"),
        ({"algorithm": {"mode": "sync"}}, "algorithm.mode: got 'sync'"),
        ({"algorithm": {"max_staleness": 0}}, "algorithm.max_staleness above 0"),
        ({"rollout": {"num_actors": None}}, "rollout.num_actors: not set"),
        ({"resources": {"ray_address": "there:2"}}, "resources.ray_address: got 'there:2'"),
        ({"sync": {"in_flight": "wait"}}, "sync.in_flight: got 'wait' with pool.address set, expected 'keep' or"),
        ({"sync": {"delta": True}}, "sync.delta: got true"),
        ({"validation": {"background": True}}, "validation.background: got true"),
        (
            {"pool": {"engines": "shared"}, **APART},
            "trainer.lora.rank: got 0 with pool.engines=shared, expected an adapter",
        ),
        (
            {"pool": {"engines": "shared"}, "trainer": {"lora": {"rank": 4}}, "model": {"path": "folder"}},
            "resources.trainer_gpus: got GPU 0 with pool.engines=shared, expected none of resources.rollout_gpus",
        ),
        (
            {"pool": {"engines": "shared"}, "trainer": {"lora": {"rank": 4, "base": "int8"}}, **APART},
            "trainer.lora.base: got 'int8' with pool.engines=shared, expected 'model'",
        ),
        (
            {"pool": {"engines": "shared"}, "trainer": {"lora": {"rank": 4}}, **APART, "model": {"path": TINY}},
            f"model.path: got {TINY!r} with pool.engines=shared, expected a folder or hub id",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in only_problem(changed(**changes))


def test_keys_of_a_pool_need_a_pool() -> None:
    assert "pool.weight: got 2 with pool.address=None" in only_problem({"pool": {"weight": 2.0}})


def test_an_adapter_is_not_served_under_the_name_of_its_base() -> None:
    asked = {
        "trainer": {"lora": {"rank": 4}}, "environment": {"kind": "m:E"},
        "rollout": {"endpoint": {"enabled": True, "model": "base"}},
    }  # fmt: skip
    assert "rollout.endpoint.model: got 'base' with trainer.lora.rank above 0" in only_problem(asked)
