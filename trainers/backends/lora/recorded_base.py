"""`RecordedSource` takes digests of an adapter's base when a rank first reads it, and compares them at later starts.

A rank that starts again may read the base from an engine, where it is in memory, if that is faster than the folder. The
digests tell whether it has the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import xxhash

from ....actors.weight_sync.base_offer import BaseRecord, KnownBase, WeightReader
from ....codecs.memory import flat_bytes
from ....codecs.schema import DTYPES
from ..weight_stream import WeightSource

_log = logging.getLogger(__name__)
PROBE_BYTES = 32 << 20
"""Number of bytes that a rank reads from each of engine and folder before it knows which is faster."""
_FOLDER = "the model's folder"
Pieces = Iterable[tuple[tuple[slice, ...], torch.Tensor]]


class _Differs(ValueError):
    """A weight is not what was read at the start of the run."""


class RecordedSource:
    """A `WeightSource` whose weights are compared with those that the rank has read at the start of the run."""

    def __init__(self, source: WeightSource, base: str, known: KnownBase | None) -> None:
        """source: source of the model's folder. base: digest of the folder's files. known: see
        `BackendConfig.known`."""
        self._source, self._base, self._known = source, base, known
        self._reader: WeightReader | None = None
        self._weights: dict[str, tuple[str, int]] = {}
        self._engine = ""
        self._read: dict[str, tuple[int, float]] = {}
        """Bytes and seconds by source."""
        self._why = ""

    @property
    def record(self) -> BaseRecord:
        """Record of what was read, with a sentence about the sources if the rank has started again."""
        if self._known is None:
            return BaseRecord(self._base, self._weights)
        parts = [f"{nbytes / 1e6:.1f} MB from {name}" for name, (nbytes, _) in self._read.items()]
        return BaseRecord(self._base, self._weights, f"read the base: {', '.join(parts)}{self._why}")

    def empty_model(self, dtype: torch.dtype | None = None) -> Any:
        return self._source.empty_model(dtype)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._source.reading())
            if self._known is not None and self._known.connect is not None:
                try:
                    self._reader = stack.enter_context(self._known.connect())
                    self._engine = f"{self._reader.engine}'s memory"
                except OSError as error:
                    self._give_up(error)
            try:
                yield
            finally:
                self._reader = None

    def pieces(self, name: str, ranges: tuple[slice, ...]) -> Pieces:
        known = None if self._known is None else self._known.record.weights.get(name)
        if known is not None and self._reader is not None and self._prefers_engine:
            box = tuple((part.start, part.stop) for part in ranges)
            parts = self._reader.parts(name, box, DTYPES[known[0]])
            placed = ((tuple(slice(*ends) for ends in place), values) for place, values in parts)
            try:
                yield from self._checked(name, known, placed, self._engine)
                return
            except (OSError, ValueError) as error:
                self._give_up(error)
        try:
            yield from self._checked(name, known, self._source.pieces(name, ranges), _FOLDER)
        except _Differs as error:
            raise ValueError(f"model.path: the weights have changed since the run began: {error}") from error

    @property
    def _prefers_engine(self) -> bool:
        assert self._known is not None
        rates = {}
        for source in () if self._known.always else (self._engine, _FOLDER):
            nbytes, seconds = self._read.get(source, (0, 0.0))
            if nbytes < PROBE_BYTES:
                return source == self._engine
            rates[source] = nbytes / seconds
        return not rates or rates[self._engine] > rates[_FOLDER]

    def _checked(self, name: str, known: tuple[str, int] | None, pieces: Pieces, source: str) -> Pieces:
        """Yield `pieces` of a weight, and record them, with the time until the caller has taken them. Raises _Differs
        at the end if they are not `known`."""
        digest, nbytes, dtype, started = xxhash.xxh3_64(), 0, "", time.perf_counter()
        for place, values in pieces:
            dtype = str(values.dtype).removeprefix("torch.")
            digest.update(flat_bytes(values.contiguous()).numpy().data)
            nbytes += values.nbytes
            yield place, values
        before = self._read.get(source, (0, 0.0))
        self._read[source] = before[0] + nbytes, before[1] + time.perf_counter() - started
        found = dtype, digest.intdigest()
        if known is not None and found != known:
            differs = f"{found[0]}, xxh3 {found[1]:016x}, expected {known[0]}, {known[1]:016x}"
            raise _Differs(f"{name!r} in {source} has other bytes than were read at the start ({differs})")
        self._weights[name] = found

    def _give_up(self, error: Exception) -> None:
        """Read the folder from now on, because of an error of the engine."""
        self._reader, self._why = None, f"; no more from an engine, because {error}"
        _log.warning("the base of the adapter is read from the model's folder, because %s", error)
