"""Measures what authentication and TLS add to a step of rows over sockets: put by groups of 8, get, and clear."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ...codecs.schema import Field, Kind, Schema
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.factory import connect, open_data_plane
from ...dataplane.handle import DataPlaneHandle

COSTS = ("hosts.auth_cost", "hosts.tls_cost")
"""Names of the figures."""
ROWS, GROUP, TOKENS = 64, 8, 8192
_SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("log_probs", Kind.PER_TOKEN, torch.float32)])


def measure_encryption(repeats: int, tell: Callable[[str], None]) -> dict[str, float]:
    """Return the figures for summary.json.

    `hosts.auth_cost` is the time of a step whose client connects and proves the key first, divided by that of a step
    over open connections; so it contains the time of TCP to connect. `hosts.tls_cost` is the time of a step over
    encrypted connections, divided by that over plain ones. All run in turn.
    """
    tell("a step over plain, new and encrypted connections")
    seconds: dict[str, list[float]] = {"plain": [], "new": [], "tls": []}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        handles: dict[bool, DataPlaneHandle] = {}
        clients: dict[bool, DataPlaneClient] = {}
        for tls in (False, True):
            store = StoreConfig(kind="tcp", capacity_mib=64)
            config = DataPlaneConfig(store=store, key_file=str(Path(folder) / "key"), tls=tls)
            plane = stack.enter_context(open_data_plane(config, process=True, listen="127.0.0.1"))
            assert plane.handle.address is not None
            # A client that does not find the Unix socket uses TCP, as on another host.
            address = replace(plane.handle.address, local="none")
            handles[tls] = replace(plane.handle.over_sockets(), address=address)
            clients[tls] = stack.enter_context(connect(handles[tls]))
            clients[tls].register("rows", _SCHEMA, ("read",))
        for _ in range(repeats):
            seconds["plain"].append(_timed(lambda: _step(clients[False])))
            seconds["new"].append(_timed(lambda: _connected_step(handles[False])))
            seconds["tls"].append(_timed(lambda: _step(clients[True])))
    plain = statistics.median(seconds["plain"])
    return dict(zip(COSTS, (statistics.median(seconds[kind]) / plain for kind in ("new", "tls")), strict=True))


def _timed(does: Callable[[], None]) -> float:
    started = time.perf_counter()
    does()
    return time.perf_counter() - started


def _connected_step(handle: DataPlaneHandle) -> None:
    with connect(handle) as client:
        _step(client)


def _step(client: DataPlaneClient) -> None:
    keys = [f"{number // GROUP}.{number % GROUP}" for number in range(ROWS)]
    ids = [torch.full((TOKENS,), number, dtype=torch.int32) for number in range(ROWS)]
    for at in range(0, ROWS, GROUP):
        group = ids[at : at + GROUP]
        client.put("rows", keys[at : at + GROUP], {"ids": group, "log_probs": [one.float() for one in group]})
    found = client.get_keys("rows", keys, ["ids", "log_probs"])
    assert torch.equal(found.jagged("ids").values, torch.cat(ids))
    client.clear("rows", keys)
