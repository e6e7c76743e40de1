"""Where each train rank stands in the mesh (tensor, context, data, pipeline parallel), and who reads for whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's coordinates."""

    dp: int
    tp: int = 0
    cp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the train mesh. Ranks count through tp first, then cp, dp, pp: Megatron-core's default order."""

    dp: int
    """Data-parallel replicas; each reads its own shard."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Expert-parallel ranks, taken from within tp x cp x dp; they do not count in `world`."""

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
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replica_size(self) -> int:
        """Ranks that hold one data-parallel shard together."""
        return self.tp * self.cp * self.pp

    @property
    def pad_multiple(self) -> int:
        """Token counts of a microbatch row are rounded up to this (2 * cp for zig-zag context parallelism)."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def place(self, rank: int) -> Place:
        """Coordinates of `rank`. Raises ValueError beyond the mesh."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank: got {rank}, expected 0 to {self.world - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Place(dp, tp, cp, pp)

    def rank(self, place: Place) -> int:
        """Inverse of `place`."""
        return place.tp + self.tp * (place.cp + self.cp * (place.dp + self.dp * place.pp))

    def replica(self, dp: int) -> tuple[int, ...]:
        """Ranks of replica `dp`, ascending; the first is its leader."""
        return tuple(rank for rank in range(self.world) if self.place(rank).dp == dp)

    def leader(self, dp: int) -> int:
        """The rank that reads for replica `dp` and is the source of its broadcasts."""
        return self.rank(Place(dp))

    def writer(self, dp: int) -> int:
        """The rank that writes columns back for replica `dp`: where its log-probs come out of the last stage."""
        return self.rank(Place(dp, pp=self.pp - 1))
