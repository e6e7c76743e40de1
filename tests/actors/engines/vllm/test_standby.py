"""The process that imports vLLM ahead of time and becomes the engine process of a `VllmEngine`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.vllm import start as standby
from headrace.actors.engines.vllm.start import EngineStandby, start_ahead, take_standby
from headrace.tests.actors.engines.vllm.builder import build, save_model

pytestmark = pytest.mark.processes
PATIENCE_S = 60.0
START = """
import sys
from headrace.actors.engines.vllm.start import EngineStandby

if __name__ == "__main__":
    print(EngineStandby(()).pid, flush=True)
    sys.stdin.read()
"""


def tell(path: Path, **named: Any) -> None:
    """Run in a standby."""
    print("told", os.environ["HEADRACE_TOLD"], named, flush=True)
    path.write_text(str(os.getpid()))


def expect_end(pid: int) -> None:
    try:
        psutil.Process(pid).wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        pass


def test_a_standby_runs_what_it_is_told_with_the_environment_and_outputs_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = EngineStandby(())
    monkeypatch.setenv("HEADRACE_TOLD", "later")
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    saved = os.dup(1)
    try:
        os.dup2(log, 1)
        process = one.run(tell, "Told", {"path": tmp_path / "pid", "rank": 3})
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(log)
    assert process is not None and process.name == "Told"
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert (tmp_path / "pid").read_text() == str(process.pid) == str(one.pid)
    assert (tmp_path / "log").read_text() == "told later {'rank': 3}\n"


def test_a_standby_that_cannot_get_the_arguments_ends() -> None:
    one = EngineStandby(())
    assert one.pid is not None and psutil.pid_exists(one.pid)
    assert one.run(tell, "Told", {"lock": multiprocessing.get_context("spawn").Lock()}) is None
    expect_end(one.pid)


@pytest.mark.parametrize("end", ["returns", "killed"])
def test_a_standby_ends_with_the_process_that_started_it(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        if end == "killed":
            parent.kill()
        parent.stdin.close()
        assert parent.wait(PATIENCE_S) == (-signal.SIGKILL if end == "killed" else 0)
    expect_end(pid)


def test_only_the_first_caller_gets_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "EngineStandby", lambda: threading.Event())
    start_ahead()
    first = take_standby()
    assert isinstance(first, threading.Event) and take_standby() is None


@pytest.mark.vllm
@pytest.mark.parametrize("lives", [True, False])
def test_vllms_engine_process_is_the_standby_if_that_lives(tmp_path: Path, lives: bool) -> None:
    start_ahead()
    assert standby._standby is not None and (pid := standby._standby.pid) is not None
    if not lives:
        os.kill(pid, signal.SIGKILL)
        expect_end(pid)
    log = tmp_path / "engine.log"
    engine = build(save_model(tmp_path / "model", "tied"), log=str(log), options={"max_num_batched_tokens": 512})

    async def main() -> None:
        assert (engine.pids[0] == pid) is lives
        [one] = await engine.generate("one", [5, 6, 7], SamplingParams(max_new_tokens=4))
        assert len(one.token_ids) > 0
        os.kill(engine.pids[0], signal.SIGKILL)
        for _ in range(int(PATIENCE_S / 0.05)):
            if engine.died:
                break
            await asyncio.sleep(0.05)
        assert f"(pid {engine.pids[0]}): it was ended by SIGKILL" in engine.died
        await engine.close()

    asyncio.run(main())
