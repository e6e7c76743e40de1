"""Keeps the partitions of a directory by their names: registers, extends, replaces, restores and forgets them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ...codecs.schema import Schema
from ..blobs.row_references import RowReferences, holder_of_blobs
from ..status import PartitionRows
from .partition import Partition, PartitionState
from .rows import Numbers
from .samplers import TaskConfig


class PartitionRegistry:
    """The partitions of one directory, by name. Iteration yields the partitions in order of registration."""

    def __init__(self, samplers: Collection[str]) -> None:
        """samplers: import paths of the samplers that tasks can name besides the built-in ones."""
        self._samplers = samplers
        self._partitions: dict[str, Partition] = {}
        self.group_numbers = Numbers()
        """Numbers of the groups of all partitions; each group has one of its own."""
        self.first_arrival = 0
        """Generation of the first row of a new partition. Partitions that were removed used only lower ones."""

    def __getitem__(self, name: str) -> Partition:
        """Return a partition. Raises ValueError if no partition of that name is registered."""
        try:
            return self._partitions[name]
        except KeyError:
            raise ValueError(
                f"partition {name!r}: not registered, expected one of {sorted(self._partitions)}"
            ) from None

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._partitions.values())

    def register(
        self, name: str, schema: Schema, tasks: Sequence[str | TaskConfig], group_size: int, *, redefine: bool = False
    ) -> Partition | None:
        """Declare a partition, as `Directory.register` does. Returns the replaced partition, whose rows the caller must
        clear, or None."""
        configs = _by_name(tasks)
        if not name or not len(schema) or group_size < 1 or len(configs) < len(tasks):
            raise ValueError(
                f"register {name!r}: got {len(schema)} fields, tasks {list(tasks)}, group_size={group_size}; "
                "expected a name, at least one field, task names once each, group_size >= 1"
            )
        known = self._partitions.get(name)
        if known is None:
            self._add(self._new(name, schema, configs, group_size))
            return None
        if known.knows(schema):
            schema = known.schema  # The partition's schema has fields that were added later.
        for what, old, new in (
            ("schema", known.schema, schema),
            ("tasks", _described(known.declared(configs)), _described(configs.values())),
            ("group_size", known.groups.group_size, group_size),
        ):
            if old != new and redefine:
                self.first_arrival = max(self.first_arrival, known.rows.next_arrival)
                made = self._new(name, schema, configs, group_size)
                self.remove(name)
                self._add(made)
                return known
            if old != new:
                raise ValueError(
                    f"register {name!r}: {what} {new}, but it is registered with {old}; redefine=True replaces it and "
                    "drops its rows, unregister drops it"
                )
        return None

    def _new(self, name: str, schema: Schema, tasks: Mapping[str, TaskConfig], group_size: int) -> Partition:
        part = Partition(name, schema, list(tasks.values()), group_size, self._samplers)
        part.rows.next_arrival = self.first_arrival
        return part

    def _add(self, part: Partition) -> None:
        self._partitions[part.name] = part
        self.add_blobs(part)

    def add_blobs(self, part: Partition) -> None:
        """Register a partition for the blobs of each field of `part` that has blobs and no such partition yet."""
        for field in part.schema.values():
            if field.parts and field.name not in part.blobs:
                part.references[field.name] = RowReferences()
                holder = self._new(holder_of_blobs(part.name, field.name), Schema(field.parts), {}, 1)
                part.blobs[field.name] = self._partitions[holder.name] = holder

    def add_tasks(self, name: str, tasks: Sequence[str | TaskConfig]) -> None:
        """Add tasks to a partition, as `Directory.add_tasks` does."""
        part = self[name]
        configs = _by_name(tasks)
        if len(configs) < len(tasks) or "" in configs:
            raise ValueError(f"add_tasks: got {list(tasks)}, expected task names once each")
        old = _described(cursor.config for cursor in part.tasks.values() if cursor.config.name in configs)
        new = _described(config for config in configs.values() if config.name in part.tasks)
        if old != new:
            raise ValueError(
                f"add_tasks to {name!r}: tasks {new}, but the partition has {old}; expected equal settings, or "
                "another name for the task, which then gets all rows of the partition"
            )
        part.add_tasks([config for config in configs.values() if config.name not in part.tasks])

    def remove(self, name: str) -> Partition:
        """Forget a partition, and return it, so that the caller can clear its rows. Raises ValueError if no partition
        of that name is registered."""
        part = self[name]
        for removed in (part, *part.blobs.values()):
            del self._partitions[removed.name]
            self.first_arrival = max(self.first_arrival, removed.rows.next_arrival)
        return part

    def restore(self, name: str, state: PartitionState, rows: PartitionRows) -> None:
        """Register a saved partition, as `Directory.restore` does."""
        if name in self._partitions:
            raise ValueError(
                f"load: partition {name!r} is registered already; expected another name (partition=), or unregister it"
            )
        self.register(name, state.schema, [task.config for task in state.tasks], state.group_size)
        try:
            self._partitions[name].restore(rows, state.tasks, self.group_numbers)
        except BaseException:
            self.remove(name)
            raise


def _by_name(tasks: Sequence[str | TaskConfig]) -> dict[str, TaskConfig]:
    """Return the settings of tasks by their names. A name alone stands for the default sampler."""
    return {task.name: task for task in (TaskConfig(t) if isinstance(t, str) else t for t in tasks)}


def _described(tasks: Iterable[TaskConfig]) -> list[str]:
    """Describe tasks as text in sorted order, for comparing two registrations and for showing their difference. The
    field `settled` is left out."""
    return sorted(
        f"{task.name} ({task.sampler}, {dict(sorted(task.options.items()))}, from prompt {task.first_prompt}"
        + (")" if task.max_hold_s is None else f", max_hold_s={task.max_hold_s:g})")
        for task in tasks
    )
