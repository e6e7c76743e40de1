"""Layouts of `headrace bench gpu`: what they are called, and the keys that they set."""

from __future__ import annotations

import pytest

from headrace.bench.gpu.works import Layout, parse_layout
from headrace.trainers.errors import UserError

ONES = {key: "1" for key in ("rollout.num_engines", "rollout.tp", "trainer.dp", "trainer.tp", "trainer.ep")}


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("colocated", 2, "resources.layout=colocated rollout.num_engines=2 trainer.dp=2"),
        ("colocated-1", 2, "resources.layout=colocated rollout.num_engines=1 trainer.dp=1"),
        ("separate", 4, "resources.layout=separate rollout.num_engines=2 trainer.dp=2"),
        ("tensor-2", 4, "resources.layout=colocated rollout.tp=2 trainer.tp=2"),
        ("experts-4", 8, "resources.layout=colocated rollout.num_engines=2 rollout.tp=2 trainer.dp=4 trainer.ep=4"),
        ("one-engine-2", 4, "resources.trainer_gpus=[0,1] resources.rollout_gpus=[0] trainer.dp=2"),
    ],
)
def test_a_layout_sets_the_keys_of_its_gpus(text: str, gpus: int, expected: str) -> None:
    layout = parse_layout(text, gpus)
    found = {key: value for key, value in (one.split("=") for one in layout.overrides())}
    wanted = {key: value for key, value in (one.split("=") for one in expected.split(" "))}
    assert layout.label == text and found == {**ONES, **wanted}


def test_without_a_gpu_there_is_one_of_each() -> None:
    assert Layout("cpu", "cpu", 0).overrides() == [f"{key}={value}" for key, value in ONES.items()]


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        ("colocated", 0, "--layout: got 'colocated' on a machine without a GPU"),
        ("beside", 2, "--layout: got 'beside', expected some of colocated, separate, tensor, experts, one-engine"),
        ("colocated-3", 2, "--layout: got 'colocated-3', expected 1 to 2 GPUs"),
        ("separate-3", 4, "--layout: got 'separate-3' with 3 GPUs, expected an even number"),
        ("separate", 1, "--layout: got 'separate' with 1 GPUs, expected an even number"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(text: str, gpus: int, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse_layout(text, gpus)
