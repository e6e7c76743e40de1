"""Ray actors of the process tests: a client in a process of its own, told what to do."""

from __future__ import annotations

import os
import time
from typing import Any

import ray

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.testing.data_plane import assert_rows
from headrace.tests.dataplane.rows import FIRST, columns, keys_of, stop_after_first_block


class Worker:
    """One process with one client. Times are CLOCK_MONOTONIC seconds, comparable between processes of a host."""

    _client: DataPlaneClient

    def join(self, handle: DataPlaneHandle, name: str) -> None:
        self._client = connect(handle, name=name)

    def leave(self) -> None:
        self._client.close()

    def pid(self) -> int:
        return os.getpid()

    def put(self, partition: str, keys: list[str], version: int | None = None) -> tuple[Any, float]:
        """(receipt, when the put was through)."""
        return self._client.put(partition, keys, columns(keys), versions=version), time.monotonic()

    def produce(self, partition: str, prompts: range, samples: int) -> int:
        """One put a group. Returns rows put."""
        for prompt in prompts:
            keys = keys_of(range(prompt, prompt + 1), samples)
            self._client.put(partition, keys, columns(keys), versions=prompt)
        return len(prompts) * samples

    def consume(self, partition: str, num_rows: int, share: int) -> list[str]:
        """Claim, read, check and release `share` rows at a time until the task is through with `num_rows`."""
        seen: list[str] = []
        while len(seen) < num_rows:
            meta = self._client.claim(partition, "train", FIRST, share, whole_groups=True, timeout_s=30)
            assert_rows(self._client.get(meta), list(meta.keys), FIRST)
            self._client.release(meta, "train", "done")
            seen.extend(meta.keys)
        return seen

    def read(self, receipt: Any, fields: tuple[str, ...] = FIRST) -> None:
        """Read with another client's receipt, and check every byte."""
        assert_rows(self._client.get(receipt, fields), list(receipt.keys), fields)

    def claim(self, partition: str, num_rows: int, timeout_s: float = 30) -> tuple[Any, float, int]:
        """(receipt, when the claim returned, directory calls it took)."""
        before = self._client.stats.directory_calls
        meta = self._client.claim(partition, "train", FIRST, num_rows, timeout_s=timeout_s)
        return meta, time.monotonic(), self._client.stats.directory_calls - before

    def put_and_hang(self, partition: str, keys: list[str], mark: str) -> None:
        """Write the first block of a put, create file `mark`, and never continue."""

        def hang() -> None:
            open(mark, "w").close()
            time.sleep(600)

        stop_after_first_block(self._client._operations.store, hang)
        self._client.put(partition, keys, columns(keys))


def start(handle: DataPlaneHandle, idle: list[Any], *names: str) -> list[Any]:
    """A Worker actor per name, joined to a data plane. It is taken off `idle` while there are some, since a process
    takes seconds to start."""
    actor_class: Any = ray.remote(Worker)
    workers = [idle.pop() if idle else actor_class.options(num_cpus=0, max_concurrency=3).remote() for _ in names]
    ray.get([worker.join.remote(handle, name) for worker, name in zip(workers, names, strict=True)], timeout=60)
    return workers


def leave(workers: list[Any]) -> list[Any]:
    """The workers, ready for another data plane."""
    ray.get([worker.leave.remote() for worker in workers], timeout=60)
    return workers
