"""Tests of the copies into slots of adapters: those that vLLM makes, and noticed if a slot has other numbers."""

from __future__ import annotations

import importlib
import types
import warnings
from functools import partial
from typing import Any

import pytest
import torch

from headrace.actors.adapters import slot_memory
from headrace.actors.adapters.spec import tensor_names

pytestmark = [pytest.mark.vllm, pytest.mark.long]
RANK, WIDTH, SCALING = 4, 24, 1.5


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return importlib.import_module(name)


def slots(kind: Any, parts: int) -> Any:
    """One of vLLM's layers as far as its two slots go, which have room for rank 8."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.n_slices, layer.tp_size, layer.tp_rank = parts, 1, 0
    layer.lora_a_stacked = tuple(torch.ones(2, 1, 8, WIDTH) for _ in range(parts))
    layer.lora_b_stacked = tuple(torch.ones(2, 1, WIDTH, 8) for _ in range(parts))
    return layer


def manager_of(layers: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """vLLM's managers of adapters with a merged and a plain layer in each layer, and an adapter for all but one."""
    layer, kind = imported("vllm.lora.layers"), imported("vllm.lora.model_manager").LoRAModelManager
    inner = kind.__new__(kind)
    inner.is_pooling_model = inner._is_non_gated_moe = inner._enable_moe_shared_loras = False
    inner.modules, inner.packed_modules, inner.lora_index_to_id = {}, {}, [None, 7]
    inner.model = types.SimpleNamespace(hf_to_vllm_mapper=None)
    named: dict[str, torch.Tensor] = {}
    for number in range(layers):
        block = f"model.layers.{number}.mlp"
        inner.modules[f"{block}.gate_up_proj"] = slots(layer.MergedColumnParallelLinearWithLoRA, 2)
        inner.packed_modules[f"{block}.gate_up_proj"] = [f"{block}.gate_proj", f"{block}.up_proj"]
        inner.modules[f"{block}.down_proj"] = slots(layer.RowParallelLinearWithLoRA, 1)
        for part in ("gate_proj", "up_proj", "down_proj")[number == 0 :]:
            first, second = tensor_names(f"{block}.{part}")
            named[first], named[second] = torch.randn(RANK, WIDTH), torch.randn(WIDTH, RANK)
    config = types.SimpleNamespace(lora_dtype=torch.float32)
    return types.SimpleNamespace(_adapter_manager=inner, device=torch.device("cpu"), lora_config=config), named


def test_a_slot_is_filled_as_vllm_fills_it_and_every_other_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = imported("headrace.actors.engines.vllm.library")
    monkeypatch.setattr(slot_memory, "_PART", 500)  # A few layers' slots.
    manager, named = manager_of(layers=3)
    note = partial(library.noted_copies, manager, RANK)
    memory = slot_memory.AdapterMemory(RANK, named, torch.float32, manager.device, note)
    assert memory.repeatable
    for _ in range(2):
        named = {name: torch.randn_like(tensor) for name, tensor in named.items()}
        memory.take(named, SCALING)
        assert memory.differs(1)
        memory.write(1)
        assert not memory.differs(1)
        assert all(torch.equal(memory.sent[name], tensor) for name, tensor in named.items())
        own = {name: tensor.clone() for name, tensor in named.items()}
        model = library.adapter_model(manager, 7, RANK, SCALING * RANK, own)
        assert library.slot_difference(manager, model) == ""
    for layer in manager._adapter_manager.modules.values():
        for stack in (*layer.lora_a_stacked, *layer.lora_b_stacked):
            assert (stack[0] == 1).all(), "the other slot is left alone"
            for place in ((1, 0, 0, 0), (1, 0, -1, -1)):
                stack[place] += 1
                assert memory.differs(1)
                stack[place] -= 1
                memory.write(1)
    assert not memory.differs(1)
