"""What the driver sends of a step's plan: every rank its sizes, receipts only to those that read or write."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import testing
from headrace.actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS
from headrace.actors.train.microbatch_plan import Budget
from headrace.actors.train.step_rows import TrainShard
from headrace.codecs import messages
from headrace.codecs.batch import Batch, Jagged
from headrace.dataplane.meta import KVBatchMeta
from headrace.trainers.config.config import Config
from headrace.trainers.grpo.train_workers import PlanRules, TrainWorkers, plan_step

ROWS = 256


@pytest.fixture(scope="module")
def meta() -> Iterator[KVBatchMeta]:
    """A step's receipt, as a claim gives it."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 900, ROWS)
    tokens = int(lengths.sum())
    dtypes = {name: ROLLOUT_SCHEMA[name].dtype for name in TRAIN_FIELDS}
    columns = {name: Jagged(torch.zeros(tokens, dtype=dtype), lengths) for name, dtype in dtypes.items()}
    batch = Batch(ROLLOUT_SCHEMA.subset(TRAIN_FIELDS), ROWS, columns)
    tags = {
        "reward": rng.random(ROWS).astype(np.float32),
        "valid": (np.arange(ROWS) % 7 > 0).astype(np.float32),
        "response_length": (lengths // 2).astype(np.float32),
    }
    with testing.plane(ROLLOUT_SCHEMA, group_size=8) as client:
        keys = [f"{row // 8:x}.{row % 8}" for row in range(ROWS)]
        got = client.put("train", keys, batch, versions=3, tags=tags)
        yield got.with_tags(advantage=rng.normal(size=ROWS).astype(np.float32))


def ship(meta: KVBatchMeta, **sections: dict[str, Any]) -> tuple[list[TrainShard], int]:
    """(each rank's shard, bytes in all)."""
    config = Config.model_validate(sections)
    masked = config.algorithm.mask_truncated
    rules = PlanRules.of(config.trainer, config.loss, Budget(4096), mask_truncated=masked)
    shards = plan_step(rules, meta, 5, traced=False)
    sent = [messages.encode(shard) for shard in shards]
    return [messages.decode(message, TrainShard) for message in sent], sum(len(message) for message in sent)


def test_every_rank_gets_the_data_sources_of_its_rows(meta: KVBatchMeta) -> None:
    source = (np.arange(ROWS) // 8 % 3 - 1).astype(np.float32)
    shards, _ = ship(meta.with_tags(teacher_source=source), trainer={"dp": 2, "tp": 2})
    for shard, leader in zip(shards, (0, 0, 2, 2), strict=True):
        keys = KVBatchMeta.from_bytes(shards[leader].meta or b"").keys
        assert shard.sources.tolist() == [source[meta.keys.index(key)] for key in keys]
        part, rows = shard.of_source(1)
        assert int(part.sizes.sum()) == len(rows) == int((shard.sources == 1).sum()) > 0
        assert len(part.sizes) == len(shard.sizes) and part.digest != shard.digest
        assert (part.meta is None) == (shard.meta is None)
        whole, every = shard.of_source(None)
        assert whole is shard and len(every) == len(keys)
    assert len(ship(meta, trainer={})[0][0].sources) == 0


def test_siblings_get_sizes_and_leaders_the_receipt(meta: KVBatchMeta) -> None:
    shards, num_bytes = ship(meta, trainer={"dp": 2, "tp": 2})
    assert [shard.meta is not None for shard in shards] == [True, False, True, False]
    assert num_bytes / ROWS < 40
    assert len({shard.digest for shard in shards}) == 1 and {shard.step for shard in shards} == {5}
    for leader, sibling in ((0, 1), (2, 3)):
        assert shards[leader].sizes.tolist() == shards[sibling].sizes.tolist()
        receipt = KVBatchMeta.from_bytes(shards[leader].meta or b"")
        assert len(receipt) == shards[leader].sizes.sum() and set(receipt.tags) == {"advantage"}
    every, more_bytes = ship(meta, trainer={"dp": 2, "tp": 2, "fetch": "independent"})
    assert all(shard.meta is not None for shard in every) and more_bytes > 1.5 * num_bytes


def test_writers_of_a_pipeline_get_the_receipt_too(meta: KVBatchMeta) -> None:
    shards, _ = ship(meta, trainer={"backend": "megatron", "tp": 2, "pp": 2})
    assert [shard.meta is not None for shard in shards] == [True, False, True, False]


def test_tokens_of_rows_are_shipped_with_an_auxiliary_loss(meta: KVBatchMeta) -> None:
    [shard], _ = ship(meta, trainer={"moe": {"aux_loss_coef": 0.01}})
    receipt = KVBatchMeta.from_bytes(shard.meta or b"")
    trained = dict(zip(meta.keys, meta.tags["response_length"] * (meta.tags["valid"] > 0), strict=True))
    assert receipt.tags["row_tokens"].tolist() == [trained[key] for key in receipt.keys]
    assert 0 < (receipt.tags["row_tokens"] == 0).sum() < len(receipt)


def test_tokens_of_groups_are_shipped_when_the_loss_asks(meta: KVBatchMeta) -> None:
    [shard], _ = ship(meta, loss={"aggregation": "prompt"})
    receipt = KVBatchMeta.from_bytes(shard.meta or b"")
    trained = meta.tags["response_length"] * (meta.tags["valid"] > 0)
    position = {key: row for row, key in enumerate(meta.keys)}
    for key, told in zip(receipt.keys, receipt.tags["group_tokens"], strict=True):
        group = position[key] // 8
        assert told == trained[8 * group : 8 * group + 8].sum()


def test_masked_rows_count_in_means_over_rows_and_failed_rows_do_not(meta: KVBatchMeta) -> None:
    masked = {"mask_truncated": True}
    for kind in ("sequence", "sequence_sum", "prompt"):
        [shard], _ = ship(meta, loss={"aggregation": kind}, algorithm=masked)
        receipt = KVBatchMeta.from_bytes(shard.meta or b"")
        valid = dict(zip(meta.keys, meta.tags["valid"], strict=True))
        assert receipt.tags["counted"].tolist() == [valid[key] for key in receipt.keys]
    [shard], _ = ship(meta, loss={"aggregation": "token"}, algorithm=masked)
    assert "counted" not in KVBatchMeta.from_bytes(shard.meta or b"").tags


@pytest.mark.parametrize(
    ("run", "spaces", "prefers"), [({}, "ab", True), ({"deterministic": True}, "ab", False), ({}, "aa", False)]
)
def test_ranks_on_several_hosts_get_rows_of_their_own(
    meta: KVBatchMeta, run: dict[str, Any], spaces: str, prefers: bool
) -> None:
    handles: Any = [SimpleNamespace(info=SimpleNamespace(space=space)) for space in spaces]
    host = np.array(["b", "a", "elsewhere", "b", "a"], dtype=object)[np.arange(ROWS) // 8 % 5]
    config = Config.model_validate({"trainer": {"dp": 2, "packing": "packed"}, "run": run})
    stages: Any = None
    hosts = TrainWorkers.of(config, handles, stages, lambda asked: host[: len(asked)])._row_hosts(meta)
    assert (hosts is not None) == prefers
    if hosts is not None:
        rules = PlanRules.of(config.trainer, config.loss, Budget(4096), mask_truncated=False)
        receipts = [
            KVBatchMeta.from_bytes(shard.meta or b"") for shard in plan_step(rules, meta, 5, traced=False, hosts=hosts)
        ]
        for receipt, space in zip(receipts, spaces, strict=True):
            own = [host[meta.keys.index(key)] for key in receipt.keys]
            assert own.count(space) > 0.7 * len(own)


def test_every_rank_knows_where_the_smallest_pictures_are(meta: KVBatchMeta) -> None:
    tokens = np.where(np.arange(ROWS) % 5 == 2, 900.0 - np.arange(ROWS), 0.0).astype(np.float32)
    shards, _ = ship(meta.with_tags(picture_tokens=tokens), trainer={"dp": 2, "tp": 2})
    [picture] = {shard.picture for shard in shards}
    assert picture is not None and KVBatchMeta.from_bytes(picture).keys == (meta.keys[252],)
    for other in (meta, meta.with_tags(picture_tokens=0 * tokens)):
        assert {shard.picture for shard in ship(other, trainer={"dp": 2})[0]} == {None}
