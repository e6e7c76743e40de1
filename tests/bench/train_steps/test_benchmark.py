"""Tests of `headrace bench gpu --work train-*`: whole on a CPU with a tiny model, its FLOPs, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from headrace.bench.gpu.work_report import WorkReport
from headrace.bench.models import SHAPES
from headrace.bench.train_steps.benchmark import TrainOptions, run_train_steps, summarise, wrong
from headrace.bench.train_steps.by_hand import micro_batch, random_rows, skewed_routes
from headrace.bench.train_steps.rank import TrainFigures, check_lengths, halves, step_flops
from headrace.codecs.tokens.routes import RouteSpec
from headrace.trainers.errors import UserError

CHECK = {f"{name}.{what}_off": 0.0 for name in ("exact", "own") for what in ("loss", "gradient", "logprob")}
FIGURES = TrainFigures(
    tokens=100, build_s=1.5, step_s=2.0, steps_s=(9.0, 3.0, 2.0), flops=8e12, mfu=0.4, peak_gib=3.0,
    families={"matmul": 1.5, "idle": 0.5}, longest=(("gemm", 1.5),), check=CHECK, first_loss=0.5, first_norm=2.0,
    plain={"step_s": 4.0, "peak_gib": 5.0, "first_loss": 0.5, "first_norm": 2.0}, plain_problem="",
)  # fmt: skip


def test_flops_are_six_for_each_parameter_and_token_and_those_of_causal_attention() -> None:
    shape = SHAPES["tiny"].options()
    config = Qwen3Config(**shape)
    params = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters() if p.ndim > 1)  # norms are left out
    lengths = np.array([7, 20])
    pairs = 7 * 8 / 2 + 20 * 21 / 2
    attention = 2 * 2 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * pairs
    assert step_flops(config, lengths) == pytest.approx(6 * params * 27 + 3 * attention)
    untied = step_flops(Qwen3Config(**{**shape, "tie_word_embeddings": False}), lengths)
    assert untied - step_flops(config, lengths) == 6 * 27 * shape["vocab_size"] * shape["hidden_size"]
    moe = SHAPES["tiny-moe"]
    every = replace(moe, experts_per_token=moe.experts)
    more, less = (step_flops(Qwen3MoeConfig(**one.options()), lengths) for one in (every, moe))
    assert more - less == 6 * 27 * 2 * 6 * 3 * moe.hidden * moe.expert_intermediate, "a token uses 2 of 8 experts"


def test_the_summary_counts_all_ranks_and_takes_the_slowest() -> None:
    summary = summarise("train-tiny", [FIGURES, replace(FIGURES, build_s=1.0, step_s=4.0, mfu=0.2, tokens=60)])
    assert summary["gpu.train-tiny.build_s"] == 1.5 and summary["gpu.train-tiny.step_s"] == 4.0
    assert summary["gpu.train-tiny.tokens_per_s"] == 40.0 and summary["gpu.train-tiny.tokens_per_s_per_gpu"] == 20.0
    assert summary["gpu.train-tiny.mfu"] == 0.2 and summary["gpu.train-tiny.tflops_per_gpu"] == 2.0
    assert summary["gpu.train-tiny.share.matmul"] == 0.75 and summary["gpu.train-tiny.vs_plain"] == 1.0
    assert "gpu.train-tiny.mfu" not in summarise("train-tiny", [replace(FIGURES, mfu=None, plain={})])


def test_what_is_computed_wrongly_is_told() -> None:
    assert wrong(FIGURES, half=True) == []
    off = replace(FIGURES, check={**CHECK, "own.gradient_off": 0.01})
    assert wrong(off, half=True) == []
    assert "the gradient of the small model (own) is 0.01 off" in wrong(off, half=False)[0]
    assert "expected at most" in wrong(replace(FIGURES, check={**CHECK, "exact.loss_off": float("nan")}), half=True)[0]
    assert "plain torch's is 2" in wrong(replace(FIGURES, first_norm=3.0), half=True)[0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_the_check_gives_each_replica_two_microbatches_with_rows(replicas: int) -> None:
    rows = random_rows(1, check_lengths(replicas), 100)
    parts = [part for replica in range(replicas) for part in halves(rows, replica, replicas)]
    assert sorted(row for part in parts for row in part) == list(range(len(rows.ids)))
    assert all(micro_batch(rows, part).lengths.sum() > 0 for part in parts)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("work", "overrides"),
    [
        pytest.param("train-tiny", ("trainer.recompute=full",), id="dense"),
        pytest.param("train-tiny-moe", (), id="moe", marks=pytest.mark.slow),
    ],
)
def test_the_benchmark_runs_on_a_cpu(work: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    report = WorkReport(work, tmp_path / "out")
    run_train_steps(TrainOptions(report.out, work, tokens=64, overrides=overrides), report)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    prefix = f"gpu.{work}."
    assert found[f"{prefix}check.exact.gradient_off"] < 1e-5 and found[f"{prefix}check.exact.loss_off"] < 1e-6
    assert found[f"{prefix}grad_norm_vs_plain"] < 1e-5 and found[f"{prefix}loss_vs_plain"] < 1e-6
    assert sum(value for name, value in found.items() if name.startswith(f"{prefix}share.")) == pytest.approx(1.0)
    assert found[f"{prefix}tokens_per_s"] > 0 and found[f"{prefix}plain.step_s"] > 0
    [record] = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert record["tokens"] == 128 and len(record["steps_s"]) == 3 and record["longest"]


def test_skewed_routes_give_one_expert_more_tokens() -> None:
    spec = RouteSpec(layers=(0, 2), top_k=2, num_experts=8, hidden_layers=3)
    routes = skewed_routes(np.random.default_rng(1), 4001, spec, 3.0)
    assert routes.shape == (4001, 2, 2) and (routes[-1] == spec.mark).all()
    for place in range(2):
        counts = np.bincount(routes[:-1, place].ravel(), minlength=8)
        assert counts[0] == 3000 and 600 < counts[1:].min() <= counts[1:].max() < 850
        assert (routes[:-1, place, 0] != routes[:-1, place, 1]).all()


@pytest.mark.slow
@pytest.mark.processes
def test_steps_on_skewed_routes(tmp_path: Path) -> None:
    report = WorkReport("train-tiny-moe", tmp_path / "out")
    options = TrainOptions(
        report.out, "train-tiny-moe", tokens=64, skew=4.0, overrides=("trainer.dp=2", "trainer.ep=2")
    )
    run_train_steps(options, report)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["gpu.train-tiny-moe.tokens_per_s"] > 0 and "gpu.train-tiny-moe.plain.step_s" not in found
    assert json.loads((tmp_path / "out" / "results.jsonl").read_text().splitlines()[0])["tokens"] == 128


@pytest.mark.slow
@pytest.mark.processes
def test_four_ranks_check_and_time_their_shares(tmp_path: Path) -> None:
    report = WorkReport("train-tiny", tmp_path / "out")
    run_train_steps(TrainOptions(report.out, "train-tiny", tokens=64, overrides=("trainer.dp=4",)), report)
    assert report.complaints == []
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert found["gpu.train-tiny.check.exact.gradient_off"] < 1e-5 and found["gpu.train-tiny.tokens_per_s"] > 0
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"work": "train-0.6b"},
            "--work: got 'train-0.6b' on a machine without a GPU, expected a work named train-tiny",
        ),
        (
            {"overrides": ("rollout.tp=2",)},
            "rollout.tp=2: --work train-tiny makes only train steps, expected only keys of",
        ),
        ({"skew": 4.0}, "--skew: got 4, expected a number from 0 to 0 for train-tiny"),
        ({"steps": 2}, "--steps: got 2, expected at least 3, as the first are not counted"),
        ({"overrides": ("trainer.cp=2", "trainer.packing=packed"), "backend": "megatron"}, "trainer.cp: got 2"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict, message: str, tmp_path: Path) -> None:
    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=message):
        run_train_steps(TrainOptions(tmp_path, **{"work": "train-tiny", **options}), WorkReport("train-tiny", tmp_path))
