"""Tests offload and onload of the train backends on CPUs: steps after cycles are bit-equal to a run without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.dataplane.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import save_tiny_model
from headrace.tests.trainers.backends.offload_ranks import (
    OffloadCase,
    run_with_groups,
    steps_with_cycles,
)

MEGATRON = pytest.mark.megatron
TWO = (
    OffloadCase("fsdp", Topology(2)),
    OffloadCase("fsdp", Topology(1, tp=2)),
    OffloadCase("megatron", Topology(1, tp=2)),
    OffloadCase("megatron", Topology(2)),
    OffloadCase("megatron", Topology(1, pp=2)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def assert_equal(found: dict[str, Any]) -> None:
    plain, cycled = found["plain"], found["cycled"]
    assert cycled["steps"] == plain["steps"]
    for one, other in zip(cycled["logprobs"], plain["logprobs"], strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    assert cycled["weights"].keys() == plain["weights"].keys()
    assert all(torch.equal(cycled["weights"][name], value) for name, value in plain["weights"].items())


@pytest.mark.processes
@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two(case: OffloadCase, model: str, tmp_path: Path) -> None:
    for found in run_with_groups(steps_with_cycles, 2, tmp_path / "ranks", case, model):
        assert_equal(found)
