"""Runs over two hosts of one name on a network that others read: what they find there, and what protects it."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.bench.hosts.namespaces import Host
from headrace.dataplane.security.run_key import key_from_file
from headrace.tests.dataplane.security.ray_recipe import certificates
from headrace.tests.hosts import ENVIRONMENT, PORT, finish, hosts, ray_cluster
from headrace.tests.runs import cli_runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]
READER = """
import socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
link.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE, so that no packet is lost
link.bind(("eth0", 0))
print("reads", flush=True)
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(link.recv(1 << 17))
"""
IN_CLEAR = (b"rollout_logprobs", b"layers.0.self_attn")
"""Names that clients tell the directory of rows, and those of weights that control links carry."""


@contextmanager
def read_packets(host: Host, path: Path) -> Iterator[None]:
    """All packets that come to and go from a host are written to `path`."""
    command = host.command(sys.executable, "-c", READER, str(path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
        yield
        # The reader itself ends with the host.
        reader.kill()


def train(near: Host, run_dir: Path, environment: Mapping[str, str], *overrides: str) -> tuple[int, str]:
    short = ("validation.every=0", "warmup.corpus=none", "dataplane.store.capacity_mib=64", "algorithm.steps=2")
    address = f"resources.ray_address={near.address}:{PORT}"
    command = cli_runs.command(run_dir, *short, address, *overrides)
    return finish(near, command, run_dir.parent, 280, environment)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("protected", [False, True])
def test_a_reader_of_packets_finds_no_secret_and_no_rows(tmp_path: Path, protected: bool) -> None:
    """The hosts have one name, the train worker is on one and the engine on the other. The first case shows that what
    the second one does not find would be found."""
    key_file, token = tmp_path / "key", secrets.token_hex(32)
    environment = {**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    settings = [f"dataplane.key_file={key_file}", f"dataplane.tls={str(protected).lower()}"]
    with hosts(2, name="node") as members:
        if protected:
            environment |= certificates([host.address for host in members], tmp_path)
        with read_packets(members[1], tmp_path / "packets"):
            ray_cluster(members, (1, 1), environment=environment)
            code, output = train(members[0], tmp_path / "run", environment, *settings)
    assert code == 0, output
    assert [line["policy/version"] for line in cli_runs.steps_of(tmp_path / "run")] == [1, 2]
    assert ("Ray's connections between the hosts are not encrypted" in output) is not protected
    packets = (tmp_path / "packets").read_bytes()
    assert len(packets) > 1 << 20
    run_id = json.loads((tmp_path / "run" / "actors.json").read_text())["run_id"]
    for secret in (bytes.fromhex(key_file.read_text()), bytes(key_from_file(str(key_file), run_id, tls=False))):
        assert secret not in packets and secret.hex().encode() not in packets
    model = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    some_weights = model[len(model) // 2 :][:48]
    assert [one in packets for one in (token.encode(), some_weights, *IN_CLEAR)] == [not protected] * 4
