"""Tests checkpoints that are written in the background, and processes that are killed while they write one."""

from __future__ import annotations

import os
import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from headrace.tests.process_pool import FORKSERVER
from headrace.tests.trainers.backends.backend_ranks import backend_config, random_rows, run_step, save_tiny_model
from headrace.trainers.backends import checkpoint_files as checkpointer
from headrace.trainers.backends.checkpoint_files import Checkpointer
from headrace.trainers.backends.fsdp.backend import FsdpBackend

KILLS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tied"))


class Gate:
    """Holds writes back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self._write = threading.Event(), checkpointer.write
        monkeypatch.setattr(checkpointer, "write", self)

    def __call__(self, *arguments: object) -> None:
        assert self.opened.wait(60)
        self._write(*arguments)  # type: ignore[arg-type]


def test_training_goes_on_while_a_checkpoint_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, path = FsdpBackend(backend_config(model), 0, 1), str(tmp_path / "one")
    gate = Gate(monkeypatch)
    run_step(backend, [random_rows(0, 8)])
    backend.save(path, wait=False)
    expected = run_step(backend, [random_rows(1, 8)])
    assert not os.path.exists(path), "nothing is published before it is whole"
    gate.opened.set()
    backend.load(path)
    assert run_step(backend, [random_rows(1, 8)]) == expected, "what was saved is what was there at the call"


def test_what_goes_wrong_behind_is_raised_once_by_the_next_call(model: str, tmp_path: Path) -> None:
    backend, path = FsdpBackend(backend_config(model), 0, 1), tmp_path / "one"
    with pytest.MonkeyPatch.context() as patch:

        def torn(*_: object) -> None:
            raise OSError("disk full")

        patch.setattr(checkpointer, "write", torn)
        backend.save(str(path), wait=False)
        with pytest.raises(OSError, match="disk full"):
            backend.save(str(path), wait=False)
        backend.save(str(path), wait=False)
        with pytest.raises(OSError, match="disk full"):
            backend.close()
    backend.close()
    assert not path.exists()
    backend.save(str(path), wait=False)
    backend.close()
    assert os.listdir(tmp_path) == ["one"]


def test_a_write_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    files = Checkpointer(0, 1, timeout_s=0.05)
    files.save(str(tmp_path / "one"), {"steps": torch.ones(())}, wait=False)
    with pytest.raises(TimeoutError, match="one: still not written after 0 s"):
        files.wait()
    gate.opened.set()
    files._timeout_s = 60.0
    files.close()
    assert os.listdir(tmp_path) == ["one"]


def test_a_checkpoint_caught_between_its_renames_is_found(model: str, tmp_path: Path) -> None:
    backend, path = FsdpBackend(backend_config(model), 0, 1), tmp_path / "one"
    backend.save(str(path))
    expected = run_step(backend, [random_rows(1, 8)])
    path.rename(tmp_path / "one.old")
    backend.load(str(path))
    assert run_step(backend, [random_rows(1, 8)]) == expected
    assert os.listdir(tmp_path) == ["one"]


def train_and_save(model: str, path: str, saved: Connection) -> None:
    """Resume if there is a checkpoint, then train and save steps forever. Prints each step whose checkpoint is on
    disk."""
    torch.set_num_threads(1)
    backend = FsdpBackend(backend_config(model), 0, 1)
    if os.path.exists(path) or os.path.exists(f"{path}.old"):
        backend.load(path)
    saved.send(int(backend._steps))
    while True:
        run_step(backend, [random_rows(0, 4)])
        done = int(backend._steps) - 1
        backend.save(path, wait=False)  # waits for the save before it
        saved.send(done)


@pytest.mark.processes
def test_a_process_killed_while_it_saves_always_resumes(model: str, tmp_path: Path) -> None:
    path, chance, reached = str(tmp_path / "latest"), random.Random(11), 0
    for _ in range(KILLS):
        told, tell = FORKSERVER.Pipe(duplex=False)
        child = FORKSERVER.Process(target=train_and_save, args=(model, path, tell))
        child.start()
        tell.close()
        assert told.poll(60), "the child does not start"
        assert told.recv() >= reached, "it resumes from the last whole checkpoint"
        deadline, seen = time.monotonic() + 60, 0
        while seen < 2 and time.monotonic() < deadline:  # it saves, and has a checkpoint to replace
            if told.poll(1):
                reached, seen = max(reached, told.recv()), seen + 1
        time.sleep(chance.random() * 0.1)
        child.kill()
        child.join(60)
        assert child.exitcode == -9
        try:
            while told.poll():
                reached = max(reached, told.recv())
        except EOFError:
            pass
    last = FsdpBackend(backend_config(model), 0, 1)
    last.load(path)
    assert int(last._steps) >= reached >= KILLS
    assert run_step(last, [random_rows(0, 4)])["train/skipped"] == 0
