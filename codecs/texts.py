"""Packs columns of text compactly: the distinct strings, and for each row the number of its string."""

from __future__ import annotations

import msgspec
import numpy as np

_WIDTHS = (1, 2, 4)
_PACKED = msgspec.msgpack.Decoder(tuple[list[str], int, bytes])


def is_text(column: np.ndarray) -> bool:
    """Return whether `column` is an array `[N]` of dtype object that holds only str."""
    return column.dtype.kind == "O" and column.ndim == 1 and set(map(type, column.tolist())) <= {str}


def pack_texts(column: np.ndarray) -> bytes:
    """Encode an array `[N]` of dtype object that holds only str, which `unpack_texts` decodes. If strings repeat, a row
    takes 1 to 4 bytes beside the distinct strings."""
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(text, len(numbers)) for text in column.tolist()]
    width = next(width for width in _WIDTHS if len(numbers) <= 1 << (8 * width))
    repeats = len(numbers) < len(rows)
    return msgspec.msgpack.encode((list(numbers), width, np.array(rows, f"<u{width}").tobytes() if repeats else b""))


def unpack_texts(data: bytes | memoryview) -> np.ndarray:
    """Decode what `pack_texts` encoded, as an array `[N]` of dtype object. Raises ValueError, TypeError or IndexError
    for other bytes."""
    texts, width, rows = _PACKED.decode(data)
    column = np.array(texts, dtype=object)
    return column[np.frombuffer(rows, f"<u{width}")] if rows else column
