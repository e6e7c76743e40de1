"""Ends processes on other hosts of the Ray cluster, each by the node on whose host it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....dataplane.owned_folder import pid_space, process_start
from ...supervision.cleanup import Family

Process = tuple[str, int, int | None]
"""A process of any host: `pid_space`, pid, `process_start`."""


def end_far_processes(processes: Sequence[Process], timeout_s: float) -> list[Process]:
    """Kill processes with all that they have started, and wait until they have ended, for `timeout_s` seconds at most.

    Every node of the cluster gets the list, and ends the processes of its own space of process ids. Ray itself confirms
    only the end of an actor, not that of its process. Returns the processes whose end no node has confirmed; all of
    them if this process is in no Ray cluster.
    """
    if not ray.is_initialized():
        return list(processes)
    end: Any = ray.remote(num_cpus=0, max_retries=0)(end_own)
    calls = [
        end.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(processes)
        for node in ray.nodes()
        if node["Alive"]
    ]
    answered, late = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    for call in late:
        ray.cancel(call, force=True)
    ended: set[Process] = set()
    for call in answered:
        try:
            ended.update(ray.get(call))
        except RayError:  # The node has left the cluster meanwhile.
            continue
    return [process for process in processes if process not in ended]


def end_own(processes: Sequence[Process]) -> list[Process]:
    """Kill those of `processes` that are in this process's space of process ids, with all that they have started.
    Returns those of them that have ended."""
    own = [(pid, start) for space, pid, start in processes if space == pid_space() and start is not None]
    family = Family(0)
    family.add(own)
    family.kill()
    return [(pid_space(), pid, start) for pid, start in own if process_start(pid) != start]
