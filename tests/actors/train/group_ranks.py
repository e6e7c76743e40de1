"""Runs scenarios in several processes that are joined by `ProcessGroups`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import start_processes

from headrace.actors.train.process_groups import ProcessGroups

TIMEOUT_S = 60.0


def run_with_groups(scenario: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `scenario(rank, groups, *arguments)` in `world` processes; return each rank's result, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(_rank, (world, str(folder), scenario, arguments), world, start_method="forkserver")
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, scenario: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    groups = ProcessGroups(FileStore(f"{folder}/rendezvous", world), rank, world, timeout_s=TIMEOUT_S)
    groups.form()
    torch.save(scenario(rank, groups, *arguments), f"{folder}/result.{rank}")
    groups.close()
