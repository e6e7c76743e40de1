"""The Ray baseline sends the TensorDict through Ray's object store, as a Ray user would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from tensordict import TensorDict

from ....codecs.batch import Batch
from ....codecs.jagged import pack, select_rows
from ....codecs.schema import Schema
from ..contenders import BYTE_OPS, Op, Share
from ..digests import Digests, row_digests
from ..workloads import Load, LoadSpec


@dataclass(frozen=True, slots=True)
class RayToken:
    """A reference to the object in Ray's object store, and the schema of its rows."""

    refs: tuple[ray.ObjectRef, ...]
    """The one reference, in a tuple. If it were passed to an actor by itself, Ray would fetch the object for every such
    call."""
    schema: Schema


class RayPutContender:
    """The baseline `ray put` in the driver. It starts nothing, because it needs only Ray."""

    name = "ray put"
    ops: frozenset[Op] = BYTE_OPS

    def factory(self, spec: LoadSpec) -> Callable[[], RayPutEndpoint]:
        return RayPutEndpoint

    def part(self, token: RayToken, share: Share) -> RayToken:
        return token

    def close(self) -> None:
        """No-op: the baseline has started nothing, and Ray ends with the benchmark."""


class RayPutEndpoint:
    """Reads and writes rows with Ray's own put and get. The reader of a share (some of the rows) must fetch all rows
    and select its own."""

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> RayToken:
        return RayToken((ray.put(values),), load.schema.subset(load.first))

    def get(self, token: RayToken, share: Share, fields: Sequence[str] | None) -> TensorDict | Batch:
        values = ray.get(token.refs[0])
        return values if share.count == 1 else select_rows(pack(token.schema, values), share.rows)

    def fingerprint(self, got: TensorDict | Batch) -> Digests:
        return row_digests({str(name): got[str(name)] for name in got.keys()})

    def close(self) -> None:
        """No-op: the driver's references keep the objects in Ray's object store, and nothing is released here."""
