"""Copies the whole state of a directory into plain data and back, for the beginning of a log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...codecs.schema import Schema
from ..directory.block_table import BlockTable
from ..directory.partition import Partition
from ..directory.partition_registry import PartitionRegistry
from ..directory.samplers import TaskConfig
from ..directory.task_cursor import LeaseBook
from ..meta import BlockRef


@dataclass(frozen=True, slots=True)
class SavedTask:
    """A task of a partition and what it knows of each row, in order of arrival."""

    config: TaskConfig
    column: np.ndarray
    """State of each row, int64 `[N]`, as in `TaskCursor.column`."""
    notes: np.ndarray
    first: int | None
    settled: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedReferences:
    """Holds the blobs to which the rows of a partition refer in one field. Rows and blobs are given by their positions
    in the order of arrival."""

    rows: np.ndarray
    counts: np.ndarray
    blobs: np.ndarray


@dataclass(frozen=True, slots=True)
class SavedPartition:
    """A partition with its rows, in order of arrival. The arrays are those of `RowTable`, one item for each row."""

    name: str
    schemas: tuple[Schema, ...]
    """The schema at registration, and after each addition of fields."""
    group_size: int
    tasks: tuple[SavedTask, ...]
    registered: tuple[str, ...]
    died: tuple[str, ...]
    keys: np.ndarray
    lengths: np.ndarray
    versions: np.ndarray
    arrivals: np.ndarray
    group_names: np.ndarray
    group_numbers: np.ndarray
    slots: dict[str, np.ndarray]
    tags: dict[str, np.ndarray]
    tag_given: dict[str, np.ndarray]
    next_arrival: int
    any_lost: bool
    references: dict[str, SavedReferences]
    """References of each field with blobs."""


@dataclass(frozen=True, slots=True)
class SavedLease:
    lease_id: int
    partition: str
    task: str
    positions: np.ndarray
    """Position of each row that the lease holds, in the order of arrival, int64 `[N]`."""
    holder: str


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block; the fields are the arguments of `BlockTable.add`."""

    ref: BlockRef
    row_starts: np.ndarray | None
    nbytes: int
    live: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of a directory without its reservations."""

    partitions: tuple[SavedPartition, ...]
    blocks: tuple[SavedBlock, ...]
    leases: tuple[SavedLease, ...]
    num_groups: int
    """Number of the next group."""
    first_arrival: int
    next_lease: int
    puts_elsewhere: int


def saved(registry: PartitionRegistry, blocks: BlockTable, leases: LeaseBook, puts_elsewhere: int) -> SavedState:
    """Copy the state of a directory, given by its parts."""
    found = []
    for lease in leases.of():
        part = registry[lease.partition]
        column = part.tasks[lease.task].column[part.rows.live()]
        positions = np.flatnonzero(column == lease.lease_id)
        found.append(SavedLease(lease.lease_id, lease.partition, lease.task, positions, lease.holder))
    return SavedState(
        tuple(_saved_partition(part) for part in registry),
        tuple(SavedBlock(item.ref, item.row_starts, item.nbytes, item.live) for item in blocks.entries.values()),
        tuple(found),
        registry.group_numbers.end,
        registry.first_arrival,
        leases.next_id,
        puts_elsewhere,
    )


def _saved_partition(part: Partition) -> SavedPartition:
    table, rows = part.rows, part.rows.live()
    groups = table.groups[rows]
    tasks = []
    for cursor in part.tasks.values():
        first, ahead = (None, ()) if cursor.progress is None else (cursor.progress.first, cursor.progress.ahead)
        tasks.append(SavedTask(cursor.config, cursor.column[rows], cursor.notes_of(rows), first, tuple(sorted(ahead))))
    return SavedPartition(
        part.name,
        tuple(part.schemas.values()),
        part.groups.group_size,
        tuple(tasks),
        tuple(part.registered),
        tuple(part.died),
        table.keys[rows],
        table.lengths[rows],
        table.versions[rows],
        table.arrivals[rows],
        part.groups.names[groups],
        part.groups.numbers[groups],
        {name: column[rows] for name, column in table.slots.items()},
        {name: column[rows] for name, column in table.tags.items()},
        {name: column[rows] for name, column in table.tag_given.items()},
        table.next_arrival,
        table.any_lost,
        {name: _saved_references(part, name) for name in part.blobs},
    )


def _saved_references(part: Partition, field: str) -> SavedReferences:
    of_row, live = part.references[field].of_row, part.rows.live().tolist()
    place = {blob: i for i, blob in enumerate(part.blobs[field].rows.live().tolist())}
    rows = [i for i, row in enumerate(live) if row in of_row]
    blobs = [sorted(place[blob] for blob in of_row[live[i]].tolist()) for i in rows]
    counts = np.array([len(listed) for listed in blobs], dtype=np.int64)
    return SavedReferences(np.array(rows, np.int64), counts, np.array([b for one in blobs for b in one], np.int64))


def load(
    state: SavedState, registry: PartitionRegistry, blocks: BlockTable, leases: LeaseBook, now: float, lease_s: float
) -> None:
    """Give the parts of a new directory a saved state. Leases run out `lease_s` seconds after `now`."""
    for block in state.blocks:
        blocks.add(block.ref, block.row_starts, block.nbytes, block.live)
    rows = {item.name: _load_partition(item, registry) for item in state.partitions}
    for item in state.partitions:
        part = registry[item.name]
        for name, saved in item.references.items():
            part.references[name].set(
                rows[item.name][saved.rows], saved.counts, rows[part.blobs[name].name][saved.blobs]
            )
    for lease in state.leases:
        config = registry[lease.partition].tasks[lease.task].config
        leases.next_id = lease.lease_id
        leases.grant(lease.partition, config, rows[lease.partition][lease.positions], now, lease_s, lease.holder)
    registry.group_numbers.end = state.num_groups
    registry.first_arrival = state.first_arrival
    leases.next_id = state.next_lease


def _load_partition(saved: SavedPartition, registry: PartitionRegistry) -> np.ndarray:
    """Register a saved partition with its rows. Returns the numbers of the rows."""
    tasks = [task.config for task in saved.tasks if task.config.name in saved.registered]
    registry.register(saved.name, saved.schemas[0], tasks, saved.group_size)
    part = registry[saved.name]
    for schema in saved.schemas[1:]:
        part.add_fields(list(schema.values()))
    registry.add_blobs(part)
    part.add_tasks([task.config for task in saved.tasks if task.config.name not in saved.registered])
    part.died[:] = saved.died
    table = part.rows
    keys: list[str] = saved.keys.tolist()
    numbers = dict(zip(saved.group_names.tolist(), saved.group_numbers.tolist(), strict=True))
    groups = part.groups.intern(list(numbers), registry.group_numbers)
    part.groups.numbers[groups] = list(numbers.values())
    rows = table.add(keys, part.groups.find(saved.group_names.tolist()))
    part.groups.add(rows, table.groups[rows])
    table.lengths[rows], table.versions[rows], table.arrivals[rows] = saved.lengths, saved.versions, saved.arrivals
    for name, column in saved.slots.items():
        table.slots[name][rows] = column
        table.num_written[name] = int((column >= 0).sum())
    for name, values in saved.tags.items():
        table.set_tag(name, rows, values)
        table.tag_given[name][rows] = saved.tag_given[name]
    table.next_arrival, table.any_lost = saved.next_arrival, saved.any_lost
    for task in saved.tasks:
        cursor = part.tasks[task.config.name]
        cursor.grow()
        for value in np.unique(task.column):
            cursor.set(rows[task.column == value], int(value))
        cursor.restore_notes(rows, task.notes)
        if cursor.progress is not None and task.first is not None:
            cursor.progress.first, cursor.progress.ahead = task.first, set(task.settled)
    return rows
