"""The replica reader on GPUs: columns arrive on each rank's device, over NCCL or, with pipeline stages, over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.actors.protocols import TRAIN_FIELDS
from headrace.actors.train.topology import Topology
from headrace.codecs.batch import Jagged
from headrace.dataplane.factory import connect
from headrace.tests.actors.train.replica_ranks import (
    PARTITION,
    Step,
    content,
    data_plane,
    put_rows,
    reader_of,
    run_on,
    ship,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FIRST, LATER = ("input_ids", "response_mask"), "prev_logprobs"
LENGTHS = [int(length) for length in np.random.default_rng(6).integers(0, 300, 64)]


def passes(rank: int, steps: list[Step]) -> list[Any]:
    """Per step the log-prob and the train pass, with work of the rank's own in between, as plain data."""
    found = []
    for step in steps:
        with reader_of(rank, step) as (reader, client):
            device = torch.device("cuda", rank) if step.device == "cuda" else torch.device("cpu")
            seen, busy = [], torch.randn(512, 512, device=device)
            for number, fields in enumerate((FIRST, (*TRAIN_FIELDS, LATER))):
                for micro in reader.stream(fields):
                    busy = torch.tanh(busy @ busy)
                    assert all(micro.batch.jagged(name).values.device == device for name in micro.batch)
                    seen.append(content(micro))
                if not number and rank == step.topology.writer(0):
                    write(rank, step, reader, client)
                dist.barrier()
            found.append((seen, reader.take_metrics().broadcast_bytes))
            dist.barrier()
    return found


def write(rank: int, step: Step, reader: Any, client: Any) -> None:
    meta = step.receipt(rank)
    for index, rows in enumerate(step.shards[rank].ranges()):
        if len(rows):
            column = Jagged(torch.full((int(meta.lengths[rows].sum()),), index / 2), meta.lengths[rows])
            client.put(PARTITION, [meta.keys[row] for row in rows], {LATER: column})
            reader.keep(index, LATER, column)


def test_rows_arrive_on_each_rank_s_gpu(tmp_path: Path) -> None:
    meshes = [Topology(1, tp=2), Topology(1, cp=2), Topology(1, pp=2)]
    results: dict[str, list[Any]] = {}
    with data_plane("shm") as handle, connect(handle, name="driver") as client:
        for device in ("cuda", "cpu"):
            steps = []
            for number, mesh in enumerate(meshes):
                meta = put_rows(client, LENGTHS, f"{device}{number}-r")
                steps.append(replace(ship(handle, meta, mesh, budget=2000), device=device))
            results[device] = run_on(passes, 2, tmp_path / device, steps)
        client.clear(PARTITION)
    for on_gpu, on_cpu in zip(results["cuda"], results["cpu"], strict=True):
        for (seen, sent), (wanted, sent_by_gloo) in zip(on_gpu, on_cpu, strict=True):
            assert len(seen) == len(wanted) > 4
            assert abs(sent - sent_by_gloo) < 200  # the headers number other groups
            for got, expected in zip(seen, wanted, strict=True):
                assert {**got, "groups": None} == {**expected, "groups": None}
