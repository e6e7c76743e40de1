"""Computes the digest of a model's weights, by which an adapter knows the base to which it belongs."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from transformers.utils.hub import cached_file

THREADS = 4
"""Number of threads that hash at the same time; hashing releases Python's lock."""
_INDEX, _ONE = "model.safetensors.index.json", "model.safetensors"


def base_digest(model: str) -> str:
    """Return the digest of the weights of `model`, a local folder or hub id, as 32 hexadecimal digits.

    It is the xxh3_128 of names, dtypes, shapes and bytes of all tensors in the safetensors files, in the order of their
    names, so that it does not depend on the division into files. A folder without safetensors files has the digest of
    its files `*.bin`. Every byte is read once. Raises ValueError if there are no such files.
    """
    files = _files(model)
    total = xxhash.xxh3_128()
    with ThreadPoolExecutor(THREADS) as pool:
        tensors = sorted(part for path in files for part in _tensors(path))
        for (name, head, *_), digest in zip(tensors, pool.map(_hash, tensors), strict=True):
            total.update(f"{name} {head} {digest}\n".encode())
    return total.hexdigest()


def _files(model: str) -> list[Path]:
    folder = Path(model)
    index = _path(model, _INDEX)
    if index is not None:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        found = [_path(model, name) for name in names]
    else:
        found = [_path(model, _ONE)]
    files = [path for path in found if path is not None] or sorted(folder.glob("*.bin"))
    if not files:
        raise ValueError(f"model.path: {model!r} has no weight files (*.safetensors, *.bin)")
    return files


def _path(model: str, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _tensors(path: Path) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield name, dtype with shape, path, and the first and last byte of each tensor of a file."""
    if path.suffix != ".safetensors":
        yield path.name, "file", str(path), 0, path.stat().st_size
        return
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, f"{entry['dtype']} {entry['shape']}", str(path), 8 + length + start, 8 + length + end


def _hash(tensor: tuple[str, str, str, int, int]) -> str:
    *_, path, start, end = tensor
    if start == end:
        return xxhash.xxh3_128().hexdigest()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with memoryview(data) as view, view[start:end] as part:
            return xxhash.xxh3_128_hexdigest(part)
