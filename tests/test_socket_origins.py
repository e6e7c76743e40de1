"""The warning about an unclosed socket names the test that opened it, also when a later test gets it."""

from __future__ import annotations

import re
import socket

import pytest
from _pytest.unraisableexception import collect_unraisable


def open_and_forget() -> None:
    socket.create_server(("127.0.0.1", 0))


def test_the_warning_about_an_unclosed_socket_says_where_it_was_opened(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/test_other.py::test_before (call)")
    open_and_forget()
    monkeypatch.undo()
    with pytest.raises(pytest.PytestUnraisableExceptionWarning) as raised:
        collect_unraisable(request.config)  # as pytest does after each test
    here = r"tests/test_socket_origins\.py:\d+"
    told = rf"opened by tests/test_other\.py::test_before \(call\) at {here} open_and_forget <- {here} test_the_warning"
    assert re.search(told, str(raised.value)) and "<socket.socket fd=" in str(raised.value)
