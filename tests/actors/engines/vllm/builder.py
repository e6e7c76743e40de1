"""A small vLLM engine for tests, and the tiny models they run."""

from __future__ import annotations

import multiprocessing.forkserver
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.actors.engines.vllm import start
from headrace.tests.actors.weight_sync.weight_updates import receiver

if TYPE_CHECKING:
    from headrace.actors.engines.vllm.engine import VllmEngine

CONTEXT = 512
"""Of the models made here: longer than vLLM's cache blocks on a CPU, which are 128 tokens."""
VOCAB_SIZE = 41
EOS = 2


_forks = multiprocessing.forkserver.ForkServer()
"""Server that has imported vLLM, which takes five seconds, and forks engine processes."""
_forks.set_forkserver_preload(list(start.MODULES))


def build(model_folder: str, **options: Any) -> VllmEngine:
    """An engine on a CPU; `options` are VllmEngine's own. Close it."""
    if start._standby is None and not Path("/dev/nvidiactl").exists():  # importing vLLM touches a GPU
        with (
            start.engine_environment(cpu=True, tp=options.get("tp", 1)),
            mock.patch("multiprocessing.forkserver.connect_to_new_process", _forks.connect_to_new_process),
        ):
            start._standby = start.EngineStandby(method="forkserver")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        from headrace.actors.engines.vllm.engine import VllmEngine

        try:
            return VllmEngine(
                model_folder, **{"receiver": receiver(), "kv_cache_bytes": 64 << 20, "max_num_seqs": 64, **options}
            )
        finally:
            start.take_standby()  # an engine that is refused leaves it


def save_model(folder: Path, kind: str, context: int = CONTEXT, size: int = 64, **more: Any) -> str:
    """A random model without tokenizer; kind: `untied`, `tied` or `moe`. size: of most matrices. more: what else its
    configuration has. Returns the folder."""
    config: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=size // 2,
        max_position_embeddings=context,
        tie_word_embeddings=kind == "tied",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    config |= more
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "moe":
            experts = Qwen3MoeConfig(moe_intermediate_size=size, num_experts=4, num_experts_per_tok=2, **config)
            model: PreTrainedModel = Qwen3MoeForCausalLM(experts)
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**config))
    model.save_pretrained(folder)
    return str(folder)
