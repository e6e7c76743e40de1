"""Random operations of three processes that are killed, stopped and interrupted on one plane; every read is checked.

python -m headrace.tests.drills.plane_model --kind tcp --operations 20000 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import signal
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from headrace.codecs.jagged import unpack
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import ClaimTimeout, DataPlaneError, PeerLost
from headrace.dataplane.factory import DataPlane, connect, open_data_plane, open_storage_unit
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.interrupted_calls import OwnError, alarms
from headrace.tests.waiting import wait_until

SCHEMA = Schema(
    [
        Field("x", Kind.PER_SAMPLE, torch.int64),
        Field("ids", Kind.PER_TOKEN, torch.int64),
        Field("note", Kind.OBJECT),
        Field("result", Kind.PER_SAMPLE, torch.int64, (2,)),
    ]
)
FIRST = ["x", "ids", "note"]
GROUP, WORKERS = 3, 3
LEASE_S, RESERVE_S = 2.0, 3.0
CAPACITY_MIB = 6
GROWTH_BYTES = 32 << 20
"""Memory that the directory may keep beyond what it had after its first rows."""


def value(key: str) -> int:
    """What the fields of a row hold, so that every read can be checked by the row's key alone."""
    return zlib.crc32(key.encode())


def columns(keys: Sequence[str]) -> dict[str, Any]:
    values = [value(key) for key in keys]
    ids = [torch.full((number % 1500 if number % 5 else 0,), number) for number in values]
    return {
        "x": torch.tensor(values),
        "ids": ids,
        "note": [{"v": number, "s": "z" * (number % 97)} for number in values],
    }


def check(keys: Sequence[str], batch: Any, fields: Sequence[str]) -> None:
    """Assert that a batch holds the rows of `keys`, whole."""
    expected, found = columns(keys), unpack(batch)
    for name in fields:
        for key, want, got in zip(keys, expected[name], found[name], strict=True):
            same = torch.equal(want, got) if isinstance(got, torch.Tensor) else want == got
            assert same, f"row {key}, field {name}: got {got}, expected {want}"


class Worker:
    """One process of the model. It logs what it does in lines of [time, what, keys, number]."""

    def __init__(self, text: str, folder: Path, number: int, seed: int) -> None:
        self._client: Any = connect(text, name=f"worker {number}")
        self._log = open(folder / f"log-{number}", "ab", buffering=0)
        self._operations = open(folder / "operations", "ab", buffering=0)
        self._random = random.Random(seed)
        self._name, self._puts = number, 0
        self._held: list[tuple[str, Any]] = []
        self._old: list[Any] = []
        self._cleared = set[str]()

    def say(self, what: str, keys: Sequence[str] = (), number: int = 0) -> None:
        self._log.write(json.dumps([time.monotonic(), what, list(keys), number]).encode() + b"\n")

    def run(self, stop: Path) -> None:
        with alarms(OwnError):
            while not stop.exists():
                call = self._random.choices((self.put, self.consume, self.come_late, self.read), (25, 45, 15, 15))[0]
                self._operations.write(b".")
                try:
                    try:
                        if self._random.random() < 0.1:
                            signal.setitimer(signal.ITIMER_REAL, self._random.random() * 0.005 + 1e-6)
                        call()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except OwnError:
                    self.say("interrupted")
                except ClaimTimeout:
                    pass
                except AssertionError as error:
                    self.say(f"WRONG {error}")
                except DataPlaneError as error:
                    self.say(f"refused {type(error).__name__}", error.keys)
                except Exception:
                    self.say(f"BUG {traceback.format_exc()[-800:]}")
        self._client.close()

    def put(self) -> None:
        self._puts += 1
        count = GROUP * self._random.choice((1, 1, 2, 5))
        keys = [f"{self._name}-{self._puts}-{row // GROUP}.{row}" for row in range(count)]
        self.say("put", keys)
        try:
            receipt = self._client.put("p", keys, columns(keys), timeout_s=self._random.choice((0.1, 1.0)))
        except (OwnError, DataPlaneError) as error:
            self.say("put unknown" if isinstance(error, PeerLost) else "put refused", keys)
            raise
        self.say("put ok", keys)
        self._old = [*self._old[-30:], receipt]

    def consume(self) -> None:
        task = self._random.choice("ab")
        fields = FIRST if task == "a" else [*FIRST, "result"]
        receipt = self._client.claim("p", task, fields, 2 * GROUP, at_least=1, timeout_s=self._random.random() * 0.05)
        self._read_claimed(task, receipt)
        chance = self._random.random()
        if chance < 0.15:
            self._held.append((task, receipt))
        elif chance < 0.3:
            self._client.release(receipt, task, "retry")
        elif chance > 0.4:  # Between them, the receipt is dropped.
            self._finish(task, receipt)

    def _read_claimed(self, task: str, receipt: Any) -> None:
        claimed_s = time.monotonic()
        batch = self._client.get(receipt)
        check(receipt.keys, batch, FIRST)
        if task == "b":
            for key, (number, lease_id) in zip(receipt.keys, batch["result"].tolist(), strict=True):
                assert number == value(key), f"row {key}: result of {number}"
                self._log.write(json.dumps([claimed_s, "result read", [key], lease_id]).encode() + b"\n")

    def _finish(self, task: str, receipt: Any) -> None:
        if task == "a":
            result = torch.tensor([[value(key), receipt.lease_id] for key in receipt.keys])
            self._client.write(receipt, {"result": result}, replace=True, timeout_s=4.0)
        self._client.release(receipt, task, "done")
        self.say(f"done {task}", receipt.keys, receipt.lease_id)
        if task == "b":
            self._clear(receipt.keys)

    def _clear(self, keys: Sequence[str]) -> None:
        self.say("clear", keys)
        self._cleared.update(keys)
        self._client.clear("p", keys)
        self.say("clear ok", keys)

    def come_late(self) -> None:
        """Finish rows that were held for long, by their receipt or by their keys.

        Rows that this client has cleared itself, after it lost them to another, it may put again by their keys, so
        these are finished by their receipt.
        """
        if not self._held:
            return
        task, receipt = self._held.pop(self._random.randrange(len(self._held)))
        if task == "a" and self._random.random() < 0.5 and self._cleared.isdisjoint(receipt.keys):
            result = torch.tensor([[value(key), receipt.lease_id] for key in receipt.keys])
            self._client.put("p", receipt.keys, {"result": result}, replace=True, timeout_s=4.0)
        self._finish(task, receipt)

    def read(self) -> None:
        if self._old:
            receipt = self._random.choice(self._old)
            part = receipt.select([self._random.randrange(len(receipt)) for _ in range(3)])
            fields = self._random.sample(FIRST, 2)
            batch = self._client.get(part, fields)
            check(part.keys, batch, fields)
            keys = receipt.keys[:GROUP]
            check(keys, self._client.get_keys("p", keys, FIRST), FIRST)


def work(text: str, folder: Path, number: int, seed: int) -> None:
    torch.set_num_threads(1)
    Worker(text, folder, number, seed).run(folder / "stop")


class Model:
    """Starts the workers, does harm to them and to the plane's processes, and judges what is left."""

    def __init__(self, plane: DataPlane, kind: str, folder: Path, seed: int) -> None:
        self._plane, self._kind, self._folder, self._seed = plane, kind, folder, seed
        self._random = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])  # A worker that was killed is replaced in no time.
        self._workers: list[Any] = []
        self._started = 0
        self._stopped: dict[int, float] = {}
        self._units: list[Any] = []
        self.faults: dict[str, int] = defaultdict(int)

    def run(self, operations: int) -> None:
        """Let the workers make so many operations."""
        done = self._folder / "operations"
        done.touch()
        while done.stat().st_size < operations:
            self._workers = [one for one in self._workers if one.is_alive()]
            while len(self._workers) < WORKERS:
                self._spawn()
            time.sleep(self._random.uniform(0.1, 3.0))
            for pid in [pid for pid, until in self._stopped.items() if time.monotonic() > until]:
                self._go_on(pid)
            self._harm()
        for pid in list(self._stopped):
            self._go_on(pid)
        (self._folder / "stop").touch()
        for one in self._workers:
            one.join(60)
            assert one.exitcode == 0, f"a worker ended with {one.exitcode}"

    def end(self) -> None:
        """End what the model started, whatever became of it."""
        for pid in list(self._stopped):
            self._go_on(pid)
        for one in self._workers:
            one.kill()
            one.join()
        for unit in self._units:
            unit.close()

    def _spawn(self) -> None:
        self._started += 1
        text = self._plane.handle.to_text()
        arguments = (text, self._folder, self._started, self._seed * 1000 + self._started)
        self._workers.append(self._context.Process(target=work, args=arguments))
        self._workers[-1].start()

    def _harm(self) -> None:
        chance, worker = self._random.random(), self._random.choice(self._workers)
        units = [pid for name, pid in self._plane.processes().items() if name != "directory"]
        if chance < 0.2 and worker.pid not in self._stopped:
            self._workers.remove(worker)
            worker.kill()
            worker.join()
            self.faults["kill"] += 1
        elif chance < 0.5:
            self._stop(worker.pid, 2 * LEASE_S)
        elif chance < 0.65:
            self._stop(self._plane.serving_pid(), 1.0)
        elif chance < 0.8 and units:
            self._stop(self._random.choice(units), 2.0)
        elif chance < 0.82 and self._kind == "tcp" and not self._units:
            if (directory := self._plane.serving_pid()) in self._stopped:
                self._go_on(directory)  # This process would wait for it below, and so could not let it go on.
            psutil.Process(self._random.choice(units)).kill()
            self._units.append(open_storage_unit(self._plane.handle, listen="127.0.0.1"))
            self.faults["unit killed"] += 1

    def _stop(self, pid: int, most_s: float) -> None:
        if pid not in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):  # A unit may have been killed.
                psutil.Process(pid).suspend()
                self._stopped[pid] = time.monotonic() + self._random.uniform(0.1, most_s)
                self.faults["stop"] += 1

    def _go_on(self, pid: int) -> None:
        del self._stopped[pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).resume()

    def events(self) -> list[tuple[float, str, list[str], int]]:
        """Everything that the workers logged, in the order of time. A killed worker's last line may be cut short."""
        found = []
        for path in self._folder.glob("log-*"):
            for line in path.read_text().splitlines():
                if line.endswith("]"):
                    found.append(tuple(json.loads(line)))
        return sorted(found)

    def judge(self, present: set[str]) -> list[str]:
        """Return what is wrong with the history and the rows that are there now."""
        of: dict[str, set[str]] = defaultdict(set)
        done: dict[tuple[str, str], list[int]] = defaultdict(list)
        finished: dict[str, tuple[float, int]] = {}
        wrong = []
        for at, what, keys, number in self.events():
            of[what].update(keys)
            if what.startswith(("WRONG", "BUG")):
                wrong.append(what)
            for key in keys if what.startswith("done ") else ():
                done[what, key].append(number)
                if what == "done a":
                    finished[key] = at, number
            if what == "result read" and keys[0] in finished and finished[keys[0]][0] < at:
                if finished[keys[0]][1] != number:
                    wrong.append(f"result of {keys[0]} is of lease {number}, but {finished[keys[0]]} had finished it")
        wrong += [f"{what} twice: {key} {leases}" for (what, key), leases in done.items() if len(leases) > 1]
        wrong += [f"a ghost: {key}" for key in present & of["clear ok"]]
        if not self.faults["unit killed"]:
            wrong += [f"lost: {key}" for key in of["put ok"] - of["clear"] - present]
        wrong += [f"refused, but there: {key}" for key in present & of["put refused"]]
        return wrong


def run_model(kind: str, operations: int, seed: int, folder: Path) -> str:
    """Run the model and check what is left. Returns a line of figures. Raises AssertionError for anything wrong."""
    store = StoreConfig.model_validate({"kind": kind, "capacity_mib": CAPACITY_MIB, "num_units": 2})
    config = DataPlaneConfig(
        store=store, timeout_s=4.0, lease_s=LEASE_S, reserve_s=RESERVE_S, integrity="verify", trusted_network=True
    )
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ["a", "b"], group_size=GROUP)
        for number in range(200):
            client.put("p", [f"warm-{number}.0"], columns(["warm"]))
            client.clear("p")
        directory = psutil.Process(plane.serving_pid())
        base = directory.memory_info().rss
        model = Model(plane, kind, folder, seed)
        try:
            model.run(operations)
        finally:
            model.end()
        wait_until(lambda: client.status().leases == 0, "an orphan lease", 2 * LEASE_S + RESERVE_S)
        rows = client.rows("p")
        wrong = model.judge(set(rows.keys.tolist()))
        if not model.faults["unit killed"]:
            wrong += [
                f"half a row: {key}" for key in rows.keys[~np.logical_and.reduce([rows.written[f] for f in FIRST])]
            ]
        assert not wrong, "\n".join(wrong[:20])
        client.clear("p")
        names = ("rows", "leases", "blocks", "bytes_used", "bytes_reserved", "waiting_claims", "waiting_puts")
        wait_until(lambda: not any(getattr(client.status(), name) for name in names), "something is left")
        grown = directory.memory_info().rss - base
        assert grown < GROWTH_BYTES, f"the directory grew by {grown} bytes"
        kinds = defaultdict(int)
        for _, what, _, _ in model.events():
            kinds[what] += 1
        return f"{kind} seed {seed}: faults {dict(model.faults)}, grown {grown >> 10} KiB, {dict(kinds)}"


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run_model(options.kind, options.operations, options.seed, Path(folder)))


if __name__ == "__main__":
    main()
