"""Decides which columns a pipeline stage uses, and so which columns its ranks receive, for every backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...codecs.batch import Batch, Column, Jagged
from ...codecs.schema import Schema
from ...codecs.tokens.routes import ROUTES, RouteSpec
from .topology import Place, Topology

EMBEDDED = "input_ids"
"""The one column that the first pipeline stage uses, apart from routes. The last stage uses every column, with the
token ids as targets."""


def stage_layers(topology: Topology, place: Place, routes: RouteSpec) -> range:
    """Return which layers with experts the pipeline stage at `place` holds, as a range of indices into `routes.layers`.
    Each stage holds the same number of decoder layers."""
    per_stage = routes.hidden_layers // topology.pp
    first, end = place.pp * per_stage, (place.pp + 1) * per_stage
    own = [index for index, layer in enumerate(routes.layers) if first <= layer < end]
    return range(own[0], own[-1] + 1) if own else range(0)


def stage_fields(
    topology: Topology, place: Place, fields: Iterable[str], routes: RouteSpec | None = None
) -> tuple[str, ...]:
    """Return those of `fields` that the rank at mesh coordinates `place` receives, in order.

    A pipeline stage in the middle receives none but the routes, and these only go to stages that have layers with
    experts. routes: shape of the routes; None without router replay.
    """
    held = routes is not None and len(stage_layers(topology, place, routes)) > 0

    def wanted(name: str) -> bool:
        if name == ROUTES:
            return held
        return place.pp == topology.pp - 1 or (place.pp == 0 and name == EMBEDDED)

    return tuple(name for name in fields if wanted(name))


def stage_schema(schema: Schema, topology: Topology, place: Place, routes: RouteSpec | None) -> Schema:
    """Return the schema that the stage at `place` receives: `schema`, with routes of its own layers alone. routes:
    shape of the routes of all layers; None without router replay."""
    if routes is None or topology.pp == 1 or ROUTES not in schema:
        return schema
    trailing = (len(stage_layers(topology, place, routes)), routes.top_k)
    return Schema(replace(field, trailing=trailing) if name == ROUTES else field for name, field in schema.items())


def stage_batch(batch: Batch, topology: Topology, place: Place, routes: RouteSpec | None) -> Batch:
    """Return `batch` with the routes of the layers that the stage at `place` holds, in new memory. All other columns
    are shared. routes: shape of the routes of all layers; None without router replay."""
    if routes is None or topology.pp == 1 or ROUTES not in batch:
        return batch
    layers = stage_layers(topology, place, routes)
    whole = batch.jagged(ROUTES)
    own = Jagged(whole.values[:, layers.start : layers.stop].contiguous(), whole.lengths)
    columns: dict[str, Column] = {name: own if name == ROUTES else column for name, column in batch.items()}
    return Batch(stage_schema(batch.schema, topology, place, routes), batch.num_rows, columns)
