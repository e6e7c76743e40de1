"""The server that forks test processes outlives clients that leave at any moment, and is replaced when it has died."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.tests import forks

pytestmark = pytest.mark.processes


def echo(folder: Path) -> str:
    script = folder / "script.py"
    script.write_text("print('here')")
    code, output = forks.run([str(script)], folder, os.environ, 60.0)
    assert code == 0, output
    return output.strip()


def test_clients_that_leave_do_no_harm_and_a_dead_server_is_replaced(tmp_path: Path) -> None:
    assert echo(tmp_path) == "here"
    server = forks._server
    assert server is not None
    script = tmp_path / "ends.py"
    script.write_text("")
    for _ in range(50):  # each leaves about when its process ends
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(os.environ[forks._ADDRESS])
        forks._request([str(script)], dict(os.environ), str(tmp_path), [1, 2]).close()
    assert echo(tmp_path) == "here" and server.poll() is None
    address = os.environ[forks._ADDRESS]
    server.kill()
    server.wait()
    with pytest.warns(UserWarning, match="the fork server has died with exit code -9"):
        assert echo(tmp_path) == "here"
    assert forks._server is not server and os.environ[forks._ADDRESS] == address, "workers of a running Ray know it"
