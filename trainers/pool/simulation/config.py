"""Describes the tenants of a simulated pool: their sections in the file, their GPUs, and the times of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ....dataplane.config import Count, CountOrZero, NonNegative, Positive, Section
from ...config.load import validated
from ...errors import ConfigError
from ..state.plan import TenantMap

Policy = Literal["gap_ratio", "first_come", "fixed"]
"""Rule by which a pool is shared. `gap_ratio`: the rule of the pool itself. `first_come`: the first request gets the
GPUs and keeps them until its step is complete. `fixed`: each tenant has a fixed part of the pool in proportion to its
weight."""


class SwitchSection(Section):
    """Seconds of each stage of a switch of GPUs between two roles."""

    drain_s: NonNegative = 0.2
    """Seconds to end the requests of engines that are put to sleep."""
    sleep_s: NonNegative = 0.2
    """Seconds to put engines to sleep."""
    memory_s: NonNegative = 0.1
    """Seconds until the memory of the GPUs is measured as free."""
    wake_s: NonNegative = 0.3
    """Seconds to wake engines."""
    sync_s: NonNegative = 1.0
    """Seconds to load the newest weights: into waking engines, and into engines that are awake after a train step."""
    onload_s: NonNegative = 1.0
    """Seconds to bring the trainer's state back to its GPUs."""
    offload_s: NonNegative = 1.0
    """Seconds to move the trainer's state to host memory."""


class TenantSection(Section):
    """One tenant of the pool, or several identical ones."""

    count: Count = 1
    """Number of identical tenants. With more than 1, their names are `NAME-0`, `NAME-1` and so on."""
    weight: Positive = 1.0
    """Weight of the tenant: its share of the pool relative to other tenants with as much work."""
    rollout_gpus: Count
    """Number of GPUs on which the tenant's engines can generate."""
    train_gpus: Count
    """Number of the tenant's rollout GPUs on which it also trains."""
    tp: Count = 1
    """Number of GPUs of an engine."""
    first_gpu: CountOrZero | None = None
    """Number of the tenant's first GPU. Its other GPUs follow; after the pool's last GPU the count continues at GPU 0.
    Unset: the tenants are spread over the pool."""
    arrives_s: NonNegative = 0.0
    """Simulated seconds after which the tenant joins the pool."""
    steps: Count | None = None
    """Number of train steps after which the tenant leaves the pool. Unset: the tenant stays."""
    groups: Count = 64
    """Number of groups (the rollouts of one prompt) of a step."""
    max_staleness: CountOrZero = 1
    """Largest number of steps by which generation is ahead of training."""
    engine_groups: Count = 4
    """Number of groups that an engine generates at the same time."""
    group_s: Positive
    """Mean number of seconds that the generation of a group takes."""
    group_sigma: NonNegative = 0.5
    """Sigma of the log-normal distribution of `group_s`; with 0 all groups take equally long."""
    train_s: Positive
    """Mean number of seconds that the training of a step takes on all train GPUs of the tenant."""
    train_sigma: NonNegative = 0.1
    """Sigma of the log-normal distribution of `train_s` over the steps."""
    switch: SwitchSection = Field(default_factory=SwitchSection)


class PoolSection(Section):
    """The pool of GPUs that the tenants share."""

    gpus: Count
    """Number of GPUs."""
    seed: CountOrZero = 0
    """Seed of all random numbers. Every policy gets the same steps."""
    seconds: Positive | None = None
    """Simulated seconds after which the simulation ends. Unset: it ends when all tenants have taken their steps."""
    warmup_s: NonNegative = 0.0
    """Simulated seconds at the beginning that are left out of all figures."""
    starve_s: Positive = 60.0
    """Seconds of waiting after which a request of training comes before all others and reserves its GPUs."""
    policies: tuple[Policy, ...] = Field(("gap_ratio", "first_come", "fixed"), min_length=1)
    """Policies to simulate."""


class PoolFile(Section):
    """Content of the configuration file of a simulated pool: its GPUs and its tenants."""

    pool: PoolSection
    tenants: dict[str, TenantSection] = Field(min_length=1)
    """Tenants by name."""


def is_pool_file(data: Mapping[str, Any]) -> bool:
    """Return whether the sections of a file describe a simulated pool rather than a run."""
    return "tenants" in data


def pool_file(data: Mapping[str, Any]) -> PoolFile:
    """Check and return the file of a simulated pool. Raises ConfigError with one sentence for each problem."""
    file = validated(PoolFile, data)
    problems = [sentence for name, tenant in file.tenants.items() for sentence in _problems(name, tenant, file.pool)]
    if file.pool.seconds is not None and file.pool.seconds <= file.pool.warmup_s:
        problems.append(
            f"pool.seconds: got {file.pool.seconds:g}, expected more than pool.warmup_s ({file.pool.warmup_s:g})"
        )
    if problems:
        raise ConfigError(problems)
    return file


def _problems(name: str, tenant: TenantSection, pool: PoolSection) -> list[str]:
    at, found = f"tenants.{name}", []
    for key, number in (("rollout_gpus", tenant.rollout_gpus), ("first_gpu", tenant.first_gpu or 0)):
        if number % tenant.tp:
            found.append(f"{at}.{key}: got {number}, expected a multiple of {at}.tp ({tenant.tp})")
    if pool.gpus % tenant.tp:
        found.append(f"{at}.tp: got {tenant.tp}, expected a number that divides pool.gpus ({pool.gpus})")
    if tenant.rollout_gpus > pool.gpus:
        found.append(f"{at}.rollout_gpus: got {tenant.rollout_gpus}, expected at most pool.gpus ({pool.gpus})")
    if (tenant.first_gpu or 0) >= pool.gpus:
        found.append(f"{at}.first_gpu: got {tenant.first_gpu}, expected a number below pool.gpus ({pool.gpus})")
    if tenant.train_gpus > tenant.rollout_gpus - tenant.tp:
        found.append(
            f"{at}.train_gpus: got {tenant.train_gpus}, expected at most {tenant.rollout_gpus - tenant.tp}, so that "
            "one engine stays awake while it trains"
        )
    if pool.seconds is None and tenant.steps is None:
        found.append(f"{at}.steps: not set, expected a number of steps, because pool.seconds is not set either")
    return found


GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Distance between tenants as a share of the pool. Its multiples spread any number of tenants evenly."""


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """One simulated tenant with its place in the pool."""

    name: str
    number: int
    """Position among all tenants, from 0; the position seeds the tenant's random numbers."""
    section: TenantSection
    map: TenantMap
    first_gpu: int = 0
    """Number in the whole pool of GPU 0 of the tenant's map; above 0 only in a fixed partition."""

    @property
    def train_scale(self) -> float:
        """Factor by which training takes longer here than with all of `train_gpus`."""
        return self.section.train_gpus / len(self.map.train_gpus)


def place_tenants(file: PoolFile) -> list[TenantSpec]:
    """Return all tenants, each with its map of GPUs in a shared pool."""
    named = list(_named(file))
    specs = []
    for number, (name, section) in enumerate(named):
        first = section.first_gpu
        if first is None:
            first = int(file.pool.gpus * (number * GOLDEN_RATIO % 1)) // section.tp * section.tp
        gpus = [(first + offset) % file.pool.gpus for offset in range(section.rollout_gpus)]
        specs.append(TenantSpec(name, number, section, _map(name, section, gpus, section.train_gpus)))
    return specs


def partition(specs: Sequence[TenantSpec], num_gpus: int) -> list[TenantSpec]:
    """Return the tenants with their maps in a fixed partition by weight. No part is larger than the tenant's
    `rollout_gpus`; other tenants get the rest. A part consists of whole engines, and the tenant trains on up to
    `train_gpus` of its GPUs.

    Raises ConfigError for a tenant whose part is smaller than one of its engines.
    """
    sizes = _parts(specs, num_gpus)
    parts, first = [], 0
    for spec in specs:
        size, section = sizes[spec.name], spec.section
        if size < section.tp:
            raise ConfigError(
                [
                    f"pool.gpus: got {num_gpus}, of which a fixed partition has {size} for {spec.name}; expected at "
                    f"least {section.tp}, one engine of it"
                ]
            )
        own = _map(spec.name, section, range(size), min(section.train_gpus, size))
        parts.append(replace(spec, map=own, first_gpu=first))
        first += size
    return parts


def _parts(specs: Sequence[TenantSpec], num_gpus: int) -> Mapping[str, int]:
    """Return the number of GPUs of each tenant's part. One engine at a time goes to the tenant that has least for its
    weight, with half of the engine counted (Webster's rule, which favours neither large nor small engines)."""
    sizes = dict.fromkeys((spec.name for spec in specs), 0)
    left, growing = num_gpus, list(specs)
    while growing:
        spec = min(growing, key=lambda one: ((sizes[one.name] + one.section.tp / 2) / one.section.weight, one.number))
        if spec.section.tp > left or sizes[spec.name] >= spec.section.rollout_gpus:
            growing.remove(spec)
            continue
        sizes[spec.name] += spec.section.tp
        left -= spec.section.tp
    return sizes


def _named(file: PoolFile) -> Iterator[tuple[str, TenantSection]]:
    for name, section in file.tenants.items():
        for number in range(section.count):
            yield (f"{name}-{number}" if section.count > 1 else name), section


def _map(name: str, section: TenantSection, gpus: Sequence[int], num_train: int) -> TenantMap:
    shards = tuple(tuple(gpus[at : at + section.tp]) for at in range(0, len(gpus), section.tp))
    return TenantMap(name, section.weight, tuple(gpus[:num_train]), shards)


class PhaseSeconds:
    """Draws the seconds that one phase of a tenant's work takes, a new number each time."""

    def __init__(self, mean_s: float, sigma: float, *seed: int) -> None:
        """mean_s: mean of the seconds. sigma: sigma of their log-normal distribution. seed: equal seeds give equal
        seconds."""
        self._mean_s, self._sigma = mean_s, sigma
        self._random = np.random.default_rng(seed)

    def draw(self) -> float:
        """Draw the seconds of the next phase."""
        # Half of the variance is subtracted, so that the mean does not depend on sigma.
        return self._mean_s * float(np.exp(self._sigma * (self._random.standard_normal() - self._sigma / 2)))
