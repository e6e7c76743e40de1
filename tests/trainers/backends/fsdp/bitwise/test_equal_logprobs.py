"""Tests that log-probs of the trainer equal those of the engine `hf` bit for bit, whatever was computed together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.tests.trainers.backends.backend_ranks import COLUMNS, Row, backend_config, logprobs_of, micro_batch
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.losses.config import LossConfig

BATCHES, VOCAB = 20, 300


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 whose sizes fill no vector of a processor."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=40, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def backend_of(model: str, packing: str, dtype: torch.dtype, *, bitwise: bool = True) -> FsdpBackend:
    loss = LossConfig(clip_low=0.1, clip_high=0.15)
    half = dtype == torch.bfloat16
    config = backend_config(model, packing=packing, mixed_precision=half, loss=loss, with_reference=False)
    return FsdpBackend(replace(config, bitwise="hf" if bitwise else None), 0, 1)


def row_of(prompt: list[int], completions: list[Completion]) -> Row:
    """Return the row of a prompt and of completions that continue each other."""
    tokens = np.concatenate([one.token_ids for one in completions])
    mask = np.array([0] * len(prompt) + [1] * len(tokens), np.uint8)
    logprobs = np.concatenate([np.zeros(len(prompt), np.float32), *(one.logprobs for one in completions)])
    return Row(np.array([*prompt, *tokens], np.int32), mask, dict.fromkeys(COLUMNS, logprobs), 1.0, 0)


async def sampled(engine: HfEngine, rng: np.random.Generator, number: int, temperature: float) -> list[Row]:
    """Sample a batch of random shape, and continue half of its samples."""
    params = SamplingParams(max_new_tokens=int(rng.integers(2, 24)), temperature=temperature, n=int(rng.integers(1, 3)))
    prompts = [rng.integers(3, VOCAB, int(rng.integers(1, 90))).tolist() for _ in range(int(rng.integers(1, 6)))]
    first = await asyncio.gather(*(engine.generate(f"{number}.{i}", one, params) for i, one in enumerate(prompts)))
    pairs = [(prompt, one) for prompt, answers in zip(prompts, first, strict=True) for one in answers]
    continued = [(prompt, one) for prompt, one in pairs if one.finish_reason == "length"][::2]
    more = await asyncio.gather(
        *(
            engine.generate(f"{number}.{i}.more", [*prompt, *one.token_ids.tolist()], replace(params, n=1))
            for i, (prompt, one) in enumerate(continued)
        )
    )
    longer = [row_of(prompt, [one, rest]) for (prompt, one), [rest] in zip(continued, more, strict=True)]
    return [row_of(prompt, [one]) for prompt, one in pairs] + longer


async def differing(engine: HfEngine, backend: FsdpBackend, batches: int) -> tuple[int, int]:
    """Return how many log-probs of sampled tokens differ, and how many there are."""
    rng, found, count = np.random.default_rng(1), 0, 0
    for number in range(batches):
        temperature = float(rng.choice([1.0, 0.7]))
        rows = await sampled(engine, rng, number, temperature)
        values = logprobs_of(backend, micro_batch(rows), temperature=temperature)
        mask = torch.from_numpy(np.concatenate([row.mask for row in rows])) > 0
        engines = torch.from_numpy(np.concatenate([row.columns["rollout_logprobs"] for row in rows]))
        found, count = found + int((values != engines)[mask].sum()), count + int(mask.sum())
    await engine.close()
    return found, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", ["none", "packed"])
def test_log_probs_of_random_batches_are_equal(model: str, packing: str, dtype: torch.dtype) -> None:
    engine = HfEngine(model, dtype=dtype, bitwise=True)
    unequal, count = asyncio.run(differing(engine, backend_of(model, packing, dtype), BATCHES))
    assert unequal == 0 and count > 1000


def test_without_the_mode_log_probs_differ(model: str) -> None:
    """The comparison finds the differences that the mode removes."""
    backend = backend_of(model, "none", torch.float32, bitwise=False)
    unequal, count = asyncio.run(differing(HfEngine(model), backend, 2))
    assert unequal > count / 4
