"""Tests that steps, log-probs and checkpoints of the fsdp backend with tensor parallelism are those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GemmaConfig

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    VOCAB,
    ReferenceTrainer,
    Row,
    assert_same_step,
    backend_config,
    logprobs_of,
    micro_batch,
    random_rows,
    recomputed_mismatch,
    run_on_ranks,
    run_step,
    weights_of,
)
from headrace.tests.trainers.backends.live_bytes import gathering_share
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.model_split import check_split
from headrace.trainers.backends.vocab import logprobs as vocab_logprobs
from headrace.trainers.losses.config import LossConfig

pytestmark = pytest.mark.processes

STEPS = 3
TP2, DP2 = Topology(1, tp=2), Topology(2)
PACKED = {"packing": "packed", "recompute": "full", "offload": True}
CASES: dict[str, tuple[str, Topology, dict[str, Any]]] = {
    "qwen3 tp2": ("tied", TP2, {}),
    "qwen3 tp2 packed, recomputed, offloaded": ("tied", TP2, PACKED),
    "qwen3 tp2, all logits": ("tied", TP2, {"head": "full"}),
    "moe tp2": ("moe", TP2, {}),
    "moe dp2 recomputed": ("moe", DP2, {"recompute": "full"}),
    "moe dp2 recomputed, weights kept": ("moe", DP2, {"recompute": "full", "reshard_after_forward": False}),
    "llama tp2": ("biased", TP2, {}),
}
BONUS = LossConfig(clip_low=0.1, clip_high=0.15, entropy_coef=0.3)


def share(rows: Sequence[Row], topology: Topology, rank: int) -> list[list[Row]]:
    """Return the rank's rows in three microbatches, one of them empty; tensor-parallel ranks get the same rows."""
    mine = list(rows[topology.place(rank).dp :: topology.dp])
    return [mine[:2], [], mine[2:]]


def three_steps(backend: FsdpBackend, topology: Topology, rank: int) -> list[dict[str, float]]:
    return [run_step(backend, share(random_rows(step, 12), topology, rank)) for step in range(STEPS)]


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run everything that needs two ranks in one start of two processes."""
    result: dict[str, Any] = {"cases": {}}
    for name, (model, topology, changes) in CASES.items():
        config = backend_config(f"{folder}/{model}", topology=topology, **changes)
        backend = FsdpBackend(config, rank, world)
        steps = three_steps(backend, topology, rank)
        result["cases"][name] = (steps, weights_of(backend), gathering_share(backend, backend._policy))

    rows = random_rows(20, 10)
    qwen = f"{folder}/tied"
    backend = FsdpBackend(backend_config(qwen, topology=TP2), rank, world)
    result["logprobs"] = backend.logprobs([micro_batch(rows[:4]), micro_batch([]), micro_batch(rows[4:])], 3)
    result["reference"] = backend.logprobs([micro_batch(rows)], 1, reference=True, temperature=0.7)
    poisoned = Row(rows[0].ids, rows[0].mask, rows[0].columns, float("nan"), 0)
    result["poisoned"] = run_step(backend, [[poisoned]])
    result["nothing"] = run_step(backend, [[], []])
    result["first"] = run_step(backend, [rows])

    whole, vocab_logprobs.LOGIT_ELEMENTS = vocab_logprobs.LOGIT_ELEMENTS, 4 * VOCAB
    bonus = FsdpBackend(backend_config(qwen, topology=TP2, loss=BONUS), rank, world)
    result["bonus"] = [run_step(bonus, [rows]) for _ in range(2)]
    vocab_logprobs.LOGIT_ELEMENTS = whole
    reported = FsdpBackend(backend_config(qwen, topology=TP2, entropy_metric=True, mixed_precision=True), rank, world)
    result["half"] = run_step(reported, [rows])

    sharded = FsdpBackend(backend_config(qwen, topology=DP2), rank, world)
    run_step(sharded, share(rows, DP2, rank))
    sharded.save(f"{folder}/dp2", wait=False)
    result["next at dp2"] = run_step(sharded, share(random_rows(9, 10), DP2, rank))
    sharded.close()
    backend.load(f"{folder}/dp2")
    result["next at tp2"] = run_step(backend, [random_rows(9, 10)])
    backend.save(f"{folder}/tp2", wait=False)
    result["after tp2"] = run_step(backend, [rows])
    backend.close()
    backend.export_model(f"{folder}/exported")
    return result


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, folder / "run", str(folder))


def one_rank(folder: Path, **changes: Any) -> FsdpBackend:
    return FsdpBackend(backend_config(str(folder / "tied"), **changes), 0, 1)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_a_plain_torch_trainer(folder: Path, two: list[dict[str, Any]], case: str) -> None:
    plain = ReferenceTrainer(str(folder / CASES[case][0]))
    for step in range(STEPS):
        loss, norm = plain.step(random_rows(step, 12))
        for result in two:
            metrics = result["cases"][case][0][step]
            assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
            assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
            wanted = recomputed_mismatch(random_rows(step, 12))
            assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    assert two[0]["cases"][case][0] == two[1]["cases"][case][0], "metrics are global"
    expected = dict(plain.model.named_parameters())
    weights = two[0]["cases"][case][1]
    assert list(weights) == list(expected) and not two[1]["cases"][case][1]
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6)
    assert max(result["cases"][case][2] for result in two) < 2.1, "at most two weights are put together at a time"


def test_logprobs_are_those_of_one_rank_on_the_writer_only(folder: Path, two: list[dict[str, Any]]) -> None:
    backend, rows = one_rank(folder), random_rows(20, 10)
    assert two[1]["logprobs"] == two[1]["reference"] == []
    first, empty, last = two[0]["logprobs"]
    assert len(empty) == 0
    torch.testing.assert_close(torch.cat([first, last]), logprobs_of(backend, micro_batch(rows)), rtol=1e-5, atol=1e-5)
    expected = logprobs_of(backend, micro_batch(rows), temperature=0.7)
    torch.testing.assert_close(two[0]["reference"][0], expected, rtol=1e-5, atol=1e-5)


def test_all_ranks_skip_together(folder: Path, two: list[dict[str, Any]]) -> None:
    first = run_step(one_rank(folder), [random_rows(20, 10)])
    for result in two:
        assert result["poisoned"]["train/skipped"] == result["nothing"]["train/skipped"] == 1
        assert np.isnan(result["poisoned"]["train/grad_norm"]) and result["nothing"]["train/tokens"] == 0
        assert_same_step(result["first"], first)


def test_entropy_of_a_split_vocabulary_has_the_gradient_of_a_whole_one(folder: Path, two: list[dict[str, Any]]) -> None:
    backend, rows = one_rank(folder, loss=BONUS), random_rows(20, 10)
    without = run_step(one_rank(folder, loss=LossConfig(clip_low=0.1, clip_high=0.15)), [rows])
    for step in range(2):
        expected = run_step(backend, [rows])
        assert 0 < expected["train/entropy"] < np.log(VOCAB)
        assert_same_step(two[0]["bonus"][step], expected)
        assert abs(expected["train/grad_norm"] - without["train/grad_norm"]) > 1e-3, "the bonus has a gradient"


def test_bfloat16_follows_float32(folder: Path, two: list[dict[str, Any]]) -> None:
    expected = run_step(one_rank(folder, entropy_metric=True), [random_rows(20, 10)])
    for name in ("train/loss", "train/entropy"):
        assert two[0]["half"][name] == pytest.approx(expected[name], rel=0.02, abs=5e-3)
    assert two[0]["half"]["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)


def test_a_checkpoint_goes_on_at_another_mesh(folder: Path, two: list[dict[str, Any]]) -> None:
    backend, rows = one_rank(folder), random_rows(9, 10)
    run_step(backend, [random_rows(20, 10)])
    expected = run_step(backend, [rows])
    for result in two:
        assert_same_step(result["next at dp2"], expected)
        assert_same_step(result["next at tp2"], expected)
    loaded = one_rank(folder)
    loaded.load(str(folder / "tp2"))
    assert_same_step(run_step(loaded, [random_rows(20, 10)]), two[0]["after tp2"])
    exported = weights_of(FsdpBackend(backend_config(str(folder / "exported")), 0, 1))
    for name, value in weights_of(loaded).items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_two_replicas_of_two_ranks(folder: Path, two: list[dict[str, Any]]) -> None:
    results = run_on_ranks(on_four_ranks, 4, folder / "run4", str(folder))
    plain = ReferenceTrainer(str(folder / "tied"))
    for step in range(STEPS):
        loss, norm = plain.step(random_rows(step, 12))
        for result in results:
            for name in ("steps", "packed"):
                assert result[name][step]["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
                assert result[name][step]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, value in results[0]["weights"].items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=0, atol=2e-6)
    assert [len(result["logprobs"]) for result in results] == [1, 0, 1, 0]
    assert_same_step(results[0]["next of dp2"], two[0]["next at dp2"])
    loaded = one_rank(folder)
    loaded.load(str(folder / "four"))
    assert_same_step(run_step(loaded, [random_rows(9, 10)]), results[0]["next"])


def on_four_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    mesh = Topology(2, tp=2)
    backend = FsdpBackend(backend_config(f"{folder}/tied", topology=mesh), rank, world)
    result: dict[str, Any] = {"steps": three_steps(backend, mesh, rank)}
    result["weights"] = weights_of(backend)
    result["logprobs"] = backend.logprobs([micro_batch(random_rows(rank // 2, 5))], 1)
    backend.save(f"{folder}/four")
    result["next"] = run_step(backend, share(random_rows(9, 10), mesh, rank))
    backend.load(f"{folder}/dp2")
    result["next of dp2"] = run_step(backend, share(random_rows(9, 10), mesh, rank))
    packed = FsdpBackend(backend_config(f"{folder}/tied", topology=mesh, **PACKED), rank, world)
    result["packed"] = three_steps(packed, mesh, rank)
    return result


def test_what_cannot_be_split_is_told(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "moe")
    with pytest.raises(
        ValueError, match="trainer.tp: got 4, expected a divisor of the model's num_key_value_heads = 2"
    ):
        check_split(TrainerConfig(tp=4), config)
    config.num_key_value_heads, config.num_experts = 4, 6
    with pytest.raises(ValueError, match="trainer.tp: got 4, expected a divisor of the model's num_experts = 6"):
        check_split(TrainerConfig(tp=4), config)
    config.num_experts, config.vocab_size = 8, 5
    with pytest.raises(
        ValueError, match="trainer.tp: got 4, expected fewer ranks, .* no token of the model's vocab_size = 5"
    ):
        check_split(TrainerConfig(tp=4), config)
    with pytest.raises(ValueError, match="trainer.tp: got 2, expected 1 for a model of type 'gemma', because only mod"):
        check_split(TrainerConfig(tp=2), GemmaConfig())
