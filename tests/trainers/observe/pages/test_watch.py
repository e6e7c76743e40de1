"""Tests the live page: what is new since a mark, who gets an answer, and how the command begins and ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.trainers.errors import UserError
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.pages.watch import RunReader, WatchServer


def write(folder: Path, *steps: int, reward: float = 0.5) -> None:
    writer = MetricsWriter(folder / "metrics.jsonl")
    for step in steps:
        writer.log(step, {"reward/mean": reward})
    writer.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    write(tmp_path, 1, 2)
    with WatchServer(tmp_path, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: WatchServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers={"Host": host} if host is not None else {})
        answer = connection.getresponse()
        assert answer.status >= 400 or "script-src 'sha256-" in (answer.headers["Content-Security-Policy"] or "")
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def curve(data: dict[str, Any]) -> list[list[float]] | None:
    return data["columns"].get("reward/mean")


def test_an_open_page_gets_only_what_is_new(server: WatchServer) -> None:
    first = json.loads(ask(server, "/data")[1])
    assert first["live"] and first["whole"] and curve(first) == [[1, 2], [0.5, 0.5]]
    again = json.loads(ask(server, f"/data?mark={first['mark']}")[1])
    assert (
        again["mark"] == first["mark"]
        and again["columns"] == {}
        and again["state"] == first["state"] | {"age_s": again["state"]["age_s"]}
    )
    write(server.folder, 3)
    with (server.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # A line that is being written.
    new = json.loads(ask(server, f"/data?mark={first['mark']}")[1])
    assert curve(new) == [[3], [0.5]] and not new["whole"] and new["state"]["text"].startswith("interrupted at step 3")


def test_a_run_that_went_back_or_began_anew_is_sent_whole(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    reader = RunReader(tmp_path)
    mark = reader.data()["mark"]
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.event("resumed", 1)
    writer.log(2, {"reward/mean": 0.75})
    writer.close()
    data = reader.data(mark)
    assert data["whole"] and curve(data) == ([1, 2], [0.5, 0.75])
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, 1)
    assert curve(reader.data(data["mark"])) == ([1], [0.5])
    for broken in ("", "x", "1.2", f"{data['mark']}9", "é.²"):
        assert reader.data(broken)["whole"]


def test_the_page_and_its_samples_are_served_and_nothing_else(server: WatchServer) -> None:
    (server.folder / "secret.txt").write_text("secret")
    status, page = ask(server, "/")
    assert status == 200 and '"live":true' in page
    assert ask(server, "/samples") == (200, "[]")
    for path in ("/secret.txt", "/../secret.txt", "//secret.txt", "/%2e%2e/secret.txt", "/data/", "/[", "/?x"):
        assert ask(server, path)[0] in (400, 404), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method=method)[0] == 501


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", "", "[::1"])
def test_only_requests_to_this_machine_by_its_name_are_answered(server: WatchServer, host: str) -> None:
    for path in ("/", "/data", "/samples"):
        assert ask(server, path, host)[0] == 403


def test_a_forwarded_port_is_answered(server: WatchServer) -> None:
    assert ask(server, "/data", "localhost:8000")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_mistakes_are_sentences(server: WatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / "none")]) == 2 and main(["watch", str(tmp_path / "empty")]) == 2
    error = capsys.readouterr().err
    assert "none, but there is no such folder; expected a run folder" in error
    assert "empty, but the folder holds no run; expected" in error
    for port in (server.server_port, 99999):
        with pytest.raises(UserError, match=f"--port: got {port}, expected a port that is free"):
            WatchServer(tmp_path, port)
    for broken in ("[1, 2", "[1]", "!!python/name:os.system"):  # A file of another program has this name, too.
        (tmp_path / "config.yaml").write_text(broken)
        status, said = ask(server, "/data")
        assert status == 500 and "config.yaml" in said and "expected" in said
    (tmp_path / "config.yaml").unlink()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert [ask(server, "/data")[0] for _ in range(2)] == [500, 500]
    (tmp_path / "metrics.jsonl").write_text("")
    write(tmp_path, 1)
    assert curve(server.reader.data()) == ([1], [0.5]), "a broken file leaves nothing behind"
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is not a metrics record"):
        WatchServer(tmp_path, 0)


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: {steps: 7}\n")
    data = RunReader(tmp_path).data()
    assert data["state"]["text"] == "interrupted at step 0 of 7" and data["plots"] == []


@pytest.mark.processes
def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    write(tmp_path, 1)
    # A shell that started the tests in the background has SIGINT ignored.
    heard = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = f"{heard}from headrace.cli import main; sys.exit(main(['watch', sys.argv[1]]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0 and process.stderr.read() == ""
