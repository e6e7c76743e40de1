"""Fixtures of vLLM engines that the tests of a module share, each with its own event loop and a Transformers model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.weight_sync.transports.protocol import WeightUpdate
from headrace.tests.actors.engines.vllm.builder import build, save_model
from headrace.tests.actors.weight_sync.weight_updates import Publisher

T = TypeVar("T")
BOUND_S = 120.0


class Subject:
    """A vLLM engine and the model it is to serve, as Transformers has it."""

    build_options: Mapping[str, Any] = {}

    def __init__(self, folder: Path, kind: str, *, tp: int = 1) -> None:
        self.model_folder = save_model(folder / "model", kind)
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32).eval()
        self.engine = build(self.model_folder, tp=tp, **self.build_options)
        self.publisher = Publisher(folder / "weights", tp)
        self.runner = asyncio.Runner()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(BOUND_S):
                return await main

        return self.runner.run(bounded())

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def update(self, scale: float = 0.05) -> WeightUpdate:
        """The next version, published: the model's weights, moved a little."""
        version = self.engine.version + 1
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        return self.publisher.publish(version, self.weights())

    def expect_logprobs(
        self, prompt: list[int], completions: list[Completion], params: SamplingParams | None = None
    ) -> None:
        """Log-probs are those of the model as it is now, temperature, top-k and top-p applied."""
        params = params or SamplingParams()
        for one in completions:
            np.testing.assert_allclose(one.logprobs, self.logprobs(prompt, one.token_ids, params), atol=3e-3)

    def logprobs(self, prompt: list[int], response: np.ndarray, params: SamplingParams) -> np.ndarray:
        ids = torch.tensor([[*prompt, *response.tolist()]])
        with torch.no_grad():
            scores = self.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / (params.temperature or 1.0)
        if params.top_k:
            scores[scores < scores.topk(params.top_k, dim=-1).values[:, -1:]] = -torch.inf
        if params.top_p < 1.0:
            ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
            cut = ordered.cumsum(-1) - ordered >= params.top_p
            scores[torch.zeros_like(cut).scatter(-1, order, cut)] = -torch.inf
        return scores.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()

    def close(self) -> None:
        self.run(self.engine.close())
        assert not any(psutil.pid_exists(pid) for pid in self.engine.pids), "a process of the engine lives on"
        self.publisher.close()
        self.runner.close()


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Of the kind and size that the module's `SUBJECT` says: ("tied", 1)."""
    kind, tp = getattr(request, "param", getattr(request.module, "SUBJECT", ("untied", 1)))
    made = Subject(tmp_path_factory.mktemp(f"vllm-{kind}"), kind, tp=tp)
    yield made
    made.close()
