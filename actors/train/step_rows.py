"""Reads a step's rows from the store for one rank: each column once, and only those that its pipeline stage uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...codecs.batch import Batch, Column, Jagged
from ...codecs.blobs import BlobRows, References
from ...codecs.jagged import slice_rows
from ...codecs.schema import Field, Schema
from ...codecs.tokens.masks import MASKS, check_seals
from ...codecs.tokens.routes import ROUTES, RouteSpec
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from .topology import Place, Topology
from .wire import RowFacts

GROWTH = 4
"""Factor by which each load is larger than the one before it. A load is a group of microbatches that are read
together."""
MOST_AT_ONCE = 64
"""Largest number of microbatches in one load."""
EMBEDDED = "input_ids"
"""The only column that the first pipeline stage uses, apart from routes. The last stage uses all columns; the token ids
are its targets."""


def load_of(index: int, count: int) -> range:
    """Return the load of microbatch `index`: the range of microbatches that are read and sent together with it.

    count: number of microbatches of the step. Loads grow 1, 4, 16, 64, 64, ... The first load is small so that
    computing starts early; the others are read while it computes. Larger loads are cheaper: rows that lie in one memory
    block of the store belong to many microbatches, so reading these together requests the block only once, and a
    broadcast costs the same whatever its size.
    """
    assert 0 <= index < count, (index, count)
    start, size = 0, 1
    while index >= start + size:
        start, size = start + size, min(GROWTH * size, MOST_AT_ONCE)
    return range(start, min(start + size, count))


def cut(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """Split `batch` into consecutive pieces that have the numbers of rows in `sizes`, and yield the pieces as views."""
    begin = 0
    for size in sizes:
        yield slice_rows(batch, begin, begin + size)
        begin += size


@dataclass(frozen=True, slots=True)
class TrainShard:
    """One rank's share of a plan. The plan covers the rows of a step, or the part of them that is trained on together.
    The driver sends it once, and every pass over these rows uses it."""

    step: int
    """Number of the step."""
    meta: bytes | None
    """Receipt of the replica's rows (their keys and locations, without content) as `KVBatchMeta.to_bytes()`, in the
    order of the microbatches. It carries values per row (float32): `advantage`; `group_tokens` with
    `loss.aggregation=prompt`; `row_tokens` with `trainer.moe.aux_loss_coef` above 0; `counted` with
    `algorithm.mask_truncated` and a mean over rows. None for a rank that neither reads nor writes rows."""
    sizes: np.ndarray
    """Number of rows of each microbatch, int64 `[M]`."""
    digest: str
    """Hash of the plan for the step, the same on every rank."""
    traced: bool
    """True if reports of the step carry spans, the timed pieces of work in the trace."""
    columns: tuple[str, ...] = ()
    """Columns that earlier shards of the step have written to these rows, and that training needs."""
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions in `meta` of the rows that are written to samples.jsonl, int64 `[K]`, the same on all ranks of a
    replica."""
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Data source of each row in `meta`, by its number in `distillation.sources`, int64 `[N]`; -1 for one without a
    teacher of its own. Empty unless teachers differ by data source."""
    sample_passes: int = 0
    """Number of microbatches in the pass over the rows of `samples`, one row each. It is the largest K of all ranks; 0
    if no row of the step is written."""
    picture: bytes | None = None
    """Receipt of one row of the plan that has pictures, as `KVBatchMeta.to_bytes()`, the same on all ranks; None if no
    row has any. Microbatches without pictures get its first one."""

    @property
    def images(self) -> Field | None:
        """Declaration of the column of pictures; None if no row of the plan has any."""
        if self.picture is None:
            return None
        schema = KVBatchMeta.from_bytes(self.picture).schema
        return next(one for one in schema.values() if one.parts)

    def of_samples(self, meta: KVBatchMeta | None) -> TrainShard:
        """Return the shard of the rows whose samples are written, one per microbatch. A rank with fewer rows than
        others has empty microbatches. meta: receipt of this shard, None on a rank without one."""
        return replace(
            self,
            meta=None if meta is None else meta.select(self.samples).to_bytes(),
            sizes=(np.arange(self.sample_passes) < len(self.samples)).astype(np.int64),
            digest=self.digest[::-1],  # All ranks derive the digest of the second plan by reversing the first one.
        )

    def of_source(self, source: int | None) -> tuple[TrainShard, np.ndarray]:
        """Return the shard of the rows of a data source, and their positions in `meta`, int64, ascending.

        It has as many microbatches as this one, of which some may be empty. source: number of the source; None for all
        rows."""
        num_rows = int(self.sizes.sum())
        if source is None:
            return self, np.arange(num_rows)
        rows = np.flatnonzero(self.sources == source)
        micros = np.repeat(np.arange(len(self.sizes)), self.sizes)
        meta = None if self.meta is None else KVBatchMeta.from_bytes(self.meta).select(rows).to_bytes()
        sizes = np.bincount(micros[rows], minlength=len(self.sizes)).astype(np.int64)
        turn = 1 + source % (len(self.digest) - 1)  # All ranks derive the same digest for the plan of a source.
        return replace(self, meta=meta, sizes=sizes, digest=self.digest[turn:] + self.digest[:turn]), rows

    def ranges(self) -> list[np.ndarray]:
        """Return, for each microbatch, the positions of its rows in `meta`."""
        ends = np.cumsum(self.sizes)
        return [np.arange(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]


class ColumnCache:
    """Holds the columns that have arrived so far for each microbatch of a step."""

    def __init__(self) -> None:
        self._columns: dict[int, Batch] = {}

    def missing(self, index: int, fields: Sequence[str]) -> list[str]:
        """Return those of `fields` that have not arrived for microbatch `index`."""
        have = self._columns.get(index)
        return [name for name in fields if have is None or name not in have]

    def add(self, index: int, new: Batch) -> None:
        """Add columns of microbatch `index`. A column may be added only once to a microbatch."""
        have = self._columns.get(index)
        self._columns[index] = new if have is None else have.merge(new)

    def batch(self, index: int, fields: Sequence[str], num_rows: int) -> Batch:
        """Return the columns `fields` of microbatch `index` without copying. All of them must have arrived."""
        have = self._columns.get(index)
        return Batch(Schema(()), num_rows, {}) if have is None else have.subset(fields)


class StepRows:
    """Reads a step's rows from the store and caches their columns, before slicing for context parallelism. Only one
    thread may use it at a time."""

    def __init__(self, client: DataPlaneClient, shard: TrainShard, meta: KVBatchMeta) -> None:
        self._client = client
        self._meta = meta
        self._ranges = shard.ranges()
        self._cache = ColumnCache()
        self.images = shard.images
        """Declaration of the column of pictures; None if no row of the plan has any."""
        self._picture = shard.picture
        self._spare: BlobRows | None = None

    def facts(self, numbers: range) -> RowFacts:
        """Return the per-row values (lengths, advantages and groups) of the given microbatches, concatenated."""
        rows, tags = np.concatenate([self._ranges[number] for number in numbers]), self._meta.tags
        names = ("group_tokens", "row_tokens", "counted")
        counts = [tags[name][rows].astype(np.int64) if name in tags else None for name in names]
        advantages = tags["advantage"][rows].astype(np.float32)
        return RowFacts(self._meta.lengths[rows], advantages, self._meta.groups[rows], *counts)

    def missing(self, index: int, fields: Sequence[str]) -> list[str]:
        """Return the `fields` that this process has neither read nor written in this step for microbatch `index`."""
        return self._cache.missing(index, fields)

    def columns(self, index: int, fields: Sequence[str]) -> Batch:
        """Return the columns `fields` of one microbatch. Columns not cached yet are read together for all microbatches
        of its load (see `load_of`). Raises what the client's `get` and `lookup` raise, and MasksDamaged for a damaged
        row."""
        missing = self.missing(index, fields)
        if missing:
            self._look_up([name for name in missing if name not in self._meta.fields])
            load = load_of(index, len(self._ranges))
            numbers = [number for number in load if self.missing(number, missing) == missing]
            rows = np.concatenate([self._ranges[number] for number in numbers])
            batch = self._client.get(self._meta.select(rows), missing)
            if MASKS in batch:
                check_seals(batch.ragged(MASKS), self._meta.lengths[rows], [self._meta.keys[row] for row in rows])
            for number, part in zip(numbers, cut(batch, [len(self._ranges[n]) for n in numbers]), strict=True):
                self._cache.add(number, part)
        return self._cache.batch(index, fields, len(self._ranges[index]))

    def pictures(self, index: int, *, pixels: bool = True) -> BlobRows:
        """Read the pictures of one microbatch, each once. Some row of the plan must have pictures.

        pixels: False leaves out the parts of pictures that only the vision tower needs.

        They are not cached, because those of a whole step can be larger than the memory. A microbatch without pictures
        gets one to which no row refers: ranks that share a vision tower must all run it as often as the others. Raises
        what the client's `get_blobs` and `lookup` raise.
        """
        assert self.images is not None and self._picture is not None
        name, rows = self.images.name, self._ranges[index]
        parts = None if pixels else _small_parts(self.images.parts)
        self._look_up([name] if name not in self._meta.fields else [])
        if len(rows):
            found = self._client.get_blobs(self._meta.select(rows), name, parts)
            if found.blobs.num_rows:
                return found
        if self._spare is None:
            self._spare = self._client.get_blobs(KVBatchMeta.from_bytes(self._picture), name, parts)
        names = self._spare.references.names[:1]
        none = References(names, np.zeros(0, np.int64), np.zeros(len(rows), np.int64))
        return BlobRows(slice_rows(self._spare.blobs, 0, 1), none)

    def keep(self, index: int, field: str, column: Jagged) -> None:
        """Cache a column that this process has written, so that it is not read back."""
        self._cache.add(index, Batch(self._meta.schema.subset([field]), len(self._ranges[index]), {field: column}))

    def _look_up(self, fields: list[str]) -> None:
        """Add to the receipt the columns that other ranks have written since it was made. The receipt has the rows'
        keys and locations; the columns can then be read."""
        if fields:
            found = self._client.lookup(self._meta.partition, self._meta.keys, fields)
            self._meta = self._meta.merge_fields(found)


def without_pixels(pictures: BlobRows) -> BlobRows:
    """Return pictures without the parts that only the vision tower needs. Copies nothing."""
    return replace(pictures, blobs=pictures.blobs.subset(_small_parts(pictures.blobs.schema.values())))


def _small_parts(parts: Iterable[Field]) -> list[str]:
    """Return the names of the parts from which positions and numbers of tokens follow. Pixels are the parts with
    fractions."""
    return [part.name for part in parts if part.dtype is None or not part.dtype.is_floating_point]


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

    A pipeline stage in the middle receives only the routes, and only if it has layers with experts. routes: shape of
    the routes; None without router replay.
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
