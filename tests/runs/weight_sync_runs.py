"""Runs for tests of weight sync: real actors, real steps, after each the engines held against the trainer's export."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.actors.adapters.peft_folder import plain_names, read_adapter
from headrace.actors.adapters.spec import tensor_names
from headrace.actors.engine_actor import RemoteEngine
from headrace.actors.engines.hf.quantized_layers import quantization_of
from headrace.actors.engines.protocol import SamplingParams
from headrace.codecs.weights.quantization import dequantize, quantize
from headrace.tests import process_pool
from headrace.trainers.base_model.made_tokenizers import make_tokenizer
from headrace.trainers.base_model.prepare import TINY_QWEN3
from headrace.trainers.cluster.engine_pool import Engine
from headrace.trainers.config.config import with_run_dir
from headrace.trainers.config.load import load_config
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.run_parts import Run
from headrace.trainers.grpo.training_modes import open_feed
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.run.processes import launched

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ([5, 9, 12, 4], [7, 7, 3], [10, 11, 5, 6, 8, 9])
TOKENS = 8
SMALL = (
    "warmup.corpus=none", "trainer.schedule=constant", "trainer.lr=0.01", "algorithm.prompts_per_step=4",
    "algorithm.group_size=4", "algorithm.steps=100", "validation.every=0", "rollout.num_actors=1", "sync.timeout_s=30",
)  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def model_folder(folder: Path, kind: str) -> Path:
    """A model of the built-in one's size: `tied`, `untied` or `moe`."""
    torch.manual_seed(3)
    sizes = {**TINY_QWEN3, "tie_word_embeddings": kind == "tied", "num_key_value_heads": 2, "initializer_range": 0.2}
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **MOE)) if kind == "moe" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def run(folder: Path, model: Path, *overrides: str) -> Iterator[Run]:
    """The quickstart's actors on `model`, small, ready for `step`."""
    chosen = [*SMALL, f"model.path={model}", f"run.dir={folder}", *overrides]
    config = with_run_dir(load_config(ROOT / "examples" / "quickstart.yaml", chosen))
    folder.mkdir(parents=True, exist_ok=True)
    process_pool.end_ray()  # the run starts its own in this process
    process_pool.fork_ray_workers()
    with launched(config, lambda: str(model), Tracer(0), folder) as started:
        yield started


def step(started: Run, state: State) -> Any:
    """One whole step up to the sync; returns its report."""
    started.stages.begin_step(state.step + 1)
    prompts = started.config.algorithm.prompts_per_step
    feed = open_feed(started, state, f"train-{state.step}")
    feed.top_up()
    feed.drain()
    meta = feed.claim(prompts)
    # Advantages of random answers are mostly 0: give each row one, so that every step moves the weights.
    moving = np.random.default_rng(state.step).normal(size=len(meta)).astype(np.float32)
    started.workers.ship_plan(meta.with_tags(advantage=moving), state.step + 1)
    started.workers.write_logprobs(())
    started.workers.accumulate()
    started.workers.finish()
    feed.settle()
    state.step, state.version = state.step + 1, state.version + 1
    report = started.rollouts.sync_weights(state.version)
    feed.clear(meta)
    return report


def engine_logprobs(engine: Engine, name: str) -> list[tuple[list[int], np.ndarray, list[int]]]:
    """(tokens, log-probs, versions) of the prompts' sampled answers."""
    params = SamplingParams(n=1, max_new_tokens=TOKENS, temperature=1.0, seed=5)

    async def ask() -> list[tuple[list[int], np.ndarray, list[int]]]:
        remote = await RemoteEngine(engine.name, engine.handle.ray_actor).connect()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(
                *(remote.generate(f"probe-{name}-{n}", ids, params) for n, ids in enumerate(PROMPTS))
            )
        await remote.close()
        return [(one.token_ids.tolist(), one.logprobs, one.versions.tolist()) for [one] in answers]

    return asyncio.run(ask())


def trainer_model(started: Run, folder: Path) -> Any:
    """The trainer's present weights as a HF model, by its own export, rounded as those of the engines.

    The base of an adapter that is sent alone is rounded without the adapter."""
    started.workers.export_model(folder)
    alone = started.config.sends_adapter and started.config.rollout.scheme is not None
    source = started.config.model.path if alone else folder
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        if (scheme := started.config.rollout.scheme) is not None:
            for name in quantization_of(str(folder), scheme).names:
                weight = model.get_parameter(name)
                weight.copy_(dequantize(*quantize(weight, scheme), torch.float32))
        if alone:
            adapter = read_adapter(str(folder / "adapter"))
            for module in plain_names(adapter.tensors):
                first, second = (adapter.tensors[name] for name in tensor_names(module))
                model.get_parameter(f"{module}.weight").add_(second @ first, alpha=adapter.alpha / adapter.rank)
    return model


def adapter_size(export: Path) -> tuple[int, int]:
    """The number of bytes in float32, and the number of matrices, of the adapter in an export."""
    tensors = read_adapter(str(export / "adapter")).tensors.values()
    return sum(4 * tensor.numel() for tensor in tensors), len(tensors)


@torch.inference_mode()
def difference(model: Any, answers: list[tuple[list[int], np.ndarray, list[int]]]) -> float:
    """The largest difference of a log-prob from the model's own."""
    worst = 0.0
    for prompt, (tokens, logprobs, _) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([list(prompt) + tokens])
        table = torch.log_softmax(model(ids).logits[0].float(), -1)[len(prompt) - 1 : -1]
        expected = table.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - logprobs).max()))
    return worst
