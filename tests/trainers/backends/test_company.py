"""Log-probs of a row do not depend on the other rows of its batch, in the trainer and in the hf engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.engines.protocol import SamplingParams
from headrace.tests.trainers.backends.backend_ranks import (
    COLUMNS,
    Row,
    backend_config,
    flat_gradients,
    logprobs_of,
    micro_batch,
    save_tiny_model,
    save_tiny_moe,
)
from headrace.tests.trainers.backends.families import save_family
from headrace.trainers.backends.fsdp import backend as backend_module
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.fsdp.causal_lm import CausalLM
from headrace.trainers.backends.fsdp.row_checks import lengths, token_counts
from headrace.trainers.losses.config import LossConfig

CONTEXT = 32


def row_of(ids: Sequence[int], prompt: int = 1) -> Row:
    mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
    columns = {name: np.zeros(len(ids), np.float32) for name in COLUMNS}
    return Row(np.asarray(ids, np.int32), mask, columns, float(len(ids) % 3) - 0.5, 0)


def short_and_long() -> list[Row]:
    """A row of 6 tokens and one of 20, longer than what the models count to."""
    rng = np.random.default_rng(3)
    return [row_of(rng.integers(3, 40, length).tolist()) for length in (6, 20)]


def trainer(folder: str, **keys: Any) -> FsdpBackend:
    loss = LossConfig(kind="reinforce")
    keys = {"context": CONTEXT, "head": "full", "loss": loss, "prev": "rollout", "with_reference": False, **keys}
    return FsdpBackend(backend_config(folder, **keys), 0, 1)


def plain_logprobs(folder: str, row: Row) -> torch.Tensor:
    """The row's log-probs with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(row.ids).long()
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return torch.cat([torch.zeros(1), torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]])


@pytest.mark.parametrize("name", ["phi3 longrope", pytest.param("llama dynamic", marks=pytest.mark.slow)])
def test_scaled_positions_in_the_trainer(tmp_path: Path, name: str) -> None:
    folder, rows = save_family(tmp_path, name), short_and_long()
    for packing in ("none", "packed"):
        backend = trainer(folder, packing=packing)
        together = logprobs_of(backend, micro_batch(rows))
        alone = torch.cat([logprobs_of(backend, micro_batch([row])) for row in rows])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
        whole, cut = flat_gradients(backend, [rows]), flat_gradients(backend, [rows[:1], rows[1:]])
        assert torch.linalg.norm(whole - cut) <= 1e-5 * torch.linalg.norm(whole)


def test_longrope_chooses_its_factors_by_the_context_of_the_run(tmp_path: Path) -> None:
    folder, (short, long) = save_family(tmp_path, "phi3 longrope"), short_and_long()
    wide, narrow = trainer(folder), trainer(folder, context=12)
    # transformers chooses by the row: these two rows need what the two contexts choose for every row.
    torch.testing.assert_close(logprobs_of(wide, micro_batch([long])), plain_logprobs(folder, long), rtol=0, atol=1e-4)
    got = logprobs_of(narrow, micro_batch([short]))
    torch.testing.assert_close(got, plain_logprobs(folder, short), rtol=0, atol=1e-4)
    assert (got - logprobs_of(wide, micro_batch([short]))).abs().max() > 0.1
    with pytest.raises(ValueError, match="got a row of 20 tokens, expected at most 12, the context for which the mode"):
        logprobs_of(narrow, micro_batch([long]))


async def sampled(folder: str, *calls: dict[str, list[int]]) -> list[Row]:
    """Rows of one sample of each prompt, with their engine's log-probs; the prompts of a call are generated together.

    calls: request -> token ids of its prompt.
    """
    engine = HfEngine(folder, seed=3, max_model_len=CONTEXT)
    params = SamplingParams(n=1, max_new_tokens=8, temperature=1.0)
    rows = []
    for call in calls:
        answers = await asyncio.gather(*(engine.generate(name, ids, params) for name, ids in call.items()))
        for ids, [answer] in zip(call.values(), answers, strict=True):
            rows.append(row_of([*ids, *answer.token_ids], len(ids)))
            rows[-1].columns["rollout_logprobs"][len(ids) :] = answer.logprobs
    await engine.close()
    return rows


@pytest.mark.parametrize(
    "name", ["phi3 longrope", "llama4_text", pytest.param("ministral3 yarn", marks=pytest.mark.slow)]
)
def test_the_engine_samples_as_alone_and_as_the_trainer(tmp_path: Path, name: str) -> None:
    folder, rng = save_family(tmp_path, name), np.random.default_rng(1)
    prompts = {f"r{length}": rng.integers(3, 40, length).tolist() for length in (2, 7, 11)}
    rows = asyncio.run(sampled(folder, prompts, *({request: ids} for request, ids in prompts.items())))
    backend = trainer(folder)
    for row, alone in zip(rows[:3], rows[3:], strict=True):
        assert row.ids.tolist() == alone.ids.tolist()
        engine = row.columns["rollout_logprobs"][row.mask > 0]
        np.testing.assert_allclose(engine, alone.columns["rollout_logprobs"][row.mask > 0], atol=1e-4)
        np.testing.assert_allclose(
            np.asarray(logprobs_of(backend, micro_batch([row])))[row.mask > 0], engine, atol=1e-4
        )


def test_an_engine_of_a_longrope_model_takes_no_row_beyond_its_context(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="25 prompt tokens \\+ 8 new tokens exceed the model's context of 32"):
        asyncio.run(sampled(save_family(tmp_path, "phi3 longrope"), {"r": [5] * 25}))


@pytest.mark.parametrize("name", ["lfm2", pytest.param("jamba", marks=pytest.mark.slow)])
def test_packing_is_refused_however_small_the_weights_are(tmp_path: Path, name: str) -> None:
    folder = save_family(tmp_path, name, std=None)  # log-probs change by 1e-4
    with pytest.raises(ValueError, match="trainer.packing: got 'packed', expected 'none' or 'dynamic' for .*whose row"):
        trainer(folder, packing="packed")
    trainer(folder, packing="none")


def test_experts_may_round_otherwise_beside_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = save_tiny_moe(tmp_path), []
    forward = CausalLM.forward

    def rounded(self: CausalLM, *args: Any) -> Any:
        values = forward(self, *args)
        calls.append(len(values.logprobs))
        noise = torch.rand(len(values.logprobs), generator=torch.Generator().manual_seed(len(calls)))
        return values._replace(logprobs=values.logprobs + 1e-3 * noise)

    monkeypatch.setattr(CausalLM, "forward", rounded)
    trainer(folder, packing="packed")
    assert len(calls) == 3 + 2 * 4
    with pytest.raises(ValueError, match="trainer.packing: got 'packed'"):
        trainer(save_tiny_model(tmp_path / "dense"), packing="packed")  # it has nothing that may round


def test_rows_of_the_check_are_as_long_as_what_the_model_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_family(tmp_path, "phi3 longrope")
    monkeypatch.setattr(backend_module, "fix_rotary_length", lambda model, context: None)
    for packing in ("none", "packed"):
        trainer(folder, packing=packing, context=12)  # such rows never reach the other factors
    with pytest.raises(ValueError, match="got a Phi3ForCausalLM, whose log-probs depend on how long the other rows"):
        trainer(folder)


def test_lengths_of_the_rows_of_the_check() -> None:
    config = {"sliding_window": None, "chunk_size": 8, "rope_parameters": {"original_max_position_embeddings": 12}}
    assert list(token_counts(config)) == [8, 12]
    assert lengths([8, 12], packed=False, longest=14, budget=20) == (4, [12])
    assert lengths([8, 12], packed=True, longest=14, budget=30) == (12, [12])
    assert lengths([50], packed=True, longest=20, budget=100) == (4, [4] * 12 + [2])
    assert (
        lengths([50], packed=True, longest=20, budget=40) == lengths([], packed=True, longest=9, budget=9) == (4, [4])
    )
    assert lengths([8, 12], packed=True, longest=0, budget=100) == (4, [4])  # nothing is known of the run's rows


def test_temperature_tuned_attention_is_not_packed_where_it_acts(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "llama4_text", floor_scale=64, attention_chunk_size=128)
    with pytest.raises(
        ValueError, match="got 'packed', expected 'none' or 'dynamic' for a model with attn_temperature"
    ):
        trainer(folder, packing="packed")
    trainer(folder, packing="packed", tokens_per_microbatch=63)
