"""Forms the process groups of a train rank, destroys all of them to free their memory, and forms them again.

An idle NCCL communicator keeps some hundred MiB of its GPU, so a rank that offloads its model destroys the groups too.
torch cannot give a group object a new communicator. Therefore the groups are made again, under the same names.
`replace_groups` finds each reference that model, optimizer and meshes have to an old group, and replaces it: torch has
no other way to give a module of Megatron or FSDP2 a new group than to write it into the attributes that hold the old
one. Device meshes and functional collectives look groups up by name and need nothing.

This file uses torch's registry of groups (`_world`) and `_new_process_group_helper`, which are private: new_group gives
no control over names, and every rank would have to make even the groups that it does not belong to.

A run on one host stays on loopback. On several hosts a rank listens at the address of its own host (see `Listening`);
the driver's host may be another one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (
    DistError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)

from ..process.group_proof import prove_members

_PACKAGES = ("headrace", "megatron", "torch.distributed", "torch.nn", "torch.optim")
"""Packages whose objects are searched. Other objects, such as tokenizers and model configs, refer to no group."""
_ATTEMPTS = 2
_GRACE_S = 30.0
"""Seconds beyond the time limit of forming the groups that a rank waits for the results of the other ranks."""


def replace_groups(holders: Iterable[object], new: Mapping[int, object]) -> None:
    """Replace, in all objects that can be reached from `holders`, each reference to one of the groups in `new`.

    new: the object to put in a group's place, by the `id` of the group. Attributes, lists, dict values, tuples,
    `functools.partial` objects and the variables of closures are searched; keys of dicts, sets and tensors are not.
    """
    search = _Search(new)
    for holder in holders:
        search.visit(holder)


class _Search:
    """One walk over the objects. Each is visited once."""

    def __init__(self, new: Mapping[int, object]) -> None:
        self._new = new
        self._visited: dict[int, tuple[object, object]] = {}
        """Each visited object and what takes its place, by id. It is kept because its id could be used again."""

    def visit(self, value: Any) -> Any:
        """Replace groups inside `value`, and return its replacement: usually `value` itself."""
        if id(value) in self._new:
            return self._new[id(value)]
        if id(value) in self._visited:
            return self._visited[id(value)][1]
        if not _is_searched(value):
            return value
        self._visited[id(value)] = (value, value)
        result = self._inside(value)
        self._visited[id(value)] = (value, result)
        return result

    def _inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            self._items(value, list(value.items()))
        elif isinstance(value, list):
            self._items(value, list(enumerate(value)))
        elif isinstance(value, tuple):
            return self._tuple(value)
        elif isinstance(value, functools.partial):
            return self._partial(value)
        elif isinstance(value, MethodType):
            self.visit(value.__self__)
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._cell(cell)
        else:
            self._attributes(value)
        return value

    def _items(self, container: Any, items: list[tuple[Any, Any]]) -> None:
        for key, item in items:
            found = self.visit(item)
            if found is not item:
                container[key] = found

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        found = [self.visit(item) for item in value]
        if all(new is old for new, old in zip(found, value, strict=True)):
            return value
        return type(value)(*found) if hasattr(value, "_fields") else tuple(found)

    def _partial(self, value: functools.partial[Any]) -> functools.partial[Any]:
        function, arguments = self.visit(value.func), self._tuple(value.args)
        keywords = {name: self.visit(argument) for name, argument in value.keywords.items()}
        kept = function is value.func and arguments is value.args
        if kept and all(keywords[name] is argument for name, argument in value.keywords.items()):
            return value
        return functools.partial(function, *arguments, **keywords)

    def _cell(self, cell: Any) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # The variable has no value yet.
            return
        found = self.visit(content)
        if found is not content:
            cell.cell_contents = found

    def _attributes(self, value: Any) -> None:
        attributes = dict(getattr(value, "__dict__", {}))
        if dataclasses.is_dataclass(value):
            attributes |= {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        for name, attribute in attributes.items():
            found = self.visit(attribute)
            if found is not attribute:
                object.__setattr__(value, name, found)  # Frozen dataclasses and modules refuse an ordinary assignment.


def _is_searched(value: object) -> bool:
    if isinstance(value, type):
        return False
    if isinstance(value, dict | list | tuple | functools.partial | MethodType | FunctionType | nn.Module):
        return True
    kind = type(value).__module__
    return any(kind == package or kind.startswith(f"{package}.") for package in _PACKAGES)


class DestroyedGroup:
    """Placeholder for a process group that was destroyed; every use raises RuntimeError. Without it, gloo would
    continue with the old connections, and NCCL would wait for ranks that are gone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise RuntimeError(f"process group {self._name}: it was destroyed by offload; call onload first")


@dataclass(frozen=True, slots=True)
class _Group:
    """Settings for creating a group with the same name a second time."""

    name: str
    backend: str
    ranks: tuple[int, ...]
    """The members, in the order of their ranks in the group."""
    timeout: timedelta
    description: str


class ProcessGroups:
    """All process groups of one rank of a mesh. Its calls are collective over the ranks of the mesh and have a time
    limit."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        timeout_s: float,
        name: str = "",
        forget: Callable[[str], None] | None = None,
        key: bytes = b"",
    ) -> None:
        """Prepare to form groups over `store`; `form` comes next.

        store: store of all ranks; it must outlive the groups. timeout_s: seconds after which forming the groups, or a
        collective operation of the default group, fails. name: name of this process in errors, by default its rank.
        forget: function that removes all keys with a prefix from the store; called in rank 0 with the prefixes of
        groups that no longer exist. key: the run's key, which members of gloo groups prove to know; b"" for no proof.
        """
        self._store, self._rank, self._world = store, rank, world
        self._timeout = timedelta(seconds=timeout_s)
        self._name = name or f"rank {rank}"
        self._forget, self._key = forget, key
        self._generation = 0
        """Number of times that forming the groups was begun. The keys of each time have their own prefix."""
        self._oldest = 1
        """Oldest generation whose keys may still be in the store."""
        self._destroyed: dict[str, DestroyedGroup] = {}
        self._groups: tuple[_Group, ...] = ()
        self._count = 0
        """Number from which torch makes the name of the next group."""

    @property
    def formed(self) -> bool:
        """True while the groups exist."""
        return dist.is_initialized()

    def form(self) -> None:
        """Form the default group: NCCL where the ranks have GPUs, otherwise gloo. Raises what torch raises."""
        self._generation += 1
        kind = "nccl" if torch.cuda.is_available() else "gloo"
        store = PrefixStore(self._prefix, self._store)
        dist.init_process_group(kind, store=store, rank=self._rank, world_size=self._world, timeout=self._timeout)
        self.prove()

    def prove(self) -> None:
        """Have the members of each gloo group prove that they belong to the run. Raises ConnectionError if one does
        not; see `prove_members`."""
        world = distributed_c10d._world
        for group, (kind, _) in list(world.pg_map.items()):
            if self._key and "gloo" in kind:
                backend = group._get_backend(torch.device("cpu"))
                prove_members(backend, self._key, f"{self._prefix}/{world.pg_names[group]}")

    def destroy(self, holders: Iterable[object]) -> float:
        """Destroy all groups of the process, the default one last, and return the seconds that took. Idempotent.

        holders: objects through which all references to groups can be reached (see `replace_groups`). Using a group
        afterwards raises RuntimeError. No operation may be in progress on any rank, nor may any rank still be making a
        group: torch does not wait for the others there, and this call closes the connections that they are making.
        """
        if not self.formed:
            return 0.0
        start = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        world = distributed_c10d._world
        default = dist.group.WORLD
        self._groups = tuple(_describe(group) for group in world.pg_names if group is not default)
        self._count = world.group_count
        self._destroyed = {name: DestroyedGroup(name) for name in world.pg_names.values()}
        replace_groups(holders, {id(group): self._destroyed[name] for group, name in world.pg_names.items()})
        dist.destroy_process_group()
        return time.perf_counter() - start

    def form_again(self, holders: Iterable[object]) -> float:
        """Form all groups that `destroy` destroyed, and return the seconds that took. Idempotent.

        holders: the objects given to `destroy`. When a rank fails, all ranks destroy what they have formed and try once
        more. Raises RuntimeError on every rank when that fails too.
        """
        if self.formed:
            return 0.0
        start = time.perf_counter()
        failures = []
        for _ in range(_ATTEMPTS):
            failure = self._agree(self._attempt())
            if not failure:
                break
            failures.append(failure)
            self.close()
        else:
            raise RuntimeError(
                f"{self._name}: the process groups could not be formed again: {'; then '.join(failures)}"
            )
        names = distributed_c10d._world.pg_names
        replace_groups(holders, {id(self._destroyed[name]): group for group, name in names.items()})
        if self._forget is not None:
            for over in range(self._oldest, self._generation):  # No rank uses these generations any more.
                self._forget(f"generation {over}/")
            self._oldest = self._generation
        self._destroyed, self._groups = {}, ()
        return time.perf_counter() - start

    def close(self) -> None:
        """Destroy the groups, if there are any. Idempotent."""
        if self.formed:
            dist.destroy_process_group()

    # ---------------- These methods are private.

    @property
    def _prefix(self) -> str:
        return f"generation {self._generation}"

    def _attempt(self) -> str:
        """Try to form all groups. Returns the reason of a failure; "" on success."""
        try:
            self.form()
            world = distributed_c10d._world
            # This is the store of the default group, the only group so far.
            _, store = next(iter(world.pg_map.values()))
            for group in self._groups:
                self._make(group, store)
            self.prove()
            world.group_count = self._count  # Otherwise a later group would get one of these names.
            probe = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
            dist.all_reduce(probe)  # NCCL connects the ranks of a group only at its first operation.
            probe.item()
        except Exception as error:  # The other ranks have to learn of any error.
            self.close()  # This ends gloo collectives in which other ranks wait for this rank.
            return f"{self._name}: {type(error).__name__}: {error}"
        return ""

    def _make(self, group: _Group, store: Store) -> None:
        helper: Any = distributed_c10d._new_process_group_helper
        made, _ = helper(
            len(group.ranks),
            group.ranks.index(self._rank),
            list(group.ranks),
            group.backend,
            store,
            group.name,
            timeout=min(group.timeout, self._timeout),  # The group's own timeout can be a day.
            group_desc=group.description,
        )
        distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(group.ranks)}
        distributed_c10d._set_pg_timeout(group.timeout, made)

    def _agree(self, failure: str) -> str:
        """Tell the other ranks about this rank's attempt, wait for theirs, and return the failures of all ranks.

        The ranks communicate through the store, because they may have no group. A rank that does not answer counts as
        failed.
        """
        store = PrefixStore(self._prefix, self._store)
        keys = [f"outcome {rank}" for rank in range(self._world)]
        try:
            store.set(keys[self._rank], failure)
            store.wait(keys, self._timeout + timedelta(seconds=_GRACE_S))
            return "; ".join(filter(None, (store.get(key).decode() for key in keys)))
        except DistError as error:
            return failure or f"{self._name}: another rank does not answer: {error}"


def _describe(group: dist.ProcessGroup) -> _Group:
    world: Any = distributed_c10d._world
    ranks = world.pg_group_ranks[group]
    options = group._get_backend(group._device_types[0]).options
    return _Group(
        world.pg_names[group],
        world.pg_map[group][0],
        tuple(sorted(ranks, key=ranks.__getitem__)),
        options._timeout,
        group.group_desc,
    )
