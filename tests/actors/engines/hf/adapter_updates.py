"""Random adapters for the hf engine under test, their publisher, and models with an adapter merged into the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig
from transformers.pytorch_utils import Conv1D

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.spec import AdapterSlots, AdapterSpec, tensor_names
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
T = TypeVar("T")
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


def run(
    test: Callable[[HfEngine, Trainer], Coroutine[Any, Any, T]],
    folder: str,
    sync: Path,
    *,
    count: int = 2,
    endless: bool = False,
    **options: Any,
) -> T:
    """Run a test with an engine and a trainer. endless: whether no token ends a request."""
    slots = AdapterSlots(2 * RANK, count, experts=True)
    engine, trainer = HfEngine(folder, receiver=receiver(), adapters=slots, **options), Trainer(sync, folder)
    if endless:
        engine._stop_ids = np.array([], dtype=np.int64)
    with asyncio.Runner() as runner:
        result = runner.run(test(engine, trainer))
        runner.run(engine.close())
    trainer.publisher.close()
    return result


def model_of(kind: str, folder: Path, tiny: str) -> str:
    """Folder of a random model. gpt2: its linear layers store their weights as [in, out], and so do, for each expert,
    the stacked experts of gpt_oss; those of moe store them as [out, in]."""
    if kind in ("qwen3", "moe"):
        return tiny if kind == "qwen3" else save_moe(folder)
    sizes: dict[str, Any] = dict(
        vocab_size=len(VOCAB), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.2, layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default"},
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(**sizes) if kind == "gpt2" else GptOssConfig(**sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def _targets(model: Any) -> dict[str, torch.Tensor]:
    """The weights of every linear layer but the head, `[1, out, in]`, and the experts' two under PEFT's names."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and name != "lm_head":
            found[name] = (module.weight.T if isinstance(module, Conv1D) else module.weight)[None]
    for name, experts in find_experts(model):
        part: Any = experts
        dims = (1, 2) if getattr(experts, "is_transposed", False) else (1, 1)
        stacked = (part.gate_up_proj.transpose(*dims), part.down_proj.transpose(*dims))
        found |= dict(zip((f"{name}.base_layer", name), stacked, strict=True))
    return found


def adapter(folder: str, seed: int, *, zero: bool = False, dtype: torch.dtype = torch.float32) -> Named:
    """A random adapter for all targets; zero: whether the matrices B are zeros, as at the start of training."""
    generator = torch.Generator().manual_seed(seed)
    named: Named = {}
    for module, weight in _targets(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).items():
        experts, outputs, inputs = weight.shape
        first, second = tensor_names(module)
        named[first] = (torch.randn(RANK * experts, inputs, generator=generator) / inputs**0.5).to(dtype)
        named[second] = ((not zero) * 0.1 * torch.randn(outputs, RANK * experts, generator=generator)).to(dtype)
    return named


@torch.no_grad()
def merged(folder: str, named: Named) -> Any:
    """The model with the product of each pair added to its weight, as PEFT merges it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module, weight in _targets(model).items():
        first, second = (named[name].float() for name in tensor_names(module))
        stacked = first.view(len(weight), RANK, -1), second.view(-1, RANK, len(weight))
        weight += ALPHA / RANK * torch.einsum("eri,ore->eoi", *stacked)
    return model
