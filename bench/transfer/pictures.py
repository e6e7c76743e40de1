"""Measures the traffic of a step with pictures: put, read by two ranks, write-back and clear.

Each prompt has one picture of 1024 x 1024 pixels, as Qwen2.5-VL's processor makes it. All samples of a prompt have the
same picture. Headrace stores it once. It is compared with its own storage of pixels in each row, with TransferQueue
(pixels in each row, and pictures under keys of their own that rows name), with Ray's objects (one per picture), and
with plain sockets, which move the same bytes without rows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
import torch
import xxhash
from tensordict import TensorDict

from ...codecs.batch import Jagged, Ragged
from ...codecs.blobs import Blob, blob_field
from ...codecs.memory import as_bytes
from ...codecs.schema import Field, Kind, Schema
from ...dataplane.factory import connect
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.stores.tcp.wire import LOCAL_BUFFER_BYTES
from .baselines import TransferQueueEndpoint
from .byte_baselines import Server, TcpEndpoint
from .contenders import Mismatch
from .processes import Span

VLM = "vlm"
"""Name of the workload with pictures."""
ABOUT = "32 prompts with 8 samples each and a picture of 1024 x 1024: ids, mask, log-probs, pixels"
SIDE, DIM, MERGE = 74, 1176, 2
"""Patches on each side of a picture (1024 pixels, rounded to a multiple of 28, in patches of 14), values of a patch
(two frames of 14 x 14 pixels in three colours), and patches on each side of those that become one token."""
RANKS = 2
TOGETHER_BYTES = 1 << 30
"""Bytes of the pixels of all rows up to which all contenders are measured in turns. Beyond, those with pixels in each
row are measured one after another, so that their copies fit into memory."""
QUEUE_ROWS, QUEUE_KEYS, RAY, UNSHARED = "transferqueue, per row", "transferqueue, by key", "ray put", ", unshared"
RAW = {"raw tcp": 0, f"raw tcp, buffers of {LOCAL_BUFFER_BYTES >> 10} KiB": LOCAL_BUFFER_BYTES}
"""Names of the contenders with plain sockets, and the size of the kernel's buffers; 0 leaves it to the kernel."""
TEXT = (
    Field("input_ids", Kind.PER_TOKEN, torch.int32),
    Field("mask", Kind.PER_TOKEN, torch.uint8),
    Field("logprobs", Kind.PER_TOKEN, torch.float32),
)
PIXELS = Field("pixels", Kind.RAGGED, torch.bfloat16, ndim=2)
IMAGES = blob_field("images", [PIXELS, Field("grid", Kind.PER_SAMPLE, torch.int32, trailing=(3,))])
BACK = Field("previous_logprobs", Kind.PER_TOKEN, torch.float32)


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """Size of the workload, from which each process builds the same rows."""

    prompts: int = 32
    samples: int = 8
    side: int = SIDE

    @property
    def num_rows(self) -> int:
        return self.prompts * self.samples

    @property
    def picture_bytes(self) -> int:
        return self.side**2 * DIM * 2

    @property
    def row_bytes(self) -> int:
        """Bytes of the pixels of all rows, if each row has its own."""
        return self.num_rows * self.picture_bytes

    def rows_of(self, rank: int) -> np.ndarray:
        """Return the rows that a rank reads. The samples of a prompt are read by the same rank."""
        ends = [self.prompts * number // RANKS * self.samples for number in range(RANKS + 1)]
        return np.arange(ends[rank], ends[rank + 1])


class Rows:
    """The rows of the workload, in memory."""

    def __init__(self, spec: PictureSpec) -> None:
        rng = np.random.default_rng(49)
        self.spec = spec
        numbers = rng.integers(0, 1 << 15, (spec.prompts, spec.side**2, DIM), dtype=np.int16)
        self.pixels = torch.from_numpy(numbers).view(torch.bfloat16)
        """The pictures as the model's processor returns them, `[prompts, patches, DIM]`."""
        self.pictures = list(self.pixels)
        self.lengths = spec.side**2 // MERGE**2 + rng.integers(64, 1024, spec.num_rows)
        tokens = int(self.lengths.sum())
        self.text: dict[str, Jagged] = {
            "input_ids": Jagged(torch.from_numpy(rng.integers(0, 151_936, tokens, dtype=np.int32)), self.lengths),
            "mask": Jagged(torch.from_numpy(rng.integers(0, 2, tokens, dtype=np.uint8)), self.lengths),
            "logprobs": Jagged(torch.from_numpy(-rng.random(tokens, dtype=np.float32)), self.lengths),
        }
        self.text_bytes = sum(column.values.nbytes for column in self.text.values())

    @functools.cached_property
    def pixels_of_rows(self) -> torch.Tensor:
        """The pixels of each row, one after another, `[rows * patches, DIM]`."""
        return torch.cat([picture for picture in self.pictures for _ in range(self.spec.samples)])

    def digests(self, rows: np.ndarray) -> list[int]:
        """Return a digest of the ids and pixels of each row."""
        pixels = {number: _digest(self.pictures[number]) for number in np.unique(rows // self.spec.samples).tolist()}
        ids = self.text["input_ids"].values.split(self.lengths.tolist())
        return [_digest(ids[row]) ^ pixels[row // self.spec.samples] for row in rows.tolist()]

    def nested(self) -> dict[str, torch.Tensor]:
        """Return the columns of text as nested tensors."""
        return {name: _nested(column.values, self.lengths) for name, column in self.text.items()}


def _digest(values: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bytes(values.contiguous().reshape(-1)).data)


def _nested(values: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)))))


class PictureEndpoint(Protocol):
    """A contender in one process."""

    def put(self, rows: Rows, run: str) -> Any:
        """Write all rows, and return what readers need to read them."""
        ...

    def get(self, token: Any, spec: PictureSpec, rank: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Read a rank's rows, and return the ids and the pixels of each row."""
        ...

    def write(self, token: Any, spec: PictureSpec, rank: int, column: Jagged) -> None:
        """Write a column of a rank's rows."""
        ...

    def clear(self, token: Any, spec: PictureSpec) -> None: ...

    def bytes_put(self) -> int:
        """Return the bytes put so far; 0 if they are not counted."""
        ...

    def close(self) -> None: ...


class OwnEndpoint:
    """Headrace, with each picture stored once, or with pixels in each row."""

    def __init__(self, handle: DataPlaneHandle, shared: bool) -> None:
        self._client, self._shared = connect(handle, name="bench"), shared
        self._client.register(VLM, Schema([*TEXT, IMAGES if shared else PIXELS, BACK]))

    def put(self, rows: Rows, run: str) -> Any:
        spec, keys = rows.spec, _keys(rows.spec, run)
        if self._shared:
            grid = torch.tensor([1, spec.side, spec.side], dtype=torch.int32)
            blobs = [Blob(IMAGES, {"pixels": picture, "grid": grid}) for picture in rows.pictures]
            listed = [[blobs[row // spec.samples]] for row in range(len(keys))]
            return self._client.put(VLM, keys, {**rows.text, "images": listed})
        shapes = np.tile(np.array([spec.side**2, DIM]), (len(keys), 1))
        return self._client.put(VLM, keys, {**rows.text, "pixels": Ragged(rows.pixels_of_rows.view(-1), shapes)})

    def get(self, token: Any, spec: PictureSpec, rank: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        mine = token.select(spec.rows_of(rank))
        names = [field.name for field in TEXT]
        if not self._shared:
            batch = self._client.get(mine, [*names, "pixels"])
            pixels = batch.ragged("pixels").values.split(spec.picture_bytes // 2)
            return _split(batch.jagged("input_ids")), pixels
        batch, found = self._client.get(mine, names), self._client.get_blobs(mine, "images", ["pixels"])
        pictures = found.blobs.ragged("pixels").values.split(spec.picture_bytes // 2)
        return _split(batch.jagged("input_ids")), [pictures[number] for number in found.references.index.tolist()]

    def write(self, token: Any, spec: PictureSpec, rank: int, column: Jagged) -> None:
        self._client.write(token.select(spec.rows_of(rank)), {BACK.name: column})

    def clear(self, token: Any, spec: PictureSpec) -> None:
        self._client.clear(VLM, token.keys)

    def bytes_put(self) -> int:
        return int(self._client.stats.snapshot()["bytes_put"])

    def close(self) -> None:
        self._client.close()


class QueueEndpoint:
    """TransferQueue, with pixels in each row, or with pictures under keys of their own."""

    def __init__(self, by_key: bool) -> None:
        self._rows, self._pictures = TransferQueueEndpoint(f"{VLM}{by_key}"), TransferQueueEndpoint(f"{VLM}-pictures")
        self._by_key = by_key

    def put(self, rows: Rows, run: str) -> Any:
        spec, keys, columns = rows.spec, _keys(rows.spec, run), rows.nested()
        if self._by_key:
            names = [f"{run}p{number}" for number in range(spec.prompts)]
            self._pictures.write(names, TensorDict({"pixels": rows.pixels}, [spec.prompts]), None)
        else:
            columns["pixels"] = _nested(rows.pixels_of_rows, np.full(spec.num_rows, spec.side**2))
        return self._rows.write(keys, TensorDict(columns, [spec.num_rows]), None)

    def get(self, token: Any, spec: PictureSpec, rank: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        keys = [token[row] for row in spec.rows_of(rank).tolist()]
        got = self._rows._queue.kv_batch_get(keys=keys, partition_id=self._rows._partition)
        ids = list(got.get("input_ids").unbind())
        if not self._by_key:
            return ids, list(got.get("pixels").unbind())
        names = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
        found = self._pictures._queue.kv_batch_get(keys=names, partition_id=self._pictures._partition)
        pictures = dict(zip(names, found.get("pixels").unbind(), strict=True))
        return ids, [pictures[key.rpartition(".")[0]] for key in keys]

    def write(self, token: Any, spec: PictureSpec, rank: int, column: Jagged) -> None:
        rows = spec.rows_of(rank)
        values = TensorDict({BACK.name: _nested(column.values, column.lengths)}, [len(rows)])
        self._rows.write([token[row] for row in rows.tolist()], values, None)

    def clear(self, token: Any, spec: PictureSpec) -> None:
        self._rows.clear(token)
        if self._by_key:
            self._pictures.clear(list(dict.fromkeys(key.rpartition(".")[0] for key in token)))

    def bytes_put(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing; see `TransferQueueEndpoint.close`."""


class RayEndpoint:
    """Ray's objects: one for each picture, and one for the columns of each rank's rows."""

    def put(self, rows: Rows, run: str) -> Any:
        columns = {name: column.values.split(rows.lengths.tolist()) for name, column in rows.text.items()}
        texts = [
            ray.put({name: [parts[row] for row in rows.spec.rows_of(rank)] for name, parts in columns.items()})
            for rank in range(RANKS)
        ]
        return [[ray.put(picture) for picture in rows.pictures], texts]

    def get(self, token: Any, spec: PictureSpec, rank: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        prompts = (spec.rows_of(rank) // spec.samples).tolist()
        names = list(dict.fromkeys(prompts))
        found = dict(zip(names, ray.get([token[0][number] for number in names]), strict=True))
        columns: Any = ray.get(token[1][rank])
        return columns["input_ids"], [found[number] for number in prompts]

    def write(self, token: Any, spec: PictureSpec, rank: int, column: Jagged) -> None:
        self._written = ray.put(column.values)

    def clear(self, token: Any, spec: PictureSpec) -> None:
        """Do nothing, because the objects end with the references to them."""

    def bytes_put(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""


class RawEndpoint:
    """Plain sockets, which move the bytes of the rows over one connection for the put, and over one for each rank."""

    def __init__(self, address: tuple[str, int], buffer_bytes: int) -> None:
        self._stream = TcpEndpoint(address, buffer_bytes)

    def put(self, rows: Rows, run: str) -> Any:
        ends, parts, token = np.concatenate(([0], np.cumsum(rows.lengths))), [], []
        for rank in range(RANKS):
            mine, before = rows.spec.rows_of(rank), sum(map(len, parts))
            ids, mask, logprobs = [column.values[ends[mine[0]] : ends[mine[-1] + 1]] for column in rows.text.values()]
            pixels = rows.pixels[mine[0] // rows.spec.samples : mine[-1] // rows.spec.samples + 1].reshape(-1)
            parts += map(as_bytes, (ids, logprobs, pixels, mask))  # In this order, each begins at whole values.
            token.append((before, sum(map(len, parts)), rows.lengths[mine], ids.nbytes + logprobs.nbytes))
        self._stream.send(parts)
        return token

    def get(self, token: Any, spec: PictureSpec, rank: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        start, stop, lengths, at = token[rank]
        got = torch.from_numpy(self._stream.read(start, stop))
        ids = got[: 4 * int(lengths.sum())].view(torch.int32).split(lengths.tolist())
        num_pictures = len(lengths) // spec.samples
        pictures = got[at : at + num_pictures * spec.picture_bytes].view(torch.bfloat16).split(spec.picture_bytes // 2)
        return ids, [pictures[row // spec.samples] for row in range(len(lengths))]

    def write(self, token: Any, spec: PictureSpec, rank: int, column: Jagged) -> None:
        """Do nothing, because there are no rows."""

    def clear(self, token: Any, spec: PictureSpec) -> None:
        """Do nothing, because the next put replaces the bytes."""

    def bytes_put(self) -> int:
        return 0

    def close(self) -> None:
        self._stream.close()


def _keys(spec: PictureSpec, run: str) -> list[str]:
    return [f"{run}p{row // spec.samples}.{row % spec.samples}" for row in range(spec.num_rows)]


def _split(column: Jagged) -> Sequence[torch.Tensor]:
    return column.values.split(column.lengths.tolist())


class PictureProcess:
    """One process of the benchmark, which times the calls of its endpoints."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._rows: Rows | None = None
        self._open: dict[str, PictureEndpoint] = {}
        self._servers: dict[str, Server] = {}

    def leave(self) -> None:
        """Close every endpoint and drop all rows. Idempotent."""
        opened, self._open, self._rows = self._open, {}, None
        for endpoint in opened.values():
            endpoint.close()

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        """Start a server in this process, and return its address."""
        self._servers[name] = start()
        return self._servers[name].address

    def stop(self, name: str) -> None:
        self._servers.pop(name).close()

    def join(self, name: str, factory: Callable[[], PictureEndpoint]) -> None:
        self._open[name] = factory()

    def digests(self, spec: PictureSpec, rank: int) -> list[int]:
        return self._built(spec).digests(spec.rows_of(rank))

    def text_bytes(self, spec: PictureSpec) -> int:
        return self._built(spec).text_bytes

    def bytes_put(self, name: str) -> int:
        return self._open[name].bytes_put()

    def put(self, name: str, spec: PictureSpec, run: str) -> tuple[Any, Span]:
        rows = self._built(spec)
        if name in (QUEUE_ROWS,) or name.endswith(UNSHARED):
            _ = rows.pixels_of_rows  # A user has these; they are not made while the put is timed.
        start = time.monotonic()
        return self._open[name].put(rows, run), Span(start, time.monotonic())

    def get(self, name: str, token: Any, spec: PictureSpec, rank: int, expected: Sequence[int] | None) -> Span:
        """Read a rank's rows. Raises Mismatch if their digests are not `expected`."""
        start = time.monotonic()
        ids, pixels = self._open[name].get(token, spec, rank)
        span = Span(start, time.monotonic())
        if expected is not None:
            found = [_digest(one) ^ _digest(other) for one, other in zip(ids, pixels, strict=True)]
            if found != list(expected):
                raise Mismatch(f"{name}: the rows of rank {rank} differ from those that were put")
        return span

    def write(self, name: str, token: Any, spec: PictureSpec, rank: int, lengths: np.ndarray) -> Span:
        column = Jagged(torch.zeros(int(lengths.sum())), lengths)
        start = time.monotonic()
        self._open[name].write(token, spec, rank, column)
        return Span(start, time.monotonic())

    def clear(self, name: str, token: Any, spec: PictureSpec) -> Span:
        start = time.monotonic()
        self._open[name].clear(token, spec)
        return Span(start, time.monotonic())

    def lengths(self, spec: PictureSpec, rank: int) -> np.ndarray:
        return self._built(spec).lengths[spec.rows_of(rank)]

    def _built(self, spec: PictureSpec) -> Rows:
        if self._rows is None or self._rows.spec != spec:
            self._rows = Rows(spec)
        return self._rows
