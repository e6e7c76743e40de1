"""Declares the section `pool` of the configuration, with which a run shares GPUs with other runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ...dataplane.section import Count, CountOrZero, Positive, Section


class PoolConfig(Section):
    """The pool of GPUs from which a run borrows its own. Engines sleep while others use their GPUs."""

    address: str | None = None
    """Address of the Ray cluster that has the pool, as `headrace pool start` prints it. The run joins that cluster as a
    tenant named `run.name`. Unset: the GPUs are the run's own."""
    name: str = Field(default="pool", min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the pool in that cluster."""
    weight: Positive = 1.0
    """Share of the GPUs that this run gets for its rollouts, relative to other runs with as much work left."""
    sleep_level: Literal[1, 2] = 2
    """Level at which engines sleep. With 1 they keep their weights in host memory. With 2 they drop them and get the
    newest version when they wake."""
    residual_mib: Count = 1536
    """Largest GPU memory in MiB that a process may keep after it has fallen asleep or was offloaded, such as its CUDA
    context. An engine that keeps more is replaced, and a train worker that keeps more fails."""
    other_runs: CountOrZero = 3
    """Largest number of other runs whose processes sleep on a GPU while an engine of this run is awake there. Engines
    leave `pool.residual_mib` for each of these processes, unless `rollout.gpu_memory_utilization` or `rollout.kv_cache`
    sets how much they take."""
    order_timeout_s: Positive = 180.0
    """Seconds that the run has to carry out an order of the pool, to put engines to sleep or to wake them. The pool
    ends the processes of a run that takes longer."""
