"""The hook that every process of a chaos run loads at its start, to patch the library's modules on import.

Python imports the module `sitecustomize` at its start. The drill puts one on the module path that calls `install`.
If the environment names a control folder, the patched modules write a note whenever rows are put, read or trained, and
ordered faults affect their calls; otherwise nothing is patched. The library itself contains no code for this.
"""

from __future__ import annotations

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
from headrace.tests.drills.chaos.faulty_calls import Faults, install_file_faults, slowed

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

        place = {"plane": self._operations.handle.store.plane_id, "partition": partition, "keys": list(keys)}
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
        place = {"plane": meta.plane_id, "partition": meta.partition, "keys": list(meta.keys)}
        faults.control.note(read=row_digests(batch), **place)
        return batch

    client.get = noted_get


def _patch_train_worker(module: ModuleType, faults: Faults) -> None:
    worker: Any = module.TrainWorker
    begin, finish = worker.begin, worker.finish

    @functools.wraps(begin)
    def noted_begin(self: Any, shard: Any) -> Any:
        result = begin(self, shard)
        meta = self._work.meta
        step, shards = getattr(self, "_chaos", (0, []))
        shards = shards if step == shard.step else []
        if meta is not None:
            shards.append({"plane": meta.plane_id, "partition": meta.partition, "keys": list(meta.keys)})
        self._chaos = (shard.step, shards)
        return result

    @functools.wraps(finish)
    def noted_finish(self: Any) -> Any:
        report = finish(self)
        step, shards = self._chaos
        for shard in shards:
            faults.control.note(trained=step, **shard)
        self._chaos = (step, [])
        return report

    worker.begin, worker.finish = noted_begin, noted_finish


def _patch_feed(module: ModuleType, faults: Faults) -> None:
    feed: Any = module.Feed
    init, commit = feed.__init__, feed.commit

    @functools.wraps(init)
    def noted_init(self: Any, config: Any, state: Any, **named: Any) -> None:
        init(self, config, state, **named)
        self._chaos = {"plane": self._client._operations.handle.store.plane_id, "partition": self._partition}
        faults.control.note(begins=state.step, **self._chaos)

    @functools.wraps(commit)
    def noted_commit(self: Any) -> None:
        if self._claimed:
            faults.control.note(committed=self._state.step, positions=sorted(self._claimed), **self._chaos)
        commit(self)

    feed.__init__, feed.commit = noted_init, noted_commit


def _patch_shared_memory(module: ModuleType, faults: Faults) -> None:
    store: Any = module.SharedMemoryStore
    store.put, store.get = slowed(faults, store.put), slowed(faults, store.get)
    host: Any = module.SharedMemoryHost
    place, has_ready = host._place, host.has_ready

    @functools.wraps(place)
    def full_place(self: Any, block_id: int, size: int) -> bytes | None:
        faults.delay("slow_store")
        return None if faults.strikes("shm") else place(self, block_id, size)

    @functools.wraps(has_ready)
    def full_has_ready(self: Any, nbytes: int) -> bool:
        return not faults.strikes("shm") and has_ready(self, nbytes)

    host._place, host.has_ready = full_place, full_has_ready
    extend = host._extend

    @functools.wraps(extend)
    def full_extend(self: Any, size: int) -> bool:
        if not faults.strikes("shm"):
            return extend(self, size)
        self._back("pool", 0, size)  # which the kernel now refuses, so that the store can say why
        return False

    host._extend = full_extend


def _patch_simple(module: ModuleType, faults: Faults) -> None:
    store: Any = module.SimpleStore
    store.put_many, store.get = slowed(faults, store.put_many), slowed(faults, store.get)
    host: Any = module.SimpleHost
    host.free_many = slowed(faults, host.free_many)


def _patch_tcp(module: ModuleType, faults: Faults) -> None:
    store: Any = module.TcpStore
    store.put_many, store.get = slowed(faults, store.put_many), slowed(faults, store.get)
    store.read_ranges = slowed(faults, store.read_ranges)


def _patch_tcp_host(module: ModuleType, faults: Faults) -> None:
    host: Any = module.TcpHost
    host.free_many = slowed(faults, host.free_many)


PATCHES: dict[str, Callable[[ModuleType, Faults], None]] = {
    "headrace.dataplane.client.async_client": _patch_async_client,
    "headrace.dataplane.client.client": _patch_client,
    "headrace.actors.train.worker": _patch_train_worker,
    "headrace.trainers.grpo.feed": _patch_feed,
    "headrace.dataplane.stores.shared_memory": _patch_shared_memory,
    "headrace.dataplane.stores.simple": _patch_simple,
    "headrace.dataplane.stores.tcp.store": _patch_tcp,
    "headrace.dataplane.stores.tcp.host": _patch_tcp_host,
}
"""Functions that patch the library's modules after their import, by the name of the module."""


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
    sys.meta_path.insert(0, _Patcher(faults))
