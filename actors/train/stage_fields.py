"""Which columns a rank's pipeline stage uses: the one rule for what is sent to it, whatever the backend."""

from __future__ import annotations

from collections.abc import Iterable

from ...dataplane.topology import Place, Topology

EMBEDDED = "input_ids"
"""All that the first stage takes; the last one takes everything, token ids as the targets."""


def stage_fields(topology: Topology, place: Place, fields: Iterable[str]) -> tuple[str, ...]:
    """Those of `fields` that the rank at `place` is sent, in their order; none for a stage in the middle."""
    if place.pp == topology.pp - 1:
        return tuple(fields)
    if place.pp == 0:
        return tuple(name for name in fields if name == EMBEDDED)
    return ()
