"""Strangers who connect to the port of a gloo group while it forms get nothing from it, and are told."""

from __future__ import annotations

import contextlib
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import psutil
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo

from headrace.actors.process.group_proof import prove_members
from headrace.tests.waiting import wait_until

KEY = b"k" * 32


def formed(store: HashStore, rank: int) -> Any:
    options: Any = cast(Any, ProcessGroupGloo)._Options()
    # Of two members, the one with the smaller address listens for the other.
    options._devices = [ProcessGroupGloo.create_device(hostname=f"127.0.0.{1 + rank}")]
    options._timeout, options._threads = timedelta(seconds=2), 2
    return ProcessGroupGloo(store, rank, 3, options)


def failure(group: Any, key: bytes = KEY, name: str = "weights-1") -> str:
    try:
        prove_members(group, key, name)
    except ConnectionError as error:
        return str(error)
    return ""


def listening() -> set[int]:
    return {end.laddr.port for end in psutil.Process().net_connections("tcp") if end.status == psutil.CONN_LISTEN}


def test_members_of_a_run_prove_it_and_others_do_not() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        groups = list(pool.map(formed, [store] * 3, range(3)))
        assert list(pool.map(failure, groups)) == [""] * 3
        told = list(pool.map(failure, groups, [KEY, KEY, b"s" * 32]))
    assert "in the place of rank 2 does not know the run's key" in told[0] and told[0] == told[1].replace(
        "rank 1", "rank 0"
    )


def test_who_takes_the_place_of_a_member_gets_nothing_from_the_group() -> None:
    store, before = HashStore(), listening()
    with ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(formed, store, 0)
        wait_until(lambda: listening() != before)
        taken = []
        for port in listening() - before:
            for number in range(6):  # gloo gives its connections small numbers.
                taken.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)))
                taken[-1].sendall(struct.pack("<q", number))
        others = [pool.submit(formed, store, rank) for rank in (1, 2)]
        told = list(pool.map(failure, [first.result(20), *(other.result(20) for other in others)]))
    assert "rank 0 got no proof of the run's key from each other rank" in told[0]
