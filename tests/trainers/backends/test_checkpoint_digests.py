"""Tests that no changed byte of a checkpoint is loaded, on one rank and when ranks share the files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.trainers.backends import checkpoint_files
from headrace.trainers.backends.checkpoint_files import (
    DIGESTS,
    Checkpointer,
    complete,
    draft_of,
    expect_undamaged,
    file_digest,
    write_digests,
)
from headrace.trainers.errors import CheckpointDamaged


def saved(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    state = {"model.w": torch.arange(2000.0), "optim.m": torch.ones(100)}
    Checkpointer(0, 1).save(str(folder / "one"), state)
    return str(folder / "one"), state


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x41
    path.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "__0_0.distcp has other bytes than were written": ("__0_0.distcp", flip),
    "__0_0.distcp has 100 bytes, and .* were written": ("__0_0.distcp", lambda p: p.write_bytes(p.read_bytes()[:100])),
    "__0_0.distcp is missing": ("__0_0.distcp", Path.unlink),
    ".metadata has other bytes": (".metadata", flip),
    "digests.json cannot be read": (DIGESTS, lambda path: path.write_bytes(path.read_bytes()[:-9])),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, sentence: str) -> None:
    path, state = saved(tmp_path)
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    name, damage = DAMAGES[sentence]
    damage(Path(path, name))
    with pytest.raises(CheckpointDamaged, match=f"checkpoint {path} is damaged: {sentence}"):
        Checkpointer(0, 1).load(path, into)
    assert not any(value.any() for value in into.values())


def test_a_checkpoint_without_digests_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, state = saved(tmp_path)
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    Checkpointer(0, 1).load(path, into)
    assert all(torch.equal(into[name], value) for name, value in state.items())
    assert "not checked" not in caplog.text
    Path(path, DIGESTS).unlink()
    Checkpointer(0, 1).load(path, into)
    assert "it has no digests.json, so its bytes are not checked" in caplog.text


class Ranks:
    """Ranks in threads, which gather objects."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.gathered = world, dict[int, Any]()
        self.barrier = threading.Barrier(world)
        self.read = set[tuple[int, str]]()
        monkeypatch.setattr(checkpoint_files.dist, "all_gather_object", self.gather)
        monkeypatch.setattr(checkpoint_files.dist, "broadcast_object_list", self.broadcast)
        monkeypatch.setattr(checkpoint_files, "file_digest", self.digest)

    def gather(self, outcomes: list[Any], outcome: Any, group: Any) -> None:
        self.gathered[group] = outcome
        self.barrier.wait(30)
        outcomes[:] = [self.gathered[rank] for rank in range(self.world)]
        self.barrier.wait(30)

    def broadcast(self, outcome: list[Any], src: int, group: Any) -> None:
        found = [None] * self.world
        self.gather(found, outcome[0], group)
        outcome[:] = [found[src]]

    def digest(self, path: str) -> tuple[int, str]:
        self.read.add((int(threading.current_thread().name[-1]), Path(path).name))
        return file_digest(path)

    def call(self, function: Callable[..., None], path: str) -> list[str]:
        with ThreadPoolExecutor(self.world, thread_name_prefix="rank") as pool:
            calls = [pool.submit(function, path, rank, self.world, rank) for rank in range(self.world)]
            return [str(call.exception() or "") for call in calls]


def test_ranks_share_the_files_and_all_of_them_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, monkeypatch)
    for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(3)), "__10_0.distcp"):
        (tmp_path / name).write_text(name)
    assert ranks.call(write_digests, str(tmp_path)) == ["", "", ""]
    assert len(ranks.read) == 4, "those of rank 10 belong to no rank here"
    ranks.read.clear()
    assert ranks.call(expect_undamaged, str(tmp_path)) == ["", "", ""] and len(ranks.read) == 4
    flip(tmp_path / "__2_0.distcp")
    (tmp_path / "__1_0.distcp").unlink()
    [sentence] = set(ranks.call(expect_undamaged, str(tmp_path)))
    assert sentence.endswith("is damaged: __1_0.distcp is missing, and 1 more file(s)")


def test_a_file_that_one_rank_cannot_read_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, monkeypatch)
    (tmp_path / "__1_0.distcp").mkdir()
    [sentence] = set(ranks.call(write_digests, str(tmp_path)))
    assert sentence.startswith("rank 1: [Errno 21] Is a directory")


def test_files_on_hosts_that_share_no_folder_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, monkeypatch)
    paths = [str(tmp_path / host / "step") for host in ("near", "far")]
    for rank, path in enumerate(paths):
        Path(draft_of(path)).mkdir(parents=True)
        Path(draft_of(path), f"__{rank}_0.distcp").write_text("rows")

    def finish(path: str, rank: int, world: int, group: Any) -> None:
        complete(paths[rank] if path == "apart" else path, rank, world, group)

    sentences = ranks.call(finish, "apart")
    assert all("does not see __1_0.distcp" in one and "hosts of all ranks share" in one for one in sentences)
    assert not any(Path(path).exists() for path in paths)
    Path(draft_of(paths[0]), "__1_0.distcp").write_text("rows")
    assert ranks.call(finish, paths[0]) == ["", ""] and Path(paths[0]).exists()
