"""Builds the sampler that a task names."""

from __future__ import annotations

from ...codecs.imports import import_object
from .rank_samplers import RankShares
from .samplers import ORDERS, FirstInOrder, Sampler, TaskConfig, Windowed

BUILT_IN = ("oldest_version_first", "ready_first", "in_order", "windowed", "rank_aware", "length_balanced")


def build_sampler(task: TaskConfig) -> Sampler:
    """Build the task's sampler. Raises ValueError for an unknown name, for options that the sampler does not take, and
    for a factory that does not return a Sampler."""
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
        if ":" not in task.sampler:
            raise ValueError(f"expected {', '.join(BUILT_IN)} or package.module:function")
        built = import_object(task.sampler, "factory")(**task.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    parts = ("order", "looks_ahead", "arguments", "select")
    if not all(hasattr(built, part) for part in parts) or built.order not in ORDERS or not callable(built.select):
        raise ValueError(f"{where}: its factory returned {built!r}, expected a Sampler ({', '.join(parts)})")
    return built
