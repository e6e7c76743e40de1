"""The hook that every process of a chaos run loads at its start, to patch the library's modules on import.

Python imports the module `sitecustomize` at its start. The drill puts one on the module path that calls `install`.
If the environment names a control folder, the patched modules write a note whenever rows are put, read or trained, and
ordered faults affect their calls; otherwise nothing is patched. Of the library, only public names are used.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.tests.drills.chaos.control import VARIABLE, Control
from headrace.tests.drills.chaos.faulty_calls import Faults, install_clock_fault, install_file_faults, slowed

SITE = "import headrace.tests.drills.chaos.hook as hook\nhook.install()\n"
"""Content of the file `sitecustomize.py`, which every Python process of the run imports at its start."""
RUN_FOLDER = "HEADRACE_CHAOS_RUN"
"""Environment variable with the path of the run folder. Full and slow disks are simulated for the files in it."""


def _patch_async_client(module: ModuleType, faults: Faults) -> None:
    client: Any = module.AsyncDataPlaneClient
    put = client.put

    @functools.wraps(put)
    async def noted_put(self: Any, partition: str, keys: Sequence[str], fields: Any, **named: Any) -> Any:
        from headrace.tests.drills.chaos.digests import row_digests

        place = {"plane": self.plane_id, "partition": partition, "keys": list(keys)}
        # Before and after: a process may be killed between the commit and the note of it.
        faults.control.note(putting=row_digests(fields), **place)
        receipt = await put(self, partition, keys, fields, **named)
        faults.control.note(put=True, **place)
        return receipt

    client.put = noted_put


def _patch_client(module: ModuleType, faults: Faults) -> None:
    client: Any = module.DataPlaneClient
    get = client.get

    @functools.wraps(get)
    def noted_get(self: Any, meta: Any, *arguments: Any, **named: Any) -> Any:
        from headrace.tests.drills.chaos.digests import row_digests

        batch = get(self, meta, *arguments, **named)
        faults.control.note(read=row_digests(batch), **_place(meta))
        return batch

    client.get = noted_get
    get_blobs = client.get_blobs

    @functools.wraps(get_blobs)
    def noted_blobs(self: Any, meta: Any, field: str, *arguments: Any, **named: Any) -> Any:
        from headrace.tests.drills.chaos.digests import blob_digests

        found = get_blobs(self, meta, field, *arguments, **named)
        faults.control.note(read={field: blob_digests(found, meta.schema[field])}, **_place(meta))
        return found

    client.get_blobs = noted_blobs


def _place(meta: Any) -> dict[str, Any]:
    """Return where the rows of a receipt are, as notes say it."""
    return {"plane": meta.plane_id, "partition": meta.partition, "keys": list(meta.keys)}


def _patch_train_worker(module: ModuleType, faults: Faults) -> None:
    worker: Any = module.TrainWorker
    begin, finish = worker.begin, worker.finish
    begun: list[tuple[int, dict[str, Any]]] = []
    """Shards that this process has begun and not finished, as (step, place). A process has one train worker."""

    @functools.wraps(begin)
    def noted_begin(self: Any, shard: Any) -> Any:
        from headrace.dataplane.meta import KVBatchMeta

        result = begin(self, shard)
        begun[:] = [one for one in begun if one[0] == shard.step]
        if shard.meta is not None:
            begun.append((shard.step, _place(KVBatchMeta.from_bytes(shard.meta))))
        return result

    @functools.wraps(finish)
    def noted_finish(self: Any) -> Any:
        report = finish(self)
        for step, place in begun:
            faults.control.note(trained=step, **place)
        begun.clear()
        return report

    worker.begin, worker.finish = noted_begin, noted_finish


class _Observer:
    """Notes which groups the driver has counted as trained on."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def opened(self, plane_id: int, partition: str, step: int) -> None:
        self._control.note(begins=step, plane=plane_id, partition=partition)

    def committed(self, plane_id: int, partition: str, step: int, positions: Sequence[int]) -> None:
        self._control.note(committed=step, positions=list(positions), plane=plane_id, partition=partition)


def _observe_feed(module: ModuleType, faults: Faults) -> None:
    feed: Any = module.Feed
    feed.observers.append(_Observer(faults.control))


def _wrap_stores(module: ModuleType, faults: Faults) -> None:
    wrappers: Any = module.WRAPPERS
    for kind in ("shm", "simple", "tcp"):
        wrappers[kind] = functools.partial(_faulty_store, kind, faults)


def _faulty_store(kind: str, faults: Faults, entry: Any) -> Any:
    """Return the entry of a store whose calls are slow, and which has no room, while faults of that kind last."""

    def slow(one: Any, *names: str) -> Any:
        for name in names:
            if hasattr(one, name):
                setattr(one, name, slowed(faults, getattr(one, name)))
        return one

    def open_host(config: Any, run_id: str, host: str) -> Any:
        opened = slow(entry.open_host(config, run_id, host), "allocate" if kind == "shm" else "free_many")
        if kind == "shm":
            _limit_room(opened, faults)
        return opened

    def attach(spec: Any, link: Any) -> Any:
        return slow(entry.attach(spec, link), "put", "put_many", "put_to", "get", "read_ranges")

    return dataclasses.replace(entry, open_host=open_host, attach=attach)


def _limit_room(host: Any, faults: Faults) -> None:
    """Let the host of the store `shm` find no room while a fault `shm` lasts. What it has allocated stays."""
    allocate, has_ready, make_ready, shortage = host.allocate, host.has_ready, host.make_ready, host.shortage
    host.allocate = lambda block_id, nbytes: None if faults.strikes("shm") else allocate(block_id, nbytes)
    host.has_ready = lambda nbytes: not faults.strikes("shm") and has_ready(nbytes)
    host.make_ready = lambda nbytes: None if faults.strikes("shm") else make_ready(nbytes)
    host.shortage = lambda: os.strerror(errno.ENOSPC) if faults.strikes("shm") else shortage()


PATCHES: dict[str, Callable[[ModuleType, Faults], None]] = {
    "headrace.dataplane.client.async_client": _patch_async_client,
    "headrace.dataplane.client.client": _patch_client,
    "headrace.actors.train.worker": _patch_train_worker,
    "headrace.trainers.grpo.feed": _observe_feed,
    "headrace.dataplane.stores.registry": _wrap_stores,
}
"""Functions that change the library's modules after their import, by the name of the module. They use public names:
calls that are wrapped, the observers of feeds, and the wrappers of stores."""


class _Patcher(importlib.abc.MetaPathFinder):
    """Import hook that finds the modules of PATCHES as Python does, and patches each right after its execution."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            PATCHES[fullname](module, self._faults)
            self._faults.listen()

        loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Install the patches if the environment says that this process belongs to a chaos run; otherwise do nothing."""
    folder, run_folder = os.environ.get(VARIABLE), os.environ.get(RUN_FOLDER)
    if not folder or not run_folder:
        return
    faults = Faults(Control(Path(folder)))
    install_file_faults(faults, run_folder)
    install_clock_fault(faults)
    sys.meta_path.insert(0, _Patcher(faults))
