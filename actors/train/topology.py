"""Describes the mesh of train ranks (tensor, context, data, pipeline parallel) and which rank reads for others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank in the mesh of train ranks."""

    dp: int
    tp: int = 0
    cp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the mesh of train ranks. Rank numbers run through tp first, then cp, dp and pp, as is Megatron-core's
    default."""

    dp: int
    """Number of data-parallel replicas, each of which reads its own shard."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Number of expert-parallel ranks. They are taken from the tp x cp x dp ranks, so they do not count in `world`."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"topology.{name}: got {getattr(self, name)}, expected at least 1")
        if self.tp * self.cp * self.dp % self.ep:
            raise ValueError(
                f"topology.ep: got {self.ep}, expected a divisor of tp*cp*dp = {self.tp * self.cp * self.dp}"
            )

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replica_size(self) -> int:
        """Number of ranks in one data-parallel replica, which work on one shard of the rows together."""
        return self.tp * self.cp * self.pp

    @property
    def pad_multiple(self) -> int:
        """Multiple to which a microbatch row's tokens are rounded up: tp, times 2 * cp if cp is over 1. Zig-zag context
        parallelism needs the latter."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def place(self, rank: int) -> Place:
        """Return the coordinates of `rank`. Raises ValueError when the mesh has no such rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank: got {rank}, expected 0 to {self.world - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Place(dp, tp, cp, pp)

    def rank(self, place: Place) -> int:
        """Return the rank at these coordinates."""
        return place.tp + self.tp * (place.cp + self.cp * (place.dp + self.dp * place.pp))

    def replica(self, dp: int) -> tuple[int, ...]:
        """Return the ranks of data-parallel replica `dp`, ascending; the first is its leader."""
        return tuple(rank for rank in range(self.world) if self.place(rank).dp == dp)

    def leader(self, dp: int) -> int:
        """Return the rank that reads rows for data-parallel replica `dp` and broadcasts them to its other ranks."""
        return self.rank(Place(dp))

    def writer(self, dp: int) -> int:
        """Return the rank that writes columns back for data-parallel replica `dp`. It is in the last pipeline stage,
        which computes the log-probs."""
        return self.rank(Place(dp, pp=self.pp - 1))
