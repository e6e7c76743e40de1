"""Runs the directory (the metadata service) in a process of its own without Ray; run as a module by `factory.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

from .config import DataPlaneConfig
from .factory import build_store_host
from .rpc.child_process import serve_parent
from .rpc.hosted_directory import HostedDirectory, directory_name

END_TIMEOUT_S = 20.0


def _start(setup: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """Start the directory on an event loop in a thread. setup: `config` (JSON), `run_id` and `host`."""
    config, run_id = DataPlaneConfig.model_validate_json(setup["config"]), setup["run_id"]
    hosted = HostedDirectory(config, functools.partial(build_store_host, config, run_id))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="directory", daemon=True)
    thread.start()

    def close() -> None:
        asyncio.run_coroutine_threadsafe(hosted.close(), loop).result(END_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_TIMEOUT_S)

    start = hosted.start(directory_name(run_id), setup["host"])
    try:
        started = asyncio.run_coroutine_threadsafe(start, loop).result()
    except BaseException:
        close()
        raise
    store = started.store
    answer = dataclasses.asdict(started)
    answer["store"] = {
        "kind": store.kind,
        "run_id": store.run_id,
        "address": store.address,
        "plane_id": store.plane_id,
        "key": store.key.hex(),
    }
    return answer, close


if __name__ == "__main__":
    serve_parent(_start)
