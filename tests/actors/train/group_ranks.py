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


def run_with_groups(
    scenario: Callable[..., Any], world: int, folder: Path, *arguments: Any, single_rank_groups: bool = False
) -> list[Any]:
    """Run `scenario(rank, groups, *arguments)` in `world` processes; return each rank's result, by rank.

    On GPUs each rank has its own. `groups` is None for a single rank, unless `single_rank_groups` is set.
    """
    folder.mkdir(parents=True, exist_ok=True)
    method = "spawn" if torch.cuda.is_available() else "forkserver"  # no forked process can use a GPU
    joins = world > 1 or single_rank_groups
    start_processes(_rank, (world, joins, str(folder), scenario, arguments), world, start_method=method)
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(world)]


def _rank(
    rank: int, world: int, joins: bool, folder: str, scenario: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    groups = None
    if joins:
        groups = ProcessGroups(FileStore(f"{folder}/rendezvous", world), rank, world, timeout_s=TIMEOUT_S)
        groups.form()
    torch.save(scenario(rank, groups, *arguments), f"{folder}/result.{rank}")
    if groups is not None:
        groups.close()
