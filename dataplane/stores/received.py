"""The check of every part that reached this process over a wire."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block_store import Want
from ..errors import IntegrityError


def received_part(view: Any, want: Want, part: int, peer: str) -> np.ndarray:
    """`view`, read-only. Raises IntegrityError unless it is uint8 `[part_bytes[part]]` of the wanted block."""
    expected = want.block.layout.part_bytes[part]
    if not isinstance(view, np.ndarray) or view.dtype != np.uint8 or view.shape != (expected,):
        found = f"{view.dtype} {list(view.shape)}" if isinstance(view, np.ndarray) else type(view).__name__
        text = f"block {want.block.block_id} part {part}: store returned {found}, expected uint8 [{expected}]"
        raise IntegrityError(text, op="get", peer=peer)
    view.flags.writeable = False
    return view
