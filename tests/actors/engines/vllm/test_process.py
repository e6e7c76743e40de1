"""Tests of the calls made of vLLM, with a fake engine in vLLM's place, as vLLM on a CPU cannot sleep."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.tests.actors.engines.vllm.builder import save_model

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


@pytest.mark.parametrize("dies", [True, False])
def test_a_call_that_vllm_cancels_is_told_as_the_death_that_follows(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """vLLM tells the call first, and its engine process ends some moments later."""
    process_module = module("process")
    monkeypatch.setattr(process_module, "CLOSE_PATIENCE_S", 0.5)
    process = object.__new__(process_module.VllmProcess)
    process.llm, process._death, process._engines = SleepyLLM(), "", []

    async def cancelled() -> None:
        raise Exception("Call to collective_rpc method failed: cancelled")

    async def die() -> None:
        await asyncio.sleep(0.25)
        process._death = "vLLM's engine process died: Worker proc VllmWorker-1 died unexpectedly"

    async def main() -> None:
        call = process._bounded("headrace_take_logprobs", cancelled())
        await asyncio.gather(call, *([die()] if dies else []))

    expected = process_module.EngineDied if dies else RuntimeError
    words = (
        "Worker proc VllmWorker-1 died unexpectedly, noticed in the call 'headrace_take_logprobs'"
        if dies
        else "cancelled"
    )
    with pytest.raises(expected, match=words):
        asyncio.run(main())


@pytest.mark.parametrize(("backend", "plain"), [("TRITON", True), ("FLASHINFER_CUTLASS", False), ("CPU", False)])
def test_experts_are_loaded_in_place_only_for_kernels_that_read_them_as_they_come(backend: str, plain: bool) -> None:
    method = type("UnquantizedFusedMoEMethod", (), {"unquantized_backend": SimpleNamespace(name=backend)})()
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(2, 4), requires_grad=False)
    layer.quant_method = method
    library = module("library")
    layer.bias = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    recorded = {name: one for name, one in layer.named_parameters() if name not in library.SKIP_TENSORS}
    library.get_layerwise_info(layer).restore_metadata = (recorded, {})
    found = [reason for _, reason in library.hindrances(layer)]
    assert found == ([] if plain else ["Module uses UnquantizedFusedMoEMethod"])


@pytest.mark.parametrize(("free", "share"), [(100, 0.9), (90, 0.9), (40, 0.38), (1, 0.0095)])
def test_an_engine_takes_what_is_free_where_others_hold_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, share: float
) -> None:
    """With this, a trainer that holds memory of a GPU does not keep a replaced engine from starting there."""
    library = module("library")
    gpu_worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    monkeypatch.setattr(gpu_worker, "request_memory", gpu_worker.request_memory)  # put back at the end
    monkeypatch.setattr(library, "on_cpu", lambda: False)
    gib = 2**30
    snapshot = SimpleNamespace(free_memory=free * gib, total_memory=100 * gib, device_="cuda:0")
    cache = SimpleNamespace(gpu_memory_utilization=0.9)
    if free < 90:
        with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
            gpu_worker.request_memory(snapshot, cache)
    library.take_what_is_free()
    taken = gpu_worker.request_memory(snapshot, cache)
    assert cache.gpu_memory_utilization == pytest.approx(share)
    assert taken == pytest.approx(share * 100 * gib) and taken <= free * gib


def test_a_worker_takes_no_more_for_keys_and_values_than_a_batch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    library = module("library")
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    monkeypatch.setattr(worker, "determine_available_memory", lambda _: 1000)  # The original is put back at the end.
    monkeypatch.setattr(library, "on_cpu", lambda: False)
    library.take_what_is_useful()
    chosen, fixed = (SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=size)) for size in (None, 7))
    assert worker.determine_available_memory(chosen) == 1000
    with module("start").engine_environment(cpu=False, tp=1, further={library.MOST_CACHE: "300"}):
        assert worker.determine_available_memory(chosen) == 300
        assert worker.determine_available_memory(fixed) == 1000, "rollout.kv_cache sets it"
    with module("start").engine_environment(cpu=False, tp=1, further={library.MOST_CACHE: "3000"}):
        assert worker.determine_available_memory(chosen) == 1000, "the share of the GPU is smaller"
    assert worker.determine_available_memory(chosen) == 1000


def test_memory_that_others_free_while_the_engine_starts_ends_no_engine() -> None:
    """vLLM gives up where more memory is free than at its start; any other of its assertions stays one."""
    library = module("library")

    def determine(worker: Any) -> int:
        assert worker.init_snapshot.free_memory >= 120, (
            "Error in memory profiling. Initial free memory 100, current 120"
        )
        assert not worker.broken, "no layers"
        return 50

    def worker(*, broken: bool) -> Any:
        memory = SimpleNamespace(free_memory=100, total_memory=140)
        return SimpleNamespace(
            init_snapshot=memory, broken=broken, cache_config=SimpleNamespace(kv_cache_memory_bytes=1)
        )

    assert library._capped(determine)(worker(broken=False)) == 50
    with pytest.raises(AssertionError, match="no layers"):
        library._capped(determine)(worker(broken=True))


def test_the_worker_has_every_method_that_a_release_of_vllm_requires_of_it() -> None:
    """Releases differ: 0.26 makes no object of a class without `trainer_send_weights`, which later ones do without."""
    required = {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
    assert required | {"trainer_send_weights"} <= vars(module("worker").StagedWeightEngine).keys()


def test_on_gpus_a_step_processes_as_many_tokens_as_in_offline_work(monkeypatch: pytest.MonkeyPatch) -> None:
    library = module("library")
    asked: list[Any] = []
    given = SimpleNamespace(create_engine_config=asked.append)
    for cpu in (True, False):
        monkeypatch.setattr(library, "on_cpu", lambda cpu=cpu: cpu)
        library.create_config(given)
    assert asked == [None, library.UsageContext.LLM_CLASS]


def test_settings_become_vllm_s_own_arguments_and_options_come_last(tmp_path: Path) -> None:
    process = module("process")
    settings = process.ProcessSettings(
        model=save_model(tmp_path, "untied"),
        dtype=torch.bfloat16,
        tp=2,
        max_num_seqs=512,
        kv_cache_bytes=None,
        gpu_memory_utilization=0.4,
        seed=3,
        max_model_len=300,
        options={"max_num_batched_tokens": 4096, "attention_backend": "FLASH_ATTN", "enable_prefix_caching": False},
    )
    made = process.engine_args(settings, cpu=False)
    assert (made.dtype, made.tensor_parallel_size, made.max_num_seqs, made.seed) == ("bfloat16", 2, 512, 3)
    assert (made.kv_cache_memory_bytes, made.gpu_memory_utilization, made.max_model_len) == (None, 0.4, 300)
    assert made.enable_sleep_mode and not made.enforce_eager and made.distributed_executor_backend == "mp"
    assert made.max_num_batched_tokens == 4096 and made.enable_prefix_caching is False
    assert made.attention_backend.name == "FLASH_ATTN"
