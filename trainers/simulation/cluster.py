"""Computes by closed formulas what the hosts of a cluster have to send: rows between hosts, and weights to engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts of a simulated run, and the speeds at which they exchange rows and weights."""

    gpus: int
    host_gpus: int
    engine_gpus: int
    train_share: float
    """Share of the hosts that have train workers; the others have the engines. 1 if every host has both."""
    links: int
    link_bytes_s: float
    """Bytes per second that one link of a host reaches in each direction."""
    unit_gib_per_s: float
    far_share: float
    weights_bytes: float
    weights_bytes_s: float
    """Bytes of weights per second that a sender hands to the engines of its own host."""
    weights_senders: Literal["one", "all"]
    weights_copies: float

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.gpus // self.host_gpus)

    @property
    def train_hosts(self) -> int:
        """Number of hosts with train workers."""
        return max(1, round(self.hosts * self.train_share))

    @property
    def rollout_hosts(self) -> int:
        """Number of hosts with engines."""
        return max(1, self.hosts - self.train_hosts) if self.train_share < 1 else self.hosts

    def far_bytes(self, num_bytes: float) -> float:
        """Return how many of the `num_bytes` that the trainer reads come from another host than the reader's."""
        return num_bytes * self.far_share if self.hosts > 1 else 0.0

    def unit_s(self, num_bytes: float) -> float:
        """Return the seconds for which the storage unit of a rollout host sends, if the trainer reads `num_bytes`."""
        return self.far_bytes(num_bytes) / self.rollout_hosts / (self.unit_gib_per_s * GIB)

    def rows_link_s(self, num_bytes: float) -> float:
        """Return the seconds for which rows use a link of the busiest host, if the trainer reads `num_bytes`."""
        return self.far_bytes(num_bytes) / min(self.rollout_hosts, self.train_hosts) / self.link_bytes_s

    def most_gib_per_s(self) -> float:
        """Return the speed in GiB/s at which units and links let the trainer read; infinity on one host."""
        slowest = max(self.unit_s(GIB), self.rows_link_s(GIB))
        return 1.0 / slowest if slowest else float("inf")

    def weights_link_s(self) -> float:
        """Return the seconds for which the busiest host sends or receives weights in a weight sync.

        One sender uses one link of its host, for `weights_copies` copies. With all senders, each train host sends its
        part of the weights over all of its links to every host with engines, once; a host receives what its engines
        hold, which is a part of the weights if an engine is larger than a host.
        """
        if self.hosts == 1:
            return 0.0
        if self.weights_senders == "one":
            return self.weights_bytes * self.weights_copies / self.link_bytes_s
        arriving = self.weights_bytes * min(1.0, self.host_gpus / self.engine_gpus)
        if self.train_share == 1:
            arriving *= 1 - 1 / self.hosts  # This part of the weights is on the host already.
        leaving = arriving * self.rollout_hosts / self.train_hosts
        return max(arriving, leaving) / (self.links * self.link_bytes_s)

    def weights_s(self) -> float:
        """Return the least seconds in which all engines receive the weights. With all senders, each GPU receives only
        its part of an engine's weights."""
        parts = 1 if self.weights_senders == "one" else self.engine_gpus
        return max(self.weights_link_s(), self.weights_bytes / parts / self.weights_bytes_s)
