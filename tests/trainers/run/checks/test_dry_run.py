"""What a dry run says about a mesh: its workers, leaders, memory, microbatches, and whether it can split the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from headrace.actors.engines.config import ModelConfig, RouterReplayConfig
from headrace.actors.rollout.config import RolloutConfig
from headrace.trainers.base_model.prepare import TINY_QWEN3, check_model, sizes_in_store
from headrace.trainers.cluster.gpu_memory import host_bytes, trained_bytes
from headrace.trainers.cluster.places.placement_plan import PlacementRequest
from headrace.trainers.config.config import AlgorithmConfig, Config
from headrace.trainers.config.load import build_config
from headrace.trainers.config.store_demand import StoreDemand
from headrace.trainers.errors import UserError
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.run.checks import dry_run
from headrace.trainers.run.checks.dry_run import PlannedProcess, check_host_memory, describe, placements


def config(**trainer: Any) -> Config:
    sizes = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 10}}
    return Config.model_validate({"trainer": trainer, **sizes})


def processes(config: Config) -> list[PlannedProcess]:
    request, kinds = PlacementRequest.of(config), (config.rollout.engine, config.trainer.backend)
    return placements(request, config.dataplane.store, *kinds)


def test_a_worker_for_each_rank_of_the_mesh() -> None:
    workers = [place.what for place in processes(config(dp=2, tp=2)) if place.name.startswith("train")]
    assert workers == [f"backend fsdp, dp {dp} tp {tp}" + ", leader" * (tp == 0) for dp in range(2) for tp in range(2)]
    mesh = config(backend="megatron", pp=2, cp=2)
    assert [place.what for place in processes(mesh)][-1] == "backend megatron, dp 0 cp 1 pp 1"
    assert processes(config(dp=2))[-1].what == "backend fsdp"


def test_microbatches_count_padded_rows() -> None:
    text = describe(config(dp=2, tp=4, tokens_per_microbatch=280))
    assert "2 replica(s) of 4 rank(s) x 128 rows, at most 13 microbatch(es) of 280 tokens each" in text


def trained(config: Config, params: int = 1000) -> int:
    return trained_bytes(config.trainer, params, with_reference=config.with_reference)


def on_host(config: Config, *, gpus: bool, params: int = 1000) -> int:
    return host_bytes(config.trainer, params, with_reference=config.with_reference, gpus=gpus)


def test_memory_as_the_backend_splits_it() -> None:
    assert trained(config(dp=2, tp=2)) == 4000
    assert trained(config(backend="megatron", dp=2, tp=2, pp=2)) == 3000
    assert trained(config(backend="megatron", dp=2, tp=2, distributed_optimizer=False)) == 8000


def test_memory_as_the_optimizer_keeps_its_moments() -> None:
    sizes = [trained(config(optimizer=kind)) for kind in ("adamw", "adamw_bf16", "adamw_8bit", "muon")]
    assert sizes == [16_000, 12_000, 10_031, 12_000]
    moved = config(dp=2, optimizer="adamw_8bit", offload_optimizer=True)
    assert trained(moved) == 4000 and on_host(moved, gpus=True) == 1015
    assert on_host(moved, gpus=False) == 5015, "without GPUs all is in host memory"


def test_host_memory_is_that_of_a_rank_s_own_pieces() -> None:
    kept = config(dp=4, tp=2).model_copy(update={"loss": LossConfig(kl_coef=0.1)})
    assert on_host(kept, gpus=False) == trained(kept) == 1000 * 4 * 5 // 8
    half = kept.model_copy(update={"trainer": kept.trainer.model_copy(update={"mixed_precision": True})})
    assert trained(half) == 1000 * (4 * 4 + 2) // 8, "a reference model in bfloat16"
    assert on_host(kept, gpus=True) == 1000 * 4 // 8, "the reference alone, and of that its pieces"
    alone = config().model_copy(update={"loss": LossConfig(kl_coef=0.1)})
    assert on_host(alone, gpus=True) == 0, "one rank has it on its GPU"
    offloaded = config(dp=4, tp=2, offload=True)
    assert on_host(offloaded, gpus=True) == 1000 * 4 * 4 // 8
    assert "host memory" in describe(config(dp=2))
    check_host_memory(offloaded.trainer, 1000, 16_000, model="m", with_reference=False)
    with pytest.raises(UserError, match=r"1,000 parameters, expected at most 15.6 KiB .* 8 train worker.s. of 2.0 KiB"):
        check_host_memory(offloaded.trainer, 1000, 15_999, model="m", with_reference=False)


@pytest.mark.parametrize(
    ("model", "trainer", "sentence"),
    [
        ({}, {"tp": 3}, "trainer.tp: got 3, expected a divisor of the model's num_attention_heads = 4"),
        ({}, {"backend": "megatron", "tp": 3}, "trainer.tp: got 3, expected a divisor of the model's num_att"),
        ({"num_key_value_heads": 1}, {"tp": 2}, "expected a divisor of the model's num_key_value_heads = 1"),
        ({"vocab_size": 5}, {"tp": 4}, "trainer.tp: got 4, expected fewer ranks, because one of them would hold no"),
        ({"model_type": "gpt2"}, {"tp": 2}, "trainer.tp: got 2, expected 1 for a model of type 'gpt2', because transf"),
        ({}, {"dp": 2, "ep": 2}, "trainer.ep: got 2, expected 1 for a model without experts"),
        ({"num_local_experts": 3}, {"dp": 2, "ep": 2}, "trainer.ep: got 2, expected a divisor of the model's num_exp"),
        ({}, {"backend": "megatron", "pp": 4}, "trainer.pp: got 4, expected a divisor of the model's num_hidden_lay"),
        ({}, {"backend": "megatron", "dp": 2, "ep": 2}, "trainer.ep: got 2, expected 1 for a model without experts"),
        ({"model_type": "gemma"}, {"backend": "megatron"}, "expected 'fsdp' for a model of type 'gemma', because"),
        (
            {"model_type": "gpt_oss"},
            {"backend": "megatron", "tp": 2},
            "trainer.ep: got 1, expected 2 or more for",
        ),
        ({"num_local_experts": 3}, {"tp": 2}, "trainer.tp: got 2, expected a divisor of the model's num_experts = 3"),
    ],
)
def test_a_mesh_that_cannot_split_the_model(
    tmp_path: Path, model: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY_QWEN3, **model}))
    refused = config(**trainer).model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    with pytest.raises(UserError) as caught:
        describe(refused)
    assert sentence in str(caught.value)


def test_only_a_model_that_is_here_is_checked() -> None:
    with pytest.raises(UserError, match="trainer.tp: got 3, expected a divisor of the model's num_attention_heads = 4"):
        describe(config(tp=3))
    elsewhere = config(tp=3).model_copy(update={"model": ModelConfig(path="org/model")})
    assert "org/model: read when the run starts" in describe(elsewhere)
    scripted = config(tp=3, backend="scripted")
    assert "1 replica(s) of 3 rank(s)" in describe(scripted)


def test_async_without_a_correction_is_said_in_one_line() -> None:
    stale = config().model_copy(update={"algorithm": AlgorithmConfig(mode="async", max_staleness=2)})
    plain = stale.model_copy(update={"loss": LossConfig(kind="reinforce")})
    note = describe(plain).splitlines()[-1]
    assert note.startswith(
        "note: algorithm.mode=async with loss.kind=reinforce trains on rows of up to 2 older policies"
    )
    assert "note:" not in describe(stale)


def test_the_memory_of_a_shared_gpu_is_shown_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "gpu_sizes", lambda: (80 << 30,))
    monkeypatch.setattr(dry_run, "count_gpus", lambda: 1)
    chosen = build_config(
        {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 16}, "validation": {"every": 0}}
    )
    text = describe(chosen)
    [trainer] = [line for line in text.splitlines() if line.startswith("  trainer  ")]
    assert all(part in trainer for part in ("weights", "gradients", "optimizer", "activations", "computation"))
    assert "both resident" in text and "in turns" in text
    assert "share GPUs and both stay in memory, because together they need about" in text
    monkeypatch.setattr(dry_run, "gpu_sizes", lambda: ())
    assert "both resident" not in describe(chosen)


def test_a_tenant_of_a_pool_is_shown_with_its_shards() -> None:
    sections = {
        "pool": {"address": "10.0.0.1:6379", "weight": 2},
        "resources": {"trainer_gpus": [0, 1], "rollout_gpus": [0, 1, 2, 3]},
        "rollout": {"engine": "vllm", "num_engines": 2, "tp": 2, "num_actors": 1, "max_new_tokens": 16},
        "data": {"max_prompt_tokens": 16},
        "trainer": {"dp": 2},
        "algorithm": {"mode": "async"},
        "sync": {"in_flight": "keep"},
    }
    lines = describe(build_config(sections)).splitlines()
    first = lines.index("GPUs") + 1
    assert lines[first : first + 4] == [
        "  of pool pool at 10.0.0.1:6379, with weight 2",
        "  training         GPUs 0, 1",
        "  shard 0          GPUs 0, 1: engine 0, asleep while this run trains",
        "  shard 1          GPUs 2, 3: engine 1",
    ]


MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "model_type": "qwen3_moe"}


def with_routes(folder: Path, sizes: dict[str, Any], **sections: Any) -> Config:
    (folder / "config.json").write_text(json.dumps({**TINY_QWEN3, **sizes}))
    plain = config().model_copy(update={"model": ModelConfig(path=str(folder))})
    return plain.model_copy(update={"router_replay": RouterReplayConfig(enabled=True), **sections})


def test_routes_are_counted_in_the_store_and_in_vllms_host_memory(tmp_path: Path) -> None:
    """Two layers of 8 experts: 16 bytes per token; a slot of keys and values takes 2 x 2 x 4 x 32 x 4 bytes."""
    plain = describe(with_routes(tmp_path, MOE, router_replay=RouterReplayConfig()))
    text = describe(with_routes(tmp_path, MOE))
    assert "  routes           16 bytes per token, beside 9 without them" in text and "routes  " not in plain
    assert "route buffer" not in text
    vllm = RolloutConfig(engine="vllm", kv_cache=256, max_new_tokens=config().rollout.max_new_tokens)
    text = describe(with_routes(tmp_path, MOE, rollout=vllm))
    assert "  route buffer     2.0 MiB of host memory in each engine" in text


def test_router_replay_needs_a_model_with_experts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected false, because the model has no experts"):
        describe(with_routes(tmp_path, {}))


def test_router_replay_fetches_the_config_of_a_hub_id_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def no_network(hub_id: str, name: str) -> None:
        raise OSError("no\nnetwork")

    def download(hub_id: str, name: str) -> None:
        fetched.append(hub_id)
        cache = tmp_path / "cache" / "models--org--model"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("a1")
        (cache / "snapshots" / "a1").mkdir(parents=True)
        (cache / "snapshots" / "a1" / name).write_text(json.dumps({**TINY_QWEN3, **MOE}))

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    elsewhere = with_routes(tmp_path, MOE, model=ModelConfig(path="org/model"))
    with pytest.raises(UserError, match=r"got true with model.path='org/model', expected a folder .*\(no network\)"):
        describe(elsewhere)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert "16 bytes per token" in describe(elsewhere) and fetched == ["org/model"]


def test_a_store_without_room_for_routes_is_refused(tmp_path: Path) -> None:
    many = {**MOE, "num_hidden_layers": 48}
    plain = with_routes(tmp_path, many, router_replay=RouterReplayConfig())
    small = plain.dataplane.model_copy(update={"store": plain.dataplane.store.model_copy(update={"capacity_mib": 1})})
    describe(plain.model_copy(update={"dataplane": small}))
    with pytest.raises(UserError, match="dataplane.store.capacity_mib: got 1, expected at least"):
        describe(with_routes(tmp_path, many, dataplane=small))


def test_the_store_has_room_for_pictures(tmp_path: Path) -> None:
    vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    shown: dict[str, Any] = {"data": {"max_prompt_tokens": 512, "images": {"enabled": True}}}
    said = "without pictures, whose size the model's config.json does not give; 1024 MiB in all"
    (tmp_path / "config.json").write_text(json.dumps({**TINY_QWEN3, "max_position_embeddings": 1024}))
    given = {**shown, "model": {"path": str(tmp_path)}}
    assert said in describe(Config.model_validate(given))
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY_QWEN3, "max_position_embeddings": 1024, "vision_config": vision})
    )
    config = Config.model_validate(given)
    assert ", with pictures; 1024 MiB in all" in describe(config)
    sizes = sizes_in_store(config.router_replay, config.data.images, config.model)
    text, prompts = StoreDemand.of(config).step_bytes, config.algorithm.prompts_per_step
    assert StoreDemand.of(config, *sizes).step_bytes - text == prompts * 512 * 18816, (
        "one picture of 512 tokens a prompt"
    )
    check_model(config)
    small = Config.model_validate({**given, "dataplane": {"store": {"capacity_mib": 256}}})
    with pytest.raises(UserError, match=r"capacity_mib: got 256, .*, and pictures of up to 512 tokens for each"):
        check_model(small)
