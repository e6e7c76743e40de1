"""Prompts of two rows in a pure directory, and claims of them by a task with a sampler."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.meta import POSITION, KVBatchMeta
from headrace.tests.dataplane.directory.directory_puts import GROUP, SCHEMA, put

FIELDS = ("ids",)


def base36(number: int) -> str:
    return np.base_repr(number, 36).lower()


def keys_of(number: int) -> list[str]:
    """The rows of one prompt."""
    return [f"{base36(number)}.{sample}" for sample in range(GROUP)]


def placed(*numbers: int, rows: int = GROUP) -> dict[str, np.ndarray]:
    """The tag that says where these prompts stand in the stream, for `rows` rows of each."""
    return {POSITION: np.repeat(numbers, rows)}


def opened(sampler: str, *, first_prompt: int = 0, group_size: int = GROUP, **options: object) -> Directory:
    own = (sampler,) if ":" in sampler else ()
    directory = Directory(capacity_bytes=1 << 30, lease_s=1e9, reserve_s=5.0, samplers=own)
    tasks = (TaskConfig("a", sampler, dict(options), first_prompt), "b")
    directory.register("p", SCHEMA, tasks, group_size)
    return directory


def put_prompt(directory: Directory, number: int, version: int = 0) -> None:
    put(directory, keys_of(number), FIELDS, versions=np.full(GROUP, version), tags=placed(number))


def claim(directory: Directory, groups: int = 1, *, at_least: int | None = None, **options: Any) -> KVBatchMeta | None:
    """Claim up to `groups` prompts, and at least `at_least` of them (None: all)."""
    least = None if at_least is None else at_least * GROUP
    return directory.claim(ClaimRows("p", "a", FIELDS, groups * GROUP, True, at_least=least, **options), 0.0)


def taken(meta: KVBatchMeta | None) -> list[int]:
    """Numbers of the prompts claimed, in the receipt's order; of None, none."""
    return [] if meta is None else [int(key.rpartition(".")[0], 36) for key in meta.keys[::GROUP]]
