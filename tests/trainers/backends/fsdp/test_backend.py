"""Tests the fsdp backend on one rank against a train step computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config

from headrace.actors.engines.hf.model import load_model
from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    VOCAB,
    ReferenceTrainer,
    Row,
    backend_config,
    flat_gradients,
    logprobs_of,
    micro_batch,
    mismatch_of,
    random_rows,
    recomputed_mismatch,
    run_step,
    weights_of,
)
from headrace.trainers.backends.config import BackendConfig, TrainerConfig
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.rows.row_layout import lay_out
from headrace.trainers.backends.train_step import TrainStep
from headrace.trainers.backends.vocab import logprobs as vocab_logprobs
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.step_loss import build_loss
from headrace.trainers.losses.terms import LossInputs


@pytest.fixture(scope="module")
def gradient_backend(model: str) -> FsdpBackend:
    """A backend that the tests share; they abort every step that they open."""
    return FsdpBackend(backend_config(model), 0, 1)


# ---------------------------------------------------------------- the step


def test_three_steps_equal_a_plain_torch_trainer(model: str) -> None:
    backend, plain = FsdpBackend(backend_config(model), 0, 1), ReferenceTrainer(model)
    for step in range(3):
        rows = random_rows(step, 12)
        metrics = run_step(backend, [rows[:5], rows[5:]])
        loss, norm = plain.step(rows)
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05, "clipping is part of what is compared"
        assert metrics["train/lr"] == pytest.approx(2e-3 * min(1.0, (step + 1) / 2))
        assert metrics["train/skipped"] == 0
        assert metrics["train/tokens"] == sum(int(row.mask.sum()) for row in rows)
    for name, value in weights_of(backend).items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=0, atol=2e-6)


@settings(max_examples=12)
@given(data=st.data())
def test_any_chunking_and_order_gives_the_gradient_of_the_whole(
    gradient_backend: FsdpBackend, data: st.DataObject
) -> None:
    rows = random_rows(data.draw(st.integers(0, 1000)), 10)
    order = data.draw(st.permutations(range(10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, 10), max_size=4)))
    chunks = [[rows[i] for i in order[a:b]] for a, b in zip([0, *cuts], [*cuts, 10], strict=True)]
    whole, chunked = flat_gradients(gradient_backend, [rows]), flat_gradients(gradient_backend, chunks)
    assert torch.linalg.norm(chunked - whole) <= 1e-6 * torch.linalg.norm(whole)
    assert torch.linalg.norm(whole) > 0.1


def test_prev_is_what_the_config_says(model: str) -> None:
    rows = random_rows(3, 6)
    swapped = [
        Row(row.ids, row.mask, {**row.columns, "prev_logprobs": row.columns["rollout_logprobs"]}, row.advantage, 0)
        for row in rows
    ]
    plain = {"loss": LossConfig(clip_high=0.2), "with_reference": False}
    configs = (backend_config(model, prev="rollout", **plain), *[backend_config(model, **plain)] * 2)
    from_rollout, recomputed, from_swapped = (
        {
            name: value
            for name, value in run_step(FsdpBackend(config, 0, 1), [given]).items()
            if not name.startswith("logprob/")
        }
        for config, given in zip(configs, (rows, rows, swapped), strict=True)
    )
    assert from_swapped == from_rollout
    assert recomputed["train/loss"] != from_rollout["train/loss"]


def test_the_train_pass_gives_prev_without_a_column(model: str) -> None:
    """With one optimizer step the policy before it is that of the train pass: ratios are 1 and nothing is clipped."""
    rows = random_rows(3, 6)
    with torch.no_grad():
        now = [ReferenceTrainer(model).row_logprobs(row).numpy() for row in rows]
    given = [
        Row(row.ids, row.mask, {**row.columns, "prev_logprobs": own}, row.advantage, 0)
        for row, own in zip(rows, now, strict=True)
    ]
    unread = [
        Row(row.ids, row.mask, {**row.columns, "prev_logprobs": own - 99}, row.advantage, 0)
        for row, own in zip(rows, now, strict=True)
    ]
    plain = {"loss": LossConfig(kind="ppo_clip", clip_low=1e-3, clip_high=1e-3), "with_reference": False}
    written = run_step(FsdpBackend(backend_config(model, prev="recompute", **plain), 0, 1), [given])
    taken = run_step(FsdpBackend(backend_config(model, prev="train_pass", **plain), 0, 1), [unread])
    assert taken == pytest.approx(written, rel=1e-4, abs=1e-6)
    assert (taken["train/ratio_mean"], taken["train/clip_fraction"], taken["train/approx_kl"]) == (1.0, 0.0, 0.0)


def test_later_updates_of_a_step_keep_the_log_probs_from_before_it(model: str) -> None:
    """Two mini-batches: the second is trained on after the first has moved the policy, by the formula."""
    first, second = random_rows(5, 5), random_rows(5, 6)
    loss = LossConfig(kind="ppo_clip", clip_low=0.1, clip_high=0.1)
    config = backend_config(model, prev="fixed", loss=loss, with_reference=False)
    backend = FsdpBackend(replace(config, trainer=config.trainer.model_copy(update={"lr": 0.01})), 0, 1)

    def logprobs() -> list[np.ndarray]:
        return [logprobs_of(backend, micro_batch([row]), temperature=TEMPERATURE).numpy() for row in second]

    def update(rows: list[Row], *columns: str) -> dict[str, float]:
        backend.begin_step(TEMPERATURE)
        backend.accumulate([micro_batch(rows, ("rollout_logprobs", *columns))], 1)
        return backend.finish_step()

    before = logprobs()
    metrics = update(first)
    assert (metrics["train/ratio_mean"], metrics["train/clip_fraction"]) == (1.0, 0.0)
    now = logprobs()
    given = [
        replace(row, columns={**row.columns, "prev_logprobs": own}) for row, own in zip(second, before, strict=True)
    ]
    metrics = update(given, "prev_logprobs")
    losses, ratios = [], []
    for row, old, new in zip(second, before, now, strict=True):
        chosen = row.mask.astype(bool)
        ratio = np.exp(new[chosen].astype(np.float64) - old[chosen])
        losses.append(-np.minimum(ratio * row.advantage, ratio.clip(0.9, 1.1) * row.advantage))
        ratios.append(ratio)
    assert metrics["train/ratio_mean"] == pytest.approx(np.concatenate(ratios).mean(), rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-4, abs=1e-6)
    assert 0 < metrics["train/clip_fraction"] < 1


def test_the_mismatch_is_of_the_policy_that_the_step_starts_from(model: str) -> None:
    plain, rows = ReferenceTrainer(model), random_rows(6, 11)
    with torch.no_grad():
        now = [plain.row_logprobs(row).numpy() for row in rows]
    for prev, expected in (("recompute", recomputed_mismatch(rows)), ("rollout", mismatch_of(rows, now))):
        backend = FsdpBackend(backend_config(model, prev=prev), 0, 1)
        metrics = run_step(backend, [rows[:4], [], rows[4:]])
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        assert run_step(backend, [[]])["logprob/mismatch_max"] == 0.0, "a step forgets the one before"


def test_sequence_mean_and_entropy(model: str) -> None:
    config = backend_config(model, loss=LossConfig(clip_high=0.2, aggregation="sequence"), entropy_metric=True)
    rows = random_rows(4, 7)
    backend = FsdpBackend(config, 0, 1)
    metrics = run_step(backend, [rows[:3], rows[3:]])
    plain = ReferenceTrainer(model)
    expected, entropies = [], []
    for row in rows:
        mask = torch.from_numpy(row.mask).bool()
        if not mask.any():
            continue
        ratio = (plain.row_logprobs(row)[mask] - torch.from_numpy(row.columns["prev_logprobs"])[mask]).exp()
        expected.append(-torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage).mean().item())
        logits = plain.model(input_ids=torch.from_numpy(row.ids).long()[None]).logits[0, :-1] / TEMPERATURE
        entropies.append(torch.distributions.Categorical(logits=logits).entropy()[mask[1:]])
    assert metrics["train/loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert metrics["train/sequences"] == len(expected)
    assert metrics["train/entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)


def test_failed_rows_weigh_nothing(gradient_backend: FsdpBackend) -> None:
    rows = random_rows(8, 10)
    kept = [row for row in rows if row.mask.any()]
    torch.testing.assert_close(flat_gradients(gradient_backend, [rows]), flat_gradients(gradient_backend, [kept]))


def test_rows_that_several_ranks_share_are_counted_by_one() -> None:
    ones = torch.ones(3)
    rows = (torch.tensor([0, 0, 1]), torch.tensor([2, 4]))  # of the second row one token is here, three are elsewhere
    inputs = LossInputs(ones, ones, ones, None, ones, *rows)
    figures = []
    for counts in (True, False):
        step = TrainStep(
            build_loss(LossConfig(clip_high=0.2, aggregation="token")), torch.device("cpu"), None, counts_rows=counts
        )
        step.begin(1.0)
        with step.accumulating():
            step.add(inputs, np.array([2, 4]), np.array([7, 8]), None)
        metrics = step.finish(torch.zeros((), dtype=torch.float64)).metrics
        figures.append((metrics["train/tokens"], metrics["train/sequences"]))
    assert figures == [(3, 2), (3, 0)]


# ---------------------------------------------------------------- log-probs


def test_logprobs_equal_row_by_row_forwards(model: str) -> None:
    backend, plain = FsdpBackend(backend_config(model), 0, 1), ReferenceTrainer(model)
    rows = random_rows(2, 9)
    batch = micro_batch(rows)
    with torch.no_grad():
        every = [plain.row_logprobs(row, 0.7) for row in rows]
    masked = torch.cat([values * torch.from_numpy(row.mask) for values, row in zip(every, rows, strict=True)])
    got = logprobs_of(backend, batch, temperature=0.7)
    assert got.dtype == torch.float32 and got.shape == batch.batch.jagged("input_ids").values.shape
    torch.testing.assert_close(got, masked, rtol=1e-5, atol=1e-5)
    ids_only = replace(batch, batch=batch.batch.subset(["input_ids"]))
    torch.testing.assert_close(logprobs_of(backend, ids_only, temperature=0.7), torch.cat(every), rtol=1e-5, atol=1e-5)
    assert len(logprobs_of(backend, micro_batch([]))) == 0


def test_the_reference_stays_where_the_policy_was(model: str) -> None:
    backend = FsdpBackend(backend_config(model), 0, 1)
    batch = micro_batch(random_rows(2, 6))
    first = logprobs_of(backend, batch)
    assert torch.equal(logprobs_of(backend, batch, reference=True), first)
    run_step(backend, [random_rows(9, 8)])
    assert torch.equal(logprobs_of(backend, batch, reference=True), first)
    assert not torch.equal(logprobs_of(backend, batch), first)


def test_chunks_of_logits_change_nothing(gradient_backend: FsdpBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(12, 9)
    batch = micro_batch(rows)
    whole, logprobs = flat_gradients(gradient_backend, [rows]), logprobs_of(gradient_backend, batch)
    monkeypatch.setattr(vocab_logprobs, "LOGIT_ELEMENTS", 4 * VOCAB)
    chunked = flat_gradients(gradient_backend, [rows])
    assert torch.linalg.norm(chunked - whole) <= 1e-6 * torch.linalg.norm(whole)
    torch.testing.assert_close(logprobs_of(gradient_backend, batch), logprobs)


def test_a_head_that_does_more_is_noticed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logit_scale=0.25, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    CohereForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="trainer.head: got 'selected', expected 'auto' or 'full' for CohereForCausalLM"
    ):
        FsdpBackend(BackendConfig(str(tmp_path), TrainerConfig(head="selected")), 0, 1)
    backend = FsdpBackend(BackendConfig(str(tmp_path)), 0, 1)
    rows = random_rows(1, 5)
    plain = ReferenceTrainer(str(tmp_path))
    with torch.no_grad():
        expected = torch.cat([plain.row_logprobs(row, 1.0) * torch.from_numpy(row.mask) for row in rows])
    torch.testing.assert_close(logprobs_of(backend, micro_batch(rows)), expected, rtol=1e-5, atol=1e-5)
    assert run_step(backend, [rows])["train/skipped"] == 0


def test_attention_is_what_the_model_supports(tmp_path: Path) -> None:
    """Transformers offers SDPA for a soft cap, which it then leaves out; the engine chooses as the trainer does."""
    sizes: Any = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Gemma2Config(**sizes, attn_logit_softcapping=2.0)).save_pretrained(tmp_path)
    for attention in ("auto", "eager"):
        backend = FsdpBackend(BackendConfig(str(tmp_path), attention=attention), 0, 1)
        assert backend._hf_model().config._attn_implementation == "eager"
    engine: Any = load_model(str(tmp_path), torch.float32)
    assert engine.config._attn_implementation == "eager"
    message = "model.attention: got 'sdpa', expected 'auto' or 'eager' for a model of type 'gemma2' with attn_log"
    with pytest.raises(ValueError, match=message):
        FsdpBackend(BackendConfig(str(tmp_path), attention="sdpa"), 0, 1)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path), torch.float32, "sdpa")
    with pytest.raises(ValueError, match="model.attention: got 'flash', expected 'auto' or another kind for"):
        FsdpBackend(BackendConfig(str(tmp_path), attention="flash"), 0, 1)


def test_a_response_needs_a_prompt() -> None:
    row = random_rows(0, 1)[0]
    bad = Row(row.ids, np.ones_like(row.mask), row.columns, 0.0, 0)
    with pytest.raises(ValueError, match="response_mask: row 1 marks its first token"):
        lay_out(micro_batch([row, bad]).batch, torch.device("cpu"))


# ---------------------------------------------------------------- precision and mistakes


def test_mistakes_are_told(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path: got '.*nothing', expected a folder with a HF causal LM"):
        FsdpBackend(BackendConfig(model=str(tmp_path / "nothing")), 0, 1)
    with pytest.raises(RuntimeError, match="needs a default process group of 2 ranks"):
        FsdpBackend(backend_config(model, topology=Topology(2)), 0, 2)
    with pytest.raises(ValueError, match="trainer.backend: got 'deepspeed', expected 'fsdp', 'megatron' or 'scripted'"):
        build_backend(BackendConfig(model, TrainerConfig.model_construct(backend="deepspeed")), 0, 1)
    assert isinstance(build_backend(backend_config(model), 0, 1), FsdpBackend)
    with pytest.raises(ValueError, match="world: got 1 ranks, expected the 2 of Topology"):
        build_backend(backend_config(model, topology=Topology(1, tp=2)), 0, 1)
    with pytest.raises(ValueError, match="with_reference: got False, expected True with loss.kl_coef = 0.1"):
        BackendConfig(model=model, loss=LossConfig(kl_coef=0.1))
