"""A tiny mixture-of-experts model for engines under test, and the routes that transformers alone finds in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.actors.engines.protocol import Completion
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tests.actors.conftest import VOCAB, save_tokenizer

CONTEXT = 512
LAYERS, DENSE_LAYER, EXPERTS, TOP_K = 3, 0, 8, 2


def save_moe(folder: Path) -> str:
    """Three layers, the first without experts; routing is far from flat. Returns the folder."""
    config = Qwen3MoeConfig(
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[DENSE_LAYER],
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # pyright: ignore[reportCallIssue]
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def spec_of(folder: str) -> RouteSpec:
    spec = RouteSpec.of(AutoConfig.from_pretrained(folder))
    assert spec is not None and spec == RouteSpec((1, 2), TOP_K, EXPERTS, LAYERS)
    return spec


class Reference:
    """What transformers computes for whole sequences, with the weights of several versions."""

    def __init__(self, folder: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._start = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """The parameters of a version, by name: version 0 is the folder's, others are moved by noise."""
        generator = torch.Generator().manual_seed(version)
        scale = 0.0 if version == 0 else 0.1
        return {
            name: tensor + scale * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self._start.items()
        }

    def routes(self, ids: list[int], version: int = 0) -> np.ndarray:
        """The experts of each token, ascending, `[L, layers with experts, k]`."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights(version)[name])
            logits = self.model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
        return torch.stack([one.topk(TOP_K).indices for one in logits], dim=1).sort(-1).values.numpy()


def expect_routes(
    reference: Reference, prompt: list[int], one: Completion, *, start: int = 0, tokens: slice = slice(None)
) -> None:
    """The routes of a completion are those of its tokens but the last, from prompt token `start` on. Each is of the
    version that sampled the token after it; those of the prompt are of the first token's. tokens: which are
    compared."""
    assert one.routes is not None
    ids = [*prompt, *one.token_ids.tolist()]
    assert one.routes.shape == (len(ids) - 1 - start, LAYERS - 1, TOP_K) and one.routes.dtype == np.uint8
    of_row = np.concatenate([np.full(len(prompt) - 1, one.versions[0]), one.versions])[start:]
    found = np.sort(one.routes, axis=-1)[tokens]
    expected = np.zeros_like(one.routes)
    for version in set(of_row.tolist()):
        whole = reference.routes(ids[:-1], version)[start:]
        expected[of_row == version] = whole[of_row == version]
    np.testing.assert_array_equal(found, expected[tokens])
