"""Baseline: the TensorDict through Ray's object store, as a Ray user would send it."""

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
    """Where the object is."""

    refs: tuple[ray.ObjectRef, ...]
    """One, in a tuple: bare, Ray would fetch it for every call that it is an argument of."""
    schema: Schema


class RayPutContender:
    """Needs nothing but Ray."""

    name = "ray put"
    ops: frozenset[Op] = BYTE_OPS

    def factory(self, spec: LoadSpec) -> Callable[[], RayPutEndpoint]:
        return RayPutEndpoint

    def part(self, token: RayToken, share: Share) -> RayToken:
        return token

    def close(self) -> None:
        """Ray ends with the benchmark."""


class RayPutEndpoint:
    """Ray's own calls. A reader of a share must fetch all rows; it picks its own with the codecs' gather."""

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> RayToken:
        return RayToken((ray.put(values),), load.schema.subset(load.first))

    def get(self, token: RayToken, share: Share, fields: Sequence[str] | None) -> TensorDict | Batch:
        values = ray.get(token.refs[0])
        return values if share.count == 1 else select_rows(pack(token.schema, values), share.rows)

    def fingerprint(self, got: TensorDict | Batch) -> Digests:
        return row_digests({str(name): got[str(name)] for name in got.keys()})  # noqa: SIM118

    def close(self) -> None:
        """The driver's tokens hold the objects."""
