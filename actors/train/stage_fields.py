"""Decides which columns a pipeline stage uses, and so which columns its ranks receive, for every backend."""

from __future__ import annotations

from collections.abc import Iterable

from ...dataplane.topology import Place, Topology

EMBEDDED = "input_ids"
"""The one column that the first pipeline stage uses. The last stage uses every column, with the token ids as
targets."""


def stage_fields(topology: Topology, place: Place, fields: Iterable[str]) -> tuple[str, ...]:
    """Return those of `fields` that the rank at mesh coordinates `place` receives, in order. A pipeline stage in the
    middle receives none."""
    if place.pp == topology.pp - 1:
        return tuple(fields)
    if place.pp == 0:
        return tuple(name for name in fields if name == EMBEDDED)
    return ()
