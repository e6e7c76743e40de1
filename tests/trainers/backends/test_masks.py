"""Tests of log-probs over the sets of tokens from which tokens were drawn, against dense logits with -inf elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.codecs.batch import Batch
from headrace.codecs.jagged import pack
from headrace.codecs.schema import Schema
from headrace.codecs.tokens.masks import MASK_FIELD, MASKS, MasksDamaged, encode_sets
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    VOCAB,
    ReferenceTrainer,
    Row,
    masked,
    micro_batch,
    random_rows,
    run_on_ranks,
)
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, sent, train
from headrace.trainers.backends.vocab import candidates, logprobs
from headrace.trainers.backends.vocab.allowed import Allowed
from headrace.trainers.backends.vocab.logprobs import VocabShard
from headrace.trainers.losses.kl import _estimate

ROWS = masked(random_rows(50, NUM_ROWS))
FSDP = tuple(Case(f"fsdp tied {mesh}") for mesh in ("tp2", "tp2 packed recompute", "cp2 packed"))
MEGATRON = tuple(Case(f"megatron {mesh}") for mesh in ("untied tp2 sp", "untied pp2", "llama cp2"))
ALONE = (
    Case("fsdp tied padded"),
    Case("fsdp tied packed"),
    Case("fsdp tied full-head"),
    pytest.param(Case("megatron tied"), marks=pytest.mark.megatron),
)


def steps_of(rank: int, world: int, cases: Sequence[Case], folder: str) -> list[dict[str, Any]]:
    """Return what each case computes of ROWS: a step, and log-probs of the policy and of the reference before it."""
    candidates.LOGIT_ELEMENTS = logprobs.LOGIT_ELEMENTS = 5 * VOCAB  # chunks of five tokens
    found = []
    for case in cases:
        with contextlib.closing(case.build(rank, folder)) as backend:
            micro = [sent(ROWS, case.topology, case.topology.place(rank))]
            given: Any = {"temperature": TEMPERATURE}
            made = {"policy": backend.logprobs(micro, 1, **given)}
            made["reference"] = backend.logprobs(micro, 1, reference=True, **given)
            found.append({**made, "step": train(backend, case.topology, rank, ROWS)})
    return found


def expect_dense(folder: Path, model: str, found: dict[str, Any]) -> None:
    trainer = ReferenceTrainer(str(folder / model))
    with torch.no_grad():
        wanted = torch.cat([trainer.row_logprobs(row) * torch.from_numpy(row.mask) for row in ROWS])
    for kind in ("policy", "reference"):
        for column in found[kind]:
            torch.testing.assert_close(column, wanted, rtol=1e-5, atol=1e-5)
    loss, norm = trainer.step(ROWS)
    got = found["step"]
    assert (got["train/loss"], got["train/grad_norm"]) == pytest.approx((loss, norm), rel=1e-5)
    assert np.isfinite(list(got.values())).all()


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_a_step_is_that_of_dense_logits(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", logprobs.LOGIT_ELEMENTS)
    monkeypatch.setattr(candidates, "LOGIT_ELEMENTS", candidates.LOGIT_ELEMENTS)
    [found] = steps_of(0, 1, [case], str(folder))
    expect_dense(folder, case.model, found)


@pytest.mark.processes
@pytest.mark.parametrize("cases", [FSDP, pytest.param(MEGATRON, marks=pytest.mark.megatron)], ids=["fsdp", "megatron"])
def test_a_step_on_two_ranks_is_that_of_dense_logits(cases: Sequence[Case], folder: Path, tmp_path: Path) -> None:
    ranks = run_on_ranks(steps_of, 2, tmp_path / "run", cases, str(folder))
    for index, case in enumerate(cases):
        for rank in ranks:
            expect_dense(folder, case.model, rank[index])


def test_a_column_of_other_rows_is_refused(folder: Path) -> None:
    with contextlib.closing(Case("fsdp tied").build(0, folder)) as backend:
        micro, other = micro_batch(ROWS), micro_batch(ROWS[:3])
        columns = {**dict(micro.batch.items()), MASKS: other.batch.ragged(MASKS)}
        wrong = replace(micro, batch=Batch(micro.batch.schema, micro.batch.num_rows, columns))
        tokens = [int(one.lengths.sum()) for one in (other, micro)]
        with pytest.raises(MasksDamaged, match="got the sampling masks of {} tokens, expected {}".format(*tokens)):
            backend.logprobs([wrong], 1)


@pytest.mark.parametrize("entropy", ["off", "report", "train"])
@pytest.mark.parametrize("kind", ["weight", "head"])
def test_entropies_are_those_of_the_sets(kind: str, entropy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGIT_ELEMENTS", 5 * VOCAB)
    from headrace.trainers.backends.rows.row_layout import lay_out

    layout = lay_out(micro_batch(ROWS).batch, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(layout.targets), 8, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, 8, generator=generator, requires_grad=True)
    head = weight if kind == "weight" else lambda states: states @ weight.t()
    given: Any = {"temperature": 0.7, "entropy": entropy, "allowed": layout.allowed}
    values, entropies = logprobs.token_logprobs(hidden, layout.targets, head, VOCAB, **given)
    every = np.concatenate([np.ones((len(row.ids), VOCAB), bool) if row.sets is None else row.sets for row in ROWS])
    dense = (hidden @ weight.t() / 0.7).masked_fill(~torch.from_numpy(every)[layout.index], -torch.inf).log_softmax(-1)
    wanted = dense.gather(1, layout.targets[:, None])[:, 0]
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-6)
    loss, expected = values.sum(), wanted.sum()
    if entropies is not None:
        of_sets = -torch.where(dense > -torch.inf, dense.exp() * dense, 0.0).sum(-1)
        torch.testing.assert_close(entropies, of_sets, rtol=1e-5, atol=1e-6)
        if entropy == "train":
            kept = dense.masked_fill(dense == -torch.inf, 0.0)
            loss, expected = loss + entropies.sum(), expected - (dense.exp() * kept).sum()
    for one, other in zip(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, torch.nan_to_num(other), rtol=1e-4, atol=1e-5)


@settings(max_examples=40)
@given(st.integers(2, 60), st.floats(0.0, 1.0), st.floats(0.2, 4.0), st.integers(0, 2**31))
def test_entropy_and_reference_kl_are_those_of_the_distributions_over_the_set(
    vocab: int, share: float, temperature: float, seed: int
) -> None:
    """Each token of a set, weighted with its probability, gives the exact divergence in the place of a sampled one."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    members = np.flatnonzero((rng.random(vocab) < share) | (np.arange(vocab) == rng.integers(vocab)))
    count = len(members)
    stream = encode_sets(members, np.tile(members, count), np.full(count, count))
    batch = pack(Schema([MASK_FIELD]), {MASKS: [torch.from_numpy(stream)]})
    index, targets = torch.arange(count), torch.from_numpy(members)
    allowed = Allowed.of(batch, count, index, targets, lambda one: one)
    states = torch.eye(4)[:1].repeat(count, 1)
    heads = [torch.randn(vocab, 4, generator=generator) * 3 for _ in range(2)]
    given_: Any = {"temperature": temperature, "entropy": "report", "allowed": allowed}
    (new, entropies), (ref, _) = (logprobs.token_logprobs(states, targets, head, vocab, **given_) for head in heads)
    p, q = ((head[members, 0].double() / temperature).log_softmax(0) for head in heads)
    near: Any = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(new, p, **near)
    assert entropies is not None
    torch.testing.assert_close(entropies, -(p.exp() * p).sum().expand(count), **near)
    exact = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * _estimate(kind, ref - new, None)).sum(), exact, **near)


def test_a_set_with_an_unknown_token_is_refused() -> None:
    from headrace.trainers.backends.rows.row_layout import lay_out

    rows: list[Row] = ROWS
    layout = lay_out(micro_batch(rows).batch, torch.device("cpu"))
    hidden = torch.zeros(len(layout.targets), 4)
    with pytest.raises(ValueError, match=r"sampling_masks: got the token \d+ in a set, expected less than 9"):
        logprobs.token_logprobs(hidden, layout.targets, torch.zeros(9, 4), 9, allowed=layout.allowed)
    part: Any = VocabShard(None, 5, 5, 9)  # type: ignore[arg-type]  # nothing is sent
    with pytest.raises(ValueError, match=r"sampling_masks: got the token \d+ in a set, expected less than 9"):
        logprobs.token_logprobs(hidden, layout.targets, lambda states: states, part, allowed=layout.allowed)
