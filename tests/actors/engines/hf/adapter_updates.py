"""Random adapters for the hf engine under test, their publisher, and models with an adapter merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.spec import AdapterSlots, AdapterSpec, module_pairs, tensor_names
from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.hf.model import find_experts
from headrace.actors.engines.protocol import PauseMode
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup, SenderConfig, WeightUpdate
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.actors.conftest import VOCAB, save_tokenizer
from headrace.tests.actors.engines.moe import save_moe
from headrace.tests.actors.weight_sync.weight_streams import specs
from headrace.tests.actors.weight_sync.weight_updates import ENGINE, receiver

RANK, ALPHA = 4, 8.0
Named = dict[str, torch.Tensor]


class Trainer:
    """The trainer's end of adapter updates. It publishes on the `disk` transport."""

    def __init__(self, folder: Path, model: str, **spec: Any) -> None:
        self.spec = AdapterSpec(**({"rank": RANK, "alpha": ALPHA, "base": base_digest(model)} | spec))
        config = SenderConfig(fresh_run_id(), SyncConfig(timeout_s=10.0), folder=str(folder))
        self.publisher = WeightPublisher(build_sender("disk", config), config.sync, 4096, adapter=self.spec)

    def publish(self, version: int, named: Named) -> WeightUpdate:
        update = self.publisher.open(version, specs(named), [ReceiverGroup(ENGINE, 1)])
        self.publisher.publish(update, iter(named.items()))
        return update

    async def serve(self, engine: HfEngine, version: int, named: Named, in_flight: PauseMode = "keep") -> None:
        """Publish, prepare, commit and verify a version, as a driver does."""
        assert await engine.prepare_weights(self.publish(version, named)) == "staged"
        await engine.commit_weights(version, in_flight)
        assert await engine.verify_weights(self.publisher.digests(version)) == len(named)


def build(folder: str, count: int = 2, **options: Any) -> HfEngine:
    return HfEngine(folder, receiver=receiver(), adapters=AdapterSlots(2 * RANK, count, experts=True), **options)


def save_gpt2(folder: Path) -> str:
    """A model whose linear layers are of transformers' class Conv1D, which stores its weight as [in, out]."""
    config = GPT2Config(
        vocab_size=len(VOCAB), n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def model_of(kind: str, folder: Path, tiny: str) -> str:
    return {"qwen3": lambda: tiny, "gpt2": lambda: save_gpt2(folder), "moe": lambda: save_moe(folder)}[kind]()


@dataclass
class _Sizes:
    weight: torch.Tensor
    inputs: int
    outputs: int
    experts: int = 1


def _targets(model: Any) -> dict[str, _Sizes]:
    """Every linear layer but the head, and the experts' two parameters under PEFT's names."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and name != "lm_head":
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            found[name] = _Sizes(weight, weight.shape[1], weight.shape[0])
    for name, experts in find_experts(model):
        for key, inner in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            weight: Any = getattr(experts, key)
            found[name + inner] = _Sizes(weight, weight.shape[2], weight.shape[1], weight.shape[0])
    return found


def adapter(folder: str, seed: int, *, zero: bool = False, dtype: torch.dtype = torch.float32) -> Named:
    """A random adapter for all targets; zero: whether the matrices B are zeros, as at the start of training."""
    generator = torch.Generator().manual_seed(seed)
    named: Named = {}
    for module, sizes in _targets(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).items():
        first, second = tensor_names(module)
        stacked = RANK * sizes.experts
        named[first] = (torch.randn(stacked, sizes.inputs, generator=generator) / sizes.inputs**0.5).to(dtype)
        named[second] = (0.1 * torch.randn(sizes.outputs, stacked, generator=generator)).to(dtype)
        if zero:
            named[second].zero_()
    return named


@torch.no_grad()
def merged(folder: str, named: Mapping[str, torch.Tensor]) -> Any:
    """The model with the product of each pair added to its weight, as PEFT merges it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module, sizes in _targets(model).items():
        of_module = {name: named[name].float() for name in tensor_names(module)}
        ((first, second),) = module_pairs(of_module, RANK * sizes.experts).values()
        if sizes.weight.ndim == 3:
            stacked = first.view(sizes.experts, RANK, -1), second.view(-1, RANK, sizes.experts)
            delta = torch.einsum("eri,ore->eoi", *stacked)
        else:
            delta = second @ first
        sizes.weight += ALPHA / RANK * delta
    return model
