"""Tests of process groups that are destroyed and formed again, and of the references to them that backends keep."""

from __future__ import annotations

import datetime
import functools
import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from headrace.actors.train.links import ReplicaLinks
from headrace.actors.train.process_groups import ProcessGroups, replace_groups
from headrace.actors.train.topology import Topology
from headrace.tests.actors.train.group_ranks import run_with_groups
from headrace.tests.actors.train.replica_ranks import raised

OLD, NEW = object(), object()
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # the plain kind
LONG = datetime.timedelta(hours=20)


@dataclass(frozen=True, slots=True)
class Frozen:
    group: Any
    other: int = 1


def closure(group: Any) -> Any:
    unset: Any

    def call() -> Any:
        return group

    def never() -> Any:
        return unset

    call.never = never  # type: ignore[attr-defined]
    if group is None:
        unset = 1
    return call


def test_every_kind_of_place() -> None:
    inner: Any = nn.Linear(2, 2)
    module = nn.Sequential(inner)
    inner.group = OLD
    inner.forward = functools.partial(inner.forward, OLD, key=OLD)
    kept = functools.partial(print, 1)
    call = closure(OLD)
    holder: dict[str, Any] = {
        "plain": OLD,
        "list": [1, [OLD]],
        "tuple": (OLD, 2),
        "named": Pair(1, OLD),
        "module": module,
        "nested": functools.partial(functools.partial(print, (OLD,)), 3),
        "kept": kept,
        "call": call,
        "never": call.never,
        "method": module.add_module,
        "tensor": torch.ones(1),
    }
    holder["self"] = holder
    replace_groups([holder], {id(OLD): NEW})
    assert holder["plain"] is NEW and holder["list"][1] == [NEW] and holder["tuple"] == (NEW, 2)
    assert holder["named"] == Pair(1, NEW)
    assert inner.group is NEW
    assert inner.forward.args == (NEW,) and inner.forward.keywords == {"key": NEW}
    assert holder["nested"].args == ((NEW,), 3)
    assert holder["kept"] is kept
    assert call() is NEW


def test_a_shared_object_stays_shared() -> None:
    shared = (OLD,)
    holder = [shared, [shared]]
    replace_groups([holder], {id(OLD): NEW})
    assert holder[0] is holder[1][0] and holder[0] == (NEW,)


def test_a_frozen_dataclass() -> None:
    frozen = Frozen(OLD)
    type(frozen).__module__ = "headrace.test"
    replace_groups([frozen], {id(OLD): NEW})
    assert frozen.group is NEW and frozen.other == 1


class Holder:
    """Refers to groups as a backend does."""

    def __init__(self, rank: int) -> None:
        # Groups of one rank each: a rank makes the other's too, but is not in it.
        alone = [dist.new_group([0]), dist.new_group([1])]
        self.alone: Any = alone[rank]
        self.both: Any = dist.new_group([1, 0], timeout=LONG, backend="gloo", group_desc="for a test")
        self.links = ReplicaLinks(Topology(1, tp=2), rank, name="t", timeout_s=9, device=torch.device("cpu"))
        self.mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


def total(holder: Holder, rank: int) -> list[float]:
    """Use each group, and return the sums over its ranks."""
    tensors = [torch.full((), rank + 1.0) for _ in range(4)]
    (part,) = holder.links.parts
    groups = (holder.alone, holder.both, None, holder.links._groups[part])
    for tensor, group in zip(tensors, groups, strict=True):
        dist.all_reduce(tensor, group=group)
    spread = DTensor.from_local(torch.full((1,), rank + 1.0), holder.mesh["tp"], [Shard(0)], run_check=False)
    return [*map(float, tensors), float(spread.full_tensor().sum())]


def uses(holder: Holder) -> dict[str, Callable[[], Any]]:
    one = torch.ones(1)
    return {
        "collective": lambda: dist.all_reduce(one, group=holder.both),
        "message": lambda: dist.isend(one, 0, group=holder.both),
        "size": lambda: holder.alone.size(),
        "default": lambda: dist.all_reduce(one),
        "mesh": lambda: holder.mesh.get_group("tp"),
    }


def three_cycles(rank: int, groups: ProcessGroups) -> dict[str, Any]:
    holder = Holder(rank)
    found: dict[str, Any] = {"sums": [total(holder, rank)], "errors": [], "seconds": []}
    for _ in range(3):
        old = {name: weakref.ref(group) for group, name in distributed_c10d._world.pg_names.items()}
        assert len(old) == 5  # the mesh uses the default group for all ranks
        seconds = [groups.destroy([vars(holder)]), groups.destroy([vars(holder)])]
        gc.collect()
        alive = {name: gc.get_referrers(ref()) for name, ref in old.items() if ref() is not None}
        assert not alive, alive
        found["errors"].append({name: raised(use) for name, use in uses(holder).items()})
        found["seconds"].append([*seconds, groups.form_again([vars(holder)]), groups.form_again([vars(holder)])])
        found["sums"].append(total(holder, rank))
    found["both"] = distributed_c10d._world.pg_group_ranks[holder.both], holder.both.group_desc
    found["timeout"] = holder.both._get_backend(torch.device("cpu")).options._timeout
    new: Any = dist.new_group([0, 1])
    found["new"] = new.group_name not in [holder.both.group_name, holder.alone.group_name]
    return found


@pytest.mark.processes
def test_groups_come_back_and_stale_ones_raise(tmp_path: Path) -> None:
    for rank, found in enumerate(run_with_groups(three_cycles, 2, tmp_path)):
        assert found["sums"] == [[rank + 1.0, 3.0, 3.0, 3.0, 3.0]] * 4
        for errors in found["errors"]:
            for name in ("collective", "size"):
                assert errors[name][0] == "RuntimeError"
                assert errors[name][1].endswith("destroyed by offload; call onload first")
            assert errors["message"][0] == "ValueError"
            assert "has not been initialized" in errors["default"][1]
            assert "Could not resolve the process group" in errors["mesh"][1]
        for destroyed, again, formed, formed_again in found["seconds"]:
            assert destroyed > 0 and formed > 0 and again == formed_again == 0.0
        assert found["both"] == ({0: 0, 1: 1}, "for a test")
        assert found["timeout"] == LONG
        assert found["new"]


def fails(rank: int, groups: ProcessGroups, failures: int) -> tuple[str, bool]:
    """Let rank 1 fail so many times when it has made all groups, then use what was formed."""
    holder = Holder(rank)
    groups.destroy([vars(holder)])
    make = groups._make
    calls = []

    def broken(*arguments: Any) -> None:
        make(*arguments)
        calls.append(1)
        if rank == 1 and len(calls) <= failures * len(groups._groups) and len(calls) % len(groups._groups) == 0:
            raise OSError("no route")

    groups._make = broken  # pyright: ignore[reportAttributeAccessIssue]
    try:
        groups.form_again([vars(holder)])
    except RuntimeError as error:
        return str(error), groups.formed
    return "", total(holder, rank) == [rank + 1.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.processes
def test_a_rank_that_fails_once_makes_all_ranks_try_again(tmp_path: Path) -> None:
    assert run_with_groups(fails, 2, tmp_path, 1) == [("", True)] * 2


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_fails_twice_fails_all(tmp_path: Path) -> None:
    for rank, (message, formed) in enumerate(run_with_groups(fails, 2, tmp_path, 2)):
        assert not formed
        assert message.startswith(f"rank {rank}: the process groups could not be formed again: ")
        assert message.count("rank 1: OSError: no route") == 2 and "; then " in message
