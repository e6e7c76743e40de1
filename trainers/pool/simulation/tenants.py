"""Places the tenants of a simulated pool on its GPUs, and draws how long their steps take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...errors import ConfigError
from ..state.plan import TenantMap
from .config import PoolFile, TenantSection

GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Distance between tenants as a share of the pool. Multiples of it spread any number of tenants evenly."""


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """One simulated tenant with its place in the pool."""

    name: str
    number: int
    """Position among all tenants, from 0; it seeds the tenant's random numbers."""
    section: TenantSection
    map: TenantMap
    first_gpu: int = 0
    """Number in the whole pool of the GPU that its map calls 0; above 0 for a tenant with a part of its own."""

    @property
    def train_scale(self) -> float:
        """Seconds that training takes here for each second that it takes with all of `train_gpus`."""
        return self.section.train_gpus / len(self.map.train_gpus)


def place_tenants(file: PoolFile) -> list[TenantSpec]:
    """Return all tenants with their maps of a pool that they share."""
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
    """Return the tenants with maps of parts of their own, by weight. No part is larger than the tenant's
    `rollout_gpus`; what one cannot use goes to the others. A part has whole engines, on some of which it trains.

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
    """Return the number of GPUs of each tenant's part: one engine at a time to whoever has least for its weight, with
    half of the engine counted (the rule of Webster, which favours neither large engines nor small ones)."""
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
    """Draws the seconds that one phase of a tenant's work takes, time after time."""

    def __init__(self, mean_s: float, sigma: float, *seed: int) -> None:
        """mean_s: mean of the seconds. sigma: sigma of their log-normal distribution. seed: equal ones give equal
        seconds."""
        self._mean_s, self._sigma = mean_s, sigma
        self._random = np.random.default_rng(seed)

    def draw(self) -> float:
        """Return the seconds of the next time."""
        # Half of the variance is taken off so that the mean does not depend on sigma.
        return self._mean_s * float(np.exp(self._sigma * (self._random.standard_normal() - self._sigma / 2)))
