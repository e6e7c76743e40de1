"""Tests a train step with a teacher's columns, and the scores of a teacher, against transformers' own logits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engines.hf.engine import HfEngine
from headrace.actors.protocols import row_schema
from headrace.actors.train_backend import MicroBatch
from headrace.codecs.batch import Batch, Jagged
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    VOCAB,
    Row,
    backend_config,
    flat,
    gradients_of,
    logprobs_of,
    micro_batch,
    random_rows,
    run_on_ranks,
    save_tiny_llama,
    save_tiny_model,
)
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.distillation_config import DistillationConfig

KINDS = ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)]
K = 3
LOSS = LossConfig(kind="reinforce")


def section(kind: str, **keys: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"teachers": [{"model": "t"}], "kind": kind, "k": K, "coef": 0.7, **keys})


def teacher_of(folder: str, rows: list[Row]) -> list[torch.Tensor]:
    """Log-probs of all tokens at each position of each row, from the HF model `folder`: float32 `[L, V]`, 0 at 0."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row.ids).long()[None]).logits[0, :-1]
        every = torch.log_softmax(logits / TEMPERATURE, -1)
        found.append(torch.cat([torch.zeros(1, every.shape[-1]), every]))
    return found


def columns_of(rows: list[Row], every: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The columns of a distillation by their definition; 0 where the response mask is 0."""
    mask = torch.from_numpy(np.concatenate([row.mask for row in rows])) != 0
    whole, ids = torch.cat(every), torch.from_numpy(np.concatenate([row.ids for row in rows])).long()
    values, top = whole.topk(K, -1)
    return {
        "teacher_logprobs": whole.gather(-1, ids[:, None])[:, 0] * mask,
        "teacher_top_ids": top.to(torch.int32) * mask[:, None],
        "teacher_top_logprobs": values * mask[:, None],
    }


def with_columns(rows: list[Row], columns: dict[str, torch.Tensor]) -> MicroBatch:
    micro = micro_batch(rows, ("rollout_logprobs", "prev_logprobs"))
    schema = row_schema(None, (), K).subset([*micro.batch, *columns])
    own = {name: Jagged(values, micro.lengths) for name, values in columns.items()}
    return replace(micro, batch=Batch(schema, len(rows), {**dict(micro.batch.items()), **own}))


def loss_by_hand(folder: str, rows: list[Row], columns: dict[str, torch.Tensor], kind: str, where: str) -> Any:
    """Gradients of the summed loss, from the HF model and the formulas written out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, start = torch.zeros(()), 0
    for row in rows:
        mask, ids = torch.from_numpy(row.mask).bool(), torch.from_numpy(row.ids).long()
        part = {name: values[start : start + len(ids)][mask] for name, values in columns.items()}
        start += len(ids)
        every = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        every = torch.cat([torch.zeros(1, every.shape[-1]), every])[mask]
        now = every.gather(-1, ids[mask][:, None])[:, 0]
        gain = torch.full_like(now, row.advantage)
        if where == "advantage":
            gain = gain + 0.7 * (part["teacher_logprobs"] - torch.from_numpy(row.columns["prev_logprobs"])[mask])
        total = total - (gain * now).sum()
        if kind == "topk":
            own, teacher = every.gather(-1, part["teacher_top_ids"].long()), part["teacher_top_logprobs"]
            rest, of_teacher = 1 - own.exp().sum(-1), 1 - teacher.exp().sum(-1)
            kl = (own.exp() * (own - teacher)).sum(-1) + rest * (rest.log() - of_teacher.log())
            total = total + 0.7 * kl.sum()
        elif where == "loss":
            total = total + 0.7 * ((part["teacher_logprobs"] - now) ** 2 / 2).sum()
    total.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(("kind", "where"), [("reverse_kl", "advantage"), ("reverse_kl", "loss"), ("topk", "loss")])
def test_gradients_are_those_of_the_formulas(tmp_path: Path, kind: str, where: str) -> None:
    student, teacher = save_tiny_model(tmp_path / "s"), save_tiny_llama(tmp_path / "t")
    rows = random_rows(4, 6)
    columns = columns_of(rows, teacher_of(teacher, rows))
    given = columns if kind == "topk" else {"teacher_logprobs": columns["teacher_logprobs"]}
    config = backend_config(student, loss=LOSS, with_reference=False, distillation=section(kind, kl_in=where))
    backend = build_backend(config, 0, 1)
    got = gradients_of(backend, [with_columns(rows, given)])
    expected = loss_by_hand(student, rows, columns, kind, where)
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="it has no 'teacher_logprobs', which distillation.teachers needs"):
        gradients_of(backend, [micro_batch(rows, ("rollout_logprobs", "prev_logprobs"))])
    backend.abort_step()
    if kind == "topk":
        foreign = {**columns, "teacher_top_ids": columns["teacher_top_ids"] + VOCAB}
        with pytest.raises(ValueError, match=f"expected less than {VOCAB}, the size of the policy's vocabulary"):
            gradients_of(backend, [with_columns(rows, foreign)])
    backend.close()


@pytest.mark.megatron
def test_both_backends_have_the_same_gradients_with_top_tokens(tmp_path: Path) -> None:
    student, teacher = save_tiny_model(tmp_path / "s"), save_tiny_llama(tmp_path / "t")
    rows, norms = random_rows(4, 6), []
    columns = columns_of(rows, teacher_of(teacher, rows))
    for kind in ("fsdp", "megatron"):
        config = backend_config(student, backend=kind, loss=LOSS, with_reference=False, distillation=section("topk"))
        backend = build_backend(config, 0, 1)
        norms.append(flat(gradients_of(backend, [with_columns(rows, columns)])).norm())
        backend.close()
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0)


def scores_of(rank: int, world: int, folder: str, keys: dict[str, Any]) -> Any:
    """Scores of a frozen backend of the teacher in each of two microbatches, on the rank that writes."""
    rows = random_rows(4, 6)
    config = backend_config(folder, loss=LossConfig(), with_reference=False, **keys)
    backend: Any = build_backend(config.frozen(folder, offload=False), rank, world)
    micros = [micro_batch(rows[:2]), micro_batch(rows[2:])]
    found = backend.score(iter(micros), 2, K, temperature=TEMPERATURE)
    alone = backend.score(iter(micros), 2, 0, temperature=TEMPERATURE)
    assert all(one.top_ids is None for one in alone)
    backend.close()
    return found


def check_scores(found: Any, folder: str) -> None:
    rows = random_rows(4, 6)
    expected = columns_of(rows, teacher_of(folder, rows))
    got = {
        "teacher_logprobs": torch.cat([one.logprobs for one in found]),
        "teacher_top_ids": torch.cat([one.top_ids for one in found]).to(torch.int32),
        "teacher_top_logprobs": torch.cat([one.top_logprobs for one in found]),
    }
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packing", ["none", "packed"])
def test_scores_are_those_of_transformers(tmp_path: Path, packing: str) -> None:
    folder = save_tiny_llama(tmp_path)
    check_scores(scores_of(0, 1, folder, {"packing": packing}), folder)


@pytest.mark.processes
def test_two_tensor_parallel_ranks_have_the_same_scores(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "m")
    first, second = run_on_ranks(scores_of, 2, tmp_path / "run", folder, {"tp": 2})
    assert not len(second) or not len(first)
    check_scores(first or second, folder)


def beside_megatron(rank: int, world: int, student: str, folder: str) -> list[Any]:
    """Scores of a teacher in the train workers of a policy that Megatron trains, before and after a step of it."""
    config = backend_config(
        student, backend="megatron", dp=world, loss=LossConfig(kind="reinforce"), with_reference=False, prev="rollout"
    )
    policy, teacher = (
        build_backend(config, rank, world),
        build_backend(config.frozen(folder, offload=False), rank, world),
    )
    micro, found = micro_batch(random_rows(4, 6)), []
    for _ in range(2):
        scores: Any = teacher
        found.append(scores.score([micro], 1, K, temperature=TEMPERATURE))
        policy.begin_step(TEMPERATURE)
        policy.accumulate([micro], 1)
        assert policy.finish_step()["train/skipped"] == 0.0
    teacher.close()
    policy.close()
    return found


@pytest.mark.processes
@pytest.mark.megatron
def test_a_teacher_beside_a_policy_of_megatron_stays_what_it_is(tmp_path: Path) -> None:
    student, folder = save_tiny_model(tmp_path / "s"), save_tiny_llama(tmp_path / "t")
    for first, second in run_on_ranks(beside_megatron, 2, tmp_path / "run", student, folder):
        check_scores(first, folder)
        check_scores(second, folder)


def test_an_engine_gives_the_columns_of_the_train_workers(tmp_path: Path) -> None:
    """To 1e-5: log-probs of sampled tokens, top tokens and their log-probs."""
    asyncio.run(compare_engine(save_tiny_llama(tmp_path)))


async def compare_engine(folder: str) -> None:
    rows = random_rows(4, 6)
    engine = HfEngine(folder)
    parts = await engine.score([row.ids for row in rows], [row.mask for row in rows], K, TEMPERATURE)
    found = scores_of(0, 1, folder, {})
    mask = np.concatenate([row.mask for row in rows]) != 0
    for index, name in enumerate(("logprobs", "top_ids", "top_logprobs")):
        whole = torch.cat([getattr(one, name) for one in found])[mask]
        torch.testing.assert_close(
            torch.from_numpy(np.concatenate([part[index] for part in parts])),
            whole.to(torch.int32 if name == "top_ids" else torch.float32),
            rtol=0,
            atol=1e-5,
        )
    bare = await engine.score([rows[0].ids], [rows[0].mask], 0, 1.0)
    assert bare[0][1].shape == (int(rows[0].mask.sum()), 0)
    with pytest.raises(ValueError, match="score: got row 0 with 65 tokens, expected at most 64"):
        await engine.score([np.ones(65, np.int32)], [np.ones(65, np.uint8)], 0, 1.0)
    with pytest.raises(ValueError, match=f"expected 0..{VOCAB - 1}; does the model have the policy's vocabulary"):
        await engine.score([np.array([1, VOCAB], np.int32)], [np.array([0, 1], np.uint8)], 0, 1.0)
    await engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        await engine.score([], [], 0, 1.0)


def test_a_policy_with_a_teachers_columns_has_the_same_log_probs(tmp_path: Path) -> None:
    """The section changes the loss alone."""
    folder, micro = save_tiny_model(tmp_path), micro_batch(random_rows(4, 6))
    columns = []
    for distillation in (DistillationConfig(), section("topk")):
        backend: Any = build_backend(
            backend_config(folder, loss=LOSS, with_reference=False, distillation=distillation), 0, 1
        )
        columns.append(logprobs_of(backend, micro))
        backend.close()
    assert torch.equal(*columns)
