"""Builds the sampler that a task names."""

from __future__ import annotations

from collections.abc import Collection

from ..imports import import_object
from .rank_samplers import RankShares
from .samplers import ORDERS, FirstInOrder, Sampler, TaskConfig, Windowed

FOR_RANKS = ("rank_aware", "length_balanced")
"""Names of the samplers whose claims are made by single ranks."""
BUILT_IN = ("oldest_version_first", "ready_first", "in_order", "windowed", *FOR_RANKS)


def build_sampler(task: TaskConfig, own: Collection[str]) -> Sampler:
    """Build the task's sampler.

    own: import paths that the task may name, those of `dataplane.samplers`. No other module is imported, as tasks come
    from clients. Raises ValueError for an unknown name or another import path, for options that the sampler does not
    take, and for a factory that does not return a Sampler.
    """
    where = f"task {task.name!r}: sampler {task.sampler!r}"
    try:
        if task.sampler == "oldest_version_first":
            return FirstInOrder("version", **task.options)
        if task.sampler == "ready_first":
            return FirstInOrder("ready", **task.options)
        if task.sampler == "in_order":
            return Windowed(1, **task.options)
        if task.sampler == "windowed":
            return Windowed(**task.options)
        if task.sampler == "rank_aware":
            return RankShares(**task.options, balanced=False)
        if task.sampler == "length_balanced":
            return RankShares(**task.options, balanced=True)
        if task.sampler not in own:
            raise ValueError(
                f"expected {', '.join(BUILT_IN)}, or one of the import paths that the configuration key "
                f"dataplane.samplers lists, {list(own)}"
            )
        built = import_object(task.sampler, "factory")(**task.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    parts = ("order", "looks_ahead", "arguments", "select")
    if not all(hasattr(built, part) for part in parts) or built.order not in ORDERS or not callable(built.select):
        raise ValueError(f"{where}: its factory returned {built!r}, expected a Sampler ({', '.join(parts)})")
    return built
