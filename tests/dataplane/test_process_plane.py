"""A data plane in plain processes, without Ray: scripts share it by a text, and it ends with the one that opened it."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import DirectoryLost, InvalidArgument, StoreLost
from headrace.dataplane.factory import DataPlane, connect, connect_async, open_data_plane, open_storage_unit
from headrace.dataplane.listen_address import listen_address, own_addresses
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.planes import put_one
from headrace.tests.hosts import needs_hosts
from headrace.tests.process_pool import has_ended, kill
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes

SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("reward", Kind.PER_SAMPLE, torch.float32)])


@pytest.fixture(scope="module")
def plane() -> Iterator[DataPlane]:
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=16), timeout_s=20)
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane:
        with connect(plane.handle) as client:
            client.register("train", SCHEMA, tasks=["train"])
        yield plane
    assert not list(Path("/dev/shm").glob(f"*{plane.handle.run_id}*"))
    assert all(map(has_ended, plane.processes().values()))


def test_processes_of_every_kind_share_a_plane_by_its_text(plane: DataPlane) -> None:
    text = plane.handle.to_text()
    assert len(text) < 200 and "\n" not in text
    children = [
        multiprocessing.get_context("fork").Process(target=put_one, args=(text, "fork.0")),
        multiprocessing.get_context("spawn").Process(target=put_one, args=(text, "spawn.0")),
    ]
    for child in children:
        child.start()
    writer = (
        "import sys, headrace\n"
        "with headrace.connect(sys.argv[1]) as client:\n"
        "    client.put('train', ['unrelated.0'], {'ids': [[7, 8]], 'reward': [2.0]})\n"
    )
    subprocess.run([sys.executable, "-c", writer, text], check=True, timeout=120)
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    keys = ["fork.0", "spawn.0", "unrelated.0"]

    async def read() -> list[int]:
        async with connect_async(text) as client:
            batch = await client.get_keys("train", keys, ["ids"])
            return batch.jagged("ids").values.tolist()

    assert asyncio.run(read()) == [0, 1, 2, 0, 1, 2, 7, 8]
    with connect(text) as client:
        assert client.clear("train", keys) == 3


def test_a_text_that_is_none_is_refused(plane: DataPlane) -> None:
    text = plane.handle.to_text()
    changed = [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in (11, 40, len(text) - 2)]
    for wrong in ("", "headrace3.", "headrace3.!!", text[:-9], text.upper(), *changed, "tcp://1.2.3.4:5"):
        with pytest.raises(InvalidArgument, match="expected what plane.handle.to_text"):
            connect(wrong)
    with open_data_plane(DataPlaneConfig(), run_id=fresh_run_id(), in_process=True) as own:
        with pytest.raises(ValueError, match="in_process=True, which no other process can use; open it with process=T"):
            own.handle.to_text()
    for arguments in ({"in_process": True, "process": True}, {"listen": "127.0.0.1"}):
        with pytest.raises(ValueError, match="open_data_plane: got"):
            open_data_plane(DataPlaneConfig(), **arguments)  # pyright: ignore[reportArgumentType]


def test_a_process_that_cannot_start_says_why() -> None:
    taken = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=16))
    with pytest.raises(InvalidArgument, match="listen: got '192.0.2.77', which is not an address of this host"):
        open_data_plane(taken, run_id=fresh_run_id(), process=True, listen="192.0.2.77")
    with pytest.raises(StoreLost, match="did not start within 0.01 s"):
        open_data_plane(taken, run_id=fresh_run_id(), process=True, start_timeout_s=0.01)


def test_an_address_that_other_hosts_cannot_reach_is_refused(plane: DataPlane) -> None:
    own = own_addresses()
    for wrong in ("0.0.0.0", "::", "localhost", "", " ", True, None, 7, "192.0.2.77"):
        if wrong != "":  # An empty text means that all clients are on this host.
            with pytest.raises(InvalidArgument, match=r"listen: got .*expected an IP address of this host") as error:
                open_data_plane(process=True, listen=wrong)  # pyright: ignore[reportArgumentType]
            assert all(address in str(error.value) for address in own) and "op=open_data_plane" in str(error.value)
        with pytest.raises(InvalidArgument, match="listen: got"):
            open_storage_unit(plane.handle, listen=wrong)  # pyright: ignore[reportArgumentType]
    assert [listen_address("listen", address) for address in (*own, "127.0.0.1")] == [*own, "127.0.0.1"]


def test_names_that_become_files_and_sockets_are_checked() -> None:
    for wrong in ("r" * 300, "..", "a/b", "", 7):
        with pytest.raises(InvalidArgument, match="run_id: got .*expected up to 64 letters"):
            open_data_plane(in_process=True, run_id=wrong)  # pyright: ignore[reportArgumentType]
    with open_data_plane(DataPlaneConfig(store=StoreConfig(capacity_mib=4)), process=True, run_id="r" * 64) as longest:
        connect(longest.handle).close()
    for wrong in (longest, None, 7, "localhost:123"):
        with pytest.raises(InvalidArgument, match="handle: got"):
            connect(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="config: got 'tcp', expected a DataPlaneConfig"):
        open_data_plane("tcp", process=True)  # pyright: ignore[reportArgumentType]


SCRIPT = """
import os, sys, torch
from headrace import DataPlaneConfig, Field, Kind, Schema, StoreConfig, connect, open_data_plane
config = DataPlaneConfig(store=StoreConfig(kind=sys.argv[2], capacity_mib=16))
plane = open_data_plane(config, run_id=sys.argv[1], process=True)
client = connect(plane.handle)
client.register("train", Schema([Field("ids", Kind.PER_TOKEN, torch.int32)]))
client.put("train", ["a.0"], {"ids": [[1, 2, 3]]})
if not os.fork():  # a child that lives longer, as a stray DataLoader worker
    import time
    os.close(1)
    time.sleep(20)
    os._exit(0)
print(*plane.processes().values(), plane.handle.to_text(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("the script ends", "shm"),
        ("it is killed", "tcp"),
        pytest.param("the script ends", "tcp", marks=pytest.mark.slow),
        pytest.param("it is killed", "shm", marks=pytest.mark.slow),
    ],
)
def test_a_plane_ends_with_its_script(end: str, kind: str) -> None:
    run_id = fresh_run_id()
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, run_id, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdin is not None and script.stdout is not None
    *pids, text = script.stdout.readline().split()
    assert len(pids) == (2 if kind == "tcp" else 1) and not any(has_ended(int(pid)) for pid in pids)
    with connect(text) as client:
        assert client.get_keys("train", ["a.0"], ["ids"]).jagged("ids").values.tolist() == [1, 2, 3]
        if end == "it is killed":
            script.kill()
        script.stdin.close()
        script.wait(60)
        wait_until(lambda: all(has_ended(int(pid)) for pid in pids), "the directory and its unit end with the script")
        wait_until(lambda: not list(Path("/dev/shm").glob(f"*{run_id}*")), "they remove its rows")
        with pytest.raises(DirectoryLost):
            client.status()
    script.stdout.close()


def test_cells_of_a_notebook_can_be_run_again() -> None:
    """Opening a plane again while the old one lives, and registering with other fields."""
    config = DataPlaneConfig(store=StoreConfig(capacity_mib=16))
    planes: list[DataPlane] = []
    for fields in (SCHEMA, Schema([Field("ids", Kind.PER_TOKEN, torch.int64)]), SCHEMA):
        planes.append(open_data_plane(config, in_process=True))
        client = connect(planes[-1].handle)
        client.register("train", fields, redefine=True)
        client.register("train", SCHEMA.subset(["ids"]), redefine=True)
        client.put("train", ["a.0"], {"ids": [[1, 2]]})
        client.register("train", SCHEMA, redefine=True)
        assert client.status().rows == 0
    for plane in planes:
        plane.close()


# ------------------------------------------------------------------ two hosts: namespaces with their own /dev/shm

HOST = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
import torch
from headrace import connect, open_storage_unit
unit = open_storage_unit(sys.argv[1], listen="127.0.0.1")
with connect(sys.argv[1]) as client:
    meta = client.put("train", ["other.0"], {"ids": [torch.arange(1000)], "reward": [1.0]})
    here = client.get_keys("train", ["here.0"], ["ids"]).jagged("ids").values
    print(unit.pid, int.from_bytes(meta.blocks[0].location[:2]), here.tolist() == list(range(500)), flush=True)
    sys.stdin.readline()
    unit.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["here", "there"])
def test_rows_go_from_host_to_host_and_the_death_of_a_unit_takes_its_own(killed: str) -> None:
    needs_hosts()
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=16), timeout_s=20)
    with open_data_plane(config, run_id=fresh_run_id(), process=True, listen="127.0.0.1") as plane:
        with connect(plane.handle) as client:
            client.register("train", SCHEMA)
            client.put("train", ["here.0"], {"ids": [torch.arange(500)], "reward": torch.ones(1)})
            command = ["unshare", "--mount", sys.executable, "-c", HOST, plane.handle.to_text()]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
                assert host.stdin is not None and host.stdout is not None
                pid, unit, read = host.stdout.readline().split()
                assert (unit, read) == ("1", "True"), "it writes to its own unit, and read what is here"
                theirs = client.get_keys("train", ["other.0"], ["ids"])
                assert theirs.jagged("ids").values.tolist() == list(range(1000))
                lost, kept = ("here.0", "other.0") if killed == "here" else ("other.0", "here.0")
                kill(plane.processes()["unit-0"] if killed == "here" else int(pid))
                with pytest.raises(StoreLost, match="storage unit unit-"):
                    client.get_keys("train", [lost], ["ids"])
                assert client.get_keys("train", [kept], ["ids"]).num_rows == 1
                client.put("train", ["new.0"], {"ids": [torch.arange(5)], "reward": torch.ones(1)})
                assert client.get_keys("train", ["new.0"], ["ids"]).num_rows == 1
                host.stdin.write("\n")
                host.stdin.flush()
                host.wait(60)
