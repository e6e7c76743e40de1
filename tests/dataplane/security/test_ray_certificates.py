"""What would go wrong between the TLS of a Ray and that of this process is told in a sentence before it is tried."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataplane.security.ray_certificates import certificate_mistake
from headrace.tests.dataplane.security.ray_recipe import certificates

SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of a server of HTTP/2, such as Ray's GCS without TLS."""


@contextlib.contextmanager
def gcs(environment: dict[str, str], *, greets: bool = True) -> Iterator[tuple[str, int]]:
    """The address of a server that speaks as Ray's GCS with this environment, or closes in place of the greeting."""
    context = None
    if environment:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(environment["RAY_TLS_CA_CERT"])
        context.load_cert_chain(environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"])

    def serve() -> None:
        with contextlib.suppress(OSError):  # The client disconnects, or the listening socket is closed.
            connection, _ = listener.accept()
            with connection if context is None else context.wrap_socket(connection, server_side=True) as spoken:
                if greets:
                    spoken.sendall(SETTINGS_FRAME)
                    spoken.recv(1)

    with socket.create_server(("127.0.0.2", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join(10)


@pytest.mark.processes
def test_each_mistake_has_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "old", "stranger", "elsewhere"):
        (tmp_path / name).mkdir()
    good = certificates(["127.0.0.2"], tmp_path / "good")
    other = certificates(["127.0.0.2"], tmp_path / "stranger")
    elsewhere = certificates(["10.0.0.9"], tmp_path / "elsewhere")
    old = certificates(["127.0.0.2"], tmp_path / "old", days=0)
    time.sleep(max(0.0, os.stat(tmp_path / "old" / "host.crt").st_mtime + 1.1 - time.time()))  # until it has expired
    refuse = "do not accept each other's certificates"
    cases = [
        ({}, {}, ""),
        (good, good, ""),
        (good, {}, "RAY_USE_TLS: got no value, expected 1 and RAY_TLS_CA_CERT, .* accepts only TLS"),
        ({}, good, "RAY_USE_TLS: got 1, expected no value, because that Ray cluster was started without it"),
        (good, other, rf"{refuse} \(.*self-signed"),
        (old, old, rf"{refuse} \(certificate has expired\), expected .* valid at the time of both clocks"),
        (elsewhere, elsewhere, rf"{refuse} \(IP address mismatch"),
        (
            good,
            good | {"RAY_TLS_SERVER_KEY": "absent.key"},
            "RAY_USE_TLS: got 1 with .*absent.key.* expected a PEM file",
        ),
        (good, {"RAY_USE_TLS": "1"}, "RAY_USE_TLS: got 1 with .*None.* expected a PEM file"),
    ]
    for theirs, ours, expected in cases:
        for name in good:
            monkeypatch.delenv(name, raising=False)
        for name, value in ours.items():
            monkeypatch.setenv(name, value)
        with gcs(theirs) as address, socket.create_connection(address, 10) as connection:
            told = certificate_mistake(connection)
        assert re.search(expected or "^$", told), told


@pytest.mark.processes
def test_a_server_that_closes_without_a_word_has_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's GCS does when the certificate of this host has expired."""
    for name, value in certificates(["127.0.0.2"], tmp_path).items():
        monkeypatch.setenv(name, value)
    with gcs(dict(os.environ), greets=False) as address, socket.create_connection(address, 10) as connection:
        assert "certificates (Ray closed the connection), expected" in certificate_mistake(connection)


def test_a_server_that_says_nothing_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_connection(silent.getsockname(), 0.2) as connection:
            assert certificate_mistake(connection) == ""
