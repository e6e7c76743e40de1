"""The directory's service: what its end means for the calls that wait in it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.directory.service import DirectoryService
from headrace.dataplane.errors import DirectoryLost
from headrace.dataplane.stores.local import LocalHost

SCHEMA = Schema([Field("a", Kind.PER_SAMPLE, torch.float32)])


def test_a_close_ends_every_claim_that_waits() -> None:
    """Also those that wait for their turn behind the first of their task."""

    async def close_below_three_claims() -> list[bytes]:
        service = DirectoryService(DataPlaneConfig(store=StoreConfig(kind="local")), LocalHost("run"))
        await service.call("register", requests.encode(requests.Register("p", SCHEMA, (TaskConfig("t"),), 1)))
        claim = requests.encode(requests.Claim(ClaimRows("p", "t", ("a",), 1), 60.0))
        waiting = [asyncio.create_task(service.call("claim", claim)) for _ in range(3)]
        await asyncio.sleep(0)  # each claim takes its place
        await service.close()
        async with asyncio.timeout(10):
            return await asyncio.gather(*waiting)

    for reply in asyncio.run(close_below_three_claims()):
        with pytest.raises(DirectoryLost, match="closed while this call waited"):
            requests.body_of(reply, "claim", 0.0)


def test_queues_of_claims_go_with_their_last_claim() -> None:
    """Claims with other arguments wait in other queues, and a program may give any number of arguments."""

    async def claim_for_many_ranks() -> int:
        service = DirectoryService(DataPlaneConfig(store=StoreConfig(kind="local")), LocalHost("run"))
        task = TaskConfig("t", "rank_aware", {"num_ranks": 9})
        await service.call("register", requests.encode(requests.Register("p", SCHEMA, (task,), 1)))
        claims = [ClaimRows("p", "t", ("a",), 1, arguments={"rank": rank}) for rank in (*range(9), 0)]
        waiting = [
            asyncio.create_task(service.call("claim", requests.encode(requests.Claim(claim, 0.02 * number))))
            for number, claim in enumerate(claims)
        ]
        await asyncio.sleep(0)  # each claim takes its place
        found = len(service._claim_queues)
        waiting[8].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not service._claim_queues
        await service.close()
        return found

    assert asyncio.run(claim_for_many_ranks()) == 9
