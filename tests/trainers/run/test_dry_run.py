"""What a dry run tells of a mesh: a worker a rank, who leads, memory and microbatches as they will be split."""

from __future__ import annotations

from typing import Any

from headrace.trainers.config.config import Config
from headrace.trainers.run.dry_run import describe, placements, trained_bytes


def config(**trainer: Any) -> Config:
    sizes = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 10}}
    return Config.model_validate({"trainer": trainer, **sizes})


def test_a_worker_for_each_rank_of_the_mesh() -> None:
    workers = [place.what for place in placements(config(dp=2, tp=2)) if place.name.startswith("train")]
    assert workers == [f"backend fsdp, dp {dp} tp {tp}" + ", leader" * (tp == 0) for dp in range(2) for tp in range(2)]
    mesh = config(backend="megatron", pp=2, cp=2)
    assert [place.what for place in placements(mesh)][-1] == "backend megatron, dp 0 cp 1 pp 1"
    assert placements(config(dp=2))[-1].what == "backend fsdp"


def test_microbatches_count_padded_rows() -> None:
    text = describe(config(dp=2, tp=4, tokens_per_microbatch=280))
    assert "2 replica(s) of 4 rank(s) x 128 rows, at most 13 microbatch(es) of 280 tokens each" in text


def test_memory_as_the_backend_splits_it() -> None:
    assert trained_bytes(config(dp=2, tp=2), 1000) == 4000
    assert trained_bytes(config(backend="megatron", dp=2, tp=2, pp=2), 1000) == 3000
    assert trained_bytes(config(backend="megatron", dp=2, tp=2, distributed_optimizer=False), 1000) == 8000
