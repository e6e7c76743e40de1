"""Tests of the calls made of vLLM, with a fake engine in vLLM's place, as vLLM on a CPU cannot sleep."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return importlib.import_module(f"headrace.actors.engines.vllm.{name}")


class SleepyLLM:
    """Notes what it is asked."""

    errored = False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def sleep(self, level: int) -> None:
        self.asked.append(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.asked.append(tags)


def test_memory_is_woken_once() -> None:
    """vLLM maps what it is asked to wake, awake or not, and fails."""
    process = object.__new__(module("process").VllmProcess)
    process.llm, process._asleep = SleepyLLM(), set()

    async def main() -> None:
        await process.wake()
        await process.sleep(2)
        await process.wake("weights")
        await process.wake("weights")
        await process.wake()
        await process.wake()
        await process.sleep(1)
        await process.wake()

    asyncio.run(main())
    assert process.llm.asked == [2, ["weights"], ["kv_cache"], 1, ["kv_cache", "weights"]]


@pytest.mark.parametrize(("backend", "plain"), [("TRITON", True), ("FLASHINFER_CUTLASS", False), ("CPU", False)])
def test_experts_are_loaded_in_place_only_for_kernels_that_read_them_as_they_come(backend: str, plain: bool) -> None:
    method = type("UnquantizedFusedMoEMethod", (), {"unquantized_backend": SimpleNamespace(name=backend)})()
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)
    layer.quant_method = method
    library = module("library")
    library.get_layerwise_info(layer).restore_metadata = ({"weight": layer.weight}, {})
    hindrance = library.in_place_hindrance(layer)
    assert hindrance == ("" if plain else "Module uses UnquantizedFusedMoEMethod")
