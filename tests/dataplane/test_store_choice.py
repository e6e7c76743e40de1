"""Code that a stranger sends to a port is not run, and stores that would run it are refused by default."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.dataplane import store_choice
from headrace.dataplane.block_store import StoreSpec
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import open_data_plane
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.rpc.frames import DirectoryAddress
from headrace.dataplane.store_choice import check_store
from headrace.dataplane.stores.local import LocalHost
from headrace.testing.data_plane import fresh_run_id

EXPLOIT = """
import os, pickle, sys, zmq

class Payload:
    def __reduce__(self):
        return (os.mkdir, (sys.argv[1],))

strangers = []
for address in sys.argv[2:]:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, b"TQ_STORAGE_stranger")
    stranger.setsockopt(zmq.LINGER, 1000)
    stranger.connect("tcp://" + address)
    stranger.send_multipart([b"\\xc1\\xfe\\xed", pickle.dumps(Payload())])
    strangers.append(stranger)
strangers[-1].poll(1500)
"""
"""Sends a storage unit of TransferQueue a pickle that makes a folder. It knows no key, and needs neither Ray nor
Headrace."""

STARTS = (check_store, lambda config: open_data_plane(config, run_id=fresh_run_id(), in_process=True))


def config_of(kind: str, **options: Any) -> DataPlaneConfig:
    return DataPlaneConfig(store=StoreConfig.model_validate({"kind": kind, "capacity_mib": 64}), **options)


def listening(pids: set[int]) -> list[str]:
    """The addresses on which these processes listen."""
    found = [connection for pid in pids for connection in psutil.Process(pid).net_connections("tcp4")]
    return [
        f"{connection.laddr.ip}:{connection.laddr.port}"
        for connection in found
        if connection.status == psutil.CONN_LISTEN
    ]


def attack(marker: Path, addresses: list[str]) -> bool:
    """Return whether the payload ran in a process that listens at one of the addresses."""
    subprocess.run([sys.executable, "-c", EXPLOIT, str(marker), *addresses], timeout=60, check=True)
    return marker.exists()


@pytest.mark.parametrize("start", STARTS, ids=("checked", "opened"))
@pytest.mark.parametrize("kind", ["simple", "mooncake"])
def test_a_store_that_trusts_everybody_does_not_start(kind: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_choice, "ray_address", lambda: "192.0.2.7")
    sentence = f"dataplane.trusted_network: got false with dataplane.store.kind='{kind}', expected true, because "
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            start(config_of(kind))
    check_store(config_of(kind, trusted_network=True))


def test_on_a_host_whose_only_address_is_loopback_the_units_are_kept_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_choice, "ray_address", lambda: "127.0.0.1")
    check_store(config_of("simple"))
    with pytest.raises(ValueError, match="dataplane.trusted_network"):
        check_store(config_of("simple"), one_host=False)


@pytest.mark.parametrize("kind", ["auto", "local", "shm", "ray"])
def test_all_other_stores_ask_for_no_trust(kind: str) -> None:
    check_store(config_of(kind))


@pytest.mark.processes
def test_no_process_of_a_data_plane_runs_what_a_stranger_sends(ray_session: None, tmp_path: Path) -> None:
    """Not even on a run's interface, where the directory of a run on several hosts listens."""
    with open_data_plane(config_of("ray"), run_id=fresh_run_id(), one_host=False) as plane:
        addresses = listening(set(plane.processes().values()))
        assert plane.handle.address is not None
        assert f"{plane.handle.address.host}:{plane.handle.address.port}" in addresses
        assert not attack(tmp_path / "marker", addresses)


@pytest.mark.processes
def test_a_unit_of_transferqueue_runs_what_a_stranger_sends(ray_session: None, tmp_path: Path) -> None:
    """This is why it is refused by default, and shows that the attack of the test above can succeed."""
    config = config_of("simple", trusted_network=True)
    with open_data_plane(config, run_id=fresh_run_id(), in_process=True) as plane:
        units: Any = plane.handle.store.address["units"]
        assert attack(tmp_path / "marker", listening({pid for _, _, pid, _, _ in units}))


def test_a_part_that_a_block_does_not_have_is_refused() -> None:
    host = LocalHost("run")
    host.allocate(1, 64)
    host.write(1, [np.zeros(8, np.uint8)])
    for part in (-1, 1):
        with pytest.raises(ValueError, match=f"block 1: got part {part}, expected one below 1"):
            host.read(1, (part,))


@pytest.mark.parametrize(
    ("integrity", "kind", "host", "verified"),
    [
        ("auto", "shm", "", False),
        ("auto", "ray", "", False),
        ("auto", "tcp", "10.0.0.1", False),  # its messages have checksums of their own
        ("auto", "ray", "10.0.0.1", True),
        ("auto", "mooncake", "10.0.0.1", True),
        ("verify", "shm", "", True),
        ("off", "simple", "10.0.0.1", False),
    ],
)
def test_rows_that_cross_hosts_are_checked(integrity: str, kind: str, host: str, verified: bool) -> None:
    config = DataPlaneConfig.model_validate({"integrity": integrity})
    address = DirectoryAddress("name", host, 1)
    handle = DataPlaneHandle("run", config, StoreSpec(kind, "run", {}), "", address, "directory")
    assert handle.verifies_blocks is verified
    assert dataclasses.replace(handle, address=None).verifies_blocks is (integrity == "verify"), "in one process"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("simple", "got true with dataplane.store.kind='simple', whose own connections cannot be encrypted, expected"),
        ("ray", "kind='ray', whose rows travel by Ray's own connections, expected RAY_USE_TLS=1 on all hosts"),
        ("tcp", r"dataplane.tls needs cryptography, which is not installed: pip install 'headrace\[tls\]'"),
    ],
)
def test_what_cannot_be_encrypted_is_refused(
    kind: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    monkeypatch.setattr(store_choice.importlib.util, "find_spec", lambda name: None)
    config = DataPlaneConfig(
        store=StoreConfig(kind=kind), key_file=str(tmp_path / "key"), tls=True, trusted_network=True
    )
    with pytest.raises(ValueError, match=sentence):
        check_store(config, one_host=False)
    assert not (tmp_path / "key").exists()
