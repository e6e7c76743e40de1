"""Plans a run on this machine's GPUs without starting Ray, and shows which engine and train worker stands on which.

The lines of `gpu_lines` are part of `--dry-run`; `headrace doctor` has them for a run with the default configuration.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ....actors.process.memory import assumed_machine
from ...cluster import actor_specs
from ...cluster.placement import Host, Placement, plan_placement
from ...config.config import Config


def plan_here(config: Config) -> Placement | None:
    """Return the placement of a run on this machine, or on the assumed one. Returns None for a run that joins a Ray
    cluster, whose hosts are known only then. Raises UserError if the run does not fit on the machine's GPUs, or its
    weight transport not to them."""
    assumed = assumed_machine()
    if config.resources.ray_address is not None and assumed is None:
        return None
    here = local_host(config)
    hosts = [replace(here, name=f"host {index}") for index in range(assumed.num_hosts)] if assumed else [here]
    placement = plan_placement(config, hosts)
    actor_specs.transport(config, placement)
    return placement


def local_host(config: Config) -> Host:
    """Return this machine as the run's own Ray will see it: all GPUs that this process may use, and as many logical
    CPUs as `resources.num_cpus` says or the run needs."""
    rollout = config.rollout
    needed = rollout.num_engines * rollout.tp + config.trainer.topology.world + (rollout.num_actors or 0)
    gpus = count_gpus()
    cpus = config.resources.num_cpus or max(os.cpu_count() or 1, needed)
    return Host(socket.gethostname(), gpus, tuple(range(gpus)), cpus)


def count_gpus() -> int:
    """Return the number of this machine's GPUs that CUDA_VISIBLE_DEVICES, if it is set, lets this process use, or the
    number of those of an assumed host."""
    assumed = assumed_machine()
    if assumed is not None:
        return assumed.gpus
    present = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return present
    return min(present, len([name for name in shown.split(",") if name not in ("", "NoDevFiles")]))


def gpu_lines(placement: Placement, more: Mapping[int, str] | None = None) -> list[str]:
    """Return the layout and the reason for it, then a line for each GPU that the run uses: its number over all hosts,
    its host, and who stands on it.

    more: number of a GPU -> text that is appended to its line.
    """
    on_gpu: dict[int, list[str]] = {}
    host_of: dict[int, str] = {}
    for seat in (*placement.ranks, *placement.engines):
        for number in placement.numbers(seat):
            assert seat.host is not None, "an actor with GPUs has a host"
            on_gpu.setdefault(number, []).append(seat.name)
            host_of[number] = placement.hosts[seat.host].name
    lines = [f"  {placement.sentence}"]
    for number, names in sorted(on_gpu.items()):
        line = f"  GPU {number:<12} {host_of[number]:<12} {', '.join(names)}"
        lines.append(line + (f"   {more[number]}" if more and number in more else ""))
    unused = placement.num_gpus - len(on_gpu)
    if on_gpu and unused:
        lines.append(f"  not used         {unused} GPU(s)")
    return lines
