"""A directory that does not start in time is an error that says how long it took, and which key sets the bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.directory_process import start_actor
from headrace.dataplane.errors import DirectoryLost
from headrace.dataplane.listen_address import Listening


def test_the_bound_is_the_caller_s_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def get(reference: object, timeout: float) -> Any:
        waits.append(timeout)
        raise GetTimeoutError("Get timed out: some object(s) not ready.")

    def build(*_: object, **__: object) -> Any:
        return SimpleNamespace(options=build, remote=build, start=SimpleNamespace(remote=build))

    for name, fake in {"remote": build, "get": get, "is_initialized": lambda: False}.items():
        monkeypatch.setattr(ray, name, fake)
    with pytest.raises(DirectoryLost, match=r"did not start within 17 s \(start_timeout_s\).*op=open.*elapsed="):
        start_actor("run", DataPlaneConfig(), lambda: None, node=28 * "00", listening=Listening(), timeout_s=17.0)  # pyright: ignore
    assert waits == [17.0]
